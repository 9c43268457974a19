//! `when_full = "reject"`.

use crate::rig::{Rig, all_succeed};
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
    let rig = Rig::start(kind, &rejecting(2)).await?;
    let images = rig.node.push_many("reject", 4, TINY).await?;
    let there = &images[3];
    rig.begin(there).await??;
    let hold = rig.hold(&images[0]);
    let first = rig.begin(&images[0]);
    rig.wait_for_active(&images[..1]).await?;

    let since = Instant::now();
    let status = failed(rig.begin(&images[1]).await?, "the limit is reached")?;
    ensure!(since.elapsed() >= Duration::from_millis(600), "it did not wait: {:?}", since.elapsed());
    assert_eq!(status.code(), Code::ResourceExhausted, "{status}");
    let text = status.message();
    ensure!(text.starts_with("TooManyPullingInParallel"), "{text}");
    ensure!(
        text.contains("1 image pulls") && text.contains("limit is 1") && text.contains("no slot was free"),
        "{text}"
    );
    let driver = Driver::new(&rig.agent.endpoint())?;
    let go = driver.run(&["pull", &rig.node.name(&images[2])]).await?.failure()?;
    assert_eq!(go.code, "ResourceExhausted", "{}", go.text);
    ensure!(go.message.starts_with("TooManyPullingInParallel"), "{}", go.text);
    // A present image is not limited.
    assert_eq!(rig.begin(there).await??, rig.node.reference(there));

    rig.node.proxy.remove(hold);
    all_succeed([first], &images).await?;
    ensure!(!rig.records().order().iter().any(|repo| *repo == images[1].repo), "a rejected pull was begun");
    // With a free slot again, the pull succeeds.
    all_succeed([rig.begin(&images[1])], &images[1..]).await?;
    rig.idle().await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slot_freed_between_two_attempts_is_used() -> Result<()> {
    let rig = Rig::start(Kind::V2, &rejecting(100)).await?;
    let images = rig.node.push_many("taken", 3, TINY).await?;
    let hold = rig.hold(&images[0]);
    let going = rig.begin_in_order(&images).await?;
    rig.wait_for_active(&images[..1]).await?;
    rig.node.proxy.remove(hold);
    all_succeed(going, &images).await?;
    assert_eq!(rig.records().max_concurrent_repos(), 1);
    Ok(())
}
