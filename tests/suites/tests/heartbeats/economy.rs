//! Cost of heartbeats while nothing changes, and over restarts.

use crate::common::{
    Role, TestEnv, eventually_slow, on_cluster, pauses, quick, run, shared, sleep_seconds, verbs_and_codes,
    within,
};
use anyhow::{Context as _, Result, ensure};
use keelson_cluster::kube::{AuditEvent, Cluster};
use keelson_harness::agent::Settings;
use serde_json::{Value, json};

fn conditions(write: &AuditEvent) -> Result<Vec<Value>> {
    let body = write.body.as_ref().context("the audit log has bodies")?;
    Ok(body["status"]["conditions"].as_array().cloned().unwrap_or_default())
}

/// Intervals of 6 s instead of 5 min: the first post at the start, the second after half an interval to one and a half,
/// then one per interval; a pass every second in between sends no request. The actor's tests cover an hour.
async fn idles(cluster: &Cluster, name: &str) -> Result<()> {
    let settings = quick().set("node.node_status_report_frequency", "6s");
    let env = TestEnv::started(cluster, name, Role::Node, settings).await?;
    eventually_slow("three idle reports", || async {
        let count = env.status_writes(cluster)?.len();
        ensure!(count >= 4, "{count} reports");
        Ok(())
    })
    .await?;
    let writes = env.status_writes(cluster)?;
    let between = pauses(&writes);
    eprintln!("{between:?}");
    let idle = writes.iter().map(conditions).collect::<Result<Vec<_>>>()?;
    let is_idle = |list: &[Value]| {
        list.iter().all(|one| one.as_object().is_some_and(|one| one.keys().eq(["lastHeartbeatTime", "type"])))
    };
    let first = idle.iter().position(|list| is_idle(list)).context("no idle report")?;
    // The first report created the Node.
    assert_eq!(first, 0, "{writes:#?}");
    let asked = env.requests(cluster)?;
    let made = asked.iter().find(|event| event.is_for("create", "nodes")).context("not registered")?;
    let pause = writes[0].received.duration_since(made.ended).as_secs_f64();
    within("the pause before the first idle report", pause, 2.9, 60.0)?;
    // A report that a busy machine makes late shortens the next pause, so only their sum has a lower limit.
    let pauses = between.len() as f64;
    within(
        "all pauses between idle reports together",
        between.iter().sum(),
        6.0 * pauses - 3.0,
        60.0 * pauses,
    )?;
    for (write, list) in writes.iter().zip(&idle).skip(first) {
        ensure!(!list.is_empty() && is_idle(list), "{list:?}");
        let body = write.body.as_ref().context("no body")?;
        let status = body["status"].as_object().context("no status")?;
        let keys: Vec<_> = status.keys().map(String::as_str).collect();
        assert_eq!(keys, ["$setElementOrder/conditions", "conditions"], "{body}");
        assert_eq!(write.code, Some(200));
    }
    // No request for the Node: the watch has it.
    let last = writes.last().context("no report")?;
    let asked = env.requests(cluster)?;
    let begun = writes[first].received;
    let quiet: Vec<_> = asked
        .iter()
        .filter(|event| event.received > begun && event.received < last.received)
        .filter(|event| !event.is_for("patch", "leases") && !event.is_for("patch", "nodes/status"))
        .collect();
    assert!(quiet.is_empty(), "{quiet:#?}");
    Ok(())
}

#[test]
fn case_27_an_idle_node_sends_heartbeats_only_at_the_kubelets_intervals() -> Result<()> {
    run(async {
        let shared = shared().await?;
        idles(&shared.cluster, "case-27").await
    })
}

/// E7: writes of a companion with the shipped defaults, and with intervals so short that an hour's passes fit: its
/// conditions once, no Lease, and nothing after that, restarts included. It has no rights to Leases.
#[test]
fn e7_a_quiet_companion_writes_its_conditions_once_and_no_lease() -> Result<()> {
    on_cluster(async |cluster| {
        let settings = quick().set("node.node_status_report_frequency", "1s");
        let mut env = TestEnv::without_lease(cluster, "e7-quiet", settings).await?;
        env.agent.start_again().await?;
        eventually_slow("its conditions", || async {
            cluster.admin.condition("e7-quiet", "KeelsonStateNotDurable").await?.map(drop).context("none")
        })
        .await?;
        env.wait_until_healthy().await?;
        for way in ["killed", "terminated", "left alone"] {
            match way {
                "killed" => env.agent.kill9()?,
                "terminated" => drop(env.agent.terminate().await?),
                _ => {}
            }
            if way != "left alone" {
                env.agent.start_again().await?;
            }
            eventually_slow("ten passes", || async {
                let passes = env.metric("keelson_node_status_computations_total").await?;
                ensure!(passes >= 10.0, "{passes} passes");
                Ok(())
            })
            .await?;
            env.wait_until_healthy().await?;
        }
        let asked = env.requests(cluster)?;
        let writes: Vec<_> = asked.iter().filter(|event| event.is_write()).collect();
        ensure!(writes.len() == 1 && writes[0].is_for("patch", "nodes/status"), "{writes:#?}");
        ensure!(asked.iter().all(|event| event.resource != "leases"), "it asked for a Lease");
        ensure!(asked.iter().all(|event| event.code != Some(403)), "it lacks a right");

        let ready = env.readyz().await?.success()?.text();
        ensure!(!ready.contains("lease"), "{ready}");
        let shown = env.agent.output(&["node", "--check"]).await?;
        ensure!(shown.contains("Lease:    disabled: node.companion_lease is false"), "{shown}");
        ensure!(shown.contains("next report on a change"), "{shown}");
        let metrics = env.agent.http_get("/metrics").await?.success()?.text();
        ensure!(!metrics.contains("keelson_lease_"), "{metrics}");
        ensure!(!metrics.contains("status_last_report_age"), "{metrics}");
        Ok(())
    })
}

