//! Callers that cancel: they lose their place; the last one to leave a running pull ends it, after a grace period.

use crate::common::{TestEnv, all_succeed, begin};
use anyhow::{Context as _, Result, ensure};
use keelson_harness::agent::Settings;
use keelson_harness::containerd::Kind;
use keelson_harness::cri::failed;
use keelson_harness::driver::Driver;
use keelson_harness::images::{Image, ImageSpec, LARGE, TINY};
use keelson_harness::leases::{collect_garbage, leases};
use keelson_harness::registry_proxy::{self, Fault, Match, Outcome, Seen};
use keelson_harness::util::{PATIENCE, eventually, until};
use keelson_harness::{on_both_runtimes, on_crio};
use std::time::Duration;
use tonic::Code;

on_both_runtimes!(
    case_07_a_killed_caller_leaves_nothing_behind,
    case_08_without_keep_progress_a_cancelled_pull_restarts_from_zero,
    case_09_with_a_lease_a_cancelled_pull_resumes,
    the_last_cancelled_caller_ends_the_pull_unless_one_returns,
);

on_crio!(
    case_07_a_killed_caller_leaves_nothing_behind,
    the_last_cancelled_caller_ends_the_pull_unless_one_returns,
);

async fn case_07_a_killed_caller_leaves_nothing_behind(kind: Kind) -> Result<()> {
    let env = TestEnv::start(kind, &Settings::limit(3).set("pulls.cancel_grace", "3s")).await?;
    let images = env.node.push_many("killed", 13, TINY).await?;
    let after = env.node.push_many("after", 3, TINY).await?;
    let hold = env.node.proxy.rule(Match::layers(), Fault::Hang);
    let driver = Driver::new(&env.agent.endpoint())?;
    let names: Vec<_> = images.iter().map(|image| env.node.name(image)).collect();
    let caller = tokio::spawn(async move {
        let mut args = vec!["pulls", "--clients", "2"];
        args.extend(names.iter().map(String::as_str));
        driver.run(&args).await
    });
    env.wait_for_pulls("3 run and 10 wait", |pulls| {
        (pulls.running, pulls.queued, pulls.callers) == (3, 10, 13)
    })
    .await?;
    until("three are at the registry", || env.records().active_repos().len() == 3).await?;

    // Dropped with the task, the process gets SIGKILL.
    caller.abort();
    let left =
        env.wait_for_pulls("the queue is empty", |pulls| pulls.queued == 0 && pulls.callers == 0).await?;
    ensure!(left.pulls.iter().all(|pull| pull.state == "abandoned"), "{left:?}");
    // After the grace period the three are cancelled at the runtime too.
    env.idle().await?;
    let layers: Vec<_> =
        env.records().all().into_iter().filter(|seen| seen.kind == registry_proxy::Kind::Layer).collect();
    ensure!(layers.iter().all(|seen| seen.outcome == Outcome::Aborted), "{layers:?}");
    assert_eq!(env.records().order().len(), 3, "one that was queued came to the registry");

    // All three slots are free again, and no more.
    let going: Vec<_> = after.iter().map(|image| env.begin(image)).collect();
    env.wait_for_active(&after).await?;
    env.node.proxy.remove(hold);
    all_succeed(going, &after).await
}

/// Cancels the pull of a large image when 5 of its 9 MiB were sent, and pulls it again.
async fn cancel_and_pull_again(
    kind: Kind,
    settings: &Settings,
    gone: bool,
) -> Result<(TestEnv, Image, Vec<Seen>)> {
    let env = TestEnv::start(kind, settings).await?;
    let image = ImageSpec::single("cancelled", LARGE).push(&env.node.registry).await?;
    let layer = image.layers[0].clone();
    let hold = env.node.proxy.rule(Match::layers(), Fault::StallAfter(5 << 20));
    let caller = env.begin(&image);
    until("5 MiB are sent", || env.records().bytes_sent(&layer.digest) == 5 << 20).await?;
    until("4 MiB are written", || env.node.runtime.ingested() >= 4 << 20).await?;
    caller.abort();
    env.idle().await?;
    assert_eq!(env.records().gets(&layer.digest).len(), 1);
    if gone {
        until("the runtime has discarded what it had", || env.node.runtime.ingested() == 0).await?;
    } else {
        // The runtime deletes now what it would delete soon.
        collect_garbage(&env.node.runtime).await?;
        ensure!(
            env.node.runtime.ingested() >= 4 << 20,
            "only {} bytes are left",
            env.node.runtime.ingested()
        );
    }
    env.node.proxy.remove(hold);
    assert_eq!(env.begin(&image).await??, image.config.0);
    let gets = env.records().gets(&layer.digest);
    ensure!(gets.len() == 2 && gets[0].outcome == Outcome::Aborted, "{gets:?}");
    Ok((env, image, gets))
}

