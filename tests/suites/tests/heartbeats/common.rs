//! Owns: what the tests share. In: a role and settings. Out: a shared cluster, an agent with a separate identity, its
//! requests in the audit log, and what it reports.
//!
//! A cluster lives for as long as a test uses it.

use crate::runtime::start_ready_runtime;
use anyhow::{Context as _, Result, bail, ensure};
use keelson_cluster::kube::{
    ApiOptions, AuditEvent, Cluster, ControllerManager, ControllerOptions, Identity,
};
use keelson_cluster::manifests::COMPANION;
use keelson_cluster::manifests::COMPANION_WITH_LEASE as MANIFEST;
pub(crate) use keelson_cluster::manifests::NODE as NODE_MANIFEST;
use keelson_harness::agent::{Agent, Settings};
use keelson_harness::fake_runtime::FakeRuntime;
use keelson_harness::scratch::Scratch;
use keelson_harness::suite;
pub(crate) use keelson_harness::suite::run;
use keelson_harness::util::Answer;
pub(crate) use keelson_harness::util::eventually_slow;
use serde_json::Value;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// Silence after which the controller of [`controlled`] marks a node `Unknown`.
pub(crate) const GRACE: Duration = Duration::from_secs(10);

/// Nodes with a token, because a proxy that terminates TLS is between them and the API server.
const TOKEN_NODES: [&str; 3] = ["case-24-node", "case-28-unposted", "faulty-node"];

/// The account and the roles that [`MANIFEST`] makes.
const ACCOUNT: &str = "keelson-agent";

/// The rights of a companion for an account of this name, with separate roles.
pub(crate) fn manifest_of(account: &str) -> String {
    MANIFEST.replace(ACCOUNT, account)
}

pub(crate) struct SharedCluster {
    _controllers: Option<ControllerManager>,
    pub(crate) cluster: Cluster,
    _scratch: Scratch,
}

impl SharedCluster {
    async fn start(controlled: bool) -> Result<Self> {
        let scratch = Scratch::new()?;
        let cluster = cluster(&scratch).await?;
        let controllers = match controlled {
            true => Some(cluster.controllers(&scratch, &ControllerOptions::with_grace_period(GRACE)).await?),
            false => None,
        };
        Ok(Self { _controllers: controllers, cluster, _scratch: scratch })
    }
}

/// A cluster that only one test uses.
pub(crate) async fn cluster(scratch: &Scratch) -> Result<Cluster> {
    let options = ApiOptions {
        token_nodes: TOKEN_NODES.map(str::to_owned).into(),
        audit_bodies: true,
        ..ApiOptions::default()
    };
    Cluster::start_with(scratch, &options).await
}

/// The cluster of all tests that do not disturb it.
pub(crate) async fn shared() -> Result<Arc<SharedCluster>> {
    static SHARED: suite::Shared<SharedCluster> = suite::Shared::new();
    SHARED.get(|| SharedCluster::start(false)).await
}

/// The cluster of all tests that need controllers.
pub(crate) async fn controlled() -> Result<Arc<SharedCluster>> {
    static SHARED: suite::Shared<SharedCluster> = suite::Shared::new();
    SHARED.get(|| SharedCluster::start(true)).await
}

/// Runs a test on the cluster of all tests that do not disturb it.
pub(crate) fn on_cluster(test: impl AsyncFnOnce(&Cluster) -> Result<()>) -> Result<()> {
    run(async { test(&shared().await?.cluster).await })
}

/// Runs a test on the cluster of all tests that need controllers.
pub(crate) fn on_controlled_cluster(test: impl AsyncFnOnce(&Cluster) -> Result<()>) -> Result<()> {
    run(async { test(&controlled().await?.cluster).await })
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    Companion,
    Node,
}

/// Settings that make a test short: a Lease of 4 s, renewed every second, and a status computed every second.
pub(crate) fn quick() -> Settings {
    Settings::new().set("node.lease_duration", "4s").set("node.node_status_update_frequency", "1s")
}

/// An agent, not started yet, with a separate identity.
pub(crate) struct TestEnv {
    pub(crate) agent: Agent,
    _runtime: FakeRuntime,
    pub(crate) name: String,
    pub(crate) identity: Identity,
    role: Role,
    pub(crate) scratch: Scratch,
}

impl TestEnv {
    /// An agent for the node `name`, directly connected to the API server, with a Lease in both roles. A companion's
    /// Node is created here; the agent of role `node` creates its own.
    pub(crate) async fn new(cluster: &Cluster, name: &str, role: Role, settings: Settings) -> Result<Self> {
        Self::with_rights(cluster, name, role, settings, MANIFEST).await
    }

