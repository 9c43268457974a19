//! Owns: when heartbeats were sent and confirmed, and whether they were on time. In: the end of each request. Out:
//! [`Figures`] of a window.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::super::quantile;

/// The longest time between two heartbeats of a node that is on time: the interval with the kubelet's jitter of 4 %,
/// and a second for the request and a busy machine.
pub(super) const LIMIT: Duration = Duration::from_millis(10_000 * 104 / 100 + 1_000);

#[derive(Clone, Copy, Debug)]
struct Beat {
    node: usize,
    asked: Instant,
    ended: Instant,
    succeeded: bool,
}

#[derive(Debug)]
pub(super) struct Beats {
    nodes: usize,
    all: Mutex<Vec<Beat>>,
}

#[derive(Debug, Default)]
pub(super) struct Figures {
    pub(super) confirmed: usize,
    pub(super) failed: usize,
    /// Share of due heartbeats that came within [`LIMIT`] of the node's last one.
    pub(super) on_time: f64,
    /// 99th percentile of the seconds between two heartbeats of a node.
    pub(super) gap_p99: f64,
    /// Latency of confirmed requests: median and 99th percentile.
    pub(super) latency: (Duration, Duration),
}

impl Beats {
    pub(super) fn new(nodes: usize) -> Self {
        Self { nodes, all: Mutex::default() }
    }

    fn all(&self) -> MutexGuard<'_, Vec<Beat>> {
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records a request of `node` that has just ended.
    pub(super) fn note(&self, node: usize, asked: Instant, succeeded: bool) {
        self.all().push(Beat { node, asked, ended: Instant::now(), succeeded });
    }

    /// Number of confirmed heartbeats of the node with the fewest.
    pub(super) fn min_count(&self) -> usize {
        let mut counts = vec![0; self.nodes];
        self.all().iter().filter(|beat| beat.succeeded).for_each(|beat| counts[beat.node] += 1);
        counts.into_iter().min().unwrap_or(0)
    }

    pub(super) fn between(&self, from: Instant, to: Instant) -> Figures {
        let all = self.all();
        let ended: Vec<&Beat> = all.iter().filter(|beat| from < beat.ended && beat.ended <= to).collect();
        let mut latencies: Vec<Duration> =
            ended.iter().filter(|beat| beat.succeeded).map(|beat| beat.ended - beat.asked).collect();
        latencies.sort_unstable();
        let (gaps, lost) = gaps(&all, self.nodes, from, to);
        let on_time = gaps.iter().filter(|gap| **gap <= LIMIT).count();
        let median = |q| quantile(&latencies, q).unwrap_or_default();
        Figures {
            confirmed: latencies.len(),
            failed: ended.len() - latencies.len(),
            on_time: on_time as f64 / (gaps.len() + lost).max(1) as f64,
            gap_p99: quantile(&gaps, 0.99).unwrap_or_default().as_secs_f64(),
            latency: (median(0.5), median(0.99)),
        }
    }
}

/// The sorted times between each node's heartbeats that ended in the window, and the number of nodes that are overdue
/// at its end. A node's first heartbeat ends no gap.
fn gaps(all: &[Beat], nodes: usize, from: Instant, to: Instant) -> (Vec<Duration>, usize) {
    let mut last: Vec<Option<Instant>> = vec![None; nodes];
    let mut gaps = Vec::new();
    for beat in all.iter().filter(|beat| beat.succeeded && beat.ended <= to) {
        let before = last[beat.node].replace(beat.ended);
        if let Some(before) = before
            && from < beat.ended
        {
            gaps.push(beat.ended - before);
        }
    }
    gaps.sort_unstable();
    let overdue = |last: &Option<Instant>| last.is_none_or(|last| to - last > LIMIT);
    (gaps, last.iter().filter(|last| overdue(last)).count())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_heartbeat_is_on_time_relative_to_the_previous_one() {
        let start = Instant::now();
        let at = |seconds: u64| start + Duration::from_secs(seconds);
        let beat = |node, ended, succeeded| Beat {
            node,
            asked: at(ended) - Duration::from_millis(5),
            ended: at(ended),
            succeeded,
        };
        let beats = Beats::new(3);
        // The third node stops, and failed requests are no heartbeats.
        beats.all().extend([
            beat(0, 5, true),
            beat(1, 6, true),
            beat(2, 7, true),
            beat(0, 15, true),
            beat(1, 26, true),
            beat(2, 27, false),
            beat(0, 26, true),
        ]);
        assert_eq!(beats.min_count(), 1);
        let figures = beats.between(at(10), at(30));
        assert_eq!((figures.confirmed, figures.failed), (3, 1));
        // 10 s and 11 s are on time; 20 s and the silent node are not.
        assert!((figures.on_time - 0.5).abs() < 1e-9, "{figures:?}");
        assert!((figures.gap_p99 - 20.0).abs() < 1e-9, "{figures:?}");
        assert_eq!(figures.latency.0, Duration::from_millis(5));
    }
}
