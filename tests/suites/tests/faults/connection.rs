//! Case 20: a pull without a single byte for a long time.

use crate::common::{idle, start_pull};
use anyhow::{Context as _, Result, ensure};
use keelson_harness::agent::Settings;
use keelson_harness::containerd::Kind;
use keelson_harness::cri::Pull;
use keelson_harness::images::{ImageSpec, LARGE};
use keelson_harness::node::Node;
use keelson_harness::registry_proxy::{Fault, Match};
use keelson_harness::util::until;
use std::time::Duration;

/// gRPC servers in Go close a connection that pings too often; with pings every 10 s that takes 41 s.
const SILENCE: Duration = Duration::from_secs(65);

/// Both runtimes in one test, because it only waits.
#[tokio::test(flavor = "multi_thread")]
async fn case_20_a_silent_pull_keeps_its_connection() -> Result<()> {
    tokio::try_join!(silent(Kind::Debian16), silent(Kind::V2)).map(drop)
}

async fn silent(kind: Kind) -> Result<()> {
    let node = Node::start(kind).await?;
    let image = ImageSpec::single("large", LARGE).push(&node.registry).await?;
    let name = node.name(&image);
    let hold = node.proxy.rule(Match::layers(), Fault::StallAfter(0));
    let agent = node.agent(&Settings::limit(1)).await?;
    let cri = agent.cri().await?;
    let call = start_pull(&cri, Pull::new(&name));
    until("the layer is asked for", || !node.proxy.records().active_repos().is_empty()).await?;
    tokio::time::sleep(SILENCE).await;

    ensure!(!call.is_finished(), "the pull continues");
    ensure!(node.proxy.records().active_repos().len() == 1, "the runtime still waits for the layer");
    ensure!(cri.image_status(&name).await?.is_none(), "the same connection still serves");
    node.proxy.remove(hold);
    call.await?.context("the pull that had to wait")?;
    let gets = node.proxy.records().gets(&image.layers[0].digest);
    ensure!(gets.len() == 1, "it was asked for once only: {gets:?}");
    for log in [agent.log()?, node.runtime.log()?] {
        ensure!(!log.contains("too_many_pings") && !log.to_lowercase().contains("goaway"), "{log}");
    }
    idle(&agent).await
}
