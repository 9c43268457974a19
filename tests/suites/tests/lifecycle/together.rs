//! A stock kubelet and a companion that write to one Node at the same time.

use crate::common::{
    ACCOUNT, AGENT, companion, describe_event, on_cluster, set_condition, settings, wait_until_healthy,
};
use anyhow::{Context as _, Result, ensure};
use k8s_openapi::api::core::v1::Node;
use keelson_cluster::kube::{Change, Cluster, KubeletOptions};
use keelson_harness::agent::Agent;
use keelson_harness::containerd::{Containerd, Kind, Options};
use keelson_harness::scratch::Scratch;
use keelson_harness::util::{PATIENCE, eventually};
use serde_json::{Map, Value};
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

const NAME: &str = "both";

const TOGETHER: Duration = Duration::from_secs(60);

/// Conditions of other processes, which change all the time.
const FLIPPING: [&str; 3] = ["KernelDeadlock", "example.com/DiskSlow", "ReadonlyFilesystem"];

const COMPANIONS: [&str; 5] = [
    "KernelDeadlock",
    "example.com/DiskSlow",
    "ReadonlyFilesystem",
    "ImagePullsStalled",
    "KeelsonStateNotDurable",
];

/// A status in two parts: the kubelet's fields, and the companion's conditions by type.
type Halves = (Value, BTreeMap<String, Value>);

fn halves(node: &Node) -> Result<Halves> {
    let mut status = serde_json::to_value(node.status.as_ref().context("a Node has a status")?)?;
    let conditions = status["conditions"].as_array_mut().map(std::mem::take).unwrap_or_default();
    let kind = |condition: &Value| condition["type"].as_str().unwrap_or_default().to_owned();
    let (companions, kubelets): (Vec<_>, Vec<_>) =
        conditions.into_iter().partition(|condition| COMPANIONS.contains(&kind(condition).as_str()));
    let by_kind: Map<_, _> = kubelets.into_iter().map(|condition| (kind(&condition), condition)).collect();
    status["conditions"] = by_kind.into();
    Ok((status, companions.into_iter().map(|condition| (kind(&condition), condition)).collect()))
}

#[test]
fn kubelet_and_companion_keep_each_others_conditions() -> Result<()> {
    on_cluster(async |cluster| {
        let scratch = Scratch::new()?;
        let options = Options { network: true, ..Options::default() };
        let containerd = Containerd::start(&scratch, Kind::Debian16, &options).await?;
        let options = KubeletOptions::default()
            .set("nodeStatusUpdateFrequency", "1s")
            .set("nodeStatusReportFrequency", "1s");
        let _kubelet = cluster.kubelet(&scratch, NAME, &containerd, &options).await?;
        cluster.admin.await_condition(NAME, "Ready", "True").await?;
        let identity = companion(cluster, &scratch, ACCOUNT, NAME).await?;
        let settings = settings(NAME, &identity.kubeconfig())
            .set("node.node_status_update_frequency", "1s")
            .set("node.node_status_report_frequency", "1s");
        let watch = cluster.admin.watch(cluster.admin.nodes(), NAME).await?;
        let mut agent = Agent::start(&scratch, &containerd.endpoint(), &settings).await?;
        wait_until_healthy(&agent).await?;

        let (began, mut flips) = (Instant::now(), 0_usize);
        let mut last = [false; FLIPPING.len()];
        let mut killed = false;
        while began.elapsed() < TOGETHER {
            let turn = flips % FLIPPING.len();
            last[turn] = !last[turn];
            let (status, reason) = if last[turn] { ("True", "Seen") } else { ("False", "NotSeen") };
            set_condition(&agent, FLIPPING[turn], status, reason).await?;
            flips += 1;
            tokio::time::sleep(Duration::from_millis(300)).await;
            if !killed && began.elapsed() > TOGETHER / 2 {
                killed = true;
                agent.kill9()?;
                agent.start_again().await?;
            }
        }
        for (kind, last) in FLIPPING.iter().zip(last) {
            cluster.admin.await_condition(NAME, kind, if last { "True" } else { "False" }).await?;
        }
        let versions = watch.changes()?;
        let (of_kubelet, of_companion) = every_version(&versions)?;
        eprintln!(
            "{flips} flips; {} versions of the Node, {of_kubelet} by the kubelet, {of_companion} by the companion",
            versions.len()
        );
        ensure!(of_kubelet >= 15 && of_companion >= 15, "they hardly wrote at the same time");
        ensure!(of_companion <= 2 * usize::try_from(began.elapsed().as_secs())?, "more than a write a pass");
        own_conditions_only(cluster, identity.user())?;
        owners(&versions)?;
        two_leases(cluster).await
    })
}

