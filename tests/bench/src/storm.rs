//! Requests to an API server after an outage: from agents, and beside them from nodes of client-go.
//!
//! Owns: the measurement. In: its own cluster; `KEELSON_BENCH_STORM_NODES` (500) and `KEELSON_BENCH_OUTAGE` (180
//! seconds). Out: a table. Each agent is a process in role `node` with a follower of its endpoints, and watches its
//! Node, its pods, Services, EndpointSlices and ServiceCIDRs; each node of client-go does the same and has the
//! kubelet's Lease controller. One side after the other uses the same API server, which is killed and restarted after
//! the outage. Requests are counted in the API server's audit log.

mod agents;

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use futures_util::{StreamExt as _, TryStreamExt as _};
use jiff::{SignedDuration, Timestamp};
use keelson_cluster::endpoints::{Kind, Writer, bulk, endpoint, port, service, slice};
use keelson_cluster::kube::{AuditEvent, Cluster, Reflectors};
use keelson_cluster::manifests::NODE as NODE_RIGHTS;
use keelson_harness::scratch::Scratch;
use serde_json::json;

use super::cost::Cpu;
use super::figures::{self, Key, Measured};
use super::{number, quantile};
use agents::Agents;

const PREFIX: &str = "storm-";
const NODES: usize = 500;
const OUTAGE: Duration = Duration::from_secs(180);
/// Services of the cluster, and endpoints of each.
const SERVICES: usize = 100;
const ENDPOINTS: usize = 5;
/// Time until all Leases are renewed at the pace of their own timers.
const SETTLE: Duration = Duration::from_secs(30);
/// Timeout for all nodes to see a marker.
const PATIENCE: Duration = Duration::from_secs(600);

enum Side {
    Agents(Agents),
    ClientGo(Reflectors),
}

struct Found {
    name: &'static str,
    /// Requests in the first 10 s and 60 s after the API server accepted the first one.
    requests: [usize; 2],
    /// The same, answered with 429 or 5xx.
    refused: [usize; 2],
    /// Of the first 60 s, by verb and resource.
    kinds: BTreeMap<String, usize>,
    /// Seconds from the first request until half, 99 % and all of the nodes were current.
    current: [f64; 3],
    /// Processor time of the API server in the first 60 s.
    api_cpu: f64,
}

pub(super) async fn storm() -> Result<()> {
    let nodes = number("KEELSON_BENCH_STORM_NODES", NODES)?;
    let outage = number("KEELSON_BENCH_OUTAGE", usize::try_from(OUTAGE.as_secs())?)?;
    let outage = Duration::from_secs(u64::try_from(outage)?);
    let mut found = Vec::new();
    for name in ["agents", "client-go"] {
        let scratch = Scratch::new()?;
        let mut cluster = Cluster::start(&scratch).await?;
        cluster.admin.apply(NODE_RIGHTS).await?;
        bulk::make(&cluster, SERVICES, ENDPOINTS).await?;
        let kubeconfigs = identities(&cluster, &scratch, nodes).await?;
        make_nodes(&cluster, nodes).await?;
        let side = match name {
            "agents" => Side::Agents(Agents::start(&scratch, &kubeconfigs, nodes, PREFIX).await?),
            _ => Side::ClientGo(Reflectors::start(&kubeconfigs, nodes, PREFIX)?),
        };
        found.push(measure(&mut cluster, name, side, nodes, outage).await?);
    }
    print(nodes, outage, &found);
    match &found[..] {
        [agents, peer] if (nodes, outage) == (NODES, OUTAGE) => figures::record(&[
            Measured::beside(Key::OutageRequests, agents.requests[1] as f64, peer.requests[1] as f64),
            Measured::beside(Key::OutageCurrent, agents.current[1], peer.current[1]),
        ]),
        _ => Ok(()),
    }
}

/// A certificate and a kubeconfig per node.
async fn identities(cluster: &Cluster, scratch: &Scratch, nodes: usize) -> Result<PathBuf> {
    let folder = scratch.dir("kubeconfigs")?;
    for node in 0..nodes {
        let identity = cluster.node(scratch, &format!("{PREFIX}{node}")).await?;
        std::fs::copy(identity.kubeconfig(), folder.join(format!("kubeconfig-{node}")))
            .context("cannot copy a kubeconfig")?;
    }
    Ok(folder)
}

async fn make_nodes(cluster: &Cluster, nodes: usize) -> Result<()> {
    let writer = Writer::new(&cluster.admin, "default").await?;
    futures_util::stream::iter(0..nodes)
        .map(|node| {
            let writer = writer.clone();
            async move {
                let object = json!({"metadata": {"name": format!("{PREFIX}{node}")}});
                writer.create(Kind::Node, &object).await.map(drop)
            }
        })
        .buffer_unordered(16)
        .try_collect()
        .await
}

/// Creates what every node must see to be current: a Service with an endpoint.
async fn mark(cluster: &Cluster, name: &str) -> Result<()> {
    let writer = Writer::new(&cluster.admin, "default").await?;
    writer.create(Kind::Service, &service(name, &[port("http", 80)], &json!({}))).await?;
    let endpoints = [endpoint("10.200.0.1", "elsewhere", &json!({}))];
    writer.create(Kind::Slice, &slice(name, "a", &[port("http", 8080)], &endpoints)).await?;
    Ok(())
}

