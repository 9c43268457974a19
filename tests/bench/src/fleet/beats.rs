//! Owns: when heartbeats were asked for and confirmed, and whether they came on time. In: the end of each request.
//! Out: [`Figures`] of a window.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::super::quantile;

/// The longest that may lie between two heartbeats of a node: the interval with the kubelet's jitter of 4 %, and a
/// second for the request and a busy machine.
pub(super) const LIMIT: Duration = Duration::from_millis(10_000 * 104 / 100 + 1_000);

/// One request that was a heartbeat.
#[derive(Clone, Copy, Debug)]
struct Beat {
    node: usize,
    asked: Instant,
    ended: Instant,
    well: bool,
}

/// All of them.
#[derive(Debug)]
pub(super) struct Beats {
    nodes: usize,
    all: Mutex<Vec<Beat>>,
}

/// What a window of time showed.
#[derive(Debug, Default)]
pub(super) struct Figures {
    /// Heartbeats that the server confirmed.
    pub(super) confirmed: usize,
    /// Requests that failed.
    pub(super) failed: usize,
    /// Heartbeats that came within [`LIMIT`] of the node's last one, of all that were due.
    pub(super) on_time: f64,
    /// Seconds between one and the next of a node, 99 of 100 being below.
    pub(super) gap_p99: f64,
    /// How long a confirmed request took: half of them less, 99 of 100 less.
    pub(super) latency: (Duration, Duration),
}

impl Beats {
    pub(super) fn new(nodes: usize) -> Self {
        Self { nodes, all: Mutex::default() }
    }

    fn all(&self) -> MutexGuard<'_, Vec<Beat>> {
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes a request of `node` that has just ended.
    pub(super) fn note(&self, node: usize, asked: Instant, well: bool) {
        self.all().push(Beat { node, asked, ended: Instant::now(), well });
    }

    /// How many heartbeats the node with the fewest has had confirmed.
    pub(super) fn fewest(&self) -> usize {
        let mut counts = vec![0; self.nodes];
        self.all().iter().filter(|beat| beat.well).for_each(|beat| counts[beat.node] += 1);
        counts.into_iter().min().unwrap_or(0)
    }

    /// What happened between two moments.
    pub(super) fn between(&self, from: Instant, to: Instant) -> Figures {
        let all = self.all();
        let ended: Vec<&Beat> = all.iter().filter(|beat| from < beat.ended && beat.ended <= to).collect();
        let mut latencies: Vec<Duration> =
            ended.iter().filter(|beat| beat.well).map(|beat| beat.ended - beat.asked).collect();
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

/// The times between each node's heartbeats that ended in the window, sorted; and how many nodes are overdue at its
/// end. A node's first heartbeat ends no gap.
fn gaps(all: &[Beat], nodes: usize, from: Instant, to: Instant) -> (Vec<Duration>, usize) {
    let mut last: Vec<Option<Instant>> = vec![None; nodes];
    let mut gaps = Vec::new();
    for beat in all.iter().filter(|beat| beat.well && beat.ended <= to) {
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
    fn a_heartbeat_is_on_time_by_the_one_before_it() {
        let start = Instant::now();
        let at = |seconds: u64| start + Duration::from_secs(seconds);
        let beat = |node, ended, well| Beat {
            node,
            asked: at(ended) - Duration::from_millis(5),
            ended: at(ended),
            well,
        };
        let beats = Beats::new(3);
        // The third node falls silent, and what fails is no heartbeat.
        beats.all().extend([
            beat(0, 5, true),
            beat(1, 6, true),
            beat(2, 7, true),
            beat(0, 15, true),
            beat(1, 26, true),
            beat(2, 27, false),
            beat(0, 26, true),
        ]);
        assert_eq!(beats.fewest(), 1);
        let figures = beats.between(at(10), at(30));
        assert_eq!((figures.confirmed, figures.failed), (3, 1));
        // 10 s and 11 s are, 20 s is not, nor is the silent one.
        assert!((figures.on_time - 0.5).abs() < 1e-9, "{figures:?}");
        assert!((figures.gap_p99 - 20.0).abs() < 1e-9, "{figures:?}");
        assert_eq!(figures.latency.0, Duration::from_millis(5));
    }
}
