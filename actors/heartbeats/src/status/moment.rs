//! Time as the status core counts it.

use std::time::Duration;

use keelson_actor_system::clock::Now;

/// Milliseconds of the agent's monotonic clock. Times before its start are negative.
pub(super) type Moment = i64;

pub(super) fn moment(now: Now) -> Moment {
    millis(now.mono)
}

pub(super) fn millis(duration: Duration) -> i64 {
    i64::try_from(duration.as_millis()).unwrap_or(i64::MAX)
}
