//! One slow registry must not hold every slot.

use crate::common::{TestEnv, all_succeed};
use anyhow::{Result, ensure};
use keelson_harness::agent::Settings;
use keelson_harness::containerd::Kind;
use keelson_harness::cri::Pull;
use keelson_harness::images::TINY;
use keelson_harness::registry_proxy::{Fault, Match, RegistryProxy};
use keelson_harness::util::until;

#[tokio::test(flavor = "multi_thread")]
async fn a_stalled_registry_holds_only_its_share_of_the_slots() -> Result<()> {
    let settings = Settings::limit(3)
        .set("pulls.per_registry_max_parallel_image_pulls", 2)
        .set("feature_gates.PerRegistryPullLimit", true);
    let env = TestEnv::start(Kind::V2, &settings).await?;
    let slow = RegistryProxy::start(env.node.registry.address()).await?;
    env.node.runtime.configure_registry(slow.address(), slow.address())?;
    let images = env.node.push_many("stalled", 4, TINY).await?;
    let well = env.node.push_many("well", 3, TINY).await?;

    let stalled = slow.rule(Match::layers(), Fault::Hang);
    let mut waiting = Vec::new();
    for (n, image) in (1..).zip(&images) {
        waiting.push(env.begin_with(Pull::new(&image.at(slow.address()))));
        env.wait_for_callers(n).await?;
    }
    until("the stalled registry has its share", || slow.records().active_repos().len() == 2).await?;
    let seen = env.pulls().await?;
    ensure!((seen.running, seen.queued) == (2, 2), "{seen:?}");

    // They came later, and pass those whose registry is at its limit.
    let hold = env.hold(&well[0]);
    let going = env.begin_in_order(&well).await?;
    env.wait_for_active(&well[..1]).await?;
    let seen = env.pulls().await?;
    ensure!((seen.running, seen.queued) == (3, 4), "three of three run: {seen:?}");
    env.node.proxy.remove(hold);
    all_succeed(going, &well).await?;
    ensure!(waiting.iter().all(|going| !going.is_finished()), "a stalled pull ended");
    slow.remove(stalled);
    all_succeed(waiting, &images).await?;
    assert_eq!(slow.records().max_concurrent_repos(), 2);
    assert_eq!(env.records().max_concurrent_repos(), 1, "one slot was left");
    env.idle().await
}
