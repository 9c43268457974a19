//! Images that are present already.

use crate::common::TestEnv;
use anyhow::{Result, ensure};
use keelson_harness::agent::Settings;
use keelson_harness::containerd::Kind;
use keelson_harness::driver::Driver;
use keelson_harness::images::{ImageSpec, LARGE, LayerSpec, TINY};
use keelson_harness::registry_proxy::{Fault, Match};
use keelson_harness::{on_both_runtimes, on_crio};

on_both_runtimes!(
    case_05_a_present_image_passes_a_full_queue,
    case_05_a_moved_tag_is_counted,
    i13_a_present_image_is_not_counted_on_an_idle_node,
    i13_a_moved_tag_is_detected_within_a_progress_interval
);

on_crio!(
    case_05_a_present_image_passes_a_full_queue,
    case_05_a_moved_tag_is_counted,
    i13_a_present_image_is_not_counted_on_an_idle_node
);

async fn case_05_a_present_image_passes_a_full_queue(kind: Kind) -> Result<()> {
    let env = TestEnv::start(kind, &Settings::limit(1)).await?;
    let images = env.node.push_many("full", 4, TINY).await?;
    let there = &images[0];
    env.begin(there).await??;
    let holds = env.hold_each(&images[1..]);
    let going = env.begin_in_order(&images[1..]).await?;
    env.wait_for_active(&images[1..2]).await?;

    // Every slot is held, and two wait: both kinds of client get their response.
    assert_eq!(env.cri.pull(&env.pull_of(there).pod("web", "uid-1")).await?, env.node.reference(there));
    let driver = Driver::new(&env.agent.endpoint())?;
    let answer = driver.run(&["pull", &env.node.name(there)]).await?.success()?;
    assert_eq!(answer["imageRef"], env.node.reference(there));
    let seen = env.pulls().await?;
    ensure!((seen.running, seen.queued, seen.callers) == (1, 2, 3), "{seen:?}");
    assert_eq!(env.records().full_fetches(&there.layers[0]), 1);
    for hold in holds {
        env.node.proxy.remove(hold);
    }
    crate::common::all_succeed(going, &images[1..]).await
}

async fn case_05_a_moved_tag_is_counted(kind: Kind) -> Result<()> {
    let env = TestEnv::start(kind, &Settings::limit(1)).await?;
    let spec = ImageSpec::single("moved", TINY);
    let before = spec.push(&env.node.registry).await?;
    assert_eq!(env.begin(&before).await??, env.node.reference(&before));
    let after = ImageSpec { layers: vec![LayerSpec::random(LARGE / 3, 4711)], ..spec };
    let after = after.push(&env.node.registry).await?;
    ensure!(
        after.config != before.config && env.node.name(&after) == env.node.name(&before),
        "it did not move"
    );

    let stalled = ImageSpec::single("stalled", TINY).push(&env.node.registry).await?;
    let hold = env.hold(&stalled);
    let first = env.begin(&stalled);
    env.wait_for_active(std::slice::from_ref(&stalled)).await?;

    // It looks present, turns out to be a download, and has to wait for its slot like any other.
    let hold_moved = env.hold(&after);
    let name = env.node.name(&after);
    let moved = env.begin(&after);
    env.wait_for_pulls("it runs, as a present image", |pulls| pulls.state(&name) == Some("running_present"))
        .await?;
    env.wait_for_pulls("it waits for a slot", |pulls| pulls.state(&name) == Some("queued")).await?;
    env.node.proxy.remove(hold_moved);
    env.wait_for_active(std::slice::from_ref(&stalled)).await?;
    ensure!(!moved.is_finished(), "it ended without a slot");
    env.node.proxy.remove(hold);
    assert_eq!(first.await??, env.node.reference(&stalled));
    assert_eq!(moved.await??, env.node.reference(&after));
    assert_eq!(env.records().full_fetches(&after.layers[0]), 1);
    env.idle().await
}

/// I13: no slot is in use, and the pull of a present image takes none: another image gets the only slot meanwhile.
async fn i13_a_present_image_is_not_counted_on_an_idle_node(kind: Kind) -> Result<()> {
    let env = TestEnv::start(kind, &Settings::limit(1)).await?;
    let images = env.node.push_many("idle", 2, TINY).await?;
    let [there, other] = images.as_slice() else { unreachable!("two were pushed") };
    env.begin(there).await??;
    env.idle().await?;
    let asks_registry = env.node.proxy.rule(Match::manifests().repo(&there.repo), Fault::Hang);
    let name = env.node.name(there);
    let going = env.begin(there);
    let seen = env
        .wait_for_pulls("it runs outside the limit", |pulls| pulls.state(&name) == Some("running_present"))
        .await?;
    ensure!((seen.running, seen.queued) == (0, 0), "{seen:?}");
    assert_eq!(env.begin(other).await??, env.node.reference(other));
    ensure!(!going.is_finished(), "it ended without its registry");
    env.node.proxy.remove(asks_registry);
    assert_eq!(going.await??, env.node.reference(there));
    assert_eq!(env.records().full_fetches(&there.layers[0]), 1);
    env.idle().await
}

/// I13: the readings of `pulls.progress_interval` are too late to detect that a tag has moved.
async fn i13_a_moved_tag_is_detected_within_a_progress_interval(kind: Kind) -> Result<()> {
    let env = TestEnv::start(kind, &Settings::limit(1).set("pulls.progress_interval", "1m")).await?;
    let spec = ImageSpec::single("moving", TINY);
    let before = spec.push(&env.node.registry).await?;
    assert_eq!(env.begin(&before).await??, before.config.0);
    let after = ImageSpec { layers: vec![LayerSpec::random(LARGE / 3, 815)], ..spec };
    let after = after.push(&env.node.registry).await?;
    let hold = env.hold(&after);
    let name = env.node.name(&after);

    // Alone, it takes the free slot.
    let moved = env.begin(&after);
    let seen = env.wait_for_pulls("it is counted", |pulls| pulls.state(&name) == Some("running")).await?;
    ensure!((seen.running, seen.queued) == (1, 0), "{seen:?}");
    env.node.proxy.remove(hold);
    assert_eq!(moved.await??, after.config.0);
    assert_eq!(env.records().full_fetches(&after.layers[0]), 1);
    env.idle().await
}
