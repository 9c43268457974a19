//! I3: long operations that are no stall: waiting for the runtime's own limit, and unpacking.

use crate::common::{PhaseName, TestEnv, all_succeed};
use anyhow::{Context as _, Result, ensure};
use keelson_harness::agent::Settings;
use keelson_harness::containerd::{Kind, Options};
use keelson_harness::cri::failed;
use keelson_harness::images::{Image, ImageSpec, LayerSpec, TINY};
use keelson_harness::on_both_runtimes;
use keelson_harness::registry_proxy::{Fault, Match};
use keelson_harness::util::until;
use tonic::Code;

on_both_runtimes!(
    pulls_that_wait_for_the_runtimes_limit_are_not_stalled,
    a_stalled_pull_among_many_is_detected,
    a_long_unpack_is_no_stall,
    a_long_unpack_is_no_stall_where_layers_are_discarded,
    a_hung_unpack_ends_with_max_pull_time,
);

const MIB: u64 = 1 << 20;

/// I3: six pulls of three layers each through a slow registry, at the default limit of the runtime. The last ones wait
/// for several times the stall timeout before they get their first byte.
async fn pulls_that_wait_for_the_runtimes_limit_are_not_stalled(kind: Kind) -> Result<()> {
    let env = TestEnv::start(kind, &Settings::limit(6).set("pulls.stall_timeout", "4s")).await?;
    let specs: Vec<_> = (0..6).map(|n| ImageSpec::new(&format!("wait/{n}"), &[4 * MIB; 3])).collect();
    let images = env.node.push(&specs).await?;
    // Two seconds for each layer; containerd writes in steps of a MiB, so there is progress about twice a second.
    env.node.proxy.throttle(Some(2 * MIB));
    let going: Vec<_> = images.iter().map(|image| env.begin(image)).collect();
    all_succeed(going, &images).await?;
    for layer in images.iter().flat_map(|image| &image.layers) {
        ensure!(env.records().gets(&layer.digest).len() == 1, "it was fetched in one go");
    }
    Ok(())
}

/// I3: a layer stalls while others wait and are served: only that pull is cancelled, and its fetched content is kept.
async fn a_stalled_pull_among_many_is_detected(kind: Kind) -> Result<()> {
    let env = TestEnv::start(kind, &Settings::limit(6).set("pulls.stall_timeout", "4s")).await?;
    let specs: Vec<_> = (0..6).map(|n| ImageSpec::new(&format!("among/{n}"), &[4 * MIB, 2 * MIB])).collect();
    let images = env.node.push(&specs).await?;
    let layer = &images[0].layers[0];
    let stalls = env.node.proxy.rule(Match::digest(&layer.digest), Fault::StallAfter(3 * MIB));
    env.node.proxy.throttle(Some(2 * MIB));
    let mut going: Vec<_> = images.iter().map(|image| env.begin(image)).collect();
    let status = failed(going.remove(0).await?, "the registry stops in the middle")?;
    assert_eq!(status.code(), Code::DeadlineExceeded, "{status}");
    ensure!(status.message().contains("stall_timeout"), "{status}");
    all_succeed(going, &images[1..]).await?;
    // Otherwise the cancelled pull might still get the rest.
    env.idle().await?;
    env.node.proxy.remove(stalls);
    env.node.proxy.throttle(None);
    assert_eq!(env.begin(&images[0]).await??, images[0].config.0);
    let gets = env.records().gets(&layer.digest);
    let from = gets.last().and_then(|get| get.range_start);
    ensure!(from.is_some_and(|from| from >= MIB), "it resumed at {from:?}: {gets:?}");
    Ok(())
}

async fn a_long_unpack_is_no_stall(kind: Kind) -> Result<()> {
    unpack_longer_than_the_stall_timeout(kind, false).await
}

/// I3: the layer that both images share is unpacked and deleted when the second is pulled, and is not fetched again.
async fn a_long_unpack_is_no_stall_where_layers_are_discarded(kind: Kind) -> Result<()> {
    unpack_longer_than_the_stall_timeout(kind, true).await
}

async fn unpack_longer_than_the_stall_timeout(kind: Kind, discard: bool) -> Result<()> {
    let options = Options { unpack_gate: true, discard_unpacked_layers: discard, ..Options::default() };
    let env = TestEnv::start_with(kind, &options, &Settings::new().set("pulls.stall_timeout", "2s")).await?;
    let [first, second] = sharing_a_layer(&env).await?;
    assert_eq!(env.begin(&first).await??, first.config.0);
    env.node.runtime.close_unpack_gate()?;
    let going = env.begin(&second);
    let name = env.node.name(&second);
    env.wait_for_pulls("it has unpacked for three times the stall timeout", |pulls| {
        pulls
            .of_image(&name)
            .and_then(|pull| pull.progress)
            .is_some_and(|progress| progress.phase == PhaseName::Unpacking && progress.idle_ms > 6000)
    })
    .await?;
    let fetched = env.records().full_fetches(&second.layers[1]);
    assert_eq!(fetched, 1, "every byte of its own layer is there");
    env.node.runtime.open_unpack_gate()?;
    assert_eq!(going.await??, second.config.0);
    Ok(())
}

/// I3: an unpack that hangs ends with the timeout of pulls, if there is one, and the slot is free again.
async fn a_hung_unpack_ends_with_max_pull_time(kind: Kind) -> Result<()> {
    let options = Options { unpack_gate: true, ..Options::default() };
    let env =
        TestEnv::start_with(kind, &options, &Settings::limit(1).set("pulls.max_pull_time", "5s")).await?;
    let image = env.node.push_many("hung", 1, TINY).await?.pop().context("one image")?;
    env.node.runtime.close_unpack_gate()?;
    let going = env.begin(&image);
    until("its layer is there", || env.records().full_fetches(&image.layers[0]) == 1).await?;
    let status = failed(going.await?, "it cannot be unpacked")?;
    assert_eq!(status.code(), Code::DeadlineExceeded, "{status}");
    ensure!(status.message().contains("pulls.max_pull_time"), "{status}");
    env.idle().await?;
    env.node.runtime.open_unpack_gate()?;
    assert_eq!(env.begin(&image).await??, image.config.0);
    Ok(())
}

async fn sharing_a_layer(env: &TestEnv) -> Result<[Image; 2]> {
    let base = LayerSpec::random(MIB, 7);
    let spec = |repo: &str, seed| ImageSpec {
        layers: vec![base.clone(), LayerSpec::random(MIB, seed)],
        ..ImageSpec::new(repo, &[])
    };
    let images = env.node.push(&[spec("shared/a", 8), spec("shared/b", 9)]).await?;
    images.try_into().map_err(|_| anyhow::anyhow!("two images were pushed"))
}
