//! Heartbeats of one node: the agent's beside the stock kubelet's.
//!
//! Owns: the measurement. In: its own cluster, one containerd for both; `KEELSON_BENCH_MINUTES` (4). Out: a table. Node
//! `a` has a kubelet, node `b` an agent in role `node`; then an agent in role `companion` joins the kubelet. Each has a
//! proxy before the API server that only counts bytes ([`bursts`]), and etcd reports every put with its size. A Lease
//! is renewed at its real interval; an unchanged status is reported more often than by default, to get the figures of
//! one report, and is counted at the default interval. The companion has default settings: it has no Lease, and never
//! writes an unchanged status.

mod bursts;
mod hour;

use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use keelson_cluster::kube::{AuditEvent, Cluster, Identity, Journal, Kubelet, KubeletOptions, TcpProxy};
use keelson_cluster::manifests::COMPANION;
use keelson_harness::agent::{Agent, Settings};
use keelson_harness::containerd::{Containerd, Kind, Options};
use keelson_harness::images::{ImageSpec, push_all};
use keelson_harness::registry::{Access, Registry};
use keelson_harness::scratch::Scratch;

use super::figures::{self, Key, Measured};
use super::megabytes;
use bursts::Cost;
pub(super) use hour::hour;

/// Reports of an unchanged status per hour with default settings: the kubelet's every 5 min, the agent's every 15 min.
const KUBELET_REPORTS: f64 = 12.0;
const AGENT_REPORTS: f64 = 4.0;
/// Report interval here: different from the Lease's, so that the two seldom coincide; the same for the two that are
/// compared.
const REPORTED: &str = "7s";
const IMAGES: usize = 30;
/// Time after which the first status is over, and the agent's Lease has no managed fields any more.
const SETTLE: Duration = Duration::from_secs(35);
struct Client<'a> {
    user: &'a str,
    proxy: &'a TcpProxy,
    /// None if it must write nothing.
    lease: Option<&'a str>,
    node: &'a str,
    pid: u32,
    reports: f64,
}

struct Side {
    renewals: f64,
    /// Reports of an unchanged status, with default settings.
    reports: f64,
    renewal: Cost,
    report: Cost,
    /// A status report of another client, received by the watch of the Node.
    got: Cost,
    /// All other bytes on its connections: bookmarks of watches, PINGs.
    other: f64,
    /// Bytes of key and value in etcd, of one write.
    stored_lease: f64,
    stored_node: f64,
    memory: f64,
}

pub(super) async fn heartbeat() -> Result<()> {
    let minutes = match std::env::var("KEELSON_BENCH_MINUTES") {
        Ok(text) => {
            text.parse().with_context(|| format!("KEELSON_BENCH_MINUTES is {text:?}, not a number"))?
        }
        Err(_) => 4.0,
    };
    let window = Duration::from_secs_f64(minutes * 60.0);
    let env = TestEnv::new(Some(REPORTED)).await?;
    let (kubelet_way, node_way, companion_way) =
        (env.cluster.tcp_proxy().await?, env.cluster.tcp_proxy().await?, env.cluster.tcp_proxy().await?);
    let kubelet = env.kubelet(&kubelet_way).await?;
    let identity = env.cluster.node(&env.scratch, "b").await?;
    let node = env.agent(identity, &node_way, "b", "node").await?;
    env.cluster.admin.await_condition("b", "Ready", "True").await?;
    let clients = [
        Client {
            user: "system:node:a",
            proxy: &kubelet_way,
            lease: Some("a"),
            node: "a",
            pid: kubelet.pid().context("it runs")?,
            reports: KUBELET_REPORTS,
        },
        Client {
            user: "system:node:b",
            proxy: &node_way,
            lease: Some("b"),
            node: "b",
            pid: node.pid().context("it runs")?,
            reports: AGENT_REPORTS,
        },
    ];
    let sides = env.measure(&clients, window).await?;
    env.cluster.admin.apply(COMPANION).await?;
    let identity = env.cluster.companion(&env.scratch, "keelson-agent", "a").await?;
    let companion = env.agent(identity, &companion_way, "a", "companion").await?;
    let client = Client {
        user: "system:serviceaccount:kube-system:keelson-agent",
        proxy: &companion_way,
        lease: None,
        node: "a",
        pid: companion.pid().context("it runs")?,
        reports: 0.0,
    };
    let beside = env.measure(&[client], window / 2).await?;
    if let ([kubelet, node], [companion]) = (&sides[..], &beside[..]) {
        print(kubelet, node, companion);
        let beside = |key, of: fn(&Side) -> f64| Measured::beside(key, of(node), of(kubelet));
        figures::record(&[
            beside(Key::RequestBytes, Side::requests_per_hour),
            beside(Key::EtcdBytes, Side::stored_per_hour),
        ])?;
    }
    Ok(())
}

