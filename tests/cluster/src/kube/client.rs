//! Owns: reads and writes by an administrator of the cluster.
//! In: a client with an administrator's certificate. Out: objects, changes of objects with the time at which they were
//! seen, applied manifests.

use anyhow::{Context as _, Result, bail};
use futures_util::stream::BoxStream;
use futures_util::{StreamExt as _, TryStreamExt as _};
use k8s_openapi::api::authentication::v1::{BoundObjectReference, TokenRequest, TokenRequestSpec};
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{Namespace, Node, NodeCondition, Pod, ServiceAccount};
use keelson_harness::util::eventually;
use kube::api::{
    Api, ApiResource, DeleteParams, DynamicObject, GroupVersionKind, ListParams, Patch, PatchParams,
    PostParams, WatchEvent, WatchParams,
};
use kube::core::discovery::Scope;
use kube::{Client, ResourceExt as _, discovery};
use serde::de::DeserializeOwned;
use serde_json::json;
use std::collections::BTreeMap;
use std::fmt::Debug;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use tokio::task::JoinHandle;

/// Namespace of the Leases of nodes.
pub const NODE_LEASES: &str = "kube-node-lease";

/// Timeout of a wait for a node condition. A kubelet whose Node is registered late, as on a busy machine, retries the
/// creation of its CSINode after 19 s and then after 116 s, and is not ready before.
const CONDITION: Duration = Duration::from_secs(180);

/// The object that a token of a service account is bound to: the token becomes invalid with it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Bound {
    /// A pod in the account's namespace.
    Pod(String),
    Node(String),
}

/// An administrator (group `system:masters`) of the cluster.
#[derive(Clone)]
pub struct Admin {
    client: Client,
}

impl Debug for Admin {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Admin").finish_non_exhaustive()
    }
}

impl Admin {
    pub(super) fn new(client: Client) -> Self {
        Self { client }
    }

    /// The client, for requests that have no method here.
    pub fn client(&self) -> Client {
        self.client.clone()
    }

    pub fn nodes(&self) -> Api<Node> {
        Api::all(self.client())
    }

    pub fn leases(&self) -> Api<Lease> {
        Api::namespaced(self.client(), NODE_LEASES)
    }

    pub fn pods(&self, namespace: &str) -> Api<Pod> {
        Api::namespaced(self.client(), namespace)
    }

    pub async fn node(&self, name: &str) -> Result<Option<Node>> {
        self.nodes().get_opt(name).await.with_context(|| format!("cannot get the node {name}"))
    }

    pub async fn lease(&self, node: &str) -> Result<Option<Lease>> {
        self.leases().get_opt(node).await.with_context(|| format!("cannot get the lease of {node}"))
    }

    /// None if the condition is not set or there is no such node.
    pub async fn condition(&self, node: &str, kind: &str) -> Result<Option<NodeCondition>> {
        Ok(self.node(node).await?.and_then(|node| condition(&node, kind).cloned()))
    }

    /// Waits until a condition of a node has this status: `True`, `False` or `Unknown`.
    pub async fn await_condition(&self, node: &str, kind: &str, status: &str) -> Result<NodeCondition> {
        eventually(CONDITION, &format!("{kind} of {node} is {status}"), || async {
            match self.condition(node, kind).await? {
                Some(found) if found.status == status => Ok(found),
                other => bail!("it is {other:?}"),
            }
        })
        .await
    }

    /// Creates a Node without a kubelet.
    pub async fn create_node(&self, name: &str, labels: &[(&str, &str)]) -> Result<Node> {
        let labels: BTreeMap<_, _> = labels.iter().copied().collect();
        let node = serde_json::from_value(json!({"metadata": {"name": name, "labels": labels}}))?;
        self.nodes().create(&PostParams::default(), &node).await.context("cannot create the Node")
    }

    /// Fails if the node does not exist.
    pub async fn delete_node(&self, name: &str) -> Result<()> {
        self.nodes().delete(name, &DeleteParams::default()).await.map(drop).context("cannot delete the node")
    }

    /// Fails if the Lease does not exist.
    pub async fn delete_lease(&self, node: &str) -> Result<()> {
        let deleted = self.leases().delete(node, &DeleteParams::default()).await;
        deleted.map(drop).context("cannot delete the lease")
    }

