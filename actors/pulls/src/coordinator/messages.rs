//! Messages of the PullCoordinator that are more than a [`PullEvent`](super::PullEvent): they carry a channel or have an answer.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU8, Ordering},
    },
    time::Duration,
};

use keelson_actor_system::{messages, reports::FlowView};
use keelson_proto::debug as pb;
use tokio::sync::{mpsc, oneshot};

use super::{
    core::{Answer, CallerId},
    handover::{HandedEnd, HandedState},
};
use crate::request::PullCall;

/// What the coordinator of an ending agent hands over.
#[derive(Debug)]
pub struct HandedOver {
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

messages! {
    /// A caller wants an image: [`PullEvent::Request`](super::PullEvent::Request), with where the answer goes.
    RequestPull => () {
        /// Unique in this process.
        caller: CallerId,
        call: Arc<PullCall>,
        /// Its gRPC deadline.
        patience: Option<Duration>,
        claim: Claim,
        answer: AnswerTo,
    }
    /// Whether pulls are stalled, for the node condition `ImagePullsStalled`.
    PullsFlow => FlowView {}
    /// [`PullEvent::SetLimit`](super::PullEvent::SetLimit); the answer is the limit in force.
    SetLimit => pb::Limit {
        /// 0: no limit.
        limit: Option<u32>,
    }
    /// The limit in force.
    LimitView => pb::Limit {}
    /// Starts nothing more; `done` is sent once, when nothing runs and the journal is written.
    Drain => () {
        done: oneshot::Sender<()>,
    }
    /// Gives everything to a successor; see [`HandedOver`].
    HandOver => () {
        /// Sent at once.
        state: oneshot::Sender<HandedOver>,
        /// Gets every pull that continues here, when it ends.
        ends: mpsc::UnboundedSender<HandedEnd>,
    }
    ListPulls => pb::PullList {
        max_queued: usize,
    }
    /// Brings the gauges that grow with time up to date, before they are read.
    CountNow => () {}
    /// The actor's state as JSON, for people.
    Inspected => String {}
}
