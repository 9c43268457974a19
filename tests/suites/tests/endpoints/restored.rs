//! An etcd that is restored from a backup while the agent runs (E11).
//!
//! Watches then start at a version that the store reaches only later. The API server treats that as a watch without
//! events.

use crate::common::{Lane, TestEnv, eventually_slow, run};
use anyhow::{Context as _, Result, ensure};
use keelson_cluster::endpoints::{Kind, endpoint, port, service, slice};
use keelson_harness::scratch::Scratch;
use kube::api::{Patch, PatchParams};
use serde_json::{Value, json};

/// Writes after the backup, so that the restored store is behind for the whole test.
const LOST: usize = 300;

async fn write(env: &TestEnv, name: &str) -> Result<()> {
    let ports = [port("p", 80)];
    env.writer.create(Kind::Service, &service(name, &ports, &json!({}))).await?;
    let ready = [endpoint("10.200.7.1", &env.name, &json!({}))];
    env.writer.create(Kind::Slice, &slice(name, "a", &ports, &ready)).await.map(drop)
}

/// The API server's response to a list of Services that has to be at least as new as `version`.
async fn list_not_older(env: &TestEnv, version: i64) -> Result<kube::Error> {
    let path = format!(
        "/api/v1/services?resourceVersion={version}&resourceVersionMatch=NotOlderThan&fieldSelector=metadata.name%3Dnone"
    );
    let request = http::Request::get(path).body(Vec::new())?;
    let answer = env.cluster.admin.client().request::<Value>(request).await;
    answer.err().context("it is as new as that")
}

async fn restored(name: &str, heartbeats: bool) -> Result<()> {
    let mut env = TestEnv::new(Lane::Rough, name).await?;
    if !heartbeats {
        env.agent.set("feature_gates.NodeHeartbeats", false)?;
    }
    for name in ["stays", "deleted", "changed"] {
        write(&env, name).await?;
    }
    env.agent.start_live().await?;
    let followers = env.followers()?;
    env.settled(&followers).await?;
    let scratch = Scratch::new()?;
    let backup = scratch.path().join("backup.db");
    env.cluster.etcd.save(&backup).await?;

    // An object that is not in the backup.
    write(&env, "ghost").await?;
    env.writer.delete(Kind::Service, "deleted").await?;
    let other = json!({"ports": [port("p", 8080)]});
    env.writer.patch(Kind::Slice, "changed-a", &other).await?;
    let label = json!({"metadata": {"labels": {"written": "after-the-backup"}}});
    env.cluster.admin.nodes().patch(name, &PatchParams::default(), &Patch::Merge(&label)).await?;
    for n in 0..LOST {
        let annotation = json!({"metadata": {"annotations": {"n": n.to_string()}}});
        env.writer.patch(Kind::Slice, "stays-a", &annotation).await?;
    }
    let before = env.settled(&followers).await?;
    let lost = env.cluster.etcd.revision().await?;

    let cluster = &mut *env.cluster;
    cluster.api.terminate().await?;
    cluster.etcd.terminate().await?;
    cluster.etcd.restore(&backup).await?;
    cluster.etcd.start_again().await?;
    cluster.api.start_again().await?;
    write(&env, "after").await?;
    let refused = list_not_older(&env, lost).await?;
    ensure!(refused.to_string().contains("Too large resource version"), "{refused:?}");

    // No ghost, and no change is missed.
    let expected = env.expected().await?;
    eventually_slow("the agent has what the restored store has", || async {
        followers.settled(&expected).await
    })
    .await?;
    followers.check_invariants()?;
    let after = followers.pair().await?;
    ensure!(after.0 == before.0 && after.1 > before.1, "{before:?} {after:?}");
    let now = env.cluster.etcd.revision().await?;
    ensure!(now < lost, "the store is at {now} and was at {lost}: that it was behind was not tested");
    let rollbacks = env.metric("keelson_kube_store_rollbacks_total").await?;
    ensure!(rollbacks >= 1.0, "it was not reported");
    env.wait_until_current().await
}

#[test]
fn e11_a_restored_etcd_leaves_no_deleted_service_and_no_change_is_missed() -> Result<()> {
    run(restored("restored", true))
}

/// An agent without writes learns it from its Node.
#[test]
fn e11_an_agent_without_heartbeats_notices_a_restored_etcd() -> Result<()> {
    run(restored("restored-quiet", false))
}
