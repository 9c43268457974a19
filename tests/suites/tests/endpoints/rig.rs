//! Owns: what the tests share. In: a lane and a name. Out: a cluster that tests have one after the other, an agent with
//! its consumers, and what the agent says of itself.
//!
//! Every Service of a cluster is in the state of every agent of it, so a test has its cluster for itself; so that two can
//! run at a time there are two lanes with a cluster each. A cluster lives for as long as a test has it, or waits for it.

use anyhow::{Context as _, Result, ensure};
use keelson_cluster::endpoints::{Followers, Truth, Whole, Writer};
use keelson_cluster::kube::{ApiOptions, Cluster, Identity};
pub(crate) use keelson_cluster::manifests::COMPANION_WITH_LEASE as MANIFEST;
use keelson_harness::agent::{Agent, Settings};
use keelson_harness::scratch::Scratch;
use keelson_harness::suite;
pub(crate) use keelson_harness::suite::run;
use keelson_harness::util::{PATIENCE, eventually_every};
use kube::api::PostParams;
use serde_json::{Value, json};
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::{Mutex, OwnedMutexGuard};

/// The account that the manifest makes, and its namespace.
const ACCOUNT: &str = "keelson-agent";

/// A cluster whose Services have both families, with the rights of companions in it.
struct Shared {
    cluster: Arc<Mutex<Cluster>>,
    _scratch: Scratch,
}

impl Shared {
    async fn start(lane: Lane) -> Result<Self> {
        let scratch = Scratch::new()?;
        let mut args = vec!["--service-cluster-ip-range=10.96.0.0/12,fd00:10:96::/112".to_owned()];
        if let Lane::Large = lane {
            // No line for each of twenty thousand objects, which nobody reads.
            args.push("--audit-log-path=".to_owned());
        }
        let options = ApiOptions { args, ..ApiOptions::default() };
        let cluster = Cluster::start_with(&scratch, &options).await?;
        cluster.admin.apply(MANIFEST).await?;
        // The API server makes a Service by itself, some time after it is ready: no test is to be surprised by it.
        let client = cluster.admin.client();
        soon("the API server has made its own Service", || async {
            let request =
                http::Request::get("/api/v1/namespaces/default/services/kubernetes").body(Vec::new())?;
            client.request::<Value>(request).await.map(drop).context("it has not")
        })
        .await?;
        Ok(Self { cluster: Arc::new(Mutex::new(cluster)), _scratch: scratch })
    }
}

/// Which cluster a test has.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Lane {
    /// Tests that leave the control plane alone.
    Calm,
    /// Tests that end it, cut it off or make it forget.
    Rough,
    /// The test of many objects.
    Large,
}

async fn shared(lane: Lane) -> Result<Arc<Shared>> {
    static LANES: [suite::Shared<Shared>; 3] = [const { suite::Shared::new() }; 3];
    LANES[lane as usize].get(|| Shared::start(lane)).await
}

/// A cluster for as long as a test has it, a node with an agent that is not started yet, and a namespace to write into. Node
/// and namespace have the test's name.
pub(crate) struct Stage {
    pub(crate) agent: Agent,
    pub(crate) name: String,
    pub(crate) writer: Writer,
    pub(crate) identity: Identity,
    pub(crate) cluster: Held,
    settings: Settings,
    _scratch: Scratch,
    started: Instant,
    _shared: Arc<Shared>,
}

/// A cluster that nobody else has meanwhile.
pub(crate) struct Held(OwnedMutexGuard<Cluster>);

impl Deref for Held {
    type Target = Cluster;

    fn deref(&self) -> &Cluster {
        &self.0
    }
}

impl DerefMut for Held {
    fn deref_mut(&mut self) -> &mut Cluster {
        &mut self.0
    }
}

impl Stage {
    /// Waits for its turn.
    pub(crate) async fn new(lane: Lane, name: &str) -> Result<Self> {
        let shared = shared(lane).await?;
        let mut cluster = Held(shared.cluster.clone().lock_owned().await);
        let started = Instant::now();
        // A test that failed may have left it so.
        if cluster.api.pid().is_none() {
            cluster.api.start_again().await?;
        }
        let writer = Writer::new(&cluster.admin, name).await?;
        let node = json!({"metadata": {"name": name, "labels": {"topology.kubernetes.io/zone": "zone-a"}}});
        let node = serde_json::from_value(node)?;
        cluster.admin.nodes().create(&PostParams::default(), &node).await.context("cannot make the Node")?;
        let scratch = Scratch::new()?;
        let identity = cluster.companion(&scratch, ACCOUNT, name).await?;
        let settings = Settings::new()
            .set("agent.node_name", name)
            .set("node.node_status_update_frequency", "1s")
            // Who renews it every second knows soon that the API server is back, and wakes the watches.
            .set("node.companion_lease", true)
            .set("node.lease_duration", "4s")
            // A problem that is over leaves the conditions soon.
            .set("node.eviction_pressure_transition_period", "2s")
            .set("kube.kubeconfig", identity.kubeconfig().display().to_string());
        // No runtime is needed; the agent lives, and is not ready for that reason.
        let runtime = format!("unix://{}/nowhere.sock", scratch.path().display());
        let agent = Agent::new(&scratch, &runtime, &settings)?;
        let name = name.to_owned();
        Ok(Self {
            agent,
            name,
            writer,
            identity,
            cluster,
            settings,
            _scratch: scratch,
            started,
            _shared: shared,
        })
    }

