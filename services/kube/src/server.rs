//! Client of the API server.
//!
//! Owns: [`ApiServer`]: one request for each call, its timeout, the size limit of its answer, and the mapping
//! to the actors' traits. In: calls. Out: answers, [`ApiError`]s, and for each request a
//! [`RequestSeen`](crate::RequestSeen).

use std::{
    fmt,
    sync::Arc,
    time::{Duration, SystemTime},
};

use bytes::Bytes;
use futures_util::{FutureExt as _, future::BoxFuture};
use http::{Method, Request, header};
use http_body_util::{BodyExt as _, LengthLimitError, Limited};
use hyper::body::Incoming;
use k8s_openapi::api::core::v1::Node;
use keelson_actor_system::cluster::{
    ApiError, ApiErrorKind, ClusterEvent, EventApi, LeaseApi, LeaseCreate, LeasePatch, NodeApi,
    ObservedLease, Written,
};
use tokio::time::Instant;

use crate::{
    answers::{self, Answer, Failure},
    bodies,
    credentials::{HeldLink, LinkKeeper, SharedLinkKeeper},
    identity::CredentialsObserver,
    observe::{RequestObserver, RequestSeen},
    signals::ServerSignals,
    source::ClusterSource,
    transport::KeepAlive,
};

/// Maximum size of an answer in bytes: more than any list of one node's pods.
const ANSWER_MAX: usize = 8 << 20;

#[derive(Debug, Clone)]
pub struct ApiServerParts {
    pub source: ClusterSource,
    /// Timeout of one request, including its connection and its answer. The kubelet's heartbeats use the
    /// lease duration, and at most 10 s.
    pub timeout: Duration,
    /// Timeout for the head of a list or a watch, if it is longer. A busy API server (API Priority and
    /// Fairness) may queue a request for up to a minute before it answers.
    pub head_timeout: Duration,
    pub keep_alive: KeepAlive,
    pub observer: RequestObserver,
    /// Shared by all connections to one API server.
    pub signals: ServerSignals,
    /// Receives the credentials each time they are read.
    pub credentials: CredentialsObserver,
}

impl ApiServerParts {
    /// Defaults: 10 s for a request and 60 s for the head of a list or a watch, the keep-alive of Go's client, no
    /// observers.
    #[must_use]
    pub fn new(source: ClusterSource) -> Self {
        Self {
            source,
            timeout: Duration::from_secs(10),
            head_timeout: Duration::from_secs(60),
            keep_alive: KeepAlive::default(),
            observer: RequestObserver::default(),
            signals: ServerSignals::default(),
            credentials: CredentialsObserver::default(),
        }
    }
}

/// A client of the API server. Clones share its connections.
///
/// Its connections are tasks of the runtime on which they were opened, so a client and its clones belong on one
/// runtime: make one for each arbiter that uses the server. Making one is cheap and reads nothing; the
/// first request reads the credentials.
///
/// One call is one request on the wire. There are no retries, no waits for `Retry-After` and no rate limits
/// here. After a request that timed out, the next one gets a new connection.
#[derive(Clone)]
pub struct ApiServer {
    keeper: SharedLinkKeeper,
    timeout: Duration,
    head_timeout: Duration,
    observer: RequestObserver,
    signals: ServerSignals,
}

impl fmt::Debug for ApiServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ApiServer").field("server", &self.url()).finish_non_exhaustive()
    }
}

/// A request before it is sent.
pub(crate) struct Call {
    pub(crate) method: Method,
    pub(crate) resource: &'static str,
    /// Path and query.
    pub(crate) target: String,
    pub(crate) accept: &'static str,
    /// Media type and body.
    pub(crate) body: Option<(&'static str, String)>,
}

impl Call {
    pub(crate) fn get(resource: &'static str, target: String, accept: &'static str) -> Self {
        Self { method: Method::GET, resource, target, accept, body: None }
    }

