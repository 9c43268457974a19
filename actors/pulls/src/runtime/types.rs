//! What the runtime says, in types that need no socket.
//!
//! Owns: the trait [`Runtime`] that a service implements, and what passes through it.
//! In: calls from the RuntimeClient actor. Out: answers; an error always names the socket.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
    sync::Arc,
    time::Duration,
};

use bytes::Bytes;
use futures_util::future::BoxFuture;
use keelson_actor_system::reports::{RuntimeCondition, RuntimeImage};
use keelson_proto::{Code, backoff::Backoff};

use crate::request::PullCall;

#[derive(Debug, Clone)]
pub struct RuntimePull {
    /// Image, credentials and handler, as the caller sent them.
    pub call: Arc<PullCall>,
    /// The lease to pull in, made first if it is not there.
    pub lease: Option<String>,
    /// The pull option to pass on.
    pub option: Option<u32>,
}

/// A gRPC answer as it came, to be passed on unchanged.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PullReply {
    /// The message, or the status.
    pub result: Result<Bytes, WireStatus>,
    /// Custom metadata, headers and trailers alike; binary values as on the wire.
    pub metadata: Vec<(String, Bytes)>,
}

impl PullReply {
    /// A status of the agent's own making, without metadata.
    #[must_use]
    pub fn status(code: Code, message: impl Into<String>) -> Self {
        let status = WireStatus { code, message: message.into(), details: Bytes::new() };
        Self { result: Err(status), metadata: Vec::new() }
    }
}

/// How the runtime's part of a pull ended.
#[derive(Debug, Clone)]
pub enum Outcome {
    /// The runtime answered, success or error.
    Answered(Arc<PullReply>),
    /// The connection broke, or the runtime was not ready to serve: nothing is known about the image.
    Lost(Arc<PullReply>),
}

impl Outcome {
    #[must_use]
    pub fn reply(&self) -> &Arc<PullReply> {
        let (Self::Answered(reply) | Self::Lost(reply)) = self;
        reply
    }

    #[must_use]
    pub fn is_lost(&self) -> bool {
        matches!(self, Self::Lost(_))
    }
}

/// A gRPC status.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WireStatus {
    /// `grpc-status`.
    pub code: Code,
    /// `grpc-message`, decoded.
    pub message: String,
    /// `grpc-status-details-bin`, decoded.
    pub details: Bytes,
}

/// Why the runtime could not be asked, or did not answer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{endpoint}: {reason}")]
pub struct RuntimeError {
    /// The socket, as in the settings.
    pub endpoint: String,
    /// What went wrong there.
    pub reason: String,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{error}")]
pub struct ProbeFailure {
    /// What failed, and where.
    pub error: RuntimeError,
    pub kind: FailureKind,
}

/// What a failed probe says about the runtime.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FailureKind {
    /// There is no connection, or the runtime says itself that it is not ready.
    Gone,
    /// The connection is there, but `Version` was not answered, or with an error.
    Silent,
    /// `Version` was answered, but `ImageFsInfo` was not, or with an error: it takes long while layers are unpacked.
    Busy,
}

/// What a probe learned: the runtime serves.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct RuntimeInfo {
    /// For example `containerd`.
    pub name: String,
    /// For example `v2.4.2`.
    pub version: String,
    pub capabilities: Capabilities,
}

/// What the agent may use of a runtime.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Capabilities {
    /// It obeys the pull option (it said so in a response header).
    pub pull_option: bool,
    /// It has containerd's lease API, so progress can be kept. An API that fails is there; only UNIMPLEMENTED means
    /// that it is not.
    pub leases: bool,
    /// It has containerd's content API, so progress can be shown.
    pub content: bool,
    /// It is known not to look at a pod's namespace when it pulls. `false` is the safe assumption: requests of different
    /// namespaces then never share a pull.
    pub ignores_namespace: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Progress {
    pub phase: Phase,
    /// Of blobs that are complete or being written.
    pub bytes_done: u64,
    /// Of all blobs; 0 until the manifest is known.
    pub bytes_total: u64,
    /// Layers of which every byte is here.
    pub layers_done: u32,
    /// 0 until the manifest is known.
    pub layers_total: u32,
    /// Whether its downloads move, wait or hang.
    pub download: Download,
}

/// What is known of the downloads of a running pull, from two readings or more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Download {
    /// There is none: the pull unpacks, or is between two steps. Or it is not known.
    #[default]
    Unknown,
    /// A blob of it grew since the reading before, or its download began.
    Moving,
    /// It may wait for the limit on downloads of the runtime itself (containerd
    /// `max_concurrent_downloads`), or for a blob that an older pull downloads.
    Waiting,
    /// It downloads, and no byte came since the reading before.
    Idle,
}

