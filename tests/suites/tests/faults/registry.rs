//! A registry that hangs, disconnects, or returns errors: callers get the runtime's error, slots are freed, and the
//! next pull works.

use crate::common::{MIB, idle, metric_is, start_pull};
use anyhow::{Context as _, Result, ensure};
use keelson_harness::agent::Settings;
use keelson_harness::containerd::Kind;
use keelson_harness::cri::{Cri, Pull, failed};
use keelson_harness::images::TINY;
use keelson_harness::node::Node;
use keelson_harness::on_both_runtimes;
use keelson_harness::registry_proxy::{Fault, Match, Outcome};
use keelson_harness::util::until;
use tonic::{Code, Status};

on_both_runtimes!(
    a_registry_with_errors_holds_no_slot,
    a_registry_that_aborts_holds_no_slot,
    a_hanging_registry_holds_a_slot_only_until_the_stall_timeout,
    a_hanging_registry_does_not_delay_a_callers_deadline,
);

/// Code and message from the runtime directly, and through the agent. Ids that a runtime generates differ.
async fn both_fail(direct: &Cri, agent: &Cri, name: &str, why: &str) -> Result<(Status, Status)> {
    let expected = failed(direct.pull_image(name).await, why)?;
    let status = failed(agent.pull_image(name).await, why)?;
    ensure!(status.code() == expected.code(), "{status} instead of {expected}");
    Ok((status, expected))
}

async fn a_registry_with_errors_holds_no_slot(kind: Kind) -> Result<()> {
    let node = Node::start(kind).await?;
    let images = node.push_many("apps", 6, TINY).await?;
    let agent = node.agent(&Settings::limit(1)).await?;
    let (direct, cri) = (node.runtime.cri().await?, agent.cri().await?);
    let faults = [
        (Fault::status(500), "500"),
        (Fault::status(503), "503"),
        (Fault::Status { code: 429, retry_after: Some(1) }, "429"),
        (Fault::status(403), "403"),
        (Fault::status(404), "not found"),
    ];
    for ((fault, word), image) in faults.into_iter().zip(&images) {
        let name = node.name(image);
        let rule = node.proxy.rule(Match::manifests().repo(&image.repo), fault);
        let (status, expected) = both_fail(&direct, &cri, &name, word).await?;
        ensure!(status.message() == expected.message(), "{status} instead of {expected}");
        ensure!(status.message().contains(word), "{status}");
        metric_is(&agent, "keelson_image_pulls_in_flight", 0.0).await?;
        // Another image is not delayed, and this one is pulled once the registry is healthy.
        node.proxy.remove(rule);
        cri.pull_image(&name).await?;
    }
    // Four at once for one slot: the three that fail free it for the last.
    let bad = node.proxy.rule(Match::manifests().repo("none"), Fault::status(500));
    let names = ["none:a", "none:b", "none:c"].map(|name| format!("{}/{name}", node.proxy.address()));
    let calls: Vec<_> = names.iter().map(|name| start_pull(&cri, Pull::new(name))).collect();
    cri.pull_image(&node.name(&images[5])).await?;
    for call in calls {
        failed(call.await?, "the registry answers 500")?;
    }
    node.proxy.remove(bad);
    idle(&agent).await
}

