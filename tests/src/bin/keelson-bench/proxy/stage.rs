//! What all of the measurements at one size share.
//!
//! Owns: a cluster with one Node, its Services and slices. In: a size. Out: [`Stage`]: objects, and changes of them. Beside
//! those of [`bulk`] there are a few Services whose endpoints are real: pods of a [`World`](keelson_tests::net::World).

use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use keelson_tests::endpoints::{Kind, Writer, bulk, endpoint, port, service, slice};
use keelson_tests::kube::{ApiOptions, Cluster, Identity};
use keelson_tests::net::{Family, plan};
use keelson_tests::scratch::Scratch;
use kube::api::PostParams;
use serde_json::{Value, json};

use super::options::Size;

/// The node: one of those that the endpoints are spread over. It has no zone, so no endpoint is left out for a hint.
pub(super) const NODE: &str = "bulk-node-007";
/// How many Services share the load of connections: so that ports of clients last.
pub(super) const LOADED: usize = 16;
/// Where their endpoints listen, TCP and UDP.
pub(super) const LOAD_PORT: u16 = 9000;
/// Where the endpoints of the Service that is asked who answers may listen.
const ANSWERING: [u16; 2] = [8080, 8081];
/// The Service of which one asks who answers.
const ASKED: &str = "asked";
/// Ports of changes are above those of objects that were made.
const FIRST: u16 = 20_000;

/// The rights of the agent, as they are shipped.
const RIGHTS: &str = include_str!("../../../../../packaging/kubernetes/companion.yaml");

/// A cluster and its objects.
pub(super) struct Stage {
    pub(super) size: Size,
    pub(super) scratch: Scratch,
    pub(super) cluster: Cluster,
    /// Who the agent is.
    pub(super) companion: Identity,
    pub(super) writer: Writer,
    /// The cluster IPs of the Services that share the load.
    loaded: Vec<IpAddr>,
    asked: Option<IpAddr>,
    /// Which of the ports answers.
    answering: AtomicU16,
    next: AtomicU16,
}

impl Stage {
    /// The cluster, without Services.
    pub(super) async fn new(size: Size) -> Result<Self> {
        let scratch = Scratch::new()?;
        // The harness reads the audit log; nobody reads it here.
        let options = ApiOptions { args: vec!["--audit-log-path=".to_owned()], ..ApiOptions::default() };
        let cluster = Cluster::start_with(&scratch, &options).await?;
        cluster.admin.apply(RIGHTS).await?;
        let node = json!({
            "metadata": {"name": NODE},
            "status": {"addresses": [{"type": "InternalIP", "address": plan::NODE.v4.to_string()}]},
        });
        let node = serde_json::from_value(node)?;
        cluster.admin.nodes().create(&PostParams::default(), &node).await.context("cannot make a Node")?;
        let companion = cluster.service_account(&scratch, "kube-system", "keelson-agent").await?;
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
            answering,
            next,
        })
    }

    /// Makes all Services and slices.
    pub(super) async fn fill(&mut self) -> Result<()> {
        let asked = service(ASKED, &[port("http", 80)], &json!({}));
        self.asked = Some(self.make(asked, &[port("http", ANSWERING[0])]).await?);
        for number in 0..LOADED {
            let ports = [port("t", 80), udp("u", 80)];
            let loaded = service(&format!("loaded-{number:02}"), &ports, &json!({}));
            let ip = self.make(loaded, &[port("t", LOAD_PORT), udp("u", LOAD_PORT)]).await?;
            self.loaded.push(ip);
        }
        let made = bulk::make(&self.cluster, self.size.services, self.size.each).await?;
        eprintln!("{} Services with endpoints were made in {:.0} s", self.size, made.took.as_secs_f64());
        Ok(())
    }

    /// Makes a Service whose endpoints are the pods of the node, and tells its cluster IP.
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

    /// How many service ports have endpoints.
    pub(super) fn service_ports(&self) -> usize {
        // Every fourth has a second one.
        self.size.services + self.size.services.div_ceil(4) + 2 * LOADED + 1
    }

    /// How many endpoints they have, each counted once for each service port.
    pub(super) fn endpoints(&self) -> usize {
        let of_bulk = self.service_ports() - 2 * LOADED - 1;
        of_bulk * self.size.each + (2 * LOADED + 1) * usize::from(plan::LOCALS)
    }

    /// How many Services the agent serves, the API server's own not counted.
    pub(super) fn services(&self) -> usize {
        self.size.services + LOADED + 1
    }

    /// Where to reach the Services that share the load.
    pub(super) fn loaded(&self) -> Vec<SocketAddr> {
        self.loaded.iter().map(|ip| SocketAddr::new(*ip, 80)).collect()
    }

    /// Where their endpoints are.
    pub(super) fn load_endpoints(&self) -> Vec<SocketAddr> {
        (1..=plan::LOCALS).map(|number| plan::local(number).at(Family::V4, LOAD_PORT)).collect()
    }

    /// Where to ask who answers, and which port does.
    pub(super) fn asked(&self) -> Result<(SocketAddr, u16)> {
        let ip = self.asked.context("there are no Services yet")?;
        Ok((SocketAddr::new(ip, 80), self.answering.load(Ordering::Relaxed)))
    }

    /// From now on the other port answers.
    pub(super) async fn switch(&self) -> Result<()> {
        let now = self.answering.load(Ordering::Relaxed);
        let other = ANSWERING.into_iter().find(|port| *port != now).context("there are two")?;
        let ports = json!({"ports": [port("http", other)]});
        self.writer.patch(Kind::Slice, &format!("{ASKED}-a"), &ports).await?;
        self.answering.store(other, Ordering::Relaxed);
        Ok(())
    }

    /// A port that no slice had before.
    pub(super) fn new_port(&self) -> Result<u16> {
        let port = self.next.fetch_add(1, Ordering::Relaxed);
        ensure!(port >= FIRST, "there are no ports any more that no slice had before");
        Ok(port)
    }

    /// The endpoints of a Service listen at another port from now on.
    pub(super) async fn touch(&self, service: usize, number: u16) -> Result<()> {
        touch(&self.writer, service, number).await
    }
}

/// The same for who has a writer only.
pub(super) async fn touch(writer: &Writer, service: usize, number: u16) -> Result<()> {
    let mut ports = vec![port("http", number)];
    if service.is_multiple_of(4) {
        ports.push(port("https", 8443));
    }
    let name = format!("{}-a", bulk::name(service));
    writer.patch(Kind::Slice, &name, &json!({"ports": ports})).await.map(drop)
}

fn udp(name: &str, number: u16) -> Value {
    json!({"name": name, "protocol": "UDP", "port": number})
}

/// Ticks often enough that what is waited for is seen soon.
pub(super) const SOON: Duration = Duration::from_millis(5);
