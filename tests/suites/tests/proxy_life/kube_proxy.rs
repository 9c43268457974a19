//! From kube-proxy to Keelson and back, with a real API server: leftovers of a kube-proxy (mode nftables) are harmless,
//! and are reported.

use crate::common::{TestEnv, ensure_contains, eventually_slow};
use crate::model::{NODE_NAME, Service, pool};
use crate::traffic::Traffic;
use anyhow::{Context as _, Result, ensure};
use keelson_cluster::endpoints::{Kind, Writer};
use keelson_cluster::kube::{ApiOptions, Cluster, KubeProxy, KubeProxyOptions, OUTSIDE};
use keelson_cluster::manifests::COMPANION as MANIFEST;
use keelson_cluster::net::plan::SERVICE_CIDRS;
use keelson_cluster::net::{Family, Forward, Outcome, Transport, create_node};
use keelson_harness::agent::Settings;
use keelson_harness::scratch::Scratch;
use keelson_harness::util::PATIENCE;
use serde_json::json;
use std::net::SocketAddr;
use std::time::Duration;

const ACCOUNT: &str = "keelson-agent";

/// Time without a response after which a request counts as dropped.
const SILENCE: Duration = Duration::from_millis(700);

/// With the ranges of Services of the network.
pub(crate) async fn start_cluster(scratch: &Scratch) -> Result<Cluster> {
    let args = vec![format!("--service-cluster-ip-range={}", SERVICE_CIDRS.join(","))];
    let options = ApiOptions { args, ..ApiOptions::default() };
    Cluster::start_with(scratch, &options).await
}

/// A control plane with the node, reached from the node.
pub(crate) struct ControlPlane {
    pub(crate) cluster: Cluster,
    pub(crate) writer: Writer,
    _api: Forward,
}

impl ControlPlane {
    pub(crate) async fn start(env: &TestEnv) -> Result<Self> {
        let cluster = match std::env::var(OUTSIDE) {
            Ok(description) => Cluster::outside(&env.scratch, &description).await?,
            Err(_) => start_cluster(&env.scratch).await?,
        };
        cluster.admin.apply(MANIFEST).await?;
        create_node(&cluster.admin, NODE_NAME, &json!({})).await?;
        let writer = Writer::new(&cluster.admin, "ns").await?;
        let address = cluster.api.address();
        let api = Forward::start(env.node(), address.parse()?, address)?;
        Ok(Self { cluster, writer, _api: api })
    }

    /// Starts the agent, which follows the API server instead of manifests.
    pub(crate) async fn start_agent(&self, env: &mut TestEnv) -> Result<()> {
        let identity = self.cluster.companion(&env.scratch, ACCOUNT, NODE_NAME).await?;
        env.agent.configure(
            &Settings::new()
                .set("agent.node_name", NODE_NAME)
                .set("kube.kubeconfig", identity.kubeconfig().display().to_string()),
        )?;
        env.agent.start_live().await
    }
}

pub(crate) async fn make(writer: &Writer, services: &[Service]) -> Result<()> {
    for service in services {
        let [service, slice] = service.objects();
        writer.create(Kind::Service, &service).await?;
        writer.create(Kind::Slice, &slice).await?;
    }
    Ok(())
}

async fn change(
    writer: &Writer,
    services: &mut [Service],
    endpoints: impl Fn(Family) -> Vec<SocketAddr>,
) -> Result<()> {
    for service in services {
        service.endpoints = endpoints(service.family);
        let [_, slice] = service.objects();
        writer.replace(Kind::Slice, &slice).await?;
    }
    Ok(())
}

/// Waits until the present endpoints of these Services answer all new connections, from all clients.
pub(crate) async fn answered(env: &TestEnv, services: &[Service]) -> Result<()> {
    for service in services {
        eventually_slow("its endpoints answer", || async {
            let tally = env.world.client().ask_times(service.at(), Transport::Tcp, 10, PATIENCE).await?;
            let by = tally.by_endpoint();
            ensure!(
                by.values().sum::<usize>() == 10 && by.keys().all(|by| service.endpoints.contains(by)),
                "{tally}"
            );
            Ok(())
        })
        .await?;
    }
    Traffic::start(&env.world, services)?.finish().await.map(drop)
}

async fn kube_proxy_has(env: &TestEnv, text: &str) -> Result<()> {
    eventually_slow("kube-proxy has programmed it", || async {
        let listed = env.node().nft(&["list", "table", "ip", "kube-proxy"])?;
        ensure!(listed.contains(text), "{text} is not in its table");
        Ok(())
    })
    .await
}

fn tables(env: &TestEnv) -> Result<Vec<String>> {
    Ok(env.node().nft(&["list", "tables"])?.lines().map(str::to_owned).collect())
}

