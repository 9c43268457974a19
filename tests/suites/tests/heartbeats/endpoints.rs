//! The condition of service endpoints: False once they are synced with the API server, True when a right to them is
//! missing for long enough, absent if they are disabled; and it does not change at a restart.

use crate::common::{NODE_MANIFEST, Role, TestEnv, eventually_slow, manifest_of, on_cluster, quick};
use anyhow::{Context as _, Result, ensure};
use k8s_openapi::api::core::v1::{Node, NodeCondition};
use keelson_cluster::kube::{Change, Cluster, condition, refused};
use kube::api::{Patch, PatchParams};
use serde_json::{Value, json};
use std::time::{Duration, Instant};

const KIND: &str = "ServiceEndpointsStale";

/// A condition that the test sets, so that a report is due.
const MARK: &str = "Mark";

/// A problem is reported after this time.
const ONSET: Duration = Duration::from_secs(30);

const SLICES: &str = "/apis/discovery.k8s.io/v1/endpointslices?limit=1";

#[test]
fn the_endpoints_condition_survives_restarts_and_is_stale_without_rights() -> Result<()> {
    on_cluster(async |cluster| {
        cluster.admin.apply(NODE_MANIFEST).await?;
        let (companion, node) = tokio::join!(
            follows(cluster, "endpoints-companion", Role::Companion),
            follows(cluster, "endpoints-node", Role::Node)
        );
        companion.context("companion").and(node.context("role node"))
    })
}

/// The manifest that gives these agents the right to EndpointSlices.
fn rights(name: &str, role: Role) -> String {
    match role {
        Role::Companion => manifest_of(name),
        Role::Node => NODE_MANIFEST.to_owned(),
    }
}

/// The same without this right.
fn without_slices(manifest: &str) -> Result<String> {
    let mut documents: Vec<Value> =
        serde_saphyr::from_multiple(manifest).context("the manifest is no YAML")?;
    let mut removed = 0;
    for rules in documents.iter_mut().filter_map(|document| document.get_mut("rules")?.as_array_mut()) {
        let before = rules.len();
        rules.retain(|rule| rule["resources"] != json!(["endpointslices"]));
        removed += before - rules.len();
    }
    ensure!(removed == 1, "{removed} rules are about EndpointSlices");
    Ok(documents.iter().map(Value::to_string).collect::<Vec<_>>().join("\n---\n"))
}

/// Result of a list of EndpointSlices by this agent's user.
async fn list_slices(env: &TestEnv) -> Result<kube::Result<Value>> {
    let client = env.identity.client().await?;
    let request = http::Request::get(SLICES).body(Vec::new())?;
    Ok(client.request(request).await)
}

async fn follows(cluster: &Cluster, name: &str, role: Role) -> Result<()> {
    let mut env = TestEnv::new(cluster, name, role, quick()).await?;
    env.agent.set("endpoints.source", "kube")?;
    // The condition changes back soon.
    env.agent.set("node.eviction_pressure_transition_period", "2s")?;
    // No client follows them here.
    env.agent.set("endpoints.watch", "always")?;
    // Connections that a test can break.
    let line = cluster.tcp_proxy().await?;
    env.via(&line.endpoint())?;
    eventually_slow("the API server knows the rights", || async { Ok(list_slices(&env).await?.map(drop)?) })
        .await?;

    // On a first start nothing is known yet, which is reported correctly, if at all.
    let versions = cluster.admin.watch(cluster.admin.nodes(), name).await?;
    env.agent.start_again().await?;
    let first = cluster.admin.await_condition(name, KIND, "False").await?;
    ensure!(first.reason.as_deref() == Some("EndpointsSynced"), "{first:?}");
    reported(cluster, &env, "First").await?;
    let answer = condition_history(&versions.changes()?);
    ensure!(statuses(&answer) == ["False EndpointsSynced"], "the first start reported {answer:#?}");
    drop(versions);

    for way in ["Killed", "Terminated"] {
        let versions = cluster.admin.watch(cluster.admin.nodes(), name).await?;
        match way {
            "Killed" => env.agent.kill9()?,
            _ => ensure!(env.agent.terminate().await?.success(), "it did not end in peace"),
        }
        let started = Instant::now();
        env.agent.start_again().await?;
        reported(cluster, &env, way).await?;
        for (at, printed) in condition_history(&versions.changes()?) {
            // A machine so slow that the grace period expired gets the condition.
            let late = printed.status == "True" && at.duration_since(started) >= ONSET;
            ensure!(late || printed.status == "False", "{way} and started again, it reported {printed:?}");
            let same = printed.last_transition_time == first.last_transition_time;
            ensure!(late || same, "a transition without one, {way}: {printed:?} after {first:?}");
        }
    }

    let versions = cluster.admin.watch(cluster.admin.nodes(), name).await?;
    let lost = lose_and_restore_rights(cluster, &env, role, || line.reset()).await?;
    ensure!(lost.last_transition_time >= first.last_transition_time, "{first:?}, then {lost:?}");
    let answer = condition_history(&versions.changes()?);
    let turns = ["False EndpointsSynced", "True SourceRefused", "False EndpointsSynced"];
    ensure!(statuses(&answer) == turns, "a right that was lost for a while: {answer:#?}");
    Ok(())
}

