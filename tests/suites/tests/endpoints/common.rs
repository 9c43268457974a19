//! Owns: what the tests share. In: a lane and a name. Out: a cluster that tests use one after the other, an agent with
//! its consumers, and what the agent reports.
//!
//! Every Service of a cluster is in the state of every agent of it, so a test uses its cluster exclusively; two lanes
//! with a cluster each let two tests run at the same time. A cluster lives for as long as a test uses it, or waits for
//! it.

use anyhow::{Context as _, Result, ensure};
use keelson_cluster::endpoints::{ExpectedState, Followers, FullState, Writer};
use keelson_cluster::kube::{ApiOptions, Cluster, Identity};
pub(crate) use keelson_cluster::manifests::COMPANION_WITH_LEASE as MANIFEST;
use keelson_harness::agent::{Agent, Settings, no_runtime};
use keelson_harness::scratch::Scratch;
use keelson_harness::suite;
pub(crate) use keelson_harness::suite::run;
pub(crate) use keelson_harness::util::eventually_slow;
use serde_json::Value;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::time::Instant;
use tokio::sync::{Mutex, OwnedMutexGuard};

const ACCOUNT: &str = "keelson-agent";

/// A cluster whose Services are dual-stack, with the rights of companions.
struct SharedCluster {
    cluster: Arc<Mutex<Cluster>>,
    _scratch: Scratch,
}

impl SharedCluster {
    async fn start(lane: Lane) -> Result<Self> {
        let scratch = Scratch::new()?;
        let mut args = vec!["--service-cluster-ip-range=10.96.0.0/12,fd00:10:96::/112".to_owned()];
        if let Lane::Large = lane {
            // Without a line for each of twenty thousand objects.
            args.push("--audit-log-path=".to_owned());
        }
        let options = ApiOptions { args, ..ApiOptions::default() };
        let cluster = Cluster::start_with(&scratch, &options).await?;
        cluster.admin.apply(MANIFEST).await?;
        // The API server creates a Service by itself, some time after it is ready, which must not disturb a test.
        let client = cluster.admin.client();
        eventually_slow("the API server has made its own Service", || async {
            let request =
                http::Request::get("/api/v1/namespaces/default/services/kubernetes").body(Vec::new())?;
            client.request::<Value>(request).await.map(drop).context("it has not")
        })
        .await?;
        Ok(Self { cluster: Arc::new(Mutex::new(cluster)), _scratch: scratch })
    }
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Lane {
    /// Tests that do not disturb the control plane.
    Calm,
    /// Tests that stop it, cut it off or restore old data.
    Rough,
    Large,
}

async fn shared(lane: Lane) -> Result<Arc<SharedCluster>> {
    static LANES: [suite::Shared<SharedCluster>; 3] = [const { suite::Shared::new() }; 3];
    LANES[lane as usize].get(|| SharedCluster::start(lane)).await
}

/// A cluster that the test uses exclusively, a node with an agent that is not started yet, and a namespace to write
/// into. Node and namespace have the test's name.
pub(crate) struct TestEnv {
    pub(crate) agent: Agent,
    pub(crate) name: String,
    pub(crate) writer: Writer,
    pub(crate) identity: Identity,
    pub(crate) cluster: LockedCluster,
    _scratch: Scratch,
    started: Instant,
    _shared: Arc<SharedCluster>,
}

/// A cluster that no other test uses meanwhile.
pub(crate) struct LockedCluster(OwnedMutexGuard<Cluster>);

impl Deref for LockedCluster {
    type Target = Cluster;

    fn deref(&self) -> &Cluster {
        &self.0
    }
}

impl DerefMut for LockedCluster {
    fn deref_mut(&mut self) -> &mut Cluster {
        &mut self.0
    }
}

impl TestEnv {
    /// Waits until the cluster is free.
    pub(crate) async fn new(lane: Lane, name: &str) -> Result<Self> {
        let shared = shared(lane).await?;
        let mut cluster = LockedCluster(shared.cluster.clone().lock_owned().await);
        let started = Instant::now();
        // A failed test may have left it stopped.
        if cluster.api.pid().is_none() {
            cluster.api.start_again().await?;
        }
        let writer = Writer::new(&cluster.admin, name).await?;
        cluster.admin.create_node(name, &[("topology.kubernetes.io/zone", "zone-a")]).await?;
        let scratch = Scratch::new()?;
        let identity = cluster.companion(&scratch, ACCOUNT, name).await?;
        let settings = Settings::new()
            .set("agent.node_name", name)
            .set("node.node_status_update_frequency", "1s")
            // Renewals every second detect soon that the API server is back, and wake the watches.
            .set("node.companion_lease", true)
            .set("node.lease_duration", "4s")
            // Conditions change back soon after a problem.
            .set("node.eviction_pressure_transition_period", "2s")
            .set("kube.kubeconfig", identity.kubeconfig().display().to_string());
        let agent = Agent::new(&scratch, &no_runtime(&scratch), &settings)?;
        let name = name.to_owned();
        Ok(Self { agent, name, writer, identity, cluster, _scratch: scratch, started, _shared: shared })
    }

    /// With the agent started, and consumers of both APIs.
    pub(crate) async fn started(lane: Lane, name: &str) -> Result<(Self, Followers)> {
        let mut env = Self::new(lane, name).await?;
        env.agent.start_live().await?;
        let followers = env.followers()?;
        Ok((env, followers))
    }

