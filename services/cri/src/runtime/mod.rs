//! The agent's own connection to the container runtime.
//!
//! Owns: one gRPC channel, for pulls, presence checks, probes, leases and progress. In: calls of the
//! trait [`Runtime`] that the actors declare. Out: CRI and containerd calls on the runtime's socket.
//! No keep-alive pings are sent: containerd answers frequent ones with GOAWAY, and a unix socket
//! notices at once when its peer is gone.

mod apis;
mod cleanup;
mod leases;
mod progress;
mod raw;
mod report;
mod sizes;
mod stream;

use std::{collections::BTreeSet, error::Error as _, fmt, path::PathBuf, sync::Arc, time::Duration};

use futures_util::{FutureExt as _, future::BoxFuture};
use http::{HeaderMap, HeaderName, HeaderValue};
use hyper_util::rt::TokioIo;
use keelson_actor_system::reports::{RuntimeCondition, RuntimeImage};
use keelson_proto::{PULL_OPTION_MAX_PARALLEL, PULL_OPTIONS_HEADER, cri};
use keelson_pulls::{
    metrics::Metrics,
    request::PullCall,
    runtime::{
        Capabilities, FailureKind, Outcome, ProbeFailure, PullReply, Readings, Runtime, RuntimeError,
        RuntimeInfo, RuntimePull, WireStatus,
    },
};
use keelson_serve::grpc::frame::MAX_MESSAGE;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::UnixStream,
    sync::{Mutex, Notify},
};
use tonic::{
    Code, Request, Status,
    metadata::{KeyAndValueRef, MetadataMap, MetadataValue},
    transport::{Channel, Endpoint, Uri},
};

use crate::front::MAX_HEADERS;
use apis::{Api, Apis};
pub use cleanup::{AgentLease, CleanupError, LeaseCleaner};
use leases::LeaseBook;
use progress::ProgressReader;
use stream::Watched;

/// A probe or another short call that takes longer has failed.
const SHORT_CALL: Duration = Duration::from_secs(10);
/// Maximum wait for a garbage collection of the runtime.
const COLLECTION: Duration = Duration::from_secs(120);
/// Pauses of a pull before each further attempt to create its lease. After the last it continues without one.
const LEASE_RETRIES: [Duration; 2] = [Duration::from_millis(100), Duration::from_millis(500)];
/// Metadata by which containerd runs a call within a lease.
const LEASE_HEADER: &str = "containerd-lease";
/// `RuntimeName` of the runtimes whose PullImage ignores the pod's namespace.
const IGNORES_POD_NAMESPACE: [&str; 1] = ["containerd"];

#[derive(Clone)]
pub struct ContainerRuntime {
    inner: Arc<Inner>,
}

struct Inner {
    endpoint: String,
    channel: Channel,
    /// Notified when a connection of the channel is gone.
    closed: Arc<Notify>,
    leases: LeaseBook,
    progress: Mutex<ProgressReader>,
    apis: Arc<Apis>,
}

impl fmt::Debug for ContainerRuntime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ContainerRuntime").field("endpoint", &self.inner.endpoint).finish_non_exhaustive()
    }
}

impl ContainerRuntime {
    /// Connects when first used, within the tokio runtime of the caller. `owner` is the state folder's random id, by
    /// which the agent recognizes its leases.
    #[must_use]
    pub fn new(socket: PathBuf, owner: &str) -> Self {
        Self::with_metrics(socket, owner, &Metrics::default())
    }

    /// As [`ContainerRuntime::new`]; failed calls are counted in `metrics`.
    #[must_use]
    pub fn with_metrics(socket: PathBuf, owner: &str, metrics: &Metrics) -> Self {
        let apis = Arc::new(Apis::new(metrics.clone()));
        let made = apis.clone();
        let endpoint = format!("unix://{}", socket.display());
        let closed = Arc::new(Notify::new());
        let tell = closed.clone();
        let channel = connect(socket, move |stream| {
            made.connected();
            Watched::new(stream, tell.clone())
        });
        let inner = Inner {
            leases: LeaseBook::new(channel.clone(), owner),
            progress: Mutex::new(ProgressReader::new(channel.clone())),
            apis,
            endpoint,
            channel,
            closed,
        };
        Self { inner: Arc::new(inner) }
    }
}

