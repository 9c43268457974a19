//! The node's wall clock steps while the agent runs, and the controller's does not.

use crate::common::{
    GRACE, Role, TestEnv, controlled, eventually_slow, pauses, quick, run, sleep_seconds, within,
};
use anyhow::{Context as _, Result, ensure};
use http::Method;
use k8s_openapi::api::core::v1::Node;
use keelson_cluster::kube::{ApiFault, ApiMatch, Cluster, FakeClock, Watch, condition};

const HOUR: i64 = 3600;

/// Time in seconds that the tests continue after a step: longer than the controller's grace period, and than its own
/// pause.
const AFTER: u64 = GRACE.as_secs() + 4;

/// An agent of role `node` whose clock can be set, and a watch on its Node.
async fn start(
    cluster: &Cluster,
    name: &str,
    via: Option<&str>,
) -> Result<(TestEnv, FakeClock, Watch<Node>)> {
    let mut env = TestEnv::new(cluster, name, Role::Node, quick()).await?;
    if let Some(endpoint) = via {
        env.via(endpoint)?;
    }
    let clock = FakeClock::new(env.scratch.path())?;
    for (key, value) in clock.env() {
        env.agent.env(&key, &value);
    }
    env.agent.start_again().await?;
    env.settled(cluster).await?;
    env.wait_until_healthy().await?;
    // A fresh node has sent its changes after the first report.
    sleep_seconds(2).await;
    let watch = cluster.admin.watch(cluster.admin.nodes(), name).await?;
    eventually_slow("the watch has begun", || async {
        watch.changes()?.first().map(drop).context("not yet")
    })
    .await?;
    Ok((env, clock, watch))
}

/// Sets the clock. A report follows at once, and after a step back another one when the Lease has been renewed. Nothing
/// else changes: renewals use only the monotonic clock.
async fn step(cluster: &Cluster, env: &TestEnv, clock: &FakeClock, seconds: i64, back: bool) -> Result<()> {
    let (reports, renewals) = (env.status_writes(cluster)?.len(), env.lease_requests(cluster)?.len());
    clock.set(seconds)?;
    eventually_slow("a report after the step", || async {
        ensure!(env.status_writes(cluster)?.len() > reports, "none");
        Ok(())
    })
    .await?;
    sleep_seconds(AFTER).await;
    let writes = env.status_writes(cluster)?;
    assert_eq!(writes.len(), reports + 1 + usize::from(back), "{:#?}", &writes[reports..]);
    let asked = env.lease_requests(cluster)?;
    let since = &asked[renewals..];
    assert!(since.iter().all(|event| event.verb == "patch" && event.code == Some(200)), "{since:#?}");
    ensure!(since.len() >= 4, "{} renewals in {AFTER} s", since.len());
    for pause in pauses(since) {
        within("the pause between renewals", pause, 0.95, 60.0)?;
    }
    // Proves that the clock was set: the Lease has its time.
    let lease = cluster.admin.lease(&env.name).await?.context("no Lease")?;
    let renewed = lease.spec.and_then(|spec| spec.renew_time).context("not renewed")?.0;
    let ahead = renewed.duration_since(jiff::Timestamp::now()).as_secs_f64();
    within("the Lease's clock is ahead by", ahead, seconds as f64 - 60.0, seconds as f64 + 1.0)
}

/// Fails if the Node was not ready at any moment.
fn always_ready(watch: &Watch<Node>) -> Result<()> {
    for change in watch.changes()? {
        let node = change.object.context("the Node was deleted")?;
        let ready = condition(&node, "Ready").context("no Ready")?;
        ensure!(ready.status == "True", "{ready:?}");
    }
    Ok(())
}

async fn steps(name: &str, to: i64) -> Result<()> {
    let shared = controlled().await?;
    let cluster = &shared.cluster;
    let (env, clock, watch) = start(cluster, name, None).await?;
    step(cluster, &env, &clock, to, to < 0).await?;
    step(cluster, &env, &clock, 0, to > 0).await?;
    always_ready(&watch)?;
    eprintln!("{name}: {} versions of the Node, all of them ready", watch.changes()?.len());
    assert_eq!(env.metric("keelson_node_clock_steps_total").await?, 2.0);
    assert_eq!(env.metric("keelson_lease_clock_steps_total{direction=\"back\"}").await?, 1.0);
    assert_eq!(env.metric("keelson_lease_clock_steps_total{direction=\"forward\"}").await?, 1.0);
    env.wait_until_healthy().await
}

/// All at the same time, because waiting for the controller's grace period takes long.
#[test]
fn case_28_and_case_29_the_node_stays_ready_through_clock_steps() -> Result<()> {
    run(async {
        let (back, forward, unposted) =
            tokio::join!(steps("case-28", -HOUR), steps("case-29", HOUR), clock_step_without_report());
        back.context("case 28, back and set right")?;
        forward.context("case 29, forward and back")?;
        unposted.context("case 28 without the report")
    })
}

/// Proves that the report keeps the node ready: without it, the controller marks the node Unknown, because it ignores
/// renewals before the last one it has seen. The first report that gets through makes the node ready.
async fn clock_step_without_report() -> Result<()> {
    let shared = controlled().await?;
    let cluster = &shared.cluster;
    let proxy = cluster.proxy().await?;
    let (env, clock, watch) = start(cluster, "case-28-unposted", Some(&proxy.endpoint())).await?;
    let rule = proxy.rule(ApiMatch::path("/status").method(Method::PATCH), ApiFault::status(500));
    clock.set(-HOUR)?;
    let ready = cluster.admin.await_condition("case-28-unposted", "Ready", "Unknown").await?;
    assert_eq!(ready.reason.as_deref(), Some("NodeStatusUnknown"));
    // The Lease was renewed all the time.
    env.wait_for_renewals(cluster, 2).await?;
    proxy.remove(rule);
    cluster.admin.await_condition("case-28-unposted", "Ready", "True").await?;
    sleep_seconds(AFTER).await;
    let mut seen: Vec<String> = Vec::new();
    for change in watch.changes()? {
        let node = change.object.context("the Node was deleted")?;
        seen.push(condition(&node, "Ready").context("no Ready")?.status.clone());
    }
    seen.dedup();
    assert_eq!(seen, ["True", "Unknown", "True"]);
    env.wait_until_healthy().await
}
