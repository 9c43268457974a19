//! Owns: continuous checks of the node from outside. In: processes, probes of health, the Lease and the Node. Out: series, lives of
//! processes, and violations.

use super::controllers;
use super::env::{NODE_AGENT, NodeEnv, PROXY, PROXY_METRICS};
use super::probes::{Probe, Probed};
use crate::Phase;
use crate::lives::{Growth, Life, Lives};
use crate::timeline::{Broken, Timeline};
use anyhow::{Context as _, Result};
use k8s_openapi::api::coordination::v1::Lease;
use keelson_cluster::one_node::NODE;
use keelson_harness::util::http_get;
use serde::Serialize;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// Interval of samples of processes.
const SAMPLE: Duration = Duration::from_secs(2);

/// Lives of four minutes and more are judged.
const GROWTH: Growth = Growth { shortest: 120, factor: 1.25, least: 6.0 };
/// Maximum resident memory of agent and proxy, in MiB.
const MAX_MEMORY: f64 = 128.0;
const MAX_FILES: f64 = 256.0;

/// Timeout of a health check on a busy machine.
const HEALTH_PATIENCE: Duration = Duration::from_secs(10);
/// Timeout of a request to the API server.
const API_PATIENCE: Duration = Duration::from_secs(3);
/// Time until a Lease is renewed after the API server is back.
const RENEWAL: Duration = Duration::from_secs(20);
/// Time until a Node is Ready again after something of it is back: a kubelet reports every 10 s, and the controllers check every 5 s.
const READY_AGAIN: Duration = Duration::from_secs(90);

/// Lives of the processes, and what probes have seen.
#[derive(Debug, Serialize)]
pub(crate) struct Watched {
    pub(crate) agent: Vec<Life>,
    pub(crate) node_agent: Vec<Life>,
    pub(crate) proxy: Vec<Life>,
    /// Of the kubelet and of the agent that is a node, while the API server served.
    pub(crate) oldest_lease_seconds: [f64; 2],
    pub(crate) probes: Vec<Probed>,
}

pub(super) struct Watcher {
    usage: JoinHandle<[Vec<Life>; 3]>,
    leases: [JoinHandle<f64>; 2],
    others: Vec<JoinHandle<()>>,
    probes: Arc<Vec<Probe>>,
}

impl Watcher {
    pub(super) fn start(
        env: &Arc<NodeEnv>,
        probes: Vec<Probe>,
        timeline: &Timeline,
        phases: &watch::Receiver<Phase>,
    ) -> Self {
        let probes = Arc::new(probes);
        let health = |name, url: String, excuses| {
            tokio::spawn(health(name, url, excuses, timeline.clone(), phases.clone()))
        };
        let mut others = vec![
            health("agent", format!("{}/livez", env.url), &[Broken::AgentKilled, Broken::AgentRestarted]),
            health("proxy", format!("{PROXY}/livez"), &[Broken::Proxy, Broken::Backend]),
            health("node agent", format!("{}/livez", env.node_agent_url), &[Broken::NodeAgent]),
            tokio::spawn(rates(probes.clone(), timeline.clone(), phases.clone())),
        ];
        others.push(tokio::spawn(controllers::watch(env.clone(), timeline.clone(), phases.clone())));
        others.extend(
            BEATING.map(|of| tokio::spawn(node_ready(of, env.clone(), timeline.clone(), phases.clone()))),
        );
        Self {
            usage: tokio::spawn(usage(env.clone(), timeline.clone(), phases.clone())),
            leases: BEATING.map(|of| tokio::spawn(lease(of, env.clone(), timeline.clone(), phases.clone()))),
            others,
            probes,
        }
    }

    /// Stops when the phase is `Done`.
    pub(super) async fn stop(self) -> Result<Watched> {
        let [agent, node_agent, proxy] = self.usage.await.context("the sampler panicked")?;
        let [kubelet, by_agent] = self.leases;
        let mut oldest_lease_seconds = [0.0; 2];
        for (oldest, lease) in oldest_lease_seconds.iter_mut().zip([kubelet, by_agent]) {
            *oldest = lease.await.context("the watch of a Lease panicked")?;
        }
        for other in self.others {
            other.await.context("a watch panicked")?;
        }
        let probes = self.probes.iter().map(Probe::seen).collect();
        Ok(Watched { agent, node_agent, proxy, oldest_lease_seconds, probes })
    }
}

