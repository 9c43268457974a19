//! Memory of a large state.
//!
//! Owns: the measurement. In: agents of both roles, with service endpoints and without. Out: a table.

use std::fs;
use std::time::Duration;

use anyhow::{Context as _, Result};
use keelson_cluster::endpoints::{Kind, Writer, bulk, port};
use keelson_harness::agent::{Agent, Settings};
use rand::rngs::SmallRng;
use rand::{RngExt as _, SeedableRng as _};
use serde_json::json;

use super::MANY;
use super::test_env::{Role, TestEnv, metric, serves};
use crate::figures::{self, Key, Measured};

/// Time after which allocations of the start are over.
const SETTLE: Duration = Duration::from_secs(20);
/// Number of changes, and changes per second.
const CHANGES: usize = 2_000;
const A_SECOND: u32 = 100;

pub(super) async fn memory(env: &TestEnv, services: usize) -> Result<()> {
    println!(
        "| memory with {services} Services | VmRSS | of it RssAnon | PSS | most so far (VmHWM) | target |"
    );
    println!("|---|---|---|---|---|---|");
    for role in [Role::Companion, Role::Node] {
        let mut agent = env.agent(role, Settings::new().set("endpoints.source", "off"))?;
        agent.start_live().await?;
        tokio::time::sleep(SETTLE).await;
        row(role, "without service endpoints", "20 MB", &agent)?;
        env.end(agent).await?;

        let mut agent = env.agent(role, Settings::new().set("endpoints.watch", "always"))?;
        agent.start_live().await?;
        serves(&agent, services).await?;
        row(role, "as soon as all is served", "", &agent)?;
        tokio::time::sleep(SETTLE).await;
        let resident = row(role, "20 s later", "45 MB", &agent)?;
        if (role, services) == (Role::Companion, MANY) {
            figures::record(&[Measured::alone(Key::AgentMemory, resident)])?;
        }
        if role == Role::Companion {
            random_writer(env, &agent, services).await?;
            row(role, &format!("after {CHANGES} changes"), "45 MB", &agent)?;
        }
        agent.terminate().await?;
        agent.start_live().await?;
        serves(&agent, services).await?;
        tokio::time::sleep(SETTLE).await;
        row(role, "after a restart", "45 MB", &agent)?;
        env.end(agent).await?;
    }
    Ok(())
}

/// Changes slices at random, and waits until the agent has them.
async fn random_writer(env: &TestEnv, agent: &Agent, services: usize) -> Result<()> {
    let writer = Writer::new(&env.cluster.admin, bulk::NAMESPACE).await?;
    let mut random = SmallRng::seed_from_u64(1);
    let computed = "keelson_endpoints_services_computed_total";
    let before = metric(agent, computed).await?;
    let mut turn = tokio::time::interval(Duration::from_secs(1) / A_SECOND);
    for change in 0..CHANGES {
        turn.tick().await;
        let number = 1024 + u16::try_from(change % 60_000)?;
        let name = format!("{}-a", bulk::name(random.random_range(0..services)));
        writer.patch(Kind::Slice, &name, &json!({"ports": [port("http", number)]})).await?;
    }
    tokio::time::sleep(Duration::from_secs(2)).await;
    let computed = metric(agent, computed).await? - before;
    eprintln!("{CHANGES} changes were written, {computed} Services computed");
    Ok(())
}

/// Returns VmRSS.
fn row(role: Role, what: &str, target: &str, agent: &Agent) -> Result<f64> {
    let Memory { rss, anonymous, pss, most } = Memory::of(agent.pid().context("it runs")?)?;
    println!(
        "| `{}`, {what} | {rss:.1} MB | {anonymous:.1} MB | {pss:.1} MB | {most:.1} MB | {target} |",
        role.name()
    );
    Ok(rss)
}

/// Memory of a process, in MB of 2^20 bytes.
struct Memory {
    /// Resident.
    rss: f64,
    /// Resident and backed by no file.
    anonymous: f64,
    /// Resident, with a proportional share of shared pages.
    pss: f64,
    most: f64,
}

impl Memory {
    fn of(pid: u32) -> Result<Self> {
        let read = |file: &str| {
            fs::read_to_string(format!("/proc/{pid}/{file}"))
                .with_context(|| format!("no /proc/{pid}/{file}"))
        };
        let (status, rollup) = (read("status")?, read("smaps_rollup")?);
        Ok(Self {
            rss: value(&status, "VmRSS:")?,
            anonymous: value(&status, "RssAnon:")?,
            pss: value(&rollup, "Pss:")?,
            most: value(&status, "VmHWM:")?,
        })
    }
}

/// The value of a line, which is in kB.
fn value(text: &str, name: &str) -> Result<f64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name)).with_context(|| format!("no {name}"))?;
    let kilobytes: f64 = line.trim().trim_end_matches(" kB").parse().context("not a number of kB")?;
    Ok(kilobytes / 1024.0)
}
