//! A proxy whose agent is missing, replaced, or no agent; and addresses on which it cannot listen.

use crate::common::{TestEnv, ensure_contains, eventually_slow, family_of};
use crate::kernel;
use crate::model::{Service, plain_and_affine};
use crate::traffic::Traffic;
use anyhow::{Context as _, Result, ensure};
use keelson_cluster::net::{Family, Outcome, Transport, http_get_from};
use keelson_harness::util::{PATIENCE, until};
use serde_json::Value;
use std::fs;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use tokio::io::AsyncWriteExt as _;
use tokio::net::UnixListener;
use tokio::task::JoinHandle;

fn services() -> Vec<Service> {
    plain_and_affine(5, 600, |plain| plain.transports.push(Transport::Udp))
}

/// Waits until the proxy reports this state, with any exit code.
async fn wait_for_state(
    env: &TestEnv,
    what: &str,
    check: impl Fn(&Value, Option<i32>) -> Result<()>,
) -> Result<Value> {
    eventually_slow(what, || async {
        let output = env.state_command().await?;
        let state: Value = serde_json::from_str(&output.out).with_context(|| format!("{output:?}"))?;
        check(&state, output.code).with_context(|| output.out)?;
        Ok(state)
    })
    .await
    .with_context(|| env.logs())
}

/// Checks that it cannot reach the agent, and reports that.
fn without_agent(state: &Value, code: Option<i32>) -> Result<()> {
    ensure!(state["link"] == "failing" && state["link_reason"] != "", "the link is {}", state["link"]);
    ensure!(code == Some(1), "exit code {code:?}");
    Ok(())
}

