//! The Endpoints API: `localnetv1.Endpoints/Next`, and `Watch` and `Report` of `keelson.endpoints.v1.Endpoints`.
//!
//! Owns: [`EndpointsServer`], both services on any number of unix and TCP sockets, [`Watchers`], the running calls,
//! and [`Backends`], the backends that report. In: bound listeners and an
//! [`EndpointsFeed`]. Out: states, each from one snapshot; states are computed elsewhere.
//!
//! ```text
//!  feed ──newest snapshot──► Plan ──what is due──► Batch ──chunks──► connection
//!          (watched)          (a call's position)   (shared bytes)    (as fast as its caller reads)
//! ```
//!
//! Every client may be slow, stuck or broken. It has no queue: it gets the latest state when it has read the one
//! before, and until then keeps its snapshot, which shares with later ones what has not changed. A client that does not
//! answer pings or does not read is cut off (`slow`).

mod backends;
mod batch;
mod call;
mod filter;
mod health;
mod hints;
mod metrics;
mod plan;
mod report;
mod slow;
mod thread;
mod watchers;

#[cfg(test)]
mod tests;

use std::{
    convert::Infallible,
    future::Future,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use http::{Request, Response};
use keelson_endpoint_publisher::EndpointsFeed;
use keelson_proto::{endpoints::WatchRequest, localnetv1::NextFilter};
use keelson_serve::{
    ServeError,
    grpc::{self, GrpcApi, GrpcHealth, Listener},
};
use tokio::{sync::watch, time::Instant};
use tokio_util::sync::CancellationToken;
use tonic::{Status, body::Body, server::NamedService, service::Routes};

use call::{Api, Shared};
use plan::Plan;

pub use backends::Backends;
pub use hints::ClientHints;
pub use metrics::{ApiLabel, ServerMetrics, StateLabel};
pub use thread::{EndpointsThread, StartError};
pub use watchers::Watchers;

/// Connections in addition to one for each watcher: for health, reflection, and for refusing a client.
const SPARE_CONNECTIONS: usize = 128;
/// Full names of the services, as reflection and health use them.
const SERVICES: [&str; 2] = [Next::SERVICE, Watch::SERVICE];
/// The method for reports of backends.
const REPORT: &str = "Report";
/// Maximum number of concurrent calls on one connection.
const CALLS: u32 = 1024;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ServerSettings {
    /// Maximum number of concurrent calls at each listener, including waiting callers of Next
    /// (`endpoints.max_watchers`).
    pub max_watchers: usize,
    /// Whether Watch is served beside Next (feature gate EndpointDeltas).
    pub deltas: bool,
    /// Whether Services are watched only after a client follows (`endpoints.watch`).
    pub on_demand: bool,
}

/// Serves a feed. Cheap to clone.
#[derive(Debug, Clone)]
pub struct EndpointsServer {
    feed: EndpointsFeed,
    settings: ServerSettings,
    metrics: ServerMetrics,
    watchers: Watchers,
    backends: Backends,
    hints: watch::Sender<ClientHints>,
}

impl EndpointsServer {
    #[must_use]
    pub fn new(feed: EndpointsFeed, settings: ServerSettings, metrics: ServerMetrics) -> Self {
        let watchers = Watchers::new(feed.clone(), metrics.clone(), settings.max_watchers);
        let backends = Backends::new(feed.clone());
        Self { feed, settings, metrics, watchers, backends, hints: watch::Sender::default() }
    }

    /// What its calls have revealed; all clones of the server share it.
    #[must_use]
    pub fn client_hints(&self) -> watch::Receiver<ClientHints> {
        self.hints.subscribe()
    }

    #[must_use]
    pub fn watchers(&self) -> &Watchers {
        &self.watchers
    }

    #[must_use]
    pub fn backends(&self) -> &Backends {
        &self.backends
    }

    /// Serves on a thread of its own, until the returned handle is stopped or dropped.
    pub fn start(self, listeners: Vec<Listener>) -> Result<EndpointsThread, StartError> {
        EndpointsThread::start(self, listeners)
    }

    /// Serves in this runtime until `shutdown`: calls then end with UNAVAILABLE, and those that have not ended within a
    /// second are cut off, or at once if the future is dropped.
    ///
    /// # Errors
    /// The descriptors are broken; errors of connections are not returned.
    pub async fn serve(
        self,
        listeners: Vec<Listener>,
        shutdown: impl Future<Output = ()>,
    ) -> Result<(), ServeError> {
        let health = GrpcHealth::new(&SERVICES);
        let api = GrpcApi {
            name: "Endpoints API",
            services: &SERVICES,
            connections: self.settings.max_watchers.saturating_add(SPARE_CONNECTIONS),
            calls: CALLS,
        };
        let hints = self.hints.subscribe();
        let following = health::follow(&health, self.feed.clone(), hints, self.settings.on_demand);
        let cutting_off = async {
            loop {
                tokio::time::sleep(slow::CHECK_INTERVAL).await;
                self.watchers.cut_off();
            }
        };
        // The end of the feed ends calls, but a server still has to tell clients.
        let background = async { tokio::join!(following, cutting_off).1 };
        grpc::serve(listeners, api, &health, |stop| self.routes(stop), background, shutdown).await
    }

    fn routes(&self, stop: CancellationToken) -> Routes {
        let shared = Arc::new(Shared {
            feed: self.feed.clone(),
            watchers: self.watchers.clone(),
            backends: self.backends.clone(),
            metrics: self.metrics.clone(),
            hints: self.hints.clone(),
            stop,
            first_seen: std::sync::Mutex::new(None::<(plan::Revision, Instant)>),
        });
        let changes = KeelsonService { shared: shared.clone(), deltas: self.settings.deltas };
        Routes::new(LocalnetService { shared }).add_service(changes)
    }
}

struct Next;

impl Api for Next {
    const SERVICE: &'static str = "localnetv1.Endpoints";
    const METHOD: &'static str = "Next";
    type Request = NextFilter;

    fn plan(request: &NextFilter) -> Plan {
        Plan::next(request)
    }
}

struct Watch;

impl Api for Watch {
    const SERVICE: &'static str = "keelson.endpoints.v1.Endpoints";
    const METHOD: &'static str = "Watch";
    type Request = WatchRequest;

    fn plan(request: &WatchRequest) -> Plan {
        Plan::watch(request)
    }
}

#[derive(Debug, Clone)]
struct LocalnetService {
    shared: Arc<Shared>,
}

impl NamedService for LocalnetService {
    const NAME: &'static str = Next::SERVICE;
}

#[derive(Debug, Clone)]
struct KeelsonService {
    shared: Arc<Shared>,
    deltas: bool,
}

impl NamedService for KeelsonService {
    const NAME: &'static str = Watch::SERVICE;
}

/// The future of an answer; the router gets no errors.
type Answering = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

impl tower::Service<Request<Body>> for LocalnetService {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Answering;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Answering {
        let shared = self.shared.clone();
        Box::pin(async move { Ok(call::serve::<Next, _>(shared, request).await) })
    }
}

impl tower::Service<Request<Body>> for KeelsonService {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Answering;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Answering {
        let Self { shared, deltas } = self.clone();
        Box::pin(async move {
            let off = |why: String| Ok(Status::unimplemented(why).into_http());
            match request.uri().path().rsplit('/').next() {
                Some(REPORT) => Ok(report::serve(shared, request).await),
                Some(Watch::METHOD) if deltas => Ok(call::serve::<Watch, _>(shared, request).await),
                Some(Watch::METHOD) => off("Watch is disabled (feature gate EndpointDeltas)".into()),
                _ => off(format!(
                    "service {} has only the methods {} and {REPORT}",
                    Watch::SERVICE,
                    Watch::METHOD
                )),
            }
        })
    }
}
