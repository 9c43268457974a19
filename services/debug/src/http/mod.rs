//! The debug endpoint over HTTP: probes, metrics, JSON documents, the event stream and the page.
//!
//! Owns: the routes and the server under them.
//! In: a bound listener, the view, and the end. Out: answers to GET and HEAD; nothing can be changed
//! over HTTP.

mod documents;
mod endpoints;
mod events;
mod gate;
mod page;
mod probes;
#[cfg(test)]
mod tests;

use std::{convert::Infallible, future::Future, net::SocketAddr, sync::Arc, time::Duration};

use axum::{Router, extract::Request, middleware, routing::get};
use hyper::server::conn::http1;
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    server::graceful::{GracefulShutdown, Watcher},
    service::TowerToHyperService,
};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpListener,
    sync::Semaphore,
};
use tokio_util::sync::CancellationToken;

use crate::{
    AgentView, ServeError,
    connection::{Guarded, admit},
};

/// Connections at once; a browser uses two to six.
const CONNECTIONS: usize = 256;
/// Event streams at once, fewer than connections, so that probes always find room.
const EVENT_STREAMS: usize = 64;
/// How long a request's head may take to arrive, and how long a connection may stay idle.
const HEAD_TIMEOUT: Duration = Duration::from_secs(20);
/// The largest request head.
const HEAD_BYTES: usize = 16 * 1024;
/// How long answers may take to finish at the end.
const GRACE: Duration = Duration::from_secs(1);

/// What the handlers share.
#[derive(Debug)]
struct Shared<V> {
    view: V,
    stop: CancellationToken,
    event_streams: Arc<Semaphore>,
}

impl<V: Clone> Clone for Shared<V> {
    fn clone(&self) -> Self {
        Self { view: self.view.clone(), stop: self.stop.clone(), event_streams: self.event_streams.clone() }
    }
}

/// Serves probes, metrics, JSON and the page on `listener` until `shutdown`.
///
/// There is no authentication: bind it to loopback. Requests whose `Host` is a name other than
/// `localhost` are refused, so that no web site can reach it through the user's browser.
///
/// # Errors
/// The listener has no local address; a single connection's trouble is no error.
pub async fn serve_http<V: AgentView>(
    listener: TcpListener,
    view: V,
    shutdown: impl Future<Output = ()> + Send,
) -> Result<(), ServeError> {
    let bound = listener.local_addr().map_err(ServeError::LocalAddress)?;
    let stop = CancellationToken::new();
    // Whoever stops waiting for this function also ends the streams of connections that are left.
    let _stop_on_drop = stop.clone().drop_guard();
    let router = router(view, bound, stop.clone());
    let graceful = GracefulShutdown::new();
    let slots = Arc::new(Semaphore::new(CONNECTIONS));
    tokio::pin!(shutdown);
    loop {
        let accept = admit(&slots, || async { listener.accept().await.map(|(stream, _)| stream) });
        let connection = tokio::select! {
            connection = accept => connection,
            () = &mut shutdown => break,
        };
        tokio::spawn(serve_connection(connection, router.clone(), graceful.watcher()));
    }
    drop(listener);
    stop.cancel();
    if tokio::time::timeout(GRACE, graceful.shutdown()).await.is_err() {
        tracing::debug!("HTTP connections were still open at the end");
    }
    Ok(())
}

async fn serve_connection<IO>(connection: Guarded<IO>, router: Router, watcher: Watcher)
where
    IO: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(HEAD_TIMEOUT).max_buf_size(HEAD_BYTES).max_headers(64);
    let served = http.serve_connection(TokioIo::new(connection), TowerToHyperService::new(router));
    if let Err(error) = watcher.watch(served).await {
        tracing::debug!(%error, "an HTTP connection ended early");
    }
}

/// All routes, behind the gate.
fn router<V: AgentView>(view: V, bound: SocketAddr, stop: CancellationToken) -> Router {
    let shared = Shared { view, stop, event_streams: Arc::new(Semaphore::new(EVENT_STREAMS)) };
    Router::new()
        .route("/", get(page::html))
        .route("/assets/page.css", get(page::css))
        .route("/assets/page.js", get(page::js))
        .route("/assets/format.js", get(page::format_js))
        .route("/assets/heartbeats.js", get(page::heartbeats_js))
        .route("/assets/endpoints.js", get(page::endpoints_js))
        .route("/assets/explanation.js", get(page::explanation_js))
        .route("/assets/dom.js", get(page::dom_js))
        .route("/assets/icon.svg", get(page::icon))
        .route("/livez", get(probes::livez::<V>))
        .route("/readyz", get(probes::readyz::<V>))
        .route("/metrics", get(documents::metrics::<V>))
        .route("/version", get(documents::version::<V>))
        .route("/debug/actors", get(documents::actors::<V>))
        .route("/debug/actors/{name}", get(documents::actor::<V>))
        .route("/debug/pulls", get(documents::pulls::<V>))
        .route("/debug/node", get(documents::heartbeats::<V>))
        .route("/debug/endpoints", get(endpoints::state::<V>))
        .route("/debug/endpoints/{namespace}/{name}", get(endpoints::explain::<V>))
        .route("/debug/storage", get(documents::storage::<V>))
        .route("/debug/config", get(documents::config::<V>))
        .route("/debug/events", get(events::events::<V>))
        .fallback(documents::not_found)
        .with_state(shared)
        .layer(middleware::from_fn(move |request: Request, next: middleware::Next| async move {
            Ok::<_, Infallible>(gate::pass(bound, request, next).await)
        }))
}
