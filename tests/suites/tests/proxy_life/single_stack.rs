//! P10: a node with IPv6 disabled.

use crate::common::{TestEnv, ensure_contains, eventually_slow, family_of};
use crate::kernel;
use crate::model::{Service, meaning, pool};
use crate::traffic::Traffic;
use anyhow::{Context as _, Result, ensure};
use keelson_cluster::net::{Family, Transport, http_get_from};
use serde_json::Value;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};

#[tokio::test(flavor = "multi_thread")]
async fn p10_a_node_with_ipv6_disabled_serves_ipv4_and_is_healthy() -> Result<()> {
    let mut services: Vec<Service> = (10..)
        .zip(Family::ALL)
        .map(|(number, family)| Service::new(number, family, &pool(family, 8080)[..4]))
        .collect();
    services[0].transports.push(Transport::Udp);
    let mut env = TestEnv::new()?;
    env.node().sysctl(&[("ipv6/conf/all/disable_ipv6", "1")])?;
    for service in &services {
        service.write(&env.manifests)?;
    }
    env.agent.start_live().await?;
    env.proxy.start_again(env.world.node()).await?;
    let of_v4 = meaning(&services, Family::V4);
    eventually_slow("the kernel has the rules of IPv4", || async {
        kernel::is(env.node(), Family::V4, &of_v4)
    })
    .await
    .with_context(|| env.logs())?;
    let output = eventually_slow("the proxy is healthy", || async {
        let output = env.state_command().await?;
        ensure!(output.code == Some(0), "{output:?}");
        Ok(output)
    })
    .await?;
    let state: Value = serde_json::from_str(&output.out)?;
    ensure!(family_of(&state, Family::V4)?["state"] == "synced", "{state}");
    let v6 = family_of(&state, Family::V6)?;
    ensure!(v6["state"] == "disabled" && v6["failures"] == 0, "{v6}");
    ensure_contains(v6["reason"].as_str().unwrap_or_default(), &["disable_ipv6"])?;
    ensure_contains(&env.proxy.log()?, &["IP family not supported by this node", "disable_ipv6"])?;
    ensure!(env.node().nft(&["list", "tables"])? == "table ip keelson\n");

    let at = |port| SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), port);
    let livez = http_get_from(env.node(), at(10256), "/livez").await?;
    let report: Value = serde_json::from_str(&livez.text())?;
    ensure!(livez.status == 200 && report["status"]["IPv4"]["healthy"] == true, "{report}");
    ensure!(report["status"].get("IPv6").is_none(), "{report}");
    let metrics = http_get_from(env.node(), at(10249), "/metrics").await?.text();
    ensure_contains(
        &metrics,
        &[
            "keelson_proxy_family_enabled{ip_family=\"IPv4\"} 1",
            "keelson_proxy_family_enabled{ip_family=\"IPv6\"} 0",
        ],
    )?;
    Traffic::start(&env.world, &services[..1])?.finish().await.map(drop)
}
