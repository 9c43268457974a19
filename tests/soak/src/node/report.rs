//! Owns: the report of a run of the whole node. In: what was seen. Out: text and JSON, and a violation if what the processes use at rest
//! has grown from one quiet phase to the others.

use super::checks::Rest;
use super::watch::Watched;
use crate::Args;
use crate::lives::{Growth, Life, Usage, median, too_much};
use crate::report::Finished;
use crate::timeline::{Timeline, Violation};
use anyhow::Result;
use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt;

/// Quiet phases that are compared: fewer are too few for a median.
const LEAST_RESTS: usize = 9;
const GROWTH: Growth = Growth { shortest: LEAST_RESTS, factor: 1.25, least: 6.0 };

/// Name, and the value.
type RestPart = (&'static str, fn(&Rest) -> f64);

#[derive(Debug, Serialize)]
pub(crate) struct Report {
    seed: u64,
    minutes: f64,
    with_former_version: bool,
    writes: usize,
    counts: BTreeMap<String, u64>,
    watched: Watched,
    rests: Vec<Rest>,
    violations: Vec<Violation>,
    timeline: String,
}

impl Report {
    pub(crate) fn new(
        args: &Args,
        seed: u64,
        timeline: &Timeline,
        watched: Watched,
        rests: Vec<Rest>,
        writes: usize,
        with_former_version: bool,
    ) -> Self {
        Self {
            seed,
            minutes: args.minutes,
            with_former_version,
            writes,
            counts: timeline.counts(),
            watched,
            rests,
            violations: Vec::new(),
            timeline: args.out.join("timeline.jsonl").display().to_string(),
        }
    }

    /// Compares the quiet phases, over all lives: medians of the second third and of the last.
    pub(crate) fn check_rests(&self, timeline: &Timeline) {
        if self.rests.len() < LEAST_RESTS {
            return;
        }
        let parts: [RestPart; 7] = [
            ("memory of the agent (MiB)", |rest| rest.agent.memory),
            ("open files of the agent", |rest| rest.agent.files),
            ("threads of the agent", |rest| rest.agent.threads),
            ("memory of the proxy (MiB)", |rest| rest.proxy.memory),
            ("open files of the proxy", |rest| rest.proxy.files),
            ("threads of the proxy", |rest| rest.proxy.threads),
            ("state on disk (MiB)", |rest| rest.state_mib),
        ];
        let third = self.rests.len() / 3;
        for (part, value) in parts {
            let of = |rests: &[Rest]| median(rests.iter().map(value).collect()).unwrap_or_default();
            let (middle, last) = (of(&self.rests[third..2 * third]), of(&self.rests[2 * third..]));
            if let Some(growth) = too_much(middle, last, GROWTH) {
                timeline.violation("what is used at rest stays flat", &format!("{part}: {growth}"));
            }
        }
    }

    pub(crate) fn with_violations(mut self, timeline: &Timeline) -> Self {
        self.violations = timeline.listed_violations();
        self.counts = timeline.counts();
        self
    }

    pub(crate) fn finish(&self) -> Result<Finished> {
        Finished::new("Soak of a whole node", self, self.to_string())
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let former = if self.with_former_version { "with" } else { "without" };
        writeln!(f, "seed {}, {} minutes, {former} the former version", self.seed, self.minutes)?;
        let watched = &self.watched;
        for (name, lives) in
            [("agent", &watched.agent), ("node agent", &watched.node_agent), ("proxy", &watched.proxy)]
        {
            write_lives(f, name, lives)?;
        }
        write_rests(f, &self.rests)?;
        let [kubelet, agent] = watched.oldest_lease_seconds;
        writeln!(
            f,
            "Leases while the API server served: {kubelet:.1} s old at most (kubelet), {agent:.1} s (node agent)"
        )?;
        writeln!(f, "{:>9} {:>8} {:>8} {:>10}  probe", "requests", "failed", "excused", "longest")?;
        for probe in &watched.probes {
            let (requests, failed, excused) = (probe.requests, probe.failed, probe.excused);
            writeln!(
                f,
                "{requests:>9} {failed:>8} {excused:>8} {:>8.2} s  {}",
                probe.longest_seconds, probe.name
            )?;
        }
        writeln!(f, "{:>8}  writes of Services and slices, without those of bursts", self.writes)?;
        for (what, count) in &self.counts {
            writeln!(f, "{count:>8}  {what}")?;
        }
        for violation in &self.violations {
            let (at, invariant, what) = (violation.at_seconds, &violation.invariant, &violation.what);
            writeln!(f, "VIOLATION after {at:.1} s: {invariant}: {what}")?;
        }
        let verdict = if self.violations.is_empty() { "no violation" } else { "violations; see" };
        write!(f, "{verdict} {}", self.timeline)
    }
}

fn write_usage(f: &mut fmt::Formatter<'_>, usage: &Usage) -> fmt::Result {
    write!(
        f,
        "{:.1} MiB ({:.1} anonymous), {:.0} files, {:.0} threads",
        usage.memory, usage.anonymous, usage.files, usage.threads
    )
}

fn write_lives(f: &mut fmt::Formatter<'_>, name: &str, lives: &[Life]) -> fmt::Result {
    let max = |of: fn(&Usage) -> f64| lives.iter().map(|life| of(&life.max)).fold(0.0, f64::max);
    let most = Usage {
        memory: max(|usage| usage.memory),
        anonymous: max(|usage| usage.anonymous),
        files: max(|usage| usage.files),
        threads: max(|usage| usage.threads),
    };
    write!(f, "{name}: {} lives; at most ", lives.len())?;
    write_usage(f, &most)?;
    writeln!(f)?;
    let longest = lives.iter().filter(|life| life.medians.is_some()).max_by_key(|life| life.samples);
    if let Some(life) = longest
        && let Some((middle, last)) = &life.medians
    {
        write!(f, "  the longest life, {} min: middle third ", life.samples / 30)?;
        write_usage(f, middle)?;
        write!(f, "; last third ")?;
        write_usage(f, last)?;
        writeln!(f)?;
    }
    Ok(())
}

fn write_rests(f: &mut fmt::Formatter<'_>, rests: &[Rest]) -> fmt::Result {
    let (Some(first), Some(last)) = (rests.first(), rests.last()) else { return Ok(()) };
    let longest = rests.iter().map(|rest| rest.settled_after_seconds).fold(0.0, f64::max);
    writeln!(f, "{} quiet phases; pods were ready after {longest:.0} s at most", rests.len())?;
    for (name, rest) in [("first", first), ("last", last)] {
        write!(f, "  at rest, {name}: {} Services with {} endpoints; agent ", rest.services, rest.endpoints)?;
        write_usage(f, &rest.agent)?;
        write!(f, ", state {:.1} MiB; proxy ", rest.state_mib)?;
        write_usage(f, &rest.proxy)?;
        writeln!(f)?;
    }
    Ok(())
}
