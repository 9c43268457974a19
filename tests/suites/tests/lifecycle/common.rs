//! Owns: what the tests share. In: a node's name and settings. Out: a cluster that all tests share, agents with
//! separate identities, their requests in the audit log, and conditions set through them.
//!
//! The cluster lives for as long as a test uses it.

use anyhow::{Context as _, Result, ensure};
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::Node;
use keelson_cluster::kube::{
    ApiOptions, AuditEvent, Cluster, ControllerManager, ControllerOptions, Identity, NODE_LEASES,
};
pub(crate) use keelson_cluster::manifests::COMPANION_WITH_LEASE as MANIFEST;
pub(crate) use keelson_cluster::manifests::NODE as NODE_MANIFEST;
use keelson_harness::agent::{Agent, Settings};
use keelson_harness::scratch::Scratch;
use keelson_harness::suite;
pub(crate) use keelson_harness::suite::run;
use keelson_harness::util::{PATIENCE, eventually};
use kube::Api;
use serde_json::Value;
use std::path::Path;
use std::sync::Arc;

pub(crate) const NODE_ROLE: &str = "keelson-node-endpoints";

pub(crate) const ACCOUNT: &str = "keelson-agent";

/// Prefix of the agent's `User-Agent`.
pub(crate) const AGENT: &str = "keelson/";

/// A control plane with its controllers, with default timeouts.
pub(crate) struct SharedCluster {
    _controllers: ControllerManager,
    pub(crate) cluster: Cluster,
    _scratch: Scratch,
}

impl SharedCluster {
    async fn start() -> Result<Self> {
        let scratch = Scratch::new()?;
        // Without streaming lists, because the right to list, which is tested here, is used only then.
        let options = ApiOptions { audit_bodies: true, streaming_lists: false, ..ApiOptions::default() };
        let cluster = Cluster::start_with(&scratch, &options).await?;
        cluster.admin.apply(MANIFEST).await?;
        let controllers = cluster.controllers(&scratch, &ControllerOptions::default()).await?;
        Ok(Self { _controllers: controllers, cluster, _scratch: scratch })
    }
}

pub(crate) async fn shared() -> Result<Arc<SharedCluster>> {
    static SHARED: suite::Shared<SharedCluster> = suite::Shared::new();
    SHARED.get(SharedCluster::start).await
}

/// Runs a test on the cluster that all tests share.
pub(crate) fn on_cluster(test: impl AsyncFnOnce(&Cluster) -> Result<()>) -> Result<()> {
    run(async { test(&shared().await?.cluster).await })
}

/// Settings of an agent of this node, with a Lease in both roles.
pub(crate) fn settings(node: &str, kubeconfig: &Path) -> Settings {
    Settings::new()
        .set("agent.node_name", node)
        .set("node.companion_lease", true)
        // Its watches are not heartbeats, and requests in the API server's log are counted here.
        .set("endpoints.source", "off")
        .set("kube.kubeconfig", kubeconfig.display().to_string())
}

/// The same for role `node`. Free memory and disk of the machine do not matter to these tests.
pub(crate) fn node_settings(node: &str, kubeconfig: &Path, root: &Path) -> Settings {
    settings(node, kubeconfig)
        .set("node.role", "node")
        .set("node.root_dir", root.display().to_string())
        .set("node.eviction_hard", "memory.available<1Mi")
}

/// The agent of `node` with the rights of companions; waits until the API server knows them.
pub(crate) async fn companion(
    cluster: &Cluster,
    scratch: &Scratch,
    account: &str,
    node: &str,
) -> Result<Identity> {
    let identity = cluster.companion(scratch, account, node).await?;
    knows_rights(&identity, "nobody").await?;
    Ok(identity)
}

/// Waits until an account may read this Node and the Lease beside it: one right of each of its roles.
pub(crate) async fn knows_rights(identity: &Identity, node: &str) -> Result<()> {
    let client = identity.client().await?;
    let nodes: Api<Node> = Api::all(client.clone());
    let leases: Api<Lease> = Api::namespaced(client, NODE_LEASES);
    eventually(PATIENCE, "the API server knows the rights of the account", || async {
        nodes.get_opt(node).await.context("it may not read a Node yet")?;
        leases.get_opt(&format!("keelson-{node}")).await.map(drop).context("it may not read a Lease yet")
    })
    .await
}

/// Requests of an agent as this user, in order.
pub(crate) fn agent_requests(cluster: &Cluster, user: &str) -> Result<Vec<AuditEvent>> {
    cluster.api.audit(|event| event.user == user && event.user_agent.starts_with(AGENT))
}

pub(crate) fn describe_event(event: &AuditEvent) -> String {
    format!(
        "{} {} {} {}/{} {}: {:?} {}",
        event.received,
        event.verb,
        event.resource,
        event.subresource,
        event.name,
        event.uri,
        event.code,
        event.body.as_ref().map(Value::to_string).unwrap_or_default()
    )
}

pub(crate) async fn heartbeats(agent: &Agent) -> Result<Value> {
    agent.keelson(&["node", "-o", "json"]).await?.json()
}

pub(crate) async fn wait_until_healthy(agent: &Agent) -> Result<()> {
    eventually(PATIENCE, "the heartbeats are healthy", || async {
        let shown = heartbeats(agent).await?;
        ensure!(shown["state"] == "healthy", "they are {shown}");
        Ok(())
    })
    .await
}

pub(crate) async fn set_condition(agent: &Agent, kind: &str, status: &str, reason: &str) -> Result<()> {
    let set = ["node", "set-condition", kind, status, "--reason", reason];
    agent.keelson(&set).await?.success().map(drop)
}
