//! A small image file system under a stock kubelet with its stock thresholds (I1): content that the agent retains of
//! unfinished pulls never makes the kubelet remove an image or evict a pod. Every scenario runs twice, with the kubelet
//! on containerd itself and with the agent between them, and at its marks the same number of bytes is free in both.

use crate::common::run;
use crate::test_env::{Agents, TestEnv, pod_node, program};
use anyhow::{Context as _, Result, ensure};
use k8s_openapi::api::core::v1::ContainerStatus;
use keelson_cluster::kube::KubeletOptions;
use keelson_harness::agent::Settings;
use keelson_harness::containerd::Kind;
use keelson_harness::disk::{Filler, LoopDisk};
use keelson_harness::images::{Image, ImageSpec};
use keelson_harness::registry::Access;
use keelson_harness::registry_proxy::{Fault, Match};
use keelson_harness::scratch::Scratch;
use keelson_harness::util::{PATIENCE, eventually};
use serde_json::json;
use std::time::Duration;

const MIB: u64 = 1 << 20;
const DISK: u64 = 512 * MIB;

/// Number of interrupted pulls, and bytes of their layer before that.
const UNFINISHED: usize = 4;
const BROKEN_AFTER: u64 = 20 * MIB;

/// The layer of an unused image. It is stored packed and unpacked.
const SPARE: u64 = 24 * MIB;

/// Tolerance in bytes: databases of containerd, and sandboxes of pods.
const SLACK: u64 = 6 * MIB;

/// Free space of the image file system in percent: the kubelet collects images and evicts pods below 15, the agent
/// releases retained content below 20. [`LOW`] is between them.
const LOW: u64 = 18;
const UNDER_PRESSURE: u64 = 13;
const FREE_BEFORE: u64 = 24;

/// Longer than two passes of the kubelet's eviction manager, one every 10 s.
const TWO_PASSES: Duration = Duration::from_secs(25);

struct SmallDiskEnv {
    disk: LoopDisk,
    env: TestEnv,
    /// Every byte of the file system.
    capacity: u64,
}

impl SmallDiskEnv {
    async fn start(kind: Kind, name: &str, with_agent: bool, options: KubeletOptions) -> Result<Self> {
        let scratch = Scratch::new()?;
        let folder = scratch.dir("c0")?;
        let disk = LoopDisk::mount(&scratch.path().join("images.ext4"), &folder.join("root"), DISK)?;
        let node = pod_node(scratch, &folder, kind, Access::Anonymous).await?;
        let name = format!("{name}-{}", if with_agent { "agent" } else { "direct" });
        // The shipped value, which the harness turns off.
        let settings = || Settings::new().set("pulls.retain_min_free_percent", 20);
        let agents = if with_agent { Agents::Everything(settings()) } else { Agents::Nothing };
        let env = TestEnv::start(&name, node, agents, options).await?;
        env.run_pod("keeper", &[]).await?;
        let capacity = disk.capacity()?;
        Ok(Self { disk, env, capacity })
    }

    async fn keeper(&self) -> Result<ContainerStatus> {
        self.env.container("default", "keeper").await
    }

    /// Number of the kubelet's Events about its node with this reason.
    async fn events(&self, reason: &str) -> Result<usize> {
        Ok(self.env.events("Node", &self.env.name, reason).await?.len())
    }

    /// Checks that the kubelet has reclaimed nothing, and the running pod is the first one.
    async fn check_nothing_reclaimed(&self, keeper: &ContainerStatus) -> Result<()> {
        for reason in ["EvictionThresholdMet", "FreeDiskSpaceFailed"] {
            ensure!(self.events(reason).await? == 0, "{reason}: {}", self.env.kubelet_log());
        }
        self.keeper_runs(keeper).await
    }

    async fn keeper_runs(&self, before: &ContainerStatus) -> Result<()> {
        let now = self.keeper().await?;
        ensure!(
            now.container_id == before.container_id && now.restart_count == before.restart_count,
            "the pod was disturbed: {before:?}, then {now:?}"
        );
        Ok(())
    }

    /// Waits until the agent, if there is one, retains the content of this number of pulls.
    async fn retained(&mut self, expected: usize) -> Result<()> {
        if !self.env.has_agent() {
            return Ok(());
        }
        let agent = self.env.agent()?;
        eventually(PATIENCE, &format!("{expected} are retained"), || async {
            let text = agent.http_get("/metrics").await?.success()?.text();
            let line = text.lines().find_map(|line| line.strip_prefix("keelson_image_pull_retained "));
            let now: usize = line.context("no such metric")?.trim().parse()?;
            ensure!(now == expected, "{now} are");
            Ok(())
        })
        .await
    }

    fn percent(&self, percent: u64) -> u64 {
        self.capacity * percent / 100
    }

