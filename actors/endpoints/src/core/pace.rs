//! How often revisions are made: each is a sync of the disk.
//!
//! Owns: [`Pace`]. In: revisions. Out: the earliest time of the next one. Pure.
//!
//! `keelson proxy` limits its commits in the same way (docs/decisions/0032, 0044).

use std::time::Duration;

/// Revisions that may follow each other without delay after a pause.
const BURST: u32 = 10;

/// The earliest time of the next revision. Times are monotonic.
#[derive(Debug)]
pub(super) struct Pace {
    /// Minimum interval during continuous changes; 0: no limit.
    period: Duration,
    /// When the full burst is available again.
    full_at: Duration,
}

impl Pace {
    pub(super) fn new(period: Duration) -> Self {
        Self { period, full_at: Duration::ZERO }
    }

    pub(super) fn made(&mut self, at: Duration) {
        self.full_at = self.full_at.max(at) + self.period;
    }

    /// A time in the past means at once.
    pub(super) fn next(&self) -> Duration {
        self.full_at.saturating_sub(self.period.saturating_mul(BURST))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PERIOD: Duration = Duration::from_millis(100);

    /// Times of the revisions if changes come at a constant rate for `lasting`.
    fn made(pace: &mut Pace, begin: Duration, every: Duration, lasting: Duration) -> Vec<Duration> {
        let (mut now, mut all) = (begin, Vec::new());
        while now < begin + lasting {
            let at = now.max(pace.next());
            pace.made(at);
            all.push(at);
            // The next change.
            now = now.max(at) + every;
        }
        all
    }

    #[test]
    fn e19_a_change_that_comes_alone_never_waits() {
        for every in [PERIOD, PERIOD * 2, Duration::from_secs(60)] {
            let mut pace = Pace::new(PERIOD);
            for number in 1..400 {
                let at = every * number;
                assert!(pace.next() <= at, "change {number}, one every {every:?}");
                pace.made(at);
            }
        }
    }

    #[test]
    fn e19_the_first_revisions_of_a_burst_are_made_at_once_and_the_others_at_the_set_rate() {
        let ms = Duration::from_millis;
        for (period, every, in_first_second, in_ten_seconds) in [
            // 200 changes a second are 10 revisions a second.
            (PERIOD, ms(5), 18..=21, 105..=112),
            (ms(1_000), ms(5), 10..=12, 18..=21),
            (ms(10), ms(5), 100..=112, 1_000..=1_012),
            (Duration::ZERO, ms(5), 200..=200, 2_000..=2_000),
        ] {
            let mut pace = Pace::new(period);
            let begin = Duration::from_secs(1);
            let all = made(&mut pace, begin, every, ms(10_000));
            let first = all.iter().filter(|at| **at < begin + ms(1_000)).count();
            assert!(in_first_second.contains(&first), "{period:?}: {first} in the first second");
            assert!(in_ten_seconds.contains(&all.len()), "{period:?}: {} in ten seconds", all.len());
            // After a pause, the burst is available again.
            let later = Duration::from_secs(60);
            let again = made(&mut pace, later, every, ms(10_000));
            let shifted: Vec<_> = again.iter().map(|at| *at - (later - begin)).collect();
            assert_eq!(shifted, all, "{period:?}");
        }
    }
}
