//! Registries that stop sending.

use crate::common::{TestEnv, all_succeed};
use anyhow::{Result, ensure};
use keelson_harness::agent::Settings;
use keelson_harness::containerd::Kind;
use keelson_harness::cri::failed;
use keelson_harness::images::{ImageSpec, LARGE, TINY};
use keelson_harness::on_both_runtimes;
use keelson_harness::registry_proxy::{Fault, Match};
use keelson_harness::util::until;
use tonic::Code;

on_both_runtimes!(case_17_a_stall_is_ended_and_received_content_is_kept);

async fn case_17_a_stall_is_ended_and_received_content_is_kept(kind: Kind) -> Result<()> {
    let env = TestEnv::start(kind, &Settings::limit(1).set("pulls.stall_timeout", "5s")).await?;
    let half = ImageSpec::new("stalls", &[LARGE / 3, LARGE / 3]).push(&env.node.registry).await?;
    let next = env.node.push_many("next", 2, TINY).await?;
    let hold = env.node.proxy.rule(Match::digest(&half.layers[1].digest), Fault::Hang);
    let stalls = env.begin(&half);
    env.wait_for_callers(1).await?;
    until("the first layer is sent, and of the second nothing", || {
        env.records().full_fetches(&half.layers[0]) == 1
            && env.records().gets(&half.layers[1].digest).len() == 1
    })
    .await?;
    let others = env.begin_in_order(&next).await?;

    let status = failed(stalls.await?, "the registry sends nothing")?;
    assert_eq!(status.code(), Code::DeadlineExceeded, "{status}");
    for part in ["no data", env.node.proxy.address(), "stall_timeout", "retained"] {
        ensure!(status.message().contains(part), "{part:?} is not in: {}", status.message());
    }
    // Its slot is used by those behind it, while the registry still sends nothing for it.
    all_succeed(others, &next).await?;
    assert_eq!(env.records().bytes_sent(&half.layers[1].digest), 0);
    env.idle().await?;

    env.node.proxy.remove(hold);
    assert_eq!(env.begin(&half).await??, half.config.0);
    for layer in &half.layers {
        let fetches = env.records().fetches(layer);
        ensure!(fetches < 1.01, "a layer was sent {fetches} times over");
    }
    Ok(())
}

/// A registry that does not even answer the manifest request: nothing is known of the image, and yet the pull must end.
#[tokio::test(flavor = "multi_thread")]
async fn a_stall_before_the_manifest_is_ended() -> Result<()> {
    let env = TestEnv::start(Kind::V2, &Settings::limit(1).set("pulls.stall_timeout", "4s")).await?;
    let images = env.node.push_many("silent", 2, TINY).await?;
    let _hold = env.node.proxy.rule(Match::manifests().repo(&images[0].repo), Fault::Hang);
    let mut going = env.begin_in_order(&images).await?;
    let status = failed(going.remove(0).await?, "the registry sends nothing")?;
    assert_eq!(status.code(), Code::DeadlineExceeded, "{status}");
    all_succeed(going, &images[1..]).await
}

/// A stall ends too if fetched content is not retained.
#[tokio::test(flavor = "multi_thread")]
async fn a_stall_is_ended_without_keep_progress_too() -> Result<()> {
    let settings = Settings::limit(1).set("pulls.stall_timeout", "4s").set("pulls.keep_progress", false);
    let env = TestEnv::start(Kind::V2, &settings).await?;
    let images = env.node.push_many("unkept", 2, TINY).await?;
    let _hold = env.hold(&images[0]);
    let mut going = env.begin_in_order(&images).await?;
    let status = failed(going.remove(0).await?, "the registry sends nothing")?;
    assert_eq!(status.code(), Code::DeadlineExceeded, "{status}");
    all_succeed(going, &images[1..]).await
}

/// Slow is not stalled: as long as bytes arrive, a pull may take many times the stall timeout.
#[tokio::test(flavor = "multi_thread")]
async fn a_slow_pull_is_not_a_stalled_one() -> Result<()> {
    let env = TestEnv::start(Kind::V2, &Settings::new().set("pulls.stall_timeout", "6s")).await?;
    let image = ImageSpec::single("slow", LARGE).push(&env.node.registry).await?;
    // At least nine seconds; containerd writes in steps of a MiB, so there is progress about every second.
    env.node.proxy.throttle(Some(1 << 20));
    assert_eq!(env.begin(&image).await??, image.config.0);
    assert_eq!(env.records().gets(&image.layers[0].digest).len(), 1);
    Ok(())
}
