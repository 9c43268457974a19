//! Disabled features are off, and are reported as off; command line flags select the listeners.

use crate::common::{LONG, TestEnv, ensure_contains, interrupt, plain};
use crate::wire::{Connection, NEXT, WATCH, framed};
use anyhow::{Context as _, Result, ensure};
use keelson_cluster::endpoints::Followers;
use std::process::Stdio;
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::process::Command;
use tonic::Code;

#[tokio::test(flavor = "multi_thread")]
async fn without_endpoint_deltas_watch_is_unimplemented_and_clients_use_next() -> Result<()> {
    let mut env = TestEnv::new()?;
    env.manifests.put("web.json", &plain("web", "10.96.0.1", &["10.1.0.1"]))?;
    env.agent.set("feature_gates.EndpointDeltas", false)?;
    env.agent.start_live().await?;
    env.wait_for_rev(1).await?;

    let mut connection = Connection::open(&env.socket()).await?;
    let answer = connection.call(WATCH, framed(&[])).await?;
    ensure!(answer.code() == Some(Code::Unimplemented), "{answer:?}");
    let answer = connection.call(NEXT, framed(&[])).await?;
    ensure!(answer.code() == Some(Code::Ok), "{answer:?}");

    // A consumer of changes gets them, made from complete states.
    let followers = Followers::start(&env.target(), |_| Ok(()))?;
    for rev in 1..=3 {
        env.manifests.put("web.json", &plain("web", "10.96.0.1", &[&format!("10.1.0.{rev}")]))?;
        followers
            .until("the next state", |full_state| {
                ensure!(full_state.position.rev == rev, "{:?}", full_state.position);
                Ok(())
            })
            .await?;
    }
    followers.check_invariants()?;
    env.wait_for_watchers(2, 3).await?;
    let state = env.state().await?;
    let watchers = state["watchers"].as_array().context("no watchers")?;
    ensure!(watchers.iter().all(|watcher| watcher["api"] == "Next"), "{watchers:?}");
    let output = env.watch(&["--once"]).await?.success()?;
    ensure_contains(&output.out, &["ns/web"])?;
    Ok(())
}

/// Checks that an agent has endpoints disabled for this reason.
async fn off(mut env: TestEnv, reason: &str) -> Result<()> {
    env.agent.start_live().await?;
    ensure!(!env.socket().exists(), "there is a socket");
    ensure!(
        keelson_harness::util::http_get(&env.tcp.replace("tcp", "http")).await.is_err(),
        "a process listens"
    );
    let output = env.endpoints(&[]).await?;
    ensure_contains(&output.out, &["Service endpoints are disabled", reason])?;
    ensure!(output.code == Some(0), "{output:?}");
    ensure!(env.state().await?["state"] == "disabled" && env.state().await?["reason"] == reason);
    for args in [&["explain", "ns/web"][..], &["watchers"]] {
        let output = env.endpoints(args).await?;
        eprintln!("{args:?}: {output:?}");
        ensure_contains(&format!("{}{}", output.out, output.err), &[reason])?;
    }
    // A client is told that there is no such API, and keeps retrying.
    let mut child = Command::new(env.agent.program())
        .args(["watch", "--once", "--target", &env.target()])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .spawn()?;
    let mut lines = BufReader::new(child.stderr.take().context("it has one")?).lines();
    let line = tokio::time::timeout(LONG, lines.next_line()).await??.context("it prints nothing")?;
    ensure_contains(&line, &["the socket does not exist", "endpoints.listen"])?;
    ensure!(interrupt(child).await? == Some(1));
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn without_the_gate_there_is_no_socket_and_commands_explain_it() -> Result<()> {
    let mut env = TestEnv::new()?;
    env.agent.set("feature_gates.ServiceEndpoints", false)?;
    off(env, "feature gate ServiceEndpoints is disabled").await
}

#[tokio::test(flavor = "multi_thread")]
async fn with_the_source_off_there_is_no_socket_and_commands_explain_it() -> Result<()> {
    let mut env = TestEnv::new()?;
    env.agent.set("endpoints.source", "off")?;
    off(env, "endpoints.source is off").await
}

#[tokio::test(flavor = "multi_thread")]
async fn the_command_line_sets_several_listen_addresses() -> Result<()> {
    let mut env = TestEnv::new()?;
    env.manifests.put("web.json", &plain("web", "10.96.0.1", &["10.1.0.1"]))?;
    let sockets =
        ["one.sock", "two.sock"].map(|name| format!("unix://{}/{name}", env.scratch.path().display()));
    for address in [&sockets[0], &sockets[1], "tcp://127.0.0.1:0"] {
        env.agent.arg("--listen");
        env.agent.arg(address);
    }
    env.agent.start_live().await?;
    let instance_id = env.wait_for_rev(1).await?;
    let state = env.state().await?;
    let listen: Vec<_> =
        state["listen"].as_array().context("no list")?.iter().filter_map(|one| one.as_str()).collect();
    ensure!(listen.len() == 3 && listen[..2] == sockets, "{listen:?}");
    // The assigned port is reported.
    ensure!(listen[2].starts_with("tcp://127.0.0.1:") && !listen[2].ends_with(":0"), "{listen:?}");
    ensure!(!env.socket().exists(), "the socket of the settings file is served too");
    for target in listen {
        let output = env.keelson(&["watch", "--once", "--target", target]).await?.success()?;
        ensure_contains(&output.out, &["ns/web"])?;
        ensure_contains(&output.err, &[&format!("--instance-id {instance_id} --rev 1")])?;
    }
    ensure!(env.agent.terminate().await?.success());
    for socket in &sockets {
        let path = socket.trim_start_matches("unix://");
        ensure!(!std::path::Path::new(path).exists(), "{path} is left behind");
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reachable_address_is_refused_unless_it_is_allowed() -> Result<()> {
    let mut env = TestEnv::new()?;
    env.agent.set("endpoints.listen", vec!["tcp://0.0.0.0:1".to_owned()])?;
    let status = env.agent.start_refused().await?;
    ensure!(!status.success(), "it runs");
    ensure_contains(&env.agent.log()?, &["endpoints.allow_remote"])
}
