//! E3 and E22: two agents of one node name, an agent of role `node` beside a kubelet, two reporters of one condition.

use crate::common::{Role, TestEnv, eventually_slow, on_cluster, quick, sleep_seconds, within};
use anyhow::{Context as _, Result, ensure};
use keelson_cluster::kube::{AuditEvent, Cluster, KubeletOptions};
use keelson_harness::agent::Settings;
use keelson_harness::containerd::{Containerd, Kind, Options};
use keelson_harness::scratch::Scratch;
use kube::api::{Patch, PatchParams};
use serde_json::json;
use std::time::{Duration, Instant};

const CONTESTED: &str = "KeelsonNodeContested";

/// Validity of a Lease, and the interval of its renewals, in seconds: long enough for a busy machine.
const LASTS: u64 = 16;
const PERIOD: f64 = 4.0;

fn settings() -> Settings {
    quick().set("node.lease_duration", format!("{LASTS}s")).set("node.node_status_report_frequency", "5s")
}

/// Last renewal of the Lease, in Unix seconds.
async fn renew_time(cluster: &Cluster, name: &str) -> Result<f64> {
    let lease = cluster.admin.lease(name).await?.context("no Lease")?;
    let time = lease.spec.and_then(|spec| spec.renew_time).context("never renewed")?.0;
    Ok(time.as_microsecond() as f64 / 1e6)
}

/// Watches for a number of seconds. Returns the longest time without a renewal of the Lease.
async fn longest_silence(cluster: &Cluster, name: &str, seconds: u64) -> Result<f64> {
    let (began, mut longest) = (Instant::now(), 0.0_f64);
    let mut last = renew_time(cluster, name).await?;
    while began.elapsed() < Duration::from_secs(seconds) {
        let now = renew_time(cluster, name).await?;
        longest = longest.max(now - last);
        last = now;
        pass_a_little().await;
    }
    Ok(longest)
}

async fn pass_a_little() {
    tokio::time::sleep(Duration::from_millis(200)).await;
}

async fn contested(cluster: &Cluster, name: &str, status: &str) -> Result<String> {
    let condition = cluster.admin.await_condition(name, CONTESTED, status).await?;
    condition.reason.context("no reason")
}

async fn keep_renewing(cluster: &Cluster, name: &str) -> Result<()> {
    loop {
        let now = jiff::Timestamp::now();
        let spec = json!({"spec": {"renewTime": format!("{now:.6}")}});
        cluster.admin.leases().patch(name, &PatchParams::default(), &Patch::Merge(&spec)).await?;
        tokio::time::sleep(Duration::from_secs_f64(PERIOD)).await;
    }
}

/// A reporter that writes its condition to the Node whenever it is missing.
async fn insist(cluster: &Cluster, name: &str, kind: &str) -> Result<()> {
    loop {
        let is = cluster.admin.condition(name, kind).await?;
        if is.is_none_or(|is| is.status != "True") {
            let mine = json!({"status": {"conditions": [
                {"type": kind, "status": "True", "reason": "Deadlock", "message": "theirs"},
            ]}});
            let patch = Patch::Strategic(&mine);
            cluster.admin.nodes().patch_status(name, &PatchParams::default(), &patch).await?;
        }
        pass_a_little().await;
    }
}

/// Writes of an agent to Node and Lease, except the condition that reports a contested node.
fn writes(events: &[AuditEvent]) -> Vec<&AuditEvent> {
    let is_contested_alone = |event: &AuditEvent| {
        let status = event.body.as_ref().and_then(|body| body["status"].as_object());
        status.is_some_and(|status| {
            let conditions = status.get("conditions").and_then(|list| list.as_array());
            status.len() == 1
                && conditions.is_some_and(|list| list.iter().all(|condition| condition["type"] == CONTESTED))
        })
    };
    let agents = events.iter().filter(|event| event.user_agent.starts_with("keelson/"));
    agents
        .filter(|event| matches!(event.resource.as_str(), "leases" | "nodes"))
        .filter(|event| event.is_write() && !is_contested_alone(event))
        .collect()
}

#[test]
fn e3_of_two_agents_with_one_name_the_first_continues() -> Result<()> {
    on_cluster(async |cluster| {
        let name = "e3-twins";
        let mut first = TestEnv::reporting(cluster, name, Role::Node, settings()).await?;
        let second = TestEnv::started(cluster, name, Role::Node, settings()).await?;
        second.wait_until_failing("stands back").await?;
        within("renewals are late by", longest_silence(cluster, name, 10).await?, 1.0, PERIOD * 2.0)?;
        ensure!(
            second.metric("keelson_lease_renewals_total{result=\"renewed\"}").await? == 0.0,
            "it renewed"
        );
        assert_eq!(second.metric("keelson_lease_standing_back").await?, 1.0);
        ensure!(
            second.agent.output(&["node"]).await?.contains("STANDING BACK: another process renews it"),
            "not shown"
        );
        // The second one reports it on the Node; the first finds that another client writes its condition.
        contested(cluster, name, "True").await?;
        eventually_slow("both say so", || async {
            ensure!(first.metric("keelson_node_conditions_contested").await? > 0.0, "the first one does not");
            Ok(())
        })
        .await?;
        first.wait_until_healthy().await?;

        // A restart of the first one: the second does not take the node from it.
        first.agent.kill9()?;
        first.agent.start_again().await?;
        within("renewals are late by", longest_silence(cluster, name, 10).await?, 1.0, PERIOD * 2.0)?;
        second.wait_until_failing("stands back").await?;

        // It ends for good.
        first.agent.kill9()?;
        let last = renew_time(cluster, name).await?;
        second.wait_until_healthy().await?;
        let silence = renew_time(cluster, name).await? - last;
        within("the Lease was not renewed for", silence, LASTS as f64 - 1.0, LASTS as f64 + 4.0 * PERIOD)?;
        cluster.admin.await_condition(name, "Ready", "True").await?;
        assert_eq!(contested(cluster, name, "False").await?, "NotContested");
        Ok(())
    })
}

