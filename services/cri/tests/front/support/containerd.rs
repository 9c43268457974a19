//! containerd's own API, as far as pulls use it, kept in memory.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex},
    time::Duration,
};

use bytes::Bytes;
use futures_util::{FutureExt as _, future::BoxFuture};
use http::HeaderMap;
use keelson_cri::runtime::ContainerRuntime;
use keelson_proto::containerd::{
    content::{
        Info, InfoRequest, InfoResponse, ListStatusesResponse, ReadContentRequest, ReadContentResponse,
        Status,
    },
    leases::{
        AddResourceRequest, CreateRequest, CreateResponse, DeleteRequest, Lease, ListRequest,
        ListResourcesRequest, ListResourcesResponse, ListResponse, Resource,
    },
};

use super::{Call, FakeRuntime, OWNER, PULL_IMAGE, Sockets, client::frame, grpc_ok, grpc_status};

#[derive(Debug, Clone, Default)]
pub(crate) struct OneLease {
    pub(crate) labels: BTreeMap<String, String>,
    /// (type, id)
    pub(crate) resources: Vec<(String, String)>,
}

#[derive(Debug, Default)]
struct State {
    leases: BTreeMap<String, OneLease>,
    blobs: BTreeMap<String, (i64, Bytes)>,
    /// Offset, and time of the last write in Unix seconds.
    ingests: BTreeMap<String, (i64, i64)>,
    /// When blobs arrived, in Unix seconds.
    arrived: BTreeMap<String, i64>,
    journal: Vec<String>,
    without_own_api: bool,
    lease_errors: Vec<(i32, &'static str)>,
    /// The error of every call on the content API.
    content_error: Option<(i32, &'static str)>,
    lease_error: Option<(i32, &'static str)>,
}

#[derive(Debug, Clone, Default)]
pub(crate) struct Containerd(Arc<Mutex<State>>);

impl Containerd {
    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.0.lock().expect("state")
    }

    /// A containerd that serves, and a connection of the agent to it.
    pub(crate) fn start() -> (Self, FakeRuntime, ContainerRuntime) {
        let (containerd, sockets) = (Self::default(), Sockets::new());
        let runtime = FakeRuntime::start(&sockets, containerd.handler());
        let client = ContainerRuntime::new(sockets.runtime(), OWNER);
        (containerd, runtime, client)
    }

    pub(crate) fn handler(&self) -> impl Fn(Call) -> BoxFuture<'static, ()> + use<> {
        let containerd = self.clone();
        move |call| containerd.clone().handle(call).boxed()
    }

    /// Runs `hook` before it handles a call of `path`.
    pub(crate) fn before<F, H>(
        &self,
        path: &'static str,
        hook: H,
    ) -> impl Fn(Call) -> BoxFuture<'static, ()> + use<F, H>
    where
        F: Future<Output = ()> + Send + 'static,
        H: Fn(Self, HeaderMap) -> F + Send + Sync + 'static,
    {
        let containerd = self.clone();
        move |call| {
            let containerd = containerd.clone();
            if call.path != path {
                return containerd.handle(call).boxed();
            }
            let hook = hook(containerd.clone(), call.headers.clone());
            hook.then(|()| containerd.handle(call)).boxed()
        }
    }

    /// During a pull its lease has this manifest, and 120 bytes of the layer `b` are there.
    pub(crate) fn downloading(
        &self,
        manifest: &'static str,
        labels: &'static [(&str, &str)],
        lasts: Duration,
    ) -> impl Fn(Call) -> BoxFuture<'static, ()> + use<> {
        self.before(PULL_IMAGE, move |containerd, headers| async move {
            let lease = containerd.enter_lease(&headers).expect("a known lease").expect("a lease");
            containerd.put_blob("sha256:m", 200, manifest);
            containerd.put_lease(&lease, labels, &[("content", "sha256:m")]);
            containerd.put_ingest("layer-sha256:b", 120);
            tokio::time::sleep(lasts).await;
        })
    }

    /// The next call on the lease API fails with this.
    pub(crate) fn fail_next_lease_call(&self, code: i32, text: &'static str) {
        self.state().lease_errors.push((code, text));
    }