    /// The same, started.
    pub(crate) async fn started(
        cluster: &Cluster,
        name: &str,
        role: Role,
        settings: Settings,
    ) -> Result<Self> {
        let mut env = Self::new(cluster, name, role, settings).await?;
        env.agent.start_again().await?;
        Ok(env)
    }

    /// The same, once it has reported.
    pub(crate) async fn reporting(
        cluster: &Cluster,
        name: &str,
        role: Role,
        settings: Settings,
    ) -> Result<Self> {
        let env = Self::started(cluster, name, role, settings).await?;
        env.settled(cluster).await?;
        Ok(env)
    }

    async fn with_rights(
        cluster: &Cluster,
        name: &str,
        role: Role,
        settings: Settings,
        manifest: &str,
    ) -> Result<Self> {
        let scratch = Scratch::new()?;
        let runtime = start_ready_runtime(&scratch)?;
        let identity = match role {
            Role::Companion => {
                cluster.admin.create_node(name, &[]).await?;
                companion(cluster, &scratch, name, manifest).await?
            }
            Role::Node if TOKEN_NODES.contains(&name) => cluster.node_by_token(&scratch, name).await?,
            Role::Node => cluster.node(&scratch, name).await?,
        };
        let mut settings = settings
            .set("agent.node_name", name)
            .set("node.companion_lease", true)
            // Its watches are not heartbeats, and requests in the API server's log are counted here.
            .set("endpoints.source", "off")
            .set("kube.kubeconfig", identity.kubeconfig().display().to_string());
        if role == Role::Node {
            // Free memory and disk of the machine do not matter to these tests.
            settings = settings
                .set("node.role", "node")
                .set("node.root_dir", scratch.path().display().to_string())
                .set("node.node_ip", "192.0.2.7")
                .set("node.eviction_hard", "memory.available<1Mi,nodefs.available<1Mi");
        }
        let agent = Agent::new(&scratch, &runtime.endpoint(), &settings)?;
        Ok(Self { agent, _runtime: runtime, name: name.to_owned(), identity, role, scratch })
    }

    /// A companion with the default settings: without a Lease, and without the rights that one needs.
    pub(crate) async fn without_lease(cluster: &Cluster, name: &str, settings: Settings) -> Result<Self> {
        let mut env = Self::with_rights(cluster, name, Role::Companion, settings, COMPANION).await?;
        env.agent.set("node.companion_lease", false)?;
        Ok(env)
    }

    /// Changes the address of the API server, effective at the next start.
    pub(crate) fn via(&mut self, endpoint: &str) -> Result<()> {
        let kubeconfig: PathBuf = self.identity.kubeconfig_via(endpoint)?;
        self.agent.set("kube.kubeconfig", kubeconfig.display().to_string())
    }

    pub(crate) fn lease(&self) -> String {
        match self.role {
            Role::Companion => format!("keelson-{}", self.name),
            Role::Node => self.name.clone(),
        }
    }

    pub(crate) fn requests(&self, cluster: &Cluster) -> Result<Vec<AuditEvent>> {
        cluster.api.audit(|event| event.user == self.identity.user())
    }

    pub(crate) fn lease_requests(&self, cluster: &Cluster) -> Result<Vec<AuditEvent>> {
        let mut all = self.requests(cluster)?;
        all.retain(|event| event.resource == "leases");
        Ok(all)
    }

    /// Whether a renewal, every 10 s, may be in flight, or has just ended.
    pub(crate) fn is_about_to_renew(&self, cluster: &Cluster) -> Result<bool> {
        let all = self.lease_requests(cluster)?;
        let last = all.iter().filter(|event| event.is_write()).map(|event| event.received).max();
        let age = jiff::Timestamp::now().duration_since(last.context("no Lease was written")?).as_secs_f64();
        Ok(!(1.0..9.0).contains(&age))
    }

    pub(crate) fn renewals(&self, cluster: &Cluster) -> Result<usize> {
        let all = self.lease_requests(cluster)?;
        Ok(all.iter().filter(|event| event.verb == "patch" && event.code == Some(200)).count())
    }

    pub(crate) fn status_writes(&self, cluster: &Cluster) -> Result<Vec<AuditEvent>> {
        let mut all = self.requests(cluster)?;
        all.retain(|event| event.is_for("patch", "nodes/status"));
        Ok(all)
    }

    pub(crate) async fn wait_for_renewals(&self, cluster: &Cluster, more: usize) -> Result<()> {
        let wanted = self.renewals(cluster)? + more;
        eventually_slow(&format!("{} more renewals of {}", more, self.lease()), || async {
            let count = self.renewals(cluster)?;
            ensure!(count >= wanted, "{count} of {wanted}");
            Ok(())
        })
        .await
    }

