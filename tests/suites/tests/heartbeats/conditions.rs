//! Conditions that others report through the agent.

use crate::common::{Role, TestEnv, eventually_slow, on_cluster, quick, sleep_seconds};
use anyhow::{Context as _, Result, ensure};
use keelson_cluster::kube::Cluster;

const KIND: &str = "KernelDeadlock";

#[test]
fn a_condition_is_written_once_survives_kills_and_can_be_cleared() -> Result<()> {
    on_cluster(async |cluster| {
        let (companion, node) = tokio::join!(
            lives(cluster, "reporter", Role::Companion),
            lives(cluster, "reporter-node", Role::Node)
        );
        companion.context("companion").and(node.context("role node"))
    })
}

async fn lives(cluster: &Cluster, name: &str, role: Role) -> Result<()> {
    let mut env = TestEnv::reporting(cluster, name, role, quick()).await?;
    sleep_seconds(2).await;
    let before = env.status_writes(cluster)?.len();

    let set = ["node", "set-condition", KIND, "False", "--reason", "NoDeadlock", "--message", "all well"];
    let shown = env.agent.output(&set).await?;
    ensure!(shown.contains("is set to False"), "{shown}");
    let found = cluster.admin.await_condition(name, KIND, "False").await?;
    assert_eq!(found.reason.as_deref(), Some("NoDeadlock"));
    assert_eq!(found.message.as_deref(), Some("all well"));
    ensure!(found.last_heartbeat_time.is_some() && found.last_transition_time.is_some(), "{found:?}");

    // A repeat changes nothing.
    for _ in 0..3 {
        let shown = env.agent.output(&set).await?;
        ensure!(shown.contains("is unchanged: it is False"), "{shown}");
    }
    sleep_seconds(3).await;
    assert_eq!(env.status_writes(cluster)?.len(), before + 1, "a repeat was written");

    // An accepted condition is on disk: a kill right after it loses nothing.
    env.agent.output(&["node", "set-condition", KIND, "True", "--reason", "Deadlock"]).await?;
    env.agent.kill9()?;
    env.agent.start_again().await?;
    let flipped = cluster.admin.await_condition(name, KIND, "True").await?;
    ensure!(flipped.last_transition_time >= found.last_transition_time, "{flipped:?}");
    let shown = env.agent.output(&["node"]).await?;
    let line = shown.lines().find(|line| line.starts_with(KIND)).context("not shown")?;
    ensure!(line.contains("reporter") && line.contains("Deadlock"), "{shown}");

    let shown = env.agent.output(&["node", "clear-condition", KIND]).await?;
    ensure!(shown.contains("is cleared"), "{shown}");
    eventually_slow("the condition is gone", || async {
        ensure!(cluster.admin.condition(name, KIND).await?.is_none(), "it is there");
        Ok(())
    })
    .await?;
    env.agent.kill9()?;
    env.agent.start_again().await?;
    sleep_seconds(3).await;
    assert!(cluster.admin.condition(name, KIND).await?.is_none(), "a cleared condition is back");
    env.settled(cluster).await?;
    Ok(())
}

/// E5: with `node.remove_conditions_on_stop` a graceful stop removes the agent's conditions from the Node, with those
/// that others set through it, and a start restores them. Without it, and after a kill, they stay. A node's heartbeat
/// always does.
#[test]
fn e5_a_clean_stop_removes_the_conditions_if_configured() -> Result<()> {
    on_cluster(async |cluster| {
        let (companion, node) = tokio::join!(
            leaves(cluster, "leaves", Role::Companion),
            leaves(cluster, "leaves-node", Role::Node)
        );
        companion.context("companion").and(node.context("role node"))
    })
}

