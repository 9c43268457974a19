//! Ten thousand callers.

use crate::common::{Call, idle, metric_is, start_pull};
use crate::fake::{GatedRuntime, REFUSAL};
use anyhow::{Context as _, Result, ensure};
use keelson_harness::agent::{Agent, Settings};
use keelson_harness::containerd::Kind;
use keelson_harness::cri::{Cri, Pull};
use keelson_harness::node::Node;
use keelson_harness::process::resident_kib;
use keelson_harness::registry_proxy::{Fault, Match};
use keelson_harness::scratch::Scratch;
use tonic::Code;

const CALLERS: usize = 10_000;
const CONNECTIONS: usize = 20;

/// All callers at once over several connections, each for the image that `name` returns.
async fn crowd(agent: &Agent, name: impl Fn(usize) -> String) -> Result<Vec<Call<String>>> {
    let mut connections = Vec::new();
    for _ in 0..CONNECTIONS {
        connections.push(agent.cri().await?);
    }
    Ok((0..CALLERS).map(|n| start_pull(&connections[n % CONNECTIONS], Pull::new(&name(n)))).collect())
}

/// Calls that are not pulls, on an existing connection and on a new one.
async fn is_responsive(agent: &Agent, cri: &Cri) -> Result<()> {
    ensure!(cri.image_status("registry.example/not-there:v1").await?.is_none());
    cri.version().await?;
    agent.http_get("/livez").await?.success()?;
    agent.http_get("/readyz").await?.success()?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn ten_thousand_callers_behind_a_stalled_slot_are_answered() -> Result<()> {
    let scratch = Scratch::new()?;
    let runtime = GatedRuntime::start(&scratch)?;
    let mut agent = Agent::start(&scratch, &runtime.endpoint(), &Settings::limit(1)).await?;
    let pid = agent.pid().context("it runs")?;
    let before = resident_kib(pid)?;
    let good = |n: usize| n % 1000 == 7;
    let name = |n: usize| format!("registry.example/{}/{n}:v1", if good(n) { "good" } else { "bad" });
    let calls = crowd(&agent, name).await?;
    metric_is(&agent, "keelson_image_pull_callers", CALLERS as f64).await?;
    metric_is(&agent, "keelson_image_pulls_in_flight", 1.0).await?;
    metric_is(&agent, "keelson_image_pull_queue_depth", (CALLERS - 1) as f64).await?;
    ensure!(runtime.pulls() == 1, "one slot is one pull, not {}", runtime.pulls());
    let held = resident_kib(pid)?;
    eprintln!(
        "{:.1} MiB resident with {CALLERS} queued callers, {:.1} MiB before",
        held as f64 / 1024.0,
        before as f64 / 1024.0
    );
    let cri = agent.cri().await?;
    for _ in 0..20 {
        is_responsive(&agent, &cri).await?;
    }

    runtime.open();
    is_responsive(&agent, &cri).await?;
    // More slots meanwhile, to shorten the test.
    agent.configure(&Settings::limit(40))?;
    agent.sighup()?;
    for (n, call) in calls.into_iter().enumerate() {
        match call.await? {
            Ok(reference) => {
                ensure!(good(n) && reference == format!("id of {}", name(n)), "{n}: {reference}")
            }
            Err(status) => {
                let as_it_came = status.code() == Code::Unknown && status.message() == REFUSAL;
                ensure!(!good(n) && as_it_came, "{n}: {status}");
            }
        }
    }
    ensure!(runtime.pulls() == CALLERS, "each image was asked for once: {}", runtime.pulls());
    let most = runtime.max_running();
    ensure!((2..=40).contains(&most), "{most} ran at once, the limit was raised from 1 to 40");
    is_responsive(&agent, &cri).await?;
    idle(&agent).await?;
    ensure!(agent.terminate().await?.success());
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn ten_thousand_callers_of_one_image_cost_one_pull() -> Result<()> {
    let node = Node::start(Kind::V2).await?;
    let image = node.push_many("popular", 1, 1 << 20).await?.remove(0);
    let name = node.name(&image);
    let agent = node.agent(&Settings::limit(3)).await?;
    let hold = node.proxy.rule(Match::layers(), Fault::Hang);
    let calls = crowd(&agent, |_| name.clone()).await?;
    metric_is(&agent, "keelson_image_pull_callers", CALLERS as f64).await?;
    metric_is(&agent, "keelson_image_pulls_in_flight", 1.0).await?;
    metric_is(&agent, "keelson_image_pull_queue_depth", 0.0).await?;
    is_responsive(&agent, &agent.cri().await?).await?;
    node.proxy.remove(hold);
    let mut references = Vec::new();
    for call in calls {
        references.push(call.await??);
    }
    references.dedup();
    ensure!(references == [image.config.0.clone()], "all get the same answer: {references:?}");
    let gets = node.proxy.records().gets(&image.layers[0].digest);
    ensure!(gets.len() == 1, "the layer was fetched once: {gets:?}");
    let manifests = node.proxy.records().gets(&image.manifest).len();
    ensure!(manifests <= 1, "the manifest was fetched {manifests} times");
    metric_is(&agent, "keelson_image_pulls_total{result=\"succeeded\",reason=\"Pulled\"}", 1.0).await?;
    idle(&agent).await
}