    pub(crate) fn write(
        method: Method,
        resource: &'static str,
        target: String,
        accept: &'static str,
        body: (&'static str, String),
    ) -> Self {
        Self { method, resource, target, accept, body: Some(body) }
    }
}

#[derive(Default)]
struct Progress {
    used: Option<HeldLink>,
    status: Option<u16>,
}

/// An answer whose head has arrived.
type Begun = http::Response<Incoming>;

impl ApiServer {
    #[must_use]
    pub fn new(parts: ApiServerParts) -> Self {
        Self {
            keeper: Arc::new(LinkKeeper::new(parts.source, parts.keep_alive, parts.credentials)),
            timeout: parts.timeout,
            head_timeout: parts.head_timeout.max(parts.timeout),
            observer: parts.observer,
            signals: parts.signals,
        }
    }

    /// The server's URL without userinfo; the source while the URL is not known.
    #[must_use]
    pub fn url(&self) -> String {
        self.keeper.server()
    }

    /// Closes the connections: the next request opens a new one. Running requests and watches continue on theirs.
    pub fn drop_connections(&self) {
        self.keeper.close_connections();
    }

    /// Ends, within 42 s, the back-off of watches that wait after an error, because the server answered another client;
    /// also on other connections that share [`ApiServerParts::signals`]. A wait that the server requested continues.
    pub fn wake_watches(&self) {
        self.signals.wake();
    }

    pub(crate) fn signals(&self) -> &ServerSignals {
        &self.signals
    }

    /// Deletes a Lease in the namespace of the nodes' Leases.
    ///
    /// # Errors
    /// The server does not answer or refuses; [`ApiErrorKind::NotFound`] if there is no such Lease.
    pub async fn delete_lease(&self, name: &str) -> Result<(), ApiError> {
        let target = bodies::lease_path(name);
        let accept = bodies::ACCEPT_JSON;
        self.call(Call { method: Method::DELETE, resource: "leases", target, accept, body: None })
            .await
            .map(drop)
    }

    /// Sends one request and reads the full answer; an answer other than 2xx is an error.
    pub(crate) async fn call(&self, call: Call) -> Result<Bytes, ApiError> {
        self.timed(call, self.timeout, async |answer| Ok(read_to_end(answer).await?.body)).await
    }

    /// Sends one request and reads the head of its answer; an answer other than 2xx is an error.
    pub(crate) async fn open(&self, call: Call) -> Result<Incoming, ApiError> {
        self.timed(call, self.head_timeout, async |answer| Ok(answer.into_body())).await
    }

    /// Sends one request within `limit`; `read` processes a 2xx answer. After a timeout the
    /// connection may be dead, so the next request gets another.
    async fn timed<T>(
        &self,
        call: Call,
        limit: Duration,
        read: impl AsyncFnOnce(Begun) -> Result<T, Failure>,
    ) -> Result<T, ApiError> {
        let begun = Instant::now();
        let seen = (call.resource, method_name(&call.method));
        let mut progress = Progress::default();
        let work = self.exchange(call, read, &mut progress);
        let done = tokio::time::timeout_at(begun + limit, work).await.unwrap_or_else(|_| {
            Err(Failure::new(ApiErrorKind::Timeout, format!("no answer within {limit:?}")))
        });
        let error = done.as_ref().err().map(|failure| failure.kind);
        match (error, &progress.used) {
            (Some(ApiErrorKind::Timeout), Some(used)) => self.keeper.drop_connections_of(used),
            (Some(ApiErrorKind::Unauthorized), _) => self.keeper.mark_rejected(),
            _ => {}
        }
        self.report(seen, progress.status, error, begun);
        done.map_err(|failure| self.error(failure))
    }

    async fn exchange<T>(
        &self,
        call: Call,
        read: impl AsyncFnOnce(Begun) -> Result<T, Failure>,
        progress: &mut Progress,
    ) -> Result<T, Failure> {
        let held = self.keeper.link().await?;
        progress.used = Some(held.clone());
        let mut request = Request::builder().method(call.method).header(header::ACCEPT, call.accept);
        let mut bytes = Bytes::new();
        if let Some((media_type, body)) = call.body {
            request = request.header(header::CONTENT_TYPE, media_type);
            bytes = body.into();
        }
        let sent = held.link.send(&call.target, request, bytes).await;
        let answer = sent.map_err(|err| answers::connection_failure(err.as_ref()))?;
        progress.status = Some(answer.status().as_u16());
        if answer.status().is_success() {
            return read(answer).await;
        }
        let refusal = read_to_end(answer).await?;
        Err(answers::failure(&refusal, SystemTime::now())
            .unwrap_or_else(|| answers::invalid_answer("neither success nor failure")))
    }

