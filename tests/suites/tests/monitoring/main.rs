//! Rules, alerts and dashboard in `packaging/monitoring`, against a real agent, a real proxy and a real Prometheus.
//!
//! Owns: checks that they name only what the program exports, that Prometheus evaluates them, and that each alert has
//! a runbook and a case for promtool; that the dashboard shows what is exported, or a list says what it leaves out. In: the
//! files as they are shipped, `/metrics` of a node at work. Out: nothing; if `KEELSON_PICTURES` names a folder, a picture of
//! the dashboard's panels after five minutes of load.

#[path = "../page/browser.rs"]
mod browser;
mod expressions;
mod files;
#[allow(clippy::print_stderr)] // Shown with a test that fails.
mod node;
mod panels;
mod prometheus;
mod runbooks;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use keelson_harness::util::eventually_slow;

use expressions::metrics_in;
use files::{Dashboard, Rules, documented};
use node::WatchedNode;
use prometheus::{Kind, Prometheus};

/// Of Prometheus itself.
const BUILT_IN: [&str; 2] = ["up", "ALERTS"];
/// Of kube-state-metrics, in the group of rules that says so.
const OUTSIDE: &str = "keelson-outside";
/// Load before the picture.
const PICTURE_LOAD: Duration = Duration::from_secs(300);
/// Families that no panel shows: they count work that succeeds, say what is set, or are the parts or the cause of what a panel
/// shows.
const NOT_SHOWN: [&str; 30] = [
    "keelson_endpoints_bytes_sent",
    "keelson_endpoints_items_sent",
    "keelson_endpoints_persist_duration_seconds",
    "keelson_endpoints_rev",
    "keelson_endpoints_services_computed",
    "keelson_endpoints_source_events",
    "keelson_endpoints_source_objects",
    "keelson_endpoints_states_sent",
    "keelson_endpoints_watched",
    "keelson_image_pull_content_released",
    "keelson_image_pull_retained",
    "keelson_lease_clock_steps",
    "keelson_lease_consecutive_failures",
    "keelson_lease_standing_back",
    "keelson_lease_takeovers",
    "keelson_lease_transitions",
    "keelson_node_status_computations",
    "keelson_node_status_last_report_age_seconds",
    "keelson_proxy_applied_rev",
    "keelson_proxy_build",
    "keelson_proxy_family_enabled",
    "keelson_proxy_transactions",
    "kubelet_image_pull_duration_seconds",
    "kubelet_runtime_operations",
    "kubelet_runtime_operations_duration_seconds",
    "kubeproxy_conntrack_reconciler_sync_duration_seconds",
    "kubeproxy_sync_proxy_rules_duration_seconds",
    "kubeproxy_sync_proxy_rules_endpoint_changes",
    "kubeproxy_sync_proxy_rules_service_changes",
    "process_max_fds",
];

#[test]
fn each_alert_has_a_severity_texts_a_runbook_and_a_case_in_which_it_fires() -> Result<()> {
    let rules = Rules::read()?;
    let cases = files::alerts_with_cases()?;
    let runbooks = files::headings("docs/runbooks.md")?;
    let mut alerts = BTreeSet::new();
    for rule in rules.groups.iter().flat_map(|group| &group.rules) {
        let Some(name) = &rule.alert else { continue };
        ensure!(alerts.insert(name.clone()), "two alerts are {name}");
        let severity = rule.labels.get("severity").map(String::as_str);
        ensure!(matches!(severity, Some("critical" | "warning" | "info")), "{name}: severity {severity:?}");
        for text in ["summary", "description"] {
            ensure!(rule.annotations.get(text).is_some_and(|text| !text.is_empty()), "{name}: no {text}");
        }
        let runbook = rule.annotations.get("runbook_url").with_context(|| format!("{name}: no runbook"))?;
        let (page, anchor) = runbook.split_once('#').with_context(|| format!("{name}: {runbook}"))?;
        ensure!(page.ends_with("/docs/runbooks.md") && anchor == name.to_lowercase(), "{name}: {runbook}");
        ensure!(runbooks.contains(name), "docs/runbooks.md has no section {name}");
        ensure!(cases.contains(name), "rules_test.yaml has no case in which {name} fires");
    }
    let unknown: Vec<_> =
        runbooks.iter().filter(|heading| is_alert(heading) && !alerts.contains(*heading)).collect();
    ensure!(unknown.is_empty(), "docs/runbooks.md has sections of alerts that do not exist: {unknown:?}");
    Ok(())
}

