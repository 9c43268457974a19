//! What the PullCoordinator is told and asked.
//!
//! Owns: its messages. In: callers, people, timers. Out: nothing but types; what they do is in the
//! actor. What the RuntimeClient tells it is declared there.

use std::{sync::Arc, time::Duration};

use keelson_proto::debug as pb;
use tokio::sync::oneshot;

use super::{
    core::{Answer, CallerId, Policy},
    request::PullCall,
};
use crate::inspect::verbs;

/// Where a caller's answer goes. Dropped without an answer: the coordinator is gone.
pub type AnswerTo = oneshot::Sender<Answer>;

verbs! {
    /// A caller wants an image.
    RequestPull => () {
        /// Unique in this process.
        caller: CallerId,
        /// What it wants.
        call: Arc<PullCall>,
        /// Its gRPC deadline.
        patience: Option<Duration>,
        /// Where the answer goes.
        answer: AnswerTo,
    }
    /// A caller is gone.
    CallerLeft => () {
        /// Which.
        caller: CallerId,
    }
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
