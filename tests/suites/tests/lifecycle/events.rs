//! Events on pods whose image pull waits for a slot, with the shipped rights.

use crate::common::{ACCOUNT, MANIFEST, companion, on_cluster, settings};
use anyhow::{Context as _, Result, bail, ensure};
use k8s_openapi::api::core::v1::Event;
use keelson_cluster::kube::Cluster;
use keelson_harness::agent::{Agent, Settings};
use keelson_harness::containerd::Kind;
use keelson_harness::cri::Pull;
use keelson_harness::images::{Image, TINY};
use keelson_harness::node::Node;
use keelson_harness::registry_proxy::{Fault, Match, RuleId};
use keelson_harness::util::{PATIENCE, eventually};
use kube::Api;
use kube::ResourceExt as _;
use kube::api::ListParams;
use std::time::Duration;
use tokio::task::JoinHandle;
use tonic::Status;

type RunningPull = JoinHandle<Result<String, Status>>;

pub(crate) async fn events_on(cluster: &Cluster, uid: &str) -> Result<Vec<Event>> {
    let api: Api<Event> = Api::namespaced(cluster.admin.client(), "default");
    let fields = format!("involvedObject.uid={uid},reason=ImagePullQueued");
    Ok(api.list(&ListParams::default().fields(&fields)).await?.items)
}

/// A node with one slot, which one pull has, and another waits, of a pod with the uid `uid`.
struct Waiting {
    node: Node,
    agent: Agent,
    images: Vec<Image>,
    going: Vec<RunningPull>,
    hold: RuleId,
}

impl Waiting {
    async fn start(node: Node, settings: Settings, uid: &str) -> Result<Self> {
        let images = node.push_many("waiting", 2, TINY).await?;
        let settings = settings
            .set("pulls.max_parallel_image_pulls", 1)
            .set("pulls.queued_event_after", "1s")
            .set("node.node_status_update_frequency", "1s");
        let mut agent = Agent::new(&node.scratch, &node.runtime.endpoint(), &settings)?;
        agent.start_live().await?;
        let hold = node.proxy.rule(Match::layers().repo(&images[0].repo), Fault::Hang);
        let mut going = Vec::new();
        for (n, pull) in
            [(1, Pull::new(&node.name(&images[0]))), (2, Pull::new(&node.name(&images[1])).pod("web", uid))]
        {
            let cri = agent.cri().await?;
            going.push(tokio::spawn(async move { cri.pull(&pull).await }));
            eventually(PATIENCE, &format!("{n} callers wait"), || async {
                let pulls = agent.pulls_json().await?;
                ensure!(pulls["callers"] == n, "it is {pulls}");
                Ok(())
            })
            .await?;
        }
        Ok(Self { node, agent, images, going, hold })
    }

    async fn finish(self) -> Result<()> {
        self.node.proxy.remove(self.hold);
        for (going, image) in self.going.into_iter().zip(&self.images) {
            ensure!(going.await?? == image.config.0, "another image");
        }
        Ok(())
    }

    /// Waits until at least `least` Events have this result.
    async fn counted(&self, result: &str, least: f64) -> Result<()> {
        let line = format!("keelson_events_total{{result=\"{result}\"}}");
        eventually(PATIENCE, &format!("{line} is at least {least}"), || async {
            let metrics = self.agent.http_get("/metrics").await?.text();
            let value = metrics.lines().find_map(|have| have.strip_prefix(&line)).unwrap_or("0");
            ensure!(value.trim().parse::<f64>()? >= least, "it is {value}");
            Ok(())
        })
        .await
    }
}

#[test]
fn a_pod_that_waits_for_a_slot_has_an_event_that_is_updated() -> Result<()> {
    on_cluster(async |cluster| {
        let node = Node::start(Kind::V2).await?;
        let identity = companion(cluster, &node.scratch, ACCOUNT, "events").await?;
        cluster.admin.create_node("events", &[]).await?;
        let settings = settings("events", &identity.kubeconfig());
        let waiting = Waiting::start(node, settings, "uid-of-events").await?;
        let image = waiting.node.name(&waiting.images[1]);
        let first = std::sync::OnceLock::new();
        eventually(PATIENCE, "the Event is there, and is updated", || {
            let (image, first) = (&image, &first);
            async move {
                let events = events_on(cluster, "uid-of-events").await?;
                let [event] = events.as_slice() else { bail!("{} Events", events.len()) };
                let message = event.message.as_deref().unwrap_or_default();
                let expected =
                    format!("waiting for an image pull slot: 1 of 1 in use, 0 ahead (image {image})");
                ensure!(message == expected, "its message is {message}");
                let object = &event.involved_object;
                ensure!(object.kind.as_deref() == Some("Pod") && object.name.as_deref() == Some("web"));
                ensure!(event.source.as_ref().and_then(|by| by.host.as_deref()) == Some("events"));
                let name: &String = first.get_or_init(|| event.name_any());
                ensure!(*name == event.name_any(), "another Event was made");
                ensure!(event.count.context("no count")? > 1, "it was not updated yet");
                Ok(())
            }
        })
        .await?;
        waiting.counted("sent", 2.0).await?;
        waiting.finish().await
    })
}

