//! The gRPC server below the services.
//!
//! Owns: listeners, the number of their connections, reflection (v1 and v1alpha). In: bound listeners, services, and a
//! shutdown future. Out: answers until shutdown, then a short time to finish.

use std::{convert::Infallible, future::Future, io, sync::Arc, time::Duration};

use keelson_proto::FILE_DESCRIPTOR_SET;
use tokio::{
    net::{TcpListener, TcpStream, UnixListener, UnixStream},
    sync::Semaphore,
    task::JoinSet,
};
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;

use super::{
    api::GrpcApi,
    connection::{self, Peer},
    health::GrpcHealth,
};
use crate::{
    ServeError,
    accept::{AcceptFailures, admit},
};

/// Time for calls to end when the server stops.
const GRACE: Duration = Duration::from_secs(1);

/// A listening socket and its name: `unix:///...` or `tcp://...`.
#[derive(Debug)]
pub enum Listener {
    /// Its file belongs to the caller, who removes it.
    Unix(UnixListener, String),
    Tcp(TcpListener, String),
}

/// A listener that is not registered with a runtime.
#[derive(Debug)]
pub enum DetachedListener {
    Unix(std::os::unix::net::UnixListener, String),
    Tcp(std::net::TcpListener, String),
}

impl Listener {
    /// Deregisters it from the runtime that polls it.
    pub fn detach(self) -> io::Result<DetachedListener> {
        Ok(match self {
            Self::Unix(listener, name) => DetachedListener::Unix(listener.into_std()?, name),
            Self::Tcp(listener, name) => DetachedListener::Tcp(listener.into_std()?, name),
        })
    }

    #[must_use]
    pub fn name(&self) -> &str {
        match self {
            Self::Unix(_, name) | Self::Tcp(_, name) => name,
        }
    }

    async fn accept(&self) -> io::Result<Accepted> {
        match self {
            Self::Unix(listener, _) => listener.accept().await.map(|(stream, _)| Accepted::Unix(stream)),
            Self::Tcp(listener, _) => listener.accept().await.map(|(stream, _)| Accepted::Tcp(stream)),
        }
    }
}

impl DetachedListener {
    /// Registers it with the current runtime.
    pub fn attach(self) -> io::Result<Listener> {
        Ok(match self {
            Self::Unix(listener, name) => Listener::Unix(UnixListener::from_std(listener)?, name),
            Self::Tcp(listener, name) => Listener::Tcp(TcpListener::from_std(listener)?, name),
        })
    }
}

enum Accepted {
    Unix(UnixStream),
    Tcp(TcpStream),
}

impl Accepted {
    async fn serve(self, listener: Arc<str>, api: GrpcApi, routes: Routes, stop: CancellationToken) {
        match self {
            Self::Unix(stream) => {
                let peer = Arc::new(Peer::of_unix(&stream, listener));
                connection::serve(stream, peer, api, routes, stop).await;
            }
            Self::Tcp(stream) => {
                // Sends small writes at once; without the option answers are only slower.
                let _ = stream.set_nodelay(true);
                let peer = Arc::new(Peer::of_tcp(&stream, listener));
                connection::serve(stream, peer, api, routes, stop).await;
            }
        }
    }
}

/// Serves `routes` in this runtime until `shutdown`, with reflection and `health`, which `background` updates. `routes`
/// gets a token that is cancelled at shutdown, for streams that do not end by themselves. Calls that do not end within
/// a second after that are cut off, or at once if the future is dropped. Also ends when the task of a listener panics.
///
/// # Errors
/// The descriptors are broken.
pub async fn serve(
    listeners: Vec<Listener>,
    api: GrpcApi,
    health: &GrpcHealth,
    routes: impl FnOnce(CancellationToken) -> Routes,
    background: impl Future<Output = Infallible>,
    shutdown: impl Future<Output = ()>,
) -> Result<(), ServeError> {
    let stop = CancellationToken::new();
    // If this future is dropped, streams of open connections end as well.
    let _stop_on_drop = stop.clone().drop_guard();
    let reflection = || {
        let all = tonic_reflection::server::Builder::configure()
            .register_encoded_file_descriptor_set(FILE_DESCRIPTOR_SET)
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
            .with_service_name("grpc.health.v1.Health");
        // The descriptors also contain APIs that are not served here.
        api.services.iter().fold(all, |some, service| some.with_service_name(*service))
    };
    let routes = routes(stop.clone())
        .add_service(health.service())
        .add_service(reflection().build_v1().map_err(ServeError::Reflection)?)
        .add_service(reflection().build_v1alpha().map_err(ServeError::Reflection)?)
        .prepare();
    let mut accepting = JoinSet::new();
    for listener in listeners {
        accepting.spawn(accept(listener, api, routes.clone(), stop.clone()));
    }
    tokio::select! {
        () = shutdown => {}
        never = background => match never {},
        Some(ended) = accepting.join_next() => {
            if let Err(error) = ended {
                tracing::error!(server = api.name, %error, "a listener stopped");
            }
        }
    }
    health.set(false).await;
    stop.cancel();
    let all = async { while accepting.join_next().await.is_some() {} };
    if tokio::time::timeout(GRACE, all).await.is_err() {
        tracing::debug!(server = api.name, "gRPC calls were still open at exit");
    }
    Ok(())
}

/// As [`serve`], on one unix socket and with a health that follows `is_ready`, which is called once a second.
pub async fn serve_ready<F: Future<Output = bool>>(
    listener: UnixListener,
    api: GrpcApi,
    is_ready: impl Fn() -> F,
    routes: impl FnOnce(CancellationToken) -> Routes,
    shutdown: impl Future<Output = ()>,
) -> Result<(), ServeError> {
    let health = GrpcHealth::new(api.services);
    health.set(is_ready().await).await;
    let listener = Listener::Unix(listener, api.name.to_owned());
    serve(vec![listener], api, &health, routes, health.follow(is_ready), shutdown).await
}

/// Accepts connections from one listener until `stop`, then waits for the open ones to end.
async fn accept(listener: Listener, api: GrpcApi, routes: Routes, stop: CancellationToken) {
    let name: Arc<str> = listener.name().into();
    let slots = Arc::new(Semaphore::new(api.connections));
    let mut failures = AcceptFailures::new(api.name);
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            biased;
            () = stop.cancelled() => break,
            Some(_) = connections.join_next() => {}
            (accepted, slot) = admit(&slots, &mut failures, || listener.accept()) => {
                let serving = accepted.serve(name.clone(), api, routes.clone(), stop.clone());
                connections.spawn(async move {
                    serving.await;
                    drop(slot);
                });
            }
        }
    }
    drop(listener);
    while connections.join_next().await.is_some() {}
}
