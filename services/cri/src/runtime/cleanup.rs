//! Leases that agents left in the runtime, for `keelson cleanup`.
//!
//! Owns: nothing; works without a running agent. In: the runtime's socket. Out: every lease with the label of any
//! keelson agent, and the deletion of a lease.

use std::path::PathBuf;

use hyper_util::rt::TokioIo;
use keelson_proto::containerd::leases::{DeleteRequest, Lease, ListRequest, leases_client::LeasesClient};
use tonic::{Code, Status, transport::Channel};

use super::{
    connect, describe,
    leases::{OWNER_LABEL, in_namespace},
    short, sizes,
};

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AgentLease {
    pub id: String,
    /// The id of the agent's state folder.
    pub owner: String,
    /// What it holds, shared content included; `None`: unknown to the runtime.
    pub bytes: Option<u64>,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CleanupError {
    /// The runtime has no containerd lease API (CRI-O): agents leave nothing there.
    #[error("the container runtime at {endpoint} has no lease API")]
    NoLeases { endpoint: String },
    #[error("cannot {action} at {endpoint}: {reason}")]
    Call { action: String, endpoint: String, reason: String },
}

#[derive(Debug, Clone)]
pub struct LeaseCleaner {
    endpoint: String,
    channel: Channel,
}

impl LeaseCleaner {
    /// Connects when first used.
    #[must_use]
    pub fn new(socket: PathBuf) -> Self {
        let endpoint = format!("unix://{}", socket.display());
        Self { channel: connect(socket, TokioIo::new), endpoint }
    }

    fn error(&self, action: impl Into<String>, status: &Status) -> CleanupError {
        let endpoint = self.endpoint.clone();
        if status.code() == Code::Unimplemented {
            return CleanupError::NoLeases { endpoint };
        }
        CleanupError::Call { action: action.into(), endpoint, reason: describe(status) }
    }

    /// Lists every lease of any agent.
    pub async fn list(&self) -> Result<Vec<AgentLease>, CleanupError> {
        let filter = ListRequest { filters: vec![format!("labels.\"{OWNER_LABEL}\"")] };
        let mut client = LeasesClient::new(self.channel.clone());
        let found = short(client.list(in_namespace(filter))).await;
        let found = found.map_err(|status| self.error("list leases", &status))?.into_inner().leases;
        let mut leases = Vec::with_capacity(found.len());
        for Lease { id, labels, .. } in found {
            let Some(owner) = labels.get(OWNER_LABEL).cloned() else { continue };
            let bytes = short(sizes::of_lease(&self.channel, &id)).await.ok();
            leases.push(AgentLease { id, owner, bytes });
        }
        Ok(leases)
    }

    /// Deletes a lease and waits for the garbage collection that follows; a missing lease is no error.
    pub async fn delete(&self, lease: &str) -> Result<(), CleanupError> {
        let request = DeleteRequest { id: lease.to_owned(), sync: true };
        let mut client = LeasesClient::new(self.channel.clone());
        match short(client.delete(in_namespace(request))).await {
            Err(status) if status.code() != Code::NotFound => {
                Err(self.error(format!("delete lease {lease}"), &status))
            }
            _ => Ok(()),
        }
    }
}
