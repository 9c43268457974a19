//! SIGTERM, SIGINT and SIGHUP.

use crate::common::{Call, idle, logged, metric_is, start_pull};
use anyhow::{Context as _, Result, ensure};
use keelson_harness::agent::{Agent, Settings};
use keelson_harness::containerd::Kind;
use keelson_harness::cri::{Cri, Pull, failed};
use keelson_harness::images::{Image, LARGE, TINY};
use keelson_harness::leases::collect_garbage;
use keelson_harness::node::Node;
use keelson_harness::registry_proxy::{Fault, Match, RuleId};
use keelson_harness::util::{PATIENCE, eventually, until};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::fs;
use tonic::Code;

const MIB: u64 = 1 << 20;

/// One slot, taken by a pull that is held at 5 MiB, and two that wait.
struct Busy {
    node: Node,
    agent: Agent,
    images: Vec<Image>,
    hold: RuleId,
    cri: Cri,
    running: Call<String>,
    queued: Vec<Call<String>>,
}

impl Busy {
    async fn start(settings: Settings) -> Result<Self> {
        let node = Node::start(Kind::V2).await?;
        let mut images = node.push_many("large", 1, LARGE).await?;
        images.extend(node.push_many("small", 2, TINY).await?);
        let hold = node.proxy.rule(Match::layers().repo("large/0"), Fault::StallAfter(5 * MIB));
        let agent = node.agent(&settings.set("pulls.max_parallel_image_pulls", 1)).await?;
        let cri = agent.cri().await?;
        let running = start_pull(&cri, Pull::new(&node.name(&images[0])));
        until("a pull stands still", || node.runtime.ingested() >= 4 * MIB).await?;
        let queued: Vec<_> =
            images[1..].iter().map(|image| start_pull(&cri, Pull::new(&node.name(image)))).collect();
        metric_is(&agent, "keelson_image_pull_queue_depth", 2.0).await?;
        Ok(Self { node, agent, images, hold, cri, running, queued })
    }

    fn signal(&self, signal: Signal) -> Result<()> {
        let pid = self.agent.pid().context("it runs")?;
        Ok(kill(Pid::from_raw(pid.try_into()?), signal)?)
    }

    /// Queued pulls are refused at once, with an error that asks for a retry.
    async fn queue_is_refused(&mut self) -> Result<()> {
        for call in self.queued.drain(..) {
            let status = failed(call.await?, "the agent is stopping")?;
            ensure!(status.code() == Code::Unavailable && status.message().contains("stopping"), "{status}");
        }
        Ok(())
    }

    async fn exited_with_success(&mut self) -> Result<()> {
        let status = eventually(PATIENCE, "the agent ends", || {
            let ended = self.agent.ended();
            async move { ended?.context("it still runs") }
        })
        .await?;
        ensure!(status.success(), "it ended with {status}");
        ensure!(!self.agent.socket().exists(), "its socket is gone");
        // The harness prints the log of an exited process unless its end was requested.
        let _ = self.agent.terminate().await;
        Ok(())
    }

