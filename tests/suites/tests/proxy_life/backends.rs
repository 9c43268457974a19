//! From one backend to another, and two side by side: clients notice neither.

use crate::common::{TestEnv, ensure_contains, eventually_slow, run_inside};
use crate::model::{Service, pool};
use crate::traffic::Traffic;
use anyhow::{Context as _, Result, ensure};
use keelson_cluster::net::{Family, KeelsonProxy, KeelsonProxyOptions, Outcome, Transport};
use keelson_harness::peers;
use keelson_harness::util::PATIENCE;
use serde_json::json;

pub(crate) fn services() -> Vec<Service> {
    (0..)
        .zip(Family::ALL)
        .map(|(index, family)| {
            let mut service = Service::new(10 + index, family, &pool(family, 8080)[..3]);
            service.node_port = Some(31_000 + index);
            service
        })
        .collect()
}

/// Restarts the proxy with a backend, and waits until it has taken over from the former one.
pub(crate) async fn change_over(env: &mut TestEnv, backend: &str, former: &str) -> Result<()> {
    ensure!(env.proxy.terminate().await?.success());
    env.proxy.configure(&env.options.clone().set("proxy.backend", backend))?;
    env.proxy.start_again(env.world.node()).await?;
    takes_over(env, backend, former).await
}

/// Waits until the proxy, with this backend, has removed the rules of the former one.
pub(crate) async fn takes_over(env: &TestEnv, backend: &str, former: &str) -> Result<()> {
    let wanted = format!("{backend} took over from {former}: removed ");
    eventually_slow("the backend has taken over", || async {
        let state = env.state().await?;
        ensure!(state["take_overs"].to_string().contains(&wanted), "{state}");
        Ok(())
    })
    .await
    .with_context(|| env.logs())?;
    ensure_contains(&env.events().await?.join("\n"), &[&wanted])?;
    ensure_contains(&env.proxy.log()?, &["took over; rules of the former proxy removed"])
}

#[tokio::test(flavor = "multi_thread")]
async fn a_backend_takes_over_from_another_without_a_lost_connection() -> Result<()> {
    let services = services();
    let mut env = TestEnv::started(&services).await?;
    let traffic = Traffic::start(&env.world, &services)?;
    traffic.wait_for_answers().await?;

    change_over(&mut env, "iptables", "nft").await?;
    let tables = env.node().nft(&["list", "tables"])?;
    ensure!(!tables.lines().any(|table| table.ends_with(" keelson")), "{tables}");
    traffic.wait_for_answers().await?;

    change_over(&mut env, "nft", "iptables").await?;
    env.wait_for_services(&services).await?;
    let save = peers::system("iptables-save", "iptables")?;
    let saved = run_inside(env.node(), &save, &[]).await?.success()?.out;
    ensure!(!saved.contains("KEELSON-"), "{saved}");
    // Also what was opened before the first change.
    traffic.finish().await?;
    Ok(())
}

/// The backend in user space has no NAT chains, without which the kernel does not translate.
#[tokio::test(flavor = "multi_thread")]
async fn established_connections_outlive_the_change_to_user_space() -> Result<()> {
    let services = services();
    let env = TestEnv::started(&services).await?;
    connections_outlive_the_change_to_user_space(env, &services, "nft").await
}

