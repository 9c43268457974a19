//! Operation of the proxy: cases 56 to 60.

use crate::common::{Case, Setup, answer_time};
use crate::expect::{Want, kept, masked, unused_cluster_ip};
use crate::held::HeldTable;
use crate::objects::{elsewhere, on_node};
use crate::subject::Subject;
use anyhow::{Context as _, Result, bail, ensure};
use keelson_cluster::net::{Family, Outcome, Transport};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

const PERIOD: Duration = Duration::from_secs(2);

/// Contents of the proxy's table of a family: rules with their handles, elements of sets and maps. Elements that
/// connections add (affinity) are left out.
fn contents(case: &Case, family: Family) -> Result<BTreeSet<String>> {
    let kind = if family == Family::V4 { "ip" } else { "ip6" };
    let text = case.world().node().nft(&["-j", "-a", "list", "table", kind, case.subject().table()])?;
    let listed: Value = serde_json::from_str(&text).context("nft writes JSON")?;
    let mut all = BTreeSet::new();
    for object in listed["nftables"].as_array().context("a list")? {
        if let Some(rule) = object.get("rule") {
            all.insert(format!("rule of {} {}: {}", rule["chain"], rule["handle"], rule["expr"]));
        }
        for set in ["set", "map"].iter().filter_map(|kind| object.get(kind)) {
            let name = set["name"].as_str().unwrap_or_default();
            all.insert(format!("set {name} {}", set["handle"]));
            if !name.starts_with("affinity") {
                all.extend(
                    set["elem"]
                        .as_array()
                        .into_iter()
                        .flatten()
                        .map(|elem| format!("element of {name}: {elem}")),
                );
            }
        }
    }
    Ok(all)
}

#[test]
fn case_56_no_change_is_no_operation_and_a_change_affects_one_service() -> Result<()> {
    Case::run_alone(56, Setup::Rough, async |case| {
        case.make("svc", 1, &json!({})).await?;
        case.make("idle", 2, &json!({})).await?;
        case.slices("svc", &[on_node(&case, 1), elsewhere(1)]).await?;
        case.slices("idle", &[on_node(&case, 2), elsewhere(2)]).await?;
        case.synced().await?;
        // The first moment without it is several periods later.
        tokio::time::sleep(2 * PERIOD).await;
        let before = Family::ALL.map(|family| contents(&case, family));
        tokio::time::sleep(3 * PERIOD).await;
        for (family, before) in Family::ALL.into_iter().zip(before) {
            let (before, after) = (before?, contents(&case, family)?);
            ensure!(before == after, "{:?}", before.symmetric_difference(&after).collect::<Vec<_>>());
        }

        let before = Family::ALL.map(|family| contents(&case, family));
        case.slices("svc", &[on_node(&case, 1), elsewhere(3)]).await?;
        let both = [on_node(&case, 1), elsewhere(3)];
        case.eventually_all(vec![(case.pod(), case.v(1), kept(&both))]).await?;
        for (family, before) in Family::ALL.into_iter().zip(before) {
            let (before, after) = (before?, contents(&case, family)?);
            let changed: Vec<_> = before.symmetric_difference(&after).cloned().collect();
            let (rules, elements): (Vec<_>, Vec<_>) =
                changed.iter().partition(|line| line.starts_with("rule"));
            match case.subject() {
                // Rules depend on the numbers of endpoints, which have not changed.
                Subject::Keelson => ensure!(rules.is_empty(), "{rules:?}"),
                Subject::KubeProxy => {
                    ensure!(rules.iter().all(|rule| rule.contains("case-56/svc")), "{rules:?}");
                }
            }
            ensure!(!changed.is_empty() && elements.len() <= 8, "{changed:?}");
        }
        Ok(())
    })
}

#[test]
fn case_57_a_restart_breaks_no_connection_and_keeps_affinity() -> Result<()> {
    Case::run_alone(57, Setup::Rough, async |case| {
        let all = [1, 2, 3, 4, 5].map(elsewhere);
        case.make_with("svc", 1, &json!({}), &all[..2]).await?;
        let hour = json!({
            "sessionAffinity": "ClientIP", "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": 3600}},
        });
        case.make_with("sticky", 2, &hour, &all).await?;
        case.serve("gone", 3, &json!({}), &all[..1]).await?;
        let who = async |family: Family| match case
            .world()
            .client()
            .ask(case.v(2).at(family), Transport::Tcp, answer_time())
            .await?
        {
            Outcome::Answered { by, .. } => Ok(by),
            other => bail!("{other:?}"),
        };
        let before = [who(Family::V4).await?, who(Family::V6).await?];

        // A client sends requests all the time, and every one is answered.
        let done = Arc::new(AtomicBool::new(false));
        let (client, to, over) = (case.pod(), case.v(1).at(Family::V4), done.clone());
        let asking = tokio::spawn(async move {
            let mut asked = 0;
            while !over.load(Ordering::Relaxed) {
                match client.ask(to, Transport::Tcp, answer_time()).await? {
                    Outcome::Answered { .. } => asked += 1,
                    other => bail!("after {asked} answers: {other:?}"),
                }
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            Ok(asked)
        });
        case.bench.running.kill9().await?;
        // Rules stay while the proxy is stopped, and it catches up with changes afterwards.
        case.all([(case.client(), case.w(1), masked(&all[..2]))]).await?;
        case.writer.delete(keelson_cluster::endpoints::Kind::Service, "gone").await?;
        case.bench.running.start_again(case.world()).await?;
        case.synced().await?;
        ensure!([who(Family::V4).await?, who(Family::V6).await?] == before, "a client was moved");
        case.all([
            (case.client(), case.w(1), masked(&all[..2])),
            (case.client(), case.w(3), Want::Untouched),
            (case.pod(), case.v(3), unused_cluster_ip()),
        ])
        .await?;
        done.store(true, Ordering::Relaxed);
        let asked = asking.await.context("the task that asks")??;
        ensure!(asked > 10, "only {asked} questions were asked");
        Ok(())
    })
}

