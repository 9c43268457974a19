//! Input and output of the Lease core.
//!
//! Owns: [`LeasePolicy`], [`Event`], [`Effect`], and the values derived from the duration.

use std::time::Duration;

use keelson_actor_system::cluster::{ApiError, LeaseCreate, LeasePatch, ObservedLease, Written};

use super::super::record::LeaseRecord;

/// The kubelet's limit.
const MAX_REQUEST_TIME: Duration = Duration::from_secs(10);

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LeasePolicy {
    /// The node's name, or another for an agent beside a kubelet.
    pub name: String,
    /// `spec.holderIdentity`. Must be the same after a restart.
    pub holder: String,
    pub node: String,
    /// `spec.leaseDurationSeconds`: whole seconds, at least one. The kubelet's default is 40 s.
    pub duration: Duration,
    /// Drop `metadata.managedFields` once per Lease (gate `LeanLeases`).
    pub drops_managed_fields: bool,
    /// Leave the Lease to another process that renews it (role node with `node.when_contested = "stand-back"`).
    pub may_stand_back: bool,
}

impl LeasePolicy {
    #[must_use]
    pub fn duration_seconds(&self) -> i32 {
        i32::try_from(self.duration.as_secs()).unwrap_or(i32::MAX).max(1)
    }

    /// A quarter of the duration (the kubelet's `nodeLeaseRenewIntervalFraction`).
    #[must_use]
    pub fn interval(&self) -> Duration {
        Duration::from_secs(u64::from(self.duration_seconds().unsigned_abs())) / 4
    }

    /// [`LeasePolicy::duration_seconds`] as a duration.
    pub(super) fn duration(&self) -> Duration {
        self.interval() * 4
    }

    /// The kubelet's heartbeat client waits 10 s, or the duration of the Lease if that is less.
    #[must_use]
    pub fn request_timeout(&self) -> Duration {
        MAX_REQUEST_TIME.min(self.interval() * 4)
    }
}

#[derive(Debug, Clone)]
pub(crate) enum Event {
    /// A timer is due, or the actor starts.
    Tick,
    Answered {
        /// As in [`Effect::Ask`]; other numbers than the newest are ignored.
        request: u64,
        answer: Answer,
    },
    /// `None`: the Node is gone.
    NodeChanged(Option<String>),
}

#[derive(Debug, Clone)]
pub(crate) enum Answer {
    Read(Result<ObservedLease, ApiError>),
    Created(Result<Written, ApiError>),
    Renewed(Result<Written, ApiError>),
    Node(Result<String, ApiError>),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Request {
    Read,
    Create(LeaseCreate),
    Renew(LeasePatch),
    Node,
}

/// To be performed in order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Effect {
    /// At most one request is under way.
    Ask {
        number: u64,
        request: Request,
    },
    /// The kubelet's hook for repeated heartbeat failures.
    CloseConnections,
    /// Nothing waits for the write.
    Persist(LeaseRecord),
    Count(Counted),
    Note {
        warn: bool,
        text: String,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Counted {
    /// A request ended; label `result` of the metric.
    Result(&'static str),
    Takeover,
    ForeignRenewal,
    ClockStep {
        forward: bool,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Renewed {
    /// Milliseconds of the monotonic clock; negative: by an earlier process, before this one's clock began.
    pub mono_ms: i64,
    pub unix_ms: i64,
}
