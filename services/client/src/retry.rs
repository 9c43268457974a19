//! Retries after errors.
//!
//! Owns: [`ErrorLog`], which counts errors, limits the rate of their log lines, and computes pauses. In: errors, and
//! received states. Out: log lines, [`ErrorReport`]s to a callback, pauses.

use std::{
    fmt,
    hash::{BuildHasher as _, RandomState},
    mem::{self, Discriminant},
    time::Duration,
};

use keelson_proto::backoff::Backoff;
use tokio::time::Instant;

use crate::Error;

/// Errors are one series until there was none for this multiple of the longest pause.
const QUIET: u32 = 10;
/// The first pause is the longest one divided by two to this power.
const DOUBLINGS: u32 = 4;

/// An error as a callback receives it.
#[derive(Debug)]
pub struct ErrorReport<'a> {
    /// The latest error.
    pub error: &'a Error,
    /// Number of consecutive failed attempts, this one included; states received only for a moment in between do not
    /// reset it.
    pub attempts: u64,
}

pub(crate) type Callback = Box<dyn FnMut(&ErrorReport<'_>) + Send>;
pub(crate) type Recovery = Box<dyn FnMut() + Send>;

/// A series of errors.
pub(crate) struct ErrorLog {
    longest_pause: Duration,
    callback: Option<Callback>,
    recovery: Option<Recovery>,
    attempts: u64,
    /// Kinds of errors that were logged in this series.
    logged_kinds: Vec<Discriminant<Error>>,
    last: Option<Instant>,
    /// An error was logged, and its end not yet.
    failing: bool,
}

impl fmt::Debug for ErrorLog {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ErrorLog").field("attempts", &self.attempts).finish_non_exhaustive()
    }
}

impl ErrorLog {
    pub(crate) fn new(longest_pause: Duration) -> Self {
        Self {
            longest_pause,
            callback: None,
            recovery: None,
            attempts: 0,
            logged_kinds: Vec::new(),
            last: None,
            failing: false,
        }
    }

    pub(crate) fn on_error(&mut self, callback: Callback) {
        self.callback = Some(callback);
    }

    pub(crate) fn on_recovery(&mut self, callback: Recovery) {
        self.recovery = Some(callback);
    }

    /// Records an error, and returns how long to wait.
    pub(crate) fn record_error(&mut self, error: &Error) -> Duration {
        let now = Instant::now();
        let quiet = self.longest_pause.saturating_mul(QUIET);
        if !self.failing && self.last.is_none_or(|last| now.duration_since(last) >= quiet) {
            self.attempts = 0;
            self.logged_kinds.clear();
        }
        self.last = Some(now);
        self.failing = true;
        self.attempts += 1;
        let kind = mem::discriminant(error);
        if self.attempts.is_power_of_two() || !self.logged_kinds.contains(&kind) {
            tracing::warn!(attempts = self.attempts, %error, "cannot read endpoints; retrying");
            if let Some(callback) = &mut self.callback {
                callback(&ErrorReport { error, attempts: self.attempts });
            }
        } else {
            tracing::debug!(attempts = self.attempts, %error, "cannot read endpoints; retrying");
        }
        if !self.logged_kinds.contains(&kind) {
            self.logged_kinds.push(kind);
        }
        jittered(pause(self.longest_pause, self.attempts), RandomState::new().hash_one(self.attempts))
    }

    /// Records that a state was received and applied.
    pub(crate) fn record_success(&mut self) {
        if mem::take(&mut self.failing) {
            tracing::info!(attempts = self.attempts, "reading endpoints again");
            if let Some(callback) = &mut self.recovery {
                callback();
            }
        }
    }
}

/// The pause after this many failures, before jitter.
fn pause(longest: Duration, attempts: u64) -> Duration {
    let backoff = Backoff { first: longest / 2_u32.pow(DOUBLINGS), longest };
    backoff.pause(u32::try_from(attempts).unwrap_or(u32::MAX))
}

/// Between half of the pause and all of it.
fn jittered(pause: Duration, random: u64) -> Duration {
    let parts = u32::try_from(random % 1025).unwrap_or(0);
    pause / 2 + (pause / 2048).saturating_mul(parts)
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn errors() -> (ErrorLog, Arc<Mutex<Vec<u64>>>) {
        let attempts_seen = Arc::new(Mutex::new(Vec::new()));
        let mut errors = ErrorLog::new(SECOND);
        let sink = attempts_seen.clone();
        errors.on_error(Box::new(move |report| sink.lock().unwrap().push(report.attempts)));
        (errors, attempts_seen)
    }

    #[test]
    fn pauses_grow_up_to_the_delay_and_stay_within_half_of_it() {
        let pauses: Vec<u128> = (1..8).map(|attempts| pause(SECOND, attempts).as_micros()).collect();
        assert_eq!(pauses, [62_500, 125_000, 250_000, 500_000, 1_000_000, 1_000_000, 1_000_000]);
        assert_eq!(pause(SECOND, u64::MAX), SECOND);
        for random in [0, 1, 512, 1024, u64::MAX] {
            let pause = jittered(SECOND, random);
            assert!(pause >= SECOND / 2 && pause <= SECOND, "{random}: {pause:?}");
        }
        assert_ne!(jittered(SECOND, 0), jittered(SECOND, 1024));
    }

    #[tokio::test(start_paused = true)]
    async fn the_same_error_is_logged_less_often() {
        let (mut errors, attempts_seen) = errors();
        for _ in 0..1000 {
            let pause = errors.record_error(&Error::Ended("too early"));
            assert!(pause <= SECOND);
        }
        assert_eq!(*attempts_seen.lock().unwrap(), [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]);
        errors.record_error(&Error::malformed("something else"));
        assert_eq!(attempts_seen.lock().unwrap().last(), Some(&1001));
        errors.record_error(&Error::malformed("something else"));
        assert_eq!(attempts_seen.lock().unwrap().last(), Some(&1001));
    }

    #[tokio::test(start_paused = true)]
    async fn a_series_of_errors_ends_after_a_quiet_time() {
        let (mut errors, attempts_seen) = errors();
        for _ in 0..3 {
            errors.record_error(&Error::Ended("too early"));
            errors.record_success();
        }
        assert_eq!(errors.attempts, 3, "a state in between does not end it");
        tokio::time::advance(9 * SECOND).await;
        assert!(errors.record_error(&Error::Ended("too early")) >= SECOND / 4);
        assert_eq!(errors.attempts, 4);
        tokio::time::advance(11 * SECOND).await;
        errors.record_error(&Error::Ended("too early"));
        assert_eq!(errors.attempts, 5, "no success since");
        errors.record_success();
        tokio::time::advance(11 * SECOND).await;
        assert!(errors.record_error(&Error::Ended("too early")) <= SECOND / 16);
        assert_eq!(errors.attempts, 1);
        assert_eq!(*attempts_seen.lock().unwrap(), [1, 2, 4, 1]);
    }
}
