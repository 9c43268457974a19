//! I4 and I6: the agent without its state store. With any fault of the disk, calls pass, images are pulled, and the
//! state is reported as not durable; when the disk works again, the state is durable again.

use crate::common::{idle, metric_is, start_pull};
use anyhow::{Context as _, Result, ensure};
use keelson_harness::agent::{Agent, Settings};
use keelson_harness::containerd::Kind;
use keelson_harness::cri::Pull;
use keelson_harness::disk::LoopDisk;
use keelson_harness::images::TINY;
use keelson_harness::node::Node;
use keelson_harness::registry_proxy::{Fault, Match};
use keelson_harness::util::{PATIENCE, eventually};
use keelson_storage::Manifest;
use nix::mount::{MsFlags, mount};
use std::fs;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::process::Command;

/// Longer than all steps meanwhile take, also on a slow machine.
const FROZEN: Duration = Duration::from_secs(45);
const DISK: u64 = 32 << 20;

/// What the kubelet needs while there is no store: calls that pass through, and an image.
async fn serves(agent: &Agent, image: &str) -> Result<()> {
    let cri = agent.cri().await?;
    cri.version().await?;
    cri.fs_info().await?;
    ensure!(cri.image_status(image).await?.is_none());
    cri.pull_image(image).await?;
    ensure!(cri.image_status(image).await?.is_some());
    agent.http_get("/livez").await?.success()?;
    Ok(())
}

/// Checks that the state is reported as not durable, and why.
async fn not_durable(agent: &Agent, why: &str) -> Result<()> {
    metric_is(agent, "keelson_store_durable", 0.0).await?;
    let ready = agent.http_get("/readyz").await?;
    ensure!(!ready.status.is_success() && ready.text().contains(why), "{why:?}: {}", ready.text());
    Ok(())
}

async fn is_durable(agent: &mut Agent) -> Result<()> {
    metric_is(agent, "keelson_store_durable", 1.0).await?;
    agent.ready().await
}

fn remount(at: &Path, flags: MsFlags) -> Result<()> {
    mount(None::<&str>, at, None::<&str>, MsFlags::MS_REMOUNT | flags, None::<&str>).context("cannot remount")
}

/// An agent whose state folder is a separate file system.
fn on_a_disk(node: &Node) -> Result<(LoopDisk, Agent)> {
    let agent = Agent::new(&node.scratch, &node.runtime.endpoint(), &Settings::new())?;
    let disk = LoopDisk::mount(&node.scratch.path().join("state.ext4"), &agent.state_dir(), DISK)?;
    Ok((disk, agent))
}

