//! The agent's own Node.
//!
//! Owns: [`watch_node`], and [`node_view`], the part that endpoints need. In: events of one Node. Out: the latest Node,
//! or that it does not exist, to a [`NodeSink`].

use std::{net::IpAddr, sync::Arc};

use k8s_openapi::api::core::v1::Node;
use keelson_actor_system::cluster::JobHealth;
use keelson_endpoint_publisher::{Ack, NodeView};
use tokio::sync::watch;

use super::{
    follow::follow,
    json::Json,
    subject::{Change, Selectors, Subject, publish_health},
};
use crate::{
    bodies::{ACCEPT_JSON, node_path},
    server::ApiServer,
    signals::ServerSignals,
};

const ZONE: &str = "topology.kubernetes.io/zone";
/// The cluster autoscaler is about to remove the node.
const TO_BE_DELETED: &str = "ToBeDeletedByClusterAutoscaler";

/// kubectl's copy of the applied object, which nothing here reads.
const LAST_APPLIED: &str = "kubectl.kubernetes.io/last-applied-configuration";

pub trait NodeSink: Send {
    /// The current Node; `None` if it does not exist. Must not block.
    fn node(&mut self, node: Option<Arc<Node>>);
}

impl<F: FnMut(Option<Arc<Node>>) + Send> NodeSink for F {
    fn node(&mut self, node: Option<Arc<Node>>) {
        self(node);
    }
}

struct OneNode<'a, S> {
    name: String,
    sink: S,
    health: &'a watch::Sender<JobHealth>,
    /// The Node, if it was in the current listing.
    listing: Option<Option<Node>>,
    /// What the sink got last: a resourceVersion or none; outer `None`: nothing yet.
    last_sent: Option<Option<String>>,
    signals: ServerSignals,
}

impl<S: NodeSink> OneNode<'_, S> {
    fn show(&mut self, node: Option<Node>) {
        let version = node.as_ref().map(|n| n.metadata.resource_version.clone().unwrap_or_default());
        if self.last_sent.as_ref() == Some(&version) {
            return;
        }
        if let Some(version) = &version {
            self.compare(version);
        }
        self.last_sent = Some(version);
        self.sink.node(node.map(|mut node| {
            node.metadata.managed_fields = None;
            if let Some(annotations) = &mut node.metadata.annotations {
                annotations.remove(LAST_APPLIED);
            }
            Arc::new(node)
        }));
    }

    /// A Node that is older than before shows that the store was rolled back, even if the store has more revisions by
    /// now.
    fn compare(&self, version: &str) {
        let object = format!("{} in a watch", node_path(&self.name));
        let expected = self.signals.expected(&object);
        self.signals.answered(&object, expected, version);
    }

    fn is_it(&self, node: &Node) -> bool {
        node.metadata.name.as_ref() == Some(&self.name)
    }
}

impl<S: NodeSink> Subject for OneNode<'_, S> {
    type Encoding = Json<Node>;
    const RESOURCE: &'static str = "nodes";
    const ACCEPT: &'static str = ACCEPT_JSON;
    const ACCEPT_LIST: &'static str = ACCEPT_JSON;
    const LIST_AFTER_INTERRUPTION: bool = true;

    fn path(&self) -> &'static str {
        "/api/v1/nodes"
    }

    fn selectors(&self) -> Selectors {
        Selectors::fields(format!("metadata.name={}", self.name))
    }

    async fn deliver(&mut self, changes: Vec<Change<Node>>) -> Ack {
        for change in changes {
            match change {
                Change::Listing => self.listing = Some(None),
                Change::Refused => {}
                Change::ListComplete => {
                    let node = self.listing.take().flatten();
                    self.show(node);
                }
                Change::Upsert(node) if self.is_it(&node) => match &mut self.listing {
                    Some(listed) => *listed = Some(*node),
                    None => self.show(Some(*node)),
                },
                Change::Deleted(node) if self.is_it(&node) => self.show(None),
                Change::Upsert(_) | Change::Deleted(_) => {}
            }
        }
        Ack::Accepted
    }

    async fn health(&mut self, health: JobHealth) -> Ack {
        publish_health(self.health, health);
        Ack::Accepted
    }
}