    fn report(
        &self,
        (resource, method): (&'static str, &'static str),
        status: Option<u16>,
        error: Option<ApiErrorKind>,
        begun: Instant,
    ) {
        self.observer.seen(&RequestSeen {
            method,
            resource,
            // An answer that was incomplete or late counts as none.
            status: status.filter(|code| error.is_none() || *code >= 300),
            error,
            duration: begun.elapsed(),
            host: self.keeper.host(),
        });
    }

    /// Adds the server's name, for the actors.
    pub(crate) fn error(&self, failure: Failure) -> ApiError {
        ApiError { server: self.url(), kind: failure.kind, reason: failure.reason }
    }

    /// A call as a separate future, with `read` for its answer.
    fn call_and_parse<T: Send + 'static>(
        &self,
        call: Call,
        read: impl FnOnce(&[u8]) -> Result<T, Failure> + Send + 'static,
    ) -> BoxFuture<'static, Result<T, ApiError>> {
        let api = self.clone();
        async move {
            let body = api.call(call).await?;
            read(&body).map_err(|failure| api.error(failure))
        }
        .boxed()
    }

    /// As [`Self::call_and_parse`], for one object, whose resource version is compared with earlier ones.
    fn call_versioned<T: Send + 'static>(
        &self,
        object: String,
        call: Call,
        read: impl FnOnce(&[u8]) -> Result<T, Failure> + Send + 'static,
        version: impl FnOnce(&T) -> &str + Send + 'static,
    ) -> BoxFuture<'static, Result<T, ApiError>> {
        let signals = self.signals.clone();
        let asked = self.call_and_parse(call, read);
        async move {
            let expected = signals.expected(&object);
            let answer = asked.await?;
            signals.answered(&object, expected, version(&answer));
            Ok(answer)
        }
        .boxed()
    }

    /// A write of one object, or a consistent read of it, that returns metadata.
    fn written(&self, object: String, call: Call) -> BoxFuture<'static, Result<Written, ApiError>> {
        self.call_versioned(object, call, answers::written, |written| &written.resource_version)
    }
}

fn node_version(node: &Node) -> &str {
    node.metadata.resource_version.as_deref().unwrap_or_default()
}

async fn read_to_end(answer: Begun) -> Result<Answer, Failure> {
    let (head, body) = answer.into_parts();
    let body = Limited::new(body, ANSWER_MAX).collect().await.map_err(|err| {
        if err.is::<LengthLimitError>() {
            answers::invalid_answer(format!("it is longer than {} MiB", ANSWER_MAX >> 20))
        } else {
            let failure = answers::connection_failure(err.as_ref());
            Failure::new(failure.kind, format!("the response is incomplete: {}", failure.reason))
        }
    })?;
    Ok(Answer { status: head.status, headers: head.headers, body: body.to_bytes() })
}

fn method_name(method: &Method) -> &'static str {
    match *method {
        Method::POST => "POST",
        Method::PATCH => "PATCH",
        Method::DELETE => "DELETE",
        _ => "GET",
    }
}

impl LeaseApi for ApiServer {
    fn server(&self) -> String {
        self.url()
    }