async fn case_08_without_keep_progress_a_cancelled_pull_restarts_from_zero(kind: Kind) -> Result<()> {
    let settings = Settings::new().set("pulls.keep_progress", false).set("pulls.cancel_grace", "0s");
    let (_rig, image, gets) = cancel_and_pull_again(kind, &settings, true).await?;
    assert_eq!(gets[1].range_start.unwrap_or(0), 0);
    assert_eq!(gets[1].bytes, image.layers[0].size);
    Ok(())
}

async fn case_09_with_a_lease_a_cancelled_pull_resumes(kind: Kind) -> Result<()> {
    let settings = Settings::new().set("pulls.cancel_grace", "0s");
    let (env, image, gets) = cancel_and_pull_again(kind, &settings, false).await?;
    let from = gets[1].range_start.context("the second GET has no Range")?;
    ensure!(from >= 4 << 20, "it begins at {from}");
    assert_eq!(gets[1].bytes, image.layers[0].size - from);
    assert_eq!(env.records().full_fetches(&image.layers[0]), 0);
    // After the success, nothing needs to be kept any more.
    eventually(PATIENCE, "no lease of the agent is left", || async {
        let leases = leases(&env.node.runtime).await?;
        ensure!(!leases.iter().any(|lease| lease.id.starts_with("keelson-")), "{leases:?}");
        Ok(())
    })
    .await
}

async fn the_last_cancelled_caller_ends_the_pull_unless_one_returns(kind: Kind) -> Result<()> {
    let env = TestEnv::start(kind, &Settings::new().set("pulls.cancel_grace", "10m")).await?;
    let image = ImageSpec::single("left", TINY).push(&env.node.registry).await?;
    let name = env.node.name(&image);
    let hold = env.hold(&image);
    let (first, second) = (env.begin(&image), begin(&env.agent.cri().await?, env.pull_of(&image)));
    env.wait_for_callers(2).await?;
    env.wait_for_active(std::slice::from_ref(&image)).await?;
    first.abort();
    let seen = env.wait_for_callers(1).await?;
    ensure!(seen.state(&name) == Some("running"), "{seen:?}");
    second.abort();
    env.wait_for_pulls("no caller waits for it", |pulls| pulls.state(&name) == Some("abandoned")).await?;
    let third = env.begin(&image);
    env.wait_for_pulls("it is wanted again", |pulls| {
        pulls.state(&name) == Some("running") && pulls.callers == 1
    })
    .await?;
    env.node.proxy.remove(hold);
    assert_eq!(third.await??, env.node.reference(&image));
    let gets = env.records().gets(&image.layers[0].digest);
    ensure!(
        gets.len() == 1 && gets[0].outcome == Outcome::Complete,
        "it was not one pull all along: {gets:?}"
    );
    assert_eq!(env.runtime_calls(&name)?, 1);
    Ok(())
}

/// A deadline applies in the queue and while running, the place is freed, and others are not affected.
#[tokio::test(flavor = "multi_thread")]
async fn a_deadline_is_obeyed_in_the_queue_and_while_running() -> Result<()> {
    let env = TestEnv::start(Kind::V2, &Settings::limit(1).set("pulls.cancel_grace", "0s")).await?;
    let images = env.node.push_many("late", 4, TINY).await?;
    let hold = env.hold(&images[0]);
    let first = env.begin(&images[0]);
    env.wait_for_active(&images[..1]).await?;

    let short = Duration::from_millis(700);
    let queued = env.begin_with(env.pull_of(&images[1]).timeout(short));
    let driver = Driver::new(&env.agent.endpoint())?;
    let go = driver.run(&["pull", "--timeout", "700ms", &env.node.name(&images[2])]).await?.failure()?;
    assert_eq!(go.code, "DeadlineExceeded", "{}", go.text);
    let status = failed(queued.await?, "its deadline has passed")?;
    // Client and agent have the same deadline; the first one reports it in its own way.
    ensure!(matches!(status.code(), Code::DeadlineExceeded | Code::Cancelled), "{status}");
    let seen =
        env.wait_for_pulls("the queue is empty", |pulls| pulls.queued == 0 && pulls.callers == 1).await?;
    ensure!(seen.running == 1, "{seen:?}");
    env.node.proxy.remove(hold);
    all_succeed([first], &images).await?;
    assert_eq!(env.records().order().len(), 1, "a pull came to the registry whose caller had left");

    let _hold = env.hold(&images[3]);
    let running = env.begin_with(env.pull_of(&images[3]).timeout(short));
    let status = failed(running.await?, "its deadline has passed")?;
    ensure!(matches!(status.code(), Code::DeadlineExceeded | Code::Cancelled), "{status}");
    env.idle().await
}
