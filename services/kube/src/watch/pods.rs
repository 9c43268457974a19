//! The pods bound to the agent's node.
//!
//! Owns: [`watch_pods`], and the table of known pods: uid, name and whether each is being
//! deleted. In: the metadata of pods. Out: [`PodEvent`]s to a [`PodSink`], each once.
//!
//! A static pod appears as its mirror, whose uid is not the one that the kubelet gives to the runtime.

use std::{
    collections::{HashMap, HashSet},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use keelson_actor_system::cluster::JobHealth;
use keelson_endpoint_publisher::Ack;
use serde::Deserialize;
use tokio::sync::watch;

use super::{
    follow::follow,
    json::Json,
    subject::{Change, Selectors, Subject, publish_health},
};
use crate::{
    bodies::{ACCEPT_JSON_METADATA, ACCEPT_JSON_METADATA_LIST},
    server::ApiServer,
};

/// A pod that has ended needs no image any more; its metadata does not show it.
const HAS_NOT_ENDED: &str = "status.phase!=Succeeded,status.phase!=Failed";

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct PodRef {
    pub uid: String,
    pub namespace: String,
    pub name: String,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PodEvent {
    /// Bound to this node and not being deleted.
    Present(PodRef),
    /// Being deleted: it has a `deletionTimestamp`.
    Terminating(PodRef),
    /// Ended, or no longer in the API server. Sent only when the server said so.
    Gone(PodRef),
}

pub trait PodSink: Send {
    /// Must not block.
    fn pod(&mut self, event: PodEvent);

    /// All pods of the server were sent: `live` are the uids of these pods, including those that the kubelet gives to
    /// static pods. Called after each list, the first time when the watch begins.
    fn synced(&mut self, _live: HashSet<String>) {}
}

impl<F: FnMut(PodEvent) + Send> PodSink for F {
    fn pod(&mut self, event: PodEvent) {
        self(event);
    }
}

/// The metadata of a pod that is needed.
#[derive(Debug, Clone, Deserialize)]
pub(crate) struct PodMeta {
    metadata: Meta,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Meta {
    uid: String,
    namespace: String,
    name: String,
    deletion_timestamp: Option<String>,
    annotations: Annotations,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
struct Annotations {
    /// On the mirror of a static pod: the kubelet's uid for it.
    #[serde(rename = "kubernetes.io/config.mirror")]
    mirror: Option<String>,
}

#[derive(Debug, Default)]
struct Table {
    pods: HashMap<String, Known>,
}

#[derive(Debug)]
struct Known {
    namespace: String,
    name: String,
    terminating: bool,
    /// The kubelet's uid for a static pod.
    static_uid: Option<String>,
}

impl Table {
    /// Adds the current state of a pod; returns an event if it is new. A pod that is being deleted stays so.
    fn put(&mut self, pod: PodMeta) -> Option<PodEvent> {
        let Meta { uid, namespace, name, deletion_timestamp, annotations } = pod.metadata;
        let terminating = deletion_timestamp.is_some();
        if uid.is_empty() {
            return None;
        }
        let pod = PodRef { uid: uid.clone(), namespace: namespace.clone(), name: name.clone() };
        let before = self.pods.get(&uid).map(|known| known.terminating);
        if before == Some(true) || before == Some(terminating) {
            return None;
        }
        self.pods.insert(uid, Known { namespace, name, terminating, static_uid: annotations.mirror });
        Some(if terminating { PodEvent::Terminating(pod) } else { PodEvent::Present(pod) })
    }

    /// The uids by which the kubelet knows the existing pods.
    fn live(&self) -> HashSet<String> {
        self.pods.iter().map(|(uid, known)| known.static_uid.as_ref().unwrap_or(uid).clone()).collect()
    }

    fn remove(&mut self, uid: &str) -> Option<PodEvent> {
        let (uid, known) = self.pods.remove_entry(uid)?;
        Some(PodEvent::Gone(PodRef { uid, namespace: known.namespace, name: known.name }))
    }

    /// Replaces the table by these pods. Deleted ones come first: a pod of the same name may have followed.
    fn synced(&mut self, pods: Vec<PodMeta>) -> Vec<PodEvent> {
        let here: HashSet<&str> = pods.iter().map(|pod| pod.metadata.uid.as_str()).collect();
        let mut lost: Vec<String> =
            self.pods.keys().filter(|uid| !here.contains(uid.as_str())).cloned().collect();
        lost.sort();
        let mut events: Vec<_> = lost.iter().filter_map(|uid| self.remove(uid)).collect();
        events.extend(pods.into_iter().filter_map(|pod| self.put(pod)));
        events
    }
}

/// What a watch of pods knows, so that a restarted one reports what happened to the pods that the last one had seen.
/// Cheap to clone.
#[derive(Debug, Clone, Default)]
pub struct KnownPods(Arc<Mutex<Table>>);

impl KnownPods {
    fn table(&self) -> MutexGuard<'_, Table> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

struct NodePods<'a, S> {
    node: String,
    known: KnownPods,
    /// The objects of the current listing.
    listing: Option<Vec<PodMeta>>,
    health: &'a watch::Sender<JobHealth>,
    sink: S,
}

impl<S: PodSink> NodePods<'_, S> {
    fn seen(&mut self, change: Change<PodMeta>) {
        let event = match change {
            Change::Listing => {
                self.listing = Some(Vec::new());
                return;
            }
            Change::Refused => return,
            Change::ListComplete => {
                let events = self.known.table().synced(self.listing.take().unwrap_or_default());
                for event in events {
                    self.sink.pod(event);
                }
                let live = self.known.table().live();
                self.sink.synced(live);
                return;
            }
            Change::Upsert(pod) => match &mut self.listing {
                Some(listed) => {
                    listed.push(*pod);
                    return;
                }
                None => self.known.table().put(*pod),
            },
            Change::Deleted(pod) => self.known.table().remove(&pod.metadata.uid),
        };
        if let Some(event) = event {
            self.sink.pod(event);
        }
    }
}

impl<S: PodSink> Subject for NodePods<'_, S> {
    type Encoding = Json<PodMeta>;
    const RESOURCE: &'static str = "pods";
    const ACCEPT: &'static str = ACCEPT_JSON_METADATA;
    const ACCEPT_LIST: &'static str = ACCEPT_JSON_METADATA_LIST;

    fn path(&self) -> &'static str {
        "/api/v1/pods"
    }

    fn selectors(&self) -> Selectors {
        Selectors::fields(format!("spec.nodeName={},{HAS_NOT_ENDED}", self.node))
    }

    async fn deliver(&mut self, changes: Vec<Change<PodMeta>>) -> Ack {
        for change in changes {
            self.seen(change);
        }
        Ack::Accepted
    }

    async fn health(&mut self, health: JobHealth) -> Ack {
        publish_health(self.health, health);
        Ack::Accepted
    }
}

/// Watches the metadata of the pods bound to `node` until dropped. Failures of the watch are reported to `health` and
/// not to the sink; after a recovery the sink gets what happened to the pods in between.
pub async fn watch_pods(
    api: &ApiServer,
    node: &str,
    health: &watch::Sender<JobHealth>,
    known: KnownPods,
    sink: impl PodSink,
) {
    let mut subject = NodePods { node: node.to_owned(), known, listing: None, health, sink };
    follow(api, &mut subject).await;
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod(uid: &str, terminating: bool) -> PodMeta {
        PodMeta {
            metadata: Meta {
                uid: uid.into(),
                namespace: "ns".into(),
                name: format!("pod-{uid}"),
                deletion_timestamp: terminating.then(|| "2026-01-01T00:00:00Z".into()),
                annotations: Annotations::default(),
            },
        }
    }

    fn named(uid: &str) -> PodRef {
        PodRef { uid: uid.into(), namespace: "ns".into(), name: format!("pod-{uid}") }
    }

    #[test]
    fn each_change_is_delivered_once() {
        let mut table = Table::default();
        assert_eq!(table.put(pod("a", false)), Some(PodEvent::Present(named("a"))));
        assert_eq!(table.put(pod("a", false)), None);
        assert_eq!(table.put(pod("a", true)), Some(PodEvent::Terminating(named("a"))));
        assert_eq!(table.put(pod("a", true)), None);
        assert_eq!(table.put(pod("a", false)), None, "a deletion is final");
        assert_eq!(table.remove("a"), Some(PodEvent::Gone(named("a"))));
        assert_eq!(table.remove("a"), None);
        assert_eq!(table.put(pod("", false)), None);
    }

    #[test]
    fn a_static_pod_is_live_by_the_uid_that_the_kubelet_has() {
        let json = r#"{"metadata":{"uid":"m","namespace":"ns","name":"etcd-n1","labels":{"a":"b"},
            "annotations":{"kubernetes.io/config.mirror":"static","kubernetes.io/config.hash":"static"}}}"#;
        let mut table = Table::default();
        table.synced(vec![serde_json::from_str(json).unwrap(), pod("a", false)]);
        assert_eq!(table.live(), HashSet::from(["static".to_owned(), "a".to_owned()]));
    }

    #[test]
    fn a_list_reports_objects_deleted_meanwhile() {
        let mut table = Table::default();
        table.synced(vec![pod("a", false), pod("b", false), pod("c", true)]);
        assert_eq!(
            table.synced(vec![pod("b", true), pod("d", false)]),
            [
                PodEvent::Gone(named("a")),
                PodEvent::Gone(named("c")),
                PodEvent::Terminating(named("b")),
                PodEvent::Present(named("d")),
            ]
        );
        assert_eq!(table.synced(vec![pod("b", true), pod("d", false)]), []);
        assert_eq!(table.pods.len(), 2);
    }
}
