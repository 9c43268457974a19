//! Thousands of nodes: cost of their Leases for the API server, beside full status writes, which Leases replaced.
//!
//! Owns: the simulation. In: its own cluster; `KEELSON_BENCH_NODES` (5000) and `KEELSON_BENCH_SECONDS` (60). Out: a
//! table. The nodes are in this process: each Lease is a LeaseRenewer, the agent's own actor with its own timer, and
//! all of them share a few connections. The API server, etcd and the Leases are real.

mod beats;
mod objects;

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow, ensure};
use futures_util::future::BoxFuture;
use futures_util::{FutureExt as _, StreamExt as _, TryStreamExt as _};
use keelson_actor_system::clock::{Clock, unix_ms};
use keelson_actor_system::cluster::{
    ApiError, JobHealth, LeaseApi, LeaseCreate, LeasePatch, NodeApi, ObservedLease, Written,
};
use keelson_actor_system::inspect::{Mailbox, Recorder};
use keelson_actor_system::supervise;
use keelson_cluster::kube::{ApiOptions, Cluster, Writes};
use keelson_harness::scratch::Scratch;
use keelson_heartbeats::lease::{LeaseMetrics, LeasePolicy, LeaseRenewer, LeaseRenewerParts};
use keelson_kube::{ApiServer, ApiServerParts, ClusterSource};
use keelson_storage::MemoryStore;
use tokio::sync::{oneshot, watch};
use tokio::task::JoinSet;

use super::cost::Cpu;
use super::number;
use beats::{Beats, Figures};

/// The kubelet's default, and the interval that follows from it.
const DURATION: Duration = Duration::from_secs(40);
const INTERVAL: Duration = Duration::from_secs(10);
/// Time over which the nodes start: a whole number of intervals, so that they stay evenly spread.
const SPREAD: Duration = Duration::from_secs(30);
/// Connections that the nodes share: an API server handles a hundred concurrent requests on one.
const CONNECTIONS: usize = 16;
/// Share of heartbeats that must be on time for the machine to support a number of nodes.
const ENOUGH: f64 = 0.99;
/// Attempts of a status write before the next interval, as in the kubelet (`nodeStatusUpdateRetry`).
const STATUS_TRIES: usize = 5;

#[derive(Clone, Copy, PartialEq)]
enum Way {
    Lease,
    Status,
}

struct Run {
    way: Way,
    nodes: usize,
    seconds: f64,
    figures: Figures,
    /// Processor time per confirmed heartbeat: API server, etcd, the nodes.
    cpu: [Duration; 3],
    /// Bytes of keys and values put per confirmed heartbeat.
    stored: f64,
}

pub(super) async fn fleet() -> Result<()> {
    let (most, window) = (number("KEELSON_BENCH_NODES", 5_000)?, number("KEELSON_BENCH_SECONDS", 60)?);
    let window = Duration::from_secs(u64::try_from(window)?);
    let scratch = Scratch::new()?;
    // Not needed here, and it costs more than a heartbeat.
    let options = ApiOptions { args: vec!["--audit-log-path=".to_owned()], ..ApiOptions::default() };
    let cluster = Cluster::start_with(&scratch, &options).await?;
    let source = ClusterSource::Kubeconfig { path: cluster.admin_kubeconfig(), context: None };
    let since = Instant::now();
    let bytes = make_nodes(&cluster, &source, most).await?;
    eprintln!("{most} nodes of {bytes} bytes in etcd were created in {:.0} s", since.elapsed().as_secs_f64());
    println!(
        "| heartbeat | nodes | a second | on time | p99 between two | latency p50 | p99 | failed | API server | etcd | node | stored |"
    );
    println!("|---|---|---|---|---|---|---|---|---|---|---|---|");
    let leases = run(&cluster, &source, Way::Lease, most, window).await?;
    leases.print();
    // First as many as with Leases, then fewer until they are on time.
    let mut nodes = most;
    loop {
        let status = run(&cluster, &source, Way::Status, nodes, window).await?;
        status.print();
        if status.figures.on_time >= ENOUGH || nodes <= most / 32 {
            break;
        }
        nodes /= 2;
    }
    Ok(())
}