/// One right is removed: endpoints are stale, everything else is healthy. It is restored, and they are current. Returns
/// the conditions meanwhile.
async fn lose_and_restore_rights(
    cluster: &Cluster,
    env: &TestEnv,
    role: Role,
    reset: impl Fn(),
) -> Result<NodeCondition> {
    let manifest = rights(&env.name, role);
    cluster.admin.apply(&without_slices(&manifest)?).await?;
    eventually_slow("the API server knows that the right is gone", || async {
        refused(list_slices(env).await?, 403)
    })
    .await?;
    // A running watch is not authorized again; the next one is.
    reset();
    let lost = eventually_slow("the condition has the reason", || async {
        let found = cluster.admin.condition(&env.name, KIND).await?.context("it is gone")?;
        let message = found.message.clone().unwrap_or_default();
        ensure!(found.status == "True" && found.reason.as_deref() == Some("SourceRefused"), "{found:?}");
        // E6: the text of the error is in the log, in `keelson endpoints` and in /readyz.
        ensure!(!message.contains("endpointslices") && !message.contains("403"), "{found:?}");
        Ok(found)
    })
    .await?;
    let shown = eventually_slow("allowed resources are healthy", || async {
        let shown = env.agent.json("/debug/endpoints").await?;
        let sources = shown["sources"].as_array().context("no sources")?;
        for source in sources {
            let wanted = if source["resource"] == "endpointslices" { "failing" } else { "healthy" };
            ensure!(source["health"] == wanted, "{shown}");
        }
        Ok(shown)
    })
    .await?;
    ensure!(shown["state"] == "stale" && shown["services"].as_u64() > Some(0), "{shown}");
    let ready = env.readyz().await?.text();
    let wrong: Vec<_> = ready.lines().filter(|line| line.starts_with("[-]")).collect();
    ensure!(wrong.len() == 1 && wrong[0].starts_with("[-]endpoints") && wrong[0].contains("403"), "{ready}");
    // Heartbeats are not affected.
    env.wait_for_renewals(cluster, 2).await?;
    let answer = env.agent.output(&["node", "--check"]).await?;
    ensure!(answer.starts_with("State:    healthy\n"), "{answer}");

    cluster.admin.apply(&manifest).await?;
    let back = cluster.admin.await_condition(&env.name, KIND, "False").await?;
    ensure!(back.reason.as_deref() == Some("EndpointsSynced"), "{back:?}");
    ensure!(back.last_transition_time >= lost.last_transition_time, "{lost:?}, then {back:?}");
    env.wait_until_healthy().await?;
    Ok(lost)
}

