//! Shared by all measurements at one size.
//!
//! Owns: a cluster with one Node, its Services and slices. In: a size. Out: [`TestEnv`]: objects, and changes of them.
//! Beside those of [`bulk`] there are a few Services whose endpoints are real: pods of a
//! [`World`](keelson_cluster::net::World).

use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use k8s_openapi::api::core::v1::Service;
use keelson_cluster::endpoints::{Kind, Writer, bulk, endpoint, port, service, slice};
use keelson_cluster::kube::{ApiOptions, Cluster, Identity};
use keelson_cluster::manifests::COMPANION as RIGHTS;
use keelson_cluster::net::{
    Family,
    plan::{self, CLIENT_NETWORKS, NODE_NETWORKS},
};
use keelson_harness::scratch::Scratch;
use kube::api::PostParams;
use serde_json::{Value, json};

use super::options::Size;

/// The node: one of those that the endpoints are spread over. It has no zone, so no endpoint is excluded by a hint.
pub(super) const NODE: &str = "bulk-node-007";
/// The cluster outside of this virtual machine ([`Cluster::description`]).
pub(super) const OUTSIDE: &str = "KEELSON_BENCH_CLUSTER";
/// Number of Services of each [`Load`] that share the connections, so that client ports suffice.
pub(super) const LOADED: usize = 16;
/// Node port of the first Service that has one.
const NODE_PORT: u16 = 31_000;
/// Port of their endpoints, TCP and UDP.
pub(super) const LOAD_PORT: u16 = 9000;
/// Possible ports of the endpoints of [`ASKED`].
const ANSWERING: [u16; 2] = [8080, 8081];
/// The Service that tests whether a change is in effect.
const ASKED: &str = "asked";
/// Ports of changes are above those of created objects.
const FIRST: u16 = 20_000;
/// Source ranges of each Service without connections.
const RANGES_EACH: usize = 100;
/// Maximum number of such Services: each has a separate address in 172.31.0.0/16.
const MAX_RANGED: usize = 1 << 16;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Load {
    Plain,
    Sticky,
    /// With a load balancer address and a node port, which are masqueraded.
    Exposed,
    /// The same with source ranges.
    Ranged,
}

impl Load {
    const ALL: [Self; 4] = [Self::Plain, Self::Sticky, Self::Exposed, Self::Ranged];

    fn name(self) -> &'static str {
        match self {
            Self::Plain => "plain",
            Self::Sticky => "sticky",
            Self::Exposed => "exposed",
            Self::Ranged => "ranged",
        }
    }

    fn spec(self) -> Value {
        match self {
            Self::Plain => json!({}),
            Self::Sticky => json!({"sessionAffinity": "ClientIP"}),
            Self::Exposed => json!({"type": "LoadBalancer"}),
            Self::Ranged => json!({
                "type": "LoadBalancer",
                "loadBalancerSourceRanges": [CLIENT_NETWORKS[0], "198.18.0.0/15", NODE_NETWORKS[0]],
            }),
        }
    }

    /// The load balancer address of a Service, if it has one.
    fn ingress(self, number: usize) -> Option<IpAddr> {
        let third = match self {
            Self::Plain | Self::Sticky => return None,
            Self::Exposed => 0,
            Self::Ranged => 1,
        };
        Some(IpAddr::from([172, 30, third, u8::try_from(number).unwrap_or(u8::MAX)]))
    }

    fn ports(self, number: usize) -> [Value; 2] {
        let mut ports = [port("t", 80), udp("u", 80)];
        if self == Self::Exposed {
            for port in &mut ports {
                port["nodePort"] = json!(usize::from(NODE_PORT) + number);
            }
        }
        ports
    }
}

pub(super) struct TestEnv {
    pub(super) size: Size,
    pub(super) scratch: Scratch,
    pub(super) cluster: Cluster,
    pub(super) companion: Identity,
    pub(super) writer: Writer,
    /// Cluster IPs of the Services that share a load.
    loaded: Vec<(Load, IpAddr)>,
    asked: Option<IpAddr>,
    /// Number of Services with source ranges but without connections.
    more_ranged: usize,
    ranges: usize,
    /// The port at which the endpoints of [`ASKED`] listen now.
    answering: AtomicU16,
    next: AtomicU16,
}

