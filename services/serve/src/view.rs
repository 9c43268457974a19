//! Requests of a server to its process.
//!
//! Owns: the errors of such requests, and the timeout of their answers.

use std::{future::Future, time::Duration};

/// Maximum time for an answer before the client gets an error instead. A process that detects which of its parts does
/// not answer has to do so in less.
pub const ANSWER_TIMEOUT: Duration = Duration::from_secs(8);

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Check {
    /// Without spaces.
    pub name: String,
    pub ok: bool,
    /// Why it fails, a sentence; if `ok`, a warning or empty.
    pub message: String,
    /// When it began to fail; 0 if not known.
    pub since_unix_ms: i64,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ViewError {
    /// The mailbox is full or no slot is free, and the request was not accepted. A retry helps.
    #[error("{0}")]
    Busy(String),
    /// The part of the process that answers does not run now.
    #[error("{0}")]
    Unavailable(String),
    #[error("{0}")]
    Invalid(String),
}

impl From<ViewError> for tonic::Status {
    fn from(error: ViewError) -> Self {
        match error {
            ViewError::Busy(text) => Self::resource_exhausted(text),
            ViewError::Unavailable(text) => Self::unavailable(text),
            ViewError::Invalid(text) => Self::invalid_argument(text),
        }
    }
}

/// Waits for an answer, for up to [`ANSWER_TIMEOUT`]. The error says that `what` did not happen; `meaning` is its
/// likely cause.
pub async fn within_time<T>(
    what: &str,
    meaning: &str,
    answer: impl Future<Output = T>,
) -> Result<T, ViewError> {
    tokio::time::timeout(ANSWER_TIMEOUT, answer).await.map_err(|_| {
        let seconds = ANSWER_TIMEOUT.as_secs();
        ViewError::Unavailable(format!("{what} within {seconds} s; {meaning}"))
    })
}
