//! Shared by all measurements.
//!
//! Owns: a cluster with one Node, and agents of it. In: settings. Out: [`TestEnv`], and metrics of an agent.

use std::fs;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use keelson_cluster::kube::{ApiOptions, Cluster, Identity};
use keelson_cluster::manifests::COMPANION as COMPANION_RIGHTS;
use keelson_cluster::manifests::NODE as NODE_RIGHTS;
use keelson_harness::agent::{Agent, Settings};
use keelson_harness::containerd::{Containerd, Kind, Options};
use keelson_harness::scratch::Scratch;
use keelson_harness::util::eventually;

/// The nodes: some of those that the endpoints are spread over.
pub(super) const NODES: [&str; 3] = ["bulk-node-007", "bulk-node-008", "bulk-node-009"];
pub(super) const EACH: usize = 10;
pub(super) const PATIENCE: Duration = Duration::from_secs(300);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    Companion,
    Node,
}

impl Role {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Companion => "companion",
            Self::Node => "node",
        }
    }
}

pub(super) struct TestEnv {
    pub(super) cluster: Cluster,
    containerd: Containerd,
    /// By node.
    companions: Vec<(&'static str, Identity)>,
    node: Identity,
    pub(super) scratch: Scratch,
}

impl TestEnv {
    pub(super) async fn new() -> Result<Self> {
        let scratch = Scratch::new()?;
        let containerd = Containerd::start(&scratch, Kind::V2, &Options::default()).await?;
        // Not needed here.
        let options = ApiOptions { args: vec!["--audit-log-path=".to_owned()], ..ApiOptions::default() };
        let cluster = Cluster::start_with(&scratch, &options).await?;
        cluster.admin.apply(COMPANION_RIGHTS).await?;
        cluster.admin.apply(NODE_RIGHTS).await?;
        for node in NODES {
            cluster.admin.create_node(node, &[("topology.kubernetes.io/zone", "zone-a")]).await?;
        }
        let mut companions = Vec::new();
        for node in NODES {
            companions.push((node, cluster.companion(&scratch, "keelson-agent", node).await?));
        }
        let node = cluster.node(&scratch, NODES[0]).await?;
        Ok(Self { cluster, containerd, companions, node, scratch })
    }

    /// An agent of the first node that is not started yet, with these settings beside those that it needs.
    pub(super) fn agent(&self, role: Role, settings: Settings) -> Result<Agent> {
        self.agent_of(NODES[0], role, settings)
    }

    /// The same of another node; in role `node` there is only one.
    pub(super) fn agent_of(&self, node: &str, role: Role, settings: Settings) -> Result<Agent> {
        let identity = match role {
            Role::Companion => {
                let own = self.companions.iter().find(|(name, _)| *name == node);
                own.map(|(_, identity)| identity).with_context(|| format!("{node} is none of {NODES:?}"))?
            }
            Role::Node => &self.node,
        };
        let settings = settings
            .set("agent.node_name", node)
            .set("node.role", role.name())
            .set("node.root_dir", self.scratch.path().display().to_string())
            // The disk of the machine may be full.
            .set("node.eviction_hard", "memory.available<1Mi")
            .set("kube.kubeconfig", identity.kubeconfig().display().to_string());
        Agent::new(&self.scratch, &self.containerd.endpoint(), &settings)
    }

    /// Ends an agent, and removes its state.
    pub(super) async fn end(&self, mut agent: Agent) -> Result<()> {
        agent.terminate().await?;
        fs::remove_dir_all(agent.state_dir()).context("cannot remove the agent's state")
    }
}

/// A value of `/metrics`; `name` includes all labels; 0 if it does not exist yet.
pub(super) async fn metric(agent: &Agent, name: &str) -> Result<f64> {
    Ok(agent.metric(name).await?.unwrap_or_default())
}

/// Waits until an agent serves this number of Services and is not stale.
pub(super) async fn serves(agent: &Agent, services: usize) -> Result<()> {
    eventually(PATIENCE, "the agent serves everything", || async {
        let (have, stale) = (
            metric(agent, "keelson_endpoints_services").await?,
            metric(agent, "keelson_endpoints_stale").await?,
        );
        // The API server's own Service is one, and other measurements leave none behind.
        ensure!(have >= services as f64 && stale == 0.0, "{have} Services, stale: {stale}");
        tokio::time::sleep(Duration::from_millis(50)).await;
        Ok(())
    })
    .await
}