impl TestEnv {
    pub(super) async fn new(size: Size) -> Result<Self> {
        let scratch = Scratch::new()?;
        // Not needed here.
        let options = ApiOptions { args: vec!["--audit-log-path=".to_owned()], ..ApiOptions::default() };
        let cluster = match std::env::var(OUTSIDE) {
            Ok(description) => Cluster::outside(&scratch, &description).await?,
            Err(_) => Cluster::start_with(&scratch, &options).await?,
        };
        cluster.admin.apply(RIGHTS).await?;
        let node = json!({
            "metadata": {"name": NODE},
            "status": {"addresses": [{"type": "InternalIP", "address": plan::NODE.v4.to_string()}]},
        });
        let node = serde_json::from_value(node)?;
        cluster.admin.nodes().create(&PostParams::default(), &node).await.context("cannot make a Node")?;
        let companion = cluster.companion(&scratch, "keelson-agent", NODE).await?;
        let writer = Writer::new(&cluster.admin, bulk::NAMESPACE).await?;
        let answering = AtomicU16::new(ANSWERING[0]);
        let next = AtomicU16::new(FIRST);
        Ok(Self {
            size,
            scratch,
            cluster,
            companion,
            writer,
            loaded: Vec::new(),
            asked: None,
            more_ranged: 0,
            ranges: 0,
            answering,
            next,
        })
    }

    /// Creates all Services and slices, with this number of source ranges on Services without connections.
    pub(super) async fn fill(&mut self, ranges: usize) -> Result<()> {
        // First, so that the API server does not allocate their addresses.
        let made = bulk::make(&self.cluster, self.size.services, self.size.each).await?;
        eprintln!("{} Services with endpoints were created in {:.0} s", self.size, made.took.as_secs_f64());
        let asked = service(ASKED, &[port("http", 80)], &json!({}));
        self.asked = Some(self.make(asked, &[port("http", ANSWERING[0])]).await?);
        for load in Load::ALL {
            for number in 0..LOADED {
                let name = format!("{}-{number:02}", load.name());
                let service = service(&name, &load.ports(number), &load.spec());
                let ip = self.make(service, &[port("t", LOAD_PORT), udp("u", LOAD_PORT)]).await?;
                if let Some(ingress) = load.ingress(number) {
                    let status = json!({"status": {"loadBalancer": {"ingress": [{"ip": ingress}]}}});
                    self.writer.patch(Kind::Service, &format!("{name}/status"), &status).await?;
                }
                self.loaded.push((load, ip));
            }
        }
        self.make_ranged(ranges).await
    }

    /// Creates Services with this number of source ranges in total.
    async fn make_ranged(&mut self, ranges: usize) -> Result<()> {
        let services = ranges.div_ceil(RANGES_EACH);
        ensure!(services <= MAX_RANGED, "{ranges} source ranges are too many");
        for number in 0..services {
            let first = number * RANGES_EACH;
            let networks: Vec<_> = (first..ranges.min(first + RANGES_EACH)).map(network).collect();
            let spec = json!({
                "type": "LoadBalancer",
                "allocateLoadBalancerNodePorts": false,
                "loadBalancerSourceRanges": networks,
            });
            let name = format!("more-ranged-{number:05}");
            let service = service(&name, &[port("t", 80)], &spec);
            self.make(service, &[port("t", LOAD_PORT)]).await?;
            let [.., high, low] = number.to_be_bytes();
            let status =
                json!({"status": {"loadBalancer": {"ingress": [{"ip": format!("172.31.{high}.{low}")}]}}});
            self.writer.patch(Kind::Service, &format!("{name}/status"), &status).await?;
        }
        (self.more_ranged, self.ranges) = (services, ranges);
        Ok(())
    }

    /// Creates a Service whose endpoints are the pods of the node, and returns its cluster IP.
    async fn make(&self, service: Value, ports: &[Value]) -> Result<IpAddr> {
        let made = self.writer.create(Kind::Service, &service).await?;
        let name = made["metadata"]["name"].as_str().context("a Service has a name")?;
        let pods: Vec<_> = (1..=plan::LOCALS)
            .map(|number| endpoint(&plan::local(number).v4.to_string(), NODE, &json!({})))
            .collect();
        self.writer.create(Kind::Slice, &slice(name, "a", ports, &pods)).await?;
        let ip = made["spec"]["clusterIP"].as_str().context("a Service has a cluster IP")?;
        ip.parse().with_context(|| format!("{ip:?} is no address"))
    }

    /// Number of source ranges of Services without connections.
    pub(super) fn ranges(&self) -> usize {
        self.ranges
    }

    /// Number of service ports with endpoints.
    pub(super) fn service_ports(&self) -> usize {
        // Every fourth has a second one.
        let of_bulk = self.size.services + self.size.services.div_ceil(4);
        of_bulk + 2 * LOADED * Load::ALL.len() + 1 + self.more_ranged
    }

    /// Number of load balancer addresses, each counted once for each service port.
    pub(super) fn ingress_ports(&self) -> usize {
        2 * LOADED * Load::ALL.iter().filter(|load| load.ingress(0).is_some()).count() + self.more_ranged
    }

    /// Number of endpoints of Services without affinity, each counted once for each service port.
    pub(super) fn endpoints(&self) -> usize {
        let of_bulk = self.size.services + self.size.services.div_ceil(4);
        let without_affinity = Load::ALL.iter().filter(|load| **load != Load::Sticky).count();
        let real = 2 * LOADED * without_affinity + 1 + self.more_ranged;
        of_bulk * self.size.each + real * usize::from(plan::LOCALS)
    }