    /// Changes the address of the API server, effective at the next start.
    pub(crate) fn via(&mut self, endpoint: &str) -> Result<()> {
        let kubeconfig = self.identity.kubeconfig_via(endpoint)?;
        self.agent.set("kube.kubeconfig", kubeconfig.display().to_string())
    }

    /// Consumers of both APIs; the agent need not run yet.
    pub(crate) fn followers(&self) -> Result<Followers> {
        self.followers_with(|_| Ok(()))
    }

    /// The same, with an invariant.
    pub(crate) fn followers_with(
        &self,
        invariant: impl Fn(&FullState) -> Result<()> + Send + Sync + 'static,
    ) -> Result<Followers> {
        Followers::start(&self.agent.endpoints_target(), invariant)
    }

    /// The state that the API server's objects must result in now.
    pub(crate) async fn expected(&self) -> Result<ExpectedState> {
        ExpectedState::of(&self.cluster, &self.name).await
    }

    /// `namespace/name` of a Service of the test.
    pub(crate) fn qualified_name(&self, service: &str) -> String {
        format!("{}/{service}", self.name)
    }

    /// Waits until both consumers have the expected state and no invariant was violated; returns instance and revision.
    pub(crate) async fn settled(&self, followers: &Followers) -> Result<(u64, u64)> {
        self.settled_as(followers, &self.expected().await?).await
    }

    pub(crate) async fn settled_as(
        &self,
        followers: &Followers,
        expected: &ExpectedState,
    ) -> Result<(u64, u64)> {
        followers.settled(expected).await?;
        followers.check_invariants()?;
        self.agent.endpoints_written().await?;
        followers.pair().await
    }

    pub(crate) async fn endpoints_output(&self, args: &[&str]) -> Result<String> {
        self.agent.output(&[&["endpoints"], args].concat()).await
    }

    /// State of service endpoints, in JSON.
    pub(crate) async fn state(&self) -> Result<Value> {
        serde_json::from_str(&self.endpoints_output(&["--max", "0", "-o", "json"]).await?).context("no JSON")
    }

    /// A value of `/metrics`; `name` includes all labels.
    pub(crate) async fn metric(&self, name: &str) -> Result<f64> {
        self.agent.metric(name).await?.with_context(|| format!("no {name}"))
    }

    /// The line of `/readyz?verbose` about endpoints.
    pub(crate) async fn readyz(&self) -> Result<String> {
        let text = self.agent.http_get("/readyz?verbose").await?.text();
        let line = text.lines().find(|line| line.contains("endpoints"));
        line.map(str::to_owned).with_context(|| format!("no line about endpoints in\n{text}"))
    }

    /// Waits until everything that the agent reports about service endpoints is current.
    pub(crate) async fn wait_until_current(&self) -> Result<()> {
        eventually_slow("the agent reports current endpoints", || async {
            let state = self.state().await?;
            ensure!(state["state"] == "synced", "{state}");
            ensure!(self.metric("keelson_endpoints_stale").await? == 0.0, "the metric reports stale");
            let line = self.readyz().await?;
            ensure!(line.starts_with("[+]"), "{line}");
            Ok(())
        })
        .await
    }

    /// Waits until everything that the agent reports about service endpoints is stale, with this reason.
    pub(crate) async fn wait_until_stale(&self, reason: &str) -> Result<()> {
        eventually_slow(&format!("the agent reports stale endpoints: {reason}"), || async {
            let state = self.state().await?;
            let message = state["reason"].as_str().unwrap_or_default();
            ensure!(state["state"] == "stale" && message.contains(reason), "{state}");
            ensure!(state["since_unix_ms"].as_i64().is_some_and(|since| since > 0), "since when? {state}");
            ensure!(
                self.endpoints_output(&[]).await?.starts_with("STALE"),
                "{}",
                self.endpoints_output(&[]).await?
            );
            ensure!(self.metric("keelson_endpoints_stale").await? == 1.0, "the metric reports current");
            let line = self.readyz().await?;
            ensure!(line.starts_with("[-]") && line.contains(reason), "{line}");
            Ok(())
        })
        .await
    }

    /// Kills the agent with SIGKILL, and starts it without waiting for more than liveness.
    pub(crate) async fn kill_and_start(&mut self) -> Result<()> {
        self.agent.kill9()?;
        self.agent.start_live().await
    }

    pub(crate) async fn terminate(&mut self) -> Result<()> {
        let status = self.agent.terminate().await?;
        ensure!(status.success(), "the agent ended with {status}");
        Ok(())
    }
}

impl Drop for TestEnv {
    fn drop(&mut self) {
        eprintln!("{} took {:.1} s", self.name, self.started.elapsed().as_secs_f64());
    }
}

/// The sorted addresses of a Service's endpoints that one of its ports, by index, sends to from anywhere.
pub(crate) fn chosen(full_state: &FullState, service: &str, index: u32) -> Option<Vec<String>> {
    let service = full_state.service(service)?;
    let chosen = service
        .endpoints
        .iter()
        .filter(|endpoint| endpoint.ports.iter().any(|port| port.index == index && port.cluster));
    let ips = chosen.filter_map(|endpoint| endpoint.i_ps.as_ref());
    let mut all: Vec<_> = ips.flat_map(|ips| ips.v4.iter().chain(&ips.v6).cloned()).collect();
    all.sort();
    Some(all)
}