fn check_healthy(state: &Value, code: Option<i32>) -> Result<()> {
    ensure!(state["link"] == "following" && state["stale"] == false && code == Some(0), "exit code {code:?}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn without_an_agent_it_waits_and_existing_rules_stay() -> Result<()> {
    let mut services = services();
    let mut env = TestEnv::started(&services).await?;
    let world = env.world.clone();
    let traffic = Traffic::start(&world, &services)?;
    env.proxy.kill9()?;
    env.agent.kill9()?;
    let generation = kernel::generation(world.node())?;
    env.proxy.start_again(world.node()).await?;
    let state = wait_for_state(&env, "it has no agent", without_agent).await?;
    for family in Family::ALL {
        let family = family_of(&state, family)?;
        ensure!(family["state"] == "pending" && family["syncs"] == 0, "{family}");
    }
    ensure_contains(&env.events().await?.join("\n"), &["disconnected from the agent; rules stay unchanged"])?;
    traffic.wait_for_answers().await?;
    // For load balancers and probes the node stays healthy.
    let livez = http_get_from(world.node(), healthz(), "/livez").await?;
    ensure!(livez.status == 200, "{} {}", livez.status, livez.text());
    ensure!(kernel::generation(world.node())? == generation);

    // A TCP endpoint: connections to removed endpoints continue.
    services[1].endpoints.truncate(3);
    services[1].write(&env.manifests)?;
    env.agent.start_live().await?;
    env.wait_for_exact_services(&services).await?;
    wait_for_state(&env, "everything is healthy", check_healthy).await?;
    traffic.finish().await.map(drop)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restarted_agent_with_a_new_instance_changes_no_rule() -> Result<()> {
    let mut services = services();
    let mut env = TestEnv::started(&services).await?;
    let world = env.world.clone();
    let traffic = Traffic::start(&world, &services)?;
    let (generation, first) = (kernel::generation(world.node())?, env.synced().await?);
    env.agent.kill9()?;
    wait_for_state(&env, "the agent is gone", without_agent).await?;
    traffic.wait_for_answers().await?;

    // It lost its state on disk.
    fs::remove_dir_all(env.agent.state_dir())?;
    env.agent.start_live().await?;
    let state = wait_for_state(&env, "it follows another instance", |state, code| {
        ensure!(state["instance_id"] != first["instance_id"], "it is the same");
        check_healthy(state, code)
    })
    .await?;
    for family in Family::ALL {
        let (before, after) = (family_of(&first, family)?, family_of(&state, family)?);
        ensure!(
            after["failures"] == 0 && after["repaired"] == 0 && after["elements"] == before["elements"],
            "{after}"
        );
    }
    ensure!(kernel::generation(world.node())? == generation, "the same Services are no transaction");
    services[0].endpoints.truncate(3);
    services[0].write(&env.manifests)?;
    // Objects that were deleted meanwhile are removed with the next complete state too.
    env.agent.kill9()?;
    fs::remove_dir_all(env.agent.state_dir())?;
    let gone = services.remove(2);
    gone.delete(&env.manifests)?;
    env.agent.start_live().await?;
    env.wait_for_exact_services(&services).await?;
    wait_for_state(&env, "everything is healthy", check_healthy).await.map(drop)?;
    // Clients of the deleted Service get no response.
    drop(traffic);
    Traffic::start(&world, &services)?.finish().await.map(drop)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stale_state_is_reported_and_stays_in_effect() -> Result<()> {
    let services = services();
    let env = TestEnv::started(&services).await?;
    let traffic = Traffic::start(&env.world, &services)?;
    let generation = kernel::generation(env.node())?;
    let away = env.scratch.path().join("away");
    fs::rename(env.manifests.path(), &away)?;
    let state = wait_for_state(&env, "it is stale", |state, code| {
        ensure!(state["stale"] == true && code == Some(1), "exit code {code:?}");
        Ok(())
    })
    .await?;
    ensure_contains(
        state["stale_reason"].as_str().unwrap_or_default(),
        &[&env.manifests.path().display().to_string()],
    )?;
    traffic.wait_for_answers().await?;
    fs::rename(&away, env.manifests.path())?;
    wait_for_state(&env, "it is current", check_healthy).await?;
    ensure!(kernel::generation(env.node())? == generation);
    traffic.finish().await.map(drop)
}

/// Answers every connection with this text, and counts connections.
fn nonsense(socket: &Path, text: &'static [u8]) -> Result<(JoinHandle<()>, Arc<AtomicUsize>)> {
    let listener =
        UnixListener::bind(socket).with_context(|| format!("cannot listen at {}", socket.display()))?;
    let asked = Arc::<AtomicUsize>::default();
    let count = asked.clone();
    let server = tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            // A client may disconnect at any time.
            let _ = stream.write_all(text).await;
            count.fetch_add(1, Ordering::Relaxed);
        }
    });
    Ok((server, asked))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_is_no_agent_is_retried() -> Result<()> {
    let services = services();
    let mut env = TestEnv::started(&services).await?;
    let world = env.world.clone();
    let traffic = Traffic::start(&world, &services)?;
    let generation = kernel::generation(world.node())?;
    let socket = PathBuf::from(env.agent.endpoints_target().trim_start_matches("unix://"));
    env.agent.kill9()?;
    let settings_and_a_frame_too_long =
        b"\x00\x00\x00\x04\x00\x00\x00\x00\x00\xff\xff\xff\x00\x00\x00\x00\x00\x01";
    for text in [
        &b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nyes"[..],
        &[0xff; 4096],
        settings_and_a_frame_too_long,
        b"",
    ] {
        fs::remove_file(&socket)?;
        let (server, asked) = nonsense(&socket, text)?;
        until("the proxy got the answer and retries", || asked.load(Ordering::Relaxed) >= 2).await?;
        wait_for_state(&env, "it has no agent", without_agent).await?;
        traffic.wait_for_answers().await?;
        server.abort();
        // Nothing listens any more when it has ended.
        let _ = server.await;
    }
    ensure!(kernel::generation(world.node())? == generation);
    env.agent.start_live().await?;
    wait_for_state(&env, "it follows the agent", check_healthy).await?;
    let log = env.proxy.log()?;
    ensure!(!log.contains("panic"), "{log}");
    env.wait_for_exact_services(&services).await?;
    traffic.finish().await.map(drop)
}

fn healthz() -> SocketAddr {
    SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 10256)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_used_healthz_port_delays_nothing() -> Result<()> {
    let services = services();
    let mut env = TestEnv::new()?;
    let any = SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), healthz().port());
    let taken = env.node().tcp_listener(any)?;
    env.start(&services).await?;
    ensure_contains(&env.proxy.log()?, &["cannot listen; retrying, Services are not affected", "10256"])?;
    let traffic = Traffic::start(&env.world, &services)?;
    traffic.wait_for_answers().await?;
    drop(taken);
    eventually_slow("healthz is served", || async {
        http_get_from(env.node(), healthz(), "/healthz").await?.success()
    })
    .await?;
    traffic.finish().await.map(drop)
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unusable_debug_socket_is_reported_before_any_change() -> Result<()> {
    let services = services();
    let mut env = TestEnv::started(&services).await?;
    let world = env.world.clone();
    env.proxy.kill9()?;
    let generation = kernel::generation(world.node())?;
    let in_a_file = env.manifests.path().join("node.json").join("proxy.sock");
    env.proxy
        .configure(&env.options.clone().set("proxy.listen", format!("unix://{}", in_a_file.display())))?;
    let output = env.proxy_command(&["--backend", "nft"]).await?;
    ensure!(output.code == Some(1), "{output:?}");
    ensure_contains(&output.err, &[&in_a_file.display().to_string()])?;
    ensure!(kernel::generation(world.node())? == generation, "nothing is done");
    let answered = world.pod().ask(services[0].at(), Transport::Tcp, PATIENCE).await?;
    ensure!(matches!(answered, Outcome::Answered { .. }), "{answered:?}");
    env.proxy.configure(&env.options)?;
    env.proxy.start_again(world.node()).await?;
    env.wait_for_exact_services(&services).await
}
