//! The API server, as the actors need it.
//!
//! Owns: the traits [`LeaseApi`], [`NodeApi`] and [`PodEventApi`] that a service implements, what passes through them, and
//! [`ChoreHealth`], by which an actor that needs the API server says how it fares.
//! In: calls from the LeaseRenewer and the StatusReporter. Out: answers; an error names the server and says
//! what kind of error it is, so that decisions need no text. No method waits forever: a request that is not
//! answered in time is an error of kind [`ApiErrorKind::Timeout`]. Dropping a returned future cancels the call.

use std::{fmt, time::Duration};

use futures_util::future::BoxFuture;
use k8s_openapi::api::core::v1::Node;

/// The namespace of the nodes' Leases (KEP-0009).
pub const LEASE_NAMESPACE: &str = "kube-node-lease";

/// What kind of error a request met.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ApiErrorKind {
    /// 409 `Conflict`: the resourceVersion is not the newest.
    Conflict,
    /// 409 `AlreadyExists`.
    AlreadyExists,
    NotFound,
    /// 410: what was asked for is too old.
    Gone,
    /// 401: the credentials are not accepted.
    Unauthorized,
    /// 403: the credentials do not allow it.
    Forbidden,
    /// 429, with the server's `Retry-After` if it sent one.
    TooManyRequests {
        /// How long the server wants to be left alone.
        retry_after: Option<Duration>,
    },
    /// Another 4xx: the request itself is wrong.
    Invalid,
    /// 5xx, with the server's `Retry-After` if it sent one.
    Server {
        /// How long the server wants to be left alone.
        retry_after: Option<Duration>,
    },
    Timeout,
    /// No connection, or it broke; or an answer that makes no sense.
    Unreachable,
    /// The credentials cannot be read: kubeconfig, certificate or token file.
    Credentials,
}

impl ApiErrorKind {
    /// Whether the server answered that the credentials are not accepted or do not allow it.
    #[must_use]
    pub fn is_refusal(self) -> bool {
        matches!(self, Self::Unauthorized | Self::Forbidden)
    }

    /// For labels and JSON, in the manner of the API's reasons.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Conflict => "Conflict",
            Self::AlreadyExists => "AlreadyExists",
            Self::NotFound => "NotFound",
            Self::Gone => "Gone",
            Self::Unauthorized => "Unauthorized",
            Self::Forbidden => "Forbidden",
            Self::TooManyRequests { .. } => "TooManyRequests",
            Self::Invalid => "Invalid",
            Self::Server { .. } => "ServerError",
            Self::Timeout => "Timeout",
            Self::Unreachable => "Unreachable",
            Self::Credentials => "Credentials",
        }
    }

    /// How long the server asked to be left alone.
    #[must_use]
    pub fn retry_after(self) -> Option<Duration> {
        match self {
            Self::TooManyRequests { retry_after } | Self::Server { retry_after } => retry_after,
            _ => None,
        }
    }
}

/// Why the API server did not do what it was asked.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{server}: {reason}")]
pub struct ApiError {
    pub server: String,
    pub kind: ApiErrorKind,
    /// What went wrong, for people; never holds a credential.
    pub reason: String,
}

/// The metadata that an answer to a write carries: all that is asked for in return.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Written {
    /// `metadata.uid`.
    pub uid: String,
    /// `metadata.resourceVersion`, for the next write.
    pub resource_version: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct LeaseSeen {
    /// `metadata.uid` and `metadata.resourceVersion`.
    pub written: Written,
    /// The uid of the owner of kind Node, if it has one.
    pub owner_uid: Option<String>,
    /// `spec.holderIdentity`.
    pub holder: Option<String>,
    /// `spec.leaseDurationSeconds`.
    pub duration_seconds: Option<i32>,
    /// `spec.renewTime`, in Unix microseconds.
    pub renew_unix_us: Option<i64>,
    /// `spec.acquireTime`, in Unix microseconds.
    pub acquire_unix_us: Option<i64>,
    /// `spec.leaseTransitions`.
    pub transitions: Option<i32>,
}

/// The Node that a Lease belongs to, by which it is deleted with it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Owner {
    pub name: String,
    pub uid: String,
}

/// A Lease to be made in [`LEASE_NAMESPACE`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LeaseCreate {
    pub name: String,
    /// Its `ownerReferences`.
    pub owner: Option<Owner>,
    /// `spec.holderIdentity`.
    pub holder: String,
    /// `spec.leaseDurationSeconds`.
    pub duration_seconds: i32,
    /// `spec.acquireTime` and `spec.renewTime`, in Unix microseconds.
    pub now_unix_us: i64,
    /// `spec.leaseTransitions`.
    pub transitions: i32,
}

