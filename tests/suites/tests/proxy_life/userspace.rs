//! The life of a proxy with the backend userspace. Its connections end with its process, so clients notice that one is killed,
//! and nothing else.

use crate::any_backend::{Action, Backend, changes, drift, started};
use crate::backends::{change_over, services};
use crate::churn::Author;
use crate::common::{TestEnv, ensure_contains, eventually_slow};
use crate::kills::staying;
use crate::model::{Service, pool};
use crate::traffic::Traffic;
use anyhow::{Context as _, Result, ensure};
use keelson_cluster::net::{Family, KeelsonProxy, KeelsonProxyOptions, Outcome, Transport};
use keelson_harness::peers;
use keelson_harness::util::{PATIENCE, Seeded, patience};
use rand::RngExt as _;
use serde_json::json;
use std::time::Duration;

const USERSPACE: Backend = &[("proxy.backend", "userspace")];
const KILLS: usize = 12;
/// Changes per second.
const RATE: u32 = 50;
/// Maximum time from the start of a proxy to its end, in milliseconds.
const LIFE: u64 = 900;

/// Asks again and again, without anything that stays open, until each client has been answered.
async fn is_served(env: &TestEnv, services: &[Service]) -> Result<()> {
    eventually_slow("each Service is served", || async {
        for service in services {
            let outcome = env.world.pod().ask(service.at(), Transport::Tcp, PATIENCE).await?;
            ensure!(
                matches!(outcome, Outcome::Answered { by, .. } if service.endpoints.contains(&by)),
                "{} of {}: {outcome:?}",
                service.at(),
                service.family.as_str()
            );
        }
        Ok(())
    })
    .await?;
    Traffic::connections(&env.world, services)?.finish().await.map(drop)
}

