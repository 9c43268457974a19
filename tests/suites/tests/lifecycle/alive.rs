//! A node with the agent's heartbeat, at default intervals, under the node lifecycle controller.

use crate::common::{
    agent_requests, describe_event, heartbeats, node_settings, on_cluster, set_condition, wait_until_healthy,
};
use anyhow::{Context as _, Result, ensure};
use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::Node;
use keelson_cluster::kube::{AuditEvent, Change, Cluster, condition};
use keelson_harness::agent::Agent;
use keelson_harness::containerd::{Kind, Options};
use keelson_harness::registry::Access;
use keelson_harness::util::{PATIENCE, eventually, until};
use serde_json::Value;
use std::time::{Duration, Instant};

const NAME: &str = "alive";

/// Time that the node is watched while it is healthy.
const WATCHED: Duration = Duration::from_secs(180);

/// Part of that time in which nothing changes on it.
const QUIET: Duration = Duration::from_secs(90);

/// A change is in the status after one pass; two passes later nothing may follow.
const TWO_PASSES: Duration = Duration::from_secs(22);

#[test]
fn the_controller_keeps_a_node_by_its_leases_and_marks_it_when_they_end() -> Result<()> {
    on_cluster(async |cluster| {
        let options = Options { network: true, ..Options::default() };
        let node =
            keelson_harness::node::Node::start_with(Kind::Debian16, Access::Anonymous, &options).await?;
        let image = node.push_many("alive", 1, 1 << 20).await?.remove(0);
        let identity = cluster.node(&node.scratch, NAME).await?;
        let settings = node_settings(NAME, &identity.kubeconfig(), node.scratch.path());
        let mut agent = node.agent(&settings).await?;
        cluster.admin.await_condition(NAME, "Ready", "True").await?;
        wait_until_healthy(&agent).await?;
        untainted(cluster).await?;

        let nodes = cluster.admin.watch(cluster.admin.nodes(), NAME).await?;
        let leases = cluster.admin.watch(cluster.admin.leases(), NAME).await?;
        // The watches begin with the present state.
        until("both watches have begun", || {
            let begun = |count: Result<usize>| count.is_ok_and(|count| count > 0);
            begun(nodes.changes().map(|all| all.len())) && begun(leases.changes().map(|all| all.len()))
        })
        .await?;
        let seen = (nodes.changes()?.len(), leases.changes()?.len());
        let (began, quiet) = (Instant::now(), Timestamp::now());
        tokio::time::sleep(QUIET).await;
        let mut still = Vec::new();
        for event in since(cluster, identity.user(), quiet)? {
            ensure!(
                event.verb == "watch" || event.is_write(),
                "it reads while nothing happens: {}",
                describe_event(&event)
            );
            if event.is_for("patch", "nodes/status") {
                ensure!(
                    is_idle(&event),
                    "it reports a change though nothing changed: {}",
                    describe_event(&event)
                );
            } else if event.is_write() {
                ensure!(
                    event.resource == "leases",
                    "a write that nothing called for: {}",
                    describe_event(&event)
                );
                still.push(event);
            }
        }
        eprintln!("{} renewals in {QUIET:?} of quiet", still.len());

        // A condition from another process, set and repeated.
        let changed = Timestamp::now();
        set_condition(&agent, "KernelDeadlock", "False", "NoDeadlock").await?;
        cluster.admin.await_condition(NAME, "KernelDeadlock", "False").await?;
        set_condition(&agent, "KernelDeadlock", "False", "NoDeadlock").await?;
        tokio::time::sleep(TWO_PASSES).await;
        one_report(cluster, identity.user(), changed, "a condition that was set twice")?;

        let pulled = Timestamp::now();
        agent.cri().await?.pull_image(&node.name(&image)).await?;
        eventually(PATIENCE, "the status lists the image", || async {
            let shown = cluster.admin.node(NAME).await?.and_then(|node| node.status?.images);
            ensure!(
                shown.iter().flatten().any(|shown| shown.size_bytes > Some(1 << 20)),
                "it lists {shown:?}"
            );
            Ok(())
        })
        .await?;
        tokio::time::sleep(TWO_PASSES).await;
        one_report(cluster, identity.user(), pulled, "an image that was pulled")?;
        tokio::time::sleep(WATCHED.saturating_sub(began.elapsed())).await;

        let all = since(cluster, identity.user(), quiet)?;
        let writes: Vec<_> = all.iter().filter(|event| event.is_write()).collect();
        let reports = writes.iter().filter(|event| event.resource == "nodes").count();
        eprintln!(
            "in {:?} {} requests: {} renewals, {reports} reports, {} others",
            began.elapsed(),
            all.len(),
            writes.len() - reports,
            all.len() - writes.len()
        );
        // Two changes, and one idle report may have been due.
        ensure!((2..=3).contains(&reports), "{reports} reports");
        let (versions, renewals) = (nodes.changes()?, leases.changes()?);
        always_ready(versions.get(seen.0..).unwrap_or_default())?;
        renewed_every_ten_seconds(renewals.get(seen.1.saturating_sub(1)..).unwrap_or_default(), began)?;
        drop((nodes, leases));
        check_silence_and_return(cluster, &mut agent).await
    })
}

