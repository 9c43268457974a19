//! Differences on CRI-O: the namespace matters, and a pull that ends early leaves nothing.

use crate::common::{TestEnv, all_succeed, begin};
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

fn of_pod(env: &TestEnv, image: &Image, namespace: &str) -> Pull {
    env.pull_of(image).pod_in(namespace, "web", &format!("uid-in-{namespace}"))
}

/// I2: pulls of two namespaces are one on containerd, which ignores the namespace, and two on CRI-O.
async fn namespaces_share_where_the_runtime_ignores_them(kind: Kind) -> Result<()> {
    let env = TestEnv::start(kind, &Settings::new()).await?;
    let image = ImageSpec::single("shared", TINY).push(&env.node.registry).await?;
    let hold = env.hold(&image);
    let going = ["one", "two", "one"].map(|namespace| env.begin_with(of_pod(&env, &image, namespace)));
    let seen = env.wait_for_callers(3).await?;
    let expected = if kind == Kind::Crio { 2 } else { 1 };
    ensure!(seen.pulls.len() == expected, "{seen:?}");
    env.wait_for_active(slice::from_ref(&image)).await?;
    env.node.proxy.remove(hold);
    all_succeed(going, &[image.clone(), image.clone(), image.clone()]).await?;
    assert_eq!(env.runtime_calls(&env.node.name(&image))?, expected);
    env.idle().await
}

