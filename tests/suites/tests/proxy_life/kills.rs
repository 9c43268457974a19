//! Proxy, agent, or both killed at random moments while Services change: clients notice nothing, and in the end the
//! kernel has what a comparison from scratch would make, and what the manifests describe.

use crate::churn::Author;
use crate::model::{Service, pool};
use crate::rig::Stage;
use crate::traffic::Traffic;
use anyhow::{Context as _, Result, ensure};
use keelson_cluster::net::{Family, Transport};
use keelson_harness::util::Seeded;
use rand::RngExt as _;
use std::time::Duration;

const KILLS: usize = 36;
/// Changes per second.
const RATE: u32 = 50;
/// Maximum life of agent and proxy after their start, in milliseconds.
const LIFE: u64 = 900;

/// Services whose endpoints stay: with UDP, node port and external address, and with affinity.
fn staying() -> Vec<Service> {
    let mut all = Vec::new();
    for (index, family) in (0..).zip(Family::ALL) {
        let mut plain = Service::new(10 + index, family, &pool(family, 8080)[..5]);
        plain.transports.push(Transport::Udp);
        plain.node_port = Some(31_000 + index);
        plain.external.push(plain.own_external());
        let mut affine = Service::new(12 + index, family, &pool(family, 8081));
        affine.affinity = Some(600);
        all.extend([plain, affine]);
    }
    all
}

/// Lets one of them run for a moment, perhaps not until it has started.
async fn run_for_a_moment(stage: &mut Stage, random: &mut Seeded) -> Result<()> {
    let life = Duration::from_millis(random.rng().random_range(0..LIFE));
    let until = tokio::time::Instant::now() + life;
    if stage.agent.pid().is_none() && tokio::time::timeout_at(until, stage.agent.start_live()).await.is_err()
    {
        return Ok(());
    }
    if stage.proxy.pid().is_none() {
        let world = stage.world.clone();
        // On a timeout it is killed during its start.
        if let Ok(started) = tokio::time::timeout_at(until, stage.proxy.start_again(world.node())).await {
            started?;
        }
    }
    tokio::time::sleep_until(until).await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn thirty_six_kills_of_proxy_and_agent_leave_the_rules_of_a_fresh_start() -> Result<()> {
    let mut random = Seeded::new()?;
    let staying = staying();
    let mut stage = Stage::started(&staying).await?;
    let world = stage.world.clone();
    let traffic = Traffic::start(&world, &staying)?;
    traffic.wait_for_answers().await?;
    let nothing = (|| Ok(()), usize::MAX);
    let author = Author::start(&stage.manifests, random.rng().random(), RATE, nothing);

    let (mut proxies, mut agents) = (0, 0);
    for kill in 0..KILLS {
        run_for_a_moment(&mut stage, &mut random).await.with_context(|| stage.logs())?;
        let which = random.rng().random_range(0..4);
        if which < 3 {
            proxies += 1;
            if stage.proxy.pid().is_some() {
                stage.proxy.kill9()?;
            }
        }
        if which > 1 && stage.agent.pid().is_some() {
            agents += 1;
            let ended = stage.agent.ended()?;
            ensure!(ended.is_none(), "the agent ended by itself with {ended:?}");
            stage.agent.kill9()?;
        }
        traffic.check_healthy().with_context(|| format!("after kill {kill}; {}", stage.logs()))?;
        if kill % 6 == 5 {
            // Rules without a proxy still serve, and catch up when it is back.
            traffic.wait_for_answers().await.with_context(|| stage.logs())?;
        }
    }
    ensure!(proxies >= 10 && agents >= 5, "{proxies} kills of the proxy, {agents} of the agent");

    if stage.agent.pid().is_none() {
        stage.agent.start_live().await?;
    }
    if stage.proxy.pid().is_none() {
        stage.proxy.start_again(world.node()).await?;
    }
    let writes = author.writes();
    let mut last = author.stop()?;
    last.extend(staying);
    stage.wait_for_exact_services(&last).await?;
    traffic.finish().await.with_context(|| stage.logs())?;
    eprintln!(
        "{proxies} kills of the proxy, {agents} of the agent, {writes} changes, {} Services left",
        last.len()
    );
    for (log, who) in [(stage.proxy.log()?, "proxy"), (stage.agent.log()?, "agent")] {
        for word in ["panic", "damaged"] {
            let line = log.lines().find(|line| line.contains(word));
            ensure!(line.is_none(), "the {who}'s log contains {line:?}");
        }
    }
    Ok(())
}
