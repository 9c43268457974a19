//! Reports of other actors to the StatusReporter.
//!
//! Owns: the types of these reports: [`RuntimeReport`] of the container runtime, [`PullsView`] of the image pulls,
//! [`EndpointsView`] of the service endpoints. In: values from these actors. Out: the same values, for the node
//! status and its conditions. No logic.

use std::{path::PathBuf, sync::Arc, time::Duration};

#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct RuntimeReport {
    /// `nodeInfo.containerRuntimeVersion`: name and version in the kubelet's format, for example
    /// `containerd://2.4.2`.
    pub version: String,
    pub conditions: Vec<RuntimeCondition>,
    /// In the runtime's order, at most 30 s old and never older than the last pull.
    pub images: Arc<Vec<RuntimeImage>>,
    /// A directory on the image file system, if the runtime names one.
    pub image_fs: Option<PathBuf>,
}

/// CRI `RuntimeCondition`.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct RuntimeCondition {
    /// [`RUNTIME_READY`], [`NETWORK_READY`], or a name of the runtime's own.
    pub kind: String,
    pub ok: bool,
    /// Why the status is false, in one word.
    pub reason: String,
    pub message: String,
}

/// Without it, the runtime runs no container.
pub const RUNTIME_READY: &str = "RuntimeReady";
/// Without it, pods have no network.
pub const NETWORK_READY: &str = "NetworkReady";

#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct RuntimeImage {
    /// References by digest first, then those by tag; empty if the image has no references.
    pub names: Vec<String>,
    /// As reported by the runtime.
    pub size_bytes: u64,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PullsView {
    pub queued: u32,
    /// Pulls with a slot, under the limit and beside it.
    pub running: u32,
    /// Wait time of the first pull in the queue; `None`: the queue is empty.
    pub oldest_wait: Option<Duration>,
    /// Since any pull last made progress (a new reading) or ended, on the monotonic clock; `None`: not since the
    /// start. Meaningless on an idle node: check `oldest_wait` and `running` too.
    pub since_progress: Option<Duration>,
    pub runtime: RuntimeAvailability,
    /// The journal on disk is complete. `false`: the state of pulls is only in memory.
    pub durable: bool,
}

/// Whether the container runtime is available, for [`PullsView`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RuntimeAvailability {
    /// Not checked yet.
    Unknown,
    Up,
    Down {
        /// On the monotonic clock.
        down_for: Duration,
        reason: String,
    },
}

/// Why service endpoints are stale; each maps to one reason of the node's condition.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StaleCause {
    /// A watch of the API server fails, or the folder of manifests cannot be read.
    SourceUnavailable,
    /// The API server answered 401 or 403.
    SourceRefused,
    /// No source fails, but not all are synced.
    NotSynced,
}

/// Status of the service endpoints on this node.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum EndpointsView {
    #[default]
    Disabled,
    /// No status yet: the condition of the Node is not changed.
    Pending,
    /// No client is connected, so the API server is not watched.
    NotWatched,
    Synced,
    /// The endpoints are the last synced ones.
    Stale {
        cause: StaleCause,
        /// The text of the error.
        reason: String,
    },
}
