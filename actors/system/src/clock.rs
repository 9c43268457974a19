//! Time as the cores see it.
//!
//! Owns: the two clocks of the agent, read together. In: tokio's clock (which tests pause) and the system's wall
//! clock. Out: [`Now`]. Decisions use only the monotonic part; the wall part is for display and for records that
//! outlive the process.

use std::time::Duration;

pub use keelson_proto::unix_ms;
use tokio::time::Instant;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Now {
    /// Since the start of the [`Clock`]; never steps.
    pub mono: Duration,
    /// May step.
    pub unix_ms: i64,
}

impl Now {
    /// The wall time of another monotonic moment, derived from this reading.
    #[must_use]
    pub fn unix_ms_at(&self, mono: Duration) -> i64 {
        let now = i64::try_from(self.mono.as_millis()).unwrap_or(i64::MAX);
        let then = i64::try_from(mono.as_millis()).unwrap_or(i64::MAX);
        self.unix_ms.saturating_add(then.saturating_sub(now))
    }
}

/// Copies share one origin.
#[derive(Debug, Clone, Copy)]
pub struct Clock {
    origin: Instant,
}

impl Clock {
    #[must_use]
    pub fn start() -> Self {
        Self { origin: Instant::now() }
    }

    #[must_use]
    pub fn now(&self) -> Now {
        Now { mono: self.origin.elapsed(), unix_ms: unix_ms() }
    }

    /// When the monotonic part reads `mono`, for timers.
    #[must_use]
    pub fn instant(&self, mono: Duration) -> Instant {
        self.origin + mono
    }
}
