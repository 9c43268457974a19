//! What other actors report to the StatusReporter.
//!
//! Owns: the nouns of these reports, which their senders and the StatusReporter share: [`RuntimeReport`] of the container
//! runtime, [`FlowView`] of the image pulls, [`EndpointsView`] of the service endpoints. In: values that these actors make.
//! Out: the same values, for the node status and its conditions. No logic.

use std::{path::PathBuf, sync::Arc, time::Duration};

/// What node status reports of the runtime.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct RuntimeReport {
    /// `nodeInfo.containerRuntimeVersion`: name and version as the kubelet writes them, for example
    /// `containerd://2.4.2`.
    pub version: String,
    /// What the runtime says of itself, just now.
    pub conditions: Vec<RuntimeCondition>,
    /// Its images, in the runtime's order, at most 30 s old and never older than the last pull.
    pub images: Arc<Vec<RuntimeImage>>,
    /// A directory on the file system of its images, if it names one.
    pub image_fs: Option<PathBuf>,
}

/// One of the runtime's own conditions (CRI `RuntimeCondition`).
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct RuntimeCondition {
    /// [`RUNTIME_READY`], [`NETWORK_READY`], or one of the runtime's own.
    pub kind: String,
    pub ok: bool,
    /// Why not, in one word.
    pub reason: String,
    /// Why not, for people.
    pub message: String,
}

/// The condition without which the runtime runs no container.
pub const RUNTIME_READY: &str = "RuntimeReady";
/// The condition without which pods get no network.
pub const NETWORK_READY: &str = "NetworkReady";

#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct RuntimeImage {
    /// References by digest first, then those by tag; an image that nothing refers to has none.
    pub names: Vec<String>,
    /// As the runtime counts it.
    pub size_bytes: u64,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FlowView {
    pub queued: u32,
    /// Pulls that hold one, under the limit and beside it.
    pub running: u32,
    /// How long the first in the queue has waited; `None`: nothing waits.
    pub oldest_wait: Option<Duration>,
    /// Since any pull last made progress (a new reading) or ended, on the monotonic clock; `None`: not since the
    /// start. Of an idle node it says nothing: to be looked at beside `oldest_wait` and `running`.
    pub since_moved: Option<Duration>,
    pub runtime: RuntimeFlow,
    /// The journal on disk is complete. `false`: pulls go on in memory only.
    pub durable: bool,
}

/// Whether the container runtime serves, for [`FlowView`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RuntimeFlow {
    /// It has not been asked yet.
    Unknown,
    Up,
    Away {
        /// For how long, on the monotonic clock.
        away_for: Duration,
        reason: String,
    },
}

/// Why service endpoints are stale: one reason each of the node's condition.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StaleCause {
    /// A watch of the API server fails, or the manifests folder cannot be read.
    SourceUnavailable,
    /// The API server answered 401 or 403.
    SourceRefused,
    /// No source fails, and not all of them are synced.
    NotSynced,
}

/// How the service endpoints on this node fare.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum EndpointsView {
    #[default]
    Off,
    /// It runs and has not said anything yet: what the Node says of it stays.
    Starting,
    /// No client follows them, so the API server is not watched for them.
    NotWatched,
    Current,
    /// They are the last ones that were synced.
    Stale {
        cause: StaleCause,
        /// Why, for people: an error's own words.
        reason: String,
    },
}
