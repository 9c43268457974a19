//! Why a pull ended, and how long it waited and ran.
//!
//! Owns: the result and the reason of each pull that ended, and how long it waited in the queue and held a slot. In:
//! the end of a pull and the answers of its callers. Out: fields of [`FinishedPull`](super::FinishedPull) for logs,
//! metrics and the debug view. Reasons are a closed set: they are label values.
//!
//! A pull whose last callers were refused or timed out is not reported as cancelled for lack of callers.

use std::time::Duration;

use super::{Core, Effect, EndReason, FailureClass, Lane, Pull, PullEnd, Refusal, Tally};
use crate::request::PullId;

/// A pull may wait and run more than once.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct PhaseTimes {
    queued: Duration,
    running: Duration,
    /// Since when it is in its present phase, on the monotonic clock.
    since: Duration,
}

impl PhaseTimes {
    pub(super) fn from(now: Duration) -> Self {
        Self { since: now, ..Self::default() }
    }

    /// The pull leaves the queue.
    pub(super) fn start(&mut self, now: Duration) {
        self.queued += now.saturating_sub(self.since);
        self.since = now;
    }

    /// The pull frees its slot.
    pub(super) fn stop(&mut self, now: Duration) {
        self.running += now.saturating_sub(self.since);
        self.since = now;
    }

    /// Time in the queue, and time with a slot (`None`: it never had one).
    pub(super) fn total(
        mut self,
        has_slot: bool,
        started: bool,
        now: Duration,
    ) -> (Duration, Option<Duration>) {
        if has_slot {
            self.stop(now)
        } else {
            self.start(now)
        }
        (self.queued, started.then_some(self.running))
    }
}

impl Core {
    /// Sets the reason for an end that follows neither from the runtime's answer nor from the callers.
    pub(super) fn set_end_reason(&mut self, id: PullId, reason: &'static str) {
        if let Some(pull) = self.pulls.get_mut(&id) {
            pull.reason = Some(reason);
        }
    }

    /// The end as shown, and its reason: a pull whose callers were refused is not "cancelled".
    pub(super) fn reason_of(&self, id: PullId, end: PullEnd) -> (PullEnd, EndReason) {
        let Some(pull) = self.pulls.get(&id) else {
            return (end, EndReason { result: "cancelled", reason: "Unknown" });
        };
        let named =
            |result, reason: &'static str| EndReason { result, reason: pull.reason.unwrap_or(reason) };
        match (end, &pull.refused) {
            (PullEnd::Succeeded, _) if pull.lane == Some(Lane::Present) => {
                (PullEnd::Succeeded, EndReason { result: "succeeded", reason: "AlreadyPresent" })
            }
            (PullEnd::Succeeded, _) => {
                (PullEnd::Succeeded, EndReason { result: "succeeded", reason: "Pulled" })
            }
            (PullEnd::Failed(text), Some(refusal)) if pull.reason.is_none() => {
                (PullEnd::Failed(text), EndReason { result: "failed", reason: refusal.reason() })
            }
            (PullEnd::Failed(text), _) => (PullEnd::Failed(text), named("failed", "Unknown")),
            (PullEnd::Refused(text), _) => (PullEnd::Refused(text), named("refused", "Unknown")),
            (PullEnd::Cancelled, Some(refusal)) => match refusal.result() {
                "cancelled" => {
                    (PullEnd::Cancelled, EndReason { result: "cancelled", reason: refusal.reason() })
                }
                result => {
                    (PullEnd::Refused(refusal.to_string()), EndReason { result, reason: refusal.reason() })
                }
            },
            (PullEnd::Cancelled, None) => (PullEnd::Cancelled, named("cancelled", "CallerLeft")),
        }
    }

    pub(super) fn joined(&self, id: PullId, fx: &mut Vec<Effect>) {
        if let Some(pull) = self.pulls.get(&id) {
            fx.push(Effect::Count(Tally::Joined(pull.joined_as())));
        }
    }
}

impl Pull {
    fn joined_as(&self) -> &'static str {
        if self.is_queued() {
            "Queued"
        } else if self.lane.is_some() {
            "Running"
        } else {
            "Held"
        }
    }
}

impl Refusal {
    #[must_use]
    pub fn reason(&self) -> &'static str {
        match self {
            Self::TooMany { .. } => "TooManyPullingInParallel",
            Self::TooManyCallers(_) => "TooManyCallers",
            Self::Busy(_) => "Busy",
            Self::QueueTime(..) => "QueueTimeExceeded",
            Self::Deadline(..) => "DeadlineExceeded",
            Self::RuntimeAway { .. } => "RuntimeUnavailable",
            Self::Stalled { .. } => "Stalled",
            Self::PullTime { .. } => "PullTimeExceeded",
            Self::PodGone { .. } => "PodDeleted",
            Self::Stopping => "Stopping",
            Self::Moved => "Moved",
            Self::Restarting => "Restarting",
            Self::Invalid(_) => "Invalid",
        }
    }

    /// The result of a pull whose last caller gets this refusal.
    fn result(&self) -> &'static str {
        match self {
            Self::Deadline(..) => "timed_out",
            Self::PodGone { .. } => "cancelled",
            _ => "refused",
        }
    }
}

pub(super) fn of_failure(class: FailureClass) -> &'static str {
    match class {
        FailureClass::NoSpace => "NoSpace",
        FailureClass::BadContent => "BadContent",
        FailureClass::Unpack => "UnpackFailed",
        FailureClass::Denied => "Denied",
        FailureClass::NotFound => "NotFound",
        FailureClass::Invalid => "Invalid",
        FailureClass::Registry => "RegistryUnavailable",
        FailureClass::Network => "NetworkError",
        FailureClass::Runtime => "RuntimeUnavailable",
        FailureClass::Unknown => "Unknown",
    }
}
