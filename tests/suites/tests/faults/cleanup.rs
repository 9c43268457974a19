//! `keelson cleanup` with a real containerd and a real API server (I1).

use crate::common::{MIB, agent_leases, create_agent_lease, metric_is, start_pull};
use anyhow::{Context as _, Result, ensure};
use keelson_cluster::kube::Cluster;
use keelson_harness::agent::{Agent, Settings};
use keelson_harness::command::CommandOutput;
use keelson_harness::containerd::Kind;
use keelson_harness::cri::Pull;
use keelson_harness::images::LARGE;
use keelson_harness::leases::{create_lease, leases};
use keelson_harness::node::Node;
use keelson_harness::on_both_runtimes;
use keelson_harness::registry_proxy::{Fault, Match};
use keelson_harness::util::{PATIENCE, eventually, until};
use kube::api::{Patch, PatchParams};
use serde_json::{Value, json};

on_both_runtimes!(i1_cleanup_removes_what_the_agent_left);

const NAME: &str = "cleaned";

/// Reports a condition through the agent, as a script does.
async fn set_condition(agent: &Agent, kind: &str) -> Result<()> {
    let set = ["node", "set-condition", kind, "False", "--reason", "NoDeadlock"];
    agent.keelson(&set).await?.success().map(drop)
}

async fn cleanup(agent: &Agent, args: &[&str]) -> Result<CommandOutput> {
    agent.keelson_by_config(&[&["cleanup"], args].concat()).await
}

async fn conditions(cluster: &Cluster) -> Result<Vec<String>> {
    let node = cluster.admin.nodes().get(NAME).await?;
    let conditions = node.status.and_then(|status| status.conditions).unwrap_or_default();
    Ok(conditions.into_iter().map(|condition| condition.type_).collect())
}

async fn i1_cleanup_removes_what_the_agent_left(kind: Kind) -> Result<()> {
    let node = Node::start(kind).await?;
    let cluster = Cluster::start(&node.scratch).await?;
    cluster.admin.create_node(NAME, &[]).await?;
    let settings = Settings::new()
        .set("agent.node_name", NAME)
        .set("node.companion_lease", true)
        .set("endpoints.source", "off")
        .set("pulls.cancel_grace", "0s")
        .set("kube.kubeconfig", cluster.admin_kubeconfig().display().to_string());
    let mut agent = node.agent(&settings).await?;
    let image = node.push_many("left", 1, LARGE).await?.remove(0);
    let layer = &image.layers[0].digest;
    node.proxy.rule(Match::digest(layer), Fault::StallAfter(5 * MIB));
    let caller = start_pull(&agent.cri().await?, Pull::new(&node.name(&image)));
    until("5 MiB are sent", || node.proxy.records().bytes_sent(layer) == 5 * MIB).await?;
    caller.abort();
    metric_is(&agent, "keelson_image_pull_retained", 1.0).await?;
    create_agent_lease(&node.runtime, "of-a-former-agent", "0123456789abcdef").await?;
    create_lease(&node.runtime, "of-somebody-else", None).await?;
    let lease = format!("keelson-{NAME}");
    // E5: conditions of the agent, and those that others set through it.
    set_condition(&agent, "KernelDeadlock").await?;
    let own = ["ImagePullsStalled", "KeelsonStateNotDurable", "KernelDeadlock"];
    eventually(PATIENCE, "the agent reports", || async {
        let conditions = conditions(&cluster).await?;
        ensure!(own.iter().all(|kind| conditions.iter().any(|have| have == kind)), "only {conditions:?}");
        ensure!(cluster.admin.lease(&lease).await?.is_some(), "there is no Lease");
        Ok(())
    })
    .await?;

    let CommandOutput { err: complaint, code, .. } = cleanup(&agent, &[]).await?;
    ensure!(code == Some(1) && complaint.contains("--force"), "{code:?} {complaint}");
    ensure!(agent_leases(&node.runtime).await?.len() == 2, "it removed a lease of a running agent");

    agent.kill9()?;
    // E5: also those of an earlier version and of other settings. Conditions of others stay.
    let old = ["ImagePullsFlowing", "ServiceEndpointsCurrent", "ServiceEndpointsStale"];
    let left = old.into_iter().chain(["Foreign"]).map(|kind| json!({"type": kind, "status": "True"}));
    let left = json!({"status": {"conditions": left.collect::<Vec<_>>()}});
    cluster.admin.nodes().patch_status(NAME, &PatchParams::default(), &Patch::Strategic(&left)).await?;
    let all = 3 + own.len() + old.len();
    let CommandOutput { out: text, code, .. } = cleanup(&agent, &["--dry-run", "-o", "json"]).await?;
    let report: Value = serde_json::from_str(&text).with_context(|| text.clone())?;
    let would = report["entries"].as_array().context("a list")?.iter();
    let would = would.filter(|entry| entry["outcome"] == "wouldRemove").count();
    ensure!(code == Some(0) && report["dryRun"] == true && would == all, "{code:?} {report}");
    ensure!(agent_leases(&node.runtime).await?.len() == 2, "a dry run removed a lease");

    let CommandOutput { out: text, err: complaint, code } = cleanup(&agent, &[]).await?;
    eprintln!("{text}");
    ensure!(code == Some(0), "{code:?} {text} {complaint}");
    ensure!(text.lines().filter(|line| line.starts_with("removed ")).count() == all, "{text}");
    let left: Vec<_> = leases(&node.runtime).await?.into_iter().map(|lease| lease.id).collect();
    ensure!(left == ["of-somebody-else"], "{left:?}");
    let conditions = conditions(&cluster).await?;
    ensure!(conditions == ["Foreign"], "{conditions:?}");
    ensure!(cluster.admin.lease(&lease).await?.is_none(), "the Lease is still there");
    ensure!(agent.state_dir().exists(), "the state folder went without --state");

    let CommandOutput { out: text, code, .. } = cleanup(&agent, &["--state"]).await?;
    ensure!(code == Some(0) && !agent.state_dir().exists() && !agent.socket().exists(), "{code:?} {text}");

    // No runtime to ask: reported, and not a success.
    let mut containerd = node.runtime;
    containerd.kill9()?;
    let CommandOutput { out: text, code, .. } = cleanup(&agent, &[]).await?;
    ensure!(code == Some(1) && text.contains("FAILED        containerd lease"), "{code:?} {text}");
    Ok(())
}
