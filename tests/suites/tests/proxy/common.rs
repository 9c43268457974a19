//! Owns: what the cases share. In: the proxy under test, its setup, the number of a case. Out: a running proxy in a
//! separate world, and a namespace, addresses and node ports that no other case has.
//!
//! All worlds are equal and all proxies see all Services; each setup has its own world, so a case may run in any of
//! them, and cases run side by side. What still lives when the test process ends is removed then.

use crate::subject::{Running, Subject, differs_by_design};
use anyhow::{Context as _, Result, anyhow, ensure};
use keelson_cluster::endpoints::{Kind, Writer};
use keelson_cluster::kube::{ApiOptions, ApiProxy, Cluster, OUTSIDE};
use keelson_cluster::manifests::COMPANION as MANIFEST;
use keelson_cluster::net::{Forward, NetClient, World, create_node, http_get_from, remove_at_exit};
use keelson_harness::scratch::Scratch;
use keelson_harness::suite::Shared;
pub(crate) use keelson_harness::suite::run;
use keelson_harness::util::{PATIENCE, patience};
use serde_json::{Value, json};
use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};
use std::time::Duration;
use tokio::sync::{OnceCell, RwLock, RwLockReadGuard, RwLockWriteGuard};

/// A proxy's settings, and the node it runs on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Setup {
    /// Pods are detected by the cluster's CIDRs; nothing else is set.
    Plain,
    /// Pods are not detected.
    NoDetector,
    /// Pods are detected by the node's own CIDRs.
    NodeCidr,
    /// Pods are detected by their bridge.
    Bridge,
    /// Pods are detected by the prefix of their interface's name.
    Prefix,
    /// All traffic to cluster IPs is masqueraded.
    MasqueradeAll,
    /// Node ports on all nodes' networks, of both families.
    NodePortsListed,
    /// Node ports on all nodes' networks, only of IPv4.
    NodePortsV4,
    NodePortsAll,
    /// Like `Plain`, on a node whose Node object a test changes. One test at a time, with [`Case::alone`].
    OwnNode,
    /// With a short sync period, for tests that kill the proxy or replace its table. One test at a time, with
    /// [`Case::alone`].
    Rough,
}

impl Setup {
    pub(crate) fn node(self) -> &'static str {
        match self {
            Self::OwnNode => "n2",
            _ => "n1",
        }
    }

    /// Every proxy handles the objects of all cases, so only that of `Plain`, which most cases use, lives until the process ends. The
    /// others live while a case uses them.
    async fn bench(self) -> Result<Arc<Bench>> {
        type Benches = HashMap<Setup, Arc<Shared<Bench>>>;
        static ALL: LazyLock<Mutex<Benches>> = LazyLock::new(Mutex::default);
        static PLAIN: OnceCell<Arc<Bench>> = OnceCell::const_new();
        let bench = {
            let mut all = ALL.lock().unwrap_or_else(PoisonError::into_inner);
            all.entry(self).or_insert_with(|| Arc::new(Shared::new())).clone()
        };
        let bench = bench.get(|| Bench::start(self)).await?;
        if self == Self::Plain {
            PLAIN.get_or_init(|| async { bench.clone() }).await;
        }
        Ok(bench)
    }
}

/// How long an answer may take.
pub(crate) fn answer_time() -> Duration {
    Duration::from_secs(5) * patience()
}

pub(crate) struct SharedCluster {
    pub(crate) cluster: Cluster,
    pub(crate) scratch: Scratch,
}

pub(crate) async fn shared() -> Result<&'static SharedCluster> {
    static SHARED: OnceCell<SharedCluster> = OnceCell::const_new();
    SHARED
        .get_or_try_init(|| async {
            let scratch = Scratch::new()?;
            remove_at_exit(scratch.path())?;
            if let Ok(description) = std::env::var(OUTSIDE) {
                let cluster = Cluster::outside(&scratch, &description).await?;
                return Ok(SharedCluster { cluster, scratch });
            }
            let args = vec![
                "--service-cluster-ip-range=10.96.0.0/12,fd00:10:96::/112".to_owned(),
                "--audit-log-path=".to_owned(),
            ];
            let options = ApiOptions { args, ..ApiOptions::default() };
            let cluster = Cluster::start_with(&scratch, &options).await?;
            cluster.admin.apply(MANIFEST).await?;
            Ok(SharedCluster { cluster, scratch })
        })
        .await
}

