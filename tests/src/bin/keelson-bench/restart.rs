//! From `kill -9` to serving again.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Result;
use keelson_tests::{agent::Settings, containerd::Kind, cri::Cri, images::ImageSpec, node::Node};

use super::{Row, quantile};

const ROUNDS: usize = 15;

/// The clock starts with the kill, the next agent is started at once, and it stops with the first
/// answer to the kubelet's first call.
pub(super) async fn kill_to_serving() -> Result<Vec<Row>> {
    let node = Node::start(Kind::V2).await?;
    let images = node.push(&[ImageSpec::single("bench/restart", 4096)], None).await?;
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
