//! `ImageStatus`, the most frequent call of a kubelet to the image service.

use std::time::{Duration, Instant};

use anyhow::Result;
use keelson_harness::{agent::Settings, containerd::Kind, cri::Cri, images::ImageSpec, node::Node};

use super::figures::{self, Key, Measured};
use super::{Row, quantile};

/// Calls per turn, and turns per side; the sides alternate.
const CALLS: usize = 250;
const TURNS: usize = 40;

pub(super) async fn image_status(kind: Kind) -> Result<Vec<Row>> {
    let node = Node::start(kind).await?;
    let images = node.push(&[ImageSpec::single("bench/status", 4096)]).await?;
    let agent = node.agent(&Settings::limit(3)).await?;
    let (direct, through) = (node.runtime.cri().await?, agent.cri().await?);
    let name = node.name(&images[0]);
    through.pull_image(&name).await?;
    let (mut by_direct, mut by_agent) = (Vec::new(), Vec::new());
    turn(&direct, &name, &mut Vec::new()).await?;
    turn(&through, &name, &mut Vec::new()).await?;
    for _ in 0..TURNS {
        turn(&direct, &name, &mut by_direct).await?;
        turn(&through, &name, &mut by_agent).await?;
    }
    by_direct.sort_unstable();
    by_agent.sort_unstable();
    if let (Kind::V2, Some(direct), Some(agent)) = (kind, quantile(&by_direct, 0.5), quantile(&by_agent, 0.5))
    {
        let micros = |time: Duration| time.as_secs_f64() * 1e6;
        figures::record(&[Measured::beside(Key::ImageStatus, micros(agent), micros(direct))])?;
    }
    let rows = [("median", 0.5, "1.5"), ("p99", 0.99, "")].into_iter().filter_map(|(label, q, target)| {
        let (direct, agent) = (quantile(&by_direct, q)?, quantile(&by_agent, q)?);
        Some(Row {
            what: format!("ImageStatus {label}, {kind:?}"),
            direct: micros(direct),
            agent: micros(agent),
            ratio: Some(agent.as_secs_f64() / direct.as_secs_f64()),
            target,
        })
    });
    Ok(rows.collect())
}

async fn turn(cri: &Cri, name: &str, into: &mut Vec<Duration>) -> Result<()> {
    for _ in 0..CALLS {
        let since = Instant::now();
        cri.image_status(name).await?;
        into.push(since.elapsed());
    }
    Ok(())
}

fn micros(duration: Duration) -> String {
    format!("{} us", duration.as_micros())
}