async fn leaves(cluster: &Cluster, name: &str, role: Role) -> Result<()> {
    let own = ["ImagePullsStalled", "KeelsonStateNotDurable", KIND];
    let heartbeat: &[&str] = match role {
        Role::Companion => &[],
        Role::Node => &["MemoryPressure", "DiskPressure", "PIDPressure", "Ready"],
    };
    let kinds = || async {
        let node = cluster.admin.node(name).await?.context("no Node")?;
        let list = node.status.and_then(|status| status.conditions).unwrap_or_default();
        let mut kinds: Vec<_> = list.into_iter().map(|one| one.type_).collect();
        kinds.sort();
        anyhow::Ok(kinds)
    };
    let sorted = |kinds: &[&[&str]]| {
        let mut kinds: Vec<_> = kinds.concat().into_iter().map(ToOwned::to_owned).collect();
        kinds.sort();
        kinds
    };
    let (with, without) = (sorted(&[&own, heartbeat]), sorted(&[heartbeat]));
    let mut env = TestEnv::reporting(cluster, name, role, quick()).await?;
    env.agent.output(&["node", "set-condition", KIND, "True", "--reason", "Deadlock"]).await?;
    cluster.admin.await_condition(name, KIND, "True").await?;
    ensure!(env.agent.terminate().await?.success(), "it did not end in peace");
    ensure!(kinds().await? == with, "a stop that was to leave them left {:?}", kinds().await?);

    env.agent.set("node.remove_conditions_on_stop", true)?;
    env.agent.start_again().await?;
    env.settled(cluster).await?;
    env.agent.kill9()?;
    ensure!(kinds().await? == with, "a kill left {:?}", kinds().await?);
    env.agent.start_again().await?;
    env.wait_until_healthy().await?;
    let before = env.status_writes(cluster)?.len();
    ensure!(env.agent.terminate().await?.success(), "it did not end in peace");
    let left = kinds().await?;
    ensure!(left == without, "a stop that was to remove them left {left:?}:\n{}", env.agent.log()?);
    eventually_slow("one write for all of them", || async {
        let writes = env.status_writes(cluster)?.len() - before;
        ensure!(writes == 1, "{writes} writes");
        Ok(())
    })
    .await?;
    env.agent.start_again().await?;
    eventually_slow("they are back", || async {
        let kinds = kinds().await?;
        ensure!(kinds == with, "{kinds:?}");
        Ok(())
    })
    .await
}

#[test]
fn a_silent_reporter_is_reported() -> Result<()> {
    on_cluster(async |cluster| {
        let env = TestEnv::started(cluster, "silent", Role::Companion, quick()).await?;
        env.agent
            .output(&["node", "set-condition", KIND, "False", "--reason", "NoDeadlock", "--ttl", "3s"])
            .await?;
        cluster.admin.await_condition("silent", KIND, "False").await?;
        let silent = cluster.admin.await_condition("silent", KIND, "Unknown").await?;
        assert_eq!(silent.reason.as_deref(), Some("ReporterSilent"));
        env.agent
            .output(&["node", "set-condition", KIND, "False", "--reason", "NoDeadlock", "--ttl", "60s"])
            .await?;
        cluster.admin.await_condition("silent", KIND, "False").await?;
        Ok(())
    })
}

#[test]
fn foreign_and_invalid_conditions_are_refused_with_a_remedy() -> Result<()> {
    on_cluster(async |cluster| {
        let env = TestEnv::reporting(cluster, "refused", Role::Companion, quick()).await?;
        let before = env.status_writes(cluster)?.len();
        let owned = [
            "Ready",
            "MemoryPressure",
            "DiskPressure",
            "PIDPressure",
            "NetworkUnavailable",
            "ImagePullsStalled",
            "ServiceEndpointsStale",
            "ImagePullsFlowing",
            "KeelsonStateNotDurable",
        ];
        let mut refusals: Vec<(&str, &str, &str)> =
            owned.iter().map(|kind| (*kind, "Because", "belongs to the kubelet or the agent")).collect();
        refusals.push(("no type", "Because", "is not a valid condition type"));
        refusals.push(("a/b/c", "Because", "is not a valid condition type"));
        refusals.push((KIND, "no reason", "a reason must be one word in CamelCase"));
        for (kind, reason, says) in refusals {
            let output =
                env.agent.keelson(&["node", "set-condition", kind, "True", "--reason", reason]).await?;
            ensure!(!output.is_success() && output.err.contains(says), "{kind} {reason}: {output:?}");
        }
        let output = env.agent.keelson(&["node", "clear-condition", KIND]).await?;
        ensure!(!output.is_success() && output.err.contains("is not set"), "{output:?}");
        for n in 0..32 {
            env.agent
                .output(&["node", "set-condition", &format!("Many{n}"), "True", "--reason", "Many"])
                .await?;
        }
        let output =
            env.agent.keelson(&["node", "set-condition", "Many32", "True", "--reason", "Many"]).await?;
        ensure!(!output.is_success() && output.err.contains("clear one first"), "{output:?}");
        cluster.admin.await_condition("refused", "Many31", "True").await?;
        ensure!(cluster.admin.condition("refused", "Many32").await?.is_none(), "it was taken");
        ensure!(env.status_writes(cluster)?.len() > before, "nothing was written");
        Ok(())
    })
}
