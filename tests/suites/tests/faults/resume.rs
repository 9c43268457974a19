//! Cases 10 to 13: the agent or the runtime dies during a pull, and nothing is fetched twice.

use crate::common::{
    MIB, agent_leases, create_agent_lease, idle, logged, no_lease_left, pull_like_kubelet, start_pull,
};
use anyhow::{Context as _, Result, ensure};
use keelson_harness::agent::Settings;
use keelson_harness::containerd::Kind;
use keelson_harness::cri::{Cri, Pull, failed};
use keelson_harness::images::{Image, ImageSpec, LARGE};
use keelson_harness::leases::{collect_garbage, create_lease, leases};
use keelson_harness::node::Node;
use keelson_harness::on_both_runtimes;
use keelson_harness::registry_proxy::{Fault, Match, RuleId};
use keelson_harness::util::{PATIENCE, eventually, until};
use std::fs;

on_both_runtimes!(
    case_10_an_agent_killed_in_mid_pull_resumes,
    case_11_an_orphan_lease_is_reaped_at_start,
    case_12_a_runtime_killed_in_mid_pull_is_waited_for,
    case_13_a_runtime_terminated_in_mid_pull_is_waited_for,
    i1_a_failed_snapshot_retains_no_content,
);

/// Bytes of the layer that are sent before the fault.
const SENT: u64 = 5 * MIB;

/// Waits until a pull has reached [`SENT`], and most of that is on containerd's disk.
async fn halfway(node: &Node, image: &Image) -> Result<()> {
    let layer = &image.layers[0].digest;
    until("5 MiB are sent", || node.proxy.records().bytes_sent(layer) == SENT).await?;
    until("the runtime has written 4 MiB", || node.runtime.ingested() >= SENT - MIB).await
}

async fn one_large(node: &Node) -> Result<(Image, String, RuleId)> {
    let image = ImageSpec::single("large", LARGE).push(&node.registry).await?;
    let name = node.name(&image);
    let hold = node.proxy.rule(Match::layers(), Fault::StallAfter(SENT));
    Ok((image, name, hold))
}

/// Checks that the second GET continued where the first had stopped.
fn resumed_with_range(node: &Node, image: &Image) -> Result<()> {
    let layer = &image.layers[0];
    let gets = node.proxy.records().gets(&layer.digest);
    ensure!(gets.len() == 2, "{gets:?}");
    let from = gets[1].range_start.context("the second GET has no Range")?;
    ensure!(from >= SENT - MIB, "the second GET begins at {from}");
    ensure!(gets[1].bytes == layer.size - from, "{gets:?}");
    ensure!(node.proxy.records().full_fetches(layer) == 0, "{gets:?}");
    Ok(())
}

async fn case_10_an_agent_killed_in_mid_pull_resumes(kind: Kind) -> Result<()> {
    let node = Node::start(kind).await?;
    let (image, name, hold) = one_large(&node).await?;
    let mut agent = node.agent(&Settings::limit(3)).await?;
    let call = start_pull(&agent.cri().await?, Pull::new(&name));
    halfway(&node, &image).await?;
    let before = agent_leases(&node.runtime).await?;
    ensure!(before.len() == 1, "one pull has one lease, not {before:?}");

    agent.kill9()?;
    failed(call.await?, "the agent is dead")?;
    until("the runtime stops the pull", || node.proxy.records().active_repos().is_empty()).await?;
    ensure!(agent_leases(&node.runtime).await? == before, "the lease outlives the agent");
    collect_garbage(&node.runtime).await?;

    // The pull that continues by itself is held here, so that the caller joins it.
    let mark = node.proxy.records().count();
    let second = node.proxy.rule_times(Match::layers(), Fault::Hang, 1);
    node.proxy.remove(hold);
    agent.start_again().await?;
    until("the agent continues by itself", || !node.proxy.records().active_repos().is_empty()).await?;
    ensure!(agent_leases(&node.runtime).await? == before, "it continues with the same lease");
    let again = start_pull(&agent.cri().await?, Pull::new(&name));
    crate::common::metric_is(&agent, "keelson_image_pull_callers", 1.0).await?;
    node.proxy.remove(second);
    again.await?.context("the caller that asked again")?;

    resumed_with_range(&node, &image)?;
    let layers = node.proxy.records().since(mark).into_iter();
    let layers = layers.filter(|seen| seen.digest.as_ref() == Some(&image.layers[0].digest)).count();
    ensure!(layers == 1, "the caller that asked again started nothing of its own");
    no_lease_left(&node.runtime).await?;
    ensure!(agent.cri().await?.image_status(&name).await?.is_some());
    idle(&agent).await
}

