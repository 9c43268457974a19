//! The durable state: damaged, and on a disk that becomes full.

use crate::common::{idle, logged, metric, metric_is, start_pull};
use anyhow::{Context as _, Result, ensure};
use keelson_harness::agent::{Agent, Settings};
use keelson_harness::containerd::Kind;
use keelson_harness::cri::Pull;
use keelson_harness::disk::{fill_up, mount_tmpfs};
use keelson_harness::images::{BlobDigest, TINY};
use keelson_harness::node::Node;
use keelson_harness::registry_proxy::{Fault, Match};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

pub(crate) fn digests(folder: &Path) -> Result<BTreeMap<PathBuf, BlobDigest>> {
    let mut found = BTreeMap::new();
    for entry in fs::read_dir(folder).with_context(|| folder.display().to_string())? {
        let path = entry?.path();
        if path.is_dir() {
            found.extend(digests(&path)?);
        } else {
            found.insert(path.clone(), BlobDigest::of(&fs::read(&path)?));
        }
    }
    Ok(found)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_damaged_store_is_moved_aside_and_reported() -> Result<()> {
    let node = Node::start(Kind::V2).await?;
    let images = node.push_many("apps", 4, TINY).await?;
    let mut agent = node.agent(&Settings::new()).await?;
    let damages: [fn(&Path) -> Result<()>; 3] = [cut_the_database, overwrite_the_database, lose_the_manifest];
    for (n, damage) in damages.into_iter().enumerate() {
        agent.cri().await?.pull_image(&node.name(&images[n])).await?;
        ensure!(agent.terminate().await?.success());
        let store = agent.state_dir().join("state");
        damage(&store)?;
        let found = digests(&store)?;
        let from = agent.log()?.len();
        agent.start_again().await?;
        logged(&agent, from, "state store damaged").await?;
        let aside = damaged_folders(&agent.state_dir())?;
        ensure!(aside.len() == n + 1, "after damage {n} these are there: {aside:?}");
        let newest = aside.last().context("one was moved aside")?;
        logged(&agent, from, &newest.display().to_string()).await?;
        // Reading the database may have repaired a part of it.
        let kept = digests(newest)?;
        for (path, digest) in &found {
            let now = newest.join(path.strip_prefix(&store)?);
            let same = if path.ends_with("db") { now.exists() } else { kept.get(&now) == Some(digest) };
            ensure!(same, "damage {n}: {} is not what it was", now.display());
        }
    }
    agent.cri().await?.pull_image(&node.name(&images[3])).await?;
    // The new one is intact.
    let from = agent.log()?.len();
    agent.kill9()?;
    agent.start_again().await?;
    let log = agent.log()?.split_off(from);
    ensure!(!log.contains("state store damaged"), "{log}");
    ensure!(damaged_folders(&agent.state_dir())?.len() == 3);
    Ok(())
}

fn damaged_folders(state: &Path) -> Result<Vec<PathBuf>> {
    let all = fs::read_dir(state)?.flatten().map(|entry| entry.path());
    let mut damaged: Vec<_> = all.filter(|path| path.to_string_lossy().contains("state.damaged-")).collect();
    // The order in which they were made: names end in the time, with a number if that is not unique.
    damaged.sort_by_key(|path| fs::metadata(path).and_then(|meta| meta.modified()).ok());
    Ok(damaged)
}

fn database(store: &Path) -> Result<PathBuf> {
    let files = digests(store)?.into_keys();
    let size = |path: &PathBuf| fs::metadata(path).map_or(0, |meta| meta.len());
    files.filter(|path| path.ends_with("db")).max_by_key(size).context("the store has no file db")
}

fn cut_the_database(store: &Path) -> Result<()> {
    let path = database(store)?;
    let file = fs::File::options().write(true).open(&path)?;
    file.set_len(100)?;
    Ok(())
}

fn overwrite_the_database(store: &Path) -> Result<()> {
    let path = database(store)?;
    let length = usize::try_from(fs::metadata(&path)?.len())?;
    fs::write(&path, vec![0xa5; length])?;
    Ok(())
}

fn lose_the_manifest(store: &Path) -> Result<()> {
    fs::remove_file(store.join("manifest"))?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn on_a_full_disk_pulls_continue_and_it_is_reported_until_space_is_freed() -> Result<()> {
    let node = Node::start(Kind::V2).await?;
    let images = node.push_many("apps", 3, TINY).await?;
    let mut agent = Agent::new(&node.scratch, &node.runtime.endpoint(), &Settings::limit(1))?;
    let disk = agent.state_dir();
    mount_tmpfs(&disk, "8m")?;
    agent.start_again().await?;
    let cri = agent.cri().await?;
    cri.pull_image(&node.name(&images[0])).await?;
    metric_is(&agent, "keelson_store_durable", 1.0).await?;

    let ballast = fill_up(&disk)?;
    // A queue that is larger than the free space in the store's files.
    let hold = node.proxy.rule(Match::manifests(), Fault::Hang);
    let long = |n: usize| format!("{}/{}{n}:v1", node.proxy.address(), "long/".repeat(40));
    let pod = "p".repeat(250);
    let crowd: Vec<_> =
        (0..4000).map(|n| start_pull(&cri, Pull::new(&long(n)).pod(&pod, &format!("uid-{n}")))).collect();
    metric_is(&agent, "keelson_store_durable", 0.0).await?;
    metric_is(&agent, "keelson_image_pull_callers", 4000.0).await?;
    ensure!(metric(&agent, "keelson_store_write_errors_total").await? >= 1.0);
    let ready = agent.http_get("/readyz").await?;
    ensure!(!ready.status.is_success() && ready.text().contains("state"), "{}", ready.text());
    agent.http_get("/livez").await?.success()?;
    for call in crowd {
        call.abort();
    }
    node.proxy.remove(hold);
    for image in &images {
        cri.pull_image(&node.name(image)).await?;
    }
    ensure!(metric(&agent, "keelson_store_durable").await? == 0.0, "the disk is full still");
    ensure!(agent.log()?.contains("cannot write"), "{}", agent.log()?);

    fs::remove_file(ballast)?;
    agent.ready().await?;
    metric_is(&agent, "keelson_store_durable", 1.0).await?;
    idle(&agent).await?;
    agent.kill9()?;
    agent.start_again().await?;
    ensure!(!agent.log()?.contains("state store damaged"), "the store is complete: {}", agent.log()?);
    agent.cri().await?.pull_image(&node.name(&images[1])).await?;
    agent.kill9()
}