    /// Deletes a pod with a grace period of 0, without waiting for its node.
    pub async fn delete_pod(&self, namespace: &str, name: &str) -> Result<()> {
        let now = DeleteParams::default().grace_period(0);
        self.pods(namespace).delete(name, &now).await.map(drop).context("cannot delete the pod")
    }

    pub async fn ensure_service_account(&self, namespace: &str, name: &str) -> Result<()> {
        let make = PostParams::default();
        let space: Namespace = serde_json::from_value(json!({"metadata": {"name": namespace}}))?;
        unless_exists(Api::all(self.client()).create(&make, &space).await)
            .with_context(|| format!("cannot make the namespace {namespace}"))?;
        let account: ServiceAccount = serde_json::from_value(json!({"metadata": {"name": name}}))?;
        unless_exists(Api::namespaced(self.client(), namespace).create(&make, &account).await)
            .with_context(|| format!("cannot make the service account {namespace}/{name}"))
    }

    /// A new token of a service account, valid for an hour: bound to nothing, to a pod of the account, or to a Node.
    pub async fn token(&self, namespace: &str, name: &str, bound: Option<&Bound>) -> Result<String> {
        self.token_for(namespace, name, bound, 3600).await
    }

    /// The same, valid for a number of seconds (at least 600).
    pub async fn token_for(
        &self,
        namespace: &str,
        name: &str,
        bound: Option<&Bound>,
        seconds: i64,
    ) -> Result<String> {
        let accounts: Api<ServiceAccount> = Api::namespaced(self.client(), namespace);
        let reference = bound.map(|bound| {
            let (kind, name) = match bound {
                Bound::Pod(name) => ("Pod", name),
                Bound::Node(name) => ("Node", name),
            };
            BoundObjectReference {
                api_version: Some("v1".to_owned()),
                kind: Some(kind.to_owned()),
                name: Some(name.clone()),
                uid: None,
            }
        });
        let spec = TokenRequestSpec {
            expiration_seconds: Some(seconds),
            bound_object_ref: reference,
            ..TokenRequestSpec::default()
        };
        let request = TokenRequest { spec: Some(spec), ..TokenRequest::default() };
        let answer: TokenRequest = accounts
            .create_subresource("token", name, &PostParams::default(), &request)
            .await
            .with_context(|| format!("no token for {namespace}/{name}"))?;
        answer.status.and_then(|status| status.token).context("a token request was answered without a token")
    }

    /// Creates a pod of a service account on a node, like a pod of a DaemonSet, and returns its name. Its phase is
    /// terminal, so that no kubelet runs it.
    pub async fn ensure_pod_of(&self, namespace: &str, account: &str, node: &str) -> Result<String> {
        let name = format!("{account}-{node}");
        let pod: Pod = serde_json::from_value(json!({
            "metadata": {"name": name},
            "spec": {
                "nodeName": node,
                "serviceAccountName": account,
                "automountServiceAccountToken": false,
                "tolerations": [{"operator": "Exists"}],
                "containers": [{"name": "agent", "image": "registry.example/keelson"}],
            },
        }))?;
        unless_exists(self.pods(namespace).create(&PostParams::default(), &pod).await)
            .with_context(|| format!("cannot make the pod {namespace}/{name}"))?;
        let ended = Patch::Merge(json!({"status": {"phase": "Succeeded"}}));
        let patched = self.pods(namespace).patch_status(&name, &PatchParams::default(), &ended).await;
        patched.with_context(|| format!("cannot end the pod {namespace}/{name}"))?;
        Ok(name)
    }

    /// Applies the documents of a YAML manifest one after the other (server-side apply), and returns the resulting
    /// objects.
    pub async fn apply(&self, manifest: &str) -> Result<Vec<DynamicObject>> {
        let documents: Vec<DynamicObject> =
            serde_saphyr::from_multiple(manifest).context("the manifest is no YAML of objects")?;
        let mut applied = Vec::new();
        for document in documents {
            let api = self.api_for(&document).await?;
            let name = document.name_any();
            let forced = PatchParams::apply("keelson-tests").force();
            let outcome = api.patch(&name, &forced, &Patch::Apply(&document)).await;
            applied.push(outcome.with_context(|| format!("cannot apply {:?} {name}", document.types))?);
        }
        Ok(applied)
    }

