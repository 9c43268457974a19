//! The debug API over HTTP, and the page.
//!
//! Owns: the routes. In: a bound listener, the view, a shutdown future; GET and HEAD requests. Out: probes, metrics,
//! JSON with the field names of proxy.proto, the ruleset as text, events, the files of `services/proxy/page/`; errors
//! are `{"error": "..."}`.

mod events;
mod page;
#[cfg(test)]
mod tests;

use std::{future::Future, sync::Arc};

use axum::{
    Router,
    body::Body,
    extract::{Query, RawQuery, State, rejection::QueryRejection},
    http::{StatusCode, Uri, header::CONTENT_TYPE},
    response::{IntoResponse as _, Response},
    routing::get,
};
use keelson_proto::proxy as pb;
use keelson_serve::{
    ServeError,
    history::HistoryDocument,
    http::{self, Document, EventStreams, Failure, Hosts, OPEN_METRICS, gated, probe},
};
use serde::Deserialize;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use super::{
    PrintSlots, ProxyView,
    view::{answer, within},
};
use crate::explain::{Question, QuestionError, Target};

#[derive(Debug, Clone)]
struct Shared<V> {
    view: V,
    event_streams: EventStreams,
    prints: PrintSlots,
}

/// Serves probes, metrics, JSON and the page on `listener` until `shutdown`.
///
/// There is no authentication: bind it to loopback. Requests whose `Host` is a name other than `localhost` and those in
/// `names` (`proxy.http_hosts`) are refused, so that no web site can reach it through the user's browser.
///
/// # Errors
/// The listener has no local address. An error of a single connection is no error here.
pub async fn serve_http<V: ProxyView>(
    listener: TcpListener,
    view: V,
    prints: PrintSlots,
    names: Arc<[String]>,
    shutdown: impl Future<Output = ()> + Send,
) -> Result<(), ServeError> {
    let own = |bound| Hosts { bound, names, setting: "proxy.http_hosts" };
    http::serve(listener, |bound, stop| router(view, prints, own(bound), stop), shutdown).await
}

fn router<V: ProxyView>(view: V, prints: PrintSlots, own: Hosts, stop: CancellationToken) -> Router {
    let shared = Shared { view, event_streams: EventStreams::new(stop), prints };
    let routes = page::PAGE
        .routes()
        .route("/livez", get(livez::<V>))
        .route("/readyz", get(readyz::<V>))
        .route("/healthz", get(healthz::<V>))
        .route("/metrics", get(metrics::<V>))
        .route("/debug/state", get(state::<V>))
        .route("/debug/explain", get(explain::<V>))
        .route("/debug/print", get(print::<V>))
        .route("/debug/history", get(history::<V>))
        .route("/debug/events", get(events::events::<V>))
        .fallback(not_found)
        .with_state(shared);
    gated(routes, own)
}

async fn livez<V: ProxyView>(State(shared): State<Shared<V>>, RawQuery(query): RawQuery) -> Response {
    probe("livez", within(shared.view.livez()).await, query.as_deref())
}

async fn readyz<V: ProxyView>(State(shared): State<Shared<V>>, RawQuery(query): RawQuery) -> Response {
    probe("readyz", within(shared.view.readyz()).await, query.as_deref())
}

/// The checks of `/livez` and `/readyz`.
async fn healthz<V: ProxyView>(State(shared): State<Shared<V>>, RawQuery(query): RawQuery) -> Response {
    let both = async {
        let (mut checks, ready) = tokio::join!(shared.view.livez(), shared.view.readyz());
        checks.extend(ready);
        checks
    };
    probe("healthz", within(both).await, query.as_deref())
}

async fn metrics<V: ProxyView>(State(shared): State<Shared<V>>) -> Result<Response, Failure> {
    let text = within(shared.view.metrics()).await?;
    Ok(([(CONTENT_TYPE, OPEN_METRICS)], text).into_response())
}

async fn state<V: ProxyView>(State(shared): State<Shared<V>>) -> Result<Document<pb::State>, Failure> {
    Ok(Document(answer(shared.view.state()).await?))
}

async fn history<V: ProxyView>(State(shared): State<Shared<V>>) -> HistoryDocument {
    shared.view.history().document()
}

impl From<QuestionError> for Failure {
    fn from(error: QuestionError) -> Self {
        Self::new(StatusCode::BAD_REQUEST, error.to_string())
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ExplainQuery {
    to: String,
    #[serde(default)]
    from: String,
}

async fn explain<V: ProxyView>(
    State(shared): State<Shared<V>>,
    query: Result<Query<ExplainQuery>, QueryRejection>,
) -> Result<Document<pb::Explanation>, Failure> {
    let Query(query) = query.map_err(|error| Failure::new(StatusCode::BAD_REQUEST, error.body_text()))?;
    let target: Target = query.to.trim().parse()?;
    let question = Question::new(target, query.from.trim().parse()?)?;
    Ok(Document(answer(shared.view.explain(question)).await?))
}

/// An incomplete text ends with a broken connection, so that no client takes it for complete.
async fn print<V: ProxyView>(State(shared): State<Shared<V>>) -> Result<Response, Failure> {
    let text = shared.prints.print(&shared.view).await?;
    Ok(([(CONTENT_TYPE, "text/plain; charset=utf-8")], Body::from_stream(text)).into_response())
}

async fn not_found(uri: Uri) -> Failure {
    let text = format!(
        "path {} not found; available: / /livez /readyz /healthz /metrics /debug/state \
         /debug/explain?to=ADDRESS:PORT/PROTOCOL&from= /debug/print /debug/history /debug/events",
        uri.path()
    );
    Failure::new(StatusCode::NOT_FOUND, text)
}
