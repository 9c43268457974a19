//! A proxy whose agent is missing, replaced, or no agent; and addresses on which it cannot listen.

use crate::kernel;
use crate::model::{Service, pool};
use crate::rig::{Stage, ensure_contains, eventually_slow, family_of};
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
    let mut all = Vec::new();
    for (index, family) in (0..).zip(Family::ALL) {
        let mut plain = Service::new(10 + index, family, &pool(family, 8080)[..5]);
        plain.transports.push(Transport::Udp);
        let mut affine = Service::new(12 + index, family, &pool(family, 8081));
        affine.affinity = Some(600);
        all.extend([plain, affine]);
    }
    all
}

/// Waits until the proxy reports this state, with any exit code.
async fn wait_for_state(
    stage: &Stage,
    what: &str,
    check: impl Fn(&Value, Option<i32>) -> Result<()>,
) -> Result<Value> {
    eventually_slow(what, || async {
        let output = stage.state_command().await?;
        let state: Value = serde_json::from_str(&output.out).with_context(|| format!("{output:?}"))?;
        check(&state, output.code).with_context(|| output.out)?;
        Ok(state)
    })
    .await
    .with_context(|| stage.logs())
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
    let mut stage = Stage::started(&services).await?;
    let world = stage.world.clone();
    let traffic = Traffic::start(&world, &services)?;
    stage.proxy.kill9()?;
    stage.agent.kill9()?;
    let generation = kernel::generation(world.node())?;
    stage.proxy.start_again(world.node()).await?;
    let state = wait_for_state(&stage, "it has no agent", without_agent).await?;
    for family in Family::ALL {
        let family = family_of(&state, family)?;
        ensure!(family["state"] == "pending" && family["syncs"] == 0, "{family}");
    }
    ensure_contains(
        &stage.events().await?.join("\n"),
        &["disconnected from the agent; rules stay unchanged"],
    )?;
    traffic.wait_for_answers().await?;
    // For load balancers and probes the node stays healthy.
    let livez = http_get_from(world.node(), healthz(), "/livez").await?;
    ensure!(livez.status == 200, "{} {}", livez.status, livez.text());
    ensure!(kernel::generation(world.node())? == generation);

    // A TCP endpoint: connections to removed endpoints continue.
    services[1].endpoints.truncate(3);
    services[1].write(&stage.manifests)?;
    stage.agent.start_live().await?;
    stage.wait_for_exact_services(&services).await?;
    wait_for_state(&stage, "everything is healthy", check_healthy).await?;
    traffic.finish().await.map(drop)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restarted_agent_with_a_new_instance_changes_no_rule() -> Result<()> {
    let mut services = services();
    let mut stage = Stage::started(&services).await?;
    let world = stage.world.clone();
    let traffic = Traffic::start(&world, &services)?;
    let (generation, first) = (kernel::generation(world.node())?, stage.synced().await?);
    stage.agent.kill9()?;
    wait_for_state(&stage, "the agent is gone", without_agent).await?;
    traffic.wait_for_answers().await?;

    // It lost its state on disk.
    fs::remove_dir_all(stage.agent.state_dir())?;
    stage.agent.start_live().await?;
    let state = wait_for_state(&stage, "it follows another instance", |state, code| {
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
    services[0].write(&stage.manifests)?;
    // Objects that were deleted meanwhile are removed with the next complete state too.
    stage.agent.kill9()?;
    fs::remove_dir_all(stage.agent.state_dir())?;
    let gone = services.remove(2);
    gone.delete(&stage.manifests)?;
    stage.agent.start_live().await?;
    stage.wait_for_exact_services(&services).await?;
    wait_for_state(&stage, "everything is healthy", check_healthy).await.map(drop)?;
    // Clients of the deleted Service get no response.
    drop(traffic);
    Traffic::start(&world, &services)?.finish().await.map(drop)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stale_state_is_reported_and_stays_in_effect() -> Result<()> {
    let services = services();
    let stage = Stage::started(&services).await?;
    let traffic = Traffic::start(&stage.world, &services)?;
    let generation = kernel::generation(stage.node())?;
    let away = stage.scratch.path().join("away");
    fs::rename(stage.manifests.path(), &away)?;
    let state = wait_for_state(&stage, "it is stale", |state, code| {
        ensure!(state["stale"] == true && code == Some(1), "exit code {code:?}");
        Ok(())
    })
    .await?;
    ensure_contains(
        state["stale_reason"].as_str().unwrap_or_default(),
        &[&stage.manifests.path().display().to_string()],
    )?;
    traffic.wait_for_answers().await?;
    fs::rename(&away, stage.manifests.path())?;
    wait_for_state(&stage, "it is current", check_healthy).await?;
    ensure!(kernel::generation(stage.node())? == generation);
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
    let mut stage = Stage::started(&services).await?;
    let world = stage.world.clone();
    let traffic = Traffic::start(&world, &services)?;
    let generation = kernel::generation(world.node())?;
    let socket = PathBuf::from(stage.agent.endpoints_target().trim_start_matches("unix://"));
    stage.agent.kill9()?;
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
        wait_for_state(&stage, "it has no agent", without_agent).await?;
        traffic.wait_for_answers().await?;
        server.abort();
        // Nothing listens any more when it has ended.
        let _ = server.await;
    }
    ensure!(kernel::generation(world.node())? == generation);
    stage.agent.start_live().await?;
    wait_for_state(&stage, "it follows the agent", check_healthy).await?;
    let log = stage.proxy.log()?;
    ensure!(!log.contains("panic"), "{log}");
    stage.wait_for_exact_services(&services).await?;
    traffic.finish().await.map(drop)
}

fn healthz() -> SocketAddr {
    SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 10256)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_used_healthz_port_delays_nothing() -> Result<()> {
    let services = services();
    let mut stage = Stage::new()?;
    let any = SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), healthz().port());
    let taken = stage.node().tcp_listener(any)?;
    stage.start(&services).await?;
    ensure_contains(&stage.proxy.log()?, &["cannot listen; retrying, Services are not affected", "10256"])?;
    let traffic = Traffic::start(&stage.world, &services)?;
    traffic.wait_for_answers().await?;
    drop(taken);
    eventually_slow("healthz is served", || async {
        http_get_from(stage.node(), healthz(), "/healthz").await?.success()
    })
    .await?;
    traffic.finish().await.map(drop)
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unusable_debug_socket_is_reported_before_any_change() -> Result<()> {
    let services = services();
    let mut stage = Stage::started(&services).await?;
    let world = stage.world.clone();
    stage.proxy.kill9()?;
    let generation = kernel::generation(world.node())?;
    let in_a_file = stage.manifests.path().join("node.json").join("proxy.sock");
    stage
        .proxy
        .configure(&stage.options.clone().set("proxy.listen", format!("unix://{}", in_a_file.display())))?;
    let output = stage.proxy_command(&["--backend", "nft"]).await?;
    ensure!(output.code == Some(1), "{output:?}");
    ensure_contains(&output.err, &[&in_a_file.display().to_string()])?;
    ensure!(kernel::generation(world.node())? == generation, "nothing is done");
    let answered = world.pod().ask(services[0].at(), Transport::Tcp, PATIENCE).await?;
    ensure!(matches!(answered, Outcome::Answered { .. }), "{answered:?}");
    stage.proxy.configure(&stage.options)?;
    stage.proxy.start_again(world.node()).await?;
    stage.wait_for_exact_services(&services).await
}
