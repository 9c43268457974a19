//! Types and statuses of node conditions.

use std::fmt;

use serde::{Deserialize, Serialize};

pub(super) const READY: &str = "Ready";
/// Whether the image or node file system is short of space.
pub const DISK_PRESSURE: &str = "DiskPressure";
pub(super) const CONTESTED: &str = "KeelsonNodeContested";

pub(super) const PULLS: &str = "ImagePullsStalled";
/// Whether the service endpoints on the node are not synced with their source.
pub(super) const ENDPOINTS: &str = "ServiceEndpointsStale";
pub(super) const STATE: &str = "KeelsonStateNotDurable";

/// Types of earlier versions of the agent. They are removed from the Node wherever they are found.
pub(super) const RETIRED: [&str; 2] = ["ImagePullsFlowing", "ServiceEndpointsCurrent"];

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum ConditionStatus {
    True,
    False,
    Unknown,
}

impl ConditionStatus {
    pub const ALL: [Self; 3] = [Self::True, Self::False, Self::Unknown];

    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::True => "True",
            Self::False => "False",
            Self::Unknown => "Unknown",
        }
    }
}

impl fmt::Display for ConditionStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
