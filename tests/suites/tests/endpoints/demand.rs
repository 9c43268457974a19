//! Services are watched once a client follows them.

use crate::common::{Lane, TestEnv, eventually_slow, run};
use anyhow::{Result, ensure};
use keelson_cluster::endpoints::{Kind, port, service};
use keelson_cluster::kube::AuditEvent;
use serde_json::json;

/// The resources that endpoints are made of, except the Node.
const RESOURCES: [&str; 3] = ["services", "endpointslices", "servicecidrs"];

/// Number of requests of the agent for them so far.
fn watch_requests(env: &TestEnv) -> Result<usize> {
    let is_of_endpoints = |event: &AuditEvent| {
        event.user == env.identity.user() && RESOURCES.contains(&event.resource.as_str())
    };
    Ok(env.cluster.api.audit(is_of_endpoints)?.len())
}

/// Waits until it reports that nothing is watched, and no error.
async fn is_reported_unwatched(env: &TestEnv) -> Result<()> {
    eventually_slow("the agent reports no client", || async {
        let state = env.state().await?;
        ensure!(state["state"] == "not-watched", "{state}");
        let output = env.endpoints_output(&[]).await?;
        ensure!(
            output.starts_with("PENDING: Services are not watched: no client has connected yet"),
            "{output}"
        );
        for (name, value) in [("keelson_endpoints_watched", 0.0), ("keelson_endpoints_stale", 0.0)] {
            ensure!(env.metric(name).await? == value, "{name}");
        }
        let line = env.readyz().await?;
        ensure!(line.starts_with("[+]"), "{line}");
        Ok(())
    })
    .await
}

#[test]
fn watches_start_with_the_first_client() -> Result<()> {
    run(async {
        let mut env = TestEnv::new(Lane::Calm, "on-demand").await?;
        env.writer.create(Kind::Service, &service("web", &[port("p", 80)], &json!({}))).await?;
        let before = watch_requests(&env)?;
        env.agent.start_live().await?;
        is_reported_unwatched(&env).await?;
        // The heartbeats have reached the API server by then, which is much later than a list would.
        let node = env.name.clone();
        env.cluster.admin.await_condition(&node, "KeelsonStateNotDurable", "False").await?;
        ensure!(watch_requests(&env)? == before, "it requested objects without a client");

        let followers = env.followers()?;
        let pair = env.settled(&followers).await?;
        env.wait_until_current().await?;
        ensure!(env.metric("keelson_endpoints_watched").await? == 1.0);
        ensure!(watch_requests(&env)? > before, "whence does it know?");
        // A client that disconnects ends nothing.
        drop(followers);
        env.writer.create(Kind::Service, &service("more", &[port("p", 80)], &json!({}))).await?;
        eventually_slow("a change without a client is received", || async {
            let state = env.state().await?;
            ensure!(state["rev"] == pair.1 + 1 && state["state"] == "synced", "{state}");
            Ok(())
        })
        .await?;

        // After a restart it waits for a client again, and serves the state on disk to it.
        env.kill_and_start().await?;
        is_reported_unwatched(&env).await?;
        let followers = env.followers()?;
        ensure!(env.settled(&followers).await? == (pair.0, pair.1 + 1));
        env.wait_until_current().await?;

        // With the setting `always` it waits for no client.
        drop(followers);
        env.terminate().await?;
        env.agent.set("endpoints.watch", "always")?;
        env.agent.start_live().await?;
        env.wait_until_current().await
    })
}