/// Dropped in this order: the proxy before its network.
pub(crate) struct Bench {
    pub(crate) setup: Setup,
    pub(crate) running: Running,
    _api: Forward,
    pub(crate) world: World,
}

impl Bench {
    async fn start(setup: Setup) -> Result<Self> {
        let shared = shared().await?;
        Self::start_via(shared, setup, None).await
    }

    async fn start_via(shared: &SharedCluster, setup: Setup, via: Option<&ApiProxy>) -> Result<Self> {
        let world = World::new()?;
        let address = match via {
            Some(via) => via.endpoint().trim_start_matches("https://").to_owned(),
            None => shared.cluster.api.address().to_owned(),
        };
        let api = Forward::start(world.node(), address.parse()?, &address)?;
        create_node(&shared.cluster.admin, setup.node(), &labels(setup.node())).await?;
        let running = Running::start(shared, setup, &world, via).await?;
        Ok(Self { setup, running, _api: api, world })
    }
}

fn labels(node: &str) -> Value {
    json!({"topology.kubernetes.io/zone": "a", "kubernetes.io/hostname": node})
}

/// Resources of one case: a namespace in the API, addresses, node ports. The proxy is its setup's.
pub(crate) struct Case {
    pub(crate) writer: Writer,
    pub(crate) bench: Arc<Bench>,
    number: u8,
    sentinels: Mutex<u8>,
    _turn: Turn,
}

