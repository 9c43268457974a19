//! The limit: never exceeded, first come first served, measured at the registry.

use crate::common::{Pulls, TestEnv, all_succeed, begin, most_at_once, spans};
use anyhow::{Result, ensure};
use keelson_harness::agent::Settings;
use keelson_harness::containerd::Kind;
use keelson_harness::cri::Pull;
use keelson_harness::driver::Driver;
use keelson_harness::images::TINY;
use keelson_harness::registry_proxy::{Fault, Match};
use keelson_harness::util::{Seeded, until};
use keelson_harness::{on_both_runtimes, on_crio};
use rand::seq::SliceRandom as _;
use std::time::Duration;

on_both_runtimes!(
    case_01_limit_2_of_5_pulls_first_come_first_served,
    the_limit_holds_under_200_callers_of_60_images,
    without_a_limit_all_pulls_run_in_parallel,
);

on_crio!(
    case_01_limit_2_of_5_pulls_first_come_first_served,
    the_limit_holds_under_200_callers_of_60_images,
    without_a_limit_all_pulls_run_in_parallel,
);

async fn case_01_limit_2_of_5_pulls_first_come_first_served(kind: Kind) -> Result<()> {
    let env = TestEnv::start(kind, &Settings::limit(2)).await?;
    let images = env.node.push_many("fifo", 5, TINY).await?;
    let holds = env.hold_each(&images);
    let going = env.begin_in_order(&images).await?;
    let seen =
        env.wait_for_pulls("two run, three wait", |pulls| (pulls.running, pulls.queued) == (2, 3)).await?;
    for (position, image) in (1..).zip(&images[2..]) {
        let shown = seen.of_image(&env.node.name(image)).map(|pull| pull.position);
        ensure!(shown == Some(position), "{} is at {shown:?} instead of {position}: {seen:?}", image.repo);
    }
    env.wait_for_active(&images[..2]).await?;

    // Released one by one: only the next in line starts.
    for (n, hold) in holds.into_iter().enumerate() {
        env.node.proxy.remove(hold);
        env.wait_for_active(&images[(n + 1).min(5)..(n + 3).min(5)]).await?;
    }
    all_succeed(going, &images).await?;
    let wanted: Vec<_> = images.iter().map(|image| image.repo.clone()).collect();
    let mut order = env.records().order();
    // The first two have a slot each from the start: the runtime decides which of them it requests first.
    order[..2].sort_unstable();
    assert_eq!(order, wanted);
    assert_eq!(env.records().max_concurrent_repos(), 2);
    assert_eq!(most_at_once(&spans(&env.records().all())), 2);
    env.idle().await
}

/// Half an hour in the queue, scaled down: every timeout of the agent or the client expires several times while the
/// pull waits, and none of them applies to waiting for a slot.
#[tokio::test(flavor = "multi_thread")]
async fn case_02_a_long_wait_ends_in_success() -> Result<()> {
    let mut settings = Settings::limit(1).set("cri.hold_timeout", "500ms").set("pulls.stall_timeout", "0s");
    for name in ["cancel_grace", "resume_window", "reentry_window", "progress_interval"] {
        settings = settings.set(&format!("pulls.{name}"), "500ms");
    }
    let env = TestEnv::start(Kind::V2, &settings).await?;
    let images = env.node.push_many("long", 3, TINY).await?;
    let hold = env.hold(&images[0]);
    let mut going = env.begin_in_order(&images[..2]).await?;
    // The deadline of this client is for all calls but PullImage, as with the kubelet.
    let driver = Driver::new(&env.agent.endpoint())?;
    let third = env.node.name(&images[2]);
    let go = tokio::spawn(async move { driver.run(&["--timeout", "500ms", "pull", &third]).await });
    env.wait_for_callers(3).await?;

    tokio::time::sleep(Duration::from_secs(4)).await;
    env.wait_for_callers(3).await?;
    ensure!(env.records().order().len() == 1, "a queued pull was begun: {:?}", env.records().order());
    env.node.proxy.remove(hold);
    all_succeed(going.drain(..), &images).await?;
    let answer = go.await??.success()?;
    assert_eq!(answer["imageRef"], images[2].config.0.as_str());
    Ok(())
}

async fn the_limit_holds_under_200_callers_of_60_images(kind: Kind) -> Result<()> {
    const LIMIT: usize = 4;
    // More pulls at once than containerd 2 downloads by default.
    let env = TestEnv::start_with_many_downloads(kind, &Settings::limit(LIMIT as i64)).await?;
    let images = env.node.push_many("crowd", 60, TINY).await?;
    let mut connections = Vec::new();
    for _ in 0..8 {
        connections.push(env.agent.cri().await?);
    }
    let mut wanted: Vec<_> = (0..200).map(|n| n % images.len()).collect();
    wanted.shuffle(Seeded::new()?.rng());
    let hold = env.node.proxy.rule(Match::layers(), Fault::Hang);
    let mut going = Vec::new();
    for (n, which) in wanted.iter().enumerate() {
        let pull = Pull::new(&env.node.name(&images[*which]));
        going.push(begin(&connections[n % connections.len()], pull));
    }
    // Slots are assigned after the runtime has reported that the image is not present.
    let counts = |pulls: &Pulls| (pulls.running, pulls.queued, pulls.callers);
    env.wait_for_pulls("four of 60 run for 200 callers", |pulls| counts(pulls) == (4, 56, 200)).await?;
    until("four are at the registry", || env.records().active_repos().len() == LIMIT).await?;
    env.node.proxy.remove(hold);
    let asked: Vec<_> = wanted.iter().map(|which| images[*which].clone()).collect();
    all_succeed(going, &asked).await?;

    assert_eq!(env.records().max_concurrent_repos(), LIMIT);
    for image in &images {
        let fetched = env.records().full_fetches(&image.layers[0]);
        ensure!(fetched == 1, "the layer of {} was fetched {fetched} times", image.repo);
    }
    env.idle().await
}

async fn without_a_limit_all_pulls_run_in_parallel(kind: Kind) -> Result<()> {
    // The runtime's own limit would hold them back.
    let env = TestEnv::start_with_many_downloads(kind, &Settings::limit(0)).await?;
    let images = env.node.push_many("free", 20, TINY).await?;
    let holds = env.hold_each(&images);
    let going: Vec<_> = images.iter().map(|image| env.begin(image)).collect();
    env.wait_for_active(&images).await?;
    for hold in holds {
        env.node.proxy.remove(hold);
    }
    all_succeed(going, &images).await?;
    env.idle().await
}

#[tokio::test(flavor = "multi_thread")]
async fn serialized_pulls_run_one_after_the_other_in_order() -> Result<()> {
    let settings = Settings::new().set("pulls.serialize_image_pulls", true);
    let env = TestEnv::start(Kind::V2, &settings).await?;
    let images = env.node.push_many("serial", 12, TINY).await?;
    let hold = env.hold(&images[0]);
    let going = env.begin_in_order(&images).await?;
    env.wait_for_active(&images[..1]).await?;
    env.node.proxy.remove(hold);
    all_succeed(going, &images).await?;
    let wanted: Vec<_> = images.iter().map(|image| image.repo.clone()).collect();
    assert_eq!(env.records().order(), wanted);
    assert_eq!(most_at_once(&spans(&env.records().all())), 1);
    Ok(())
}
