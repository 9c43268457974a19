//! The Endpoints API: `localnetv1.Endpoints/Next`, and `Watch` and `Report` of `keelson.endpoints.v1.Endpoints`.
//!
//! Owns: [`EndpointsServer`], both services with reflection (v1 and v1alpha) and `grpc.health.v1` on any number of unix
//! and TCP sockets, [`Watchers`], who is being served, and [`Backends`], who makes rules of it. In: bound listeners and an
//! [`EndpointsFeed`]. Out: states, each from one snapshot; nothing here decides what a state is.
//!
//! ```text
//!  feed ──newest snapshot──► Plan ──what is due──► Batch ──chunks──► connection
//!          (watched)          (a call's position)   (shared bytes)    (as fast as its caller reads)
//! ```
//!
//! Every caller is taken to be slow, stuck or broken. It has no queue: it takes the newest state when it has read the
//! one before, and until then keeps its snapshot, which shares with later ones what has not changed. One that answers no
//! ping, or does not read, is cut off (`slow`).

mod backends;
mod batch;
mod call;
mod connection;
mod filter;
mod health;
mod metrics;
mod plan;
mod report;
mod revealed;
mod slow;
mod thread;
mod watchers;

#[cfg(test)]
mod tests;

use std::{
    convert::Infallible,
    future::Future,
    io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use http::{Request, Response};
use keelson_endpoint_publisher::EndpointsFeed;
use keelson_proto::{FILE_DESCRIPTOR_SET, endpoints::WatchRequest, localnetv1::NextFilter};
use tokio::{
    net::{TcpListener, TcpStream, UnixListener, UnixStream},
    sync::{OwnedSemaphorePermit, Semaphore, watch},
    task::JoinSet,
    time::Instant,
};
use tokio_util::sync::CancellationToken;
use tonic::{Status, body::Body, server::NamedService, service::Routes};

use call::{Api, Shared};
use connection::Peer;
use plan::Plan;

pub use backends::Backends;
pub use metrics::{ApiLabel, ServerMetrics, StateLabel};
pub use revealed::Revealed;
pub use thread::{EndpointsThread, StartError};
pub use watchers::Watchers;

/// Connections beyond one for each watcher: for health, reflection, and for telling one too many that it is.
const SPARE_CONNECTIONS: usize = 128;
/// The services' full names, also those by which their health can be asked.
const SERVICES: [&str; 2] = [Next::SERVICE, Watch::SERVICE];
/// The method by which backends say how they fare.
const REPORT: &str = "Report";
/// How long calls may take to end when the server stops.
const GRACE: Duration = Duration::from_secs(1);
/// How often a lasting failure to accept connections is logged.
const SAY_AGAIN: Duration = Duration::from_secs(10);

/// Why the API could not be served.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The descriptors that reflection serves are broken.
    #[error("cannot serve the descriptors of the Endpoints API by reflection")]
    Reflection(#[source] tonic_reflection::server::Error),
}

/// What can be set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ServerSettings {
    /// Calls at once at each listener, callers of Next that wait included (`endpoints.max_watchers`).
    pub max_watchers: usize,
    /// Whether Watch is served beside Next (the feature gate EndpointDeltas).
    pub deltas: bool,
    /// Whether Services are watched only once somebody follows (`endpoints.watch`).
    pub on_demand: bool,
}

/// A socket that is listened on, and how it is called: `unix:///...` or `tcp://...`.
#[derive(Debug)]
pub enum Listener {
    /// A unix socket. Its file is its maker's to remove.
    Unix(UnixListener, String),
    /// A TCP socket.
    Tcp(TcpListener, String),
}

/// A listener between two runtimes.
#[derive(Debug)]
enum Detached {
    Unix(std::os::unix::net::UnixListener, String),
    Tcp(std::net::TcpListener, String),
}

impl Listener {
    fn detach(self) -> Result<Detached, StartError> {
        match self {
            Self::Unix(listener, label) => match listener.into_std() {
                Ok(listener) => Ok(Detached::Unix(listener, label)),
                Err(source) => Err(StartError::Listener { listener: label, source }),
            },
            Self::Tcp(listener, label) => match listener.into_std() {
                Ok(listener) => Ok(Detached::Tcp(listener, label)),
                Err(source) => Err(StartError::Listener { listener: label, source }),
            },
        }
    }