#[test]
fn e3_role_node_stands_back_for_a_kubelet_and_resumes_without_it() -> Result<()> {
    on_cluster(async |cluster| {
        let name = "e3-kubelet";
        let scratch = Scratch::new()?;
        let options = Options { network: true, ..Options::default() };
        let containerd = Containerd::start(&scratch, Kind::Debian16, &options).await?;
        let options = KubeletOptions::default().set("nodeLeaseDurationSeconds", LASTS);
        let mut kubelet = cluster.kubelet(&scratch, name, &containerd, &options).await?;
        cluster.admin.await_condition(name, "Ready", "True").await?;
        eventually_slow("the kubelet has made its Lease", || renew_time(cluster, name)).await?;

        // It was there first: the agent only writes one condition.
        let env = TestEnv::started(cluster, name, Role::Node, settings()).await?;
        env.wait_until_failing("stands back").await?;
        assert_eq!(contested(cluster, name, "True").await?, "StandingBack");
        sleep_seconds(6).await;
        let asked = env.requests(cluster)?;
        assert!(writes(&asked).is_empty(), "{:#?}", writes(&asked));
        let version = |node: k8s_openapi::api::core::v1::Node| {
            node.status.and_then(|status| status.node_info).map(|info| info.kubelet_version)
        };
        let kubelets = version(cluster.admin.node(name).await?.context("no Node")?);

        // A restart of the kubelet is not its end.
        kubelet.terminate().await?;
        kubelet.start_again().await?;
        sleep_seconds(LASTS + 2).await;
        assert!(writes(&env.requests(cluster)?).is_empty(), "{:#?}", writes(&env.requests(cluster)?));

        kubelet.kill9()?;
        env.wait_until_healthy().await?;
        eventually_slow("the Node is the agent's", || async {
            let now = version(cluster.admin.node(name).await?.context("no Node")?);
            ensure!(now != kubelets, "still {now:?}");
            Ok(())
        })
        .await?;
        assert_eq!(contested(cluster, name, "False").await?, "NotContested");

        // It comes back: two intervals.
        kubelet.start_again().await?;
        let began = Instant::now();
        env.wait_until_failing("stands back").await?;
        let took = began.elapsed().as_secs_f64();
        eprintln!("stood back {took:.1} s after the kubelet was healthy");
        within("to stand back took", took, 0.0, PERIOD * 2.0 + 5.0)?;
        contested(cluster, name, "True").await?;
        eventually_slow("the Node is the kubelet's", || async {
            let now = version(cluster.admin.node(name).await?.context("no Node")?);
            ensure!(now == kubelets, "still {now:?}");
            Ok(())
        })
        .await
    })
}

#[test]
fn e3_role_node_continues_if_configured_and_reports_it() -> Result<()> {
    on_cluster(async |cluster| {
        let name = "e3-continue";
        let settings = settings().set("node.when_contested", "continue");
        let env = TestEnv::reporting(cluster, name, Role::Node, settings).await?;
        let looks = async {
            assert_eq!(contested(cluster, name, "True").await?, "LeaseRenewedByAnother");
            assert_eq!(env.metric("keelson_lease_contested").await?, 1.0);
            ensure!(env.metric("keelson_lease_foreign_renewals_total").await? >= 2.0, "not counted");
            ensure!(
                env.agent.output(&["node"]).await?.contains("CONTESTED: another process renews it"),
                "not shown"
            );
            let before = env.renewals(cluster)?;
            eventually_slow("it continues", || async {
                ensure!(env.renewals(cluster)? >= before + 2, "it does not renew");
                Ok(())
            })
            .await?;
            env.wait_until_healthy().await
        };
        tokio::select! {
            renewed = keep_renewing(cluster, name) => renewed,
            looked = looks => looked,
        }?;
        // The other has ended.
        assert_eq!(contested(cluster, name, "False").await?, "NotContested");
        Ok(())
    })
}

#[test]
fn e22_two_reporters_of_one_condition_do_not_alternate() -> Result<()> {
    on_cluster(async |cluster| {
        let (name, kind) = ("e22-reporters", "KernelDeadlock");
        let settings = quick().set("node.node_status_report_frequency", "60s");
        let env = TestEnv::reporting(cluster, name, Role::Companion, settings).await?;
        env.agent.output(&["node", "set-condition", kind, "False", "--reason", "NoDeadlock"]).await?;
        cluster.admin.await_condition(name, kind, "False").await?;
        let looks = async {
            assert_eq!(contested(cluster, name, "True").await?, "ConditionsWrittenByAnother");
            let shown = env.agent.output(&["node"]).await?;
            let line = shown.lines().find(|line| line.starts_with(kind)).context("not shown")?;
            ensure!(line.contains("reporter, CONTESTED"), "{shown}");
            assert_eq!(env.metric("keelson_node_conditions_contested").await?, 1.0);
            // With a write in every pass it would be 20 more.
            let before = env.status_writes(cluster)?.len();
            sleep_seconds(20).await;
            let writes = env.status_writes(cluster)?.len() - before;
            within("writes in 20 s", writes as f64, 0.0, 3.0)
        };
        tokio::select! {
            wrote = insist(cluster, name, kind) => wrote,
            looked = looks => looked,
        }
    })
}