/// Checks that no write changed both halves, none removed a condition of the companion, and no time of either went
/// back. Returns the number of changes to each half.
fn every_version(versions: &[Change<Node>]) -> Result<(usize, usize)> {
    let (mut of_kubelet, mut of_companion) = (0, 0);
    let mut before: Option<Halves> = None;
    for version in versions {
        let node = version.object.as_ref().context("the Node was deleted")?;
        let now = halves(node)?;
        if let Some(before) = &before {
            let (kubelets, companions) = (before.0 != now.0, before.1 != now.1);
            ensure!(!(kubelets && companions), "one write changed both halves: {before:?}\nthen {now:?}");
            of_kubelet += usize::from(kubelets);
            of_companion += usize::from(companions);
            for (kind, condition) in &before.1 {
                let after = now.1.get(kind).with_context(|| format!("the condition {kind} was lost"))?;
                check_versions_advance(condition, after)?;
            }
            for (kind, condition) in before.0["conditions"].as_object().into_iter().flatten() {
                check_versions_advance(condition, &now.0["conditions"][kind])?;
            }
        }
        before = Some(now);
    }
    let (_, last) = before.context("the Node was never seen")?;
    let missing: Vec<_> = COMPANIONS.iter().filter(|kind| !last.contains_key(**kind)).collect();
    ensure!(missing.is_empty(), "these never came: {missing:?}");
    Ok((of_kubelet, of_companion))
}

/// An old value that comes back has an old time.
fn check_versions_advance(before: &Value, after: &Value) -> Result<()> {
    for time in ["lastHeartbeatTime", "lastTransitionTime"] {
        let of = |condition: &Value| condition[time].as_str().unwrap_or_default().to_owned();
        ensure!(of(before) <= of(after), "{time} went back: {before}, then {after}");
    }
    Ok(())
}

/// Every write of the companion to this Node contains only its own conditions.
fn own_conditions_only(cluster: &Cluster, user: &str) -> Result<()> {
    let writes = cluster.api.audit(|event| {
        event.user == user && event.name == NAME && event.resource == "nodes" && event.is_write()
    })?;
    for write in &writes {
        ensure!(
            write.user_agent.starts_with(AGENT) && write.is_for("patch", "nodes/status"),
            "{}",
            describe_event(write)
        );
        // An API server with a slow etcd returns 504, which is no fault of the companion.
        ensure!(write.code == Some(200) || write.code == Some(504), "{}", describe_event(write));
        let body = write.body.as_ref().and_then(Value::as_object).context("a patch has a body")?;
        let status = body.get("status").and_then(Value::as_object).context("a patch has a status")?;
        ensure!(
            body.len() == 1 && status.len() == 1,
            "it writes more than conditions: {}",
            describe_event(write)
        );
        let conditions = status.get("conditions").and_then(Value::as_array).context("conditions")?;
        for condition in conditions {
            let kind = condition["type"].as_str().context("a condition has a type")?;
            ensure!(COMPANIONS.contains(&kind), "it writes the condition {kind}: {}", describe_event(write));
        }
    }
    Ok(())
}

/// Checks the managers of each condition in the managed fields.
fn owners(versions: &[Change<Node>]) -> Result<()> {
    let node = versions.last().and_then(|version| version.object.as_ref()).context("there is a Node")?;
    let mut owners: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for entry in node.metadata.managed_fields.iter().flatten() {
        let fields = entry.fields_v1.as_ref().map(|fields| &fields.0).unwrap_or(&Value::Null);
        let conditions = fields["f:status"]["f:conditions"].as_object().into_iter().flatten();
        for (key, _) in conditions.filter(|(key, _)| key.starts_with("k:")) {
            let key: Value = serde_json::from_str(key.trim_start_matches("k:"))?;
            let manager = entry.manager.clone().unwrap_or_default();
            owners.entry(key["type"].as_str().unwrap_or_default().to_owned()).or_default().insert(manager);
        }
    }
    eprintln!("owners of conditions: {owners:?}");
    for (kind, managers) in &owners {
        let expected = if COMPANIONS.contains(&kind.as_str()) { "keelson" } else { "kubelet" };
        ensure!(managers.iter().all(|manager| manager == expected), "{kind} is of {managers:?}");
    }
    ensure!(COMPANIONS.iter().all(|kind| owners.contains_key(*kind)), "{owners:?}");
    Ok(())
}

/// Checks that both Leases exist, are held by the node, and are renewed.
async fn two_leases(cluster: &Cluster) -> Result<()> {
    for name in [NAME.to_owned(), format!("keelson-{NAME}")] {
        let renewed = async || -> Result<_> {
            let lease = cluster.admin.lease(&name).await?.context("there is no Lease")?;
            let owners = lease.metadata.owner_references.unwrap_or_default();
            ensure!(owners.iter().any(|owner| owner.kind == "Node" && owner.name == NAME), "{owners:?}");
            let spec = lease.spec.context("a Lease has a spec")?;
            ensure!(spec.holder_identity.as_deref() == Some(NAME), "{spec:?}");
            Ok(spec.renew_time.context("a Lease has a renewTime")?.0)
        };
        let first = renewed().await?;
        eventually(PATIENCE, &format!("the Lease {name} is renewed"), || async {
            ensure!(renewed().await? > first, "it is not");
            Ok(())
        })
        .await?;
    }
    Ok(())
}
