//! An API server with wrong responses: every agent recovers by itself once they end, sends no more requests than a
//! kubelet meanwhile, and reports what is wrong and since when.

use crate::common::{Role, TestEnv, eventually_slow, on_cluster, quick, run, shared, sleep_seconds, within};
use anyhow::{Context as _, Result, ensure};
use keelson_cluster::kube::{ApiFault, ApiMatch, Cluster};
use std::time::{Duration, Instant};

/// The response, the reason that the agent must report, and the maximum number of requests per second.
struct Case {
    name: &'static str,
    fault: ApiFault,
    says: &'static str,
    per_second: f64,
}

/// A kubelet with intervals of a second tries each of renewal and status five times in one, and renewals five times
/// more after a read; in addition the two watches restart.
const KUBELET: f64 = 25.0;
/// Errors that a retry cannot fix are retried once per interval.
const ONCE: f64 = 6.0;

async fn survives(cluster: &Cluster, case: Case, role: Role) -> Result<()> {
    let proxy = cluster.proxy().await?;
    let mut env = TestEnv::new(cluster, case.name, role, quick()).await?;
    env.via(&proxy.endpoint())?;
    env.agent.start_again().await?;
    env.settled(cluster).await?;
    env.wait_until_healthy().await?;

    let (before, started) = (proxy.seen(|_| true).len(), Instant::now());
    proxy.rule(ApiMatch::any(), case.fault);
    // The watches restart, and get the same.
    proxy.close_all();
    env.agent.output(&["node", "set-condition", "Late", "True", "--reason", "Waited"]).await?;
    env.wait_until_failing(case.says).await?;
    sleep_seconds(4).await;
    let text = env.readyz().await?.text();
    for part in ["lease", "node-status", "node-watch", "pod-watch"] {
        ensure!(text.contains(&format!("[-]{part} failed: ")), "{part} is reported as healthy:\n{text}");
    }
    let took = started.elapsed().as_secs_f64();
    let asked = (proxy.seen(|_| true).len() - before) as f64;
    eprintln!("{}: {asked} requests in {took:.1} s", case.name);
    within("requests", asked, 2.0, (took + 3.0) * case.per_second)?;
    ensure!(cluster.admin.condition(case.name, "Late").await?.is_none(), "it came through");
    ensure!(env.metric("keelson_lease_consecutive_failures").await? > 0.0, "no failure is counted");

    proxy.clear_rules();
    env.wait_for_renewals(cluster, 2).await?;
    cluster.admin.await_condition(case.name, "Late", "True").await?;
    env.wait_until_healthy().await
}

async fn run_cases(cases: Vec<(Case, Role)>) -> Result<()> {
    let shared = shared().await?;
    let each = cases.into_iter().map(|(case, role)| {
        let cluster = &shared.cluster;
        async move {
            let name = case.name;
            survives(cluster, case, role).await.context(name)
        }
    });
    // All cases end before the first failure is returned.
    let outcomes = futures_util::future::join_all(each).await;
    for outcome in &outcomes {
        if let Err(error) = outcome {
            eprintln!("{error:?}");
        }
    }
    outcomes.into_iter().collect()
}

#[test]
fn refusals_are_retried_once_per_interval_and_retry_after_is_obeyed() -> Result<()> {
    let refused = |name, code, says| Case { name, fault: ApiFault::status(code), says, per_second: ONCE };
    // One request of each of the four parts, every three seconds.
    let later = |name, code, says| Case {
        name,
        fault: ApiFault::retry_after(code, 3),
        says,
        per_second: 4.0 / 3.0 + 0.2,
    };
    run(run_cases(vec![
        (refused("unauthorized", 401, "credentials are rejected"), Role::Companion),
        (refused("forbidden", 403, "do not allow it"), Role::Companion),
        (refused("faulty-node", 403, "do not allow it"), Role::Node),
        (later("too-many", 429, "HTTP 429"), Role::Companion),
        (later("unavailable", 503, "HTTP 503"), Role::Companion),
    ]))
}

#[test]
fn the_agent_survives_every_failure_of_the_server() -> Result<()> {
    let case = |name, fault, says| Case { name, fault, says, per_second: KUBELET };
    run(run_cases(vec![
        (case("broken", ApiFault::status(500), "HTTP 500"), Role::Companion),
        (case("gone", ApiFault::status(410), "HTTP 410"), Role::Companion),
        (case("closing", ApiFault::Close, "cannot "), Role::Companion),
        (
            case("portal", ApiFault::garbage("<html>Please log in</html>"), "invalid response"),
            Role::Companion,
        ),
        (case("half", ApiFault::garbage("{\"metadata\":{\"uid\":\"a"), "invalid response"), Role::Companion),
        (case("empty", ApiFault::garbage(""), "invalid response"), Role::Companion),
    ]))
}

#[test]
fn a_slow_server_gets_one_renewal_at_a_time() -> Result<()> {
    on_cluster(async |cluster| {
        let proxy = cluster.proxy().await?;
        let mut env = TestEnv::new(cluster, "slow", Role::Companion, quick()).await?;
        env.via(&proxy.endpoint())?;
        env.agent.start_again().await?;
        env.settled(cluster).await?;
        proxy.rule(ApiMatch::any(), ApiFault::Delay(Duration::from_secs(2)));
        proxy.close_all();
        env.agent.output(&["node", "set-condition", "Late", "True", "--reason", "Waited"]).await?;
        let from = proxy.seen(|_| true).len();
        env.wait_for_renewals(cluster, 3).await?;
        cluster.admin.await_condition("slow", "Late", "True").await?;
        let seen = proxy.seen(|_| true);
        let renewals: Vec<_> = seen[from..]
            .iter()
            .filter(|seen| seen.path.contains("/leases/") && seen.finished.is_some())
            .collect();
        for pair in renewals.windows(2) {
            let ended = pair[0].finished.context("not finished")?;
            // The proxy has passed on the last byte before the agent can know of it.
            ensure!(pair[1].started >= ended, "two renewals under way at once: {pair:#?}");
        }
        proxy.clear_rules();
        eventually_slow("everything is healthy", || env.wait_until_healthy()).await
    })
}
