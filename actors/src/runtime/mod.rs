//! The container runtime: its health, what it can do, and the calls that the actors make of it.
//!
//! Owns: [`core`] (when to probe, what counts as up), and [`RuntimeClient`], the actor that makes
//! the calls through the trait [`Runtime`].
//! In: `Pull`, `CancelPull`, `CheckPresent`, `DropLease`, `ReapLeases` from the PullCoordinator.
//! Out: `PullFinished`, `Presence`, `PullProgress`, `RuntimeChanged` for the PullCoordinator.

mod actor;
pub mod core;
mod types;

pub use actor::{
    CancelAll, CancelPull, CheckPresent, DropLease, Probe, Pull, PullFinished, PullPresence, PullProgress,
    ReapLeases, RuntimeChanged, RuntimeClient, RuntimeClientParts, RuntimeState, Subscribe,
};
pub use types::{
    Capabilities, PROBE_BACKOFF, PROBE_INTERVAL, Phase, Progress, PullReply, Runtime, RuntimeError,
    RuntimeInfo, RuntimePull, WireStatus,
};
