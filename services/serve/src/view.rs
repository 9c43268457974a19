//! Questions of a server to the process that it belongs to.
//!
//! Owns: the errors of such questions, and the bound on how long an answer may take.

use std::{future::Future, time::Duration};

/// How long an answer may take before the client gets an error instead. A process that detects which part of it does not
/// answer has to do so in less.
pub const ANSWER_TIMEOUT: Duration = Duration::from_secs(8);

/// One check of `/livez` or `/readyz`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Check {
    /// A short name without spaces.
    pub name: String,
    /// Whether it passes.
    pub ok: bool,
    /// Why it fails, a sentence; with `ok`, a warning or nothing.
    pub message: String,
    /// Since when it fails; 0 if that is not known.
    pub since_unix_ms: i64,
}

/// Why a question was not answered.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ViewError {
    /// The mailbox is full or a slot is taken, and the question was not taken. A retry helps.
    #[error("{0}")]
    Busy(String),
    /// The part of the process that answers is not there now.
    #[error("{0}")]
    Unavailable(String),
    /// The question is not valid.
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

/// Waits for an answer, for up to [`ANSWER_TIMEOUT`]. `what` did not happen after that, and `meaning` is what may be the cause.
///
/// # Errors
/// There was no answer in time.
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