    async fn api_for(&self, document: &DynamicObject) -> Result<Api<DynamicObject>> {
        let types = document.types.as_ref().context("a document has no apiVersion and kind")?;
        let kind = GroupVersionKind::try_from(types).context("a document has a strange apiVersion")?;
        let found: (ApiResource, _) = discovery::pinned_kind(&self.client, &kind)
            .await
            .with_context(|| format!("the API server knows no {kind:?}"))?;
        let (resource, capabilities) = found;
        Ok(match capabilities.scope {
            Scope::Cluster => Api::all_with(self.client(), &resource),
            Scope::Namespaced => {
                let namespace = document.namespace().unwrap_or_else(|| "default".to_owned());
                Api::namespaced_with(self.client(), &namespace, &resource)
            }
        })
    }

    /// Collects every change of the object of this name from now on, starting with its present state.
    pub async fn watch<K>(&self, api: Api<K>, name: &str) -> Result<Watch<K>>
    where
        K: Clone + DeserializeOwned + Debug + Send + Sync + 'static,
    {
        Watch::start(api, name).await
    }
}

pub fn condition<'a>(node: &'a Node, kind: &str) -> Option<&'a NodeCondition> {
    node.status.as_ref()?.conditions.as_ref()?.iter().find(|condition| condition.type_ == kind)
}

fn unless_exists<T>(created: kube::Result<T>) -> kube::Result<()> {
    match created {
        Err(kube::Error::Api(status)) if status.code == 409 => Ok(()),
        other => other.map(drop),
    }
}

#[derive(Clone, Debug)]
pub struct Change<K> {
    pub at: Instant,
    /// None if it was deleted.
    pub object: Option<K>,
}

/// The changes that were seen, and the error that ended the watch.
type Changes<K> = Mutex<(Vec<Change<K>>, Option<String>)>;

/// Collects the changes of one object. Stopped on drop.
#[derive(Debug)]
pub struct Watch<K> {
    state: Arc<Changes<K>>,
    task: JoinHandle<()>,
}

impl<K: Clone + DeserializeOwned + Debug + Send + Sync + 'static> Watch<K> {
    /// Lists, opens the watch, and continues it in the background.
    async fn start(api: Api<K>, name: &str) -> Result<Self> {
        let state = Arc::new(Mutex::new((Vec::new(), None)));
        // Longer than any test: a watch that ended would have to be resumed at its version.
        let params = WatchParams::default().fields(&format!("metadata.name={name}")).timeout(290);
        // A watch from version 0 would begin with the existing objects, but an API server refuses that with an etcd as
        // old as 3.4.23.
        let only = ListParams { field_selector: params.field_selector.clone(), ..ListParams::default() };
        let listed = api.list(&only).await.context("cannot list what to watch")?;
        let version = listed.metadata.resource_version.context("a list has a version")?;
        for object in listed.items {
            lock(&state).0.push(Change { at: Instant::now(), object: Some(object) });
        }
        let events = api.watch(&params, &version).await.context("cannot watch")?.boxed();
        let seen = state.clone();
        let task = tokio::spawn(async move {
            if let Err(error) = collect(events, &seen).await {
                lock(&seen).1 = Some(format!("{error:#}"));
            }
        });
        Ok(Self { state, task })
    }

    /// The changes so far. Fails if the watch has ended: changes may have been missed.
    pub fn changes(&self) -> Result<Vec<Change<K>>> {
        let state = lock(&self.state);
        if let Some(error) = &state.1 {
            bail!("the watch ended: {error}");
        }
        Ok(state.0.clone())
    }
}

impl<K> Drop for Watch<K> {
    fn drop(&mut self) {
        self.task.abort();
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

async fn collect<K>(mut events: BoxStream<'_, kube::Result<WatchEvent<K>>>, seen: &Changes<K>) -> Result<()> {
    while let Some(event) = events.try_next().await? {
        let object = match event {
            WatchEvent::Added(object) | WatchEvent::Modified(object) => Some(object),
            WatchEvent::Deleted(_) => None,
            WatchEvent::Bookmark(_) => continue,
            WatchEvent::Error(status) => bail!("{status:?}"),
        };
        lock(seen).0.push(Change { at: Instant::now(), object });
    }
    bail!("the API server ended it")
}
