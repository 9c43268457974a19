//! Limits how often changes are committed.
//!
//! Owns: [`Pace`]. In: commits and the size of the tables. Out: pauses. Pure.
//!
//! Every commit interrupts programs that read nftables in this network namespace: `nft list ruleset` starts again when
//! the ruleset has changed. So commits of a lasting burst are limited, and pause from time to time for long enough that
//! a reader of the whole ruleset can finish. A single change never waits.
//!
//! A commit may take longer than changes take to arrive, as with iptables at very many Services. So one that takes longer
//! than the period is followed by a pause: what has arrived meanwhile is received in it, and committed together.

use std::time::{Duration, Instant};

/// Commits without a pause after a quiet time.
const BURST: u32 = 10;

/// Time in which `nft list ruleset` (1.0.6) reads an element, with a margin: 13 microseconds of CPU time were measured
/// for each of 110,000.
const READ_PER_ELEMENT: Duration = Duration::from_micros(20);

/// Maximum pause for readers.
const MAX_READ_PAUSE: Duration = Duration::from_secs(5);

/// Maximum duration of a burst without a pause for readers.
const MAX_BUSY: Duration = Duration::from_secs(60);

#[derive(Debug)]
pub(crate) struct Pace {
    /// Minimum time between commits of a lasting burst; 0: no limit.
    period: Duration,
    /// When the allowance of commits is full again.
    full_at: Option<Instant>,
    /// The last commit, and the first one since the last pause for readers.
    last: Option<(Instant, Instant)>,
}

impl Pace {
    pub(crate) fn new(period: Duration) -> Self {
        Self { period, full_at: None, last: None }
    }

    /// Records a commit that ends now. Returns the pause until the next one. `elements`: of all our tables.
    pub(crate) fn committed(&mut self, now: Instant, took: Duration, elements: usize) -> Duration {
        if self.period.is_zero() {
            return Duration::ZERO;
        }
        let full_at = self.full_at.map_or(now, |at| at.max(now)) + self.period;
        self.full_at = Some(full_at);
        let allowance = self.period.saturating_mul(BURST);
        let pause = full_at.saturating_duration_since(now).saturating_sub(allowance);
        let to_receive = if took >= self.period { self.period } else { Duration::ZERO };
        pause.max(to_receive).max(self.pause_for_readers(now, elements))
    }

    fn pause_for_readers(&mut self, now: Instant, elements: usize) -> Duration {
        let needed = read_time(elements);
        let busy_since = match self.last {
            Some((last, since)) if now.saturating_duration_since(last) < needed => since,
            _ => now,
        };
        self.last = Some((now, busy_since));
        if now.saturating_duration_since(busy_since) < MAX_BUSY { Duration::ZERO } else { needed }
    }
}

fn read_time(elements: usize) -> Duration {
    READ_PER_ELEMENT.saturating_mul(u32::try_from(elements).unwrap_or(u32::MAX)).min(MAX_READ_PAUSE)
}

#[cfg(test)]
mod tests {
    use super::*;

    const PERIOD: Duration = Duration::from_millis(100);

    /// Changes at a constant rate. Returns when each commit was made, and the longest wait of the change before it.
    fn commits(
        pace: &mut Pace,
        begun: Instant,
        every: Duration,
        lasting: Duration,
        elements: usize,
    ) -> Vec<Duration> {
        let (mut now, mut all) = (Duration::ZERO, Vec::new());
        while now < lasting {
            all.push(now);
            let pause = pace.committed(begun + now, Duration::ZERO, elements);
            now += pause.max(every);
        }
        all
    }

    #[test]
    fn a_long_commit_is_followed_by_a_pause() {
        let begun = Instant::now();
        let pause = |took, period| Pace::new(period).committed(begun, took, 10);
        for (took, paused) in [(PERIOD / 2, Duration::ZERO), (PERIOD, PERIOD), (10 * PERIOD, PERIOD)] {
            assert_eq!(pause(took, PERIOD), paused, "{took:?}");
        }
        assert_eq!(pause(PERIOD, Duration::ZERO), Duration::ZERO, "there is no limit");
    }

    #[test]
    fn p14_a_single_change_never_waits() {
        let begun = Instant::now();
        for every in [PERIOD, PERIOD * 2, Duration::from_secs(1), Duration::from_secs(60)] {
            let mut pace = Pace::new(PERIOD);
            for number in 0..400 {
                let pause = pace.committed(begun + every * number, Duration::ZERO, 100);
                assert_eq!(pause, Duration::ZERO, "change {number}, one every {every:?}");
            }
        }
    }

    #[test]
    fn p14_a_burst_commits_at_once_and_then_at_the_configured_rate() {
        let begun = Instant::now();
        let ms = Duration::from_millis;
        for (period, in_first_second, in_ten_seconds) in [
            (PERIOD, 18..=21, 105..=112),
            (ms(1_000), 10..=12, 18..=21),
            (Duration::ZERO, 100..=100, 1_000..=1_000),
        ] {
            let all = commits(&mut Pace::new(period), begun, ms(10), ms(10_000), 1_000);
            let first = all.iter().filter(|at| **at < ms(1_000)).count();
            assert!(in_first_second.contains(&first), "{period:?}: {first} in the first second");
            assert!(in_ten_seconds.contains(&all.len()), "{period:?}: {} in ten seconds", all.len());
        }
        // A quiet time resets the allowance.
        let mut pace = Pace::new(PERIOD);
        let first = commits(&mut pace, begun, ms(10), ms(3_000), 1_000);
        let again = commits(&mut pace, begun + ms(5_000), ms(10), ms(3_000), 1_000);
        assert_eq!(first, again);
    }

    #[test]
    fn p14_an_endless_burst_pauses_for_readers() {
        let begun = Instant::now();
        let longest = |every: Duration, elements: usize| {
            let all = commits(&mut Pace::new(PERIOD), begun, every, Duration::from_secs(200), elements);
            let pauses = all.windows(2).map(|pair| pair[1] - pair[0]);
            let long = pauses.clone().filter(|pause| *pause >= read_time(elements)).count();
            (pauses.max().unwrap(), long)
        };
        let ms = Duration::from_millis;
        // 10,000 Services of 10 endpoints.
        assert_eq!(longest(ms(10), 110_000), (ms(2_200), 3));
        assert_eq!(longest(ms(10), 10_000_000).0, MAX_READ_PAUSE);
        // For a small table, the usual pauses are long enough; so are those between rare changes.
        assert_eq!(longest(ms(10), 5_000).0, PERIOD);
        assert_eq!(longest(ms(3_000), 110_000).0, ms(3_000));
    }
}
