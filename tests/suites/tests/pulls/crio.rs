//! Differences on CRI-O: the namespace matters, and a pull that ends early leaves nothing.

use crate::rig::{Rig, all_succeed, begin};
use anyhow::{Context as _, Result, ensure};
use keelson_harness::agent::Settings;
use keelson_harness::containerd::Kind;
use keelson_harness::cri::{Pull, failed};
use keelson_harness::crio::POLICIES;
use keelson_harness::images::{Image, ImageSpec, LARGE, TINY};
use keelson_harness::registry_proxy::{Fault, Match, Outcome, RuleId};
use keelson_harness::util::{PATIENCE, eventually, until};
use keelson_harness::{on_both_runtimes, on_crio};
use std::fs;
use std::slice;
use tonic::Status;

on_both_runtimes!(namespaces_share_where_the_runtime_ignores_them);

on_crio!(
    namespaces_share_where_the_runtime_ignores_them,
    a_namespace_that_the_policy_rejects_is_refused_while_another_pulls,
    a_cancelled_pull_stops_and_retains_nothing,
    a_cancelled_call_does_not_end_shared_pulls,
    a_pull_continues_after_a_kill_of_the_agent,
    a_pull_continues_after_a_kill_of_the_runtime,
);

fn of_pod(rig: &Rig, image: &Image, namespace: &str) -> Pull {
    rig.pull_of(image).pod_in(namespace, "web", &format!("uid-in-{namespace}"))
}

/// I2: pulls of two namespaces are one on containerd, which ignores the namespace, and two on CRI-O.
async fn namespaces_share_where_the_runtime_ignores_them(kind: Kind) -> Result<()> {
    let rig = Rig::start(kind, &Settings::new()).await?;
    let image = ImageSpec::single("shared", TINY).push(rig.node.registry.address(), None).await?;
    let hold = rig.hold(&image);
    let going = ["one", "two", "one"].map(|namespace| rig.begin_with(of_pod(&rig, &image, namespace)));
    let seen = rig.wait_for_callers(3).await?;
    let expected = if kind == Kind::Crio { 2 } else { 1 };
    ensure!(seen.pulls.len() == expected, "{seen:?}");
    rig.wait_for_active(slice::from_ref(&image)).await?;
    rig.node.proxy.remove(hold);
    all_succeed(going, &[image.clone(), image.clone(), image.clone()]).await?;
    assert_eq!(rig.runtime_calls(&rig.node.name(&image))?, expected);
    rig.idle().await
}