/// E7: after an outage the watches and the reports of a companion without a Lease continue by themselves.
#[test]
fn e7_a_companion_without_a_lease_continues_after_an_outage() -> Result<()> {
    on_cluster(async |cluster| {
        let line = cluster.tcp_proxy().await?;
        let settings = quick().set("kube.request_timeout", "2s");
        let mut env = TestEnv::without_lease(cluster, "e7-outage", settings).await?;
        env.via(&line.endpoint())?;
        env.agent.start_again().await?;
        env.wait_until_healthy().await?;
        line.cut();
        env.agent.output(&["node", "set-condition", "Late", "True", "--reason", "Waited"]).await?;
        env.wait_until_failing("no answer").await?;
        line.repair();
        cluster.admin.await_condition("e7-outage", "Late", "True").await?;
        env.wait_until_healthy().await
    })
}

/// Kills and stops an agent with the default intervals repeatedly: it writes nothing that a continuously running agent
/// would not have written.
async fn restarts(cluster: &Cluster, name: &str, role: Role) -> Result<()> {
    let mut env = TestEnv::reporting(cluster, name, role, Settings::new()).await?;
    // A fresh node has sent its changes in its first seconds.
    sleep_seconds(2).await;
    let shown =
        env.agent.output(&["node", "set-condition", "Survives", "True", "--reason", "ItDoes"]).await?;
    ensure!(shown.contains("is set to"), "{shown}");
    // The condition may be seen before the request is in the audit log.
    let reports = eventually_slow("the condition is reported", || async {
        let writes = env.status_writes(cluster)?;
        let mut kinds = writes.iter().filter_map(|write| Some(write.body.as_ref()?.to_string()));
        ensure!(kinds.any(|body| body.contains("\"Survives\"")), "not in {} writes", writes.len());
        Ok(writes.len())
    })
    .await?;
    let node = cluster.admin.node(&env.name).await?.context("no Node")?;

    for kill in [true, false, true, true, false] {
        // At all moments of the interval of 10 s except a renewal: the next process does not know of one in flight.
        sleep_seconds(3).await;
        while env.is_about_to_renew(cluster)? {
            sleep_seconds(1).await;
        }
        if kill {
            env.agent.kill9()?;
        } else {
            let status = env.agent.terminate().await?;
            ensure!(status.success(), "ended with {status}");
        }
        env.agent.start_again().await?;
        // The pass at the start compares the Node with the present status.
        eventually_slow("a pass", || async {
            let passes = env.metric("keelson_node_status_computations_total").await?;
            ensure!(passes >= 1.0, "{passes} passes");
            Ok(())
        })
        .await?;
    }
    env.wait_for_renewals(cluster, 1).await?;
    let writes = env.status_writes(cluster)?;
    assert_eq!(writes.len(), reports, "{:#?}", &writes[reports..]);
    let after = cluster.admin.node(&env.name).await?.context("no Node")?;
    assert_eq!(
        node.metadata.resource_version, after.metadata.resource_version,
        "another client wrote the Node"
    );

    let all = env.lease_requests(cluster)?;
    let written: Vec<_> = all.iter().filter(|event| event.is_write()).cloned().collect();
    let between = pauses(&written);
    eprintln!("{role:?}: pauses between writes of the Lease: {between:?}");
    // A busy machine delays single renewals, and the next one is not later for it. A write because of a restart would be one in addition.
    let mean = between.iter().sum::<f64>() / between.len() as f64;
    within("the mean pause between writes of the Lease", mean, 9.4, 60.0)?;
    for pause in &between {
        within("the pause between writes of the Lease", *pause, 7.0, 60.0)?;
    }
    let made: Vec<_> = written.iter().filter(|event| event.verb == "create").collect();
    assert_eq!(made.len(), 1, "{:?}", verbs_and_codes(&all));
    let others: Vec<_> = env.requests(cluster)?.into_iter().filter(AuditEvent::is_write).collect();
    let others = others.iter().filter(|event| event.resource != "leases").count() - reports;
    assert_eq!(
        others,
        usize::from(role == Role::Node),
        "a Node is registered once, and nothing else written"
    );
    let shown = env.node_json().await?;
    ensure!(shown.to_string().contains("Survives"), "{shown}");
    Ok(())
}

#[test]
fn restarts_cause_no_additional_writes() -> Result<()> {
    on_cluster(async |cluster| {
        let (node, companion) = tokio::join!(
            restarts(cluster, "restarted", Role::Node),
            restarts(cluster, "restarted-companion", Role::Companion)
        );
        node.context("role node").and(companion.context("role companion"))
    })
}

#[test]
fn a_companion_does_not_write_a_node_of_a_kubelet() -> Result<()> {
    on_cluster(async |cluster| {
        let env = TestEnv::reporting(cluster, "companion", Role::Companion, quick()).await?;
        sleep_seconds(4).await;
        let writes = env.status_writes(cluster)?;
        assert_eq!(writes.len(), 1, "{writes:#?}");
        let node = cluster.admin.node("companion").await?.context("no Node")?;
        let status = node.status.context("no status")?;
        let kinds: Vec<_> = status.conditions.unwrap_or_default().into_iter().map(|one| one.type_).collect();
        assert_eq!(kinds, ["ImagePullsStalled", "KeelsonStateNotDurable"]);
        assert!(status.capacity.is_none() && status.addresses.is_none() && status.images.is_none());
        let shown = env.node_json().await?;
        assert_eq!((&shown["state"], &shown["role"]), (&json!("healthy"), &json!("companion")), "{shown}");
        Ok(())
    })
}