/// A channel to a unix socket, connected when first used.
fn connect<S>(socket: PathBuf, wrap: impl Fn(UnixStream) -> TokioIo<S> + Clone + Send + 'static) -> Channel
where
    S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let connect = tower::service_fn(move |_: Uri| {
        let (socket, wrap) = (socket.clone(), wrap.clone());
        async move { UnixStream::connect(socket).await.map(wrap) }
    });
    // The authority that gRPC uses on unix sockets; the connector ignores it.
    Endpoint::from_static("http://localhost")
        // A long error message is sent in a header.
        .http2_max_header_list_size(MAX_HEADERS)
        .connect_with_connector_lazy(connect)
}

impl Inner {
    fn error(&self, status: &Status) -> RuntimeError {
        let reason = match status.source() {
            Some(_) => format!("the container runtime does not answer: {}", describe(status)),
            None => describe(status),
        };
        RuntimeError { endpoint: self.endpoint.clone(), reason }
    }

    /// The kubelet's own start-up probes: the runtime serves when both succeed.
    async fn probe(&self) -> Result<RuntimeInfo, ProbeFailure> {
        let failed = |status: Status, kind| {
            let is_gone = status.source().is_some() || status.code() == Code::Unavailable;
            let kind = if is_gone { FailureKind::Gone } else { kind };
            ProbeFailure { error: self.error(&status), kind }
        };
        let mut runtime = cri::runtime_service_client::RuntimeServiceClient::new(self.channel.clone());
        let version = runtime.version(cri::VersionRequest { version: "v1".into() });
        let version = short(version).await.map_err(|status| failed(status, FailureKind::Silent))?;
        let options: Vec<String> = version
            .metadata()
            .get_all(PULL_OPTIONS_HEADER)
            .iter()
            .filter_map(|value| value.to_str().ok().map(str::to_owned))
            .collect();
        let pull_option = options
            .iter()
            .any(|list| list.split(',').any(|option| option.trim() == PULL_OPTION_MAX_PARALLEL));
        // Another agent: what it passes through of containerd's API says nothing about its pulls, which run in its own
        // leases. It retains them and watches their progress itself.
        let is_agent = !options.is_empty();
        let version = version.into_inner();
        let mut images = cri::image_service_client::ImageServiceClient::new(self.channel.clone());
        let fs_info = images.image_fs_info(cri::ImageFsInfoRequest {});
        short(fs_info).await.map_err(|status| failed(status, FailureKind::Busy))?;
        let capabilities = Capabilities {
            pull_option,
            leases: !is_agent && self.has(Api::Leases).await,
            content: !is_agent && self.has(Api::Content).await,
            ignores_namespace: IGNORES_POD_NAMESPACE.contains(&version.runtime_name.as_str()),
        };
        Ok(RuntimeInfo { name: version.runtime_name, version: version.runtime_version, capabilities })
    }

    /// Whether the runtime has this API. An API that fails exists.
    async fn has(&self, api: Api) -> bool {
        if let Some(known) = self.apis.exists(api) {
            return known;
        }
        let asked = match api {
            Api::Leases => short(self.leases.ask()).await,
            Api::Content => {
                let asking = self.progress.lock().await.ask();
                short(asking).await
            }
        };
        match self.apis.called(api, asked) {
            Ok(()) => true,
            Err(status) => status.code() != Code::Unimplemented,
        }
    }