pub(crate) async fn connections_outlive_the_change_to_user_space(
    mut env: TestEnv,
    services: &[Service],
    former: &str,
) -> Result<()> {
    let mut traffic = Traffic::none(&env.world)?;
    for service in services {
        let (client, valid) = (env.world.pod().clone(), service.endpoints.clone());
        traffic.open_flow(client, service.at(), Transport::Tcp, valid);
    }
    traffic.wait_for_answers().await?;
    change_over(&mut env, "userspace", former).await?;
    let tables = env.node().nft(&["list", "tables"])?;
    ensure_contains(&tables, &["table ip keelson-established", "table ip6 keelson-established"])?;
    traffic.wait_for_answers().await?;
    traffic.finish().await?;
    for service in services {
        let by = env.world.pod().ask(service.at(), Transport::Tcp, PATIENCE).await?;
        ensure!(matches!(by, Outcome::Answered { by, .. } if service.endpoints.contains(&by)), "{by:?}");
    }
    ensure!(env.proxy.terminate().await?.success());
    env.cleanup(&[]).await?;
    let tables = env.node().nft(&["list", "tables"])?;
    ensure!(!tables.contains("keelson"), "{tables}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn auto_says_what_it_chose() -> Result<()> {
    let services = services();
    let mut env =
        TestEnv::with(|options| options.set("proxy.sync_period", "1s").set("proxy.backend", "auto"))?;
    env.start(&services).await?;
    let state = env.synced().await?;
    ensure!(state["backend"] == "nft", "{state}");
    ensure_contains(&state["settings"].to_string(), &["backend: auto (nft)"])?;
    // `ip netns exec` mounts another /sys; what other tests have mounted elsewhere is of other sockets.
    let events = env.events().await?.join("\n");
    ensure_contains(&events, &["auto chose nft (ebpf: "])?;
    ensure!(
        ["no BPF file system is mounted", "is not the first network namespace"]
            .iter()
            .any(|text| events.contains(text)),
        "{events}"
    );
    Ok(())
}

/// Two proxies of one agent, each with the Services of its name.
#[tokio::test(flavor = "multi_thread")]
async fn two_proxies_serve_a_node_side_by_side() -> Result<()> {
    let mut env = TestEnv::new()?;
    env.name_a_proxy("edge")?;
    let usual = services();
    let edge = Service::new(20, Family::V4, &pool(Family::V4, 8081)[..2]);
    let [mut object, slice] = edge.objects();
    object["metadata"]["labels"] = json!({"service.kubernetes.io/service-proxy-name": "edge"});
    env.manifests.put("edge.json", &[object, slice])?;
    env.start(&usual).await?;
    let of_edge = KeelsonProxyOptions::new(&env.agent.endpoints_target())
        .set("proxy.backend", "userspace")
        .set("proxy.service_proxy_name", "edge")
        .set("proxy.healthz_bind_address", "127.0.0.1:10266")
        .set("proxy.metrics_bind_address", "127.0.0.1:10259");
    let mut second = KeelsonProxy::start(&env.scratch, env.world.node(), &of_edge).await?;
    serves_edge(&env, &edge).await.with_context(|| second.log().unwrap_or_default())?;
    let traffic = Traffic::start(&env.world, &usual)?;
    traffic.wait_for_answers().await?;
    // The usual one has its own Services only, and neither takes over from the other.
    env.wait_for_exact_services(&usual).await?;
    env.proxy.kill9()?;
    env.proxy.start_again(env.world.node()).await?;
    env.wait_for_exact_services(&usual).await?;
    let state = env.synced().await?;
    ensure!(state["take_overs"].as_array().is_none_or(Vec::is_empty), "{state}");
    traffic.finish().await?;

    // A third one with a backend, Services or an address of another is refused.
    let keelson = peers::keelson()?;
    let config = second.folder().join("keelson.toml").display().to_string();
    let listen = format!("proxy.listen=unix://{}", env.scratch.path().join("third.sock").display());
    for (set, words) in [
        ("proxy.backend=nft", "serves with the backend nft"),
        ("proxy.backend=iptables", "serves the Services with service-proxy-name edge"),
    ] {
        let args = ["proxy", "--config", &config, "--set", set, "--set", &listen];
        let output = run_inside(env.node(), &keelson, &args).await?;
        ensure_contains(&format!("{output:?}"), &["another keelson proxy", words])?;
    }
    // Two backends with the same chains.
    ensure!(second.terminate().await?.success());
    second.configure(&of_edge.set("proxy.backend", "iptables"))?;
    second.start_again(env.world.node()).await?;
    // It has made its claims before.
    serves_edge(&env, &edge).await.with_context(|| second.log().unwrap_or_default())?;
    let set = ["--set", "proxy.backend=ipvs", "--set", "proxy.service_proxy_name=other", "--set", &listen];
    let args = [&["proxy", "--config", &config][..], &set].concat();
    let output = run_inside(env.node(), &keelson, &args).await?;
    ensure_contains(&format!("{output:?}"), &["another keelson proxy", "serves with the chains KEELSON-*"])
}

/// Waits until the Service of the second proxy is served.
async fn serves_edge(env: &TestEnv, edge: &Service) -> Result<()> {
    eventually_slow("the second proxy serves its Service", || async {
        let by = env.world.pod().ask(edge.at(), Transport::Tcp, PATIENCE).await?;
        ensure!(matches!(by, Outcome::Answered { by, .. } if edge.endpoints.contains(&by)), "{by:?}");
        Ok(())
    })
    .await
}
