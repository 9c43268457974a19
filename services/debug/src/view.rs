//! What the debug API needs from the agent.
//!
//! Owns: [`AgentView`], its errors, and the timeout of its answers.
//! In: calls from the gRPC and HTTP sides. Out: the documents of `keelson.debug.v1`, `keelson.node.v1` and
//! the service Inspection of `keelson.endpoints.v1`.

use std::future::Future;

use keelson_proto::{debug as pb, endpoints, node};
use keelson_serve::{Check, ViewError, history::History, within_time};
use tokio::sync::watch;

/// The agent, as the debug API sees it. The binary implements it on its actors; tests script it.
///
/// Implementations are cheap to clone and never hold a lock over an await.
pub trait AgentView: Clone + Send + Sync + 'static {
    /// Versions, and whether the agent is ready.
    fn version(&self) -> impl Future<Output = pb::GetVersionResponse> + Send;

    /// All actors, without state and events.
    fn actors(&self) -> impl Future<Output = Vec<pb::Actor>> + Send;

    /// One actor with state and events; `None` if there is no actor of that name.
    fn actor(&self, name: &str) -> impl Future<Output = Option<pb::Actor>> + Send;

    fn actor_names(&self) -> Vec<String>;

    /// Running pulls, at most `max_queued` of the queue, and the latest finished ones.
    fn pulls(&self, max_queued: u32) -> impl Future<Output = Result<pb::PullList, ViewError>> + Send;

    /// Increased whenever pulls, actors, heartbeats or endpoints change. Watchers are not sent changes without it.
    fn changes(&self) -> watch::Receiver<u64>;

    /// Whether a local user may change the limit and the conditions of the node; every user who can open the socket may
    /// read. Called for each change.
    fn may_change(&self, uid: u32) -> bool;

    /// The effective limit.
    fn limit(&self) -> impl Future<Output = Result<pb::Limit, ViewError>> + Send;

    /// Changes the limit: 0 for none, `None` for the limit of the settings.
    fn set_limit(&self, limit: Option<u32>) -> impl Future<Output = Result<pb::Limit, ViewError>> + Send;

    fn storage(&self) -> impl Future<Output = Result<pb::Storage, ViewError>> + Send;

    /// The effective settings.
    fn config(&self) -> impl Future<Output = pb::Config> + Send;

    /// Lease, status and conditions of the node.
    fn heartbeats(&self) -> impl Future<Output = Result<node::Heartbeats, ViewError>> + Send;

    /// Sets a condition of the node for another process, to be reported with the next status. Returns whether it
    /// differs from the one that was set before.
    fn set_condition(
        &self,
        condition: node::SetConditionRequest,
    ) -> impl Future<Output = Result<bool, ConditionError>> + Send;

    /// Removes a condition that was set by [`AgentView::set_condition`] from the node's status.
    fn clear_condition(&self, kind: &str) -> impl Future<Output = Result<(), ConditionError>> + Send;

    /// The status of the service endpoints, with up to `max_services` Services of `namespace` (empty: all namespaces).
    /// Disabled endpoints are a valid answer, not an error.
    fn endpoints(
        &self,
        namespace: &str,
        max_services: u32,
    ) -> impl Future<Output = Result<endpoints::State, ViewError>> + Send;

    /// One Service: its frontends, and why each endpoint is selected or not; `None` if neither a Service nor an
    /// EndpointSlice of that name is known.
    fn explain(
        &self,
        namespace: &str,
        name: &str,
    ) -> impl Future<Output = Result<Option<endpoints::Explanation>, ViewError>> + Send;

    /// Samples of the last hour.
    fn history(&self) -> History;

    /// Checks of failures that only a restart can repair.
    fn livez(&self) -> impl Future<Output = Vec<Check>> + Send;

    /// Checks of whether the agent can work now.
    fn readyz(&self) -> impl Future<Output = Vec<Check>> + Send;

    /// All metrics as OpenMetrics text, including `# EOF`.
    fn metrics(&self) -> impl Future<Output = String> + Send;
}

/// Why a condition of the node was not set or cleared.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ConditionError {
    /// Type, status, reason, message or time to live is not valid for a node condition.
    #[error("{0}")]
    Invalid(String),
    /// Another process reports a condition of that type: the agent, the kubelet, a controller.
    #[error("{0}")]
    NotYours(String),
    /// The maximum number of conditions is set; clearing one makes room.
    #[error("{0}")]
    TooMany(String),
    /// No condition of that type was set.
    #[error("{0}")]
    NotSet(String),
    /// Heartbeats are disabled, or the actor that keeps the conditions does not run now.
    #[error("{0}")]
    Unavailable(String),
}

/// Limits the wait for an answer: an actor that is stuck must not block its watchers.
pub(crate) async fn with_timeout<T>(answer: impl Future<Output = T>) -> Result<T, ViewError> {
    within_time("the agent did not answer", "an actor may be stuck", answer).await
}

/// As [`within`], for answers that may be errors themselves.
pub(crate) async fn answer<T>(answer: impl Future<Output = Result<T, ViewError>>) -> Result<T, ViewError> {
    with_timeout(answer).await.and_then(|answer| answer)
}
