//! Types of the runtime's answers, independent of sockets.
//!
//! Owns: the trait [`Runtime`] that a service implements, and its types. In: calls from the RuntimeClient actor. Out:
//! answers; an error always names the socket.

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
    pub call: Arc<PullCall>,
    /// Created first if it does not exist.
    pub lease: Option<String>,
    pub option: Option<u32>,
}

/// A gRPC answer, to be passed on unchanged.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PullReply {
    pub result: Result<Bytes, WireStatus>,
    /// Custom metadata, headers and trailers alike; binary values as on the wire.
    pub metadata: Vec<(String, Bytes)>,
}

impl PullReply {
    /// A status of the agent itself, without metadata.
    #[must_use]
    pub fn status(code: Code, message: impl Into<String>) -> Self {
        let status = WireStatus { code, message: message.into(), details: Bytes::new() };
        Self { result: Err(status), metadata: Vec::new() }
    }
}

#[derive(Debug, Clone)]
pub enum Outcome {
    /// Success or error.
    Answered(Arc<PullReply>),
    /// The connection broke, or the runtime was not ready: nothing is known about the image.
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

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WireStatus {
    /// `grpc-status`.
    pub code: Code,
    /// `grpc-message`, decoded.
    pub message: String,
    /// `grpc-status-details-bin`, decoded.
    pub details: Bytes,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{endpoint}: {reason}")]
pub struct RuntimeError {
    /// The socket, as in the settings.
    pub endpoint: String,
    pub reason: String,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{error}")]
pub struct ProbeFailure {
    pub error: RuntimeError,
    pub kind: FailureKind,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FailureKind {
    /// There is no connection, or the runtime reports that it is not ready.
    Gone,
    /// The connection is open, but `Version` was not answered, or with an error.
    Silent,
    /// `Version` was answered, but `ImageFsInfo` was not, or with an error: it takes long while layers are unpacked.
    Busy,
}

/// Result of a successful probe.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct RuntimeInfo {
    /// For example `containerd`.
    pub name: String,
    /// For example `v2.4.2`.
    pub version: String,
    pub capabilities: Capabilities,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Capabilities {
    /// The runtime obeys the pull option (it said so in a response header).
    pub pull_option: bool,
    /// The runtime has containerd's lease API, so progress can be kept. Only UNIMPLEMENTED means that it has not.
    pub leases: bool,
    /// The runtime has containerd's content API, so progress can be shown.
    pub content: bool,
    /// The runtime is known to ignore a pod's namespace in a pull. `false` is the safe assumption: requests of
    /// different namespaces then never share a pull.
    pub ignores_namespace: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Progress {
    pub phase: Phase,
    /// Of blobs that are complete or being written.
    pub bytes_done: u64,
    /// Of all blobs; 0 until the manifest is known.
    pub bytes_total: u64,
    /// Complete layers.
    pub layers_done: u32,
    /// 0 until the manifest is known.
    pub layers_total: u32,
    pub download: Download,
}

/// The downloads of a running pull, from two readings or more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Download {
    /// None: the pull unpacks, or is between two steps. Or unknown.
    #[default]
    Unknown,
    /// A blob of it grew since the reading before, or its download began.
    Moving,
    /// It may wait for the runtime's own limit on downloads (containerd `max_concurrent_downloads`), or for a blob that
    /// an older pull downloads.
    Waiting,
    /// It downloads, and no byte arrived since the reading before.
    Idle,
}

#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Readings {
    /// Every unfinished blob of the runtime, by its ref, of any client.
    pub ingests: BTreeMap<String, Ingest>,
    /// By lease.
    pub pulls: BTreeMap<String, PullReading>,
    /// Why a lease could not be read, if any failed.
    pub failed: Option<RuntimeError>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Ingest {
    /// Bytes written so far; containerd reports them in steps of 1 MiB.
    pub offset: u64,
    /// Unix milliseconds; a resumed download keeps this time.
    pub started_unix_ms: i64,
}

#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct PullReading {
    /// [`Progress::download`] is not set.
    pub progress: Progress,
    /// Whether the manifest, and so the blobs of the pull, are known.
    pub has_manifest: bool,
    pub refs: Vec<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Phase {
    /// Asking the registry for the manifest of the reference.
    #[default]
    Resolving,
    Downloading,
    /// Every byte has arrived; the layers are being extracted.
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

/// Dropping a returned future cancels the call.
pub trait Runtime: Send + Sync + 'static {
    fn endpoint(&self) -> &str;

    /// CRI `Version` and `ImageFsInfo`, as the kubelet's start-up probes.
    fn probe(&self) -> BoxFuture<'static, Result<RuntimeInfo, ProbeFailure>>;

    /// CRI `PullImage`. Never fails: errors are in the reply.
    fn pull(&self, pull: RuntimePull) -> BoxFuture<'static, Outcome>;

    /// CRI `ImageStatus`: the size in bytes if the runtime has the image.
    fn image_size(&self, call: Arc<PullCall>) -> BoxFuture<'static, Result<Option<u64>, RuntimeError>>;

    /// CRI `Status`: the runtime's own conditions, such as `RuntimeReady`. Takes a few seconds at most.
    fn status(&self) -> BoxFuture<'static, Result<Vec<RuntimeCondition>, RuntimeError>>;

    /// CRI `ListImages`: every image. Takes a few seconds at most.
    fn images(&self) -> BoxFuture<'static, Result<Vec<RuntimeImage>, RuntimeError>>;

    /// CRI `ImageFsInfo`: a directory on the file system of the images (containerd: that of the
    /// snapshotter), `None` if the runtime names none. Takes a few seconds at most.
    fn image_fs(&self) -> BoxFuture<'static, Result<Option<PathBuf>, RuntimeError>>;

    /// Ends when a connection to the runtime has closed, on either side; at once if that happened since the last such
    /// future ended. Only one future is awaited at a time.
    fn connection_closed(&self) -> BoxFuture<'static, ()>;

    /// A lease of which nothing is known is omitted.
    fn progress(&self, leases: Vec<String>) -> BoxFuture<'static, Result<Readings, RuntimeError>>;

    /// A missing lease is no error. `collect`: the runtime frees what only this lease kept before it answers, not at
    /// its next garbage collection, which may be minutes later (containerd: 50 times the duration of a collection).
    fn drop_lease(&self, lease: String, collect: bool) -> BoxFuture<'static, Result<(), RuntimeError>>;

    /// Bytes of a lease: blobs, ingests and snapshots, those shared with other leases included. 0 if it does not exist.
    fn lease_bytes(&self, lease: String) -> BoxFuture<'static, Result<u64, RuntimeError>>;

    /// Extends those whose expiry is near. A missing lease is skipped.
    fn renew_leases(&self, leases: Vec<String>) -> BoxFuture<'static, Result<(), RuntimeError>>;

    /// Deletes every lease that this agent's state folder ever made, except `keep` and those used since the process
    /// began. Returns the deleted ones.
    fn reap_leases(&self, keep: BTreeSet<String>) -> BoxFuture<'static, Result<Vec<String>, RuntimeError>>;

    /// No lease is deleted from now on: they belong to a successor, which may use one that this process does not know.
    /// Deletions that have begun end before the next lease.
    fn leave_leases(&self);
}

/// Pauses before probes after an error (kubelet: 100 ms to 3 s).
pub const PROBES: Backoff = Backoff { first: Duration::from_millis(100), longest: Duration::from_secs(3) };
/// Interval of probes of a runtime that answers. A runtime that dies closes its connection, which is noticed at once;
/// this finds those that stop answering.
pub const PROBE_INTERVAL: Duration = Duration::from_secs(5);