    async fn settled(&self) -> Result<u64> {
        eventually(PATIENCE, "free space has settled", || async {
            let before = self.disk.available()?;
            for _ in 0..5 {
                tokio::time::sleep(Duration::from_secs(1)).await;
                let now = self.disk.available()?;
                ensure!(before == now, "{before} bytes are free, then {now}");
            }
            Ok(before)
        })
        .await
    }

    /// Waits until about as many bytes are free as `expected`. Garbage collections of containerd may be a minute apart:
    /// it spends a fiftieth of its time on them, and one on a slow disk takes long.
    async fn settled_at(&self, expected: u64) -> Result<u64> {
        eventually(3 * PATIENCE, "unreferenced content is freed", || async {
            let free = self.settled().await?;
            ensure!(free.abs_diff(expected) <= SLACK, "{free} bytes are free, not about {expected}");
            Ok(free)
        })
        .await
    }

    /// Fills a file system with `free` free bytes up to `percent` free.
    fn fill(&self, free: u64, percent: u64) -> Result<Filler> {
        let taken = free.saturating_sub(self.percent(percent));
        self.disk.fill(self.disk.available()?.saturating_sub(taken))
    }

    async fn has(&self, image: &Image) -> Result<bool> {
        let node = &self.env.node;
        Ok(node.runtime.cri().await?.image_status(&node.name(image)).await?.is_some())
    }
}

/// Free bytes at the marks of a scenario.
type Marks = Vec<(&'static str, u64)>;

fn compare(kind: Kind, direct: &Marks, agent: &Marks) -> Result<()> {
    ensure!(direct.len() == agent.len(), "{direct:?}, but {agent:?}");
    for ((what, direct), (_, agent)) in direct.iter().zip(agent) {
        eprintln!(
            "{kind:?}: {what}: {} KiB are free without the agent, {} KiB with it",
            direct >> 10,
            agent >> 10
        );
        ensure!(direct.abs_diff(*agent) <= SLACK, "{what}: {direct} bytes are free, with the agent {agent}");
    }
    Ok(())
}

fn label(kind: Kind) -> &'static str {
    match kind {
        Kind::Debian16 => "16",
        Kind::V2 => "v2",
        Kind::Crio => "crio",
    }
}

/// The stock thresholds, and short intervals between passes.
fn stock() -> KubeletOptions {
    KubeletOptions::default()
        .set("evictionHard", json!({"memory.available": "1Mi", "imagefs.available": "15%"}))
        .set("evictionPressureTransitionPeriod", "1s")
        .set("imageGCHighThresholdPercent", 85)
        .set("imageGCLowThresholdPercent", 80)
        .set("imageMinimumGCAge", "1s")
        .set("nodeStatusUpdateFrequency", "1s")
}