#[test]
fn refused_events_are_counted_and_delay_no_pull() -> Result<()> {
    on_cluster(async |cluster| {
        let node = Node::start(Kind::V2).await?;
        // The account has all other rights.
        let rule = "resources: [\"events\"]";
        ensure!(MANIFEST.contains(rule), "the manifest gives no right to events");
        let manifest = MANIFEST.replace(rule, "resources: [\"nothing\"]").replace(ACCOUNT, "no-events");
        cluster.admin.apply(&manifest).await?;
        let identity = cluster.companion(&node.scratch, "no-events", "no-events").await?;
        cluster.admin.create_node("no-events", &[]).await?;
        let settings = settings("no-events", &identity.kubeconfig());
        let waiting = Waiting::start(node, settings, "uid-of-no-events").await?;
        waiting.counted("failed", 1.0).await?;
        ensure!(events_on(cluster, "uid-of-no-events").await?.is_empty());
        waiting.finish().await
    })
}

/// Events on the Node itself, as `kubectl describe node` finds them.
async fn events_on_node(cluster: &Cluster, node: &str, reason: &str) -> Result<Vec<Event>> {
    let api: Api<Event> = Api::namespaced(cluster.admin.client(), "default");
    let fields = format!("involvedObject.kind=Node,involvedObject.uid={node},reason={reason}");
    Ok(api.list(&ListParams::default().fields(&fields)).await?.items)
}

#[test]
fn the_node_has_events_for_a_limit_that_was_set_and_for_a_runtime_that_is_down() -> Result<()> {
    on_cluster(async |cluster| {
        let mut node = Node::start(Kind::V2).await?;
        let identity = companion(cluster, &node.scratch, ACCOUNT, "node-events").await?;
        cluster.admin.create_node("node-events", &[]).await?;
        let settings =
            settings("node-events", &identity.kubeconfig()).set("pulls.max_parallel_image_pulls", 5);
        let agent = node.agent(&settings).await?;
        node.runtime.kill9()?;
        agent.keelson_by_config(&["limit", "2"]).await?.success()?;
        for (reason, kind, message) in [
            (
                "ImagePullLimitSet",
                "Normal",
                "the limit on image pulls was set to 2 on the node; the settings say 5",
            ),
            ("ContainerRuntimeUnavailable", "Warning", "containerd.sock"),
        ] {
            eventually(2 * PATIENCE, reason, || async {
                let events = events_on_node(cluster, "node-events", reason).await?;
                let [event] = events.as_slice() else { bail!("{} Events", events.len()) };
                let text = event.message.as_deref().unwrap_or_default();
                ensure!(text.contains(message), "its message is {text}");
                ensure!(event.type_.as_deref() == Some(kind) && event.count == Some(1), "{event:?}");
                ensure!(event.source.as_ref().and_then(|by| by.host.as_deref()) == Some("node-events"));
                Ok(())
            })
            .await?;
        }
        Ok(())
    })
}

#[test]
fn without_the_gate_nothing_is_written_on_the_node_and_with_it_again_only_what_is_new() -> Result<()> {
    /// Longer than the agent needs for an Event: it looks every 5 s.
    const QUIET: Duration = Duration::from_secs(15);
    on_cluster(async |cluster| {
        let node = Node::start(Kind::V2).await?;
        let identity = companion(cluster, &node.scratch, ACCOUNT, "gated-events").await?;
        cluster.admin.create_node("gated-events", &[]).await?;
        let settings = settings("gated-events", &identity.kubeconfig())
            .set("pulls.max_parallel_image_pulls", 5)
            .set("feature_gates.NodeEvents", false);
        let mut agent = node.agent(&settings).await?;
        agent.keelson_by_config(&["limit", "2"]).await?.success()?;
        tokio::time::sleep(QUIET).await;
        ensure!(events_on_node(cluster, "gated-events", "ImagePullLimitSet").await?.is_empty());
        agent.set("feature_gates.NodeEvents", true)?;
        agent.kill9_and_start().await?;
        // What was found at the start is not new.
        tokio::time::sleep(QUIET).await;
        agent.keelson_by_config(&["limit", "3"]).await?.success()?;
        eventually(2 * PATIENCE, "the Event of the second limit", || async {
            let events = events_on_node(cluster, "gated-events", "ImagePullLimitSet").await?;
            let [event] = events.as_slice() else { bail!("{} Events", events.len()) };
            let text = event.message.as_deref().unwrap_or_default();
            ensure!(text.contains("was set to 3 on the node") && event.count == Some(1), "{event:?}");
            Ok(())
        })
        .await
    })
}
