//! Services are watched once a client follows them.

use crate::rig::{Lane, Stage, eventually_slow, run};
use anyhow::{Result, ensure};
use keelson_cluster::endpoints::{Kind, port, service};
use keelson_cluster::kube::AuditEvent;
use serde_json::json;

/// The resources that endpoints are made of, except the Node.
const RESOURCES: [&str; 3] = ["services", "endpointslices", "servicecidrs"];

/// Number of requests of the agent for them so far.
fn watch_requests(stage: &Stage) -> Result<usize> {
    let is_of_endpoints = |event: &AuditEvent| {
        event.user == stage.identity.user() && RESOURCES.contains(&event.resource.as_str())
    };
    Ok(stage.cluster.api.audit(is_of_endpoints)?.len())
}

/// Waits until it reports that nothing is watched, and no error.
async fn is_reported_unwatched(stage: &Stage) -> Result<()> {
    eventually_slow("the agent reports no client", || async {
        let state = stage.state().await?;
        ensure!(state["state"] == "not-watched", "{state}");
        let output = stage.endpoints_output(&[]).await?;
        ensure!(
            output.starts_with("PENDING: Services are not watched: no client has connected yet"),
            "{output}"
        );
        for (name, value) in [("keelson_endpoints_watched", 0.0), ("keelson_endpoints_stale", 0.0)] {
            ensure!(stage.metric(name).await? == value, "{name}");
        }
        let line = stage.readyz().await?;
        ensure!(line.starts_with("[+]"), "{line}");
        Ok(())
    })
    .await
}

#[test]
fn watches_start_with_the_first_client() -> Result<()> {
    run(async {
        let mut stage = Stage::new(Lane::Calm, "on-demand").await?;
        stage.writer.create(Kind::Service, &service("web", &[port("p", 80)], &json!({}))).await?;
        let before = watch_requests(&stage)?;
        stage.agent.start_live().await?;
        is_reported_unwatched(&stage).await?;
        // The heartbeats have reached the API server by then, which is much later than a list would.
        let node = stage.name.clone();
        stage.cluster.admin.await_condition(&node, "KeelsonStateNotDurable", "False").await?;
        ensure!(watch_requests(&stage)? == before, "it requested objects without a client");

        let followers = stage.followers()?;
        let pair = stage.settled(&followers).await?;
        stage.wait_until_current().await?;
        ensure!(stage.metric("keelson_endpoints_watched").await? == 1.0);
        ensure!(watch_requests(&stage)? > before, "whence does it know?");
        // A client that disconnects ends nothing.
        drop(followers);
        stage.writer.create(Kind::Service, &service("more", &[port("p", 80)], &json!({}))).await?;
        eventually_slow("a change without a client is received", || async {
            let state = stage.state().await?;
            ensure!(state["rev"] == pair.1 + 1 && state["state"] == "synced", "{state}");
            Ok(())
        })
        .await?;

        // After a restart it waits for a client again, and serves the state on disk to it.
        stage.kill_and_start().await?;
        is_reported_unwatched(&stage).await?;
        let followers = stage.followers()?;
        ensure!(stage.settled(&followers).await? == (pair.0, pair.1 + 1));
        stage.wait_until_current().await?;

        // With the setting `always` it waits for no client.
        drop(followers);
        stage.terminate().await?;
        stage.agent.set("endpoints.watch", "always")?;
        stage.agent.start_live().await?;
        stage.wait_until_current().await
    })
}