    async fn arrives(&self, image: &Image) -> Result<()> {
        let cri = self.node.runtime.cri().await?;
        let name = self.node.name(image);
        eventually(PATIENCE, &format!("{name} arrives"), || async {
            cri.image_status(&name).await?.context("it is not there")
        })
        .await
        .map(drop)
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn sigterm_drains_running_pulls_and_the_next_start_resumes_the_queue() -> Result<()> {
    let mut busy = Busy::start(Settings::new().set("agent.drain_timeout", "5m")).await?;
    busy.signal(Signal::SIGTERM)?;
    busy.queue_is_refused().await?;
    let status =
        failed(busy.cri.pull_image(&busy.node.name(&busy.images[1])).await, "the agent is stopping")?;
    ensure!(status.code() == Code::Unavailable && status.message().contains("stopping"), "{status}");
    busy.cri.version().await.context("calls that are not pulls still pass")?;
    let ready = busy.agent.http_get("/readyz").await?;
    ensure!(!ready.status.is_success() && ready.text().contains("stopping"), "{}", ready.text());
    ensure!(!busy.running.is_finished(), "the running pull may end");

    busy.node.proxy.remove(busy.hold);
    (&mut busy.running).await?.context("the pull that ran")?;
    busy.exited_with_success().await?;
    for image in &busy.images[1..] {
        let there = busy.node.runtime.cri().await?.image_status(&busy.node.name(image)).await?;
        ensure!(there.is_none(), "{} was not to be pulled any more", image.repo);
    }
    busy.agent.start_again().await?;
    for image in &busy.images {
        busy.arrives(image).await?;
    }
    let gets = busy.node.proxy.records().gets(&busy.images[0].layers[0].digest);
    ensure!(gets.len() == 1, "what was done is not done again: {gets:?}");
    idle(&busy.agent).await
}

#[tokio::test(flavor = "multi_thread")]
async fn after_the_drain_timeout_the_next_start_resumes() -> Result<()> {
    for (signal, drain) in [(Signal::SIGTERM, "1s"), (Signal::SIGINT, "0s")] {
        let mut busy = Busy::start(Settings::new().set("agent.drain_timeout", drain)).await?;
        busy.signal(signal)?;
        busy.queue_is_refused().await?;
        failed((&mut busy.running).await?, "the agent is gone")?;
        busy.exited_with_success().await?;
        busy.node.proxy.remove(busy.hold);
        // The runtime has stopped the pull; from now on only the agent's lease keeps the content.
        until("the runtime has stopped it", || busy.node.proxy.records().active_repos().is_empty()).await?;
        collect_garbage(&busy.node.runtime).await?;
        busy.agent.start_again().await?;
        for image in &busy.images {
            busy.arrives(image).await?;
        }
        let gets = busy.node.proxy.records().gets(&busy.images[0].layers[0].digest);
        let from = gets.last().and_then(|get| get.range_start).context("the last GET has no Range")?;
        ensure!(gets.len() == 2 && from >= 4 * MIB, "{gets:?}");
        idle(&busy.agent).await?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_sigterm_stops_the_agent_at_once() -> Result<()> {
    let mut busy = Busy::start(Settings::new().set("agent.drain_timeout", "5m")).await?;
    busy.signal(Signal::SIGTERM)?;
    busy.queue_is_refused().await?;
    busy.signal(Signal::SIGTERM)?;
    failed((&mut busy.running).await?, "the agent is gone")?;
    busy.exited_with_success().await
}

#[tokio::test(flavor = "multi_thread")]
async fn sighup_applies_live_settings_and_reports_the_others() -> Result<()> {
    let node = Node::start(Kind::V2).await?;
    let images = node.push_many("apps", 5, 2 * MIB).await?;
    let hold = node.proxy.rule(Match::layers(), Fault::StallAfter(MIB));
    let mut agent = node.agent(&Settings::limit(1)).await?;
    let cri = agent.cri().await?;
    let calls: Vec<_> = images.iter().map(|image| start_pull(&cri, Pull::new(&node.name(image)))).collect();
    metric_is(&agent, "keelson_image_pull_queue_depth", 4.0).await?;

    // Invalid settings change nothing, though one of them would be valid.
    let from = agent.log()?.len();
    agent.configure(&Settings::limit(4).set("pulls.when_full", "maybe"))?;
    agent.sighup()?;
    logged(&agent, from, "cannot reload the settings").await?;
    logged(&agent, from, "when_full").await?;
    metric_is(&agent, "keelson_image_pull_limit", 1.0).await?;

    let from = agent.log()?.len();
    fs::write(agent.config(), "[pulls\n")?;
    agent.sighup()?;
    logged(&agent, from, "cannot reload the settings").await?;
    metric_is(&agent, "keelson_image_pull_limit", 1.0).await?;
    until("one runs", || node.proxy.records().active_repos().len() == 1).await?;

    // Settings that can change do; those that cannot are named, and stay.
    let from = agent.log()?.len();
    let elsewhere = format!("unix://{}/elsewhere.sock", node.scratch.path().display());
    let settings = Settings::limit(3).set("cri.listen", elsewhere.as_str()).set("agent.log", "debug");
    agent.configure(&settings)?;
    agent.sighup()?;
    until("three run", || node.proxy.records().active_repos().len() == 3).await?;
    metric_is(&agent, "keelson_image_pull_limit", 3.0).await?;
    logged(&agent, from, "pulls.max_parallel_image_pulls").await?;
    let log = agent.log()?.split_off(from);
    let line =
        log.lines().find(|line| line.contains("next start")).context("nothing waits for the next start")?;
    ensure!(line.contains("cri.listen") && line.contains("elsewhere.sock"), "{line}");
    agent.cri().await?.version().await.context("the old socket serves on")?;
    ensure!(!node.scratch.path().join("elsewhere.sock").exists());

    let from = agent.log()?.len();
    agent.sighup()?;
    logged(&agent, from, "next start").await?;

    // Lower again: running pulls continue, and nothing new starts before there is a free slot.
    agent.configure(&Settings::limit(1))?;
    agent.sighup()?;
    metric_is(&agent, "keelson_image_pull_limit", 1.0).await?;
    metric_is(&agent, "keelson_image_pulls_in_flight", 3.0).await.context("nothing that runs is stopped")?;
    node.proxy.remove(hold);
    for call in calls {
        call.await??;
    }
    idle(&agent).await
}
