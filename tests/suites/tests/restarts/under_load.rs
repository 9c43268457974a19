//! Restarts while images are pulled.

use crate::{
    common::{RunningPull, TestEnv, all_succeed, begin},
    settings,
};
use anyhow::{Context as _, Result, ensure};
use keelson_harness::containerd::Kind;
use keelson_harness::cri::{Pull, failed};
use keelson_harness::images::{Image, TINY};
use keelson_harness::on_both_runtimes;
use keelson_harness::util::{PATIENCE, until};
use tonic::Code;

on_both_runtimes!(
    i8_queued_running_and_joined_pulls_survive_a_restart,
    i8_twenty_restarts_keep_every_place_in_the_queue,
    i8_pulls_of_a_killed_predecessor_continue_in_the_new_agent,
);

/// Checks that no layer of these images was sent twice, in whole or in part.
fn check_nothing_sent_twice(env: &TestEnv, images: &[Image]) -> Result<()> {
    for image in images {
        let fetches = env.records().max_fetches(image);
        ensure!(fetches == 1.0, "{} was sent {fetches} times", image.repo);
    }
    Ok(())
}

async fn order_is(env: &TestEnv, images: &[Image]) -> Result<()> {
    let mut queued = env.pulls().await?.pulls;
    queued.retain(|pull| pull.position > 0);
    queued.sort_by_key(|pull| pull.position);
    let queued: Vec<&str> = queued.iter().map(|pull| pull.image.as_str()).collect();
    let wanted: Vec<String> = images.iter().map(|image| env.node.name(image)).collect();
    ensure!(queued == wanted, "the queue is {queued:?}, not {wanted:?}");
    Ok(())
}

async fn i8_queued_running_and_joined_pulls_survive_a_restart(kind: Kind) -> Result<()> {
    let mut env = TestEnv::start(kind, &settings(2)).await?;
    let images = env.node.push_many("load", 6, TINY).await?;
    let holds = env.hold_each(&images);
    let going = env.begin_in_order(&images).await?;
    env.wait_for_active(&images[..2]).await?;

    let mut old = env.agent.replace().await?;
    // The same limit, for both processes together; callers of queued pulls were handed over.
    env.wait_for_pulls("the queue is as before", |pulls| {
        pulls.running == 2 && pulls.queued == 4 && pulls.callers == 4
    })
    .await?;
    env.wait_for_active(&images[..2]).await?;
    // A new caller joins a running pull in the old process, and a queued one in the new process.
    let cri = env.agent.cri().await?;
    let joined: Vec<RunningPull> =
        [&images[0], &images[5]].into_iter().map(|image| begin(&cri, env.pull_of(image))).collect();
    env.wait_for_callers(6).await?;

    order_is(&env, &images[2..]).await?;
    for hold in holds {
        env.node.proxy.remove(hold);
    }
    all_succeed(going, &images).await?;
    all_succeed(joined, &[images[0].clone(), images[5].clone()]).await?;
    ensure!(env.records().max_concurrent_repos() <= 2, "the limit was exceeded");
    check_nothing_sent_twice(&env, &images)?;
    ensure!(old.wait(PATIENCE).await?.success(), "the old process ends when its calls have");
    env.idle().await
}

async fn i8_twenty_restarts_keep_every_place_in_the_queue(kind: Kind) -> Result<()> {
    let mut env = TestEnv::start(kind, &settings(2)).await?;
    let images = env.node.push_many("row", 12, TINY).await?;
    let holds = env.hold_each(&images);
    let going = env.begin_in_order(&images).await?;
    env.wait_for_active(&images[..2]).await?;
    let mut old = Vec::new();
    for restart in 0..20 {
        old.push(env.agent.replace().await?);
        env.wait_for_pulls(&format!("all callers wait after restart {restart}"), |pulls| {
            pulls.running == 2 && pulls.queued == 10 && pulls.callers == 10
        })
        .await?;
    }
    order_is(&env, &images[2..]).await?;
    for hold in holds {
        env.node.proxy.remove(hold);
    }
    all_succeed(going, &images).await?;
    ensure!(env.records().max_concurrent_repos() <= 2, "the limit was exceeded");
    check_nothing_sent_twice(&env, &images)?;
    for mut old in old {
        ensure!(old.wait(PATIENCE).await?.success());
    }
    env.idle().await
}

async fn i8_pulls_of_a_killed_predecessor_continue_in_the_new_agent(kind: Kind) -> Result<()> {
    let mut env = TestEnv::start(kind, &settings(1)).await?;
    let images = env.node.push_many("killed", 2, TINY).await?;
    let holds = env.hold_each(&images);
    let mut going = env.begin_in_order(&images).await?;
    env.wait_for_active(&images[..1]).await?;
    let mut old = env.agent.replace().await?;
    let cri = env.agent.cri().await?;
    let joined = begin(&cri, env.pull_of(&images[0]));
    env.wait_for_pulls("a caller joined", |pulls| pulls.callers == 2).await?;

    old.kill9()?;
    for call in going.drain(..) {
        failed(call.await?, "its process is dead")?;
    }
    ensure!(!joined.is_finished(), "who joined in the new process waits on");
    for hold in holds {
        env.node.proxy.remove(hold);
    }
    all_succeed([joined], &images[..1]).await?;
    env.idle().await
}

#[tokio::test(flavor = "multi_thread")]
async fn i8_deadline_and_cancel_reach_the_new_agent() -> Result<()> {
    let mut env = TestEnv::start(Kind::V2, &settings(1)).await?;
    let images = env.node.push_many("leave", 3, TINY).await?;
    let _holds = env.hold_each(&images);
    let running = env.begin(&images[0]);
    // A pull that runs stays with the old process, and its caller, too.
    env.wait_for_active(&images[..1]).await?;
    let cancels = env.begin(&images[1]);
    env.wait_for_callers(2).await?;
    let patience = std::time::Duration::from_secs(20);
    let times_out = env.begin_with(Pull::new(&env.node.name(&images[2])).timeout(patience));
    env.wait_for_callers(3).await?;
    let _old = env.agent.replace().await?;
    env.wait_for_pulls("both wait in the new process", |pulls| pulls.callers == 2 && pulls.queued == 2)
        .await?;

    cancels.abort();
    env.wait_for_pulls("the one that cancelled left the queue", |pulls| {
        pulls.callers == 1 && pulls.queued == 1
    })
    .await?;
    let status = failed(times_out.await?, "its deadline passed")?;
    ensure!(matches!(status.code(), Code::DeadlineExceeded | Code::Cancelled), "{status}");
    env.wait_for_pulls("no caller waits", |pulls| pulls.callers == 0 && pulls.queued == 0).await?;
    running.abort();
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn i8_without_a_successor_the_agent_serves_until_the_handover_timeout() -> Result<()> {
    let mut env = TestEnv::start(
        Kind::V2,
        &keelson_harness::agent::Settings::limit(1).set("agent.handover_timeout", "8s"),
    )
    .await?;
    let images = env.node.push_many("alone", 1, TINY).await?;
    env.agent.sigterm()?;
    until("it waits for a successor", || {
        env.agent.log().is_ok_and(|log| log.contains("waiting for a successor"))
    })
    .await?;
    env.begin(&images[0]).await?.context("it serves as before")?;
    let ended = env.agent.end().await?;
    ensure!(ended.success() && !env.agent.socket().exists(), "{ended}");
    Ok(())
}
