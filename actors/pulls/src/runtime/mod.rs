//! The container runtime: its health, what it can do, and the calls that the actors make of it.
//!
//! Owns: [`core`] (when to probe, what counts as up), and [`RuntimeClient`], the actor that makes
//! the calls through the trait [`Runtime`].
//! In: `Pull`, `CancelPull`, `CheckPresent`, `DropLease`, `ReapLeases`, `MeasureLease`,
//! `RenewLeases` and `CheckImageFs` from the PullCoordinator,
//! `ReportRuntime` from the StatusReporter.
//! Out: `PullFinished`, `Presence`, `PullProgress`, `RuntimeChanged`, `LeaseMeasured`, `ImageFsRead` for the PullCoordinator; a
//! [`RuntimeReport`](keelson_actor_system::reports::RuntimeReport) for the StatusReporter.

mod actor;
mod core;
mod downloads;
mod messages;
mod report;
mod retained;
mod subscriber;
mod types;
mod version;

pub use actor::{RuntimeClient, RuntimeClientParts};
pub use core::Health;
pub use messages::{
    CancelAll, CancelPull, CheckImageFs, CheckPresent, DropLease, ImageFsRead, LeaseMeasured, MeasureLease,
    Probe, Pull, PullFinished, PullPresence, PullProgress, ReapLeases, RenewLeases, RuntimeChanged,
    RuntimeState,
};
pub use report::ReportRuntime;
pub use subscriber::{Subscribe, Subscriber};
pub use types::{
    Capabilities, Download, FailureKind, Ingest, Outcome, PROBE_BACKOFF, PROBE_INTERVAL, Phase, ProbeFailure,
    Progress, PullReading, PullReply, Readings, Runtime, RuntimeError, RuntimeInfo, RuntimePull, WireStatus,
};