async fn usage(env: Arc<NodeEnv>, timeline: Timeline, phases: watch::Receiver<Phase>) -> [Vec<Life>; 3] {
    let mut all = ["agent", "node agent", "proxy"].map(Lives::new);
    while *phases.borrow() != Phase::Done {
        tokio::time::sleep(SAMPLE).await;
        let pids = [env.agent.pid(), env.node_agent.pid(), env.proxy_pid()];
        for (lives, pid) in all.iter_mut().zip(pids) {
            let Some(usage) = lives.sample(pid, &timeline) else { continue };
            if usage.memory > MAX_MEMORY || usage.files > MAX_FILES {
                let name = lives.name();
                let what =
                    format!("{name}: {usage:?}; at most {MAX_MEMORY} MiB and {MAX_FILES} files expected");
                timeline.violation("memory, open files and threads stay flat", &what);
            }
        }
        if let Ok(bytes) = env.agent.state_bytes() {
            timeline.sample("agent: state on disk (MiB)", bytes as f64 / f64::from(1 << 20));
        }
        timeline.sample("agent: log (MiB)", env.log_bytes() as f64 / f64::from(1 << 20));
    }
    all.map(|lives| lives.finish(GROWTH, &timeline))
}

/// Age of the Lease in seconds, and its duration. None if it was never renewed.
fn age(lease: &Lease, now: Duration) -> Option<(f64, f64)> {
    let spec = lease.spec.as_ref()?;
    let renewed = spec.renew_time.as_ref()?.0.as_microsecond() as f64 / 1e6;
    Some((now.as_secs_f64() - renewed, f64::from(spec.lease_duration_seconds?)))
}

