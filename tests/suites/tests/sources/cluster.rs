//! Owns: a cluster, and the source that watches it. In: objects, and an identity with the shipped rights. Out: the
//! objects at the API server.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use futures_util::future::join3;
use futures_util::{StreamExt as _, TryStreamExt as _};
use k8s_openapi::api::core::v1::{Namespace, Service};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use k8s_openapi::api::networking::v1::ServiceCIDR;
use keelson_actor_system::cluster::JobHealth;
use keelson_cluster::kube::{Admin, Cluster, Identity};
pub(crate) use keelson_cluster::manifests::COMPANION;
pub(crate) use keelson_cluster::manifests::NODE;
use keelson_endpoint_publisher::{EventSink as _, NodeView, SourceEvent, SourceKind};
use keelson_harness::scratch::Scratch;
use keelson_harness::suite;
use keelson_kube::{
    ApiServer, ApiServerParts, ClusterSource, Node, ServiceSelection, node_view, watch_endpoints, watch_node,
};
use kube::Api;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams};
use serde_json::{Value, json};
use tokio::sync::watch;

use crate::sink::Collector;
use crate::world::{Running, World, number};

const ACCOUNT: &str = "keelson-agent";

/// A cluster with the rights of companions.
pub(crate) struct SharedCluster {
    pub(crate) cluster: Cluster,
    pub(crate) companion: Identity,
    pub(crate) scratch: Scratch,
}

impl SharedCluster {
    /// A cluster that only one test uses.
    pub(crate) async fn start() -> Result<Self> {
        let scratch = Scratch::new()?;
        let cluster = Cluster::start(&scratch).await?;
        cluster.admin.apply(COMPANION).await?;
        let companion = cluster.service_account(&scratch, "kube-system", ACCOUNT).await?;
        Ok(Self { cluster, companion, scratch })
    }

    /// The cluster of all tests that do not disturb it.
    pub(crate) async fn of_all() -> Result<Arc<Self>> {
        static SHARED: suite::Shared<SharedCluster> = suite::Shared::new();
        SHARED.get(Self::start).await
    }
}

pub(crate) struct InCluster {
    pub(crate) shared: Arc<SharedCluster>,
    number: usize,
}

impl InCluster {
    pub(crate) async fn of(shared: Arc<SharedCluster>) -> Result<Self> {
        let world = Self { shared, number: number() };
        let namespace: Namespace = serde_json::from_value(json!({"metadata": {"name": world.namespace()}}))?;
        Api::all(world.admin().client()).create(&PostParams::default(), &namespace).await?;
        Ok(world)
    }

    /// The cluster, for tests that disturb it. Fails if it is shared.
    pub(crate) fn own(&mut self) -> Result<&mut SharedCluster> {
        Arc::get_mut(&mut self.shared).context("other tests have this cluster too")
    }

    pub(crate) fn admin(&self) -> &Admin {
        &self.shared.cluster.admin
    }

    pub(crate) fn start_by(&self, kubeconfig: &Path, sink: &Arc<Collector>) -> (ApiServer, Running) {
        let source = ClusterSource::Kubeconfig { path: kubeconfig.to_owned(), context: None };
        // A short timeout for unanswered requests.
        let timeout = Duration::from_secs(3);
        let api = ApiServer::new(ApiServerParts { timeout, ..ApiServerParts::new(source) });
        let running = tokio::spawn(follow(api.clone(), self.node(), Arc::clone(sink)));
        (api, Running(running))
    }
}

/// Follows every kind of object; the Node with the watch that the agent has anyway.
async fn follow(api: ApiServer, name: String, sink: Arc<Collector>) {
    let (tell, mut nodes) = watch::channel(None::<NodeView>);
    let (health, mut healths) = watch::channel(JobHealth::Pending);
    let output = name.clone();
    let node = watch_node(&api, &name, &health, move |node: Option<Arc<Node>>| {
        tell.send_replace(Some(node_view(&output, node.as_deref())));
    });
    // Also of the Node, one event after the other.
    let both = async {
        loop {
            let event = tokio::select! {
                Ok(()) = nodes.changed() => nodes.borrow_and_update().clone().map(SourceEvent::Node),
                Ok(()) = healths.changed() => {
                    Some(SourceEvent::Health(SourceKind::Node, healths.borrow_and_update().clone()))
                }
                else => return,
            };
            if let Some(event) = event {
                sink.send(event).await;
            }
        }
    };
    join3(watch_endpoints(&api, Arc::clone(&sink) as Arc<_>, ServiceSelection::Unlabelled), node, both).await;
}

fn name_of(object: &Value) -> Result<&str> {
    object["metadata"]["name"].as_str().context("an object has a name")
}

impl World for InCluster {
    const LARGEST_BATCH: usize = 202;

    async fn make() -> Result<Self> {
        Self::of(SharedCluster::of_all().await?).await
    }

    fn number(&self) -> usize {
        self.number
    }

    async fn put(&self, object: &Value) -> Result<()> {
        self.admin().apply(&object.to_string()).await?;
        if let Some(status) = object.get("status") {
            let patch = Patch::Merge(json!({"status": status}));
            self.admin().nodes().patch_status(name_of(object)?, &PatchParams::default(), &patch).await?;
        }
        Ok(())
    }

    async fn put_all(&self, objects: &[Value]) -> Result<()> {
        futures_util::stream::iter(objects.iter().map(|object| self.put(object)))
            .buffer_unordered(16)
            .try_collect()
            .await
    }

    async fn delete(&self, object: &Value) -> Result<()> {
        let (client, name) = (self.admin().client(), name_of(object)?);
        let namespace = object["metadata"]["namespace"].as_str().unwrap_or_default();
        let now = DeleteParams::default();
        match object["kind"].as_str().unwrap_or_default() {
            "Service" => Api::<Service>::namespaced(client, namespace).delete(name, &now).await.map(drop)?,
            "EndpointSlice" => {
                Api::<EndpointSlice>::namespaced(client, namespace).delete(name, &now).await.map(drop)?;
            }
            "ServiceCIDR" => Api::<ServiceCIDR>::all(client).delete(name, &now).await.map(drop)?,
            "Node" => self.admin().delete_node(name).await?,
            other => bail!("no case deletes a {other:?}"),
        }
        Ok(())
    }

    fn start(&self, sink: &Arc<Collector>) -> Running {
        self.start_by(&self.shared.companion.kubeconfig(), sink).1
    }
}
