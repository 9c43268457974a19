//! Image pulls: the queue, the pulls in flight, the limit.
//!
//! Owns: [`core`] (every decision, pure), the journal on disk, and [`PullCoordinator`], the actor
//! that performs the core's effects.
//! In: [`RequestPull`] from the CRI front, [`PullEvent`]s from it, from the settings and from the watch of the node's
//! pods; [`RuntimeEvent`](crate::runtime::RuntimeEvent)s from the RuntimeClient; queries of the debug socket and of the
//! StatusReporter. Out: pulls and presence checks for the RuntimeClient, answers to callers, journal writes.
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
pub use core::{Answer, CallerId, Policy, PullEvent, Refusal};
pub use handover::{
    HandedEnd, HandedOutcome, HandedPull, HandedReply, HandedState, RunningPull, UnreadJournal,
};
pub use messages::{
    AnswerTo, Claim, CountNow, Drain, HandOver, HandedOver, Inspected, LimitView, ListPulls, PullsFlow,
    RequestPull, SetLimit,
};
pub use notices::{EVENTS_WAITING, write_events};
pub use record::{KeptLease, PullRecord, RecordState};
