//! Owns: a node that runs pods: a runtime, a stock kubelet and, if a test needs one, an agent between them. In: the
//! kind of runtime, settings of kubelet and agent. Out: pods, and the kubelet's status of them.

use crate::common::{ACCOUNT, SharedCluster, companion, settings, shared};
use crate::pods::{phase, pod};
use anyhow::{Context as _, Result, ensure};
use k8s_openapi::api::core::v1::{ContainerStatus, Event, PodStatus};
use keelson_cluster::kube::{Kubelet, KubeletOptions};
use keelson_harness::agent::{Agent, Settings};
use keelson_harness::containerd::{Containerd, Kind, Options};
use keelson_harness::images::{Image, ImageSpec};
use keelson_harness::node::Node;
use keelson_harness::peers;
use keelson_harness::registry::{ALICE, Access, Registry};
use keelson_harness::registry_proxy::RegistryProxy;
use keelson_harness::scratch::Scratch;
use keelson_harness::util::{PATIENCE, eventually};
use kube::Api;
use kube::api::ListParams;
use serde_json::json;
use std::path::Path;
use std::sync::Arc;

/// The services that go through an agent between kubelet and runtime.
pub(crate) enum Agents {
    Nothing,
    Images(Settings),
    Everything(Settings),
}

/// Fields are dropped in this order.
pub(crate) struct TestEnv {
    pub(crate) kubelet: Kubelet,
    agent: Option<Agent>,
    pub(crate) shared: Arc<SharedCluster>,
    pub(crate) node: Node,
    pub(crate) name: String,
}

/// [`pod_node`] in a folder of its own.
pub(crate) async fn new_pod_node(kind: Kind, access: Access) -> Result<Node> {
    let scratch = Scratch::new()?;
    let folder = scratch.dir("c0")?;
    pod_node(scratch, &folder, kind, access).await
}

/// The node without kubelet and agent: a runtime in `folder` whose pods use the host's network.
pub(crate) async fn pod_node(scratch: Scratch, folder: &Path, kind: Kind, access: Access) -> Result<Node> {
    let registry = Registry::start(&scratch, access).await?;
    let proxy = RegistryProxy::start(registry.address()).await?;
    let pause = program("pause", &[])?.push(&registry).await?.at(registry.address());
    let options = Options { sandbox_image: Some(pause.clone()), network: true, ..Options::default() };
    let runtime = Containerd::start_in(folder, kind, &options).await?;
    runtime.configure_registry(proxy.address(), proxy.address())?;
    runtime.configure_registry(registry.address(), registry.address())?;
    let pull = keelson_harness::cri::Pull::new(&pause);
    let pull = if access == Access::Users { pull.user(&ALICE) } else { pull };
    runtime.cri().await?.pull(&pull).await?;
    Ok(Node { runtime, proxy, registry, scratch })
}

/// An image that runs, with unique layers beside the program.
pub(crate) fn program(name: &str, layers: &[u64]) -> Result<ImageSpec> {
    let mut spec = ImageSpec::program(name, &peers::cri_driver()?, &["pause"]);
    spec.layers.extend(ImageSpec::new(name, layers).layers);
    Ok(spec)
}

impl TestEnv {
    /// Starts a kubelet on a runtime of [`pod_node`], and waits until the node is ready.
    pub(crate) async fn start(
        name: &str,
        node: Node,
        agents: Agents,
        mut options: KubeletOptions,
    ) -> Result<Self> {
        let shared = shared().await?;
        let cluster = &shared.cluster;
        let (over, everything) = match agents {
            Agents::Nothing => (None, false),
            Agents::Images(settings) => (Some(settings), false),
            Agents::Everything(settings) => (Some(settings), true),
        };
        let mut agent = None;
        if let Some(over) = over {
            let identity = companion(cluster, &node.scratch, ACCOUNT, name).await?;
            let settings = settings(name, &identity.kubeconfig()).with_overrides(&over);
            let mut started = Agent::new(&node.scratch, &node.runtime.endpoint(), &settings)?;
            started.start_live().await?;
            options.image_endpoint = Some(started.endpoint());
            options.runtime_endpoint = everything.then(|| started.endpoint());
            agent = Some(started);
        }
        let kubelet = cluster.kubelet(&node.scratch, name, &node.runtime, &options).await?;
        cluster.admin.await_condition(name, "Ready", "True").await?;
        Ok(Self { kubelet, agent, shared, node, name: name.to_owned() })
    }

