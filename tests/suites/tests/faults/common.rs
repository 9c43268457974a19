//! Owns: what several of the fault tests need. In: a node, an agent. Out: leases, ingests, metrics, callers that retry
//! like a kubelet.

use anyhow::{Context as _, Result, ensure};
use keelson_harness::agent::Agent;
use keelson_harness::containerd::Containerd;
use keelson_harness::cri::{Cri, Pull};
use keelson_harness::leases::{create_lease, leases};
use keelson_harness::util::{PATIENCE, eventually};
use std::path::Path;
use std::time::{Duration, Instant};
use tokio::task::JoinHandle;
use tonic::Status;

/// The step in which containerd writes fetched bytes.
pub(crate) const MIB: u64 = 1 << 20;

/// The label that identifies the agent's leases.
const OWNER_LABEL: &str = "keelson.dev/owner";

pub(crate) type Call<T> = JoinHandle<Result<T, Status>>;

pub(crate) fn start_pull(cri: &Cri, pull: Pull) -> Call<String> {
    let cri = cri.clone();
    tokio::spawn(async move { cri.pull(&pull).await })
}

/// Pulls an image like a kubelet whose agent restarts: retries after every failure, until the image is there. Returns
/// the number of failures.
pub(crate) async fn pull_like_kubelet(cri: &Cri, pull: &Pull, patience: Duration) -> Result<usize> {
    let started = Instant::now();
    let mut failures = 0;
    loop {
        match cri.pull(pull).await {
            Ok(_) => return Ok(failures),
            Err(status) => {
                failures += 1;
                ensure!(
                    started.elapsed() < patience,
                    "{pull:?} failed {failures} times, at last with {status}"
                );
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

pub(crate) async fn agent_leases(containerd: &Containerd) -> Result<Vec<String>> {
    let all = leases(containerd).await?;
    Ok(all.into_iter().filter(|lease| lease.labels.contains_key(OWNER_LABEL)).map(|lease| lease.id).collect())
}

/// Creates a lease like one of the agent with this ID.
pub(crate) async fn create_agent_lease(containerd: &Containerd, id: &str, owner: &str) -> Result<()> {
    create_lease(containerd, id, Some((OWNER_LABEL, owner))).await
}

pub(crate) async fn no_lease_left(containerd: &Containerd) -> Result<()> {
    eventually(PATIENCE, "the agent's leases are gone", || async {
        let left = agent_leases(containerd).await?;
        ensure!(left.is_empty(), "these are left: {left:?}");
        Ok(())
    })
    .await
}

pub(crate) async fn pid_behind(socket: &Path) -> Result<i32> {
    let stream = tokio::net::UnixStream::connect(socket).await?;
    stream.peer_cred()?.pid().context("the kernel returns no pid of the peer")
}

/// A value of `/metrics`; `name` includes all labels.
pub(crate) async fn metric(agent: &Agent, name: &str) -> Result<f64> {
    agent.metric(name).await?.with_context(|| format!("no {name}"))
}

pub(crate) async fn metric_is(agent: &Agent, name: &str, expected: f64) -> Result<()> {
    eventually(PATIENCE, &format!("{name} is {expected}"), || async {
        let value = metric(agent, name).await?;
        ensure!(value == expected, "{name} is {value}");
        Ok(())
    })
    .await
}

/// Waits until the agent has no pulls and no slot is taken.
pub(crate) async fn idle(agent: &Agent) -> Result<()> {
    for name in
        ["keelson_image_pulls_in_flight", "keelson_image_pull_queue_depth", "keelson_image_pull_callers"]
    {
        metric_is(agent, name, 0.0).await?;
    }
    Ok(())
}

/// Waits until the log contains this text after the first `from` bytes.
pub(crate) async fn logged(agent: &Agent, from: usize, text: &str) -> Result<()> {
    eventually(PATIENCE, &format!("the log contains {text:?}"), || async {
        let log = agent.log()?;
        ensure!(log.get(from..).unwrap_or_default().contains(text), "the log is:\n{log}");
        Ok(())
    })
    .await
}
