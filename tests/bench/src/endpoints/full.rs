//! A full state, to one caller and to a hundred.
//!
//! Owns: the measurement. In: an agent that serves all Services. Out: a table. Callers and agent share the machine: the
//! figures include the cost of reading for the callers.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use keelson_client::{
    BoxError, Client, Handlers, Options, Position, ServiceEndpoints, ServiceName, localnetv1::NodeInfo,
};
use keelson_harness::agent::{Agent, Settings};
use tokio::task::JoinSet;

use super::MANY;
use super::raw::{Caller, Received};
use super::test_env::{Role, TestEnv, serves};
use crate::cost::Cpu;
use crate::figures::{self, Key, Measured};
use crate::quantile;

/// Responses to one caller.
const ROUNDS: usize = 100;
const CALLERS: usize = 100;
const TURNS: usize = 3;

pub(super) async fn full(env: &TestEnv, services: usize) -> Result<()> {
    let mut agent = env.agent(Role::Companion, Settings::new().set("endpoints.watch", "always"))?;
    agent.start_live().await?;
    serves(&agent, services).await?;
    let target = agent.endpoints_target();
    let (_, state) = Caller::connect(&target).await?.next(0, 0).await?;
    println!(
        "| a state of {} Services, {:.1} MB | median | p99 | the agent's processor time | target |",
        state.services,
        state.bytes as f64 / 1e6
    );
    println!("|---|---|---|---|---|");
    let median = one(&agent, &target, &state).await?;
    if services == MANY {
        figures::record(&[Measured::alone(Key::FullState, median)])?;
    }
    many(&agent, &target, &state).await?;
    env.end(agent).await
}

/// One caller, repeatedly. Returns the median of `Next`, in milliseconds.
async fn one(agent: &Agent, target: &str, state: &Received) -> Result<f64> {
    let caller = Caller::connect(target).await?;
    let next = || async { check_same_state(&caller.next(0, 0).await?.1, state) };
    let one_caller = rounds(agent, ROUNDS, next).await?;
    row("`Next`, one caller", "20 ms", &one_caller);
    let connect = || async { check_same_state(&Caller::connect(target).await?.next(0, 0).await?.1, state) };
    row("the same on a new connection each", "", &rounds(agent, ROUNDS, connect).await?);
    let small = Caller::with_small_windows(target).await?;
    let next = || async { check_same_state(&small.next(0, 0).await?.1, state) };
    row("the same with HTTP/2's own windows of 64 KiB", "", &rounds(agent, ROUNDS, next).await?);
    let reset = || async { check_same_state(&caller.reset().await?, state) };
    row("`Watch`, from `reset` to `sync`", "", &rounds(agent, ROUNDS, reset).await?);
    let decoded = || async {
        let mut client = Client::new(options(target)?);
        let received = client.next().await.context("no task cancels it")?;
        let mut endpoints = 0;
        for service in received.services() {
            endpoints += service.decode()?.endpoints.len();
        }
        ensure!(endpoints >= state.services, "{endpoints} endpoints");
        Ok(())
    };
    row("`Next` by keelson-client, connected and decoded", "", &rounds(agent, ROUNDS, decoded).await?);
    let followed = || async {
        let mut client = Client::new(options(target)?);
        let mut counted = Counted { cancel: client.cancellation(), services: 0 };
        client.run(&mut counted).await;
        ensure!(counted.services == state.services, "{} Services", counted.services);
        Ok(())
    };
    row("`Watch` by keelson-client, connected and decoded", "", &rounds(agent, ROUNDS, followed).await?);
    Ok(one_caller.milliseconds(0.5))
}

/// Many callers at the same moment, each on a separate connection; measures the time until all have the state.
async fn many(agent: &Agent, target: &str, state: &Received) -> Result<()> {
    let mut callers = Vec::new();
    for _ in 0..CALLERS {
        callers.push(Caller::connect(target).await?);
    }
    for watch in [false, true] {
        let all = || async {
            let mut calls = JoinSet::new();
            for caller in callers.clone() {
                let state = *state;
                calls.spawn(async move {
                    let received = if watch { caller.reset().await? } else { caller.next(0, 0).await?.1 };
                    check_same_state(&received, &state)
                });
            }
            while let Some(called) = calls.join_next().await {
                called.context("a caller panicked")??;
            }
            Ok(())
        };
        let api = if watch { "Watch" } else { "Next" };
        let what = format!("`{api}`, {CALLERS} callers at once, until all have it");
        row(&what, "", &rounds(agent, TURNS, all).await?);
    }
    Ok(())
}

fn options(target: &str) -> Result<Options> {
    Ok(Options { target: target.parse().context("no target")?, ..Options::default() })
}

fn check_same_state(received: &Received, state: &Received) -> Result<()> {
    ensure!(received.services == state.services && !received.stale, "{received:?} is not {state:?}");
    Ok(())
}

/// Time of each round, sorted, and the agent's processor time per round.
struct Figures {
    times: Vec<Duration>,
    cpu: Duration,
}

impl Figures {
    fn milliseconds(&self, q: f64) -> f64 {
        quantile(&self.times, q).unwrap_or_default().as_secs_f64() * 1e3
    }
}

async fn rounds<F>(agent: &Agent, count: usize, round: impl Fn() -> F) -> Result<Figures>
where
    F: Future<Output = Result<()>>,
{
    let pid = agent.pid().context("it runs")?;
    // Work that is done only once is done now.
    round().await?;
    let before = Cpu::of(pid)?;
    let mut times = Vec::new();
    for _ in 0..count {
        let begun = Instant::now();
        round().await?;
        times.push(begun.elapsed());
    }
    let cpu = Cpu::of(pid)?.since(before) / u32::try_from(count)?;
    times.sort_unstable();
    Ok(Figures { times, cpu })
}

fn row(what: &str, target: &str, figures: &Figures) {
    let (median, p99) = (figures.milliseconds(0.5), figures.milliseconds(0.99));
    let p99 = if figures.times.len() < ROUNDS { String::new() } else { format!("{p99:.1} ms") };
    println!("| {what} | {median:.1} ms | {p99} | {:.1} ms | {target} |", figures.cpu.as_secs_f64() * 1e3);
}

/// A consumer that disconnects when the state is complete.
struct Counted {
    cancel: keelson_client::CancellationToken,
    services: usize,
}

impl Handlers for Counted {
    fn node(&mut self, _: NodeInfo) {}

    fn delete(&mut self, _: &ServiceName) {}

    fn set(&mut self, _: &ServiceName, _: ServiceEndpoints) {
        self.services += 1;
    }

    async fn sync(&mut self, _: &Position) -> Result<(), BoxError> {
        self.cancel.cancel();
        Ok(())
    }
}
