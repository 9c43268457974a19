//! An API server that is down, and a network that drops everything.

use crate::common::{Role, TestEnv, cluster, quick, run, shared, sleep_seconds, within};
use anyhow::{Context as _, Result, ensure};
use keelson_cluster::kube::{ApiSeen, Cluster};
use keelson_harness::cri::Pull;
use keelson_harness::scratch::Scratch;
use keelson_harness::util::PATIENCE;
use std::time::{Duration, Instant};

/// One Lease request at a time, and in `outage` seconds at most as many as a kubelet's: five renewals and a read, then
/// pauses of 0.2, 0.4, 0.8, 1.6, 3.2, 6.4 and then 7 s each. Two more for the beginning and the end.
fn as_a_kubelet(seen: &[ApiSeen], outage: f64) -> Result<()> {
    within("requests for the Lease", seen.len() as f64, 7.0, 5.0 + 1.0 + 6.0 + outage / 7.0 + 2.0)?;
    for pair in seen.windows(2) {
        let ended = pair[0].finished.context("not finished")?;
        ensure!(pair[1].started >= ended, "two requests for the Lease at once: {pair:#?}");
    }
    Ok(())
}

#[test]
fn case_24_a_stopped_server_is_retried_at_the_kubelets_rate() -> Result<()> {
    run(async {
        let scratch = Scratch::new()?;
        let mut cluster = cluster(&scratch).await?;
        let proxy = cluster.proxy().await?;
        // One with a proxy that records requests and disconnects if nothing is behind it; one that is refused; one that
        // starts meanwhile.
        let mut recorded = TestEnv::new(&cluster, "case-24-node", Role::Node, quick()).await?;
        recorded.via(&proxy.endpoint())?;
        let mut refused = TestEnv::new(&cluster, "case-24-refused", Role::Companion, quick()).await?;
        let mut late = TestEnv::new(&cluster, "case-24-late", Role::Companion, quick()).await?;
        for env in [&mut recorded, &mut refused] {
            env.agent.start_again().await?;
            env.settled(&cluster).await?;
        }
        let lease = |seen: &ApiSeen| seen.path.contains("/leases");
        let (leases, others) = (proxy.seen(lease).len(), proxy.seen(|seen| !lease(seen)).len());

        let down = Instant::now();
        cluster.api.kill9()?;
        late.agent.start_live().await?;
        refused.wait_until_failing("Connection refused").await?;
        recorded.wait_until_failing("cannot ").await?;
        late.wait_until_failing("Connection refused").await?;
        for env in [&recorded, &refused, &late] {
            let image = env.agent.cri().await?.pull(&Pull::new("registry.example/one:1")).await;
            image.with_context(|| format!("no pull before {}", env.name))?;
        }
        // The actor's tests cover 3 min on paused time.
        sleep_seconds(25_u64.saturating_sub(down.elapsed().as_secs())).await;
        let outage = down.elapsed().as_secs_f64();
        let asked = proxy.seen(lease);
        eprintln!("{} requests for the Lease in {outage:.1} s", asked.len() - leases);
        as_a_kubelet(&asked[leases..], outage)?;
        // No status has changed, so only the watches send requests: with exponential back-off.
        let asked = proxy.seen(|seen| !lease(seen)).len() - others;
        within("other requests", asked as f64, 1.0, 20.0)?;

        cluster.api.start_again().await?;
        let up = Instant::now();
        for env in [&recorded, &refused, &late] {
            env.wait_for_renewals(&cluster, 1).await.with_context(|| env.name.clone())?;
        }
        eprintln!("renewed {:.1} s after the server was back", up.elapsed().as_secs_f64());
        for env in [&recorded, &refused, &late] {
            env.settled(&cluster).await?;
            let ready = env.readyz().await?.text();
            ensure!(ready.contains("[+]lease ok") && ready.contains("[+]node-status ok"), "{ready}");
        }
        // The watches restart when their back-off is over, which is half a minute and more by now, like every watch of
        // a kubelet: a test with a shorter outage checks that they do.
        Ok(())
    })
}

#[test]
fn case_25_requests_to_a_black_hole_time_out_and_delay_no_pull() -> Result<()> {
    run(async {
        let shared = shared().await?;
        let (node, companion) = tokio::join!(
            black_hole(&shared.cluster, "case-25", Role::Node),
            black_hole(&shared.cluster, "case-25-companion", Role::Companion)
        );
        node.context("role node").and(companion.context("role companion"))
    })
}

async fn black_hole(cluster: &Cluster, name: &str, role: Role) -> Result<()> {
    const CUT: Duration = Duration::from_secs(30);
    let proxy = cluster.tcp_proxy().await?;
    // Shorter than the 10 s of a kubelet, so that there are several requests in 30 s.
    let settings = quick().set("kube.request_timeout", "2s");
    let mut env = TestEnv::new(cluster, name, role, settings).await?;
    env.via(&proxy.endpoint())?;
    env.agent.start_again().await?;
    env.settled(cluster).await?;
    let connections = proxy.accepted();

    let started = Instant::now();
    proxy.cut();
    env.agent.output(&["node", "set-condition", "Late", "True", "--reason", "Waited"]).await?;
    env.wait_until_failing("no answer").await?;
    let cri = env.agent.cri().await?;
    let mut pulls = 0;
    while started.elapsed() < CUT {
        // During the whole outage; each as without one.
        let image = Pull::new("registry.example/one:1");
        tokio::time::timeout(PATIENCE, cri.pull(&image)).await.context("a pull hangs")??;
        pulls += 1;
        tokio::time::sleep(Duration::from_millis(250)).await;
    }
    let timeouts = env.metric("keelson_lease_renewals_total{result=\"Timeout\"}").await?;
    let (cut, fresh) = (started.elapsed().as_secs_f64(), proxy.accepted() - connections);
    eprintln!("{name}: {timeouts} timeouts, {fresh} connections, {pulls} pulls in {cut:.1} s");
    // One request of 2 s at a time.
    within("requests for the Lease that timed out", timeouts, 3.0, cut / 2.0 + 2.0)?;
    // From the second failure on each part that fails tries a new connection: four parts.
    within("new connections", fresh as f64, 2.0, 4.0 * (cut / 2.0 + 2.0))?;

    proxy.repair();
    env.wait_for_renewals(cluster, 2).await?;
    cluster.admin.await_condition(name, "Late", "True").await?;
    env.wait_until_healthy().await
}
