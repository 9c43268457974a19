//! Pods that a stock kubelet starts while the agent before its runtime is restarted or killed.

use crate::common::{ACCOUNT, SharedCluster, companion, run, settings, shared};
use crate::pods::{apps, phase, pod};
use crate::test_env::new_pod_node;
use anyhow::{Context as _, Result, ensure};
use k8s_openapi::api::core::v1::Event;
use keelson_cluster::kube::{Kubelet, KubeletOptions};
use keelson_harness::agent::Agent;
use keelson_harness::containerd::Kind;
use keelson_harness::images::Image;
use keelson_harness::node::Node;
use keelson_harness::registry::Access;
use keelson_harness::registry_proxy::{Fault, Match};
use keelson_harness::util::{PATIENCE, eventually};
use kube::Api;
use kube::api::ListParams;

const RESTARTS: usize = 20;

/// Pods that have begun before the first restart: three have a slot, one waits.
const AHEAD: usize = 4;

/// Bytes of each layer that are sent before the registry holds it: less than containerd writes at a time, so that a
/// restarted pull is detected.
const SENT: u64 = 256 << 10;

/// A node whose kubelet uses the agent as its runtime and image service.
struct Site {
    name: &'static str,
    agent: Agent,
    kubelet: Kubelet,
    node: Node,
    images: Vec<Image>,
}

impl Site {
    async fn start(shared: &SharedCluster, name: &'static str, count: usize) -> Result<Self> {
        let cluster = &shared.cluster;
        let node = new_pod_node(Kind::V2, Access::Anonymous).await?;
        let names: Vec<_> = (0..count).map(|n| format!("{name}/{n}")).collect();
        let names: Vec<_> = names.iter().map(String::as_str).collect();
        let images = apps(&node, &names).await?;

        let identity = companion(cluster, &node.scratch, ACCOUNT, name).await?;
        let settings = settings(name, &identity.kubeconfig())
            .set("agent.handover_timeout", "1m")
            .set("pulls.max_parallel_image_pulls", 3);
        let mut agent = Agent::new(&node.scratch, &node.runtime.endpoint(), &settings)?;
        agent.start_live().await?;
        let options =
            KubeletOptions { runtime_endpoint: Some(agent.endpoint()), ..KubeletOptions::default() };
        let kubelet = cluster.kubelet(&node.scratch, name, &node.runtime, &options).await?;
        cluster.admin.await_condition(name, "Ready", "True").await?;
        agent.ready().await?;
        Ok(Self { name, agent, kubelet, node, images })
    }

    fn pod_name(&self, n: usize) -> String {
        format!("{}-{n}", self.name)
    }

    /// Creates pods one by one, each with a separate image whose layers the registry holds, and ends the agent with
    /// `end` while some are being pulled and some wait. At the end the registry releases everything.
    async fn begin_pods(
        &mut self,
        shared: &SharedCluster,
        mut end: impl AsyncFnMut(&mut Agent) -> Result<()>,
    ) -> Result<()> {
        let mut held = Vec::new();
        for n in 0..self.images.len() {
            let image = &self.images[n];
            held.push(self.node.proxy.rule(Match::layers().repo(&image.repo), Fault::StallAfter(SENT)));
            let pod = pod(&self.pod_name(n), self.name, &self.node.name(image));
            shared.cluster.admin.apply(&pod.to_string()).await?;
            if n < AHEAD {
                continue;
            }
            self.see_queue().await?;
            end(&mut self.agent).await.with_context(|| format!("restart {}", n - AHEAD + 1))?;
            self.node.proxy.remove(held[n - AHEAD]);
        }
        self.node.proxy.clear_rules();
        Ok(())
    }

    async fn see_queue(&self) -> Result<()> {
        eventually(2 * PATIENCE, "pulls run and wait", || async {
            let pulls = self.agent.pulls_json().await?;
            let (running, queued) = (pulls["running"].as_u64(), pulls["queued"].as_u64());
            ensure!(running >= Some(1) && queued >= Some(1), "{running:?} run, {queued:?} wait");
            Ok(())
        })
        .await
    }

    async fn all_run(&self, shared: &SharedCluster) -> Result<()> {
        for n in 0..self.images.len() {
            phase(&shared.cluster, &self.pod_name(n), "Running").await?;
        }
        Ok(())
    }

    async fn delete_pods(&self, shared: &SharedCluster) -> Result<()> {
        for n in 0..self.images.len() {
            shared.cluster.admin.delete_pod("default", &self.pod_name(n)).await?;
        }
        Ok(())
    }

    /// The kubelet's messages about failed pulls, in events of the pods and in its log.
    async fn failures(&self, shared: &SharedCluster) -> Result<Vec<String>> {
        let events: Api<Event> = Api::namespaced(shared.cluster.admin.client(), "default");
        let events = events.list(&ListParams::default()).await.context("cannot list events")?;
        let of_pods = events.items.into_iter().filter(|event| {
            let pod = event.involved_object.name.as_deref().unwrap_or_default();
            pod.starts_with(&format!("{}-", self.name))
        });
        let failed = of_pods
            .filter(|event| {
                matches!(event.reason.as_deref(), Some("Failed" | "BackOff" | "ErrImageNeverPull"))
            })
            .map(|event| format!("{:?}: {:?}", event.involved_object.name, event.message));
        let log = self.kubelet.log()?;
        let reported =
            log.lines().filter(|line| line.contains("ErrImagePull") || line.contains("ImagePullBackOff"));
        Ok(failed.chain(reported.map(str::to_owned)).collect())
    }
}

/// I8: the kubelet, whose pods wait for image pulls meanwhile, does not notice a planned restart of the agent.
#[test]
fn no_pod_sees_a_failed_pull_through_twenty_planned_restarts() -> Result<()> {
    run(async {
        let shared = shared().await?;
        let mut site = Site::start(&shared, "planned", RESTARTS + AHEAD).await?;
        site.begin_pods(&shared, async |agent| agent.restart().await).await?;
        site.all_run(&shared).await?;
        let failures = site.failures(&shared).await?;
        ensure!(failures.is_empty(), "the kubelet saw failed pulls: {failures:#?}");
        ensure!(site.node.proxy.records().max_concurrent_repos() <= 3, "the limit did not hold");
        for image in &site.images {
            let sent = site.node.proxy.records().max_fetches(image);
            ensure!(sent <= 1.0, "{} was fetched {sent:.2} times", image.repo);
        }
        site.delete_pods(&shared).await
    })
}

/// I8: after `kill -9` of the agent, calls in flight fail as the protocol requires, and all pods run in the end.
#[test]
fn all_pods_run_through_five_kills_of_the_agent() -> Result<()> {
    run(async {
        let shared = shared().await?;
        let mut site = Site::start(&shared, "killed", 5 + AHEAD).await?;
        site.begin_pods(&shared, async |agent| {
            agent.kill9()?;
            agent.start_live().await
        })
        .await?;
        site.all_run(&shared).await?;
        site.delete_pods(&shared).await
    })
}