#[test]
fn case_58_endpoints_removed_and_restored_at_once_are_served() -> Result<()> {
    Case::run(58, Setup::Plain, async |case| {
        let both = [on_node(&case, 1), elsewhere(1)];
        case.serve("svc", 1, &json!({}), &both).await?;
        for _ in 0..3 {
            case.slices("svc", &[]).await?;
            case.eventually_all(vec![(case.pod(), case.v(1), Want::Reject)]).await?;
            case.slices("svc", &both).await?;
            case.eventually_all(vec![(case.pod(), case.v(1), kept(&both))]).await?;
        }
        // A later clean-up removes nothing that is in use again.
        case.synced().await?;
        tokio::time::sleep(Duration::from_secs(2)).await;
        case.synced().await?;
        case.all([(case.pod(), case.v(1), kept(&both))]).await
    })
}

#[test]
fn case_59_refused_changes_are_retried_and_completed() -> Result<()> {
    Case::run_alone(59, Setup::Rough, async |case| {
        let both = [on_node(&case, 1), elsewhere(1)];
        case.serve("svc", 1, &json!({}), &both).await?;
        let failures = "kubeproxy_sync_proxy_rules_nftables_sync_failures_total";
        let v4 = [("ip_family", "IPv4")];
        let before = case.metric(failures, &v4).await?;
        let held = HeldTable::take(case.world(), case.subject().table(), Family::V4).await?;
        case.make_with("more", 2, &json!({}), &both).await?;
        case.eventually_all(vec![(case.pod(), case.v(2).v6(), kept(&both))]).await?;
        case.eventually("failures are counted", || async {
            let now = case.metric(failures, &v4).await?;
            ensure!(now > before, "{failures} is {now}, and was {before}");
            Ok(())
        })
        .await?;
        drop(held);
        // All rules are there again, not only changed ones; the first Service too.
        let want = kept(&both);
        case.eventually_all(vec![(case.pod(), case.v(2), want.clone()), (case.pod(), case.v(1), want)])
            .await?;
        case.all([(case.client(), case.w(1), masked(&both))]).await
    })
}

#[test]
fn a_removed_table_comes_back() -> Result<()> {
    Case::run_alone(160, Setup::Rough, async |case| {
        let both = [on_node(&case, 1), elsewhere(1)];
        case.serve("svc", 1, &json!({}), &both).await?;
        for kind in ["ip", "ip6"] {
            case.world().node().nft(&["delete", "table", kind, case.subject().table()])?;
        }
        if case.subject() == Subject::KubeProxy {
            // Without work it checks only once an hour.
            tokio::time::sleep(4 * PERIOD).await;
            case.all([(case.pod(), case.v(1), Want::Untouched)]).await?;
            case.synced().await?;
        }
        case.eventually_all(vec![(case.pod(), case.v(1), kept(&both))]).await?;
        case.all([(case.client(), case.w(1), masked(&both)), (case.client(), case.np(1), masked(&both))])
            .await
    })
}

#[test]
fn case_60_ports_without_local_endpoints_are_counted() -> Result<()> {
    Case::run_alone(60, Setup::Plain, async |case| {
        case.synced().await?;
        let counts = async || {
            let mut counts = Vec::new();
            for policy in ["internal", "external"] {
                for family in ["IPv4", "IPv6"] {
                    let name = "kubeproxy_sync_proxy_rules_no_local_endpoints_total";
                    let labels = [("traffic_policy", policy), ("ip_family", family)];
                    counts.push(case.metric(name, &labels).await?);
                }
            }
            Ok::<_, anyhow::Error>(counts)
        };
        let before = counts().await?;
        let more = |internal: f64, external: f64| -> Vec<f64> {
            before
                .iter()
                .zip([internal, internal, external, external])
                .map(|(was, more)| was + more)
                .collect()
        };
        let soon = async |what: &str, want: Vec<f64>| {
            case.eventually(what, || async {
                let now = counts().await?;
                ensure!(now == want, "{now:?} and not {want:?}");
                Ok(())
            })
            .await
        };
        case.make("nobody", 1, &json!({"internalTrafficPolicy": "Local", "externalTrafficPolicy": "Local"}))
            .await?;
        case.synced().await?;
        soon("no endpoints at all are not counted", more(0.0, 0.0)).await?;
        case.make_with("inside", 2, &json!({"internalTrafficPolicy": "Local"}), &[elsewhere(1)]).await?;
        soon("the internal policy is counted", more(1.0, 0.0)).await?;
        case.make_with("outside", 3, &json!({"externalTrafficPolicy": "Local"}), &[elsewhere(1)]).await?;
        soon("the external policy is counted", more(1.0, 1.0)).await?;
        case.slices("inside", &[on_node(&case, 1)]).await?;
        case.slices("outside", &[]).await?;
        soon("they are counted no more", more(0.0, 0.0)).await
    })
}