/// The part of the current Node `name` that endpoints need; `None` if it does not exist. Invalid addresses are left
/// out.
#[must_use]
pub fn node_view(name: &str, node: Option<&Node>) -> NodeView {
    let Some(node) = node else {
        return NodeView { name: name.to_owned(), ..NodeView::default() };
    };
    let spec = node.spec.as_ref();
    let addresses = node.status.as_ref().and_then(|status| status.addresses.as_deref()).unwrap_or_default();
    let of = |kind: &'static str| {
        let those = addresses.iter().filter(move |address| address.type_ == kind);
        those.filter_map(|address| address.address.parse::<IpAddr>().ok())
    };
    let mut pod_cidrs = spec.and_then(|spec| spec.pod_cidrs.clone()).unwrap_or_default();
    if pod_cidrs.is_empty() {
        // The older field is the first of the newer.
        pod_cidrs.extend(spec.and_then(|spec| spec.pod_cidr.clone()));
    }
    let taints = spec.and_then(|spec| spec.taints.as_deref()).unwrap_or_default();
    NodeView {
        name: name.to_owned(),
        exists: true,
        zone: node
            .metadata
            .labels
            .as_ref()
            .and_then(|labels| labels.get(ZONE))
            .filter(|zone| !zone.is_empty())
            .cloned(),
        ips: of("InternalIP").chain(of("ExternalIP")).collect(),
        pod_cidrs,
        eligible: node.metadata.deletion_timestamp.is_none()
            && !taints.iter().any(|taint| taint.key == TO_BE_DELETED),
    }
}

/// Watches the Node `name` until dropped. The sink gets the Node as soon as it is known, and each
/// change after that; without managedFields and kubectl's copy of the applied object. Failures of the watch are
/// reported to `health` and not to the sink.
pub async fn watch_node(api: &ApiServer, name: &str, health: &watch::Sender<JobHealth>, sink: impl NodeSink) {
    let signals = api.signals().clone();
    let mut subject =
        OneNode { name: name.to_owned(), sink, health, listing: None, last_sent: None, signals };
    follow(api, &mut subject).await;
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn view(node: Value) -> NodeView {
        node_view("n1", Some(&serde_json::from_value(node).unwrap()))
    }

    #[test]
    fn case_54_a_node_is_eligible_unless_it_is_going_or_not_there() {
        let of = |metadata: Value, taint: &str| {
            let taints = json!([{"key": taint, "effect": "NoSchedule"}]);
            view(json!({"metadata": metadata, "spec": {"taints": taints}})).eligible
        };
        assert!(of(json!({"name": "n1"}), "other"));
        assert!(!of(json!({"name": "n1"}), "ToBeDeletedByClusterAutoscaler"));
        assert!(!of(json!({"name": "n1", "deletionTimestamp": "2026-01-01T00:00:00Z"}), "other"));
        let none = node_view("n1", None);
        assert_eq!(none, NodeView { name: "n1".into(), ..NodeView::default() });
        assert!(!none.exists && !none.eligible);
    }

    #[test]
    fn internal_addresses_come_before_external_ones() {
        let seen = view(json!({
            "metadata": {"name": "n1", "labels": {"topology.kubernetes.io/zone": "a", "mine": "b"}},
            "spec": {"podCIDR": "10.0.0.0/24", "podCIDRs": ["10.0.0.0/24", "fd00::/64"]},
            "status": {"addresses": [
                {"type": "Hostname", "address": "n1"},
                {"type": "ExternalIP", "address": "192.0.2.7"},
                {"type": "InternalIP", "address": "10.1.0.7"},
                {"type": "InternalIP", "address": "what"},
                {"type": "InternalIP", "address": "fd01::7"},
            ]},
        }));
        let ips: Vec<IpAddr> =
            ["10.1.0.7", "fd01::7", "192.0.2.7"].iter().map(|ip| ip.parse().unwrap()).collect();
        let pod_cidrs = vec!["10.0.0.0/24".to_owned(), "fd00::/64".to_owned()];
        let zone = Some("a".to_owned());
        assert_eq!(seen, NodeView { name: "n1".into(), exists: true, zone, ips, pod_cidrs, eligible: true });
        let old = view(json!({"metadata": {"name": "n1"}, "spec": {"podCIDR": "10.0.0.0/24"}}));
        assert_eq!(old.pod_cidrs, ["10.0.0.0/24"]);
        assert_eq!(old.zone, None);
    }
}