struct TestEnv {
    containerd: Containerd,
    cluster: Cluster,
    scratch: Scratch,
    /// Interval at which kubelet and agents report an unchanged status; None for the default.
    reported: Option<&'static str>,
}

impl TestEnv {
    async fn new(reported: Option<&'static str>) -> Result<Self> {
        let scratch = Scratch::new()?;
        let registry = Registry::start(&scratch, Access::Anonymous).await?;
        let options = Options { network: true, ..Options::default() };
        let containerd = Containerd::start(&scratch, Kind::V2, &options).await?;
        containerd.configure_registry(registry.address(), registry.address())?;
        let specs: Vec<ImageSpec> =
            (0..IMAGES).map(|n| ImageSpec::single(&format!("bench/team/service-{n}"), 4096)).collect();
        let cri = containerd.cri().await?;
        for image in push_all(&specs, &registry).await? {
            cri.pull_image(&image.at(registry.address())).await?;
        }
        let cluster = Cluster::start(&scratch).await?;
        Ok(Self { containerd, cluster, scratch, reported })
    }

    async fn kubelet(&self, way: &TcpProxy) -> Result<Kubelet> {
        let mut identity = self.cluster.node(&self.scratch, "a").await?;
        let options = KubeletOptions {
            kubeconfig: Some(identity.kubeconfig_via(&way.endpoint())?),
            ..KubeletOptions::default()
        };
        let options = match self.reported {
            Some(time) => {
                options.set("nodeStatusUpdateFrequency", time).set("nodeStatusReportFrequency", time)
            }
            None => options,
        };
        let kubelet = self.cluster.kubelet(&self.scratch, "a", &self.containerd, &options).await?;
        self.cluster.admin.await_condition("a", "Ready", "True").await?;
        Ok(kubelet)
    }

    async fn agent(&self, mut identity: Identity, way: &TcpProxy, node: &str, role: &str) -> Result<Agent> {
        let settings = Settings::new()
            .set("agent.node_name", node)
            .set("endpoints.source", "off")
            .set("kube.kubeconfig", identity.kubeconfig_via(&way.endpoint())?.display().to_string())
            .set("node.role", role)
            .set("node.root_dir", self.scratch.path().display().to_string())
            // Like the kubelet of the harness: the disk of the machine may be full.
            .set("node.eviction_hard", "memory.available<1Mi");
        let settings = match self.reported {
            Some(time) => settings
                .set("node.node_status_update_frequency", time)
                .set("node.node_status_report_frequency", time),
            None => settings,
        };
        Agent::start(&self.scratch, &self.containerd.endpoint(), &settings).await
    }

    /// Waits until all are in steady state, and measures them side by side.
    async fn measure(&self, clients: &[Client<'_>], window: Duration) -> Result<Vec<Side>> {
        tokio::time::sleep(SETTLE).await;
        let (begin, counted) = (jiff::Timestamp::now(), self.cluster.etcd.writes().await?);
        let journal = Journal::start(&self.scratch, &self.cluster.etcd).await?;
        clients.iter().for_each(|client| client.proxy.record());
        tokio::time::sleep(window).await;
        let (puts, now) = (journal.puts()?, self.cluster.etcd.writes().await?);
        let output: usize = puts.iter().map(|put| put.bytes).sum();
        eprintln!(
            "etcd: {} bytes in {} puts by its own count, {output} in {} by its watch events",
            now.put_bytes - counted.put_bytes,
            now.puts - counted.puts,
            puts.len()
        );
        for client in clients {
            let node = self.cluster.admin.node(client.node).await?.context("the Node is there")?;
            let managers = serde_json::to_string(&node.metadata.managed_fields)?;
            eprintln!("Node {}: {} bytes of JSON say who set which field", client.node, managers.len());
        }
        let audit = self.cluster.api.audit(|event| event.received >= begin)?;
        let stored = |key: String| {
            let sizes: Vec<usize> = puts.iter().filter(|put| put.key == key).map(|put| put.bytes).collect();
            ensure!(!sizes.is_empty(), "{key} was not written");
            Ok(sizes.iter().sum::<usize>() as f64 / sizes.len() as f64)
        };
        let sides = clients.iter().map(|client| {
            let sizes = match client.lease {
                Some(lease) => (
                    stored(format!("/registry/leases/kube-node-lease/{lease}"))?,
                    stored(format!("/registry/minions/{}", client.node))?,
                ),
                None => (0.0, 0.0),
            };
            client.side(&client.concerned(&audit), window, sizes)
        });
        sides.collect()
    }
}

fn is_renewal(event: &AuditEvent) -> bool {
    event.resource == "leases" && event.is_write()
}

fn is_report(event: &AuditEvent) -> bool {
    event.is_for("patch", "nodes/status")
}

impl Client<'_> {
    /// Its requests, and those of others that its watch of the Node receives.
    fn concerned(&self, audit: &[AuditEvent]) -> Vec<AuditEvent> {
        let got = |event: &AuditEvent| is_report(event) && event.name == self.node;
        audit.iter().filter(|event| event.user == self.user || got(event)).cloned().collect()
    }