    /// Number of Services that the agent serves, without the API server's own.
    pub(super) fn services(&self) -> usize {
        self.size.services + LOADED * Load::ALL.len() + 1 + self.more_ranged
    }

    /// Cluster IPs of the Services that share a load.
    pub(super) fn loaded(&self, load: Load) -> Vec<SocketAddr> {
        let of = self.loaded.iter().filter(|(other, _)| *other == load);
        of.map(|(_, ip)| SocketAddr::new(*ip, 80)).collect()
    }

    /// Their load balancer addresses.
    pub(super) fn ingresses(load: Load) -> Vec<SocketAddr> {
        let addresses = (0..LOADED).filter_map(|number| load.ingress(number));
        addresses.map(|ip| SocketAddr::new(ip, 80)).collect()
    }

    pub(super) fn node_ports() -> Vec<SocketAddr> {
        let ports = (NODE_PORT..).take(LOADED);
        ports.map(|port| SocketAddr::new(plan::NODE.v4.into(), port)).collect()
    }

    pub(super) fn load_endpoints(&self) -> Vec<SocketAddr> {
        (1..=plan::LOCALS).map(|number| plan::local(number).at(Family::V4, LOAD_PORT)).collect()
    }

    /// The address of [`ASKED`], and the port of the endpoints that answer.
    pub(super) fn asked(&self) -> Result<(SocketAddr, u16)> {
        let ip = self.asked.context("there are no Services yet")?;
        Ok((SocketAddr::new(ip, 80), self.answering.load(Ordering::Relaxed)))
    }

    /// Moves all endpoints of [`ASKED`] to their other port. Returns the resource version of the slice.
    pub(super) async fn switch(&self) -> Result<String> {
        let now = self.answering.load(Ordering::Relaxed);
        let other = ANSWERING.into_iter().find(|port| *port != now).context("there are two")?;
        let ports = json!({"ports": [port("http", other)]});
        let slice = self.writer.patch(Kind::Slice, &format!("{ASKED}-a"), &ports).await?;
        self.answering.store(other, Ordering::Relaxed);
        let version = slice["metadata"]["resourceVersion"].as_str();
        Ok(version.context("a slice has a resource version")?.to_owned())
    }

    /// A port that no slice had before.
    pub(super) fn new_port(&self) -> Result<u16> {
        let port = self.next.fetch_add(1, Ordering::Relaxed);
        ensure!(port >= FIRST, "there are no ports any more that no slice had before");
        Ok(port)
    }

    /// The cluster IP of a Service, and its first port.
    pub(super) async fn frontend(&self, service: usize) -> Result<SocketAddr> {
        let api: kube::Api<Service> = kube::Api::namespaced(self.cluster.admin.client(), bulk::NAMESPACE);
        let spec = api.get(&bulk::name(service)).await?.spec.context("a Service has a specification")?;
        let ip = spec.cluster_ip.context("a Service has a cluster IP")?;
        let port = spec.ports.iter().flatten().next().context("a Service has a port")?.port;
        Ok(SocketAddr::new(ip.parse()?, u16::try_from(port)?))
    }

    pub(super) async fn touch(&self, service: usize, number: u16) -> Result<String> {
        touch(&self.writer, service, number).await
    }

    /// Adds one endpoint to a Service, or removes it again. Returns the resource version of the slice.
    pub(super) async fn scale(&self, service: usize, more: bool) -> Result<String> {
        let endpoints = bulk::endpoints(service, self.size.each, usize::from(more));
        patch(&self.writer, service, &json!({"endpoints": endpoints})).await
    }
}

/// The `number`th network from 64.0.0.0/24 on, outside the world's networks. Only every second one, because adjacent
/// ones would be merged.
fn network(number: usize) -> String {
    let [.., a, b, c] = ((64 << 16) + 2 * number).to_be_bytes();
    format!("{a}.{b}.{c}.0/24")
}

/// The same with only a writer. Returns the resource version of the slice.
pub(super) async fn touch(writer: &Writer, service: usize, number: u16) -> Result<String> {
    let mut ports = vec![port("http", number)];
    if service.is_multiple_of(4) {
        ports.push(port("https", 8443));
    }
    patch(writer, service, &json!({"ports": ports})).await
}

/// Patches the slice of a Service and returns its resource version.
async fn patch(writer: &Writer, service: usize, patch: &Value) -> Result<String> {
    let name = format!("{}-a", bulk::name(service));
    let slice = writer.patch(Kind::Slice, &name, patch).await?;
    let version = slice["metadata"]["resourceVersion"].as_str();
    Ok(version.context("a slice has a resource version")?.to_owned())
}

fn udp(name: &str, number: u16) -> Value {
    json!({"name": name, "protocol": "UDP", "port": number})
}

pub(super) const POLL_INTERVAL: Duration = Duration::from_millis(5);
