//! `/debug/endpoints` and `/debug/endpoints/{namespace}/{name}`.
//!
//! In: requests. Out: the documents of endpoints.proto's service Inspection as JSON.

use axum::{
    extract::{
        Path, Query, State,
        rejection::{PathRejection, QueryRejection},
    },
    http::StatusCode,
};
use keelson_proto::endpoints as pb;
use keelson_serve::http::{Document, Failure};
use serde::{Deserialize, Serialize};

use super::{Shared, documents::Answer};
use crate::{
    AgentView,
    endpoints::{self, ExplainError},
};

/// For a request without `max`.
const DEFAULT_SERVICES: u32 = 1_000;

impl From<ExplainError> for Failure {
    fn from(error: ExplainError) -> Self {
        match error {
            ExplainError::NotKnown(text) => Self::new(StatusCode::NOT_FOUND, text),
            ExplainError::View(error) => error.into(),
        }
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct StateQuery {
    namespace: String,
    /// A part of a line of the list.
    filter: String,
    max: u32,
}

impl Default for StateQuery {
    fn default() -> Self {
        Self { namespace: String::new(), filter: String::new(), max: DEFAULT_SERVICES }
    }
}

#[derive(Serialize)]
pub(super) struct StateDocument {
    #[serde(flatten)]
    state: pb::State,
    /// Number of Services that match the request, listed or not.
    matching: u64,
}

pub(super) async fn state<V: AgentView>(
    State(shared): State<Shared<V>>,
    query: Result<Query<StateQuery>, QueryRejection>,
) -> Answer<StateDocument> {
    let Query(query) = query.map_err(|error| Failure::new(StatusCode::BAD_REQUEST, error.body_text()))?;
    let (state, matching) =
        endpoints::search(&shared.view, &query.namespace, &query.filter, query.max).await?;
    Ok(Document(StateDocument { state, matching }))
}

pub(super) async fn explain<V: AgentView>(
    State(shared): State<Shared<V>>,
    path: Result<Path<(String, String)>, PathRejection>,
) -> Answer<pb::Explanation> {
    let Path((namespace, name)) =
        path.map_err(|error| Failure::new(StatusCode::BAD_REQUEST, error.body_text()))?;
    Ok(Document(endpoints::explain(&shared.view, &namespace, &name).await?))
}
