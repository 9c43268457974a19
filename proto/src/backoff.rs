//! Pauses between attempts.

use std::time::Duration;

/// A pause that doubles with each failure. The caller adds jitter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Backoff {
    /// The pause after the first failure.
    pub first: Duration,
    /// The longest pause.
    pub longest: Duration,
}

impl Backoff {
    /// The pause after this number of failures in a row, from 1.
    #[must_use]
    pub fn pause(self, failures: u32) -> Duration {
        let factor = 1_u32.checked_shl(failures.saturating_sub(1)).unwrap_or(u32::MAX);
        self.first.saturating_mul(factor).min(self.longest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_the_longest() {
        let backoff = Backoff { first: Duration::from_millis(100), longest: Duration::from_secs(3) };
        let pauses = [0, 1, 2, 3, 6, 7, 33, u32::MAX].map(|failures| backoff.pause(failures).as_millis());
        assert_eq!(pauses, [100, 100, 200, 400, 3000, 3000, 3000, 3000]);
    }
}
