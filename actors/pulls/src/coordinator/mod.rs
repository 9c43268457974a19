//! Image pulls: the queue, the pulls in flight, the limit.
//!
//! Owns: [`core`] (every decision, pure), the journal on disk, and [`PullCoordinator`], the actor
//! that performs the core's effects.
//! In: `RequestPull` and `CallerLeft` from the CRI front; `PullFinished`, `Presence`, `PullProgress`
//! and `RuntimeChanged` from the RuntimeClient; `SetLimit` and `Configure` from people; `PodGone` and `PodForgotten`
//! from whoever watches the node's pods; `PullsFlow` from the StatusReporter.
//! Out: pulls and presence checks for the RuntimeClient, answers for callers, journal writes.
//!
//! ```text
//!  caller ── RequestPull ──► queue ──(slot free)──► running ──► answer to every caller
//!                              │                      │
//!                              ├─(image is there)─► running beside the limit
//!                              └─(caller gone)──► forgotten     └─(all callers gone)─► grace ─► cancelled
//! ```

mod actor;
mod core;
mod handover;
mod journal;
mod messages;
mod notices;
mod record;

pub use actor::{PullCoordinator, PullCoordinatorParts};
pub use core::{Answer, CallerId, PodNotice, Policy, Refusal};
pub use handover::{
    HandedEnd, HandedOutcome, HandedPull, HandedReply, HandedState, RunningPull, UnreadJournal,
};
pub use messages::{
    AnswerTo, CallerLeft, Claim, Configure, CountNow, DiskPressure, Drain, HandOver, HandedOver, Inspected,
    LimitView, ListPulls, PodForgotten, PodGone, PodsSynced, PredecessorEnded, PredecessorGone, PullsFlow,
    RequestPull, SetLimit,
};
pub use notices::{NOTICES_WAITING, write_notices};
pub use record::{KeptLease, PullRecord, RecordState};
