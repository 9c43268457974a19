//! The agent is killed at random moments while everything changes.

use crate::common::{Lane, TestEnv, run};
use anyhow::{Context as _, Result, ensure};
use keelson_cluster::endpoints::{RandomWriter, Seen};
use keelson_harness::util::Seeded;
use rand::RngExt as _;
use std::collections::BTreeSet;
use std::time::Duration;

const KILLS: usize = 50;
/// After this number of kills the writer pauses, and consumers must reach the expected state.
const ROUND: usize = 5;

#[test]
fn consumers_converge_through_fifty_kills() -> Result<()> {
    run(async {
        let mut random = Seeded::new()?;
        let mut env = TestEnv::new(Lane::Calm, "kills").await?;
        let mut followers = env.followers()?;
        // Without a state on disk, a start has a new instance ID and no reason for it.
        env.agent.start_live().await?;
        env.settled(&followers).await?;
        env.terminate().await?;
        let random_writer = RandomWriter::start(&env.writer, &env.name, random.rng().random(), 150);
        let mut at_rest = None;
        for kill in 1..=KILLS {
            env.agent.start_live().await?;
            if let Some((paused, pair)) = at_rest.take() {
                let after = env.settled(&followers).await?;
                ensure!(after == pair, "a kill at rest is no news: {pair:?} {after:?}");
                drop(paused);
            }
            tokio::time::sleep(Duration::from_millis(random.rng().random_range(0..400))).await;
            if kill.is_multiple_of(ROUND) {
                let paused = random_writer.pause().await?;
                at_rest = Some((paused, env.settled(&followers).await?));
            }
            if kill.is_multiple_of(3 * ROUND) {
                followers.restart().await?;
            }
            env.agent.kill9()?;
        }
        env.agent.start_live().await?;
        let (paused, pair) = at_rest.context("the last kill is at rest")?;
        let after = env.settled(&followers).await?;
        ensure!(after == pair, "a kill at rest is no news: {pair:?} {after:?}");
        let rev = after.1;
        drop(paused);
        let writes = random_writer.stop().await?;
        env.settled(&followers).await?;
        let log = env.agent.log()?;
        // Killed after a revision was served and before it was on disk; several times in a row with the same state on disk.
        let given = "the endpoints on disk get a new instance ID: ";
        let reasons: Vec<&str> = log.lines().filter_map(|line| Some(line.split_once(given)?.1)).collect();
        let renamed = reasons.len();
        eprintln!("{renamed} of {KILLS} kills led to a new instance");
        let other =
            reasons.iter().find(|reason| !reason.contains("the agent was killed before it had written it"));
        ensure!(other.is_none(), "no kill explains {other:?}");
        for follower in followers.both() {
            let seen = follower.seen();
            let instances: BTreeSet<u64> = seen.iter().map(|seen| seen.instance_id).collect();
            ensure!(instances.len() <= renamed + 1, "the store was never lost: {renamed} {instances:?}");
            eprintln!("{} states were seen, {} of them stale", seen.len(), stale(&seen));
        }
        eprintln!("{writes} writes led to {rev} revisions");
        // On a busy machine, most lives are too short for a revision: each round has at least one.
        let rounds = KILLS / ROUND;
        ensure!(
            writes > rounds && rev > rounds as u64,
            "too little happened: {writes} writes, {rev} revisions"
        );
        for word in ["state store damaged", "panic", "ERROR"] {
            let line = log.lines().find(|line| line.contains(word));
            ensure!(line.is_none(), "the agent's log contains {line:?}");
        }
        Ok(())
    })
}

fn stale(seen: &[Seen]) -> usize {
    seen.iter().filter(|seen| seen.stale.is_some()).count()
}