/// I2: an anonymous pull of a namespace whose signature policy rejects the image does not succeed with the pull of a
/// namespace that may have it.
async fn a_namespace_that_the_policy_rejects_is_refused_while_another_pulls(kind: Kind) -> Result<()> {
    let rig = Rig::start(kind, &Settings::new()).await?;
    let policy = rig.node.runtime.folder()?.join(POLICIES).join("locked.json");
    fs::write(&policy, r#"{"default": [{"type": "reject"}]}"#).context("cannot write the policy")?;
    let image = ImageSpec::single("signed", TINY).push(rig.node.registry.address(), None).await?;
    let direct = rig.node.runtime.cri().await?;
    let locked = of_pod(&rig, &image, "locked");
    let expected = failed(direct.pull(&locked).await, "the policy rejects it")?;
    ensure!(expected.message().starts_with("SignatureValidationFailed"), "{expected}");

    let hold = rig.hold(&image);
    let open = rig.begin_with(of_pod(&rig, &image, "open"));
    rig.wait_for_active(slice::from_ref(&image)).await?;
    let reported = |status: &Status| (status.code(), status.message().to_owned());
    let status = failed(rig.begin_with(locked.clone()).await?, "the policy rejects it")?;
    assert_eq!(reported(&status), reported(&expected));
    ensure!(!open.is_finished(), "the pull of the other namespace ended");
    rig.node.proxy.remove(hold);
    all_succeed([open], slice::from_ref(&image)).await?;

    // The image is present now, and the policy still applies.
    let expected = failed(direct.pull(&locked).await, "the policy rejects it")?;
    let status = failed(rig.begin_with(locked).await?, "the policy rejects it")?;
    assert_eq!(reported(&status), reported(&expected));
    rig.idle().await
}

/// A pull that is held when 5 of its 9 MiB were sent.
async fn half_way(rig: &Rig, name: &str) -> Result<(Image, RuleId)> {
    let image = ImageSpec::single(name, LARGE).push(rig.node.registry.address(), None).await?;
    let hold = rig.node.proxy.rule(Match::layers().repo(name), Fault::StallAfter(5 << 20));
    Ok((image, hold))
}

async fn sent_half(rig: &Rig, image: &Image) -> Result<()> {
    let digest = &image.layers[0].digest;
    until("5 MiB are sent", || rig.records().bytes_sent(digest) >= 5 << 20).await
}

/// Checks that the layer was requested twice, the second time from its beginning.
fn fetched_again(rig: &Rig, image: &Image) -> Result<()> {
    let gets = rig.records().gets(&image.layers[0].digest);
    ensure!(gets.len() == 2 && gets[0].outcome == Outcome::Aborted, "{gets:?}");
    ensure!(gets[1].range_start.unwrap_or(0) == 0 && gets[1].bytes == image.layers[0].size, "{gets:?}");
    Ok(())
}

/// CRI-O ends a pull whose caller cancels. It has no leases, so the next attempt begins from zero; and no content API,
/// so no progress is shown.
async fn a_cancelled_pull_stops_and_retains_nothing(kind: Kind) -> Result<()> {
    let rig = Rig::start(kind, &Settings::new().set("pulls.cancel_grace", "0s")).await?;
    let (image, hold) = half_way(&rig, "cancelled").await?;
    let caller = rig.begin(&image);
    sent_half(&rig, &image).await?;
    let seen = rig.pulls().await?;
    let shown = seen.of_image(&rig.node.name(&image)).context("it runs")?;
    ensure!(shown.state == "running" && shown.progress.is_none(), "{shown:?}");
    caller.abort();
    rig.idle().await?;
    rig.node.proxy.remove(hold);
    all_succeed([rig.begin(&image)], slice::from_ref(&image)).await?;
    fetched_again(&rig, &image)
}

/// CRI-O joins equal requests by itself, and fails all of them when the first is cancelled. Through the agent the
/// others continue.
async fn a_cancelled_call_does_not_end_shared_pulls(kind: Kind) -> Result<()> {
    let rig = Rig::start(kind, &Settings::new().set("pulls.cancel_grace", "0s")).await?;
    let images = rig.node.push_many("left", 2, TINY).await?;
    let holds = rig.hold_each(&images);
    let [direct, through] = images.as_slice() else { unreachable!("two were pushed") };

    let cri = rig.node.runtime.cri().await?;
    let first = begin(&cri, rig.pull_of(direct));
    rig.wait_for_active(slice::from_ref(direct)).await?;
    let second = begin(&cri, rig.pull_of(direct));
    let name = rig.node.name(direct);
    until("both have asked", || rig.runtime_calls(&name).is_ok_and(|count| count == 2)).await?;
    first.abort();
    failed(second.await?, "CRI-O has cancelled what it shares")?;

    let first = rig.begin(through);
    rig.wait_for_active(slice::from_ref(through)).await?;
    let second = rig.begin(through);
    rig.wait_for_callers(2).await?;
    first.abort();
    rig.wait_for_callers(1).await?;
    for hold in holds {
        rig.node.proxy.remove(hold);
    }
    all_succeed([second], slice::from_ref(through)).await?;
    assert_eq!(rig.records().gets(&through.layers[0].digest).len(), 1);
    Ok(())
}

async fn a_pull_continues_after_a_kill_of_the_agent(kind: Kind) -> Result<()> {
    let mut rig = Rig::start(kind, &Settings::limit(1)).await?;
    let (image, hold) = half_way(&rig, "orphan").await?;
    let running = rig.begin(&image);
    sent_half(&rig, &image).await?;

    rig.agent.kill9()?;
    failed(running.await?, "the agent is dead")?;
    rig.wait_for_active(&[]).await?;
    rig.agent.start_again().await?;
    rig.wait_for_pulls("it runs without a caller", |pulls| (pulls.running, pulls.callers) == (1, 0)).await?;
    rig.node.proxy.remove(hold);
    let (direct, name) = (rig.node.runtime.cri().await?, rig.node.name(&image));
    eventually(PATIENCE, "the image arrives", || async {
        direct.image_status(&name).await?.context("it is not there").map(drop)
    })
    .await?;
    rig.idle().await?;
    fetched_again(&rig, &image)
}

async fn a_pull_continues_after_a_kill_of_the_runtime(kind: Kind) -> Result<()> {
    let mut rig = Rig::start(kind, &Settings::limit(1)).await?;
    let (image, hold) = half_way(&rig, "survivor").await?;
    let queued = rig.node.push_many("behind", 1, TINY).await?.remove(0);
    let running = rig.begin(&image);
    sent_half(&rig, &image).await?;
    let waiting = rig.begin(&queued);
    rig.wait_for_callers(2).await?;

    rig.node.runtime.kill9()?;
    rig.wait_for_active(&[]).await?;
    rig.node.proxy.remove(hold);
    rig.node.runtime.start_again().await?;
    // Neither caller notices.
    all_succeed([running, waiting], &[image.clone(), queued]).await?;
    fetched_again(&rig, &image)?;
    rig.idle().await
}
