//! What goes into the core of the Lease and what comes out of it.
//!
//! Owns: [`LeasePolicy`], [`Event`], [`Effect`]. No logic but the figures that follow from the duration.

use std::time::Duration;

use keelson_actor_system::cluster::{ApiError, LeaseCreate, LeasePatch, LeaseSeen, Written};

use super::super::record::LeaseRecord;

/// The longest that one request may take: the kubelet's.
const LONGEST_REQUEST: Duration = Duration::from_secs(10);

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LeasePolicy {
    /// The Lease's name: the node's, or another for an agent beside a kubelet.
    pub name: String,
    /// `spec.holderIdentity`. Must be the same after a restart.
    pub holder: String,
    pub node: String,
    /// `spec.leaseDurationSeconds`: whole seconds, at least one. The kubelet's default is 40 s.
    pub duration: Duration,
    /// Drop `metadata.managedFields` once for each Lease (gate `LeanLeases`).
    pub lean: bool,
    /// Leave the Lease to another process that renews it (role node with `node.when_contested = "stand-back"`).
    pub may_stand_back: bool,
}

impl LeasePolicy {
    /// The duration as the API has it.
    #[must_use]
    pub fn duration_seconds(&self) -> i32 {
        i32::try_from(self.duration.as_secs()).unwrap_or(i32::MAX).max(1)
    }

    /// The time between two renewals: a quarter of the duration (the kubelet's `nodeLeaseRenewIntervalFraction`).
    #[must_use]
    pub fn interval(&self) -> Duration {
        Duration::from_secs(u64::from(self.duration_seconds().unsigned_abs())) / 4
    }

    /// [`LeasePolicy::duration_seconds`] as a duration.
    pub(super) fn duration(&self) -> Duration {
        self.interval() * 4
    }

    /// The longest that one request may take: the kubelet's heartbeat client waits 10 s, or as long as the Lease
    /// lasts where that is less.
    #[must_use]
    pub fn request_timeout(&self) -> Duration {
        LONGEST_REQUEST.min(self.interval() * 4)
    }
}

#[derive(Debug, Clone)]
pub(crate) enum Event {
    /// A timer is due, or the actor starts.
    Tick,
    Answered {
        /// As in [`Effect::Ask`]; another number than the newest means nothing any more.
        request: u64,
        answer: Answer,
    },
    /// The Node was seen with this uid; `None`: it is gone.
    NodeChanged(Option<String>),
}

#[derive(Debug, Clone)]
pub(crate) enum Answer {
    Read(Result<LeaseSeen, ApiError>),
    Created(Result<Written, ApiError>),
    Renewed(Result<Written, ApiError>),
    Node(Result<String, ApiError>),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Request {
    /// GET of the Lease.
    Read,
    /// POST of the Lease.
    Create(LeaseCreate),
    Renew(LeasePatch),
    Node,
}

/// What the actor has to do, in this order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Effect {
    /// Make a request. There is never another one under way.
    Ask {
        /// To be given back with the answer.
        number: u64,
        request: Request,
    },
    /// Close the connections: the kubelet's hook for repeated heartbeat failures.
    CloseConnections,
    /// Write what outlives the process. Nothing waits for it.
    Persist(LeaseRecord),
    Count(Counted),
    /// Something worth an event in the debug view and a line in the log.
    Note {
        warn: bool,
        text: String,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Counted {
    /// A request ended, as label `result` of the metric names it.
    Result(&'static str),
    Takeover,
    ForeignRenewal,
    ClockStep {
        /// Towards the future.
        forward: bool,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Renewed {
    /// Milliseconds of the monotonic clock; negative: by an earlier process, before this one's clock began.
    pub mono_ms: i64,
    /// Unix milliseconds.
    pub unix_ms: i64,
}
