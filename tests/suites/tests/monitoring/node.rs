//! A node at work: an agent in role `node`, a proxy, image pulls, and Services that change.
//!
//! Owns: the components and their load. In: nothing. Out: addresses of `/metrics`, and a table of rules that can be
//! modified.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Result, ensure};
use k8s_openapi::api::core::v1::Event;
use keelson_cluster::kube::{Admin, Cluster};
use keelson_cluster::manifests::NODE as NODE_RIGHTS;
use keelson_cluster::net::{KeelsonProxy, KeelsonProxyOptions, World};
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
use tokio::net::TcpListener;
use tokio::task::JoinSet;

use crate::prometheus::Target;

const NAME: &str = "watched";
const PROXY_METRICS: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 10249);
const IMAGES: usize = 18;
const WAVE: usize = 6;
/// For so long no registry answers a wave.
const HOLD: Duration = Duration::from_secs(3);
/// Between two changes of endpoints.
const CHANGE: Duration = Duration::from_millis(700);

pub(crate) struct WatchedNode {
    agent: Agent,
    _proxy: KeelsonProxy,
    world: Arc<World>,
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
        let identity = cluster.node(&node.scratch, NAME).await?;
        cluster.admin.apply(NODE_RIGHTS).await?;
        let settings = Settings::limit(2)
            .set("agent.node_name", NAME)
            .set("kube.kubeconfig", identity.kubeconfig().display().to_string())
            .set("endpoints.watch", "always")
            .set("node.role", "node")
            // The machine's own disk and memory do not matter.
            .set("node.eviction_hard", "memory.available<1Mi")
            .set("node.root_dir", node.scratch.path().display().to_string());
        let agent = node.agent(&settings).await?;
        let world = Arc::new(World::new()?);
        let options = KeelsonProxyOptions::new(&agent.endpoints_target()).set("proxy.sync_period", "1s");
        let proxy = KeelsonProxy::start(&node.scratch, world.node(), &options).await?;
        Ok(Self { agent, _proxy: proxy, world, images, cluster, node: Arc::new(node) })
    }

    pub(crate) fn scratch(&self) -> &Scratch {
        &self.node.scratch
    }

    /// Pulls images in waves and changes endpoints, until it is dropped. The tests assert on what follows from it: pulls
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
        load
    }

    /// The proxy is in a network namespace, and is reached through a port of the machine.
    pub(crate) async fn targets(&self) -> Result<Vec<Target>> {
        let agent = self.agent.url().trim_start_matches("http://").trim_end_matches('/').to_owned();
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
        let proxy = listener.local_addr()?.to_string();
        let world = self.world.clone();
        tokio::spawn(async move {
            while let Ok((mut outside, _)) = listener.accept().await {
                let Ok(socket) = world.node().tcp_client(Ipv4Addr::UNSPECIFIED.into()) else { return };
                tokio::spawn(async move {
                    if let Ok(mut inside) = socket.connect(PROXY_METRICS).await {
                        // Either side may end it.
                        let _ = tokio::io::copy_bidirectional(&mut outside, &mut inside).await;
                    }
                });
            }
        });
        let targets =
            vec![Target { job: "keelson", address: agent }, Target { job: "keelson-proxy", address: proxy }];
        // Histograms of delays have values when changes have passed through both.
        eventually_slow("a change was programmed", || async {
            let text = targets[1].scrape().await?;
            ensure!(text.contains("kubeproxy_network_programming_duration_seconds_count{"), "not yet");
            Ok(())
        })
        .await?;
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
        self.world.node().nft(&["flush", "chain", "ip", "keelson", "services"]).map(drop)
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