async fn case_11_an_orphan_lease_is_reaped_at_start(kind: Kind) -> Result<()> {
    let node = Node::start(kind).await?;
    let mut agent = node.agent(&Settings::new()).await?;
    ensure!(agent.terminate().await?.success());
    // As if it had been killed between making a lease and the end of its pull, with an empty journal.
    let own = keelson_storage::folder_id(&agent.state_dir());
    create_agent_lease(&node.runtime, "orphan-1", &own).await?;
    create_agent_lease(&node.runtime, "orphan-2", &own).await?;
    create_agent_lease(&node.runtime, "of-another-agent", "0123456789abcdef").await?;
    create_lease(&node.runtime, "of-nobody", None).await?;

    agent.start_again().await?;
    eventually(PATIENCE, "only foreign leases are left", || async {
        let mut left: Vec<_> = leases(&node.runtime).await?.into_iter().map(|lease| lease.id).collect();
        left.sort();
        ensure!(left == ["of-another-agent", "of-nobody"], "these are left: {left:?}");
        Ok(())
    })
    .await?;
    // A later probe of the runtime must not change the result.
    agent.kill9()?;
    agent.start_again().await?;
    let image = ImageSpec::single("any", MIB).push(&node.registry).await?;
    agent.cri().await?.pull_image(&node.name(&image)).await?;
    eventually(PATIENCE, "the pull's own lease is gone", || async {
        let left = leases(&node.runtime).await?;
        ensure!(left.len() == 2, "these are left: {left:?}");
        Ok(())
    })
    .await
}

async fn case_12_a_runtime_killed_in_mid_pull_is_waited_for(kind: Kind) -> Result<()> {
    let mut node = Node::start(kind).await?;
    let (image, name, hold) = one_large(&node).await?;
    let agent = node.agent(&Settings::limit(3)).await?;
    let cri = agent.cri().await?;
    let call = start_pull(&cri, Pull::new(&name));
    halfway(&node, &image).await?;

    node.runtime.kill9()?;
    until("the proxy sees the runtime go", || node.proxy.records().active_repos().is_empty()).await?;
    logged(&agent, 0, "interrupted by a runtime outage").await?;
    ensure!(!call.is_finished(), "the caller is held");
    node.proxy.remove(hold);
    node.runtime.start_again().await?;
    call.await?.context("the caller that was held")?;

    resumed_with_range(&node, &image)?;
    no_lease_left(&node.runtime).await?;
    // The same connection still works.
    ensure!(cri.image_status(&name).await?.is_some());
    idle(&agent).await
}

async fn case_13_a_runtime_terminated_in_mid_pull_is_waited_for(kind: Kind) -> Result<()> {
    let mut node = Node::start(kind).await?;
    let (image, name, hold) = one_large(&node).await?;
    let agent = node.agent(&Settings::limit(3)).await?;
    let call = start_pull(&Cri::lazy(&agent.socket())?, Pull::new(&name));
    halfway(&node, &image).await?;

    node.runtime.terminate().await?;
    until("the proxy sees the runtime go", || node.proxy.records().active_repos().is_empty()).await?;
    ensure!(!call.is_finished(), "the caller is held");
    node.proxy.remove(hold);
    node.runtime.start_again().await?;
    call.await?.context("the caller that was held")?;
    ensure!(agent.cri().await?.image_status(&name).await?.is_some());
    // The lease belongs to the agent, so that a runtime that stops gracefully keeps the bytes like one that is killed.
    resumed_with_range(&node, &image)?;
    no_lease_left(&node.runtime).await?;
    idle(&agent).await
}

/// A containerd that is killed between the rename of a snapshot's folder and its database record cannot begin the next
/// snapshot before a garbage collection has removed that folder.
async fn i1_a_failed_snapshot_retains_no_content(kind: Kind) -> Result<()> {
    let mut node = Node::start(kind).await?;
    let (image, name, hold) = one_large(&node).await?;
    let agent = node.agent(&Settings::limit(1)).await?;
    let cri = agent.cri().await?;
    let caller = tokio::spawn(async move { pull_like_kubelet(&cri, &Pull::new(&name), PATIENCE).await });
    halfway(&node, &image).await?;
    node.runtime.kill9()?;
    let root = node.runtime.folder()?.join("root");
    for entry in fs::read_dir(&root)? {
        let snapshots = entry?.path().join("snapshots");
        // Those of every snapshotter: the numbers after the one in use.
        for id in (1..=9).filter(|_| snapshots.is_dir()) {
            fs::create_dir_all(snapshots.join(id.to_string()).join("fs"))?;
        }
    }
    node.proxy.remove(hold);
    node.runtime.start_again().await?;
    let failures = caller.await??;
    ensure!(failures > 0, "containerd did begin a snapshot: {}", agent.log()?);
    resumed_with_range(&node, &image).with_context(|| agent.log().unwrap_or_default())?;
    idle(&agent).await?;
    no_lease_left(&node.runtime).await
}