    async fn pull(&self, mut pull: RuntimePull) -> Outcome {
        if let Some(lease) = &pull.lease
            && let Err(status) = self.make_lease(lease).await
            && let Some(lost) = self.without_lease(&mut pull, &status)
        {
            return lost;
        }
        match self.pull_once(&pull).await {
            Err(status) if self.has_lost_lease(&status, &pull).await => {
                // Deleted by another process, or expired: create it again and repeat the call.
                if let Some(lease) = &pull.lease
                    && let Err(status) = self.leases.renew(lease).await
                    && let Some(lost) = self.without_lease(&mut pull, &status)
                {
                    return lost;
                }
                match self.pull_once(&pull).await {
                    Ok(reply) => Outcome::Answered(Arc::new(reply)),
                    Err(status) => self.outcome_of(&status),
                }
            }
            Ok(reply) => Outcome::Answered(Arc::new(reply)),
            Err(status) => self.outcome_of(&status),
        }
    }

    /// Whether the pull failed because its lease is gone. containerd names the lease if it is gone at the next blob. If what was
    /// already written was collected with it, containerd reports a missing file or blob, and the lease has to be looked for.
    async fn has_lost_lease(&self, status: &Status, pull: &RuntimePull) -> bool {
        let Some(lease) = &pull.lease else { return false };
        let names_lease = || {
            let message = status.message();
            status.code() == Code::NotFound
                && (message.contains(&**lease) || message.contains("lease does not exist"))
        };
        let may_be_collected = matches!(status.code(), Code::NotFound | Code::Unknown | Code::Internal)
            && status.source().is_none();
        names_lease() || (may_be_collected && matches!(short(self.leases.exists(lease)).await, Ok(false)))
    }

    /// Creates the lease of a pull. Transient errors are retried for a short time.
    async fn make_lease(&self, lease: &str) -> Result<(), Status> {
        for pause in LEASE_RETRIES {
            match self.apis.called(Api::Leases, self.leases.ensure(lease).await) {
                Err(status) if may_pass(&status) => tokio::time::sleep(pause).await,
                other => return other,
            }
        }
        self.apis.called(Api::Leases, self.leases.ensure(lease).await)
    }

    /// The lease could not be created. If the runtime is away, so is the pull. Otherwise the pull continues without a
    /// lease: pods must start, even if what a cancelled pull has fetched is then lost.
    fn without_lease(&self, pull: &mut RuntimePull, status: &Status) -> Option<Outcome> {
        let outcome = self.outcome_of(status);
        if outcome.is_lost() {
            return Some(outcome);
        }
        if status.code() != Code::Unimplemented {
            let image = &*pull.call.image;
            tracing::warn!(
                image,
                reason = describe(status),
                "cannot create a lease; the pull continues without it"
            );
        }
        pull.lease = None;
        None
    }

    async fn pull_once(&self, pull: &RuntimePull) -> Result<PullReply, Status> {
        let mut request = Request::new(pull.call.wire(pull.option));
        *request.metadata_mut() = metadata_of(&pull.call);
        if let Some(lease) = pull.lease.as_deref().and_then(|lease| MetadataValue::try_from(lease).ok()) {
            request.metadata_mut().insert(LEASE_HEADER, lease);
        }
        let response = raw::unary(&self.channel, "/runtime.v1.ImageService/PullImage", request).await?;
        let (metadata, message, _) = response.into_parts();
        Ok(PullReply { result: Ok(message), metadata: custom(&metadata) })
    }

    /// An unchanged status, and whether it stands for a broken connection.
    fn outcome_of(&self, status: &Status) -> Outcome {
        // A status that the runtime sent has no source; one made for a broken connection has.
        if status.source().is_some() {
            let text = format!(
                "the container runtime at {} closed the connection during the pull: {}",
                self.endpoint,
                describe(status)
            );
            return Outcome::Lost(Arc::new(PullReply::status(Code::Unavailable, text)));
        }
        let wire = WireStatus {
            code: status.code(),
            message: status.message().to_owned(),
            details: status.details().to_vec().into(),
        };
        let reply = Arc::new(PullReply { result: Err(wire), metadata: custom(status.metadata()) });
        if is_not_ready(status) { Outcome::Lost(reply) } else { Outcome::Answered(reply) }
    }