impl Side {
    fn seen(&self, name: &str) -> HashMap<usize, u64> {
        match self {
            Self::Agents(agents) => agents.seen(name),
            Self::ClientGo(reflectors) => reflectors.seen(name),
        }
    }

    /// Whether a request was made by this side.
    fn is_of_agents(&self, event: &AuditEvent) -> bool {
        let agent = match self {
            Self::Agents(_) => "keelson",
            Self::ClientGo(_) => "reflectors",
        };
        event.user_agent.starts_with(agent) && event.user.starts_with("system:node:")
    }

    /// Waits until every node has seen a marker, and returns when each did.
    async fn all_saw(&self, name: &str, nodes: usize) -> Result<Vec<u64>> {
        let until = tokio::time::Instant::now() + PATIENCE;
        loop {
            let seen = self.seen(name);
            if seen.len() == nodes {
                let mut times: Vec<u64> = seen.into_values().collect();
                times.sort_unstable();
                return Ok(times);
            }
            if tokio::time::Instant::now() > until {
                bail!("{} of {nodes} nodes have seen {name} after {PATIENCE:?}", seen.len());
            }
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    }
}

async fn measure(
    cluster: &mut Cluster,
    name: &'static str,
    side: Side,
    nodes: usize,
    outage: Duration,
) -> Result<Found> {
    mark(cluster, "marker-before").await?;
    side.all_saw("marker-before", nodes).await?;
    eprintln!("{name}: {nodes} nodes are current; the API server goes in {} s", SETTLE.as_secs());
    tokio::time::sleep(SETTLE).await;
    cluster.api.kill9()?;
    let killed = Timestamp::now();
    tokio::time::sleep(outage).await;
    cluster.api.start_again().await?;
    let pid = cluster.api.pid().context("the API server runs")?;
    mark(cluster, "marker-after").await?;
    let seen = side.all_saw("marker-after", nodes).await?;
    let back = cluster.api.audit(|event| event.received > killed)?;
    let first = back.iter().map(|event| event.received).min().context("no client has asked")?;
    let minute = first + SignedDuration::from_secs(60);
    let left = minute.duration_since(Timestamp::now());
    tokio::time::sleep(Duration::try_from(left).unwrap_or_default()).await;
    // Of the whole process, whose start is the same for both sides.
    let api_cpu = Cpu::of(pid)?.since(Cpu::default()).as_secs_f64();
    tokio::time::sleep(Duration::from_secs(5)).await;
    let events = cluster.api.audit(|event| event.received >= first && side.is_of_agents(event))?;
    let within = |seconds: i64, only: &dyn Fn(&AuditEvent) -> bool| {
        let until = first + SignedDuration::from_secs(seconds);
        events.iter().filter(|event| event.received < until && only(event)).count()
    };
    let refused = |event: &AuditEvent| event.code.is_some_and(|code| code == 429 || code >= 500);
    let mut kinds = BTreeMap::new();
    for event in events.iter().filter(|event| event.received < minute) {
        let slash = if event.subresource.is_empty() { "" } else { "/" };
        let kind = format!("{} {}{slash}{}", event.verb, event.resource, event.subresource);
        *kinds.entry(kind).or_insert(0) += 1;
    }
    let began = u64::try_from(first.as_millisecond())?;
    let after = |q: f64| {
        let at = quantile(&seen, q).unwrap_or_default();
        Duration::from_millis(at.saturating_sub(began)).as_secs_f64()
    };
    Ok(Found {
        name,
        requests: [within(10, &|_| true), within(60, &|_| true)],
        refused: [within(10, &refused), within(60, &refused)],
        kinds,
        current: [after(0.5), after(0.99), after(1.0)],
        api_cpu,
    })
}

fn print(nodes: usize, outage: Duration, found: &[Found]) {
    println!(
        "| {nodes} nodes, API server away for {} s | {} |",
        outage.as_secs(),
        found.iter().map(|found| found.name).collect::<Vec<_>>().join(" | ")
    );
    println!("|---|{}", "---|".repeat(found.len()));
    let row = |what: &str, of: &dyn Fn(&Found) -> String| {
        println!("| {what} | {} |", found.iter().map(of).collect::<Vec<_>>().join(" | "));
    };
    row("requests in the first 10 s", &|found| found.requests[0].to_string());
    row("requests in the first 60 s", &|found| found.requests[1].to_string());
    row("of them refused (429, 5xx) in 10 s", &|found| found.refused[0].to_string());
    row("of them refused (429, 5xx) in 60 s", &|found| found.refused[1].to_string());
    row("half of the nodes current after", &|found| format!("{:.1} s", found.current[0]));
    row("99 % current after", &|found| format!("{:.1} s", found.current[1]));
    row("all current after", &|found| format!("{:.1} s", found.current[2]));
    row("processor time of the API server, start and first 60 s", &|found| format!("{:.1} s", found.api_cpu));
    for found in found {
        let kinds: Vec<String> = found.kinds.iter().map(|(kind, count)| format!("{kind} {count}")).collect();
        println!("\n{}, first 60 s: {}", found.name, kinds.join(", "));
    }
}

fn kubeconfig(folder: &Path, node: usize) -> PathBuf {
    folder.join(format!("kubeconfig-{node}"))
}
