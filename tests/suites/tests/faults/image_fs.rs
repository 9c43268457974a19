//! A small image file system (I1): content that agents retain of unfinished pulls never fills it, and never stays on a
//! full one. Free space is measured from outside, with statvfs.

use crate::common::{MIB, agent_leases, metric, metric_is, start_pull};
use anyhow::{Result, ensure};
use keelson_harness::agent::{Agent, Settings};
use keelson_harness::containerd::{Containerd, Kind, Options};
use keelson_harness::cri::{Pull, failed};
use keelson_harness::disk::LoopDisk;
use keelson_harness::images::{Image, ImageSpec, LARGE};
use keelson_harness::leases::collect_garbage;
use keelson_harness::node::Node;
use keelson_harness::on_both_runtimes;
use keelson_harness::registry::{Access, Registry};
use keelson_harness::registry_proxy::{Fault, Match, RegistryProxy};
use keelson_harness::scratch::Scratch;
use keelson_harness::util::{PATIENCE, eventually, until};

on_both_runtimes!(
    i1_a_full_disk_holds_no_more_than_without_the_agent,
    i1_retained_content_stays_within_its_budget,
    i1_low_space_releases_what_is_retained,
);

/// Bytes that containerd's database may grow by.
const NOISE: u64 = 2 * MIB;

const RETAINED: &str = "keelson_image_pull_retained";
const RETAINED_BYTES: &str = "keelson_image_pull_retained_bytes";

struct SmallNode {
    node: Node,
    disk: LoopDisk,
}

impl SmallNode {
    async fn start(kind: Kind, bytes: u64) -> Result<Self> {
        let scratch = Scratch::new()?;
        let folder = scratch.dir("c0")?;
        let disk = LoopDisk::mount(&scratch.path().join("images.ext4"), &folder.join("root"), bytes)?;
        let registry = Registry::start(&scratch, Access::Anonymous).await?;
        let proxy = RegistryProxy::start(registry.address()).await?;
        let runtime = Containerd::start_in(&folder, kind, &Options::default()).await?;
        runtime.configure_registry(proxy.address(), proxy.address())?;
        Ok(Self { node: Node { runtime, proxy, registry, scratch }, disk })
    }

    fn check_free(&self, least: u64) -> Result<()> {
        let free = self.disk.available()?;
        ensure!(free >= least, "{free} bytes are free, not {least}");
        Ok(())
    }

    /// Waits until at least `least` bytes are free.
    async fn free(&self, least: u64, what: &str) -> Result<()> {
        eventually(PATIENCE, what, || async { self.check_free(least) }).await
    }

    /// The same, where containerd may have collected garbage before the last download of a pull ended.
    async fn free_once_collected(&self, least: u64, what: &str) -> Result<()> {
        eventually(PATIENCE, what, || async {
            collect_garbage(&self.node.runtime).await?;
            self.check_free(least)
        })
        .await
    }

    /// Cancels a pull after 5 MiB of its layer, of which the runtime has written 4 or more.
    async fn cancel(&self, agent: &Agent, image: &Image) -> Result<()> {
        let digest = &image.layers[0].digest;
        let _hold = self.node.proxy.rule(Match::digest(digest), Fault::StallAfter(5 * MIB));
        let caller = start_pull(&agent.cri().await?, Pull::new(&self.node.name(image)));
        until("5 MiB are sent", || self.node.proxy.records().bytes_sent(digest) == 5 * MIB).await?;
        // Not by free space: the runtime may still be freeing what was released before.
        eventually(PATIENCE, "4 MiB are written", || async {
            let pulls = agent.pulls_json().await?;
            let written = pulls["pulls"][0]["progress"]["bytes_done"].as_u64().unwrap_or(0);
            ensure!(written >= 4 * MIB, "it is {pulls}");
            Ok(())
        })
        .await?;
        caller.abort();
        metric_is(agent, "keelson_image_pulls_in_flight", 0.0).await?;
        self.node.proxy.clear_rules();
        Ok(())
    }
}

fn quick() -> Settings {
    Settings::new().set("pulls.cancel_grace", "0s")
}

async fn released(agent: &Agent, reason: &str) -> f64 {
    let name = format!("keelson_image_pull_content_released_total{{reason=\"{reason}\"}}");
    // A series exists after its first event.
    metric(agent, &name).await.unwrap_or(0.0)
}