/// A client with a new connection, for the runtime that uses it.
fn connection(source: &ClusterSource) -> ApiServer {
    ApiServer::new(ApiServerParts::new(source.clone()))
}

/// Creates the Nodes, and returns the bytes that etcd stores for each.
async fn make_nodes(cluster: &Cluster, source: &ClusterSource, count: usize) -> Result<u64> {
    let before = cluster.etcd.writes().await?;
    let api = connection(source);
    let made = futures_util::stream::iter(0..count).map(|number| {
        let api = api.clone();
        async move {
            api.create_node(Box::new(objects::node(number)?)).await.map(drop).context("cannot make a Node")
        }
    });
    made.buffer_unordered(32).try_collect::<Vec<()>>().await?;
    let after = cluster.etcd.writes().await?;
    Ok((after.put_bytes - before.put_bytes) / (after.puts - before.puts).max(1))
}

struct Meter {
    at: Instant,
    cpu: [Cpu; 3],
    writes: Writes,
}

impl Meter {
    async fn read(cluster: &Cluster) -> Result<Self> {
        let writes = cluster.etcd.writes().await?;
        let cpu = [
            Cpu::of(cluster.api.pid().context("the API server runs")?)?,
            Cpu::of(cluster.etcd.pid().context("etcd runs")?)?,
            Cpu::own()?,
        ];
        Ok(Self { at: Instant::now(), cpu, writes })
    }
}