    async fn image_size(&self, call: &PullCall) -> Result<Option<u64>, RuntimeError> {
        let image = cri::ImageSpec {
            image: call.image.to_string(),
            runtime_handler: call.key.handler.to_string(),
            ..Default::default()
        };
        let request = cri::ImageStatusRequest { image: Some(image), verbose: false };
        let mut images = cri::image_service_client::ImageServiceClient::new(self.channel.clone())
            .max_decoding_message_size(MAX_MESSAGE);
        let answer = short(images.image_status(request)).await.map_err(|status| self.error(&status))?;
        Ok(answer.into_inner().image.filter(|image| !image.id.is_empty()).map(|image| image.size))
    }
}

async fn short<T>(call: impl Future<Output = Result<T, Status>>) -> Result<T, Status> {
    with_timeout(SHORT_CALL, call).await
}

async fn with_timeout<T>(
    limit: Duration,
    call: impl Future<Output = Result<T, Status>>,
) -> Result<T, Status> {
    tokio::time::timeout(limit, call)
        .await
        .unwrap_or_else(|_| Err(Status::deadline_exceeded(format!("no answer within {limit:?}"))))
}

/// The text of a status; the root cause if tonic made the status for a broken connection.
fn describe(status: &Status) -> String {
    let mut cause = status.source();
    while let Some(deeper) = cause.and_then(std::error::Error::source) {
        cause = Some(deeper);
    }
    match cause {
        Some(cause) => cause.to_string(),
        None if status.message().is_empty() => format!("{:?}", status.code()),
        None => status.message().to_owned(),
    }
}

/// containerd returns this while it starts.
fn is_not_ready(status: &Status) -> bool {
    status.code() == Code::Unavailable && status.message().contains("not initialized")
}

/// Whether another attempt may succeed. If the runtime is away, the whole pull is retried.
fn may_pass(status: &Status) -> bool {
    status.source().is_none()
        && !is_not_ready(status)
        && !matches!(status.code(), Code::Unimplemented | Code::PermissionDenied | Code::Unauthenticated)
}

/// A caller's metadata for the runtime: values are unchanged, binary ones in base64.
fn metadata_of(call: &PullCall) -> MetadataMap {
    let mut headers = HeaderMap::with_capacity(call.metadata.len());
    for (name, value) in &call.metadata {
        if let (Ok(name), Ok(value)) =
            (HeaderName::try_from(name), HeaderValue::from_maybe_shared(value.clone()))
        {
            headers.append(name, value);
        }
    }
    MetadataMap::from_headers(headers)
}

/// The runtime's metadata for the callers: everything but what belongs to the transport.
fn custom(metadata: &MetadataMap) -> Vec<(String, bytes::Bytes)> {
    let own = |name: &str| name.starts_with("grpc-") || matches!(name, "content-type" | "date" | "trailer");
    let entry = |entry| match entry {
        KeyAndValueRef::Ascii(name, value) => {
            (name.as_str().to_owned(), value.as_encoded_bytes().to_vec().into())
        }
        KeyAndValueRef::Binary(name, value) => {
            (name.as_str().to_owned(), value.as_encoded_bytes().to_vec().into())
        }
    };
    metadata.iter().map(entry).filter(|(name, _): &(String, bytes::Bytes)| !own(name)).collect()
}

impl Runtime for ContainerRuntime {
    fn endpoint(&self) -> &str {
        &self.inner.endpoint
    }

