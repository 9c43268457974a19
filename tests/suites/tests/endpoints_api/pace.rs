//! A thousand revisions per minute.

use crate::common::{TestEnv, plain};
use anyhow::{Context as _, Result, ensure};
use keelson_cluster::endpoints::Followers;
use std::time::{Duration, Instant};
use tokio::time::{MissedTickBehavior, interval};

/// Files that are replaced in turn.
const FILES: u64 = 5;
/// A third of a minute, at a thousand per minute.
const CHANGES: u64 = 333;
const EVERY: Duration = Duration::from_millis(60);

#[tokio::test(flavor = "multi_thread")]
async fn a_thousand_revisions_per_minute_arrive_in_order() -> Result<()> {
    let mut env = TestEnv::new()?;
    let put = |env: &TestEnv, change: u64| {
        let (name, address) =
            (format!("web-{}", change % FILES), format!("10.1.{}.{}", change / 250, change % 250));
        let objects = plain(&name, &format!("10.96.0.{}", 1 + change % FILES), &[&address]);
        env.manifests.put(&format!("{name}.json"), &objects)
    };
    for change in 0..FILES {
        put(&env, change)?;
    }
    env.agent.start_live().await?;
    env.wait_for_rev(1).await?;
    let followers = Followers::start(&env.target(), |full_state| {
        ensure!(full_state.services.len() as u64 == FILES, "{} Services", full_state.services.len());
        Ok(())
    })?;
    followers
        .until("the first state", |full_state| {
            ensure!(full_state.position.rev == 1, "{:?}", full_state.position);
            Ok(())
        })
        .await?;

    let (began, mut ticks) = (Instant::now(), interval(EVERY));
    ticks.set_missed_tick_behavior(MissedTickBehavior::Burst);
    for change in FILES..FILES + CHANGES {
        ticks.tick().await;
        put(&env, change)?;
    }
    let took = began.elapsed();

    // Both reach the state of the files.
    followers
        .until("the last state", |full_state| {
            for change in CHANGES..CHANGES + FILES {
                let service = full_state
                    .service(&format!("ns/web-{}", change % FILES))
                    .context("a Service is missing")?;
                let ips = service.endpoints[0].i_ps.as_ref().context("no address")?;
                ensure!(ips.v4 == [format!("10.1.{}.{}", change / 250, change % 250)], "{service:?}");
            }
            Ok(())
        })
        .await?;
    let (_, rev) = followers.pair().await?;
    followers.check_invariants()?;
    let state = env.state().await?;
    ensure!(state["rev"] == rev, "{state}");
    let (watch, next) = (followers.watch.seen(), followers.next.seen());
    for seen in [&watch, &next] {
        ensure!(seen.windows(2).all(|two| two[0].rev < two[1].rev), "{seen:?}");
        ensure!(
            seen.iter().all(|one| one.instance_id == seen[0].instance_id && one.stale.is_none()),
            "{seen:?}"
        );
    }
    let [watched, asked] =
        followers.both().map(|follower| follower.with_state(|full_state| full_state.services.clone()));
    ensure!(watched == asked, "the two APIs differ: {watched:?}\n{asked:?}");
    eprintln!(
        "{CHANGES} changes in {took:?}: {} revisions of {} events; Watch saw {}, Next {}",
        state["revisions"],
        state["events"],
        watch.len(),
        next.len()
    );
    // A revision is at least one change.
    let revisions = state["revisions"].as_u64().context("no revisions")?;
    ensure!(revisions == rev && rev <= 1 + CHANGES, "{state}");
    Ok(())
}
