//! The API server, as the actors need it.
//!
//! Owns: the traits [`LeaseApi`], [`NodeApi`] and [`EventApi`] that a service implements, their parameters and
//! results, and [`JobHealth`], the status of an actor that needs the API server.
//! In: calls from the LeaseRenewer and the StatusReporter. Out: results; an error names the server and has a kind, so
//! that decisions do not parse text. No method waits forever: a request without a response in time fails with
//! [`ApiErrorKind::Timeout`]. Dropping a returned future cancels the call.

use std::{fmt, time::Duration};

use futures_util::future::BoxFuture;
use k8s_openapi::api::core::v1::Node;

/// KEP-0009.
pub const LEASE_NAMESPACE: &str = "kube-node-lease";

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ApiErrorKind {
    /// 409 `Conflict`: the resourceVersion is outdated.
    Conflict,
    /// 409 `AlreadyExists`.
    AlreadyExists,
    NotFound,
    /// 410: the requested resourceVersion is too old.
    Gone,
    /// 401: the credentials are not accepted.
    Unauthorized,
    /// 403: the credentials do not allow it.
    Forbidden,
    /// 429.
    TooManyRequests {
        /// `Retry-After`, if sent.
        retry_after: Option<Duration>,
    },
    /// Another 4xx: the request is invalid.
    Invalid,
    /// 5xx.
    Server {
        /// `Retry-After`, if sent.
        retry_after: Option<Duration>,
    },
    Timeout,
    /// No connection, a broken connection, or an invalid response.
    Unreachable,
    /// Kubeconfig, certificate or token file cannot be read.
    Credentials,
}

impl ApiErrorKind {
    /// 401 or 403.
    #[must_use]
    pub fn is_refusal(self) -> bool {
        matches!(self, Self::Unauthorized | Self::Forbidden)
    }

    /// For labels and JSON, in the style of the API's reasons.
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

    /// `Retry-After`, if sent.
    #[must_use]
    pub fn retry_after(self) -> Option<Duration> {
        match self {
            Self::TooManyRequests { retry_after } | Self::Server { retry_after } => retry_after,
            _ => None,
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{server}: {reason}")]
pub struct ApiError {
    pub server: String,
    pub kind: ApiErrorKind,
    /// Never contains a credential.
    pub reason: String,
}

/// The metadata in the response to a write: only this is requested.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Written {
    pub uid: String,
    /// For the next write.
    pub resource_version: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ObservedLease {
    pub written: Written,
    /// `metadata.uid` of the owner of kind Node.
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

/// The Node that owns a Lease, so that both are deleted together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Owner {
    pub name: String,
    pub uid: String,
}

/// Created in [`LEASE_NAMESPACE`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LeaseCreate {
    pub name: String,
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

/// A patch that fails with [`ApiErrorKind::Conflict`] unless `resource_version` is the newest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LeasePatch {
    pub name: String,
    pub resource_version: String,
    /// `spec.renewTime`, in Unix microseconds.
    pub renew_unix_us: i64,
    /// `spec.leaseDurationSeconds`, if it has to change.
    pub duration_seconds: Option<i32>,
    /// Set if the Lease has no owner, or an earlier Node of the same name.
    pub owner: Option<Owner>,
    /// Set if the holder changes.
    pub acquire: Option<LeaseHolder>,
    /// Remove `metadata.managedFields`, which is larger than the rest of the Lease and is stored with every renewal.
    /// The API server does not create it again, so this is requested once.
    pub drop_managed_fields: bool,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LeaseHolder {
    /// `spec.holderIdentity`.
    pub holder: String,
    /// `spec.acquireTime`, in Unix microseconds.
    pub acquire_unix_us: i64,
    /// `spec.leaseTransitions`.
    pub transitions: i32,
}

pub trait LeaseApi: Send + Sync + 'static {
    fn server(&self) -> String;

    fn get_lease(&self, name: &str) -> BoxFuture<'static, Result<ObservedLease, ApiError>>;

    /// POST.
    fn create_lease(&self, lease: LeaseCreate) -> BoxFuture<'static, Result<Written, ApiError>>;

    /// PATCH that returns only metadata.
    fn renew_lease(&self, patch: LeasePatch) -> BoxFuture<'static, Result<Written, ApiError>>;

    /// GET of the metadata.
    fn node_uid(&self, node: &str) -> BoxFuture<'static, Result<String, ApiError>>;

    /// Closes the connections, so that the next request opens a new one, as the kubelet's heartbeat failure hook.
    /// Requests in flight may fail.
    fn close_connections(&self);
}

pub trait NodeApi: Send + Sync + 'static {
    fn server(&self) -> String;

    fn get_node(&self, name: &str) -> BoxFuture<'static, Result<Box<Node>, ApiError>>;

    /// POST.
    fn create_node(&self, node: Box<Node>) -> BoxFuture<'static, Result<Box<Node>, ApiError>>;

    /// Strategic merge PATCH of metadata and spec.
    fn patch_node(
        &self,
        name: &str,
        patch: serde_json::Value,
    ) -> BoxFuture<'static, Result<Written, ApiError>>;

    /// Strategic merge PATCH of `/nodes/<name>/status` that returns only metadata.
    fn patch_status(
        &self,
        name: &str,
        patch: serde_json::Value,
    ) -> BoxFuture<'static, Result<Written, ApiError>>;

    fn close_connections(&self);
}

/// `involvedObject` of an Event.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum EventObject {
    Pod {
        /// Of the pod and of the Event.
        namespace: String,
        name: String,
        uid: String,
    },
    /// The Node that reports the Event. The Event is in the namespace `default`, and its uid is the Node's name, as in
    /// the kubelet: `kubectl describe node` shows it.
    OwnNode,
}

/// An Event (core/v1).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClusterEvent {
    /// `metadata.name`.
    pub name: String,
    pub object: EventObject,
    /// `type` is `Warning` and not `Normal`.
    pub is_warning: bool,
    /// CamelCase.
    pub reason: &'static str,
    pub message: String,
    pub count: u32,
    /// `firstTimestamp`, in Unix milliseconds.
    pub first_unix_ms: i64,
    /// `lastTimestamp`, in Unix milliseconds.
    pub last_unix_ms: i64,
}

pub trait EventApi: Send + Sync + 'static {
    /// POST. `node`: the Node that reports, `source.host` and `reportingInstance`.
    fn create_event(&self, node: &str, event: ClusterEvent) -> BoxFuture<'static, Result<(), ApiError>>;

    /// PATCH of count, last time and message.
    fn patch_event(&self, event: ClusterEvent) -> BoxFuture<'static, Result<(), ApiError>>;
}

/// Status of an actor that needs the API server, for `/readyz` and the debug API.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum JobHealth {
    #[default]
    Pending,
    Healthy,
    Failing {
        reason: String,
        /// Unix milliseconds of the first failure in a row.
        since_unix_ms: i64,
        /// The API server answered 401 or 403.
        refused: bool,
    },
}

impl fmt::Display for JobHealth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Pending => f.write_str("pending"),
            Self::Healthy => f.write_str("healthy"),
            Self::Failing { reason, .. } => write!(f, "failing: {reason}"),
        }
    }
}