    /// From now on every call on the lease and content APIs fails with this; `None`: none fails.
    pub(crate) fn fail_own_api(&self, error: Option<(i32, &'static str)>) {
        let mut state = self.state();
        (state.lease_error, state.content_error) = (error, error);
    }

    /// From now on every call on the content API fails with this; `None`: none fails.
    pub(crate) fn fail_content_api(&self, error: Option<(i32, &'static str)>) {
        self.state().content_error = error;
    }

    /// Replaces it with another runtime, with or without the APIs of its own.
    pub(crate) fn set_own_api(&self, has: bool) {
        self.state().without_own_api = !has;
    }

    pub(crate) fn put_lease(&self, id: &str, labels: &[(&str, &str)], resources: &[(&str, &str)]) {
        let own = |(a, b): &(&str, &str)| ((*a).to_owned(), (*b).to_owned());
        let labels = labels.iter().map(own).collect();
        let resources = resources.iter().map(own).collect();
        self.state().leases.insert(id.to_owned(), OneLease { labels, resources });
    }

    pub(crate) fn drop_lease(&self, id: &str) {
        self.state().leases.remove(id);
    }

    pub(crate) fn leases(&self) -> BTreeMap<String, OneLease> {
        self.state().leases.clone()
    }

    pub(crate) fn put_blob(&self, digest: &str, size: i64, content: &str) {
        self.state().blobs.insert(digest.to_owned(), (size, Bytes::copy_from_slice(content.as_bytes())));
    }

    pub(crate) fn put_ingest(&self, reference: &str, offset: i64) {
        self.put_ingest_at(reference, offset, 0);
    }

    pub(crate) fn put_ingest_at(&self, reference: &str, offset: i64, updated: i64) {
        self.state().ingests.insert(reference.to_owned(), (offset, updated));
    }

    pub(crate) fn remove_ingest(&self, reference: &str) {
        self.state().ingests.remove(reference);
    }

    pub(crate) fn put_blob_at(&self, digest: &str, size: i64, content: &str, arrived: i64) {
        self.put_blob(digest, size, content);
        self.state().arrived.insert(digest.to_owned(), arrived);
    }

    /// Every call on the own API that changed something or read a blob, in order.
    pub(crate) fn journal(&self) -> Vec<String> {
        self.state().journal.clone()
    }

    /// Enters a pull's lease as containerd does: an unknown one is refused.
    pub(crate) fn enter_lease(&self, headers: &HeaderMap) -> Result<Option<String>, HeaderMap> {
        let Some(lease) = headers.get("containerd-lease") else { return Ok(None) };
        let lease = lease.to_str().expect("ascii").to_owned();
        if self.state().leases.contains_key(&lease) {
            Ok(Some(lease))
        } else {
            Err(grpc_status(5, &format!("lease \"{lease}\": not found")))
        }
    }

    /// Answers every call but pulls; pulls are answered at once if their lease is known.
    pub(crate) async fn handle(self, call: Call) {
        let Some((service, method)) = call.path.strip_prefix('/').and_then(|path| path.split_once('/'))
        else {
            return call.refuse(grpc_status(12, "no method"));
        };
        let (service, method) = (service.to_owned(), method.to_owned());
        match &*service {
            "containerd.services.leases.v1.Leases" => self.lease_call(call, &method).await,
            "containerd.services.content.v1.Content" => self.content_call(call, &method).await,
            _ if call.path == PULL_IMAGE => match self.enter_lease(&call.headers) {
                Ok(_) => call.standard().await,
                Err(status) => call.refuse(status),
            },
            _ => call.standard().await,
        }
    }

    fn refusal(&self, call: &Call) -> Option<HeaderMap> {
        if self.state().without_own_api {
            return Some(grpc_status(12, "unknown service"));
        }
        assert_eq!(call.headers["containerd-namespace"], "k8s.io");
        None
    }

    async fn lease_call(self, mut call: Call, method: &str) {
        let refusal = self.refusal(&call).or_else(|| {
            let mut state = self.state();
            let (code, text) = state.lease_errors.pop().or(state.lease_error)?;
            Some(grpc_status(code, text))
        });
        if let Some(refusal) = refusal {
            return call.refuse(refusal);
        }
        match method {
            "Create" => {
                let CreateRequest { id, labels } = call.message().await;
                let lease = OneLease { labels: labels.into_iter().collect(), resources: Vec::new() };
                let known = self.state().leases.contains_key(&id);
                if known {
                    return call.refuse(grpc_status(6, "lease: already exists"));
                }
                self.state().journal.push(format!("create {id}"));
                self.state().leases.insert(id, lease);
                call.answer(&CreateResponse::default()).await;
            }
            "Delete" => {
                let DeleteRequest { id, sync } = call.message().await;
                if self.state().leases.remove(&id).is_none() {
                    return call.refuse(grpc_status(5, "lease: not found"));
                }
                self.state().journal.push(format!("delete {id}{}", if sync { " and collect" } else { "" }));
                call.answer(&()).await;
            }
            "List" => {
                let ListRequest { filters } = call.message().await;
                // More than requested: the caller has to check what it gets.
                let by_id = filters.iter().find_map(|filter| filter.strip_prefix("id=="));
                let leases = self.leases().into_iter().filter(|(id, _)| by_id.is_none_or(|by| by == id));
                let lease = |(id, lease): (String, OneLease)| Lease {
                    id,
                    created_at: None,
                    labels: lease.labels.into_iter().collect(),
                };
                call.answer(&ListResponse { leases: leases.map(lease).collect() }).await;
            }
            "ListResources" => {
                let ListResourcesRequest { id } = call.message().await;
                let Some(lease) = self.leases().remove(&id) else {
                    return call.refuse(grpc_status(5, "lease: not found"));
                };
                let resource = |(r#type, id): (String, String)| Resource { id, r#type };
                let resources = lease.resources.into_iter().map(resource).collect();
                call.answer(&ListResourcesResponse { resources }).await;
            }
            "AddResource" => {
                let AddResourceRequest { id, resource } = call.message().await;
                let resource = resource.expect("a resource");
                self.state().journal.push(format!("add {id} {}", resource.id));
                if let Some(lease) = self.state().leases.get_mut(&id) {
                    lease.resources.push((resource.r#type, resource.id));
                }
                call.answer(&()).await;
            }
            _ => call.refuse(grpc_status(12, "unknown method")),
        }
    }

    async fn content_call(self, mut call: Call, method: &str) {
        let error = self.state().content_error.map(|(code, text)| grpc_status(code, text));
        if let Some(refusal) = self.refusal(&call).or(error) {
            return call.refuse(refusal);
        }
        match method {
            "ListStatuses" => {
                let statuses = self.state().ingests.clone().into_iter();
                let at = |seconds| Some(prost_types::Timestamp { seconds, nanos: 0 });
                let status = |(r#ref, (offset, updated))| Status {
                    r#ref,
                    offset,
                    updated_at: at(updated),
                    ..Default::default()
                };
                call.answer(&ListStatusesResponse { statuses: statuses.map(status).collect() }).await;
            }
            "Info" => {
                let InfoRequest { digest } = call.message().await;
                let size = self.state().blobs.get(&digest).map(|(size, _)| *size);
                let Some(size) = size else { return call.refuse(grpc_status(5, "content: not found")) };
                let arrived = self.state().arrived.get(&digest).copied().unwrap_or(0);
                let created_at = Some(prost_types::Timestamp { seconds: arrived, nanos: 0 });
                let info = Some(Info { digest, size, created_at, ..Default::default() });
                call.answer(&InfoResponse { info }).await;
            }
            "Read" => {
                let ReadContentRequest { digest, .. } = call.message().await;
                self.state().journal.push(format!("read {digest}"));
                let content = self.state().blobs.get(&digest).map(|(_, content)| content.clone());
                let Some(content) = content else { return call.refuse(grpc_status(5, "content: not found")) };
                // In two pieces: a blob may arrive in many.
                let half = content.len() / 2;
                let piece = |from: usize, to: usize| {
                    let data = content[from..to].to_vec();
                    frame(&ReadContentResponse { offset: from as i64, data })
                };
                let both = [piece(0, half), piece(half, content.len())].concat();
                call.answer_bytes(both.into(), grpc_ok()).await;
            }
            _ => call.refuse(grpc_status(12, "unknown method")),
        }
    }
}
