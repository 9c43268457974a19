//! A node at work: an agent in role `node`, image pulls, Services that change and are asked, and two proxies that follow
//! the agent in networks of their own, one with the backend nft and one with the backend ebpf.
//!
//! Owns: the components and their load. In: nothing. Out: addresses of `/metrics`, and a table of rules that can be
//! modified.

use std::convert::Infallible;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use k8s_openapi::api::core::v1::{Event, Service};
use keelson_cluster::kube::{Admin, Cluster};
use keelson_cluster::manifests::NODE as NODE_RIGHTS;
use keelson_cluster::net::plan::{SERVED, remote};
use keelson_cluster::net::{KeelsonProxy, KeelsonProxyOptions, Transport, World, http_get_from};
use keelson_harness::agent::{Agent, Settings};
use keelson_harness::containerd::{Kind, Options};
use keelson_harness::cri::Cri;
use keelson_harness::images::Image;
use keelson_harness::node::Node;
use keelson_harness::registry::Access;
use keelson_harness::registry_proxy::{Fault, Match};
use keelson_harness::scratch::Scratch;
use keelson_harness::util::eventually_slow;
use kube::Api;
use kube::api::ListParams;
use tokio::task::JoinSet;

use crate::prometheus::Target;

const NAME: &str = "watched";
const PROXY_METRICS: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 10249);
const PROXY_HEALTH: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 10256);
const IMAGES: usize = 18;
const WAVE: usize = 6;
/// For so long no registry answers a wave.
const HOLD: Duration = Duration::from_secs(3);
/// A year, as a kubelet's certificate.
const CERTIFICATE: Duration = Duration::from_secs(365 * 86_400);
/// Between two changes of endpoints.
const CHANGE: Duration = Duration::from_millis(700);
/// A Service with endpoints that answer.
const ASKED: &str = "asked";
/// Between two requests to it.
const ASK: Duration = Duration::from_millis(50);

/// A proxy, and the network that it serves.
struct WatchedProxy {
    /// Its name in Prometheus.
    name: &'static str,
    world: Arc<World>,
    _proxy: KeelsonProxy,
}

pub(crate) struct WatchedNode {
    agent: Agent,
    proxies: Vec<WatchedProxy>,
    images: Vec<Image>,
    cluster: Cluster,
    node: Arc<Node>,
}

impl WatchedNode {
    pub(crate) async fn start() -> Result<Self> {
        let options = Options { network: true, ..Options::default() };
        let node = Node::start_with(Kind::V2, Access::Anonymous, &options).await?;
        let images = node.push_many("watched", IMAGES, 3 << 20).await?;
        let cluster = Cluster::start(&node.scratch).await?;
        let mut identity = cluster.node(&node.scratch, NAME).await?;
        identity.rotate_for(CERTIFICATE)?;
        cluster.admin.apply(NODE_RIGHTS).await?;
        let settings = Settings::limit(2)
            // One less than a wave has.
            .set("pulls.max_queued_callers", i64::try_from(WAVE)? + 1)
            .set("agent.node_name", NAME)
            .set("kube.kubeconfig", identity.kubeconfig().display().to_string())
            .set("endpoints.watch", "always")
            .set("node.role", "node")
            // The machine's own disk and memory do not matter.
            .set("node.eviction_hard", "memory.available<1Mi")
            .set("node.root_dir", node.scratch.path().display().to_string());
        let agent = node.agent(&settings).await?;
        cluster.admin.apply(&asked()).await?;
        let mut proxies = Vec::new();
        for (name, is_ebpf) in [("watched", false), ("watched-ebpf", true)] {
            let world = Arc::new(World::new()?);
            // What a kube-proxy left, to take over from.
            world.node().nft(&["add", "table", "ip", "kube-proxy"])?;
            let mut options =
                KeelsonProxyOptions::new(&agent.endpoints_target()).set("proxy.sync_period", "1s");
            if is_ebpf {
                options = options.at_socket_level(&world)?;
            }
            let proxy = KeelsonProxy::start(&node.scratch, world.node(), &options).await?;
            proxies.push(WatchedProxy { name, world, _proxy: proxy });
        }
        Ok(Self { agent, proxies, images, cluster, node: Arc::new(node) })
    }

    pub(crate) fn scratch(&self) -> &Scratch {
        &self.node.scratch
    }

    /// Pulls images in waves, changes endpoints and asks a Service in each network, until it is dropped. The tests assert on what follows from it: pulls
    /// and changes that fail are a part of it.
    pub(crate) fn load(&self) -> JoinSet<()> {
        let mut load = JoinSet::new();
        let (node, images, socket) = (self.node.clone(), self.images.clone(), self.agent.socket());
        load.spawn(async move {
            loop {
                for wave in images.chunks(WAVE) {
                    if let Err(error) = pull_wave(&node, wave, &socket).await {
                        eprintln!("a wave of pulls failed: {error:#}");
                    }
                }
            }
        });
        let admin = self.cluster.admin.clone();
        load.spawn(async move {
            for step in 0_u32.. {
                if let Err(error) = change(&admin, step).await {
                    eprintln!("a change of endpoints failed: {error:#}");
                }
                tokio::time::sleep(CHANGE).await;
            }
        });
        for proxy in &self.proxies {
            let (world, admin) = (proxy.world.clone(), self.cluster.admin.clone());
            load.spawn(async move {
                loop {
                    let Err(error) = ask(&world, &admin).await;
                    eprintln!("the Service cannot be asked: {error:#}");
                    tokio::time::sleep(HOLD).await;
                }
            });
        }
        load
    }

