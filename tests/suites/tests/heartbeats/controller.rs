//! Beside the controllers that check nodes and remove their objects.

use crate::common::{
    GRACE, Role, TestEnv, eventually_slow, on_controlled_cluster, quick, sleep_seconds, within,
};
use anyhow::{Context as _, Result, ensure};
use k8s_openapi::api::core::v1::Node;
use keelson_cluster::kube::{Cluster, condition};
use kube::api::{Patch, PatchParams};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::json;
use std::time::{Duration, Instant};

fn signal(env: &TestEnv, signal: Signal) -> Result<()> {
    let pid = env.agent.pid().context("the agent is not running")?;
    kill(Pid::from_raw(pid.try_into()?), signal).context("cannot signal the agent")
}

async fn is_gone(cluster: &Cluster, lease: &str) -> Result<()> {
    eventually_slow("the garbage collector has deleted the Lease", || async {
        ensure!(cluster.admin.lease(lease).await?.is_none(), "it is there");
        Ok(())
    })
    .await
}

#[test]
fn case_26_a_deleted_node_is_not_registered_again_and_gets_no_lease() -> Result<()> {
    on_controlled_cluster(async |cluster| {
        let env = TestEnv::reporting(cluster, "case-26", Role::Node, quick()).await?;
        env.wait_until_healthy().await?;
        let from = env.requests(cluster)?.len();
        cluster.admin.delete_node("case-26").await?;
        env.wait_until_failing("Node case-26").await?;
        is_gone(cluster, "case-26").await?;
        env.wait_until_failing("Node case-26 does not exist").await?;
        env.wait_until_failing("Node case-26 was deleted and is not recreated").await?;
        sleep_seconds(5).await;

        let asked = env.requests(cluster)?;
        let after = &asked[from..];
        let made: Vec<_> = after.iter().filter(|event| event.verb == "create").collect();
        assert!(made.is_empty(), "{made:#?}");
        let missed = |verb, resource| {
            after.iter().any(|event| event.is_for(verb, resource) && event.code == Some(404))
        };
        assert!(missed("patch", "leases"), "the Lease was renewed until it was gone: {after:#?}");
        assert!(missed("get", "nodes"), "the Lease's Node was looked for: {after:#?}");
        assert!(cluster.admin.node("case-26").await?.is_none());
        assert!(cluster.admin.lease("case-26").await?.is_none());

        // The Node is created: the agent adopts it.
        let fresh = cluster.admin.create_node("case-26", &[]).await?;
        cluster.admin.await_condition("case-26", "Ready", "True").await?;
        env.settled(cluster).await?;
        env.wait_until_healthy().await?;
        let lease = cluster.admin.lease("case-26").await?.context("no Lease")?;
        let owner = lease.metadata.owner_references.context("no owner")?.remove(0);
        assert_eq!(Some(owner.uid), fresh.metadata.uid);
        Ok(())
    })
}

#[test]
fn case_26_with_always_a_deleted_node_is_registered_again() -> Result<()> {
    on_controlled_cluster(async |cluster| {
        let settings = quick().set("node.register_node", "always");
        let env = TestEnv::reporting(cluster, "case-26-always", Role::Node, settings).await?;
        let before = cluster.admin.node("case-26-always").await?.context("no Node")?;
        cluster.admin.delete_node("case-26-always").await?;
        let after = eventually_slow("a new Node", || async {
            let node = cluster.admin.node("case-26-always").await?.context("no Node")?;
            ensure!(node.metadata.uid != before.metadata.uid, "it is the old one");
            Ok(node)
        })
        .await?;
        // The Lease is given to the new Node, or created again after the garbage collector has deleted the old one's.
        eventually_slow("the Lease belongs to the new Node", || async {
            let lease = cluster.admin.lease("case-26-always").await?.context("no Lease")?;
            let owner = lease.metadata.owner_references.context("no owner")?.remove(0);
            ensure!(Some(&owner.uid) == after.metadata.uid.as_ref(), "it belongs to {}", owner.uid);
            Ok(())
        })
        .await?;
        env.wait_for_renewals(cluster, 2).await?;
        env.wait_until_healthy().await
    })
}