/// Waits until the endpoints are current and a later report is at the API server.
async fn reported(cluster: &Cluster, env: &TestEnv, word: &str) -> Result<()> {
    eventually_slow("the endpoints are current", || async {
        let shown = env.agent.json("/debug/endpoints").await?;
        ensure!(shown["state"] == "synced", "they are {shown}");
        Ok(())
    })
    .await?;
    env.agent.output(&["node", "set-condition", MARK, "True", "--reason", word]).await?;
    eventually_slow("a report with the mark", || async {
        let mark = cluster.admin.condition(&env.name, MARK).await?.context("no mark")?;
        ensure!(mark.reason.as_deref() == Some(word), "{mark:?}");
        Ok(())
    })
    .await
}

/// The condition in each version of a Node that has it, and when that was seen.
fn condition_history(versions: &[Change<Node>]) -> Vec<(Instant, NodeCondition)> {
    let nodes = versions.iter().filter_map(|version| Some((version.at, version.object.as_ref()?)));
    nodes.filter_map(|(at, node)| Some((at, condition(node, KIND)?.clone()))).collect()
}

/// Status and reason in order, without repeats.
fn statuses(printed: &[(Instant, NodeCondition)]) -> Vec<String> {
    let word = |printed: &NodeCondition| {
        format!("{} {}", printed.status, printed.reason.as_deref().unwrap_or_default())
    };
    let mut words: Vec<_> = printed.iter().map(|(_, printed)| word(printed)).collect();
    words.dedup();
    words
}

/// E5: disabled endpoints have no condition; the next start removes one that was left on the Node.
#[test]
fn e5_disabled_endpoints_have_no_condition_and_no_requests() -> Result<()> {
    on_cluster(async |cluster| {
        cluster.admin.apply(NODE_MANIFEST).await?;
        let (companion, node) = tokio::join!(
            check_disabled(cluster, "no-endpoints-companion", Role::Companion),
            check_disabled(cluster, "no-endpoints-node", Role::Node)
        );
        companion.context("companion").and(node.context("role node"))
    })
}

async fn check_disabled(cluster: &Cluster, name: &str, role: Role) -> Result<()> {
    let mut env = TestEnv::new(cluster, name, role, quick()).await?;
    env.agent.set("endpoints.source", "kube")?;
    // No client follows them here.
    env.agent.set("endpoints.watch", "always")?;
    env.agent.start_again().await?;
    cluster.admin.await_condition(name, KIND, "False").await?;
    for way in ["Setting", "Gate"] {
        env.agent.terminate().await?;
        env.agent.set("endpoints.source", if way == "Gate" { "kube" } else { "off" })?;
        env.agent.set("feature_gates.ServiceEndpoints", way != "Gate")?;
        // An agent of an earlier version leaves conditions with other names.
        let old = json!({"status": {"conditions": [{"type": "ServiceEndpointsCurrent", "status": "True"}]}});
        cluster.admin.nodes().patch_status(name, &PatchParams::default(), &Patch::Strategic(&old)).await?;
        let begun = env.requests(cluster)?.len();
        env.agent.start_again().await?;
        eventually_slow("the conditions are gone", || async {
            for kind in [KIND, "ServiceEndpointsCurrent"] {
                let found = cluster.admin.condition(name, kind).await?;
                ensure!(found.is_none(), "{way}: {found:?}");
            }
            Ok(())
        })
        .await?;
        env.agent.output(&["node", "set-condition", MARK, "True", "--reason", way]).await?;
        eventually_slow("a report with the mark", || async {
            let mark = cluster.admin.condition(name, MARK).await?.context("no mark")?;
            ensure!(mark.reason.as_deref() == Some(way), "{mark:?}");
            Ok(())
        })
        .await?;
        let found = cluster.admin.condition(name, KIND).await?;
        ensure!(found.is_none(), "{way}: {found:?}");
        let ready = env.readyz().await?.success()?.text();
        ensure!(!ready.contains("endpoints"), "{ready}");
        let asked = env.requests(cluster)?;
        let of_endpoints = ["services", "endpointslices", "servicecidrs"];
        let wrong: Vec<_> =
            asked[begun..].iter().filter(|event| of_endpoints.contains(&event.resource.as_str())).collect();
        ensure!(wrong.is_empty(), "it requested unused objects: {wrong:#?}");
    }
    Ok(())
}