    /// How it is called.
    #[must_use]
    pub fn name(&self) -> &str {
        match self {
            Self::Unix(_, label) | Self::Tcp(_, label) => label,
        }
    }

    async fn accept(&self) -> io::Result<Accepted> {
        match self {
            Self::Unix(listener, _) => listener.accept().await.map(|(stream, _)| Accepted::Unix(stream)),
            Self::Tcp(listener, _) => listener.accept().await.map(|(stream, _)| Accepted::Tcp(stream)),
        }
    }
}

impl Detached {
    fn attach(self) -> io::Result<Listener> {
        Ok(match self {
            Self::Unix(listener, label) => Listener::Unix(UnixListener::from_std(listener)?, label),
            Self::Tcp(listener, label) => Listener::Tcp(TcpListener::from_std(listener)?, label),
        })
    }
}

enum Accepted {
    Unix(UnixStream),
    Tcp(TcpStream),
}

impl Accepted {
    async fn serve(self, listener: Arc<str>, routes: Routes, stop: CancellationToken) {
        match self {
            Self::Unix(stream) => {
                let peer = Peer::of_unix(&stream, listener);
                connection::serve(stream, Arc::new(peer), routes, stop).await;
            }
            Self::Tcp(stream) => {
                // A delta is one small write that should go at once; without it things are only slower.
                let _ = stream.set_nodelay(true);
                let peer = Peer::of_tcp(&stream, listener);
                connection::serve(stream, Arc::new(peer), routes, stop).await;
            }
        }
    }
}

/// The API over a feed. Cheap to clone.
#[derive(Debug, Clone)]
pub struct EndpointsServer {
    feed: EndpointsFeed,
    settings: ServerSettings,
    metrics: ServerMetrics,
    watchers: Watchers,
    backends: Backends,
    revealed: watch::Sender<Revealed>,
}

impl EndpointsServer {
    /// Serves nothing yet.
    #[must_use]
    pub fn new(feed: EndpointsFeed, settings: ServerSettings, metrics: ServerMetrics) -> Self {
        let watchers = Watchers::new(feed.clone(), metrics.clone(), settings.max_watchers);
        let backends = Backends::new(feed.clone());
        Self { feed, settings, metrics, watchers, backends, revealed: watch::Sender::default() }
    }

    /// What its callers reveal; all clones of the server tell it here.
    #[must_use]
    pub fn revealed(&self) -> watch::Receiver<Revealed> {
        self.revealed.subscribe()
    }

    /// Who is being served.
    #[must_use]
    pub fn watchers(&self) -> &Watchers {
        &self.watchers
    }

    /// Who makes rules of what is served, as far as they say so.
    #[must_use]
    pub fn backends(&self) -> &Backends {
        &self.backends
    }

    /// Serves on a thread of its own, until the returned handle is stopped or dropped.
    ///
    /// # Errors
    /// There is no thread, or a listener cannot change its runtime.
    pub fn start(self, listeners: Vec<Listener>) -> Result<EndpointsThread, StartError> {
        EndpointsThread::start(self, listeners)
    }

    /// Serves in this runtime until `shutdown`: calls then end with UNAVAILABLE, and what has not ended within a second
    /// is cut off. Whoever drops this future cuts everything off.
    ///
    /// # Errors
    /// The descriptors are broken; trouble with connections is none.
    pub async fn serve(
        self,
        listeners: Vec<Listener>,
        shutdown: impl Future<Output = ()>,
    ) -> Result<(), ServeError> {
        let stop = CancellationToken::new();
        let (reporter, health_service) = tonic_health::server::health_reporter();
        let routes = self.routes(stop.clone())?.add_service(health_service).prepare();
        let slots = || Arc::new(Semaphore::new(self.settings.max_watchers.saturating_add(SPARE_CONNECTIONS)));
        let mut accepting = JoinSet::new();
        for listener in listeners {
            accepting.spawn(accept(listener, routes.clone(), slots(), stop.clone()));
        }
        tokio::select! {
            () = shutdown => {}
            // The end of the feed ends calls, but callers still learn so from a server.
            () = async {
                let revealed = self.revealed.subscribe();
                health::follow(&reporter, &SERVICES, self.feed.clone(), revealed, self.settings.on_demand).await;
                std::future::pending().await
            } => {}
            () = async {
                loop {
                    tokio::time::sleep(slow::LOOK_EVERY).await;
                    self.watchers.cut_off();
                }
            } => {}
            // A listener whose task has panicked: all are made anew.
            Some(ended) = accepting.join_next() => {
                if let Err(error) = ended {
                    tracing::error!(%error, "listener of the Endpoints API stopped");
                }
            }
        }
        health::stopping(&reporter, &SERVICES).await;
        stop.cancel();
        let all = async { while accepting.join_next().await.is_some() {} };
        if tokio::time::timeout(GRACE, all).await.is_err() {
            tracing::debug!("calls of the Endpoints API were still open at exit");
        }
        Ok(())
    }