    /// From its next start on the agent has this setting.
    pub(crate) fn set(&mut self, name: &str, value: impl Into<toml::Value>) -> Result<()> {
        self.settings = self.settings.clone().set(name, value);
        self.agent.configure(&self.settings)
    }

    /// From its next start on the agent reaches the API server by another address.
    pub(crate) fn via(&mut self, endpoint: &str) -> Result<()> {
        let kubeconfig = self.identity.kubeconfig_via(endpoint)?;
        self.set("kube.kubeconfig", kubeconfig.display().to_string())
    }

    /// Consumers of both APIs; the agent need not run yet.
    pub(crate) fn followers(&self) -> Result<Followers> {
        self.followers_with(|_| Ok(()))
    }

    /// The same, with an invariant.
    pub(crate) fn followers_with(
        &self,
        invariant: impl Fn(&Whole) -> Result<()> + Send + Sync + 'static,
    ) -> Result<Followers> {
        Followers::start(&self.agent.endpoints_target(), invariant)
    }

    /// What the API server's objects mean on the node now.
    pub(crate) async fn truth(&self) -> Result<Truth> {
        Truth::of(&self.cluster, &self.name).await
    }

    /// The full name of a Service of the test.
    pub(crate) fn full(&self, service: &str) -> String {
        format!("{}/{service}", self.name)
    }

    /// The agent runs, both consumers have the truth, all they saw was sound; gives the pair of instance and revision.
    pub(crate) async fn settled(&self, followers: &Followers) -> Result<(u64, u64)> {
        followers.settled(&self.truth().await?).await?;
        followers.sound()?;
        followers.pair().await
    }

    /// What `keelson endpoints` writes.
    pub(crate) async fn told(&self, args: &[&str]) -> Result<String> {
        Ok(self.agent.keelson(&[&["endpoints"], args].concat()).await?.success()?.out)
    }

    /// How the chore fares, in JSON.
    pub(crate) async fn state(&self) -> Result<Value> {
        serde_json::from_str(&self.told(&["--max", "0", "-o", "json"]).await?).context("no JSON")
    }

    /// A value of `/metrics`, by its whole name with labels.
    pub(crate) async fn metric(&self, name: &str) -> Result<f64> {
        self.agent.metric(name).await?.with_context(|| format!("no {name}"))
    }

    /// The line of `/readyz?verbose` about endpoints.
    pub(crate) async fn readyz(&self) -> Result<String> {
        let text = self.agent.http_get("/readyz?verbose").await?.text();
        let line = text.lines().find(|line| line.contains("endpoints"));
        line.map(str::to_owned).with_context(|| format!("no line about endpoints in\n{text}"))
    }

    /// Waits until everything that the agent says of the chore is that it is current.
    pub(crate) async fn says_current(&self) -> Result<()> {
        soon("the agent says that endpoints are current", || async {
            let state = self.state().await?;
            ensure!(state["state"] == "current", "{state}");
            ensure!(self.metric("keelson_endpoints_stale").await? == 0.0, "the metric says stale");
            let line = self.readyz().await?;
            ensure!(line.starts_with("[+]"), "{line}");
            Ok(())
        })
        .await
    }

    /// Waits until everything that the agent says of the chore is that it is stale, and each says this reason.
    pub(crate) async fn says_stale(&self, reason: &str) -> Result<()> {
        soon(&format!("the agent says that endpoints are stale: {reason}"), || async {
            let state = self.state().await?;
            let said = state["reason"].as_str().unwrap_or_default();
            ensure!(state["state"] == "stale" && said.contains(reason), "{state}");
            ensure!(state["since_unix_ms"].as_i64().is_some_and(|since| since > 0), "since when? {state}");
            ensure!(self.told(&[]).await?.starts_with("STALE"), "{}", self.told(&[]).await?);
            ensure!(self.metric("keelson_endpoints_stale").await? == 1.0, "the metric says current");
            let line = self.readyz().await?;
            ensure!(line.starts_with("[-]") && line.contains(reason), "{line}");
            Ok(())
        })
        .await
    }

    /// The agent's kill with SIGKILL, and its start again, without waiting for more than that it lives.
    pub(crate) async fn kill_and_start(&mut self) -> Result<()> {
        self.agent.kill9()?;
        self.agent.start_live().await
    }

    /// Ends the agent with SIGTERM, in peace.
    pub(crate) async fn terminate(&mut self) -> Result<()> {
        let status = self.agent.terminate().await?;
        ensure!(status.success(), "the agent ended with {status}");
        Ok(())
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        eprintln!("{} took {:.1} s", self.name, self.started.elapsed().as_secs_f64());
    }
}

/// Like [`eventually`](keelson_harness::util::eventually) with a longer pause: each look is several processes and requests.
pub(crate) async fn soon<T, F>(what: &str, check: impl FnMut() -> F) -> Result<T>
where
    F: Future<Output = Result<T>>,
{
    eventually_every(Duration::from_millis(100), 2 * PATIENCE, what, check).await
}

/// The addresses of the endpoints of a Service that one of its ports, by index, sends to from anywhere; ordered.
pub(crate) fn chosen(whole: &Whole, service: &str, index: u32) -> Option<Vec<String>> {
    let service = whole.service(service)?;
    let chosen = service
        .endpoints
        .iter()
        .filter(|endpoint| endpoint.ports.iter().any(|port| port.index == index && port.cluster));
    let ips = chosen.filter_map(|endpoint| endpoint.i_ps.as_ref());
    let mut all: Vec<_> = ips.flat_map(|ips| ips.v4.iter().chain(&ips.v6).cloned()).collect();
    all.sort();
    Some(all)
}