/// Sections of alerts have the alert's name.
fn is_alert(heading: &str) -> bool {
    heading.starts_with("Keelson") && !heading.contains(' ')
}

#[tokio::test(flavor = "multi_thread")]
async fn rules_dashboard_and_docs_name_what_agent_and_proxy_export() -> Result<()> {
    let node = WatchedNode::start().await?;
    let _load = node.load();
    let targets = node.targets().await?;
    let prometheus = Prometheus::start(node.scratch(), &targets).await?;
    let (rules, dashboard) = (Rules::read()?, Dashboard::read()?);

    // What is exported: by this node now, and by a program to which everything has happened. Tests of the crates keep
    // their lists equal to the code.
    let mut families = files::families_of_lists()?;
    for target in &targets {
        let text = target.scrape().await?;
        let series = text.lines().filter(|line| !line.starts_with('#')).count();
        eprintln!("{}: {series} series, {} bytes", target.job, text.len());
        families.extend(prometheus::families(&text)?);
    }
    let series: BTreeSet<String> = families.iter().flat_map(|(name, kind)| kind.series(name)).collect();
    let recorded = rules.recorded();
    let is_known =
        |name: &String| series.contains(name) || recorded.contains(name) || BUILT_IN.contains(&name.as_str());
    for group in &rules.groups {
        for rule in &group.rules {
            let foreign = |name: &String| group.name == OUTSIDE && name.starts_with("kube_");
            for name in metrics_in(&rule.expr) {
                ensure!(
                    is_known(&name) || foreign(&name),
                    "{} names {name}, which is not exported",
                    rule.name()
                );
            }
        }
    }
    for (panel, expr) in dashboard.expressions() {
        for name in metrics_in(&expr) {
            ensure!(is_known(&name), "panel {panel} names {name}, which is not exported");
        }
    }
    let documented = documented("docs/monitoring.md")?;
    let missing: Vec<_> = families.keys().filter(|name| !documented.contains(*name)).collect();
    ensure!(missing.is_empty(), "docs/monitoring.md does not have {missing:?}");
    let gone: Vec<_> = documented.iter().filter(|name| !families.contains_key(*name)).collect();
    ensure!(gone.is_empty(), "docs/monitoring.md has {gone:?}, which is not exported");

    let shown: BTreeSet<String> =
        dashboard.expressions().iter().flat_map(|(_, expr)| metrics_in(expr)).collect();
    let is_shown =
        |(name, kind): (&String, &Kind)| kind.series(name).iter().any(|series| shown.contains(series));
    let not_shown: BTreeSet<&str> =
        families.iter().filter(|family| !is_shown(*family)).map(|(name, _)| name.as_str()).collect();
    ensure!(
        not_shown == BTreeSet::from(NOT_SHOWN),
        "the dashboard does not show {not_shown:?}, and NOT_SHOWN has another list"
    );

    prometheus.follows_all(targets.len()).await?;
    for rule in rules.groups.iter().flat_map(|group| &group.rules) {
        prometheus.query(&rule.expr).await.with_context(|| rule.name())?;
    }
    eventually_slow("every rule was evaluated without an error", || async {
        prometheus.rules_are_healthy(rules.groups.iter().map(|group| group.rules.len()).sum()).await
    })
    .await?;
    // From the kernel to the alert, and to the Node.
    node.modify_rules()?;
    eventually_slow("the alert on modified rules fires", || prometheus.fires("KeelsonProxyRulesModified"))
        .await?;
    eventually_slow("the Node has an Event", || node.has_event("ServiceProxyRulesRepaired")).await?;

    eventually_slow("every panel has data", || async {
        let mut has_data = BTreeMap::new();
        for (panel, expr) in dashboard.expressions() {
            let found = prometheus.query(&Dashboard::concrete(&expr)).await.with_context(|| panel.clone())?;
            *has_data.entry(panel).or_insert(false) |= found;
        }
        let empty: Vec<_> = has_data.iter().filter(|(_, found)| !**found).map(|(panel, _)| panel).collect();
        ensure!(empty.is_empty(), "panels without data: {empty:?}");
        Ok(())
    })
    .await?;
    runbooks::queries_have_results(prometheus.url()).await?;

    let folder = std::env::var_os("KEELSON_PICTURES");
    if folder.is_some() {
        tokio::time::sleep(PICTURE_LOAD).await;
    }
    let picture = panels::picture(node.scratch(), &prometheus, &dashboard).await?;
    if let Some(folder) = folder.map(PathBuf::from) {
        std::fs::create_dir_all(&folder)?;
        std::fs::write(folder.join("dashboard.png"), picture)?;
    }
    Ok(())
}
