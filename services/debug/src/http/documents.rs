//! The JSON documents and the metrics.
//!
//! Owns: `/version`, `/metrics`, `/debug/actors`, `/debug/actors/{name}`, `/debug/pulls`,
//! `/debug/node`, `/debug/storage`, `/debug/config`, `/debug/history`.
//! In: requests. Out: documents with the field names of debug.proto and node.proto, indented for people who use curl.

use axum::{
    extract::{Path, Query, State, rejection::QueryRejection},
    http::{StatusCode, Uri, header::CONTENT_TYPE},
    response::{IntoResponse as _, Response},
};
use keelson_proto::{debug as pb, node};
use keelson_serve::{
    history::HistoryDocument,
    http::{Document, Failure, OPEN_METRICS},
};
use serde::{Deserialize, Serialize};

use super::Shared;
use crate::{
    AgentView,
    grpc::{max_queued, no_such_actor},
    view::{answer, with_timeout},
};

pub(super) type Answer<T> = Result<Document<T>, Failure>;

pub(super) async fn version<V: AgentView>(State(shared): State<Shared<V>>) -> Answer<pb::GetVersionResponse> {
    Ok(Document(with_timeout(shared.view.version()).await?))
}

pub(super) async fn metrics<V: AgentView>(State(shared): State<Shared<V>>) -> Result<Response, Failure> {
    let text = with_timeout(shared.view.metrics()).await?;
    Ok(([(CONTENT_TYPE, OPEN_METRICS)], text).into_response())
}

/// `/debug/actors` is an object, so that fields can be added to it.
#[derive(Serialize)]
pub(super) struct Actors {
    actors: Vec<pb::Actor>,
}

pub(super) async fn actors<V: AgentView>(State(shared): State<Shared<V>>) -> Answer<Actors> {
    Ok(Document(Actors { actors: with_timeout(shared.view.actors()).await? }))
}

pub(super) async fn actor<V: AgentView>(
    State(shared): State<Shared<V>>,
    Path(name): Path<String>,
) -> Answer<pb::Actor> {
    let actor = with_timeout(shared.view.actor(&name)).await?;
    let actor =
        actor.ok_or_else(|| Failure::new(StatusCode::NOT_FOUND, no_such_actor(&name, &shared.view)))?;
    Ok(Document(actor))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct PullsQuery {
    #[serde(default)]
    max_queued: u32,
}

pub(super) async fn pulls<V: AgentView>(
    State(shared): State<Shared<V>>,
    query: Result<Query<PullsQuery>, QueryRejection>,
) -> Answer<pb::PullList> {
    let Query(query) = query.map_err(|error| Failure::new(StatusCode::BAD_REQUEST, error.body_text()))?;
    let max_queued = max_queued(query.max_queued)?;
    Ok(Document(answer(shared.view.pulls(max_queued)).await?))
}

pub(super) async fn heartbeats<V: AgentView>(State(shared): State<Shared<V>>) -> Answer<node::Heartbeats> {
    Ok(Document(answer(shared.view.heartbeats()).await?))
}

pub(super) async fn storage<V: AgentView>(State(shared): State<Shared<V>>) -> Answer<pb::Storage> {
    Ok(Document(answer(shared.view.storage()).await?))
}

pub(super) async fn config<V: AgentView>(State(shared): State<Shared<V>>) -> Answer<pb::Config> {
    Ok(Document(with_timeout(shared.view.config()).await?))
}

pub(super) async fn history<V: AgentView>(State(shared): State<Shared<V>>) -> HistoryDocument {
    shared.view.history().document()
}

pub(super) async fn not_found(uri: Uri) -> Failure {
    let text = format!(
        "path {} not found; available: / /livez /readyz /metrics /version /debug/actors /debug/actors/NAME \
         /debug/pulls /debug/node /debug/endpoints /debug/endpoints/NAMESPACE/NAME /debug/storage \
         /debug/config /debug/history /debug/events",
        uri.path()
    );
    Failure::new(StatusCode::NOT_FOUND, text)
}
