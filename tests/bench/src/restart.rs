//! Restarts: from `kill -9` to serving again, and planned ones under load.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use keelson_harness::{
    agent::Settings,
    containerd::Kind,
    cri::Cri,
    images::ImageSpec,
    load::{Load, LoadReport, LoadResult},
    node::Node,
};

use super::figures::{self, Key, Measured};
use super::{Row, quantile};

const ROUNDS: usize = 15;

const RESTARTS: usize = 20;
/// Rate of a kubelet's client library meanwhile; `KEELSON_BENCH_CALLS_PER_SECOND` sets another rate, for a busy
/// machine.
const CALLS_PER_SECOND: u32 = 1000;
const CLIENTS: u32 = 4;
/// Duration of the load without restarts, on each side and in each turn.
const QUIET: Duration = Duration::from_secs(10);

/// Measures the time from the kill, after which the next agent is started at once, to the first response to the
/// kubelet's first call.
pub(super) async fn kill_to_serving() -> Result<Vec<Row>> {
    let node = Node::start(Kind::V2).await?;
    let images = node.push(&[ImageSpec::single("bench/restart", 4096)]).await?;
    let mut agent = node.agent(&Settings::limit(3)).await?;
    agent.cri().await?.pull_image(&node.name(&images[0])).await?;
    let mut took = Vec::new();
    for _ in 0..ROUNDS {
        let (since, socket) = (Instant::now(), agent.socket());
        agent.kill9()?;
        let (started, served) = tokio::join!(agent.start_live(), serves(&socket));
        started?;
        took.push(served.duration_since(since));
        agent.ready().await?;
    }
    took.sort_unstable();
    if let Some(median) = quantile(&took, 0.5) {
        figures::record(&[Measured::alone(Key::KillToServing, median.as_secs_f64() * 1e3)])?;
    }
    let show = |q| quantile(&took, q).map_or_else(String::new, |took| format!("{} ms", took.as_millis()));
    let row = |what: &str, q, target| Row {
        what: what.to_owned(),
        direct: String::new(),
        agent: show(q),
        ratio: None,
        target,
    };
    Ok(vec![
        row("kill -9 to serving, median of 15", 0.5, "200 ms"),
        row("kill -9 to serving, worst of 15", 1.0, ""),
    ])
}

/// When the kubelet's first call is answered.
async fn serves(socket: &Path) -> Instant {
    loop {
        if let Ok(cri) = Cri::connect(socket).await
            && cri.version().await.is_ok()
        {
            return Instant::now();
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

/// A thousand calls per second of the kinds that kubelets make, with their client library: to the runtime directly
/// without restarts, and through the agent during repeated restarts.
pub(super) async fn planned_under_load() -> Result<Vec<Row>> {
    let node = Node::start(Kind::V2).await?;
    let images = node.push(&[ImageSpec::single("bench/load", 4096)]).await?;
    let name = node.name(&images[0]);
    let mut agent = node.agent(&Settings::limit(3).set("agent.handover_timeout", "30s")).await?;
    agent.cri().await?.pull_image(&name).await?;
    let rate = match std::env::var("KEELSON_BENCH_CALLS_PER_SECOND") {
        Ok(rate) => rate.parse().context("KEELSON_BENCH_CALLS_PER_SECOND is not a number")?,
        Err(_) => CALLS_PER_SECOND,
    };
    let start = async |endpoint: &str| Load::start(endpoint, rate, CLIENTS, &name).await;

    let (mut direct, mut through) = (Vec::new(), Vec::new());
    for _ in 0..3 {
        for (endpoint, results) in [(node.runtime.endpoint(), &mut direct), (agent.endpoint(), &mut through)]
        {
            let load = start(&endpoint).await?;
            tokio::time::sleep(QUIET).await;
            let report = load.stop().await?;
            if let Some(failed) = report.failures.first() {
                let count = report.failures.len();
                eprintln!("{count} calls to {endpoint} failed without any restart, such as {failed:?}");
            }
            results.push(report.result);
        }
    }

    let load = start(&agent.endpoint()).await?;
    let mut replaced = Vec::new();
    for _ in 0..RESTARTS {
        // Killed on drop, and it may still hold calls.
        replaced.push(agent.replace().await?);
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    let restarted = load.stop().await?;
    restarted.failures.iter().take(10).for_each(|failed| eprintln!("{failed:?}"));
    if rate == CALLS_PER_SECOND {
        figures::record(&[Measured::alone(Key::FailedCalls, restarted.result.failed as f64)])?;
    }
    Ok(load_rows(rate, &direct, &through, &restarted))
}

fn load_rows(rate: u32, direct: &[LoadResult], through: &[LoadResult], restarted: &LoadReport) -> Vec<Row> {
    let median = |results: &[LoadResult], of: fn(&LoadResult) -> u64| {
        let mut sorted: Vec<_> = results.iter().map(of).collect();
        sorted.sort_unstable();
        quantile(&sorted, 0.5).unwrap_or_default()
    };
    let compare = |what: &str, of: fn(&LoadResult) -> u64| {
        let (direct, agent) = (median(direct, of), median(through, of));
        Row {
            what: format!("{rate} CRI calls a second, {what}"),
            direct: format!("{direct} us"),
            agent: format!("{agent} us"),
            ratio: Some(agent as f64 / direct as f64),
            target: "",
        }
    };
    let through = |what: &str, agent: String, target| Row {
        what: format!("the same through {RESTARTS} planned restarts, {what}"),
        direct: String::new(),
        agent,
        ratio: None,
        target,
    };
    let result = &restarted.result;
    vec![
        compare("median", |result| result.median_micros),
        compare("p99", |result| result.p99_micros),
        through("calls failed", format!("{} of {}", result.failed, result.calls), "0"),
        through("p99", format!("{} us", result.p99_micros), ""),
        through("longest call", format!("{} ms", result.longest_micros / 1000), ""),
    ]
}
