//! Messages of the RuntimeClient and its subscriber.

use std::{fmt, sync::Arc, time::Duration};

use actix::{Actor, Context, Handler};
use keelson_actor_system::{file_system::FileSystem, inspect::Mailbox, messages, reports::RuntimeReport};

use super::types::{Capabilities, Outcome, Progress, RuntimeError, RuntimePull};
use crate::request::{PullCall, PullId};

messages! {
    #[derive(Debug, Clone)]
    pub enum RuntimeCommand {
        /// [`RuntimeEvent::PullFinished`] follows.
        Pull {
            pull: PullId,
            /// Counted from 1 for each pull.
            attempt: u32,
            request: RuntimePull,
            /// How long its first caller has waited, for the kubelet's metric.
            waited: Duration,
            /// Its image is present, so it is not counted: a download must be reported at once.
            present: bool,
        },
        /// No [`RuntimeEvent::PullFinished`] follows.
        CancelPull { pull: PullId, attempt: u32 },
        /// No [`RuntimeEvent::PullFinished`] follows. A restarted subscriber begins with this.
        CancelAll,
        /// [`RuntimeEvent::PullPresence`] answers.
        CheckPresent { pull: PullId, call: Arc<PullCall> },
        /// A pull that needs the lease next waits for the deletion. [`RuntimeEvent::LeasesLeft`] follows if that fails.
        DropLease {
            /// Its ID in containerd.
            lease: String,
            /// The space is needed now. Otherwise the runtime frees it at its next garbage collection.
            collect: bool,
        },
        /// Delete all leases of this agent except these and those used since the process began. [`RuntimeEvent::LeasesLeft`]
        /// follows if that fails.
        ReapLeases(Vec<String>),
        /// Delete no lease from now on, not even those of earlier commands: they belong to a successor.
        LeaveLeases,
        /// Read how many bytes a retained lease holds; [`RuntimeEvent::LeaseMeasured`] answers.
        MeasureLease {
            lease: String,
            /// Until when it is retained, which tells this retention from others of the same lease.
            until: Duration,
        },
        /// [`RuntimeEvent::ImageFsRead`] answers.
        CheckImageFs,
        /// Extend the leases whose expiry is near.
        RenewLeases(Vec<String>),
        /// Probe now, not at the next interval.
        Probe,
    }
}

messages! {
    #[derive(Debug, Clone)]
    pub enum RuntimeEvent {
        PullFinished { pull: PullId, attempt: u32, outcome: Outcome },
        /// `None`: the runtime could not say.
        PullPresence { pull: PullId, present: Option<bool> },
        PullProgress { pull: PullId, progress: Progress },
        /// What the runtime can do, or why it is down; the reason names the socket.
        RuntimeChanged(Result<Capabilities, String>),
        /// Size of blobs, ingests and snapshots; `None`: the runtime could not say.
        LeaseMeasured { lease: String, until: Duration, bytes: Option<u64> },
        /// The runtime did not delete leases that it was told to delete.
        LeasesLeft,
        /// `None`: unknown.
        ImageFsRead(Option<FileSystem>),
    }
}

messages! {
    /// JSON.
    RuntimeState => String {}
    /// For the node status. A runtime that is down answers with its error at once, one that was not probed yet with the
    /// result of its first probe.
    ReportRuntime => Result<RuntimeReport, RuntimeError> {}
    Subscribe => () {
        to: Arc<dyn Subscriber>,
    }
    /// Sent by an attempt's task to the actor itself.
    CallEnded => () {
        pull: PullId,
        attempt: u32,
        /// The connection closed before the runtime answered.
        is_lost: bool,
    }
}

/// The actor that the RuntimeClient pulls for.
pub trait Subscriber: fmt::Debug + Send + Sync + 'static {
    /// Not limited by the bound of the mailbox: each event belongs to a command of that actor, or reports a change of
    /// the runtime.
    fn send(&self, event: RuntimeEvent);
}

impl<A: Actor<Context = Context<A>> + Handler<RuntimeEvent>> Subscriber for Mailbox<A> {
    fn send(&self, event: RuntimeEvent) {
        self.deliver(event);
    }
}