/// A Node, who its heartbeat is, and what may make it unready.
type Beating = (&'static str, &'static str, &'static [Broken]);

const BEATING: [Beating; 2] = [
    (NODE, "kubelet", &[Broken::Kubelet, Broken::Runtime, Broken::Api]),
    // Neither a kill of the agent nor another version of it.
    (NODE_AGENT, "node agent", &[Broken::Runtime, Broken::Api]),
];

async fn lease(
    (node, name, _): Beating,
    env: Arc<NodeEnv>,
    timeline: Timeline,
    phases: watch::Receiver<Phase>,
) -> f64 {
    let mut oldest = 0.0_f64;
    while *phases.borrow() != Phase::Done {
        tokio::time::sleep(Duration::from_secs(1)).await;
        let began = Instant::now();
        // Whether the API server answers is not the question here.
        let Ok(Ok(Some(lease))) = tokio::time::timeout(API_PATIENCE, env.admin.lease(node)).await else {
            continue;
        };
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let Some((age, duration)) = age(&lease, now) else { continue };
        timeline.sample(&format!("{name}: age of the Lease (s)"), age.max(0.0));
        if timeline.excused(&[Broken::Api], began, Instant::now(), RENEWAL) {
            continue;
        }
        oldest = oldest.max(age);
        if age > duration {
            let what = format!("of {node}: {age:.1} s old, valid for {duration} s");
            timeline.violation("the Lease is renewed in time", &what);
        }
    }
    oldest
}

async fn node_ready(
    (node, name, excuses): Beating,
    env: Arc<NodeEnv>,
    timeline: Timeline,
    phases: watch::Receiver<Phase>,
) {
    let mut was_ready = true;
    while *phases.borrow() != Phase::Done {
        tokio::time::sleep(Duration::from_secs(2)).await;
        let began = Instant::now();
        let asked = tokio::time::timeout(API_PATIENCE, env.admin.condition(node, "Ready")).await;
        let Ok(Ok(condition)) = asked else { continue };
        let is_ready = condition.as_ref().is_some_and(|condition| condition.status == "True");
        timeline.sample(&format!("{name}: Node is Ready"), if is_ready { 1.0 } else { 0.0 });
        if was_ready && !is_ready && !timeline.excused(excuses, began, Instant::now(), READY_AGAIN) {
            timeline.violation("the Node stays Ready", &format!("{node}: {condition:?}"));
        }
        was_ready = is_ready;
    }
}

/// Failures of probes per minute, and the proxy's time for a sync.
async fn rates(probes: Arc<Vec<Probe>>, timeline: Timeline, phases: watch::Receiver<Phase>) {
    const INTERVAL: Duration = Duration::from_secs(10);
    let (mut before, mut synced) = ((0, 0), None);
    while *phases.borrow() != Phase::Done {
        tokio::time::sleep(INTERVAL).await;
        let seen: Vec<_> = probes.iter().map(Probe::seen).collect();
        let excused: u64 = seen.iter().map(|probe| probe.excused).sum();
        let failed: u64 = seen.iter().map(|probe| probe.failed).sum();
        timeline.sample("excused: failed connections (per 10 s)", (excused - before.0) as f64);
        timeline.sample("violations: failed connections (per 10 s)", (failed - before.1) as f64);
        before = (excused, failed);
        let Ok(now) = syncs().await else { continue };
        if let Some((sum, count)) = synced.replace(now)
            && now.1 > count
            && now.0 >= sum
        {
            // A proxy that was restarted may have synced more often already, and in less time.
            timeline.sample("proxy: time of a sync (ms)", (now.0 - sum) / (now.1 - count) * 1000.0);
        }
    }
}

/// Sum and count of the proxy's syncs since its start.
async fn syncs() -> Result<(f64, f64)> {
    let metrics = http_get(PROXY_METRICS).await?.success()?.text();
    sum_and_count(&metrics, "kubeproxy_sync_proxy_rules_duration_seconds")
        .context("no duration of syncs in the metrics")
}

/// Of a histogram, over all labels.
fn sum_and_count(metrics: &str, name: &str) -> Option<(f64, f64)> {
    let total = |suffix: &str| -> Option<f64> {
        let values = metrics.lines().filter_map(|line| {
            let (series, value) = line.rsplit_once(' ')?;
            let is_it = series.split('{').next()?.strip_prefix(name)? == suffix;
            is_it.then(|| value.parse::<f64>().ok())?
        });
        values.reduce(|sum, value| sum + value)
    };
    Some((total("_sum")?, total("_count")?))
}

async fn health(
    name: &'static str,
    url: String,
    excuses: &'static [Broken],
    timeline: Timeline,
    phases: watch::Receiver<Phase>,
) {
    while *phases.borrow() != Phase::Done {
        let began = Instant::now();
        let answer = tokio::time::timeout(HEALTH_PATIENCE, http_get(&url)).await;
        let failed = match answer {
            Ok(Ok(answer)) if answer.status.is_success() => None,
            Ok(Ok(answer)) => Some(format!("{}: {}", answer.status, answer.text())),
            Ok(Err(error)) => Some(format!("{error:#}")),
            Err(_) => Some(format!("no answer in {HEALTH_PATIENCE:?}")),
        };
        if let Some(failed) = failed
            && !timeline.excused(excuses, began, Instant::now(), Duration::from_secs(2))
        {
            timeline.violation("/livez answers", &format!("{name}: {failed}"));
        }
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_histogram_is_summed_over_its_labels() {
        let metrics = "# TYPE h histogram\nh_bucket{a=\"1\",le=\"1\"} 7\nh_sum{a=\"1\"} 0.5\nh_count{a=\"1\"} 7\n\
            h_sum{a=\"2\"} 0.25\nh_count{a=\"2\"} 3\nh_other_sum 9\n";
        assert_eq!(sum_and_count(metrics, "h"), Some((0.75, 10.0)));
        assert_eq!(sum_and_count(metrics, "g"), None);
    }

    #[test]
    fn the_age_of_a_lease_counts_from_its_last_renewal() -> Result<()> {
        let lease = |spec| serde_json::from_value::<Lease>(json!({"spec": spec}));
        let renewed = lease(json!({"renewTime": "1970-01-01T00:01:40.5Z", "leaseDurationSeconds": 40}))?;
        assert_eq!(age(&renewed, Duration::from_secs(110)), Some((9.5, 40.0)));
        assert_eq!(age(&lease(json!({"leaseDurationSeconds": 40}))?, Duration::ZERO), None);
        Ok(())
    }
}