/// A renewal: a patch that fails with [`ApiErrorKind::Conflict`] unless `resource_version` is the newest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LeasePatch {
    pub name: String,
    /// The newest resourceVersion that is known.
    pub resource_version: String,
    /// `spec.renewTime`, in Unix microseconds.
    pub renew_unix_us: i64,
    /// `spec.leaseDurationSeconds`, where it has to change.
    pub duration_seconds: Option<i32>,
    /// The owner, where the Lease has none yet or that of an earlier Node of the name.
    pub owner: Option<Owner>,
    /// Holder, acquireTime (Unix microseconds) and transitions, where the Lease changes hands.
    pub acquire: Option<Acquire>,
    /// Drop the record of who set which field (`metadata.managedFields`), which is larger than the Lease itself
    /// and is stored anew with every renewal. The API server does not begin a new one. Asked for once.
    pub forget_managers: bool,
}

/// What changes when a Lease changes hands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Acquire {
    /// `spec.holderIdentity`.
    pub holder: String,
    /// `spec.acquireTime`, in Unix microseconds.
    pub acquire_unix_us: i64,
    /// `spec.leaseTransitions`.
    pub transitions: i32,
}

/// What the LeaseRenewer needs of the API server.
pub trait LeaseApi: Send + Sync + 'static {
    fn server(&self) -> String;

    fn get_lease(&self, name: &str) -> BoxFuture<'static, Result<LeaseSeen, ApiError>>;

    /// POST of a Lease.
    fn create_lease(&self, lease: LeaseCreate) -> BoxFuture<'static, Result<Written, ApiError>>;

    /// PATCH of a Lease, with metadata only in return.
    fn renew_lease(&self, patch: LeasePatch) -> BoxFuture<'static, Result<Written, ApiError>>;

    /// GET of a Node's metadata: its uid.
    fn node_uid(&self, node: &str) -> BoxFuture<'static, Result<String, ApiError>>;

    /// Closes the connections, so that the next request makes a new one: what the kubelet's heartbeat failure
    /// hook does. Requests under way may fail.
    fn close_connections(&self);
}

/// What the StatusReporter needs of the API server.
pub trait NodeApi: Send + Sync + 'static {
    fn server(&self) -> String;

    fn get_node(&self, name: &str) -> BoxFuture<'static, Result<Box<Node>, ApiError>>;

    /// POST of a Node.
    fn create_node(&self, node: Box<Node>) -> BoxFuture<'static, Result<Box<Node>, ApiError>>;

    /// Strategic merge PATCH of a Node's metadata and spec.
    fn patch_node(
        &self,
        name: &str,
        patch: serde_json::Value,
    ) -> BoxFuture<'static, Result<Written, ApiError>>;

    /// Strategic merge PATCH of `/nodes/<name>/status`, with metadata only in return.
    fn patch_status(
        &self,
        name: &str,
        patch: serde_json::Value,
    ) -> BoxFuture<'static, Result<Written, ApiError>>;

    fn close_connections(&self);
}

/// An Event (core/v1) on a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodEvent {
    /// `metadata.name`.
    pub name: String,
    /// That of the pod and of the Event.
    pub namespace: String,
    pub pod: String,
    pub uid: String,
    /// CamelCase.
    pub reason: &'static str,
    pub message: String,
    /// How often it has happened.
    pub count: u32,
    /// `firstTimestamp`, in Unix milliseconds.
    pub first_unix_ms: i64,
    /// `lastTimestamp`, in Unix milliseconds.
    pub last_unix_ms: i64,
    /// `source.host` and `reportingInstance`.
    pub node: String,
}

/// What is needed of the API server to write Events on pods.
pub trait PodEventApi: Send + Sync + 'static {
    /// POST of an Event.
    fn create_pod_event(&self, event: PodEvent) -> BoxFuture<'static, Result<(), ApiError>>;

    /// PATCH of an Event: its count, its last time and its message.
    fn patch_pod_event(&self, event: PodEvent) -> BoxFuture<'static, Result<(), ApiError>>;
}

/// How an actor that needs the API server fares, for `/readyz` and people.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum ChoreHealth {
    #[default]
    Starting,
    Well,
    Failing {
        reason: String,
        /// Unix milliseconds of the first failure in a row.
        since_unix_ms: i64,
        /// The API server answered that the credentials are not accepted or do not allow it (401, 403).
        refused: bool,
    },
}

impl fmt::Display for ChoreHealth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Starting => f.write_str("starting"),
            Self::Well => f.write_str("well"),
            Self::Failing { reason, .. } => write!(f, "failing: {reason}"),
        }
    }
}
