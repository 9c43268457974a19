//! JSON documents and errors.
//!
//! Owns: their form: indented for people who use curl, and `{"error": "..."}`.

use axum::{
    http::{
        HeaderValue, StatusCode,
        header::{CONTENT_TYPE, RETRY_AFTER},
    },
    response::{IntoResponse, Response},
};
use serde::Serialize;

use crate::{ViewError, history::HistoryDocument};

/// The content type of the output of `prometheus-client`.
pub const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

#[derive(Debug)]
pub struct Failure {
    status: StatusCode,
    text: String,
}

impl Failure {
    /// `text`: what failed and what to do.
    pub fn new(status: StatusCode, text: impl Into<String>) -> Self {
        Self { status, text: text.into() }
    }
}

impl From<ViewError> for Failure {
    fn from(error: ViewError) -> Self {
        let status = match error {
            ViewError::Busy(_) | ViewError::Unavailable(_) => StatusCode::SERVICE_UNAVAILABLE,
            ViewError::Invalid(_) => StatusCode::BAD_REQUEST,
        };
        Self::new(status, error.to_string())
    }
}

impl IntoResponse for Failure {
    fn into_response(self) -> Response {
        let document = Document(serde_json::json!({"error": self.text}));
        let mut response = (self.status, document).into_response();
        if self.status == StatusCode::SERVICE_UNAVAILABLE {
            response.headers_mut().insert(RETRY_AFTER, HeaderValue::from_static("1"));
        }
        response
    }
}

/// Indented JSON.
#[derive(Debug)]
pub struct Document<T>(pub T);

impl<T: Serialize> IntoResponse for Document<T> {
    fn into_response(self) -> Response {
        json(serde_json::to_vec_pretty(&self.0))
    }
}

/// Not indented: a line for each of some thousand numbers is not read.
impl IntoResponse for HistoryDocument {
    fn into_response(self) -> Response {
        json(serde_json::to_vec(&self))
    }
}

fn json(encoded: serde_json::Result<Vec<u8>>) -> Response {
    match encoded {
        Ok(mut json) => {
            json.push(b'\n');
            ([(CONTENT_TYPE, super::JSON)], json).into_response()
        }
        Err(error) => {
            // Encoding fails only for a map with keys that are not strings, and no document has one.
            tracing::error!(%error, "cannot encode a debug document as JSON");
            StatusCode::INTERNAL_SERVER_ERROR.into_response()
        }
    }
}
