//! Owns: what the tests share. In: a node's name and settings. Out: a cluster that all tests have in common, agents
//! with identities of their own, what the audit log says of them, and conditions set through them.
//!
//! All tests run on one runtime, for a cluster's clients belong to the runtime they were made on. The cluster lives for
//! as long as a test has it.

use anyhow::{Context as _, Result, bail, ensure};
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::Node;
use keelson_tests::agent::{Agent, Settings};
use keelson_tests::kube::{
    ApiOptions, AuditEvent, Cluster, ControllerManager, ControllerOptions, Identity, NODE_LEASES,
};
use keelson_tests::scratch::Scratch;
use keelson_tests::util::{PATIENCE, eventually};
use kube::Api;
use kube::api::PostParams;
use serde_json::{Value, json};
use std::path::Path;
use std::sync::{Arc, LazyLock, Weak};
use tokio::process::Command;
use tokio::runtime::Runtime;
use tokio::sync::Mutex;

/// The rights of companions that have a Lease, as they are shipped.
pub(crate) const MANIFEST: &str = concat!(
    include_str!("../../../packaging/kubernetes/companion.yaml"),
    "---\n",
    include_str!("../../../packaging/kubernetes/companion-lease.yaml")
);

/// The rights of nodes for service endpoints, as they are shipped.
pub(crate) const NODE_MANIFEST: &str = include_str!("../../../packaging/kubernetes/node.yaml");

/// The role that [`NODE_MANIFEST`] makes.
pub(crate) const NODE_ROLE: &str = "keelson-node-endpoints";

/// The account that [`MANIFEST`] makes.
pub(crate) const ACCOUNT: &str = "keelson-agent";

/// How the agent names itself to the API server.
pub(crate) const AGENT: &str = "keelson/";

/// Runs a test on the runtime of all.
pub(crate) fn run(test: impl Future<Output = Result<()>>) -> Result<()> {
    static RUNTIME: LazyLock<std::io::Result<Runtime>> = LazyLock::new(Runtime::new);
    let runtime = RUNTIME.as_ref().map_err(|error| anyhow::anyhow!("there is no runtime: {error}"))?;
    runtime.block_on(test)
}

/// A control plane with its controllers, as patient as they are everywhere.
pub(crate) struct Shared {
    _controllers: ControllerManager,
    pub(crate) cluster: Cluster,
    _scratch: Scratch,
}

/// The cluster of all tests.
pub(crate) async fn shared() -> Result<Arc<Shared>> {
    static SHARED: Mutex<Weak<Shared>> = Mutex::const_new(Weak::new());
    let mut shared = SHARED.lock().await;
    if let Some(shared) = shared.upgrade() {
        return Ok(shared);
    }
    let scratch = Scratch::new()?;
    // Without streaming lists, because the right to list, which is tested here, is used only then.
    let options = ApiOptions { audit_bodies: true, streaming_lists: false, ..ApiOptions::default() };
    let cluster = Cluster::start_with(&scratch, &options).await?;
    cluster.admin.apply(MANIFEST).await?;
    let controllers = cluster.controllers(&scratch, &ControllerOptions::default()).await?;
    let started = Arc::new(Shared { _controllers: controllers, cluster, _scratch: scratch });
    *shared = Arc::downgrade(&started);
    Ok(started)
}

/// Settings of an agent that belongs to this node, with a Lease in both roles.
pub(crate) fn settings(node: &str, kubeconfig: &Path) -> Settings {
    Settings::new()
        .set("agent.node_name", node)
        .set("node.companion_lease", true)
        // Its watches are not heartbeats, and the API server's log is counted here.
        .set("endpoints.source", "off")
        .set("kube.kubeconfig", kubeconfig.display().to_string())
}

/// The same for role `node`. What the machine has left of memory and disk is no matter of these tests.
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

/// Makes a Node that nobody reports for, as if its kubelet had.
pub(crate) async fn make_node(cluster: &Cluster, name: &str) -> Result<()> {
    let node: Node = serde_json::from_value(json!({"metadata": {"name": name}}))?;
    cluster.admin.nodes().create(&PostParams::default(), &node).await.context("cannot make the Node")?;
    Ok(())
}

/// What an agent asked as this user, in its order.
pub(crate) fn asked(cluster: &Cluster, user: &str) -> Result<Vec<AuditEvent>> {
    cluster.api.audit(|event| event.user == user && event.user_agent.starts_with(AGENT))
}

/// A request as a line.
pub(crate) fn line(event: &AuditEvent) -> String {
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

/// Runs `keelson node` against this agent, and gives what it writes as JSON.
async fn keelson_node(agent: &Agent, args: &[&str]) -> Result<Value> {
    let socket = format!("unix://{}", agent.debug_socket().display());
    let output = Command::new(agent.program())
        .args(["node", "--socket", &socket, "--output", "json"])
        .args(args)
        .kill_on_drop(true)
        .output()
        .await
        .context("cannot run keelson")?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    if !output.status.success() {
        bail!("keelson node {args:?} ended with {}: {}", output.status, text(&output.stderr));
    }
    serde_json::from_slice(&output.stdout)
        .with_context(|| format!("keelson node wrote no JSON: {}", text(&output.stdout)))
}

/// What the agent says of its heartbeats.
pub(crate) async fn heartbeats(agent: &Agent) -> Result<Value> {
    keelson_node(agent, &[]).await
}

/// Waits until the agent says that its heartbeats are well.
pub(crate) async fn well(agent: &Agent) -> Result<()> {
    eventually(PATIENCE, "the heartbeats are well", || async {
        let shown = heartbeats(agent).await?;
        ensure!(shown["state"] == "well", "they are {shown}");
        Ok(())
    })
    .await
}

/// Reports a condition through the agent.
pub(crate) async fn set_condition(agent: &Agent, kind: &str, status: &str, reason: &str) -> Result<()> {
    keelson_node(agent, &["set-condition", kind, status, "--reason", reason]).await.map(drop)
}