/// I2: an anonymous pull of a namespace whose signature policy rejects the image does not succeed with the pull of a
/// namespace that may have it.
async fn a_namespace_that_the_policy_rejects_is_refused_while_another_pulls(kind: Kind) -> Result<()> {
    let env = TestEnv::start(kind, &Settings::new()).await?;
    let policy = env.node.runtime.folder()?.join(POLICIES).join("locked.json");
    fs::write(&policy, r#"{"default": [{"type": "reject"}]}"#).context("cannot write the policy")?;
    let image = ImageSpec::single("signed", TINY).push(&env.node.registry).await?;
    let direct = env.node.runtime.cri().await?;
    let locked = of_pod(&env, &image, "locked");
    let expected = failed(direct.pull(&locked).await, "the policy rejects it")?;
    ensure!(expected.message().starts_with("SignatureValidationFailed"), "{expected}");

    let hold = env.hold(&image);
    let open = env.begin_with(of_pod(&env, &image, "open"));
    env.wait_for_active(slice::from_ref(&image)).await?;
    let reported = |status: &Status| (status.code(), status.message().to_owned());
    let status = failed(env.begin_with(locked.clone()).await?, "the policy rejects it")?;
    assert_eq!(reported(&status), reported(&expected));
    ensure!(!open.is_finished(), "the pull of the other namespace ended");
    env.node.proxy.remove(hold);
    all_succeed([open], slice::from_ref(&image)).await?;

    // The image is present now, and the policy still applies.
    let expected = failed(direct.pull(&locked).await, "the policy rejects it")?;
    let status = failed(env.begin_with(locked).await?, "the policy rejects it")?;
    assert_eq!(reported(&status), reported(&expected));
    env.idle().await
}

/// A pull that is held when 5 of its 9 MiB were sent.
async fn half_way(env: &TestEnv, name: &str) -> Result<(Image, RuleId)> {
    let image = ImageSpec::single(name, LARGE).push(&env.node.registry).await?;
    let hold = env.node.proxy.rule(Match::layers().repo(name), Fault::StallAfter(5 << 20));
    Ok((image, hold))
}

async fn sent_half(env: &TestEnv, image: &Image) -> Result<()> {
    let digest = &image.layers[0].digest;
    until("5 MiB are sent", || env.records().bytes_sent(digest) >= 5 << 20).await
}

/// Checks that the layer was requested twice, the second time from its beginning.
fn fetched_again(env: &TestEnv, image: &Image) -> Result<()> {
    let gets = env.records().gets(&image.layers[0].digest);
    ensure!(gets.len() == 2 && gets[0].outcome == Outcome::Aborted, "{gets:?}");
    ensure!(gets[1].range_start.unwrap_or(0) == 0 && gets[1].bytes == image.layers[0].size, "{gets:?}");
    Ok(())
}

/// CRI-O ends a pull whose caller cancels. It has no leases, so the next attempt begins from zero; and no content API,
/// so no progress is shown.
async fn a_cancelled_pull_stops_and_retains_nothing(kind: Kind) -> Result<()> {
    let env = TestEnv::start(kind, &Settings::new().set("pulls.cancel_grace", "0s")).await?;
    let (image, hold) = half_way(&env, "cancelled").await?;
    let caller = env.begin(&image);
    sent_half(&env, &image).await?;
    let seen = env.pulls().await?;
    let shown = seen.of_image(&env.node.name(&image)).context("it runs")?;
    ensure!(shown.state == "running" && shown.progress.is_none(), "{shown:?}");
    caller.abort();
    env.idle().await?;
    env.node.proxy.remove(hold);
    all_succeed([env.begin(&image)], slice::from_ref(&image)).await?;
    fetched_again(&env, &image)
}

/// CRI-O joins equal requests by itself, and fails all of them when the first is cancelled. Through the agent the
/// others continue.
async fn a_cancelled_call_does_not_end_shared_pulls(kind: Kind) -> Result<()> {
    let env = TestEnv::start(kind, &Settings::new().set("pulls.cancel_grace", "0s")).await?;
    let images = env.node.push_many("left", 2, TINY).await?;
    let holds = env.hold_each(&images);
    let [direct, through] = images.as_slice() else { unreachable!("two were pushed") };

    let cri = env.node.runtime.cri().await?;
    let first = begin(&cri, env.pull_of(direct));
    env.wait_for_active(slice::from_ref(direct)).await?;
    let second = begin(&cri, env.pull_of(direct));
    let name = env.node.name(direct);
    until("both have asked", || env.runtime_calls(&name).is_ok_and(|count| count == 2)).await?;
    first.abort();
    failed(second.await?, "CRI-O has cancelled what it shares")?;

    let first = env.begin(through);
    env.wait_for_active(slice::from_ref(through)).await?;
    let second = env.begin(through);
    env.wait_for_callers(2).await?;
    first.abort();
    env.wait_for_callers(1).await?;
    for hold in holds {
        env.node.proxy.remove(hold);
    }
    all_succeed([second], slice::from_ref(through)).await?;
    assert_eq!(env.records().gets(&through.layers[0].digest).len(), 1);
    Ok(())
}

async fn a_pull_continues_after_a_kill_of_the_agent(kind: Kind) -> Result<()> {
    let mut env = TestEnv::start(kind, &Settings::limit(1)).await?;
    let (image, hold) = half_way(&env, "orphan").await?;
    let running = env.begin(&image);
    sent_half(&env, &image).await?;

    env.agent.kill9()?;
    failed(running.await?, "the agent is dead")?;
    env.wait_for_active(&[]).await?;
    env.agent.start_again().await?;
    env.wait_for_pulls("it runs without a caller", |pulls| (pulls.running, pulls.callers) == (1, 0)).await?;
    env.node.proxy.remove(hold);
    let (direct, name) = (env.node.runtime.cri().await?, env.node.name(&image));
    eventually(PATIENCE, "the image arrives", || async {
        direct.image_status(&name).await?.context("it is not there").map(drop)
    })
    .await?;
    env.idle().await?;
    fetched_again(&env, &image)
}

async fn a_pull_continues_after_a_kill_of_the_runtime(kind: Kind) -> Result<()> {
    let mut env = TestEnv::start(kind, &Settings::limit(1)).await?;
    let (image, hold) = half_way(&env, "survivor").await?;
    let queued = env.node.push_many("behind", 1, TINY).await?.remove(0);
    let running = env.begin(&image);
    sent_half(&env, &image).await?;
    let waiting = env.begin(&queued);
    env.wait_for_callers(2).await?;

    env.node.runtime.kill9()?;
    env.wait_for_active(&[]).await?;
    env.node.proxy.remove(hold);
    env.node.runtime.start_again().await?;
    // Neither caller notices.
    all_succeed([running, waiting], &[image.clone(), queued]).await?;
    fetched_again(&env, &image)?;
    env.idle().await
}
