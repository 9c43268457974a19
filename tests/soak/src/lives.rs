//! Resource usage of processes over time.
//!
//! Owns: the samples of each process. In: samples of a process. Out: each of its lives, series in the timeline, and violations if
//! a life grows.

use crate::timeline::Timeline;
use serde::Serialize;
use std::fs;

/// What a process uses at a moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub(crate) struct Usage {
    /// Resident memory in MiB.
    pub(crate) memory: f64,
    /// Resident memory that no file backs, in MiB.
    pub(crate) anonymous: f64,
    pub(crate) files: f64,
    pub(crate) threads: f64,
}

/// Name in the series, and the value.
type Part = (&'static str, fn(&Usage) -> f64);

const PARTS: [Part; 4] = [
    ("memory (MiB)", |usage| usage.memory),
    ("anonymous memory (MiB)", |usage| usage.anonymous),
    ("open files", |usage| usage.files),
    ("threads", |usage| usage.threads),
];

impl Usage {
    /// None if there is no such process.
    pub(crate) fn of(pid: u32) -> Option<Self> {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
        let value = |name: &str| -> Option<f64> {
            let line = status.lines().find_map(|line| line.strip_prefix(name))?;
            line.split_whitespace().next()?.parse().ok()
        };
        let files = fs::read_dir(format!("/proc/{pid}/fd")).ok()?.count();
        Some(Self {
            memory: value("VmRSS:")? / 1024.0,
            anonymous: value("RssAnon:")? / 1024.0,
            files: files as f64,
            threads: value("Threads:")?,
        })
    }
}

/// What is too much growth: from the middle third of a life to its last third.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Growth {
    /// Lives shorter than this number of samples are not judged.
    pub(crate) shortest: usize,
    pub(crate) factor: f64,
    /// Growth by less than this is noise: MiB, files, threads.
    pub(crate) least: f64,
}

/// One life: one process.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Life {
    pid: u32,
    pub(crate) samples: usize,
    pub(crate) max: Usage,
    /// Medians of the middle and of the last third of a life that is long enough.
    pub(crate) medians: Option<(Usage, Usage)>,
    #[serde(skip)]
    all: Vec<Usage>,
}

impl Life {
    fn new(pid: u32) -> Self {
        Self { pid, samples: 0, max: Usage::default(), medians: None, all: Vec::new() }
    }

    fn add(&mut self, usage: Usage) {
        self.samples += 1;
        self.max.memory = self.max.memory.max(usage.memory);
        self.max.anonymous = self.max.anonymous.max(usage.anonymous);
        self.max.files = self.max.files.max(usage.files);
        self.max.threads = self.max.threads.max(usage.threads);
        self.all.push(usage);
    }
}

/// All lives of a program.
#[derive(Debug)]
pub(crate) struct Lives {
    /// The program, as in the series.
    name: &'static str,
    all: Vec<Life>,
}

impl Lives {
    pub(crate) fn new(name: &'static str) -> Self {
        Self { name, all: Vec::new() }
    }

    pub(crate) fn name(&self) -> &'static str {
        self.name
    }

    /// Takes a sample of the process. None if it does not run.
    pub(crate) fn sample(&mut self, pid: Option<u32>, timeline: &Timeline) -> Option<Usage> {
        let (pid, usage) = pid.and_then(|pid| Some((pid, Usage::of(pid)?)))?;
        if self.all.last().is_none_or(|life| life.pid != pid) {
            self.all.push(Life::new(pid));
        }
        self.all.last_mut()?.add(usage);
        for (part, value) in PARTS {
            timeline.sample(&format!("{}: {part}", self.name), value(&usage));
        }
        Some(usage)
    }

    /// The lives; each that has grown is a violation.
    pub(crate) fn finish(mut self, limit: Growth, timeline: &Timeline) -> Vec<Life> {
        for life in &mut self.all {
            if life.all.len() < limit.shortest {
                continue;
            }
            life.medians = medians(&life.all);
            let Some((middle, last)) = life.medians else { continue };
            for (part, value) in PARTS {
                if let Some(growth) = too_much(value(&middle), value(&last), limit) {
                    let what =
                        format!("{}: {part}: {growth} of a life of {} samples", self.name, life.samples);
                    timeline.violation("memory, open files and threads stay flat", &what);
                }
            }
        }
        self.all
    }
}

/// What to report if the value has grown too much.
pub(crate) fn too_much(middle: f64, last: f64, limit: Growth) -> Option<String> {
    let grown = last > middle * limit.factor && last - middle > limit.least;
    grown.then(|| format!("{middle:.1} in the middle third, {last:.1} in the last"))
}

/// The medians of the middle and of the last third; the first third warms up.
fn medians(all: &[Usage]) -> Option<(Usage, Usage)> {
    let third = all.len() / 3;
    let of = |part: &[Usage]| {
        let by = |value: fn(&Usage) -> f64| median(part.iter().map(value).collect());
        Some(Usage {
            memory: by(|usage| usage.memory)?,
            anonymous: by(|usage| usage.anonymous)?,
            files: by(|usage| usage.files)?,
            threads: by(|usage| usage.threads)?,
        })
    };
    Some((of(all.get(third..2 * third)?)?, of(all.get(2 * third..)?)?))
}

pub(crate) fn median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Growth = Growth { shortest: 120, factor: 1.5, least: 4.0 };

    fn growth(memory: impl Iterator<Item = f64>) -> Option<String> {
        let all: Vec<_> = memory.map(|memory| Usage { memory, ..Usage::default() }).collect();
        let (middle, last) = medians(&all)?;
        too_much(middle.memory, last.memory, LIMIT)
    }

    #[test]
    fn growth_compares_the_last_third_of_a_life_with_the_middle_one() {
        assert_eq!(growth((0..300).map(|_| 20.0)), None);
        assert_eq!(
            growth((0..300).map(|n| if n < 90 { 1.0 } else { 20.0 })),
            None,
            "the first third warms up"
        );
        assert_eq!(growth((0..300).map(|n| 1.0 + f64::from(n) / 100.0)), None, "a few MiB are noise");
        assert!(growth((0..300).map(|n| 10.0 + f64::from(n))).is_some(), "a leak");
    }

    #[test]
    fn this_process_uses_something() {
        let usage = Usage::of(std::process::id()).unwrap();
        assert!(usage.memory >= usage.anonymous && usage.anonymous > 0.0, "{usage:?}");
        assert!(usage.files >= 3.0 && usage.threads >= 1.0, "{usage:?}");
        assert_eq!(Usage::of(u32::MAX), None);
    }
}
