//! Two agents in a row: the upper one passes the limit to the lower one, which enforces it; and the fallback if the
//! runtime cannot.

use crate::common::{TestEnv, all_succeed, begin, most_at_once, spans, wait_for_pulls};
use anyhow::{Result, ensure};
use keelson_harness::agent::{Agent, Settings};
use keelson_harness::containerd::Kind;
use keelson_harness::cri::failed;
use keelson_harness::images::{ImageSpec, LARGE, TINY};
use keelson_harness::registry_proxy::{Fault, Match};
use keelson_harness::util::until;
use keelson_harness::{on_both_runtimes, on_crio};
use tonic::Code;

on_both_runtimes!(the_lower_agent_keeps_the_limit_of_the_upper, a_runtime_without_the_option_falls_back);

on_crio!(the_lower_agent_keeps_the_limit_of_the_upper, a_runtime_without_the_option_falls_back,);

/// The lower agent has no limit of its own and reports soon that the limit it was passed is reached.
fn lower() -> Settings {
    Settings::limit(0).set("pulls.reject_retries", 2).set("pulls.reject_retry_interval", "100ms")
}

fn upper() -> Settings {
    Settings::limit(2).set("pulls.enforce", "runtime")
}

async fn above(env: &TestEnv, settings: &Settings) -> Result<Agent> {
    Agent::start(&env.node.scratch, &env.agent.endpoint(), settings).await
}

async fn the_lower_agent_keeps_the_limit_of_the_upper(kind: Kind) -> Result<()> {
    let env = TestEnv::start(kind, &lower()).await?;
    let upper = above(&env, &upper()).await?;
    let seen =
        wait_for_pulls(&upper, "it knows its runtime", |pulls| pulls.limit.enforced_by == "runtime").await?;
    ensure!(seen.limit.enforce_note.is_empty(), "{seen:?}");

    let images = env.node.push_many("chain", 6, TINY).await?;
    let hold = env.node.proxy.rule(Match::layers(), Fault::Hang);
    let cri = upper.cri().await?;
    let going: Vec<_> = images.iter().map(|image| begin(&cri, env.pull_of(image))).collect();
    wait_for_pulls(&upper, "all six are asked for below", |pulls| pulls.callers == 6).await?;
    env.wait_for_pulls("two run below", |pulls| pulls.running == 2).await?;
    until("two are at the registry", || env.records().active_repos().len() == 2).await?;
    // Those that the lower agent refuses do not fail: the upper one waits for it.
    wait_for_pulls(&upper, "one was refused below and waits", |pulls| {
        pulls.pulls.iter().any(|pull| pull.state == "retrying")
    })
    .await?;
    assert_eq!(env.records().active_repos().len(), 2);
    ensure!(going.iter().all(|going| !going.is_finished()), "a caller in wait mode was refused");
    env.node.proxy.remove(hold);
    all_succeed(going, &images).await?;
    assert_eq!(most_at_once(&spans(&env.records().all())), 2);
    wait_for_pulls(&upper, "nothing is left", |pulls| pulls.pulls.is_empty()).await?;
    env.idle().await
}

#[tokio::test(flavor = "multi_thread")]
async fn in_reject_mode_the_error_of_the_lower_agent_is_passed_on() -> Result<()> {
    let env = TestEnv::start(Kind::V2, &lower()).await?;
    let settings = Settings::limit(1)
        .set("pulls.enforce", "runtime")
        .set("pulls.when_full", "reject")
        .set("pulls.reject_retries", 2)
        .set("pulls.reject_retry_interval", "100ms");
    let upper = above(&env, &settings).await?;
    wait_for_pulls(&upper, "it knows its runtime", |pulls| pulls.limit.enforced_by == "runtime").await?;
    let images = env.node.push_many("refused", 2, TINY).await?;
    let hold = env.hold(&images[0]);
    let cri = upper.cri().await?;
    let first = begin(&cri, env.pull_of(&images[0]));
    env.wait_for_active(&images[..1]).await?;
    let status = failed(cri.pull(&env.pull_of(&images[1])).await, "the limit is reached below")?;
    assert_eq!(status.code(), Code::ResourceExhausted, "{status}");
    ensure!(status.message().starts_with("TooManyPullingInParallel"), "{status}");
    env.node.proxy.remove(hold);
    all_succeed([first], &images).await?;
    all_succeed([begin(&cri, env.pull_of(&images[1]))], &images[1..]).await
}

async fn a_runtime_without_the_option_falls_back(kind: Kind) -> Result<()> {
    let env = TestEnv::start(kind, &upper()).await?;
    let seen = env.pulls().await?;
    ensure!(seen.limit.enforced_by == "agent" && !seen.limit.enforce_note.is_empty(), "{seen:?}");
    let images = env.node.push_many("alone", 5, TINY).await?;
    // Both slots are held until all five wait or run: otherwise the first ones are done before the last one comes.
    let holds = env.hold_each(&images[..2]);
    let going = env.begin_in_order(&images).await?;
    env.wait_for_active(&images[..2]).await?;
    for hold in holds {
        env.node.proxy.remove(hold);
    }
    all_succeed(going, &images).await?;
    let at_once = most_at_once(&spans(&env.records().all()));
    ensure!(at_once <= 2, "{at_once} at once");
    // Two run at once, so the runtime may swap neighbours, but not more.
    let order = env.records().order();
    for (wanted, image) in images.iter().enumerate() {
        let came = order.iter().position(|repo| *repo == image.repo);
        ensure!(
            came.is_some_and(|came| came.abs_diff(wanted) <= 1),
            "{} came as {came:?}: {order:?}",
            image.repo
        );
    }
    Ok(())
}

/// The lower agent counts the bytes: the upper one must not conclude that there are none.
#[tokio::test(flavor = "multi_thread")]
async fn a_long_pull_below_is_not_stalled_above() -> Result<()> {
    let env = TestEnv::start(Kind::V2, &lower()).await?;
    let settings = Settings::new().set("pulls.stall_timeout", "6s");
    let upper = above(&env, &settings).await?;
    let image = ImageSpec::single("long", LARGE).push(&env.node.registry).await?;
    // At least nine seconds.
    env.node.proxy.throttle(Some(1 << 20));
    assert_eq!(upper.cri().await?.pull(&env.pull_of(&image)).await?, image.config.0);
    assert_eq!(env.records().gets(&image.layers[0].digest).len(), 1);
    Ok(())
}
