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
mod server;
#[cfg(test)]
mod tests;

use std::{future::Future, sync::Arc};

use axum::{Router, routing::get};
use tokio::{net::TcpListener, sync::Semaphore};
use tokio_util::sync::CancellationToken;

use crate::{AgentView, ServeError};

pub use documents::{Document, Failure, OPEN_METRICS};
pub use gate::Hosts;
pub use page::shared as page_files;
pub use probes::{now_unix_ms, probe};
pub use server::{gated, serve_router};

/// Event streams at once, fewer than connections, so that probes always find room.
const EVENT_STREAMS: usize = 64;

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
/// `localhost` and those in `names` (`debug.http_hosts`) are refused, so that no web site can reach it through the user's
/// browser.
///
/// # Errors
/// The listener has no local address; a single connection's trouble is no error.
pub async fn serve_http<V: AgentView>(
    listener: TcpListener,
    view: V,
    names: Arc<[String]>,
    shutdown: impl Future<Output = ()> + Send,
) -> Result<(), ServeError> {
    let own = |bound| Hosts { bound, names, setting: "debug.http_hosts" };
    serve_router(listener, |bound, stop| router(view, own(bound), stop), shutdown).await
}

/// All routes, behind the gate.
fn router<V: AgentView>(view: V, own: Hosts, stop: CancellationToken) -> Router {
    let shared = Shared { view, stop, event_streams: Arc::new(Semaphore::new(EVENT_STREAMS)) };
    let routes = Router::new()
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
        .with_state(shared);
    gated(routes, own)
}