/// All proxies handle every case's objects: a case that counts them must run alone.
enum Turn {
    Beside { _guard: RwLockReadGuard<'static, ()> },
    Alone { _guard: RwLockWriteGuard<'static, ()> },
}

static TURN: RwLock<()> = RwLock::const_new(());

impl Case {
    /// `number` is unique: below 100 the number of section 8, and more if a case needs several.
    pub(crate) async fn new(number: u8, setup: Setup) -> Result<Self> {
        Self::with(number, setup, Turn::Beside { _guard: TURN.read().await }).await
    }

    /// The same, with no other case at the same time.
    pub(crate) async fn alone(number: u8, setup: Setup) -> Result<Self> {
        Self::with(number, setup, Turn::Alone { _guard: TURN.write().await }).await
    }

    /// Runs a test as the case of this number.
    pub(crate) fn run(number: u8, setup: Setup, test: impl AsyncFnOnce(Self) -> Result<()>) -> Result<()> {
        if differs_by_design(number) {
            return Ok(());
        }
        run(async { test(Self::new(number, setup).await?).await })
    }

    /// The same, with no other case at the same time.
    pub(crate) fn run_alone(
        number: u8,
        setup: Setup,
        test: impl AsyncFnOnce(Self) -> Result<()>,
    ) -> Result<()> {
        if differs_by_design(number) {
            return Ok(());
        }
        run(async { test(Self::alone(number, setup).await?).await })
    }

    async fn with(number: u8, setup: Setup, turn: Turn) -> Result<Self> {
        let writer = Writer::new(&shared().await?.cluster.admin, &format!("case-{number}")).await?;
        let bench = setup.bench().await?;
        Ok(Self { writer, bench, number, sentinels: Mutex::new(0), _turn: turn })
    }

    /// A case with its own world and proxy, which uses `via` as the API server.
    pub(crate) async fn starting(number: u8, via: &ApiProxy) -> Result<Self> {
        let shared = shared().await?;
        let writer = Writer::new(&shared.cluster.admin, &format!("case-{number}")).await?;
        let bench = Arc::new(Bench::start_via(shared, Setup::Plain, Some(via)).await?);
        let turn = Turn::Beside { _guard: TURN.read().await };
        Ok(Self { writer, bench, number, sentinels: Mutex::new(0), _turn: turn })
    }

    pub(crate) async fn metrics(&self) -> Result<String> {
        let at = SocketAddr::from(([127, 0, 0, 1], 10249));
        Ok(http_get_from(self.world().node(), at, "/metrics").await?.success()?.text())
    }

    /// A metric by its name and whole label set in any order; 0 if missing, because kube-proxy omits what it never
    /// counted.
    pub(crate) async fn metric(&self, name: &str, labels: &[(&str, &str)]) -> Result<f64> {
        let text = self.metrics().await?;
        for line in text.lines().filter(|line| !line.starts_with('#')) {
            let Some((series, value)) = line.rsplit_once(' ') else { continue };
            let (own, set) = series.split_once('{').unwrap_or((series, ""));
            let has = |(key, value): &(&str, &str)| set.contains(&format!("{key}=\"{value}\""));
            if own == name && labels.iter().all(has) {
                return value.parse().with_context(|| format!("{line:?} is no metric"));
            }
        }
        Ok(0.0)
    }

    pub(crate) fn number(&self) -> u8 {
        self.number
    }

    pub(crate) fn world(&self) -> &World {
        &self.bench.world
    }

    pub(crate) fn pod(&self) -> NetClient {
        self.world().pod()
    }

    pub(crate) fn host(&self) -> NetClient {
        self.world().host()
    }

    pub(crate) fn client(&self) -> NetClient {
        self.world().client()
    }

    pub(crate) fn subject(&self) -> Subject {
        Subject::get()
    }

    pub(crate) fn node(&self) -> &'static str {
        self.bench.setup.node()
    }

    /// Creates the node, which must not exist.
    pub(crate) async fn make_node(&self) -> Result<()> {
        create_node(&shared().await?.cluster.admin, self.node(), &labels(self.node())).await
    }

    /// Waits until the proxy knows that the node was deleted. The Node comes from another watch than a sentinel;
    /// kube-proxy does not show it.
    pub(crate) async fn wait_until_node_deleted(&self) -> Result<()> {
        self.eventually("the agent knows that the Node is gone", || async {
            ensure!(self.bench.running.sees_node().await? != Some(true), "it does not");
            Ok(())
        })
        .await?;
        self.synced().await
    }

    pub(crate) fn next_sentinel(&self) -> Result<u8> {
        let mut last = self.sentinels.lock().unwrap_or_else(PoisonError::into_inner);
        *last += 1;
        ensure!(*last < 100, "a case has less than 100 sentinels");
        Ok(*last)
    }

    /// Writes an object to etcd without the API server's validation, as an older API server may have left it. Watches
    /// see it like any other.
    pub(crate) async fn put_unchecked(&self, kind: Kind, object: &Value) -> Result<()> {
        let (prefix, version, name) = match kind {
            Kind::Service => ("services/specs", "v1", "Service"),
            Kind::Slice => ("endpointslices", "discovery.k8s.io/v1", "EndpointSlice"),
            other => anyhow::bail!("a {other:?} is never written past the API server"),
        };
        let mut object = object.clone();
        object["apiVersion"] = json!(version);
        object["kind"] = json!(name);
        object["metadata"]["namespace"] = json!(self.writer.namespace());
        object["metadata"]["uid"] = json!(format!("00000000-0000-4000-8000-{:012}", rand::random::<u32>()));
        let own = object["metadata"]["name"].as_str().context("an object has a name")?;
        let key = format!("/registry/{prefix}/{}/{own}", self.writer.namespace());
        shared().await?.cluster.etcd.etcdctl(&["put", &key, &object.to_string()]).await.map(drop)
    }

    /// The end of the proxy's log, for a failed test.
    /// Adds the end of the proxy's log to an error, after what was wrong.
    pub(crate) fn explain(&self, error: &anyhow::Error) -> anyhow::Error {
        let log = self.bench.running.log().unwrap_or_default();
        let mut from = log.len().saturating_sub(3000);
        while !log.is_char_boundary(from) {
            from += 1;
        }
        let dump =
            std::env::var_os("KEELSON_PROXY_DUMP").map(|_| self.world().node().nft(&["list", "ruleset"]));
        let dump = dump.and_then(Result::ok).unwrap_or_default();
        anyhow!("{error:#}\n\nthe proxy's log ends:\n{}\n{dump}", &log[from..])
    }

    pub(crate) async fn eventually<F>(&self, what: &str, check: impl FnMut() -> F) -> Result<()>
    where
        F: Future<Output = Result<()>>,
    {
        keelson_harness::util::eventually(PATIENCE, what, check).await.map_err(|error| self.explain(&error))
    }
}