    fn get_lease(&self, name: &str) -> BoxFuture<'static, Result<ObservedLease, ApiError>> {
        let path = bodies::lease_path(name);
        let call = Call::get("leases", path.clone(), bodies::ACCEPT_JSON);
        self.call_versioned(path, call, answers::lease, |lease: &ObservedLease| {
            &lease.written.resource_version
        })
    }

    fn create_lease(&self, lease: LeaseCreate) -> BoxFuture<'static, Result<Written, ApiError>> {
        let body = (bodies::ACCEPT_JSON, bodies::lease_to_create(&lease));
        let call = Call::write(Method::POST, "leases", bodies::leases_path(), bodies::ACCEPT_METADATA, body);
        self.written(bodies::lease_path(&lease.name), call)
    }

    fn renew_lease(&self, patch: LeasePatch) -> BoxFuture<'static, Result<Written, ApiError>> {
        let body = (bodies::MERGE_PATCH, bodies::lease_to_patch(&patch));
        let path = bodies::lease_path(&patch.name);
        let call = Call::write(Method::PATCH, "leases", path.clone(), bodies::ACCEPT_METADATA, body);
        self.written(path, call)
    }

    fn node_uid(&self, node: &str) -> BoxFuture<'static, Result<String, ApiError>> {
        let path = bodies::node_path(node);
        let node = self.written(path.clone(), Call::get("nodes", path, bodies::ACCEPT_METADATA));
        async move { Ok(node.await?.uid) }.boxed()
    }

    fn close_connections(&self) {
        self.drop_connections();
    }
}

impl NodeApi for ApiServer {
    fn server(&self) -> String {
        self.url()
    }

    fn get_node(&self, name: &str) -> BoxFuture<'static, Result<Box<Node>, ApiError>> {
        let path = bodies::node_path(name);
        let call = Call::get("nodes", path.clone(), bodies::ACCEPT_JSON);
        self.call_versioned(path, call, |body| Ok(Box::new(answers::json(body)?)), |node| node_version(node))
    }

    fn create_node(&self, node: Box<Node>) -> BoxFuture<'static, Result<Box<Node>, ApiError>> {
        let body = match serde_json::to_string(&node) {
            Ok(body) => (bodies::ACCEPT_JSON, body),
            Err(err) => {
                let failure = Failure::new(ApiErrorKind::Invalid, format!("cannot encode the Node: {err}"));
                return futures_util::future::ready(Err(self.error(failure))).boxed();
            }
        };
        let name = bodies::node_path(node.metadata.name.as_deref().unwrap_or_default());
        let path = "/api/v1/nodes".to_owned();
        let call = Call::write(Method::POST, "nodes", path, bodies::ACCEPT_JSON, body);
        self.call_versioned(name, call, |body| Ok(Box::new(answers::json(body)?)), |node| node_version(node))
    }

    fn patch_node(
        &self,
        name: &str,
        patch: serde_json::Value,
    ) -> BoxFuture<'static, Result<Written, ApiError>> {
        let body = (bodies::STRATEGIC_MERGE_PATCH, patch.to_string());
        let path = bodies::node_path(name);
        let call = Call::write(Method::PATCH, "nodes", path.clone(), bodies::ACCEPT_METADATA, body);
        self.written(path, call)
    }

    fn patch_status(
        &self,
        name: &str,
        patch: serde_json::Value,
    ) -> BoxFuture<'static, Result<Written, ApiError>> {
        let body = (bodies::STRATEGIC_MERGE_PATCH, patch.to_string());
        let node = bodies::node_path(name);
        let path = format!("{node}/status");
        let call = Call::write(Method::PATCH, "nodes/status", path, bodies::ACCEPT_METADATA, body);
        self.written(node, call)
    }

    fn close_connections(&self) {
        self.drop_connections();
    }
}

impl EventApi for ApiServer {
    fn create_event(&self, node: &str, event: ClusterEvent) -> BoxFuture<'static, Result<(), ApiError>> {
        let body = (bodies::ACCEPT_JSON, bodies::event_to_create(node, &event));
        let path = bodies::events_path(bodies::event_namespace(&event));
        let call = Call::write(Method::POST, "events", path, bodies::ACCEPT_METADATA, body);
        self.call_and_parse(call, |_| Ok(()))
    }

    fn patch_event(&self, event: ClusterEvent) -> BoxFuture<'static, Result<(), ApiError>> {
        let body = (bodies::MERGE_PATCH, bodies::event_to_patch(&event));
        let path = bodies::event_path(bodies::event_namespace(&event), &event.name);
        let call = Call::write(Method::PATCH, "events", path, bodies::ACCEPT_METADATA, body);
        self.call_and_parse(call, |_| Ok(()))
    }
}
