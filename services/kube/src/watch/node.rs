//! The agent's own Node.
//!
//! Owns: [`watch_node`]. In: events of one Node. Out: the newest Node, or that there is none, to a [`NodeSink`].

use std::sync::Arc;

use k8s_openapi::api::core::v1::Node;
use keelson_actors::cluster::ChoreHealth;
use tokio::sync::watch;

use super::{Subject, follow};
use crate::{bodies::ACCEPT_JSON, server::ApiServer};

/// kubectl's copy of what was applied, which nothing here reads.
const LAST_APPLIED: &str = "kubectl.kubernetes.io/last-applied-configuration";

/// Takes the Node.
pub trait NodeSink: Send {
    /// The Node as it is now; none when it does not exist. Must not block.
    fn node(&mut self, node: Option<Arc<Node>>);
}

impl<F: FnMut(Option<Arc<Node>>) + Send> NodeSink for F {
    fn node(&mut self, node: Option<Arc<Node>>) {
        self(node);
    }
}

struct OneNode<S> {
    name: String,
    sink: S,
    /// What the sink was told last: a resourceVersion or none; outer none: nothing yet.
    told: Option<Option<String>>,
}

impl<S: NodeSink> OneNode<S> {
    fn tell(&mut self, node: Option<Node>) {
        let version = node.as_ref().map(|n| n.metadata.resource_version.clone().unwrap_or_default());
        if self.told.as_ref() == Some(&version) {
            return;
        }
        self.told = Some(version);
        self.sink.node(node.map(|mut node| {
            node.metadata.managed_fields = None;
            if let Some(annotations) = &mut node.metadata.annotations {
                annotations.remove(LAST_APPLIED);
            }
            Arc::new(node)
        }));
    }

    fn is_it(&self, node: &Node) -> bool {
        node.metadata.name.as_ref() == Some(&self.name)
    }
}

impl<S: NodeSink> Subject for OneNode<S> {
    type Object = Node;
    const RESOURCE: &'static str = "nodes";
    const ACCEPT: &'static str = ACCEPT_JSON;
    const ACCEPT_LIST: &'static str = ACCEPT_JSON;

    fn path(&self) -> &'static str {
        "/api/v1/nodes"
    }

    fn field_selector(&self) -> String {
        format!("metadata.name={}", self.name)
    }

    fn synced(&mut self, objects: Vec<Node>) {
        let node = objects.into_iter().rfind(|node| self.is_it(node));
        self.tell(node);
    }

    fn put(&mut self, object: Node) {
        if self.is_it(&object) {
            self.tell(Some(object));
        }
    }

    fn gone(&mut self, object: Node) {
        if self.is_it(&object) {
            self.tell(None);
        }
    }
}

/// Watches the Node `name` until dropped. The sink is told what there is as soon as that is known, and each
/// change after that; managedFields and kubectl's copy of what was applied are left out. That the watch broke is
/// told to `health` and not to the sink.
pub async fn watch_node(
    api: &ApiServer,
    name: &str,
    health: &watch::Sender<ChoreHealth>,
    sink: impl NodeSink,
) {
    let mut subject = OneNode { name: name.to_owned(), sink, told: None };
    follow(api, &mut subject, health).await;
}