async fn i1_a_full_disk_holds_no_more_than_without_the_agent(kind: Kind) -> Result<()> {
    let small = SmallNode::start(kind, 64 * MIB).await?;
    let node = &small.node;
    // The second layer of the first does not fit, nor does the extracted layer of the other.
    let specs = [ImageSpec::new("download", &[16 * MIB, 64 * MIB]), ImageSpec::new("extract", &[36 * MIB])];
    let images = node.push(&specs).await?;
    let direct = node.runtime.cri().await?;
    let agent = node.agent(&quick().set("pulls.retain_min_free_percent", 0)).await?;
    let through = agent.cri().await?;
    let empty = small.disk.available()?;
    for image in &images {
        let name = node.name(image);
        for (cri, who) in [(&direct, "the runtime alone"), (&through, "the agent")] {
            let status = failed(cri.pull_image(&name).await, "it does not fit")?;
            ensure!(status.message().contains("no space left on device"), "{who}: {status}");
            let (least, what) = (empty - NOISE, format!("{who} leaves nothing of {}", image.repo));
            if std::ptr::eq(cri, &direct) {
                small.free_once_collected(least, &what).await?;
            } else {
                small.free(least, &what).await?;
            }
        }
        metric_is(&agent, RETAINED, 0.0).await?;
        ensure!(agent_leases(&node.runtime).await?.is_empty(), "a lease is left");
    }
    ensure!(released(&agent, "no_space").await >= 2.0, "it does not say why");
    Ok(())
}

async fn i1_retained_content_stays_within_its_budget(kind: Kind) -> Result<()> {
    const BUDGET: u64 = 20 * MIB;
    const COUNT: usize = 7;
    let small = SmallNode::start(kind, 128 * MIB).await?;
    let node = &small.node;
    let images = node.push_many("budget", COUNT, LARGE).await?;
    let settings = quick().set("pulls.retained_bytes_max", "20Mi").set("pulls.retain_min_free_percent", 0);
    let agent = node.agent(&settings).await?;
    let empty = small.disk.available()?;
    for (count, image) in (1..).zip(&images) {
        small.cancel(&agent, image).await?;
        eventually(PATIENCE, "it is retained and measured, within the budget", || async {
            let (retained, bytes) = (metric(&agent, RETAINED).await?, metric(&agent, RETAINED_BYTES).await?);
            ensure!(retained + released(&agent, "budget").await == f64::from(count), "{retained} retained");
            ensure!(bytes >= retained * (3 * MIB) as f64, "{retained} retained hold {bytes} bytes");
            ensure!(bytes <= BUDGET as f64, "{bytes} bytes are retained");
            Ok(())
        })
        .await?;
    }
    ensure!(released(&agent, "budget").await >= 2.0, "{COUNT} times 4 MiB fit into {BUDGET}");
    small.free(empty - BUDGET - NOISE, "the disk holds no more than the budget").await?;

    // The content of the latest is there for its retry, that of the oldest is not. What was under way when a pull was cancelled is
    // fetched again.
    let (first, last) = (&images[0], &images[COUNT - 1]);
    let through = agent.cri().await?;
    for image in [last, first] {
        through.pull_image(&node.name(image)).await?;
    }
    let fetches = |image: &Image| node.proxy.records().fetches(&image.layers[0]);
    ensure!(fetches(last) < 1.35, "the newest was fetched {} times", fetches(last));
    ensure!(fetches(first) > 1.4, "the oldest was fetched {} times", fetches(first));
    Ok(())
}

async fn i1_low_space_releases_what_is_retained(kind: Kind) -> Result<()> {
    let small = SmallNode::start(kind, 128 * MIB).await?;
    let node = &small.node;
    let images = node.push_many("low", 2, LARGE).await?;
    let agent = node.agent(&quick().set("pulls.retain_min_free_percent", 20)).await?;
    small.cancel(&agent, &images[0]).await?;
    metric_is(&agent, RETAINED, 1.0).await?;

    let left = 20 * MIB;
    let filler = small.disk.fill(left)?;
    metric_is(&agent, RETAINED, 0.0).await?;
    ensure!(released(&agent, "low_space").await == 1.0, "it does not say why");
    small.free(left + 3 * MIB, "its bytes are free").await?;

    // Below the threshold nothing is retained.
    small.cancel(&agent, &images[1]).await?;
    eventually(PATIENCE, "nothing is retained", || async {
        ensure!(released(&agent, "low_space").await == 2.0, "the second is");
        Ok(())
    })
    .await?;
    small.free(left + 3 * MIB, "its bytes are free").await?;
    ensure!(agent_leases(&node.runtime).await?.is_empty(), "a lease is left");

    drop(filler);
    for image in &images {
        agent.cri().await?.pull_image(&node.name(image)).await?;
    }
    Ok(())
}