/// A reading of the runtime's downloads.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Readings {
    /// Every unfinished blob of the runtime, by its ref, whichever client downloads it.
    pub ingests: BTreeMap<String, Ingest>,
    /// What is known of the pulls that were asked about, by lease.
    pub pulls: BTreeMap<String, PullReading>,
    /// Why a lease could not be read, if that is so for any.
    pub failed: Option<RuntimeError>,
}

/// An unfinished blob.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Ingest {
    /// Bytes written so far; containerd reports them in steps of 1 MiB.
    pub offset: u64,
    /// When it was begun, in Unix milliseconds; a download that is taken up again keeps this time.
    pub started_unix_ms: i64,
}

#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct PullReading {
    /// How far it is; [`Progress::download`] is not set.
    pub progress: Progress,
    /// Whether the manifest is known, and so the blobs that belong to the pull.
    pub has_manifest: bool,
    /// The refs of its unfinished blobs.
    pub refs: Vec<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Phase {
    /// Asking the registry what the reference means.
    #[default]
    Resolving,
    /// Fetching config and layers.
    Downloading,
    /// Every byte is here; the layers are being extracted.
    Unpacking,
}

impl Phase {
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Resolving => "resolving",
            Self::Downloading => "downloading",
            Self::Unpacking => "unpacking",
        }
    }
}

/// The container runtime, as the actors need it. Dropping a returned future cancels the call.
pub trait Runtime: Send + Sync + 'static {
    /// The socket, as in the settings.
    fn endpoint(&self) -> &str;

    /// Asks whether the runtime serves (CRI `Version` and `ImageFsInfo`, the kubelet's own start-up
    /// probes) and what it can do.
    fn probe(&self) -> BoxFuture<'static, Result<RuntimeInfo, ProbeFailure>>;

    /// CRI `PullImage`. Never fails: what went wrong is in the reply.
    fn pull(&self, pull: RuntimePull) -> BoxFuture<'static, Outcome>;

    /// CRI `ImageStatus`: the size in bytes if the runtime has the image.
    fn image_size(&self, call: Arc<PullCall>) -> BoxFuture<'static, Result<Option<u64>, RuntimeError>>;

    /// CRI `Status`: the runtime's own conditions, such as [`RUNTIME_READY`](keelson_actor_system::reports::RUNTIME_READY). Takes a few seconds at most.
    fn status(&self) -> BoxFuture<'static, Result<Vec<RuntimeCondition>, RuntimeError>>;

    /// CRI `ListImages`: every image. Takes a few seconds at most.
    fn images(&self) -> BoxFuture<'static, Result<Vec<RuntimeImage>, RuntimeError>>;

    /// CRI `ImageFsInfo`: a directory on the file system of the images (containerd: that of the
    /// snapshotter), `None` if the runtime names none. Takes a few seconds at most.
    fn image_fs(&self) -> BoxFuture<'static, Result<Option<PathBuf>, RuntimeError>>;

    /// Ends when a connection to the runtime has closed, on either side; at once if that happened since
    /// such a future ended last. One at a time is listened to.
    fn connection_closed(&self) -> BoxFuture<'static, ()>;

    /// Reads how far the pulls in these leases are. A lease of which nothing is known is left out.
    fn progress(&self, leases: Vec<String>) -> BoxFuture<'static, Result<Readings, RuntimeError>>;

    /// Deletes a lease; one that is not there is no error. `collect`: the runtime frees what only this lease kept before it
    /// answers, not when it next collects garbage, which may be minutes later (containerd: 50 times as long as a collection
    /// takes).
    fn drop_lease(&self, lease: String, collect: bool) -> BoxFuture<'static, Result<(), RuntimeError>>;

    /// How many bytes a lease holds: blobs, ingests and snapshots, those that it shares with others included. 0 if it is
    /// not there.
    fn lease_bytes(&self, lease: String) -> BoxFuture<'static, Result<u64, RuntimeError>>;

    /// Gives each of these leases a new expiry if its own is near. One that is not there is left out.
    fn renew_leases(&self, leases: Vec<String>) -> BoxFuture<'static, Result<(), RuntimeError>>;

    /// Deletes every lease that this agent's state folder ever made, but `keep` and those used since
    /// the process began. Returns what it deleted.
    fn reap_leases(&self, keep: BTreeSet<String>) -> BoxFuture<'static, Result<Vec<String>, RuntimeError>>;
}

/// Pauses before probes after an error (kubelet: 100 ms to 3 s).
pub const PROBES: Backoff = Backoff { first: Duration::from_millis(100), longest: Duration::from_secs(3) };
/// How often a runtime that answers is probed. One that dies closes its connection, which is noticed at
/// once; this finds those that stop to answer, and is a trifle for both sides.
pub const PROBE_INTERVAL: Duration = Duration::from_secs(5);