/// Runs the nodes, and measures a window once all of them are in steady state.
async fn run(
    cluster: &Cluster,
    source: &ClusterSource,
    way: Way,
    nodes: usize,
    window: Duration,
) -> Result<Run> {
    let beats = Arc::new(Beats::new(nodes));
    let fleet = Fleet::start(way, nodes, source.clone(), beats.clone())?;
    // The first renewal of a Lease also removes its managed fields; from the second one on all are equal. If the
    // machine cannot do even that in time, its result is the figure.
    let patience = Instant::now() + SPREAD + 3 * INTERVAL;
    tokio::time::sleep(SPREAD + 2 * INTERVAL).await;
    while beats.min_count() < 2 && Instant::now() < patience {
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    let before = Meter::read(cluster).await?;
    tokio::time::sleep(window).await;
    let after = Meter::read(cluster).await?;
    fleet.stop()?;
    let figures = beats.between(before.at, after.at);
    let each = |total: Duration| total.div_f64((figures.confirmed as f64).max(1.0));
    let put = after.writes.put_bytes - before.writes.put_bytes;
    Ok(Run {
        way,
        nodes,
        seconds: (after.at - before.at).as_secs_f64(),
        cpu: std::array::from_fn(|at| each(after.cpu[at].since(before.cpu[at]))),
        stored: put as f64 / (figures.confirmed as f64).max(1.0),
        figures,
    })
}

impl Run {
    fn print(&self) {
        let name = match self.way {
            Way::Lease => "Lease renewed",
            Way::Status => "full status",
        };
        let (figures, ms) = (&self.figures, |time: Duration| format!("{:.2} ms", time.as_secs_f64() * 1e3));
        println!(
            "| {name} | {} | {:.0} | {:.1} % | {:.1} s | {} | {} | {} | {} | {} | {} | {:.0} B |",
            self.nodes,
            figures.confirmed as f64 / self.seconds,
            figures.on_time * 100.0,
            figures.gap_p99,
            ms(figures.latency.0),
            ms(figures.latency.1),
            figures.failed,
            ms(self.cpu[0]),
            ms(self.cpu[1]),
            ms(self.cpu[2]),
            self.stored,
        );
    }
}

/// Running nodes, all on one thread.
struct Fleet {
    stop: oneshot::Sender<()>,
    thread: std::thread::JoinHandle<Result<()>>,
}

impl Fleet {
    fn start(way: Way, nodes: usize, source: ClusterSource, beats: Arc<Beats>) -> Result<Self> {
        let (stop, stopped) = oneshot::channel();
        let thread = std::thread::Builder::new().name("fleet".to_owned()).spawn(move || {
            actix::System::new().block_on(async move {
                let connections: Vec<ApiServer> = (0..CONNECTIONS).map(|_| connection(&source)).collect();
                let work = live(way, nodes, &connections, &beats);
                tokio::select! {
                    done = work => done,
                    _ = stopped => Ok(()),
                }
            })
        });
        Ok(Self { stop, thread: thread.context("cannot start a thread")? })
    }

    /// Stops them; requests in flight are dropped.
    fn stop(self) -> Result<()> {
        // Already closed if an error occurred, which is returned next.
        let _ = self.stop.send(());
        self.thread.join().map_err(|_| anyhow!("the thread of the nodes panicked"))?
    }
}

/// Starts the nodes one by one, and continues until it is dropped.
async fn live(way: Way, nodes: usize, connections: &[ApiServer], beats: &Arc<Beats>) -> Result<()> {
    let (start, mut reporters) = (tokio::time::Instant::now(), JoinSet::new());
    // An actor ends with its last address.
    let mut renewers = Vec::new();
    for node in 0..nodes {
        tokio::time::sleep_until(start + SPREAD.mul_f64(node as f64 / nodes as f64)).await;
        let api = connections[node % connections.len()].clone();
        match way {
            Way::Lease => renewers.push(renewer(Measured { api, node, beats: beats.clone() })),
            Way::Status => {
                reporters.spawn_local(report(api, node, beats.clone()));
            }
        }
    }
    ensure!(renewers.len() + reporters.len() == nodes, "a node has ended by itself");
    std::future::pending().await
}

fn renewer(api: Measured) -> Mailbox<LeaseRenewer> {
    let recorder = Recorder::new("LeaseRenewer", 4);
    let name = objects::name(api.node);
    let parts = LeaseRenewerParts {
        api: Arc::new(api),
        store: Arc::new(MemoryStore::new()),
        clock: Clock::start(),
        wall: Arc::new(unix_ms),
        policy: LeasePolicy {
            name: name.clone(),
            holder: name.clone(),
            node: name,
            duration: DURATION,
            drops_managed_fields: true,
            may_stand_back: false,
        },
        metrics: LeaseMetrics::default(),
        health: watch::Sender::new(JobHealth::Pending),
        contention: watch::Sender::default(),
        changes: watch::Sender::new(0),
        recorder: recorder.clone(),
    };
    supervise::start(None, recorder, |_| LeaseRenewer::new(parts))
}

/// A node with status writes, as before Leases: one write per interval, counted from the end of the last.
async fn report(api: ApiServer, node: usize, beats: Arc<Beats>) {
    let name = objects::name(node);
    loop {
        for _ in 0..STATUS_TRIES {
            let asked = Instant::now();
            let succeeded = api.patch_status(&name, objects::heartbeat()).await.is_ok();
            beats.note(node, asked, succeeded);
            if succeeded {
                break;
            }
        }
        tokio::time::sleep(INTERVAL.mul_f64(1.0 + 0.04 * rand::random::<f64>())).await;
    }
}

/// The API server of one node, whose renewals are recorded.
struct Measured {
    api: ApiServer,
    node: usize,
    beats: Arc<Beats>,
}

impl Measured {
    fn noted(
        &self,
        request: BoxFuture<'static, Result<Written, ApiError>>,
    ) -> BoxFuture<'static, Result<Written, ApiError>> {
        let (node, beats, asked) = (self.node, self.beats.clone(), Instant::now());
        async move {
            let answer = request.await;
            beats.note(node, asked, answer.is_ok());
            answer
        }
        .boxed()
    }
}

impl LeaseApi for Measured {
    fn server(&self) -> String {
        LeaseApi::server(&self.api)
    }

    fn get_lease(&self, name: &str) -> BoxFuture<'static, Result<ObservedLease, ApiError>> {
        self.api.get_lease(name)
    }

    fn create_lease(&self, lease: LeaseCreate) -> BoxFuture<'static, Result<Written, ApiError>> {
        self.noted(self.api.create_lease(lease))
    }

    fn renew_lease(&self, patch: LeasePatch) -> BoxFuture<'static, Result<Written, ApiError>> {
        self.noted(self.api.renew_lease(patch))
    }

    fn node_uid(&self, node: &str) -> BoxFuture<'static, Result<String, ApiError>> {
        self.api.node_uid(node)
    }

    /// Other nodes share the connections: an error of one node must not close them.
    fn close_connections(&self) {}
}
