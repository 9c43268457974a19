//! Owns: the report of a run. In: counts, observations and violations. Out: text and JSON.

use crate::Args;
use crate::images::audit::Sent;
use crate::images::monitor::Observed;
use crate::images::supply::Supply;
use crate::report::Finished;
use crate::timeline::{Timeline, Violation};
use anyhow::Result;
use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt;

#[derive(Debug, Serialize)]
pub(crate) struct Report {
    seed: u64,
    minutes: f64,
    runtime: String,
    limit: usize,
    images_arrived: u64,
    images_missing: usize,
    wanted_bytes: u64,
    counts: BTreeMap<String, u64>,
    sent: Sent,
    agent: Observed,
    violations: Vec<Violation>,
    timeline: String,
}

impl Report {
    pub(crate) fn new(
        args: &Args,
        seed: u64,
        timeline: &Timeline,
        supply: &Supply,
        agent: Observed,
        sent: Sent,
    ) -> Self {
        Self {
            seed,
            minutes: args.minutes,
            runtime: format!("{:?}", args.runtime),
            limit: args.limit,
            images_arrived: supply.arrived_count(),
            images_missing: supply.missing().len(),
            wanted_bytes: supply.wanted_bytes(),
            counts: timeline.counts(),
            sent,
            agent,
            violations: timeline.listed_violations(),
            timeline: args.out.join("timeline.jsonl").display().to_string(),
        }
    }

    fn is_clean(&self) -> bool {
        self.violations.is_empty()
    }

    pub(crate) fn finish(&self) -> Result<Finished> {
        Finished::new("Soak of image pulls", self, self.to_string())
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const MIB: f64 = 1024.0 * 1024.0;
        let (sent, agent) = (&self.sent, &self.agent);
        writeln!(f, "seed {}, {} minutes, {}, limit {}", self.seed, self.minutes, self.runtime, self.limit)?;
        writeln!(f, "images: {} arrived, {} missing", self.images_arrived, self.images_missing)?;
        writeln!(
            f,
            "layers: {} fetched, {:.1} MiB wanted, {:.1} MiB sent; {} interruptions cost {:.1} MiB; \
             {} not judged because a disk was broken",
            sent.layers,
            self.wanted_bytes as f64 / MIB,
            sent.layer_bytes as f64 / MIB,
            sent.interruptions,
            sent.repeated_bytes as f64 / MIB,
            sent.layers_not_judged
        )?;
        writeln!(
            f,
            "pulls at once: {} at most, {} brief overlaps, the longest {:.2} s",
            sent.most_pulls_at_once, sent.brief_overlaps, sent.longest_overlap_seconds
        )?;
        writeln!(
            f,
            "pass-through: {} calls, {} failed while agent or runtime were down, the longest took {:.2} s",
            agent.calls, agent.calls_failed_in_windows, agent.longest_call_seconds
        )?;
        writeln!(
            f,
            "agent: {} lives, the longest {} s; memory {:.1} MiB at most, {:.1} MiB at rest; \
             open files {} at most, {} at rest",
            agent.lives,
            agent.longest_life_seconds,
            agent.max_memory_mib,
            agent.at_rest.memory,
            agent.max_open_files,
            agent.at_rest.files
        )?;
        for (what, count) in &self.counts {
            writeln!(f, "{count:>8}  {what}")?;
        }
        for violation in &self.violations {
            writeln!(
                f,
                "VIOLATION after {:.1} s: {}: {}",
                violation.at_seconds, violation.invariant, violation.what
            )?;
        }
        let verdict = if self.is_clean() { "no violation" } else { "violations; see" };
        write!(f, "{verdict} {}", self.timeline)
    }
}
