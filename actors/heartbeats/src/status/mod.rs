//! The status of the Node, and the agent's own conditions in it.
//!
//! Owns: what the Node's status is (`compute`), whether it has changed (`compare`), the body of a write (`patch`), when
//! it is written ([`core`]), and [`StatusReporter`], the actor that reads and writes. In: `NodeChanged` from a watch;
//! `ConditionChanged`, the runtime's health; `SetCondition` and `ClearCondition` from other processes; readings of
//! [`crate::host::Host`], of the runtime and of the pulls. Out: requests to [`keelson_actor_system::cluster::NodeApi`],
//! the last report on disk, [`keelson_actor_system::cluster::JobHealth`].
//!
//! ```text
//!  every 10 s, or at a change ──► read ──► compute ──► compare ──(the same, reported lately)──► nothing
//!                                                          │
//!                                                          └──(news, or 5 min old)──► PATCH ──► on disk
//! ```
//!
//! A companion reports changes only, however old its last report is.

mod actor;
mod compare;
mod compute;
mod core;
mod external;
mod kinds;
mod messages;
mod metrics;
mod moment;
mod patch;
mod policy;
mod quantity;
mod register;
mod settings;
mod sources;
mod state;

/// The conditions that the agent adds to a Node in either role, including those of earlier versions, for its removal at
/// uninstallation.
pub fn added_conditions() -> impl Iterator<Item = &'static str> {
    compute::conditions::own(Role::Companion).iter().chain(&kinds::RETIRED).copied()
}

#[cfg(test)]
pub(crate) use {compute::tests::idle, patch::tests::apply as apply_patch};

pub use actor::{StatusReporter, StatusReporterParts, WallClock};
pub use compute::{FindingPeriod, Inputs, Memory, Pressure, RuntimeView};
pub use external::{
    ConditionRefused, ConditionView, ExternalCondition, ExternalRecord, ExternalWrite, MAX_CONDITIONS,
};
pub use kinds::{ConditionStatus, DISK_PRESSURE};
pub use messages::{
    ClearCondition, ConditionChanged, CountNow, EndReports, ListConditions, NodeChanged, ReportNow,
    SetCondition, StatusState,
};
pub use metrics::{ConditionLabel, StatusMetrics};
pub use patch::removal_patch;
pub use policy::{EndpointsOrigin, Register, Role, StatusPolicy};
pub use quantity::{Amount, AmountError, Suffixes};
pub use settings::{Labels, NodeIps, ResourceList, SettingError, Signal, Taint, ThresholdValue, Thresholds};
pub use sources::{PullsSource, RuntimeSource};
pub use state::{Reported, Restored, Stamp, Write, recorded_conditions};
