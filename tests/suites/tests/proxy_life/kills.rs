//! Proxy, agent, or both killed at random moments while Services change: clients notice nothing, and in the end the
//! kernel has what a comparison from scratch would make, and what the manifests describe.

use crate::churn::Author;
use crate::common::TestEnv;
use crate::model::{Service, plain_and_affine};
use crate::traffic::Traffic;
use anyhow::{Context as _, Result, ensure};
use keelson_cluster::net::Transport;
use keelson_harness::util::{Seeded, patience};
use rand::RngExt as _;
use std::time::Duration;

/// Changes per second.
const RATE: u32 = 50;
/// Maximum life of agent and proxy after their start, in milliseconds.
const LIFE: u64 = 900;

/// Services whose endpoints stay: with UDP, node port and external address, and with affinity.
pub(crate) fn staying() -> Vec<Service> {
    plain_and_affine(5, 600, |plain| {
        plain.transports.push(Transport::Udp);
        plain.expose();
        plain.external.push(plain.own_external());
    })
}

/// Lets one of them run for a moment, perhaps not until it has started.
async fn run_for_a_moment(env: &mut TestEnv, random: &mut Seeded) -> Result<()> {
    let life = Duration::from_millis(random.rng().random_range(0..LIFE)) * patience();
    let until = tokio::time::Instant::now() + life;
    if env.agent.pid().is_none() && tokio::time::timeout_at(until, env.agent.start_live()).await.is_err() {
        return Ok(());
    }
    if env.proxy.pid().is_none() {
        let world = env.world.clone();
        // On a timeout it is killed during its start.
        if let Ok(started) = tokio::time::timeout_at(until, env.proxy.start_again(world.node())).await {
            started?;
        }
    }
    tokio::time::sleep_until(until).await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn thirty_six_kills_of_proxy_and_agent_leave_the_rules_of_a_fresh_start() -> Result<()> {
    let staying = staying();
    let env = TestEnv::started(&staying).await?;
    let (proxies, agents) = survives_kills(env, staying, 36).await?;
    ensure!(proxies >= 10 && agents >= 5, "{proxies} kills of the proxy, {agents} of the agent");
    Ok(())
}

/// Kills proxy and agent this many times, under changes and with clients of the Services that stay. Returns how often each was
/// killed.
pub(crate) async fn survives_kills(
    mut env: TestEnv,
    staying: Vec<Service>,
    kills: usize,
) -> Result<(usize, usize)> {
    let mut random = Seeded::new()?;
    let world = env.world.clone();
    let traffic = Traffic::start(&world, &staying)?;
    traffic.wait_for_answers().await?;
    let nothing = (|| Ok(()), usize::MAX);
    let author = Author::start(&env.manifests, random.rng().random(), RATE, nothing);

    let (mut proxies, mut agents) = (0, 0);
    for kill in 0..kills {
        run_for_a_moment(&mut env, &mut random).await.with_context(|| env.logs())?;
        let which = random.rng().random_range(0..4);
        if which < 3 {
            proxies += 1;
            if env.proxy.pid().is_some() {
                env.proxy.kill9()?;
            }
        }
        if which > 1 && env.agent.pid().is_some() {
            agents += 1;
            let ended = env.agent.ended()?;
            ensure!(ended.is_none(), "the agent ended by itself with {ended:?}");
            env.agent.kill9()?;
        }
        traffic.check_healthy().with_context(|| format!("after kill {kill}; {}", env.logs()))?;
        if kill % 6 == 5 {
            // Rules without a proxy still serve, and catch up when it is back.
            traffic.wait_for_answers().await.with_context(|| env.logs())?;
        }
    }

    if env.agent.pid().is_none() {
        env.agent.start_live().await?;
    }
    if env.proxy.pid().is_none() {
        env.proxy.start_again(world.node()).await?;
    }
    let writes = author.writes();
    let mut last = author.stop()?;
    last.extend(staying);
    env.wait_for_exact_services(&last).await?;
    traffic.finish().await.with_context(|| env.logs())?;
    eprintln!(
        "{proxies} kills of the proxy, {agents} of the agent, {writes} changes, {} Services left",
        last.len()
    );
    for (log, who) in [(env.proxy.log()?, "proxy"), (env.agent.log()?, "agent")] {
        for word in ["panic", "damaged"] {
            let line = log.lines().find(|line| line.contains(word));
            ensure!(line.is_none(), "the {who}'s log contains {line:?}");
        }
    }
    Ok((proxies, agents))
}
