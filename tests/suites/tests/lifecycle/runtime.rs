//! A container runtime that dies and comes back, as seen in the node's condition Ready.

use crate::common::{node_settings, run, shared, wait_until_healthy};
use anyhow::{Context as _, Result, ensure};
use keelson_harness::agent::Agent;
use keelson_harness::containerd::{Containerd, Kind, Options};
use keelson_harness::scratch::Scratch;
use std::time::Instant;

async fn a_dead_runtime(kind: Kind, name: &str) -> Result<()> {
    let shared = shared().await?;
    let cluster = &shared.cluster;
    let scratch = Scratch::new()?;
    let options = Options { network: true, ..Options::default() };
    let mut containerd = Containerd::start(&scratch, kind, &options).await?;
    let identity = cluster.node(&scratch, name).await?;
    let settings = node_settings(name, &identity.kubeconfig(), scratch.path());
    let agent = Agent::start(&scratch, &containerd.endpoint(), &settings).await?;
    let ready = cluster.admin.await_condition(name, "Ready", "True").await?;
    wait_until_healthy(&agent).await?;

    containerd.kill9()?;
    let dead = Instant::now();
    let unready = cluster.admin.await_condition(name, "Ready", "False").await?;
    eprintln!("{kind:?}: not ready {:.2} s after the death of the runtime", dead.elapsed().as_secs_f64());
    ensure!(unready.reason.as_deref() == Some("KubeletNotReady"), "{unready:?}");
    let message = unready.message.clone().context("a condition has the reason")?;
    ensure!(message.contains("container runtime"), "{message}");
    ensure!(unready.last_transition_time >= ready.last_transition_time, "{ready:?}, then {unready:?}");
    eprintln!("{kind:?}: its message is {message:?}");
    // A node with a dead runtime is still alive: its Lease is renewed, and the agent's reports arrive.
    wait_until_healthy(&agent).await?;

    containerd.start_again().await?;
    let back = Instant::now();
    let again = cluster.admin.await_condition(name, "Ready", "True").await?;
    eprintln!("{kind:?}: ready {:.2} s after the runtime serves again", back.elapsed().as_secs_f64());
    ensure!(again.reason.as_deref() == Some("KubeletReady"), "{again:?}");
    Ok(())
}

#[test]
fn a_dead_runtime_makes_the_node_unready_until_it_restarts() -> Result<()> {
    run(async {
        tokio::try_join!(a_dead_runtime(Kind::Debian16, "dead-16"), a_dead_runtime(Kind::V2, "dead-v2"))?;
        Ok(())
    })
}