    pub(crate) async fn targets(&self) -> Result<Vec<Target>> {
        let agent = self.agent.url().trim_start_matches("http://").trim_end_matches('/').to_owned();
        let mut targets = vec![Target { job: "keelson", instance: NAME, address: agent }];
        for proxy in &self.proxies {
            let address = proxy.world.reach_node(PROXY_METRICS).await?.to_string();
            targets.push(Target { job: "keelson-proxy", instance: proxy.name, address });
        }
        // Histograms of delays have values when changes have passed through both.
        for proxy in &targets[1..] {
            eventually_slow("a change was programmed", || async {
                let text = proxy.scrape().await?;
                ensure!(text.contains("kubeproxy_network_programming_duration_seconds_count{"), "not yet");
                Ok(())
            })
            .await?;
        }
        Ok(targets)
    }

    /// Fails unless one Event on the Node has this reason.
    pub(crate) async fn has_event(&self, reason: &str) -> Result<()> {
        let api: Api<Event> = Api::namespaced(self.cluster.admin.client(), "default");
        let fields = format!("involvedObject.kind=Node,involvedObject.uid={NAME},reason={reason}");
        let events = api.list(&ListParams::default().fields(&fields)).await?.items;
        ensure!(events.len() == 1, "{events:?}");
        Ok(())
    }

    /// As another program would.
    pub(crate) fn modify_rules(&self) -> Result<()> {
        self.proxies[0].world.node().nft(&["flush", "chain", "ip", "keelson", "services"]).map(drop)
    }
}

/// Two endpoints that answer in each network, and session affinity.
fn asked() -> String {
    let [first, second] = [1, 2].map(|number| remote(number).v4);
    let port = SERVED[0];
    format!(
        "apiVersion: v1\n\
         kind: Service\n\
         metadata: {{name: {ASKED}, namespace: default}}\n\
         spec: {{sessionAffinity: ClientIP, ports: [{{name: http, port: 80, protocol: TCP, targetPort: {port}}}]}}\n\
         ---\n\
         apiVersion: discovery.k8s.io/v1\n\
         kind: EndpointSlice\n\
         metadata: {{name: {ASKED}-a, namespace: default, labels: {{kubernetes.io/service-name: {ASKED}}}}}\n\
         addressType: IPv4\n\
         ports: [{{name: http, port: {port}, protocol: TCP}}]\n\
         endpoints: [{{addresses: [{first}], conditions: {{ready: true}}}}, {{addresses: [{second}], conditions: {{ready: true}}}}]\n"
    )
}

/// Requests of a pod to the Service that is asked, until one cannot be sent.
async fn ask(world: &World, admin: &Admin) -> Result<Infallible> {
    let service = Api::<Service>::namespaced(admin.client(), "default").get(ASKED).await?;
    let address = service.spec.and_then(|spec| spec.cluster_ip).context("it has no cluster IP")?;
    let to = SocketAddr::new(address.parse()?, 80);
    loop {
        // As a load balancer does.
        http_get_from(world.node(), PROXY_HEALTH, "/healthz").await?;
        // There is no answer before the first sync.
        world.pod().ask(to, Transport::Tcp, HOLD).await?;
        tokio::time::sleep(ASK).await;
    }
}

/// Images that wait for a registry that answers after a while, two callers for one of them, and one that does not exist.
async fn pull_wave(node: &Node, images: &[Image], socket: &Path) -> Result<()> {
    let hold = node.proxy.rule(Match::layers(), Fault::Hang);
    let missing = format!("{}/missing:1", node.proxy.address());
    let names: Vec<String> = images.iter().map(|image| node.name(image)).collect();
    let cri = Cri::connect(socket).await?;
    let mut pulls = JoinSet::new();
    for name in names.iter().chain(names.first()).chain([&missing]) {
        let (cri, name) = (cri.clone(), name.clone());
        // The missing one fails.
        pulls.spawn(async move { cri.pull_image(&name).await.is_ok() });
    }
    tokio::time::sleep(HOLD).await;
    node.proxy.remove(hold);
    while pulls.join_next().await.is_some() {}
    for name in names {
        cri.remove(&name).await?;
    }
    Ok(())
}

/// Three Services; one of them has another endpoint with each step.
async fn change(admin: &Admin, step: u32) -> Result<()> {
    for service in 0..3_u32 {
        let endpoint = if service == step % 3 { step % 200 } else { service } + 2;
        let manifest = format!(
            "apiVersion: v1\n\
             kind: Service\n\
             metadata: {{name: shop-{service}, namespace: default}}\n\
             spec: {{ports: [{{name: http, port: 80, protocol: TCP, targetPort: 8080}}]}}\n\
             ---\n\
             apiVersion: discovery.k8s.io/v1\n\
             kind: EndpointSlice\n\
             metadata:\n  name: shop-{service}-a\n  namespace: default\n  \
             labels: {{kubernetes.io/service-name: shop-{service}}}\n  \
             annotations: {{endpoints.kubernetes.io/last-change-trigger-time: \"{now}\"}}\n\
             addressType: IPv4\n\
             ports: [{{name: http, port: 8080, protocol: TCP}}]\n\
             endpoints: [{{addresses: [10.244.9.{endpoint}], nodeName: other, conditions: {{ready: true}}}}]\n",
            now = jiff::Timestamp::now(),
        );
        admin.apply(&manifest).await?;
    }
    Ok(())
}