    fn routes(&self, stop: CancellationToken) -> Result<Routes, ServeError> {
        let shared = Arc::new(Shared {
            feed: self.feed.clone(),
            watchers: self.watchers.clone(),
            backends: self.backends.clone(),
            metrics: self.metrics.clone(),
            revealed: self.revealed.clone(),
            stop,
            met: std::sync::Mutex::new(None::<(plan::Position, Instant)>),
        });
        let reflection = || {
            let all = tonic_reflection::server::Builder::configure()
                .register_encoded_file_descriptor_set(FILE_DESCRIPTOR_SET)
                .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
                .with_service_name("grpc.health.v1.Health");
            // The descriptors hold more APIs than are served here.
            SERVICES.iter().fold(all, |some, service| some.with_service_name(*service))
        };
        let changes = KeelsonService { shared: shared.clone(), deltas: self.settings.deltas };
        Ok(Routes::new(LocalnetService { shared })
            .add_service(changes)
            .add_service(reflection().build_v1().map_err(ServeError::Reflection)?)
            .add_service(reflection().build_v1alpha().map_err(ServeError::Reflection)?))
    }
}

/// Takes connections from one listener until `stop`, then waits for those there are.
async fn accept(listener: Listener, routes: Routes, slots: Arc<Semaphore>, stop: CancellationToken) {
    let label: Arc<str> = listener.name().into();
    let mut connections = JoinSet::new();
    let mut said = None;
    loop {
        tokio::select! {
            biased;
            () = stop.cancelled() => break,
            Some(_) = connections.join_next() => {}
            admitted = admit(&listener, &slots, &mut said) => {
                if let Some((accepted, slot)) = admitted {
                    let serving = accepted.serve(label.clone(), routes.clone(), stop.clone());
                    connections.spawn(async move {
                        serving.await;
                        drop(slot);
                    });
                }
            }
        }
    }
    drop(listener);
    while connections.join_next().await.is_some() {}
}

/// The next connection, once there is a slot for it; none after a failure, which is no reason to stop.
async fn admit(
    listener: &Listener,
    slots: &Arc<Semaphore>,
    said: &mut Option<Instant>,
) -> Option<(Accepted, OwnedSemaphorePermit)> {
    let slot = slots.clone().acquire_owned().await.ok()?;
    match listener.accept().await {
        Ok(accepted) => Some((accepted, slot)),
        // Out of file descriptors, most likely: those in use come back.
        Err(error) => {
            if said.is_none_or(|at| at.elapsed() >= SAY_AGAIN) {
                *said = Some(Instant::now());
                tracing::warn!(%error, listener = listener.name(), "cannot accept a connection to the Endpoints API");
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
            None
        }
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

/// `localnetv1.Endpoints` as a service of tonic's router.
#[derive(Debug, Clone)]
struct LocalnetService {
    shared: Arc<Shared>,
}

impl NamedService for LocalnetService {
    const NAME: &'static str = Next::SERVICE;
}

/// `keelson.endpoints.v1.Endpoints` as a service of tonic's router.
#[derive(Debug, Clone)]
struct KeelsonService {
    shared: Arc<Shared>,
    deltas: bool,
}

impl NamedService for KeelsonService {
    const NAME: &'static str = Watch::SERVICE;
}

/// The future of an answer; no error is left to the router.
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
