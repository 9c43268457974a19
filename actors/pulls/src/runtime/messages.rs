//! Messages of the RuntimeClient, and what it sends to its subscriber.

use std::{fmt, sync::Arc, time::Duration};

use actix::{Actor, Context, Handler};
use keelson_actor_system::{file_system::FileSystem, inspect::Mailbox, messages, reports::RuntimeReport};

use super::types::{Capabilities, Outcome, Progress, RuntimeError, RuntimePull};
use crate::request::{PullCall, PullId};

messages! {
    #[derive(Debug, Clone)]
    pub enum RuntimeCommand {
        /// Start an attempt; [`RuntimeEvent::PullFinished`] follows.
        Pull {
            pull: PullId,
            /// Counted from 1 for each pull.
            attempt: u32,
            request: RuntimePull,
            /// How long its first caller has waited already, for the kubelet's metric.
            waited: Duration,
            /// Its image is present, so it is not counted: a download must be reported at once.
            present: bool,
        },
        /// Stop an attempt; no [`RuntimeEvent::PullFinished`] follows.
        CancelPull { pull: PullId, attempt: u32 },
        /// Stop every attempt; no [`RuntimeEvent::PullFinished`] follows. A restarted subscriber begins with this.
        CancelAll,
        /// Ask whether the image is there; [`RuntimeEvent::PullPresence`] answers.
        CheckPresent { pull: PullId, call: Arc<PullCall> },
        /// Delete a lease. A pull that needs it next waits for the deletion.
        DropLease {
            /// Its ID in containerd.
            lease: String,
            /// The space is needed now. Otherwise the runtime frees it when it next collects garbage.
            collect: bool,
        },
        /// Delete all leases of this agent but these and those in use since the process began.
        ReapLeases(Vec<String>),
        /// Read how many bytes a retained lease holds; [`RuntimeEvent::LeaseMeasured`] answers.
        MeasureLease(String),
        /// Read the free space of the image file system; [`RuntimeEvent::ImageFsRead`] answers.
        CheckImageFs,
        /// Give these leases a new expiry where theirs is near.
        RenewLeases(Vec<String>),
        /// Probe the runtime now, not at the next interval.
        Probe,
    }
}

messages! {
    /// What the RuntimeClient sends to its subscriber.
    #[derive(Debug, Clone)]
    pub enum RuntimeEvent {
        /// An attempt ended: the runtime's reply, or that the call was lost.
        PullFinished { pull: PullId, attempt: u32, outcome: Outcome },
        /// Whether the image is there; `None`: the runtime could not say.
        PullPresence { pull: PullId, present: Option<bool> },
        /// A new reading of a running pull.
        PullProgress { pull: PullId, progress: Progress },
        /// What the runtime can do, or why it is down; the reason names the socket.
        RuntimeChanged(Result<Capabilities, String>),
        /// How many bytes a lease holds (blobs, ingests and snapshots); `None`: the runtime could not say.
        LeaseMeasured { lease: String, bytes: Option<u64> },
        /// The size of the image file system; `None`: not known.
        ImageFsRead(Option<FileSystem>),
    }
}

messages! {
    /// What is known of the runtime, as JSON for people.
    RuntimeState => String {}
    /// What node status reports of the runtime. One that is down answers with its error at once, one that was not
    /// probed yet with the result of its first probe.
    ReportRuntime => Result<RuntimeReport, RuntimeError> {}
    /// Replaces the subscriber.
    Subscribe => () {
        to: Arc<dyn Subscriber>,
    }
    /// From an attempt's task to the actor itself.
    CallEnded => () {
        pull: PullId,
        attempt: u32,
        /// The connection broke before the runtime answered.
        is_lost: bool,
    }
}

/// The actor whose pulls the RuntimeClient makes.
pub trait Subscriber: fmt::Debug + Send + Sync + 'static {
    /// Sends past the bound of the mailbox: each event belongs to a command of that actor, or reports a change of the
    /// runtime.
    fn send(&self, event: RuntimeEvent);
}

impl<A: Actor<Context = Context<A>> + Handler<RuntimeEvent>> Subscriber for Mailbox<A> {
    fn send(&self, event: RuntimeEvent) {
        self.deliver(event);
    }
}
