//! Forty small images at once, without a limit: the overhead of the agent.

use std::time::{Duration, Instant};

use anyhow::Result;
use keelson_harness::{agent::Settings, containerd::Kind, cri::Cri, images::ImageSpec, node::Node};
use tokio::task::JoinSet;

use super::figures::{self, Key, Measured};
use super::{Row, quantile};

const IMAGES: usize = 40;
/// Rounds per side; each pulls images that were never pulled before.
const ROUNDS: usize = 13;

pub(super) async fn small_images(kind: Kind) -> Result<Row> {
    let node = Node::start(kind).await?;
    let agent = node.agent(&Settings::new()).await?;
    let (direct, through) = (node.runtime.cri().await?, agent.cri().await?);
    let (mut by_direct, mut by_agent) = (Vec::new(), Vec::new());
    // The first round of each side warms up and does not count; the sides alternate in going first.
    let mut ratios = Vec::new();
    for round in 0..=ROUNDS {
        let (straight, around) = if round % 2 == 0 {
            let straight = pull(&node, &direct, "direct", round).await?;
            (straight, pull(&node, &through, "agent", round).await?)
        } else {
            let around = pull(&node, &through, "agent", round).await?;
            (pull(&node, &direct, "direct", round).await?, around)
        };
        if round > 0 {
            by_direct.push(straight);
            by_agent.push(around);
            ratios.push(around.as_secs_f64() / straight.as_secs_f64());
        }
    }
    ratios.sort_by(f64::total_cmp);
    by_direct.sort_unstable();
    by_agent.sort_unstable();
    let median = |sorted: &[Duration]| quantile(sorted, 0.5).unwrap_or_default();
    let (direct, agent) = (median(&by_direct), median(&by_agent));
    // Of the rounds, not of the medians: disk load in a round affects both sides of it.
    let ratio = quantile(&ratios, 0.5);
    if kind == Kind::V2 {
        let figure = Measured::beside(Key::SmallImages, agent.as_secs_f64(), direct.as_secs_f64());
        figures::record(&[figure.with_ratio(ratio)])?;
    }
    Ok(Row {
        what: format!("{IMAGES} small images, no limit, median of {ROUNDS}, {kind:?}"),
        direct: format!("{:.3} s", direct.as_secs_f64()),
        agent: format!("{:.3} s", agent.as_secs_f64()),
        ratio,
        target: "1.02",
    })
}

async fn pull(node: &Node, cri: &Cri, side: &str, round: usize) -> Result<Duration> {
    let specs: Vec<ImageSpec> =
        (0..IMAGES).map(|n| ImageSpec::single(&format!("bench/{side}/{round}/{n}"), 64 * 1024)).collect();
    // Directly from the registry: the proxy of the suites would be part of the measurement.
    let images = node.push(&specs).await?;
    let names: Vec<String> = images.iter().map(|image| image.at(node.registry.address())).collect();
    let since = Instant::now();
    let mut pulls = JoinSet::new();
    for name in names.clone() {
        let cri = cri.clone();
        pulls.spawn(async move { cri.pull_image(&name).await });
    }
    while let Some(pulled) = pulls.join_next().await {
        pulled??;
    }
    let took = since.elapsed();
    for name in names {
        cri.remove(&name).await?;
    }
    Ok(took)
}