/// When the next idle report is due, in milliseconds from now.
async fn next_report_in(env: &TestEnv) -> Result<f64> {
    let shown = env.node_json().await?;
    let value = &shown["status"]["next_report_in_ms"];
    let number = value.as_f64().or_else(|| value.as_str()?.parse().ok());
    number.with_context(|| format!("no next report in {shown}"))
}

#[test]
fn case_30_an_unknown_node_is_ready_with_the_next_status() -> Result<()> {
    on_controlled_cluster(async |cluster| {
        let env = TestEnv::reporting(cluster, "case-30", Role::Node, quick()).await?;
        env.wait_until_healthy().await?;
        let ready = cluster.admin.await_condition("case-30", "Ready", "True").await?;
        let due = next_report_in(&env).await?;

        let stopped = Instant::now();
        signal(&env, Signal::SIGSTOP)?;
        let given_up = cluster.admin.await_condition("case-30", "Ready", "Unknown").await?;
        let silence = stopped.elapsed();
        eprintln!("given up after {:.1} s", silence.as_secs_f64());
        ensure!(silence + Duration::from_secs(2) > GRACE, "given up too early");
        assert_eq!(given_up.reason.as_deref(), Some("NodeStatusUnknown"));
        // A second at least, because the transition time has no fractions.
        sleep_seconds(2).await;
        let reports = env.status_writes(cluster)?.len();
        signal(&env, Signal::SIGCONT)?;
        let back = cluster.admin.await_condition("case-30", "Ready", "True").await?;
        let (before, after) = (given_up.last_transition_time, back.last_transition_time);
        ensure!(after > before && after > ready.last_transition_time, "transitions: {before:?}, {after:?}");
        for kind in ["MemoryPressure", "DiskPressure", "PIDPressure"] {
            cluster.admin.await_condition("case-30", kind, "False").await?;
        }
        env.wait_until_healthy().await?;
        // Drawn again from 7.5 to 22.5 min, and different from the plan before.
        let redrawn = next_report_in(&env).await?;
        within("the next report", redrawn, 380_000.0, 1_351_000.0)?;
        let planned = due - stopped.elapsed().as_secs_f64() * 1000.0;
        eprintln!("next report in {redrawn} ms; the plan was {planned:.0} ms");
        ensure!((redrawn - planned).abs() > 20.0, "the plan is the old one");
        within("reports", (env.status_writes(cluster)?.len() - reports) as f64, 1.0, 3.0)?;
        storm(cluster, &env).await
    })
}

/// While others write the Node's metadata without a pause, every report succeeds at the first attempt: its patch has no
/// resourceVersion.
async fn storm(cluster: &Cluster, env: &TestEnv) -> Result<()> {
    let (nodes, name) = (cluster.admin.nodes(), env.name.clone());
    let writers = (0..3).map(|writer| {
        let (nodes, name) = (nodes.clone(), name.clone());
        tokio::spawn(async move {
            let mut writes = 0_u32;
            loop {
                writes += 1;
                let patch =
                    json!({"metadata": {"annotations": {format!("storm-{writer}"): writes.to_string()}}});
                if let Err(error) = nodes.patch(&name, &PatchParams::default(), &Patch::Merge(&patch)).await {
                    return error.to_string();
                }
            }
        })
    });
    let writers: Vec<_> = writers.collect();
    let from = env.status_writes(cluster)?.len();
    for turn in 0..4 {
        let status = if turn % 2 == 0 { "True" } else { "False" };
        let kind = "KernelDeadlock";
        env.agent.output(&["node", "set-condition", kind, status, "--reason", "Storm"]).await?;
        cluster.admin.await_condition(&env.name, kind, status).await?;
    }
    for writer in &writers {
        ensure!(!writer.is_finished(), "a writer has ended");
        writer.abort();
    }
    // The condition may be seen before the request is in the audit log.
    let writes = eventually_slow("the reports are in the audit log", || async {
        let writes = env.status_writes(cluster)?.split_off(from);
        within("reports", writes.len() as f64, 4.0, 8.0).map(|()| writes)
    })
    .await?;
    let failed: Vec<_> = writes.iter().filter(|write| write.code != Some(200)).collect();
    assert!(failed.is_empty(), "{failed:#?}");
    let node: Node = cluster.admin.node(&env.name).await?.context("no Node")?;
    ensure!(condition(&node, "Ready").is_some_and(|ready| ready.status == "True"), "{node:#?}");
    Ok(())
}
