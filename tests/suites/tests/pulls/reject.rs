//! `when_full = "reject"`.

use crate::common::{TestEnv, all_succeed};
use anyhow::{Result, ensure};
use keelson_harness::agent::Settings;
use keelson_harness::containerd::Kind;
use keelson_harness::cri::failed;
use keelson_harness::driver::Driver;
use keelson_harness::images::TINY;
use keelson_harness::{on_both_runtimes, on_crio};
use std::time::{Duration, Instant};
use tonic::Code;

on_both_runtimes!(i19_a_pull_beyond_the_limit_waits_and_is_then_rejected);

on_crio!(i19_a_pull_beyond_the_limit_waits_and_is_then_rejected);

fn rejecting(retries: i64) -> Settings {
    Settings::limit(1)
        .set("pulls.when_full", "reject")
        .set("pulls.reject_retries", retries)
        .set("pulls.reject_retry_interval", "300ms")
}

/// I19: the error says that it waited, and was not tried.
async fn i19_a_pull_beyond_the_limit_waits_and_is_then_rejected(kind: Kind) -> Result<()> {
    let env = TestEnv::start(kind, &rejecting(2)).await?;
    let images = env.node.push_many("reject", 4, TINY).await?;
    let there = &images[3];
    env.begin(there).await??;
    let hold = env.hold(&images[0]);
    let first = env.begin(&images[0]);
    env.wait_for_active(&images[..1]).await?;

    let since = Instant::now();
    let status = failed(env.begin(&images[1]).await?, "the limit is reached")?;
    ensure!(since.elapsed() >= Duration::from_millis(600), "it did not wait: {:?}", since.elapsed());
    assert_eq!(status.code(), Code::ResourceExhausted, "{status}");
    let text = status.message();
    ensure!(text.starts_with("TooManyPullingInParallel"), "{text}");
    ensure!(
        text.contains("1 image pulls") && text.contains("limit is 1") && text.contains("no slot was free"),
        "{text}"
    );
    let driver = Driver::new(&env.agent.endpoint())?;
    let go = driver.run(&["pull", &env.node.name(&images[2])]).await?.failure()?;
    assert_eq!(go.code, "ResourceExhausted", "{}", go.text);
    ensure!(go.message.starts_with("TooManyPullingInParallel"), "{}", go.text);
    // A present image is not limited.
    assert_eq!(env.begin(there).await??, env.node.reference(there));

    env.node.proxy.remove(hold);
    all_succeed([first], &images).await?;
    ensure!(!env.records().order().iter().any(|repo| *repo == images[1].repo), "a rejected pull was begun");
    // With a free slot again, the pull succeeds.
    all_succeed([env.begin(&images[1])], &images[1..]).await?;
    env.idle().await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slot_freed_between_two_attempts_is_used() -> Result<()> {
    let env = TestEnv::start(Kind::V2, &rejecting(100)).await?;
    let images = env.node.push_many("taken", 3, TINY).await?;
    let hold = env.hold(&images[0]);
    let going = env.begin_in_order(&images).await?;
    env.wait_for_active(&images[..1]).await?;
    env.node.proxy.remove(hold);
    all_succeed(going, &images).await?;
    assert_eq!(env.records().max_concurrent_repos(), 1);
    Ok(())
}
