//! Messages of the PullCoordinator with a channel or an answer; the others are [`PullEvent`](super::PullEvent)s.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU8, Ordering},
    },
    time::Duration,
};

use keelson_actor_system::{messages, reports::PullsView};
use keelson_proto::debug as pb;
use tokio::sync::{mpsc, oneshot};

use super::{
    core::{Answer, CallerId},
    handover::{HandedEnd, HandedState},
};
use crate::request::PullCall;

#[derive(Debug)]
pub struct HandedOver {
    pub state: HandedState,
    /// Sent when the journal writes that were under way are done; nothing is written after them.
    pub written: oneshot::Receiver<()>,
    /// Sent when the last pull that continues here has ended.
    pub ended: oneshot::Receiver<()>,
}

/// Dropped without an answer if the coordinator is gone.
pub type AnswerTo = oneshot::Sender<Answer>;

/// Decides who handles a request: the coordinator, or its front once that no longer waits. The first one wins, so that
/// a late coordinator does not start a pull that was passed through.
#[derive(Debug, Clone, Default)]
pub struct Claim(Arc<AtomicU8>);

impl Claim {
    const OPEN: u8 = 0;
    const ACKNOWLEDGED: u8 = 1;
    const WITHDRAWN: u8 = 2;

    fn settle(&self, as_what: u8) -> bool {
        self.0.compare_exchange(Self::OPEN, as_what, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    /// Called by the coordinator. False: the request was withdrawn and must be ignored.
    #[must_use]
    pub fn acknowledge(&self) -> bool {
        self.settle(Self::ACKNOWLEDGED)
    }

    /// Called by the front. False: the coordinator has acknowledged the request and answers it.
    #[must_use]
    pub fn withdraw(&self) -> bool {
        self.settle(Self::WITHDRAWN)
    }
}

messages! {
    /// [`PullEvent::Request`](super::PullEvent::Request), with the channel for the answer.
    RequestPull => () {
        /// Unique in this process.
        caller: CallerId,
        call: Arc<PullCall>,
        /// Its gRPC deadline.
        timeout: Option<Duration>,
        claim: Claim,
        answer: AnswerTo,
    }
    /// Whether pulls are stalled, for the node condition `ImagePullsStalled`.
    PullsFlow => PullsView {}
    /// [`PullEvent::SetLimit`](super::PullEvent::SetLimit); the answer is the limit in force.
    SetLimit => pb::Limit {
        /// 0: no limit.
        limit: Option<u32>,
        /// Notified when the limit is on disk, or the store has failed to write it.
        stored: oneshot::Sender<()>,
    }
    LimitView => pb::Limit {}
    /// Starts no more pulls; `done` is sent once, when nothing runs and the journal is written.
    Drain => () {
        done: oneshot::Sender<()>,
    }
    HandOver => () {
        /// Sent at once.
        state: oneshot::Sender<HandedOver>,
        /// Gets every pull that continues here, when it ends.
        ends: mpsc::UnboundedSender<HandedEnd>,
    }
    ListPulls => pb::PullList {
        max_queued: usize,
    }
    /// Updates the gauges that grow with time, before they are read.
    CountNow => () {}
    /// The actor's state as JSON.
    Inspected => String {}
}
