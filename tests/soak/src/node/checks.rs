//! Owns: the checks of a quiet phase. In: a cluster in which nothing is broken and nothing changes. Out: how long it took to settle,
//! what the processes use at rest, and violations.

use super::env::{NODE_AGENT, NodeEnv, PROXY, endpoints};
use crate::lives::Usage;
use crate::timeline::Timeline;
use anyhow::{Context as _, Result, ensure};
use keelson_client::Api;
use keelson_cluster::endpoints::{ExpectedState, Follower};
use keelson_cluster::one_node::NODE;
use keelson_harness::util::{eventually, eventually_every, http_get};
use serde::Serialize;
use serde_json::Value;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// Time until every wanted pod is ready: a kubelet waits up to 5 minutes before it tries an image or a container again.
const PODS: Duration = Duration::from_secs(400);
/// Interval in which Deployments are touched that want pods while no pod is on its way: after an outage of the API server, a controller of
/// Kubernetes 1.36 may take its own copies for too old, and do nothing until the object changes; or it expects, for five minutes, events
/// of its own pods that it missed.
const FORGOTTEN: Duration = Duration::from_secs(60);
/// Time until agent and proxy have what the API server has.
const STATE: Duration = Duration::from_secs(60);

/// What agent and proxy use when nothing happens.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Rest {
    pub(crate) at_seconds: f64,
    pub(crate) settled_after_seconds: f64,
    pub(crate) agent: Usage,
    pub(crate) proxy: Usage,
    pub(crate) state_mib: f64,
    pub(crate) services: usize,
    pub(crate) endpoints: usize,
}

pub(super) struct Checker<'a> {
    env: &'a NodeEnv,
    timeline: &'a Timeline,
    follower: Follower,
}

impl<'a> Checker<'a> {
    /// Follows the agent from now on.
    pub(super) fn start(env: &'a NodeEnv, timeline: &'a Timeline) -> Result<Self> {
        Ok(Self { env, timeline, follower: Follower::start(&endpoints(), Api::Watch)? })
    }

    /// Checks everything once.
    pub(super) async fn check(&self) -> Rest {
        let began = Instant::now();
        self.expect("every wanted pod gets ready", self.pods_are_ready().await);
        let settled = began.elapsed();
        self.timeline.sample("node: time until all pods are ready (s)", settled.as_secs_f64());
        let state = eventually_every(
            Duration::from_secs(1),
            STATE,
            "the agent has the state of the API server",
            || self.state_is_current(),
        );
        let state = state.await;
        let (services, count) =
            state.as_ref().map_or((0, 0), |state| (state.services.len(), state.endpoints()));
        self.expect("the agent serves what the API server has", state.map(drop));
        self.expect("states of the agent are consistent", self.follower.check_invariants());
        let rules =
            eventually_every(Duration::from_secs(1), STATE, "the rules are those of a fresh sync", || {
                self.env.rules_are_complete()
            });
        self.expect("the rules are those of a fresh sync", rules.await);
        self.expect("health checks succeed", self.healthy().await);
        self.expect("the doctor finds nothing", self.doctor().await);
        Rest {
            at_seconds: self.timeline.seconds(Instant::now()),
            settled_after_seconds: settled.as_secs_f64(),
            agent: self.env.agent.pid().and_then(Usage::of).unwrap_or_default(),
            proxy: self.env.proxy_pid().and_then(Usage::of).unwrap_or_default(),
            state_mib: self.env.agent.state_bytes().unwrap_or_default() as f64 / f64::from(1 << 20),
            services,
            endpoints: count,
        }
    }

    fn expect(&self, invariant: &str, outcome: Result<()>) {
        if let Err(error) = outcome {
            self.timeline.violation(invariant, &format!("{error:#}"));
        }
    }

