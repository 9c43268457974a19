//! What the PullCoordinator is told and asked.
//!
//! Owns: its messages. In: callers, people, timers. Out: nothing but types; what they do is in the
//! actor. What the RuntimeClient tells it is declared there.

use std::{
    collections::HashSet,
    sync::{
        Arc,
        atomic::{AtomicU8, Ordering},
    },
    time::Duration,
};

use keelson_actor_system::{reports::FlowView, verbs};
use keelson_proto::debug as pb;
use tokio::sync::{mpsc, oneshot};

use super::{
    core::{Answer, CallerId, Policy},
    handover::{HandedEnd, HandedOutcome, HandedState},
};
use crate::request::{PullCall, PullId};

/// What the coordinator of an ending agent hands over.
#[derive(Debug)]
pub struct HandedOver {
    /// For the successor.
    pub state: HandedState,
    /// Told when the journal writes that were under way are done; nothing is written after them.
    pub written: oneshot::Receiver<()>,
    /// Told when no pull goes on here any more.
    pub ended: oneshot::Receiver<()>,
}

/// Where a caller's answer goes. Dropped without an answer: the coordinator is gone.
pub type AnswerTo = oneshot::Sender<Answer>;

/// Settles who goes on with a request: the coordinator that begins to handle it, or its front that no longer waits for
/// that. The first one wins, so that a coordinator that comes late does not start a pull that was passed through.
#[derive(Debug, Clone, Default)]
pub struct Claim(Arc<AtomicU8>);

impl Claim {
    const OPEN: u8 = 0;
    const ACKNOWLEDGED: u8 = 1;
    const WITHDRAWN: u8 = 2;

    fn settle(&self, as_what: u8) -> bool {
        self.0.compare_exchange(Self::OPEN, as_what, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    /// By the coordinator. False: the request was withdrawn and must be ignored.
    #[must_use]
    pub fn acknowledge(&self) -> bool {
        self.settle(Self::ACKNOWLEDGED)
    }

    /// By the front. False: the coordinator has acknowledged the request and answers it.
    #[must_use]
    pub fn withdraw(&self) -> bool {
        self.settle(Self::WITHDRAWN)
    }
}

verbs! {
    /// A caller wants an image.
    RequestPull => () {
        /// Unique in this process.
        caller: CallerId,
        /// What it wants.
        call: Arc<PullCall>,
        /// Its gRPC deadline.
        patience: Option<Duration>,
        /// Whether the caller still waits for a decision.
        claim: Claim,
        /// Where the answer goes.
        answer: AnswerTo,
    }
    /// A caller is gone.
    CallerLeft => () {
        /// Which.
        caller: CallerId,
    }
    /// A pod is deleted or terminating: its calls that wait fail with ABORTED, those that run go on. Matched by the
    /// uid in the call's sandbox config. That of a static pod is its manifest's and not its mirror pod's, so that
    /// static pods are never told gone in this way.
    PodGone => () {
        /// `metadata.uid`.
        uid: String,
        /// `namespace/name`, for people.
        pod: String,
    }
    /// The object of a pod is deleted, after [`PodGone`] or without it. Its calls are refused for ten minutes more,
    /// then the pod is forgotten.
    PodForgotten => () {
        /// `metadata.uid`.
        uid: String,
    }
    /// Whether the node condition DiskPressure is True: then nothing is retained of unfinished pulls.
    DiskPressure => () {
        /// The condition's status is True.
        is_true: bool,
    }
    /// All pods of the node that exist and have not ended. Told after each list of the pods.
    PodsSynced => () {
        /// `metadata.uid`, and of static pods that of their manifests.
        live: Arc<HashSet<String>>,
    }
    /// Whether pulls are stalled, for the node condition `ImagePullsStalled`.
    PullsFlow => FlowView {}
    /// Sets the limit by hand; `None` puts it back to the settings.
    SetLimit => pb::Limit {
        /// 0: no limit.
        limit: Option<u32>,
    }
    /// The limit in force.
    LimitView => pb::Limit {}
    /// Takes over new settings.
    Configure => () {
        /// All of them.
        policy: Policy,
    }
    /// Starts nothing more; tells `done` when nothing runs and the journal is written.
    Drain => () {
        /// Told once.
        done: oneshot::Sender<()>,
    }
    /// Gives everything to a successor; see [`HandedOver`].
    HandOver => () {
        /// Told at once.
        state: oneshot::Sender<HandedOver>,
        /// Told of every pull that goes on here, when it ends.
        ends: mpsc::UnboundedSender<HandedEnd>,
    }
    /// A pull that goes on in the predecessor ended there.
    PredecessorEnded => () {
        /// Which.
        pull: PullId,
        /// How.
        how: HandedOutcome,
    }
    /// The predecessor cannot be heard any more.
    PredecessorGone => () {}
    /// Running pulls, queue and history.
    ListPulls => pb::PullList {
        /// At most so many queued ones.
        max_queued: usize,
    }
    /// Brings the gauges that grow with time up to date, before they are read.
    CountNow => () {}
    /// The actor's state as JSON, for people.
    Inspected => String {}
    /// To itself: a timer is due.
    Tick => () {}
}