    /// Fails if the node has no agent.
    pub(crate) fn agent(&mut self) -> Result<&mut Agent> {
        self.agent.as_mut().context("this node has no agent")
    }

    pub(crate) fn has_agent(&self) -> bool {
        self.agent.is_some()
    }

    /// The name of one of this node's pods: other nodes have pods in the same namespaces.
    pub(crate) fn pod(&self, name: &str) -> String {
        format!("{name}-{}", self.name)
    }

    pub(crate) async fn push(&self, spec: &ImageSpec) -> Result<Image> {
        spec.push(&self.node.registry).await
    }

    /// Creates a pod in namespace `default` with pull policy Always.
    pub(crate) async fn make_pod(&self, name: &str, image: &Image) -> Result<()> {
        self.make_pod_in("default", name, image, None).await
    }

    pub(crate) async fn make_pod_in(
        &self,
        namespace: &str,
        name: &str,
        image: &Image,
        secret: Option<&str>,
    ) -> Result<()> {
        let mut made = pod(&self.pod(name), &self.name, &self.node.name(image));
        made["metadata"]["namespace"] = json!(namespace);
        made["spec"]["terminationGracePeriodSeconds"] = json!(0);
        if let Some(secret) = secret {
            made["spec"]["imagePullSecrets"] = json!([{"name": secret}]);
        }
        self.shared.cluster.admin.apply(&made.to_string()).await.map(drop)
    }

    /// Runs a pod whose image has layers of these sizes in bytes beside its program.
    pub(crate) async fn run_pod(&self, name: &str, layers: &[u64]) -> Result<()> {
        let image = self.push(&program(name, layers)?).await?;
        self.make_pod(name, &image).await?;
        self.runs(name).await
    }

    pub(crate) async fn runs(&self, name: &str) -> Result<()> {
        let running = phase(&self.shared.cluster, &self.pod(name), "Running").await;
        running.with_context(|| self.kubelet_log())
    }

    /// The last lines of the kubelet's log about images and evictions.
    pub(crate) fn kubelet_log(&self) -> String {
        let log = self.kubelet.log().unwrap_or_default();
        let words = ["evict", "image", "Image", "sandbox"];
        let lines: Vec<_> = log.lines().filter(|line| words.iter().any(|word| line.contains(word))).collect();
        format!("the kubelet reports {}", lines[lines.len().saturating_sub(30)..].join("\n"))
    }

    async fn status(&self, namespace: &str, name: &str) -> Result<PodStatus> {
        let pod = self.shared.cluster.admin.pods(namespace).get(&self.pod(name)).await?;
        pod.status.context("no status")
    }

    /// The container of a pod. Fails if the pod was evicted.
    pub(crate) async fn container(&self, namespace: &str, name: &str) -> Result<ContainerStatus> {
        let status = self.status(namespace, name).await?;
        ensure!(status.phase.as_deref() != Some("Failed"), "the pod {name} failed: {status:?}");
        status.container_statuses.unwrap_or_default().into_iter().next().context("no container yet")
    }

    /// Waits until the kubelet reports that the pull of this pod failed, and returns reason and message.
    pub(crate) async fn pull_failed(&self, namespace: &str, name: &str) -> Result<String> {
        eventually(2 * PATIENCE, &format!("the pull of {name} fails"), || async {
            let state = self.container(namespace, name).await?.state.and_then(|state| state.waiting);
            let waiting = state.context("it does not wait")?;
            let reason = waiting.reason.as_deref().unwrap_or_default();
            ensure!(!matches!(reason, "" | "ContainerCreating"), "it waits: {waiting:?}");
            Ok(format!("{reason}: {}", waiting.message.as_deref().unwrap_or_default()))
        })
        .await
        .with_context(|| self.kubelet_log())
    }

    pub(crate) async fn delete(&self, names: &[&str]) -> Result<()> {
        for name in names {
            self.shared.cluster.admin.delete_pod("default", &self.pod(name)).await?;
        }
        Ok(())
    }

    /// Messages of Events with this reason on the node or one of its pods.
    pub(crate) async fn events(&self, kind: &str, name: &str, reason: &str) -> Result<Vec<String>> {
        let events: Api<Event> = Api::all(self.shared.cluster.admin.client());
        let fields = format!("involvedObject.kind={kind},involvedObject.name={name},reason={reason}");
        let found = events.list(&ListParams::default().fields(&fields)).await?.items;
        Ok(found.into_iter().map(|event| event.message.unwrap_or_default()).collect())
    }
}