/// Pulls are interrupted, the disk becomes low, then so low that the kubelet must act.
async fn pulls_break_off(kind: Kind, with_agent: bool) -> Result<Marks> {
    let mut small = SmallDiskEnv::start(kind, &format!("gc-{}", label(kind)), with_agent, stock()).await?;
    // Unused: the kubelet removes it first.
    let spare = small.env.push(&ImageSpec::single("spare", SPARE)).await?;
    let node = &small.env.node;
    node.runtime.cri().await?.pull_image(&node.name(&spare)).await?;
    let free = small.settled().await?;

    let images = node.push_many("half", UNFINISHED, BROKEN_AFTER + 4 * MIB).await?;
    let names: Vec<String> = (0..UNFINISHED).map(|n| format!("half-{n}")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    for (image, name) in images.iter().zip(&names) {
        let layers = || Match::layers().repo(&image.repo);
        node.proxy.rule_times(layers(), Fault::ResetAfter(BROKEN_AFTER), 1);
        node.proxy.rule(layers(), Fault::status(503));
        small.env.make_pod(name, image).await?;
    }
    for name in &names {
        small.env.pull_failed("default", name).await?;
    }
    small.retained(UNFINISHED).await?;
    let keeper = small.keeper().await?;
    let nominal = BROKEN_AFTER * UNFINISHED as u64;
    // The runtime alone keeps nothing of them.
    let held = free.saturating_sub(small.settled_at(if with_agent { free - nominal } else { free }).await?);
    eprintln!("{kind:?}, agent: {with_agent}: {held} bytes are held of {UNFINISHED} unfinished pulls");

    // With the retained content the disk is low for the agent, but not for the kubelet.
    let filler = small.fill(free - nominal, LOW)?;
    small.retained(0).await?;
    let low = small.settled_at(small.percent(LOW) + nominal).await?;
    drop(filler);
    // The same without it. A kubelet that starts collects images at once if it finds the disk low.
    let filler = small.fill(free, LOW)?;
    small.env.kubelet.kill9()?;
    small.env.kubelet.start_again().await?;
    tokio::time::sleep(TWO_PASSES).await;
    small.check_nothing_reclaimed(&keeper).await?;
    ensure!(small.events("NodeHasDiskPressure").await? == 0, "{}", small.env.kubelet_log());
    ensure!(small.has(&spare).await?, "the kubelet removed an image: {}", small.env.kubelet_log());
    let lower = small.settled_at(small.percent(LOW)).await?;
    drop(filler);

    // The thresholds apply: below them the kubelet removes the image, and that is enough.
    let filler = small.fill(free, UNDER_PRESSURE)?;
    eventually(2 * PATIENCE, "the kubelet removes unused images", || async {
        ensure!(!small.has(&spare).await?, "it is there");
        for reason in ["EvictionThresholdMet", "NodeHasDiskPressure"] {
            ensure!(small.events(reason).await? > 0, "the kubelet does not say {reason}");
        }
        Ok(())
    })
    .await
    .with_context(|| small.env.kubelet_log())?;
    small.env.shared.cluster.admin.await_condition(&small.env.name, "DiskPressure", "False").await?;
    small.keeper_runs(&keeper).await?;
    let collected = small.settled_at(small.percent(UNDER_PRESSURE) + 2 * SPARE).await?;
    drop(filler);

    small.env.delete(&names).await?;
    small.env.node.proxy.clear_rules();
    small.env.run_pod("after", &[MIB]).await?;
    small.keeper_runs(&keeper).await?;
    small.env.delete(&["keeper", "after"]).await?;
    Ok(vec![("the disk is low", low), ("the disk is lower", lower), ("images were collected", collected)])
}

/// I1: content of interrupted pulls is released before the kubelet collects images or evicts a pod because of it.
async fn retained_content_evicts_no_image_and_no_pod(kind: Kind) -> Result<()> {
    let direct = pulls_break_off(kind, false).await?;
    let agent = pulls_break_off(kind, true).await?;
    compare(kind, &direct, &agent)
}

/// An image does not fit beside a running pod.
async fn one_does_not_fit(kind: Kind, with_agent: bool) -> Result<Marks> {
    // During each pull, the disk is full with and without an agent. That may set DiskPressure, but must not evict a pod,
    // also where a loaded machine needs its time for the pulls of the kubelet's retries.
    let options = stock()
        .set("evictionHard", json!({"memory.available": "1Mi"}))
        .set("evictionSoft", json!({"imagefs.available": "15%"}))
        .set("evictionSoftGracePeriod", json!({"imagefs.available": "2m"}))
        .set("imageGCHighThresholdPercent", 100);
    let mut small = SmallDiskEnv::start(kind, &format!("fit-{}", label(kind)), with_agent, options).await?;
    let keeper = small.keeper().await?;
    let free = small.settled().await?;
    let filler = small.fill(free, FREE_BEFORE)?;
    let before = small.settled().await?;

    let large = small.env.push(&program("large", &[48 * MIB, 96 * MIB])?).await?;
    small.env.make_pod("large", &large).await?;
    let message = small.env.pull_failed("default", "large").await?;
    ensure!(message.contains("no space left on device"), "the kubelet reports {message}");
    eventually(PATIENCE, "its bytes are free again", || async {
        let now = small.disk.available()?;
        ensure!(now + SLACK >= before, "{now} bytes are free, {before} were before");
        Ok(())
    })
    .await?;
    // The kubelet retries meanwhile, without success.
    tokio::time::sleep(TWO_PASSES).await;
    small.env.pull_failed("default", "large").await?;
    small.env.delete(&["large"]).await?;
    small.retained(0).await?;
    let freed = small.settled_at(before).await?;
    // A node under pressure accepts no pod, and the kubelet checks again in its next pass.
    tokio::time::sleep(TWO_PASSES).await;
    small.check_nothing_reclaimed(&keeper).await?;
    small.env.run_pod("small", &[4 * MIB]).await?;
    let after = small.settled().await?;
    small.check_nothing_reclaimed(&keeper).await?;
    drop(filler);
    small.env.delete(&["keeper", "small"]).await?;
    Ok(vec![
        ("before the image that does not fit", before),
        ("after it", freed),
        ("with one that fits", after),
    ])
}

/// I1: the pull of an image that does not fit fails, leaves nothing, and disturbs no other pod.
async fn an_image_that_does_not_fit_leaves_nothing(kind: Kind) -> Result<()> {
    let direct = one_does_not_fit(kind, false).await?;
    let agent = one_does_not_fit(kind, true).await?;
    compare(kind, &direct, &agent)
}

macro_rules! on_both {
    ($($name:ident: $story:ident),* $(,)?) => {
        mod debian16 {
            $(#[test]
            fn $name() -> anyhow::Result<()> {
                super::run(super::$story(super::Kind::Debian16))
            })*
        }
        mod v2 {
            $(#[test]
            fn $name() -> anyhow::Result<()> {
                super::run(super::$story(super::Kind::V2))
            })*
        }
    };
}

on_both!(
    i1_retained_content_costs_no_image_and_no_pod: retained_content_evicts_no_image_and_no_pod,
    i1_an_image_that_does_not_fit_leaves_nothing: an_image_that_does_not_fit_leaves_nothing,
);
