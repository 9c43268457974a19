//! The debug API over HTTP: probes, metrics, JSON documents, the event stream and the page.
//!
//! Owns: the routes. In: a bound listener, the view, and a shutdown future. Out: answers to GET and HEAD; nothing can
//! be changed over HTTP.

mod documents;
mod endpoints;
mod events;
mod page;
#[cfg(test)]
mod tests;

use std::{future::Future, sync::Arc};

use axum::{
    Router,
    extract::{RawQuery, State},
    response::Response,
    routing::get,
};
use keelson_serve::http::{self, EventStreams, Hosts, gated, probe};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use crate::{AgentView, ServeError, view::with_timeout};

/// Shared by the handlers.
#[derive(Debug, Clone)]
struct Shared<V> {
    view: V,
    event_streams: EventStreams,
}

/// Serves probes, metrics, JSON and the page on `listener` until `shutdown`.
///
/// There is no authentication: bind it to loopback. Requests whose `Host` is a name other than `localhost` and those in
/// `names` (`debug.http_hosts`) are refused, so that no web site can reach it through the user's browser.
///
/// # Errors
/// The listener has no local address; errors of single connections are not returned.
pub async fn serve_http<V: AgentView>(
    listener: TcpListener,
    view: V,
    names: Arc<[String]>,
    shutdown: impl Future<Output = ()> + Send,
) -> Result<(), ServeError> {
    let own = |bound| Hosts { bound, names, setting: "debug.http_hosts" };
    http::serve(listener, |bound, stop| router(view, own(bound), stop), shutdown).await
}

fn router<V: AgentView>(view: V, own: Hosts, stop: CancellationToken) -> Router {
    let shared = Shared { view, event_streams: EventStreams::new(stop) };
    let routes = page::PAGE
        .routes()
        .route("/livez", get(livez::<V>))
        .route("/readyz", get(readyz::<V>))
        .route("/metrics", get(documents::metrics::<V>))
        .route("/version", get(documents::version::<V>))
        .route("/debug/actors", get(documents::actors::<V>))
        .route("/debug/actors/{name}", get(documents::actor::<V>))
        .route("/debug/pulls", get(documents::pulls::<V>))
        .route("/debug/node", get(documents::heartbeats::<V>))
        .route("/debug/endpoints", get(endpoints::state::<V>))
        .route("/debug/endpoints/{namespace}/{name}", get(endpoints::explain::<V>))
        .route("/debug/history", get(documents::history::<V>))
        .route("/debug/storage", get(documents::storage::<V>))
        .route("/debug/config", get(documents::config::<V>))
        .route("/debug/events", get(events::events::<V>))
        .fallback(documents::not_found)
        .with_state(shared);
    gated(routes, own)
}

async fn livez<V: AgentView>(State(shared): State<Shared<V>>, RawQuery(query): RawQuery) -> Response {
    probe("livez", with_timeout(shared.view.livez()).await, query.as_deref())
}

async fn readyz<V: AgentView>(State(shared): State<Shared<V>>, RawQuery(query): RawQuery) -> Response {
    probe("readyz", with_timeout(shared.view.readyz()).await, query.as_deref())
}