    fn probe(&self) -> BoxFuture<'static, Result<RuntimeInfo, ProbeFailure>> {
        let inner = self.inner.clone();
        async move { inner.probe().await }.boxed()
    }

    fn pull(&self, pull: RuntimePull) -> BoxFuture<'static, Outcome> {
        let inner = self.inner.clone();
        // Taken now, not when the future is first polled: a deletion of the same lease that was requested before must
        // not hit it.
        let using = pull.lease.as_deref().map(|lease| inner.leases.using(lease));
        async move {
            let outcome = inner.pull(pull).await;
            drop(using);
            outcome
        }
        .boxed()
    }

    fn image_size(&self, call: Arc<PullCall>) -> BoxFuture<'static, Result<Option<u64>, RuntimeError>> {
        let inner = self.inner.clone();
        async move { inner.image_size(&call).await }.boxed()
    }

    fn status(&self) -> BoxFuture<'static, Result<Vec<RuntimeCondition>, RuntimeError>> {
        let inner = self.inner.clone();
        async move { report::status(&inner.channel).await.map_err(|status| inner.error(&status)) }.boxed()
    }

    fn images(&self) -> BoxFuture<'static, Result<Vec<RuntimeImage>, RuntimeError>> {
        let inner = self.inner.clone();
        async move { report::images(&inner.channel).await.map_err(|status| inner.error(&status)) }.boxed()
    }

    fn image_fs(&self) -> BoxFuture<'static, Result<Option<PathBuf>, RuntimeError>> {
        let inner = self.inner.clone();
        async move { report::image_fs(&inner.channel).await.map_err(|status| inner.error(&status)) }.boxed()
    }

    fn connection_closed(&self) -> BoxFuture<'static, ()> {
        let closed = self.inner.closed.clone();
        async move { closed.notified().await }.boxed()
    }

    fn progress(&self, leases: Vec<String>) -> BoxFuture<'static, Result<Readings, RuntimeError>> {
        let inner = self.inner.clone();
        async move {
            let mut reader = inner.progress.lock().await;
            let read = inner.apis.called(Api::Content, short(reader.read(leases)).await);
            let (readings, failed) = read.map_err(|status| inner.error(&status))?;
            if let Some(status) = &failed {
                let _ = inner.apis.called::<()>(Api::Content, Err(status.clone()));
            }
            Ok(Readings { failed: failed.map(|status| inner.error(&status)), ..readings })
        }
        .boxed()
    }

    fn drop_lease(&self, lease: String, collect: bool) -> BoxFuture<'static, Result<(), RuntimeError>> {
        let inner = self.inner.clone();
        let limit = if collect { COLLECTION } else { SHORT_CALL };
        async move {
            with_timeout(limit, inner.leases.delete(&lease, collect)).await.map_err(|status| {
                inner.leases.forget(&lease);
                inner.error(&status)
            })
        }
        .boxed()
    }

    fn lease_bytes(&self, lease: String) -> BoxFuture<'static, Result<u64, RuntimeError>> {
        let inner = self.inner.clone();
        async move {
            let size = short(sizes::of_lease(&inner.channel, &lease)).await;
            size.map_err(|status| inner.error(&status))
        }
        .boxed()
    }

    fn renew_leases(&self, leases: Vec<String>) -> BoxFuture<'static, Result<(), RuntimeError>> {
        let inner = self.inner.clone();
        async move {
            // Each on its own: a lease that cannot be renewed must not prevent the renewal of others.
            let mut failed = Ok(());
            for lease in leases {
                if let Err(status) = short(inner.leases.extend(&lease)).await {
                    failed = Err(inner.error(&status));
                }
            }
            failed
        }
        .boxed()
    }

    fn reap_leases(&self, keep: BTreeSet<String>) -> BoxFuture<'static, Result<Vec<String>, RuntimeError>> {
        let inner = self.inner.clone();
        async move { short(inner.leases.reap(&keep)).await.map_err(|status| inner.error(&status)) }.boxed()
    }

    fn leave_leases(&self) {
        self.inner.leases.leave();
    }
}