    async fn pods_are_ready(&self) -> Result<()> {
        let began = Instant::now();
        let reminded = AtomicU32::new(0);
        eventually_every(Duration::from_millis(500), PODS, "every pod is ready", || async {
            let pods = self.env.operator.kubectl(&["get", "pods,deployments", "-A", "-o", "json"]).await?;
            let list: Value = pods.json()?;
            let items = list["items"].as_array().context("a list has items")?;
            let pending: Vec<_> = items.iter().filter_map(unready).collect();
            let waits_for_pods = items.iter().any(|item| item["kind"] == "Pod" && unready(item).is_some());
            let remind_at = began + FORGOTTEN * (reminded.load(Ordering::Relaxed) + 1);
            if !pending.is_empty() && !waits_for_pods && Instant::now() > remind_at {
                reminded.fetch_add(1, Ordering::Relaxed);
                self.timeline.record("controllers reminded", &pending.join(", "));
                self.timeline.count("controllers reminded");
                let mark = format!("soak/reminded={}", self.timeline.seconds(Instant::now()) as u64);
                let annotate = ["annotate", "deployments,replicasets", "--all", "--overwrite", &mark];
                self.env.operator.kubectl(&annotate).await?;
            }
            ensure!(pending.is_empty(), "not ready: {pending:?}");
            Ok(())
        })
        .await?;
        for node in [NODE, NODE_AGENT] {
            eventually(PODS, &format!("{node} is Ready"), || async {
                let condition = self.env.admin.condition(node, "Ready").await?;
                ensure!(
                    condition.as_ref().is_some_and(|condition| condition.status == "True"),
                    "{condition:?}"
                );
                Ok(())
            })
            .await?;
        }
        Ok(())
    }

    async fn state_is_current(&self) -> Result<ExpectedState> {
        let cluster = self.env.cluster.lock().await;
        let expected = ExpectedState::of(&cluster, NODE).await?;
        self.follower.with_state(|state| {
            ensure!(!state.position.stale, "{:?} is stale", state.position);
            state.ensure_equals(&expected)
        })?;
        Ok(expected)
    }

    async fn healthy(&self) -> Result<()> {
        let urls = [
            format!("{}/livez", self.env.url),
            format!("{}/readyz", self.env.url),
            format!("{}/livez", self.env.node_agent_url),
            format!("{}/readyz", self.env.node_agent_url),
            format!("{PROXY}/livez"),
            format!("{PROXY}/readyz"),
            "http://127.0.0.1:10256/healthz".to_owned(),
        ];
        for url in urls {
            eventually(STATE, &url, || async { http_get(&url).await?.success().map(drop) }).await?;
        }
        Ok(())
    }

    async fn doctor(&self) -> Result<()> {
        let output = self.env.doctor().await?;
        let report: Value = serde_json::from_str(&output.out).with_context(|| format!("{output:?}"))?;
        let checks = report["sections"].as_array().into_iter().flatten();
        let checks = checks.flat_map(|section| section["checks"].as_array().into_iter().flatten());
        let failed: Vec<_> = checks.filter(|check| check["outcome"] == "failed").collect();
        ensure!(failed.is_empty(), "{failed:?}");
        Ok(())
    }
}

/// Name of a pod or Deployment that is not as wanted.
fn unready(object: &Value) -> Option<String> {
    let name = object["metadata"]["name"].as_str().unwrap_or("?");
    let number = |pointer: &str| object.pointer(pointer).and_then(Value::as_i64).unwrap_or(0);
    let is_ready = match object["kind"].as_str() {
        Some("Deployment") => {
            let wanted = number("/spec/replicas");
            number("/status/observedGeneration") >= number("/metadata/generation")
                && number("/status/readyReplicas") == wanted
                && number("/status/replicas") == wanted
        }
        _ => {
            let conditions = object["status"]["conditions"].as_array();
            let is_leaving = !object["metadata"]["deletionTimestamp"].is_null();
            !is_leaving
                && conditions.is_some_and(|all| {
                    all.iter().any(|one| one["type"] == "Ready" && one["status"] == "True")
                })
        }
    };
    let reason = &object["status"]["containerStatuses"][0]["state"]["waiting"]["reason"];
    (!is_ready).then(|| format!("{name} {}", reason.as_str().unwrap_or_default()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_deployment_is_ready_with_all_replicas_of_its_generation() {
        let deployment = |observed: i64, ready: i64, all: i64| {
            json!({"kind": "Deployment", "metadata": {"name": "d", "generation": 2}, "spec": {"replicas": 3},
                "status": {"observedGeneration": observed, "readyReplicas": ready, "replicas": all}})
        };
        assert_eq!(unready(&deployment(2, 3, 3)), None);
        for other in [deployment(1, 3, 3), deployment(2, 2, 3), deployment(2, 3, 4)] {
            assert!(unready(&other).is_some(), "{other}");
        }
    }

    #[test]
    fn a_pod_is_ready_by_its_condition_unless_it_leaves() {
        let mut pod = json!({"kind": "Pod", "metadata": {"name": "p"},
            "status": {"conditions": [{"type": "Ready", "status": "True"}]}});
        assert_eq!(unready(&pod), None);
        pod["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
        assert!(unready(&pod).is_some());
    }
}
