//! Memory: idle, and with ten thousand callers in the queue.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use keelson_harness::{
    agent::{Agent, Settings},
    containerd::Kind,
    cri::Cri,
    images::ImageSpec,
    node::Node,
    registry_proxy::{Fault, Match},
    util::eventually,
};

use super::figures::{self, Key, Measured};
use super::{Row, megabytes};

const CALLERS: usize = 10_000;
const CONNECTIONS: usize = 8;

fn row(what: String, agent: f64, target: &'static str) -> Row {
    Row { what, direct: String::new(), agent: format!("{agent:.1} MB"), ratio: None, target }
}

pub(super) async fn idle() -> Result<Row> {
    let node = Node::start(Kind::V2).await?;
    let agent = node.agent(&Settings::limit(3)).await?;
    let images = node.push(&[ImageSpec::single("bench/idle", 4096)]).await?;
    agent.cri().await?.pull_image(&node.name(&images[0])).await?;
    // After two probes of the runtime.
    tokio::time::sleep(Duration::from_secs(25)).await;
    let memory = megabytes(agent.pid().context("it runs")?)?;
    figures::record(&[Measured::alone(Key::IdleMemory, memory)])?;
    Ok(row("idle memory (VmRSS), after a pull".into(), memory, "20 MB"))
}

pub(super) async fn queued() -> Result<Vec<Row>> {
    let node = Node::start(Kind::V2).await?;
    let images = node.push(&[ImageSpec::single("bench/stalled", 4096)]).await?;
    node.proxy.rule(Match::any(), Fault::Hang);
    let agent = node.agent(&Settings::limit(1)).await?;
    let before = megabytes(agent.pid().context("it runs")?)?;
    let mut connections = Vec::new();
    for _ in 0..CONNECTIONS {
        connections.push(Cri::connect(&agent.socket()).await?);
    }
    let mut callers = tokio::task::JoinSet::new();
    for n in 0..CALLERS {
        let cri = connections[n % CONNECTIONS].clone();
        let name = format!("{}/bench/queued:{n}", node.proxy.address());
        callers.spawn(async move { cri.pull_image(&name).await });
    }
    eventually(Duration::from_secs(120), "all callers wait", || waiting(&agent)).await?;
    let full = megabytes(agent.pid().context("it runs")?)?;
    callers.abort_all();
    while callers.join_next().await.is_some() {}
    drop((connections, images));
    Ok(vec![
        row(format!("memory (VmRSS) with {CALLERS} queued callers of as many images"), full, ""),
        row("the same, a caller".into(), (full - before) * 1024.0 / CALLERS as f64, "").kilobytes(),
    ])
}

impl Row {
    fn kilobytes(mut self) -> Self {
        self.agent = self.agent.replace("MB", "kB");
        self
    }
}

async fn waiting(agent: &Agent) -> Result<()> {
    let metrics = agent.http_get("/metrics").await?.text();
    let callers = metrics.lines().find_map(|line| line.strip_prefix("keelson_image_pull_callers "));
    ensure!(callers == Some(CALLERS.to_string().as_str()), "{callers:?} callers wait");
    Ok(())
}