#[tokio::test(flavor = "multi_thread")]
async fn kills_with_user_space_leave_a_proxy_that_serves() -> Result<()> {
    let mut random = Seeded::new()?;
    let staying = staying();
    let mut env = started(USERSPACE, &staying).await?;
    let world = env.world.clone();
    let author = Author::start(&env.manifests, random.rng().random(), RATE, (|| Ok(()), usize::MAX));
    let mut agents = 0;
    for kill in 0..KILLS {
        let life = Duration::from_millis(random.rng().random_range(0..LIFE)) * patience();
        tokio::time::sleep(life).await;
        env.proxy.kill9()?;
        if random.rng().random_ratio(1, 3) {
            agents += 1;
            env.agent.kill9()?;
            env.agent.start_live().await?;
        }
        env.proxy.start_again(world.node()).await?;
        if kill % 4 == 3 {
            is_served(&env, &staying).await.with_context(|| format!("after kill {kill}; {}", env.logs()))?;
        }
    }
    let mut last = author.stop()?;
    last.extend(staying.iter().cloned());
    env.wait_for_services(&last).await?;
    is_served(&env, &staying).await.with_context(|| env.logs())?;
    eprintln!("{KILLS} kills of the proxy, {agents} of the agent");
    let log = env.proxy.log()?;
    ensure!(!log.contains("panic"), "{log}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn connections_continue_under_changes_with_user_space() -> Result<()> {
    changes(USERSPACE, RATE).await
}

#[tokio::test(flavor = "multi_thread")]
async fn routes_that_another_program_removes_come_back() -> Result<()> {
    const REMOVALS: [Action; 1] = [("ip", "iproute2", "route flush table local proto 107")];
    drift(USERSPACE, &REMOVALS).await
}

#[tokio::test(flavor = "multi_thread")]
async fn nft_takes_over_from_user_space() -> Result<()> {
    let services = services();
    let mut env = started(USERSPACE, &services).await?;
    is_served(&env, &services).await?;
    let routes = |env: &TestEnv| {
        let ip = peers::system("ip", "iproute2")?;
        env.node().command(&ip, &["route", "show", "table", "local", "proto", "107"])
    };
    ensure!(!routes(&env)?.is_empty(), "no address is routed");
    change_over(&mut env, "nft", "userspace").await?;
    ensure_contains(&env.events().await?.join("\n"), &["removed local route to "])?;
    let left = routes(&env)?;
    ensure!(left.is_empty(), "{left}");
    let traffic = Traffic::start(&env.world, &services)?;
    traffic.finish().await.map(drop)
}

/// Each restarts beside the other, and neither takes over.
#[tokio::test(flavor = "multi_thread")]
async fn iptables_and_user_space_restart_side_by_side() -> Result<()> {
    let mut env = TestEnv::other(|options| options.set("proxy.backend", "iptables"))?;
    env.name_a_proxy("edge")?;
    let usual = services();
    let edge = [Service::new(20, Family::V4, &pool(Family::V4, 8081)[..2])];
    let [mut object, slice] = edge[0].objects();
    object["metadata"]["labels"] = json!({"service.kubernetes.io/service-proxy-name": "edge"});
    env.manifests.put("edge.json", &[object, slice])?;
    env.start(&usual).await?;
    let of_edge = KeelsonProxyOptions::new(&env.agent.endpoints_target())
        .set("proxy.backend", "userspace")
        .set("proxy.service_proxy_name", "edge")
        .set("proxy.healthz_bind_address", "127.0.0.1:10266")
        .set("proxy.metrics_bind_address", "127.0.0.1:10259");
    let world = env.world.clone();
    let mut second = KeelsonProxy::start(&env.scratch, world.node(), &of_edge).await?;
    is_served(&env, &edge).await.with_context(|| second.log().unwrap_or_default())?;
    let traffic = Traffic::start(&env.world, &usual)?;
    traffic.wait_for_answers().await?;
    for _ in 0..2 {
        // While the one is away, the rules of the other stay, and the other serves.
        env.proxy.kill9()?;
        is_served(&env, &edge).await.with_context(|| second.log().unwrap_or_default())?;
        env.proxy.start_again(world.node()).await?;
        env.wait_for_exact_services(&usual).await?;
        second.kill9()?;
        traffic.wait_for_answers().await?;
        second.start_again(world.node()).await?;
        is_served(&env, &edge).await.with_context(|| second.log().unwrap_or_default())?;
    }
    traffic.finish().await.with_context(|| env.logs())?;
    let state = env.synced().await?;
    ensure!(state["take_overs"].as_array().is_none_or(Vec::is_empty), "{state}");
    Ok(())
}

/// A backend that another one replaced beside named proxies: its rules stay, and that is said.
#[tokio::test(flavor = "multi_thread")]
async fn rules_of_a_former_backend_are_reported_beside_named_proxies() -> Result<()> {
    let mut env = TestEnv::new()?;
    env.name_a_proxy("edge")?;
    let usual = services();
    env.start(&usual).await?;
    ensure!(env.proxy.terminate().await?.success());
    env.proxy.configure(&env.options.clone().set("proxy.backend", "iptables"))?;
    env.proxy.start_again(env.world.node()).await?;
    eventually_slow("the rules are reported", || async {
        let events = env.events().await?.join("\n");
        ensure_contains(
            &events,
            &[
                "no process serves with the backend nft, and its rules stay",
                "table ip keelson, table ip6 keelson",
                "keelson proxy cleanup --backend nft",
            ],
        )
    })
    .await
    .with_context(|| env.logs())?;
    let tables = env.node().nft(&["list", "tables"])?;
    ensure_contains(&tables, &["table ip keelson", "table ip6 keelson"])
}

/// The first one ends while the second one waits for its socket.
#[tokio::test(flavor = "multi_thread")]
async fn a_second_proxy_waits_for_the_end_of_the_first() -> Result<()> {
    let services = services();
    let mut env = TestEnv::started(&services).await?;
    let mut second = KeelsonProxy::new(&env.scratch, env.world.node(), &env.options)?;
    let listen = format!("unix://{}", env.proxy.socket().display());
    second.configure(&env.options.clone().set("proxy.listen", listen))?;
    let world = env.world.clone();
    let start = second.start_again(world.node());
    let end = async {
        tokio::time::sleep(Duration::from_secs(2)).await;
        env.proxy.kill9()
    };
    let (started, ended) = tokio::join!(start, end);
    ended?;
    started.with_context(|| second.log().unwrap_or_default())?;
    ensure_contains(&second.log()?, &["waiting for another process to stop listening", "proxy started"])
}
