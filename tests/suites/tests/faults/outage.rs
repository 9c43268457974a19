//! Cases 14 and 15, and a runtime that hangs: calls are held for a fixed time, then fail with a message, and the agent
//! keeps running.

use crate::common::{idle, metric_is, pid_behind, start_pull};
use anyhow::{Context as _, Result, ensure};
use keelson_harness::agent::{Agent, Settings};
use keelson_harness::containerd::{Containerd, Kind, Options};
use keelson_harness::cri::{Pull, failed};
use keelson_harness::driver::Driver;
use keelson_harness::images::{LARGE, TINY};
use keelson_harness::node::Node;
use keelson_harness::on_both_runtimes;
use keelson_harness::process::pause;
use keelson_harness::registry_proxy::{Fault, Match};
use keelson_harness::scratch::Scratch;
use keelson_harness::util::{PATIENCE, eventually, until};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::time::Duration;
use tonic::Code;

on_both_runtimes!(
    case_14_a_runtime_that_is_missing_at_start_is_waited_for,
    case_15_a_lasting_runtime_outage_is_reported_and_the_queue_kept,
);

async fn case_14_a_runtime_that_is_missing_at_start_is_waited_for(kind: Kind) -> Result<()> {
    let scratch = Scratch::new()?;
    let folder = scratch.dir("later")?;
    let endpoint = format!("unix://{}/containerd.sock", folder.display());
    let mut agent = Agent::new(&scratch, &endpoint, &Settings::new())?;
    agent.start_live().await?;

    // A kubelet exits if its first calls fail.
    let cri = agent.cri().await?;
    let first = tokio::spawn({
        let cri = cri.clone();
        async move { cri.version().await }
    });
    let second = tokio::spawn(async move { cri.fs_info().await });
    let driver = Driver::new(&agent.endpoint())?;
    let third = tokio::spawn({
        let driver = driver.clone();
        async move { driver.run(&["--timeout", "110s", "version"]).await }
    });
    let fourth = tokio::spawn(async move { driver.run(&["--timeout", "110s", "fsinfo"]).await });
    let ready = agent.http_get("/readyz").await?;
    ensure!(!ready.status.is_success() && ready.text().contains("containerd.sock"), "{}", ready.text());
    agent.http_get("/livez").await?.success()?;
    tokio::time::sleep(Duration::from_millis(500)).await;
    ensure!(!first.is_finished() && !second.is_finished(), "the calls are held");
    ensure!(!third.is_finished() && !fourth.is_finished(), "the calls of the Go client are held");

    let _containerd = Containerd::start_in(&folder, kind, &Options::default()).await?;
    ensure!(first.await??.runtime_name == "containerd");
    ensure!(!second.await??.image_filesystems.is_empty());
    third.await??.success()?;
    fourth.await??.success()?;
    agent.ready().await
}

async fn case_15_a_lasting_runtime_outage_is_reported_and_the_queue_kept(kind: Kind) -> Result<()> {
    let mut node = Node::start(kind).await?;
    let images = node.push_many("apps", 3, TINY).await?;
    let large = node.push_many("large", 1, LARGE).await?;
    let names: Vec<_> = images.iter().map(|image| node.name(image)).collect();
    let hold = node.proxy.rule(Match::layers(), Fault::StallAfter(TINY));
    let agent = node.agent(&Settings::limit(1).set("cri.hold_timeout", "2s")).await?;
    let cri = agent.cri().await?;
    let running = start_pull(&cri, Pull::new(&node.name(&large[0])));
    until("a pull runs", || !node.proxy.records().active_repos().is_empty()).await?;
    let queued = start_pull(&cri, Pull::new(&names[0]));
    metric_is(&agent, "keelson_image_pull_queue_depth", 1.0).await?;

    let socket = node.runtime.socket().display().to_string();
    node.runtime.kill9()?;
    let status = failed(cri.version().await, "the runtime is away")?;
    ensure!(status.code() == Code::Unavailable && status.message().contains(&socket), "{status}");
    let status = failed(running.await?, "the runtime is away for longer than calls are held")?;
    ensure!(status.code() == Code::Unavailable && status.message().contains(&socket), "{status}");
    metric_is(&agent, "keelson_runtime_up", 0.0).await?;
    let status = failed(cri.pull_image(&names[1]).await, "the runtime is away")?;
    ensure!(status.code() == Code::Unavailable && status.message().contains(&socket), "{status}");
    let ready = agent.http_get("/readyz").await?;
    ensure!(!ready.status.is_success() && ready.text().contains(&socket), "{}", ready.text());
    agent.http_get("/livez").await?.success()?;
    ensure!(!queued.is_finished(), "who waited in the queue before waits on");

    node.proxy.remove(hold);
    node.runtime.start_again().await?;
    queued.await?.context("the caller that had waited in the queue")?;
    for name in &names[1..] {
        cri.pull_image(name).await?;
    }
    cri.pull_image(&node.name(&large[0])).await?;
    idle(&agent).await
}

/// Stops a process, and continues it on drop.
struct Stopped(Pid);

impl Stopped {
    async fn stop(pid: i32) -> Result<Self> {
        pause(pid.try_into()?).await?;
        Ok(Self(Pid::from_raw(pid)))
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        // It may have exited with the test.
        let _ = kill(self.0, Signal::SIGCONT);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hanging_runtime_is_detected_and_the_agent_continues() -> Result<()> {
    let node = Node::start(Kind::V2).await?;
    let images = node.push_many("apps", 2, TINY).await?;
    let agent = node.agent(&Settings::limit(1)).await?;
    let cri = agent.cri().await?;
    cri.pull_image(&node.name(&images[0])).await?;

    let stopped = Stopped::stop(pid_behind(node.runtime.socket()).await?).await?;
    // Its socket still accepts connections: only a missing response shows it.
    let call = start_pull(&cri, Pull::new(&node.name(&images[1])));
    let mut request = tonic::Request::new(keelson_proto::cri::ImageStatusRequest::default());
    request.set_timeout(Duration::from_secs(1));
    let status = failed(cri.images().image_status(request).await, "the runtime hangs")?;
    ensure!(matches!(status.code(), Code::DeadlineExceeded | Code::Cancelled), "{status}");
    eventually(PATIENCE, "/readyz reports it", || async {
        let ready = agent.http_get("/readyz").await?;
        ensure!(!ready.status.is_success() && ready.text().contains("containerd.sock"), "{}", ready.text());
        Ok(())
    })
    .await?;
    agent.http_get("/livez").await?.success()?;
    ensure!(!call.is_finished(), "the pull is held");

    drop(stopped);
    call.await?.context("the pull that was held")?;
    eventually(PATIENCE, "it is ready again", || async {
        agent.http_get("/readyz").await?.success().map(drop)
    })
    .await?;
    ensure!(cri.image_status(&node.name(&images[1])).await?.is_some());
    idle(&agent).await
}