#[tokio::test(flavor = "multi_thread")]
async fn i4_a_disk_that_is_full_at_the_start_delays_no_call() -> Result<()> {
    let node = Node::start(Kind::V2).await?;
    let image = node.name(&node.push_many("apps", 1, TINY).await?[0]);
    let (disk, mut agent) = on_a_disk(&node)?;
    let filler = disk.fill(0)?;
    agent.start_live().await?;
    serves(&agent, &image).await?;
    not_durable(&agent, "full").await?;
    drop(filler);
    is_durable(&mut agent).await?;
    ensure!(agent.terminate().await?.success());
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn i4_a_read_only_file_system_delays_no_call() -> Result<()> {
    let node = Node::start(Kind::V2).await?;
    let image = node.name(&node.push_many("apps", 1, TINY).await?[0]);
    let (disk, mut agent) = on_a_disk(&node)?;
    remount(disk.path(), MsFlags::MS_RDONLY)?;
    agent.start_live().await?;
    serves(&agent, &image).await?;
    not_durable(&agent, "read-only").await?;
    remount(disk.path(), MsFlags::empty())?;
    is_durable(&mut agent).await?;
    ensure!(agent.terminate().await?.success());
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn i4_a_lock_of_another_process_is_retried_in_the_background() -> Result<()> {
    let node = Node::start(Kind::V2).await?;
    let image = node.name(&node.push_many("apps", 1, TINY).await?[0]);
    let mut agent = Agent::new(&node.scratch, &node.runtime.endpoint(), &Settings::new())?;
    fs::create_dir_all(agent.state_dir())?;
    let mut holder = Command::new("flock")
        .args(["--exclusive", "--no-fork"])
        .arg(agent.state_dir().join("lock"))
        .args(["sh", "-c", "echo held; exec sleep 600"])
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()?;
    let mut line = String::new();
    BufReader::new(holder.stdout.take().context("its output")?).read_line(&mut line).await?;
    ensure!(line == "held\n");
    agent.start_live().await?;
    serves(&agent, &image).await?;
    not_durable(&agent, "in use").await?;
    holder.kill().await?;
    is_durable(&mut agent).await
}

#[tokio::test(flavor = "multi_thread")]
async fn i4_a_newer_schema_is_moved_aside_unchanged() -> Result<()> {
    let node = Node::start(Kind::V2).await?;
    let image = node.name(&node.push_many("apps", 1, TINY).await?[0]);
    let mut agent = node.agent(&Settings::new()).await?;
    ensure!(agent.terminate().await?.success());
    let state = agent.state_dir();
    let known = Manifest::read(&state)?;
    let newer = Manifest { schema: known.schema + 1, ..known };
    newer.write(&state)?;
    let before = crate::state::digests(&state.join("state"))?;
    agent.start_again().await?;
    serves(&agent, &image).await?;
    metric_is(&agent, "keelson_store_durable", 1.0).await?;
    let aside = state.join(format!("state.schema-{}", newer.schema));
    let names = |digests: std::collections::BTreeMap<std::path::PathBuf, _>, folder: &Path| {
        let of = |(path, digest): (std::path::PathBuf, _)| {
            (path.strip_prefix(folder).map(Path::to_owned).unwrap_or_default(), digest)
        };
        digests.into_iter().map(of).collect::<Vec<_>>()
    };
    let after = names(crate::state::digests(&aside)?, &aside);
    ensure!(after == names(before, &state.join("state")), "every file is unchanged");
    ensure!(agent.log()?.contains("moved aside"), "{}", agent.log()?);
    agent.kill9()
}

#[tokio::test(flavor = "multi_thread")]
async fn i6_a_hanging_disk_stops_nothing_and_the_journal_is_complete_afterwards() -> Result<()> {
    let node = Node::start(Kind::V2).await?;
    let images: Vec<String> =
        node.push_many("apps", 4, TINY).await?.iter().map(|image| node.name(image)).collect();
    let (disk, mut agent) = on_a_disk(&node)?;
    agent.start_again().await?;
    serves(&agent, &images[0]).await?;
    metric_is(&agent, "keelson_store_durable", 1.0).await?;
    {
        let frozen = disk.freeze(FROZEN);
        tokio::pin!(frozen);
        let meanwhile = async {
            // The first pull finds out: its record waits for the disk, up to the timeout.
            tokio::time::sleep(Duration::from_secs(1)).await;
            serves(&agent, &images[1]).await?;
            serves(&agent, &images[2]).await?;
            not_durable(&agent, "does not answer").await
        };
        tokio::select! {
            ended = &mut frozen => {
                ended?;
                anyhow::bail!("the disk answered before the calls did");
            }
            done = meanwhile => done?,
        }
        frozen.await?;
    }
    is_durable(&mut agent).await?;
    idle(&agent).await?;
    agent.kill9()?;
    agent.start_again().await?;
    ensure!(!agent.log()?.contains("state store damaged"), "the store is complete: {}", agent.log()?);
    serves(&agent, &images[3]).await?;
    ensure!(agent.terminate().await?.success());
    Ok(())
}

/// I6: SIGTERM while the disk hangs. The agent stops within its limits: 2 s for the running pull, 3 s for the store.
/// Only the thread that waits for the disk stays until that answers. Durable state is there at the next start.
#[tokio::test(flavor = "multi_thread")]
async fn i6_an_agent_stops_in_time_while_its_disk_hangs_and_loses_nothing() -> Result<()> {
    let node = Node::start(Kind::V2).await?;
    let images = node.push_many("apps", 2, TINY).await?;
    let rules: Vec<_> =
        images.iter().map(|image| node.proxy.rule(Match::layers().repo(&image.repo), Fault::Hang)).collect();
    let names: Vec<String> = images.iter().map(|image| node.name(image)).collect();
    let (disk, mut agent) = on_a_disk(&node)?;
    agent.configure(&Settings::limit(1).set("agent.drain_timeout", "2s"))?;
    agent.start_again().await?;
    let cri = agent.cri().await?;
    let mut calls = Vec::new();
    for (callers, name) in (1..).zip(&names) {
        calls.push(start_pull(&cri, Pull::new(name)));
        callers_are(&agent, callers).await?;
    }
    eventually(PATIENCE, "both are in the journal", || async {
        let storage = agent.json("/debug/storage").await?;
        let pulls = serde_json::json!({"name": "pulls", "records": 2});
        ensure!(storage["tables"].as_array().is_some_and(|tables| tables.contains(&pulls)), "{storage}");
        Ok(())
    })
    .await?;
    {
        let frozen = disk.freeze(FROZEN);
        tokio::pin!(frozen);
        let meanwhile = async {
            tokio::time::sleep(Duration::from_secs(1)).await;
            agent.sigterm()?;
            for call in calls {
                ensure!(call.await?.is_err(), "its caller is told to retry");
            }
            eventually(PATIENCE, "the agent has ended what it can", || async {
                let log = agent.log()?;
                ensure!(log.contains("agent stopped"), "{log}");
                Ok(())
            })
            .await
        };
        tokio::select! {
            ended = &mut frozen => {
                ended?;
                anyhow::bail!("the disk answered before the agent had ended");
            }
            done = meanwhile => done?,
        }
        frozen.await?;
    }
    ensure!(agent.end().await?.success());
    agent.start_again().await?;
    ensure!(!agent.log()?.contains("state store damaged"), "the store is complete: {}", agent.log()?);
    eventually(PATIENCE, "both go on without a caller", || async {
        let pulls = agent.pulls_json().await?;
        ensure!(pulls["running"] == 1 && pulls["queued"] == 1 && pulls["callers"] == 0, "{pulls}");
        Ok(())
    })
    .await?;
    for rule in rules {
        node.proxy.remove(rule);
    }
    idle(&agent).await?;
    let cri = agent.cri().await?;
    for name in &names {
        ensure!(cri.image_status(name).await?.is_some(), "{name} is there");
    }
    ensure!(agent.terminate().await?.success());
    Ok(())
}

async fn callers_are(agent: &Agent, count: u64) -> Result<()> {
    eventually(PATIENCE, "the agent has the caller", || async {
        let pulls = agent.pulls_json().await?;
        ensure!(pulls["callers"] == count, "{pulls}");
        Ok(())
    })
    .await
}
