//! Images that are present already.

use crate::rig::Rig;
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
    let rig = Rig::start(kind, &Settings::limit(1)).await?;
    let images = rig.node.push_many("full", 4, TINY).await?;
    let there = &images[0];
    rig.begin(there).await??;
    let holds = rig.hold_each(&images[1..]);
    let going = rig.begin_in_order(&images[1..]).await?;
    rig.wait_for_active(&images[1..2]).await?;

    // Every slot is held, and two wait: both kinds of client get their response.
    assert_eq!(rig.cri.pull(&rig.pull_of(there).pod("web", "uid-1")).await?, rig.node.reference(there));
    let driver = Driver::new(&rig.agent.endpoint())?;
    let answer = driver.run(&["pull", &rig.node.name(there)]).await?.success()?;
    assert_eq!(answer["imageRef"], rig.node.reference(there));
    let seen = rig.pulls().await?;
    ensure!((seen.running, seen.queued, seen.callers) == (1, 2, 3), "{seen:?}");
    assert_eq!(rig.records().full_fetches(&there.layers[0]), 1);
    for hold in holds {
        rig.node.proxy.remove(hold);
    }
    crate::rig::all_succeed(going, &images[1..]).await
}

async fn case_05_a_moved_tag_is_counted(kind: Kind) -> Result<()> {
    let rig = Rig::start(kind, &Settings::limit(1)).await?;
    let spec = ImageSpec::single("moved", TINY);
    let before = spec.push(rig.node.registry.address(), None).await?;
    assert_eq!(rig.begin(&before).await??, rig.node.reference(&before));
    let after = ImageSpec { layers: vec![LayerSpec::random(LARGE / 3, 4711)], ..spec };
    let after = after.push(rig.node.registry.address(), None).await?;
    ensure!(
        after.config != before.config && rig.node.name(&after) == rig.node.name(&before),
        "it did not move"
    );

    let stalled = ImageSpec::single("stalled", TINY).push(rig.node.registry.address(), None).await?;
    let hold = rig.hold(&stalled);
    let first = rig.begin(&stalled);
    rig.wait_for_active(std::slice::from_ref(&stalled)).await?;

    // It looks present, turns out to be a download, and has to wait for its slot like any other.
    let hold_moved = rig.hold(&after);
    let name = rig.node.name(&after);
    let moved = rig.begin(&after);
    rig.wait_for_pulls("it runs, as a present image", |pulls| pulls.state(&name) == Some("running_present"))
        .await?;
    rig.wait_for_pulls("it waits for a slot", |pulls| pulls.state(&name) == Some("queued")).await?;
    rig.node.proxy.remove(hold_moved);
    rig.wait_for_active(std::slice::from_ref(&stalled)).await?;
    ensure!(!moved.is_finished(), "it ended without a slot");
    rig.node.proxy.remove(hold);
    assert_eq!(first.await??, rig.node.reference(&stalled));
    assert_eq!(moved.await??, rig.node.reference(&after));
    assert_eq!(rig.records().full_fetches(&after.layers[0]), 1);
    rig.idle().await
}

/// I13: no slot is in use, and the pull of a present image takes none: another image gets the only slot meanwhile.
async fn i13_a_present_image_is_not_counted_on_an_idle_node(kind: Kind) -> Result<()> {
    let rig = Rig::start(kind, &Settings::limit(1)).await?;
    let images = rig.node.push_many("idle", 2, TINY).await?;
    let [there, other] = images.as_slice() else { unreachable!("two were pushed") };
    rig.begin(there).await??;
    rig.idle().await?;
    let asks_registry = rig.node.proxy.rule(Match::manifests().repo(&there.repo), Fault::Hang);
    let name = rig.node.name(there);
    let going = rig.begin(there);
    let seen = rig
        .wait_for_pulls("it runs outside the limit", |pulls| pulls.state(&name) == Some("running_present"))
        .await?;
    ensure!((seen.running, seen.queued) == (0, 0), "{seen:?}");
    assert_eq!(rig.begin(other).await??, rig.node.reference(other));
    ensure!(!going.is_finished(), "it ended without its registry");
    rig.node.proxy.remove(asks_registry);
    assert_eq!(going.await??, rig.node.reference(there));
    assert_eq!(rig.records().full_fetches(&there.layers[0]), 1);
    rig.idle().await
}

/// I13: the readings of `pulls.progress_interval` are too late to detect that a tag has moved.
async fn i13_a_moved_tag_is_detected_within_a_progress_interval(kind: Kind) -> Result<()> {
    let rig = Rig::start(kind, &Settings::limit(1).set("pulls.progress_interval", "1m")).await?;
    let spec = ImageSpec::single("moving", TINY);
    let before = spec.push(rig.node.registry.address(), None).await?;
    assert_eq!(rig.begin(&before).await??, before.config.0);
    let after = ImageSpec { layers: vec![LayerSpec::random(LARGE / 3, 815)], ..spec };
    let after = after.push(rig.node.registry.address(), None).await?;
    let hold = rig.hold(&after);
    let name = rig.node.name(&after);

    // Alone, it takes the free slot.
    let moved = rig.begin(&after);
    let seen = rig.wait_for_pulls("it is counted", |pulls| pulls.state(&name) == Some("running")).await?;
    ensure!((seen.running, seen.queued) == (1, 0), "{seen:?}");
    rig.node.proxy.remove(hold);
    assert_eq!(moved.await??, after.config.0);
    assert_eq!(rig.records().full_fetches(&after.layers[0]), 1);
    rig.idle().await
}
