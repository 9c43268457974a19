//! Removes the agent's conditions from the Node.
//!
//! Owns: nothing. In: the API server, the types of conditions. Out: one read of the Node, and one patch that deletes
//! those that exist.

use std::time::Duration;

use keelson_actor_system::cluster::{ApiError, ApiErrorKind, NodeApi as _};
use keelson_heartbeats::status::{EndReports, removal_patch};
use keelson_kube::ApiServer;
use tokio::time::timeout;

use super::{EnabledHeartbeats, Heartbeats};

/// Maximum wait of a stop for the API server.
const TIMEOUT: Duration = Duration::from_secs(5);

/// Which of these conditions the Node has; `None`: there is no Node.
pub(crate) async fn find(
    api: &ApiServer,
    node: &str,
    kinds: &[String],
) -> Result<Option<Vec<String>>, ApiError> {
    let node = match api.get_node(node).await {
        Ok(node) => node,
        Err(error) if error.kind == ApiErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    let there = node.status.and_then(|status| status.conditions).unwrap_or_default();
    let is_there = |kind: &&String| there.iter().any(|condition| condition.type_ == **kind);
    Ok(Some(kinds.iter().filter(is_there).cloned().collect()))
}

/// Deletes these conditions from the Node, in one request.
pub(crate) async fn remove(api: &ApiServer, node: &str, kinds: &[String]) -> Result<(), ApiError> {
    api.patch_status(node, removal_patch(kinds)).await.map(drop)
}

impl Heartbeats {
    /// Ends the heartbeats for good, if the settings request it: removes the agent's conditions from the Node, and
    /// those that others set through it. Those of a kubelet stay.
    pub(in crate::agent) async fn leave(&self) {
        let Self::Enabled(on) = self else { return };
        if !on.removes_conditions {
            return;
        }
        match timeout(TIMEOUT, on.leave()).await {
            Ok(Ok(count)) => tracing::info!(count, "node conditions removed"),
            Ok(Err(error)) => {
                tracing::warn!(error, "cannot remove the node conditions; run keelson cleanup to remove them")
            }
            Err(_) => tracing::warn!(
                timeout = ?TIMEOUT,
                "the API server did not answer in time; run keelson cleanup to remove the node conditions"
            ),
        }
    }
}

impl EnabledHeartbeats {
    /// The actors stop later: connections to the API server may be on their threads.
    async fn leave(&self) -> Result<usize, String> {
        let kinds = self.status.reporter.ask(EndReports {}).await.map_err(|error| error.to_string())?;
        let text = |error: ApiError| error.to_string();
        let found = find(&self.rest, &self.node_name, &kinds).await.map_err(text)?.unwrap_or_default();
        if !found.is_empty() {
            remove(&self.rest, &self.node_name, &found).await.map_err(text)?;
        }
        Ok(found.len())
    }
}