async fn a_registry_that_aborts_holds_no_slot(kind: Kind) -> Result<()> {
    let node = Node::start(kind).await?;
    let images = node.push_many("apps", 2, 3 * MIB).await?;
    let agent = node.agent(&Settings::limit(1)).await?;
    let cri = agent.cri().await?;
    let name = node.name(&images[0]);
    // No response at all: the runtime gives up, and its error reaches the caller.
    let broken = node.proxy.rule(Match::manifests().repo(&images[0].repo), Fault::ResetAfter(0));
    let direct = node.runtime.cri().await?;
    let (status, _) = both_fail(&direct, &cri, &name, "the connection breaks").await?;
    ensure!(status.message().contains(node.proxy.address()), "it names the registry: {status}");
    idle(&agent).await?;
    cri.pull_image(&node.name(&images[1])).await?;
    node.proxy.remove(broken);
    // Every response breaks within the layer: both runtimes resume, and the agent lets them.
    let broken = node.proxy.rule(Match::layers().repo(&images[0].repo), Fault::ResetAfter(5 * MIB / 4));
    cri.pull_image(&name).await?;
    node.proxy.remove(broken);
    let gets = node.proxy.records().gets(&images[0].layers[0].digest);
    ensure!(gets.iter().filter(|get| get.outcome == Outcome::Broken).count() >= 2, "{gets:?}");
    ensure!(node.proxy.records().full_fetches(&images[0].layers[0]) == 0, "{gets:?}");
    idle(&agent).await
}

async fn a_hanging_registry_holds_a_slot_only_until_the_stall_timeout(kind: Kind) -> Result<()> {
    let node = Node::start(kind).await?;
    let images = node.push_many("apps", 3, 6 * MIB).await?;
    let names: Vec<_> = images.iter().map(|image| node.name(image)).collect();
    let settings =
        Settings::limit(1).set("pulls.stall_timeout", "5s").set("pulls.progress_interval", "100ms");
    let agent = node.agent(&settings).await?;
    let cri = agent.cri().await?;
    // One before its manifest, one within its layer; both before the third.
    let mute = node.proxy.rule(Match::manifests().repo(&images[0].repo), Fault::Hang);
    let stalled = node.proxy.rule(Match::layers().repo(&images[1].repo), Fault::StallAfter(3 * MIB));
    let first = start_pull(&cri, Pull::new(&names[0]));
    until("the first asks for its manifest", || node.proxy.records().order() == [images[0].repo.clone()])
        .await?;
    let second = start_pull(&cri, Pull::new(&names[1]));
    metric_is(&agent, "keelson_image_pull_queue_depth", 1.0).await?;
    let third = start_pull(&cri, Pull::new(&names[2]));
    for call in [first, second] {
        let status = failed(call.await?, "the registry hangs")?;
        ensure!(status.code() == Code::DeadlineExceeded, "{status}");
        ensure!(status.message().contains(node.proxy.address()), "it names the registry: {status}");
        ensure!(status.message().contains("stall_timeout"), "it names the setting: {status}");
    }
    third.await?.context("the third, once a slot was free")?;
    idle(&agent).await?;

    // The bytes that the second had fetched are not fetched again.
    node.proxy.remove(mute);
    node.proxy.remove(stalled);
    cri.pull_image(&names[1]).await?;
    let gets = node.proxy.records().gets(&images[1].layers[0].digest);
    let from = gets.last().and_then(|get| get.range_start).context("the last GET has no Range")?;
    ensure!(from >= 2 * MIB, "it resumed at {from}: {gets:?}");
    cri.pull_image(&names[0]).await?;
    idle(&agent).await
}

async fn a_hanging_registry_does_not_delay_a_callers_deadline(kind: Kind) -> Result<()> {
    let node = Node::start(kind).await?;
    let images = node.push_many("apps", 2, TINY).await?;
    let agent = node.agent(&Settings::limit(1).set("pulls.cancel_grace", "0s")).await?;
    let cri = agent.cri().await?;
    let mute = node.proxy.rule(Match::manifests().repo(&images[0].repo), Fault::Hang);
    let pull = Pull::new(&node.name(&images[0])).timeout(std::time::Duration::from_secs(1));
    let status = failed(cri.pull(&pull).await, "its deadline passed")?;
    // Which of the two clocks is first, the client's or the agent's, is a matter of milliseconds.
    ensure!(matches!(status.code(), Code::DeadlineExceeded | Code::Cancelled), "{status}");
    cri.pull_image(&node.name(&images[1])).await?;
    idle(&agent).await?;
    node.proxy.remove(mute);
    Ok(())
}
