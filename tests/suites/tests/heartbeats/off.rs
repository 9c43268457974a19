//! Heartbeats disabled: everything else runs, and the agent reports why.

use crate::common::{Role, TestEnv, on_cluster, quick, run, shared, sleep_seconds};
use crate::runtime::start_ready_runtime;
use anyhow::{Context as _, Result, ensure};
use keelson_harness::agent::{Agent, Settings};
use keelson_harness::cri::Pull;
use keelson_harness::scratch::Scratch;
use serde_json::Value;

/// Checks that the actors exist and are off for this reason, pulls work, and the agent is ready.
async fn is_off(agent: &Agent, reason: &str) -> Result<()> {
    let ready = agent.http_get("/readyz?verbose").await?.success()?.text();
    ensure!(!ready.contains("lease") && !ready.contains("node-status"), "{ready}");
    let actors: Value = agent.json("/debug/actors").await?;
    for name in ["LeaseRenewer", "StatusReporter"] {
        let all = actors["actors"].as_array().context("no actors")?;
        let actor = all.iter().find(|actor| actor["name"] == name).with_context(|| format!("no {name}"))?;
        assert_eq!(actor["status"], "disabled", "{actor}");
        ensure!(actor["summary"].as_str().is_some_and(|text| text.contains(reason)), "{actor}");
    }
    let shown = agent.keelson(&["node", "--check"]).await?.success()?.out;
    ensure!(shown.starts_with("State:    disabled") && shown.contains(reason), "{shown}");
    let output = agent.keelson(&["node", "set-condition", "Any", "True", "--reason", "Any"]).await?;
    ensure!(!output.is_success() && output.err.contains(reason), "{output:?}");
    let metrics = agent.http_get("/metrics").await?.success()?.text();
    ensure!(!metrics.contains("keelson_lease_") && !metrics.contains("keelson_node_"), "{metrics}");
    agent.cri().await?.pull(&Pull::new("registry.example/one:1")).await?;
    Ok(())
}

#[test]
fn without_a_cluster_heartbeats_are_off_and_pulls_work() -> Result<()> {
    run(async {
        let scratch = Scratch::new()?;
        let runtime = start_ready_runtime(&scratch)?;
        let mut agent = Agent::start(&scratch, &runtime.endpoint(), &Settings::new()).await?;
        is_off(&agent, "no API server is configured").await?;
        let status = agent.terminate().await?;
        ensure!(status.success(), "ended with {status}");
        Ok(())
    })
}

#[test]
fn with_the_gate_off_no_requests_are_sent() -> Result<()> {
    on_cluster(async |cluster| {
        let settings = quick().set("feature_gates.NodeHeartbeats", false);
        let env = TestEnv::started(cluster, "gate-off", Role::Companion, settings).await?;
        is_off(&env.agent, "feature gate NodeHeartbeats is disabled").await?;
        sleep_seconds(2).await;
        let asked = env.requests(cluster)?;
        assert!(asked.is_empty(), "{asked:#?}");
        Ok(())
    })
}

#[test]
fn with_its_gate_off_conditions_of_reporters_are_refused() -> Result<()> {
    run(async {
        let shared = shared().await?;
        let settings = quick().set("feature_gates.ExternalNodeConditions", false);
        let env = TestEnv::started(&shared.cluster, "no-conditions", Role::Companion, settings).await?;
        env.settled(&shared.cluster).await?;
        let output = env.agent.keelson(&["node", "set-condition", "Any", "True", "--reason", "Any"]).await?;
        ensure!(
            !output.is_success() && output.err.contains("ExternalNodeConditions is disabled"),
            "{output:?}"
        );
        env.wait_until_healthy().await
    })
}