    fn side(
        &self,
        events: &[AuditEvent],
        window: Duration,
        (stored_lease, stored_node): (f64, f64),
    ) -> Result<Side> {
        let chunks = self.proxy.chunks();
        let own = |event: &AuditEvent| event.user == self.user;
        let renewal = bursts::cost(&chunks, events, |event| own(event) && is_renewal(event));
        let report = bursts::cost(&chunks, events, |event| own(event) && is_report(event));
        let got = bursts::cost(&chunks, events, |event| !own(event));
        let times: Vec<_> =
            events.iter().filter(|event| is_renewal(event)).map(|event| event.received).collect();
        let reports = events.iter().filter(|event| own(event) && is_report(event)).count();
        let renewals = match (self.lease, times.iter().min(), times.iter().max()) {
            (Some(_), Some(first), Some(last)) if renewal.of > 2 && report.of > 2 => {
                3600.0 * (times.len() - 1) as f64 / last.duration_since(*first).as_secs_f64()
            }
            (None, None, None) if reports == 0 => 0.0,
            (Some(_), ..) => bail!("too little was seen of {}: {renewal:?} {report:?}", self.user),
            (None, ..) => bail!("{} wrote {} renewals and {reports} reports", self.user, times.len()),
        };
        let total: usize = chunks.iter().map(|chunk| chunk.bytes).sum();
        let others = events.iter().filter(|event| !own(event)).count();
        let of_all = |count: usize, cost: Cost| count * (cost.request + cost.response);
        let heartbeats = of_all(times.len(), renewal) + of_all(reports, report) + of_all(others, got);
        eprintln!(
            "{}: {} renewals {renewal:?}, {reports} reports {report:?}, {others} of others {got:?}",
            self.user,
            times.len()
        );
        Ok(Side {
            renewals,
            reports: self.reports,
            renewal,
            report,
            got,
            other: total.saturating_sub(heartbeats) as f64 * 3600.0 / window.as_secs_f64(),
            stored_lease,
            stored_node,
            memory: megabytes(self.pid)?,
        })
    }
}

impl Side {
    /// Per hour: `renewal` for each renewal, and `report` for each report.
    fn hour(&self, renewal: f64, report: f64) -> f64 {
        self.renewals * renewal + self.reports * report
    }

    /// In kB.
    fn requests_per_hour(&self) -> f64 {
        self.hour(self.renewal.request as f64, self.report.request as f64) / 1e3
    }

    /// In kB.
    fn stored_per_hour(&self) -> f64 {
        self.hour(self.stored_lease, self.stored_node) / 1e3
    }
}

fn print(kubelet: &Side, node: &Side, companion: &Side) {
    println!("| heartbeats | kubelet | agent, role `node` | ratio | agent, `companion` | target |");
    println!("|---|---|---|---|---|---|");
    let row = |what: &str, unit: &str, digits: usize, target: &str, of: &dyn Fn(&Side) -> f64| {
        let (kubelet, node, companion) = (of(kubelet), of(node), of(companion));
        println!(
            "| {what} | {kubelet:.digits$}{unit} | {node:.digits$}{unit} | {:.2} | {companion:.digits$}{unit} | {target} |",
            node / kubelet
        );
    };
    row("renewals an hour", "", 0, "", &|side| side.renewals);
    row("a renewal, request", " B", 0, "", &|side| side.renewal.request as f64);
    row("a renewal, answer", " B", 0, "", &|side| side.renewal.response as f64);
    row("a status report, request", " B", 0, "", &|side| side.report.request as f64);
    row("a status report, answer and watch event", " B", 0, "", &|side| side.report.response as f64);
    row("**requests on the wire, an hour**", " kB", 1, "0.5", &Side::requests_per_hour);
    row("answers on the wire, an hour", " kB", 1, "", &|side| {
        side.hour(side.renewal.response as f64, side.report.response as f64) / 1e3
    });
    println!(
        "| the kubelet's status report, as a companion's watch brings it | | | | {} B | |",
        companion.got.request + companion.got.response
    );
    row("a renewal in etcd", " B", 0, "", &|side| side.stored_lease);
    row("a status report in etcd", " B", 0, "", &|side| side.stored_node);
    row("**written to etcd, an hour**", " kB", 1, "0.5", &Side::stored_per_hour);
    row("all else on the connections, both ways, an hour", " kB", 1, "", &|side| side.other / 1e3);
    row("idle memory (VmRSS)", " MB", 1, "20 MB", &|side| side.memory);
}
