//! From no state to a complete one, and from disk to one.
//!
//! Owns: the measurement. In: a cluster with all objects. Out: rows of one table. Beside the agent, in the same run,
//! the minimum: a client that requests the same lists and discards them.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use http::Request;
use http_body_util::BodyExt as _;
use keelson_harness::agent::{Agent, Settings};
use kube::client::Body;

use super::raw::{Caller, Received};
use super::test_env::{Role, TestEnv, metric};
use crate::cost::Cpu;
use crate::quantile;

/// Starts of each kind; the sides take turns.
const TURNS: usize = 5;

const LISTS: [&str; 2] = [
    "/api/v1/services?labelSelector=!service.kubernetes.io/service-proxy-name&fieldSelector=spec.clusterIP!%3DNone\
     &resourceVersion=0",
    "/apis/discovery.k8s.io/v1/endpointslices?labelSelector=!service.kubernetes.io/headless&resourceVersion=0",
];

#[derive(Clone, Copy, Default)]
struct StartTimes {
    /// Time until a waiting caller has a complete state.
    full_state: Duration,
    /// Time until the state is reported as current.
    current: Duration,
    /// The agent's processor time until then.
    cpu: Duration,
    /// Part of the time for writing to disk.
    disk: Duration,
    /// The API server's processor time.
    api: Duration,
}

pub(super) fn head() {
    println!(
        "| start | services | full state at a waiting caller | current | processor time | of it on disk | API server |"
    );
    println!("|---|---|---|---|---|---|---|");
}

pub(super) async fn start(env: &TestEnv, services: usize) -> Result<()> {
    let (mut cold, mut warm, mut json, mut protobuf) = (vec![], vec![], vec![], vec![]);
    for _ in 0..TURNS {
        json.push(list(env, "application/json").await?);
        protobuf.push(list(env, "application/vnd.kubernetes.protobuf").await?);
        let mut agent = env.agent(Role::Companion, Settings::new())?;
        cold.push(one(env, &mut agent, services, false).await?);
        agent.terminate().await?;
        warm.push(one(env, &mut agent, services, true).await?);
        env.end(agent).await?;
    }
    row("cold", services, &cold);
    row("warm: the previous state is on disk", services, &warm);
    for (what, lists) in [("the lists alone, JSON", json), ("the lists alone, protobuf", protobuf)] {
        let bytes = lists.iter().map(|(_, bytes)| *bytes).max().unwrap_or_default();
        let took: Vec<_> = lists.into_iter().map(|(took, _)| took).collect();
        row(&format!("{what}, {:.1} MB", bytes as f64 / 1e6), services, &took);
    }
    Ok(())
}

/// One start of an agent, with a caller that waits for it.
async fn one(env: &TestEnv, agent: &mut Agent, services: usize, warm: bool) -> Result<StartTimes> {
    let api = env.cluster.api.pid().context("the API server runs")?;
    let (target, before, begun) = (agent.endpoints_target(), Cpu::of(api)?, Instant::now());
    let caller = tokio::spawn(async move {
        let caller = Caller::wait_for(&target).await?;
        let first = read_full_state(&caller, services, begun).await?;
        // Only Watch reports that a state from disk is current: for Next that is no change.
        if first.0.stale {
            caller.current().await?;
        }
        anyhow::Ok((first, begun.elapsed()))
    });
    agent.start_live().await?;
    let ((first, full_state), current) = caller.await.context("the caller panicked")??;
    ensure!(first.stale == warm, "{first:?}, warm: {warm}");
    let cpu = Cpu::of(agent.pid().context("it runs")?)?.since(Cpu::default());
    let disk =
        Duration::from_secs_f64(metric(agent, "keelson_endpoints_persist_duration_seconds_sum").await?);
    Ok(StartTimes { full_state, current, cpu, disk, api: Cpu::of(api)?.since(before) })
}

async fn read_full_state(caller: &Caller, services: usize, begun: Instant) -> Result<(Received, Duration)> {
    let (_, received) = caller.next(0, 0).await?;
    ensure!(received.services >= services, "{received:?} is not of {services} Services");
    Ok((received, begun.elapsed()))
}

/// Requests both lists at once, over a new client, and counts bytes.
async fn list(env: &TestEnv, accept: &'static str) -> Result<(StartTimes, usize)> {
    let api = env.cluster.api.pid().context("the API server runs")?;
    let client = env.cluster.admin.client();
    let (before, own, begun) = (Cpu::of(api)?, Cpu::own()?, Instant::now());
    let lists = LISTS.map(|path| {
        let client = client.clone();
        async move {
            let request = Request::get(path).header("accept", accept).body(Body::empty())?;
            let mut body = client.send(request).await?.into_body();
            let mut bytes = 0;
            while let Some(frame) = body.frame().await {
                bytes += frame?.data_ref().map_or(0, bytes::Bytes::len);
            }
            anyhow::Ok(bytes)
        }
    });
    let bytes: usize = futures_util::future::try_join_all(lists).await?.into_iter().sum();
    let full_state = begun.elapsed();
    let took = StartTimes {
        full_state,
        cpu: Cpu::own()?.since(own),
        api: Cpu::of(api)?.since(before),
        ..StartTimes::default()
    };
    Ok((took, bytes))
}

fn row(what: &str, services: usize, took: &[StartTimes]) {
    let median = |of: fn(&StartTimes) -> Duration| {
        let mut all: Vec<_> = took.iter().map(of).collect();
        all.sort_unstable();
        match quantile(&all, 0.5).unwrap_or_default() {
            Duration::ZERO => String::new(),
            time => format!("{:.2} s", time.as_secs_f64()),
        }
    };
    println!(
        "| {what} | {services} | {} | {} | {} | {} | {} |",
        median(|took| took.full_state),
        median(|took| took.current),
        median(|took| took.cpu),
        median(|took| took.disk),
        median(|took| took.api)
    );
}
