//! A node whose agent is stopped for good: the calls that go through the agent fail, others still work.

use crate::common::run;
use crate::test_env::{Agents, TestEnv, new_pod_node};
use anyhow::{Context as _, Result, ensure};
use keelson_cluster::kube::{KubeletOptions, condition};
use keelson_harness::agent::Settings;
use keelson_harness::containerd::Kind;
use keelson_harness::registry::Access;
use keelson_harness::util::{PATIENCE, eventually};

async fn start_env(name: &str, agents: Agents) -> Result<TestEnv> {
    let node = new_pod_node(Kind::V2, Access::Anonymous).await?;
    let options = KubeletOptions::default().set("nodeStatusUpdateFrequency", "1s");
    let env = TestEnv::start(name, node, agents, options).await?;
    env.run_pod("before", &[]).await?;
    Ok(env)
}

/// If only images go through the agent, its death affects only pulls; with both services, the kubelet considers the
/// runtime dead after 30 s. When the agent is back, both nodes run new pods.
#[test]
fn a_node_whose_agent_proxies_only_images_stays_ready_without_it() -> Result<()> {
    run(async {
        let images = start_env("dead-images", Agents::Images(Settings::new()));
        let everything = start_env("dead-all", Agents::Everything(Settings::new()));
        let (mut images, mut everything) = tokio::try_join!(images, everything)?;
        let admin = &images.shared.clone().cluster.admin;
        let watch = admin.watch(admin.nodes(), &images.name).await?;
        let before = images.container("default", "before").await?;
        images.agent()?.kill9()?;
        everything.agent()?.kill9()?;

        eventually(2 * PATIENCE, "the node whose runtime seems dead is not ready", || async {
            let ready = admin.condition(&everything.name, "Ready").await?.context("no Ready")?;
            ensure!(ready.status == "False", "it is {ready:?}");
            Ok(())
        })
        .await?;
        for version in watch.changes()? {
            let node = version.object.context("the Node was deleted")?;
            let ready = condition(&node, "Ready").context("no Ready")?;
            ensure!(ready.status == "True", "the node needs its agent: {ready:?}");
        }
        let image = images.push(&crate::test_env::program("during", &[])?).await?;
        images.make_pod("during", &image).await?;
        let message = images.pull_failed("default", "during").await?;
        eprintln!("without its agent, the kubelet reports {message}");
        let after = images.container("default", "before").await?;
        ensure!(
            after.container_id == before.container_id,
            "the pod was disturbed: {before:?}, then {after:?}"
        );

        for env in [&mut images, &mut everything] {
            env.agent()?.start_again().await?;
            admin.await_condition(&env.name, "Ready", "True").await?;
            env.run_pod("after", &[]).await?;
        }
        images.runs("during").await?;
        images.delete(&["before", "during", "after"]).await?;
        everything.delete(&["before", "after"]).await
    })
}
