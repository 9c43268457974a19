//! The container runtime: health, capabilities and calls.
//!
//! Owns: [`core`] (when to probe, what counts as up), and [`RuntimeClient`], the actor that makes the calls through the
//! trait [`Runtime`]. In: [`RuntimeCommand`]s of the PullCoordinator, [`ReportRuntime`] from the StatusReporter. Out:
//! [`RuntimeEvent`]s for the PullCoordinator, a [`RuntimeReport`](keelson_actor_system::reports::RuntimeReport) for the
//! StatusReporter.

mod actor;
mod core;
mod downloads;
mod images;
mod messages;
mod types;
mod version;

pub use actor::{RuntimeClient, RuntimeClientParts};
pub use core::Health;
pub use messages::{ReportRuntime, RuntimeCommand, RuntimeEvent, RuntimeState, Subscribe, Subscriber};
pub use types::{
    Capabilities, Download, FailureKind, Ingest, Outcome, PROBE_INTERVAL, PROBES, Phase, ProbeFailure,
    Progress, PullReading, PullReply, Readings, Runtime, RuntimeError, RuntimeInfo, RuntimePull, WireStatus,
};