#[tokio::test(flavor = "multi_thread")]
async fn leftovers_of_kube_proxy_are_overridden_reported_and_removed() -> Result<()> {
    // So that leftovers are reported only.
    let mut env =
        TestEnv::with(|options| options.set("proxy.sync_period", "1s").set("proxy.take_over", false))?;
    let plane = ControlPlane::start(&env).await?;
    let ControlPlane { cluster, writer, .. } = &plane;
    env.node().nft(&["add", "table", "ip", "mine"])?;

    // Services of a kube-proxy: with endpoints, without any, and one that is deleted later.
    let [first, second, third] =
        [0..2, 3..5, 5..8].map(|range| move |family| pool(family, 8080)[range.clone()].to_vec());
    let mut services: Vec<Service> = (0..)
        .zip(Family::ALL)
        .map(|(index, family)| Service::new(10 + index, family, &first(family)))
        .collect();
    let mut empty: Vec<Service> =
        (0..).zip(Family::ALL).map(|(index, family)| Service::new(20 + index, family, &[])).collect();
    let deleted = Service::new(30, Family::V4, &pool(Family::V4, 8081)[..2]);
    make(writer, &services).await?;
    make(writer, &empty).await?;
    make(writer, std::slice::from_ref(&deleted)).await?;
    let options = KubeProxyOptions::new(NODE_NAME);
    let mut kube_proxy = KubeProxy::start(&env.scratch, cluster, env.node(), &options).await?;
    answered(&env, &services).await.context("by kube-proxy")?;
    answered(&env, std::slice::from_ref(&deleted)).await?;
    kube_proxy.kill9()?;

    change(writer, &mut services, &second).await?;
    change(writer, &mut empty, &second).await?;
    writer.delete(Kind::Service, &deleted.name).await?;
    let old = env.world.pod().ask(services[0].at(), Transport::Tcp, PATIENCE).await?;
    ensure!(matches!(old, Outcome::Answered { by, .. } if first(Family::V4).contains(&by)), "{old:?}");

    plane.start_agent(&mut env).await?;
    env.proxy.start_again(env.world.node()).await?;
    env.synced().await?;
    answered(&env, &services).await.context("by our rules")?;
    answered(&env, &empty).await.context("by our rules, where kube-proxy would refuse")?;
    reports_leftovers(&env).await?;
    // Services unknown to Keelson are left to kube-proxy's rules while those exist.
    let left = env.world.pod().ask(deleted.at(), Transport::Tcp, PATIENCE).await?;
    ensure!(matches!(left, Outcome::Answered { by, .. } if deleted.endpoints.contains(&by)), "{left:?}");

    env.cleanup(&["--kube-proxy"]).await?;
    ensure!(!tables(&env)?.iter().any(|table| table.contains("kube-proxy")), "{:?}", tables(&env)?);
    answered(&env, &services).await.context("without a kube-proxy's tables")?;
    // The addresses are in the cluster's ranges, and belong to no Service.
    let gone = env.world.pod().ask(deleted.at(), Transport::Tcp, SILENCE).await?;
    ensure!(gone == Outcome::Dropped, "{gone:?}");
    return_to_kube_proxy(&mut env, writer, &mut kube_proxy, &mut services, &third).await
}

/// Checks that leftovers are reported in log, state and events.
async fn reports_leftovers(env: &TestEnv) -> Result<()> {
    for family in Family::ALL {
        let leftovers = env.family(family).await?["other_proxies"].clone();
        ensure_contains(&leftovers.to_string(), &["kube-proxy", "nftables"])?;
    }
    ensure_contains(
        &env.events().await?.join("\n"),
        &["of a kube-proxy (mode nftables)", "the rules of keelson take precedence"],
    )?;
    ensure_contains(
        &env.proxy.log()?,
        &["table kube-proxy of a kube-proxy (mode nftables)", "keelson proxy cleanup --kube-proxy"],
    )
}

/// Our rules come before kube-proxy's and win while they exist, even if they are old; without them kube-proxy works as
/// if Keelson had never run.
async fn return_to_kube_proxy(
    env: &mut TestEnv,
    writer: &Writer,
    kube_proxy: &mut KubeProxy,
    services: &mut [Service],
    third: &impl Fn(Family) -> Vec<SocketAddr>,
) -> Result<()> {
    ensure!(env.proxy.terminate().await?.success());
    let former = services.to_vec();
    change(writer, services, third).await?;
    kube_proxy.start_again(env.world.node()).await?;
    kube_proxy_has(env, &format!("{} . {}", services[0].endpoints[0].ip(), services[0].endpoints[0].port()))
        .await?;
    let by = env.world.pod().ask(former[0].at(), Transport::Tcp, PATIENCE).await?;
    ensure!(matches!(by, Outcome::Answered { by, .. } if former[0].endpoints.contains(&by)), "{by:?}");
    let mut removed = env.cleanup(&[]).await?;
    removed.sort();
    ensure!(removed == ["removed table ip keelson", "removed table ip6 keelson"], "{removed:?}");
    answered(env, services).await.context("by kube-proxy, after cleanup")?;
    kube_proxy.kill9()?;
    let mut left = tables(env)?;
    left.retain(|table| !table.contains("kube-proxy"));
    ensure!(left == ["table ip mine"], "{left:?}");
    Ok(())
}