/// Waits until the controller's taints of an unhealthy node are gone.
async fn untainted(cluster: &Cluster) -> Result<()> {
    eventually(PATIENCE, "the node has no taint", || async {
        let node = cluster.admin.node(NAME).await?.context("there is no Node")?;
        let taints = node.spec.unwrap_or_default().taints.unwrap_or_default();
        ensure!(taints.is_empty(), "it has {taints:?}");
        Ok(())
    })
    .await
}

fn since(cluster: &Cluster, user: &str, from: Timestamp) -> Result<Vec<AuditEvent>> {
    Ok(agent_requests(cluster, user)?.into_iter().filter(|event| event.received >= from).collect())
}

/// Whether a report changes no status. One of them may be due within two minutes.
fn is_idle(event: &AuditEvent) -> bool {
    let status = event.body.as_ref().and_then(|body| body["status"].as_object());
    let conditions = status.and_then(|status| status.get("conditions")?.as_array());
    let only = |condition: &Value| {
        condition
            .as_object()
            .is_some_and(|all| all.keys().all(|key| matches!(key.as_str(), "type" | "lastHeartbeatTime")))
    };
    conditions.is_some_and(|all| all.iter().all(only))
        && status.is_some_and(|all| all.keys().all(|key| key.ends_with("conditions")))
}

fn one_report(cluster: &Cluster, user: &str, from: Timestamp, what: &str) -> Result<()> {
    let reports: Vec<_> = since(cluster, user, from)?
        .into_iter()
        .filter(|event| event.is_write() && event.resource == "nodes" && !is_idle(event))
        .collect();
    let lines: Vec<_> = reports.iter().map(describe_event).collect();
    ensure!(reports.len() == 1, "{what}: {} reports instead of one:\n{}", lines.len(), lines.join("\n"));
    ensure!(reports.iter().all(|event| event.is_for("patch", "nodes/status")), "{lines:?}");
    Ok(())
}

fn always_ready(versions: &[Change<Node>]) -> Result<()> {
    for version in versions {
        let node = version.object.as_ref().context("the Node was deleted")?;
        let ready = condition(node, "Ready").context("the Node has no condition Ready")?;
        ensure!(ready.status == "True", "the controller or the agent reported {ready:?}");
        let taints = node.spec.as_ref().and_then(|spec| spec.taints.as_ref());
        ensure!(taints.is_none_or(Vec::is_empty), "the controller tainted the node: {taints:?}");
    }
    eprintln!("{} versions of the Node, each of them ready", versions.len());
    Ok(())
}

/// The first one existed at the beginning of the window.
fn renewed_every_ten_seconds(renewals: &[Change<Lease>], began: Instant) -> Result<()> {
    let mut times = Vec::new();
    for renewal in renewals {
        let lease = renewal.object.as_ref().context("the Lease was deleted")?;
        let spec = lease.spec.as_ref().context("a Lease has a spec")?;
        ensure!(spec.holder_identity.as_deref() == Some(NAME) && spec.lease_duration_seconds == Some(40));
        times.push(spec.renew_time.clone().context("a Lease has a renewTime")?.0);
    }
    let pauses: Vec<f64> =
        times.windows(2).map(|pair| pair[1].duration_since(pair[0]).as_secs_f64()).collect();
    let (least, most) = pauses.iter().fold((f64::MAX, 0_f64), |(a, b), pause| (a.min(*pause), b.max(*pause)));
    eprintln!("{} renewals in {:?}, {least:.2} s to {most:.2} s apart", pauses.len(), began.elapsed());
    // The interval is 10 to 10.4 s after the end of the one before. A busy machine may be late, but never early.
    ensure!(least >= 9.9, "renewed too early: {pauses:?}");
    ensure!(most < 40.0, "a Lease ran out: {pauses:?}");
    let seconds = began.elapsed().as_secs_f64();
    ensure!(pauses.len() as f64 >= seconds / 15.0, "renewed too seldom: {pauses:?}");
    Ok(())
}

/// A killed agent leaves a node that the controller marks after its grace period; after a restart the agent takes that
/// back.
async fn check_silence_and_return(cluster: &Cluster, agent: &mut Agent) -> Result<()> {
    agent.kill9()?;
    let killed = Instant::now();
    let renewed = cluster.admin.lease(NAME).await?.and_then(|lease| lease.spec?.renew_time);
    let renewed = renewed.context("there is a Lease")?.0;
    let gone = tokio::time::timeout(2 * PATIENCE, async {
        loop {
            if let Ok(gone) = cluster.admin.await_condition(NAME, "Ready", "Unknown").await {
                return gone;
            }
        }
    });
    let gone = gone.await.context("the controller never marked the node")?;
    eprintln!("marked Unknown after {:.1} s", killed.elapsed().as_secs_f64());
    ensure!(gone.reason.as_deref() == Some("NodeStatusUnknown"), "{gone:?}");
    let silence = Timestamp::now().duration_since(renewed).as_secs_f64();
    eprintln!("and {silence:.1} s after the last renewal");
    ensure!(silence >= 50.0, "the controller did not count from the last renewal");
    let back = Instant::now();
    agent.start_again().await?;
    cluster.admin.await_condition(NAME, "Ready", "True").await?;
    eprintln!("True again {:.1} s after the start", back.elapsed().as_secs_f64());
    untainted(cluster).await?;
    let shown = heartbeats(agent).await?;
    let kept =
        shown["conditions"].as_array().into_iter().flatten().any(|one| one["type"] == "KernelDeadlock");
    ensure!(kept, "the condition of another process did not outlive the agent: {shown}");
    Ok(())
}