    /// Waits until the status was written at least once, and the Lease exists.
    pub(crate) async fn settled(&self, cluster: &Cluster) -> Result<()> {
        eventually_slow(&format!("{} has reported", self.name), || async {
            let (own, lease) = match self.role {
                Role::Companion => (("ImagePullsStalled", "False"), self.lease()),
                Role::Node => (("Ready", "True"), self.lease()),
            };
            let (own, status) = own;
            let condition = cluster.admin.condition(&self.name, own).await?;
            let condition = condition.with_context(|| format!("no {own}"))?;
            ensure!(condition.status == status, "{condition:?}");
            cluster.admin.lease(&lease).await?.context("no Lease")?;
            // The audit log may have it later. Role node writes its status as it creates the Node.
            if matches!(self.role, Role::Companion) {
                ensure!(!self.status_writes(cluster)?.is_empty(), "no write in the audit log");
            }
            Ok(())
        })
        .await
    }

    /// The heartbeats in `keelson node -o json`.
    pub(crate) async fn node_json(&self) -> Result<Value> {
        self.agent.keelson(&["node", "-o", "json"]).await?.json()
    }

    pub(crate) async fn readyz(&self) -> Result<Answer> {
        self.agent.http_get("/readyz?verbose").await
    }

    /// Waits until `/readyz`, `keelson node` and `keelson actors` all report that heartbeats fail, each with `reason`
    /// and since when, and no other check fails.
    pub(crate) async fn wait_until_failing(&self, reason: &str) -> Result<()> {
        eventually_slow(&format!("the agent reports {reason:?}"), || async {
            let ready = self.readyz().await?;
            ensure!(!ready.status.is_success(), "it reports ready");
            let text = ready.text();
            let wrong: Vec<_> = text.lines().filter(|line| line.starts_with("[-]")).collect();
            ensure!(wrong.iter().any(|line| line.contains(reason) && line.contains("(for ")), "{text}");
            for other in ["[+]agent ok", "[+]runtime ok", "[+]state ok"] {
                ensure!(text.contains(other), "{text}");
            }
            let node = self.agent.output(&["node"]).await?;
            let state = node.lines().next().unwrap_or_default();
            ensure!(state.starts_with("State:    failing for ") && node.contains(reason), "{node}");
            ensure!(!self.agent.keelson(&["node", "--check"]).await?.is_success(), "--check reports healthy");
            let actors = self.agent.output(&["actors"]).await?;
            ensure!(actors.contains(reason), "{actors}");
            Ok(())
        })
        .await
    }

    /// Waits until no error is reported any more.
    pub(crate) async fn wait_until_healthy(&self) -> Result<()> {
        eventually_slow("the agent is healthy", || async {
            let ready = self.readyz().await?;
            ensure!(ready.status.is_success(), "{}", ready.text());
            let node = self.agent.output(&["node", "--check"]).await?;
            ensure!(node.starts_with("State:    healthy\n"), "{node}");
            ensure!(self.metric("keelson_lease_consecutive_failures").await? == 0.0, "requests fail");
            Ok(())
        })
        .await
    }

    /// A value of `/metrics`: the sum of the lines with this prefix; 0 if there is none.
    pub(crate) async fn metric(&self, name: &str) -> Result<f64> {
        let text = self.agent.http_get("/metrics").await?.success()?.text();
        let lines = text.lines().filter(|line| line.starts_with(name));
        lines
            .map(|line| line.rsplit(' ').next().unwrap_or_default().parse::<f64>().context("no number"))
            .sum()
    }
}

/// A separate service account with the rights of a companion, with tokens of a pod on the node.
async fn companion(cluster: &Cluster, scratch: &Scratch, name: &str, manifest: &str) -> Result<Identity> {
    cluster.admin.apply(&manifest.replace(ACCOUNT, name)).await?;
    cluster.companion(scratch, name, name).await
}

/// Waits for a number of seconds in which nothing must happen, or anything may.
pub(crate) async fn sleep_seconds(seconds: u64) {
    tokio::time::sleep(Duration::from_secs(seconds)).await;
}

/// The times between the end of one request and the beginning of the next, in seconds.
pub(crate) fn pauses(events: &[AuditEvent]) -> Vec<f64> {
    let pairs = events.windows(2);
    pairs.map(|pair| pair[1].received.duration_since(pair[0].ended).as_secs_f64()).collect()
}

pub(crate) fn verbs_and_codes(events: &[AuditEvent]) -> Vec<String> {
    events.iter().map(|event| format!("{} {}", event.verb, event.code.unwrap_or_default())).collect()
}

/// Fails unless a number is within a range, both ends included.
pub(crate) fn within(what: &str, number: f64, from: f64, to: f64) -> Result<()> {
    if number < from || number > to {
        bail!("{what} is {number}, not {from} to {to}");
    }
    Ok(())
}
