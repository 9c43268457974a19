//! What the debug API needs from a proxy.
//!
//! Owns: [`ProxyView`], and the timeout of its calls. In: calls of the gRPC and HTTP servers. Out: the documents of
//! `keelson.proxy.v1`.

use std::{future::Future, pin::Pin, sync::Arc};

use futures_util::{Stream, StreamExt as _, stream};
use keelson_proto::proxy as pb;
use keelson_serve::{Check, ViewError, history::History, within_time};
use tokio::sync::{Semaphore, watch};

use crate::explain::{Question, QuestionError};

/// A ruleset as text, in chunks of any size.
pub type Chunks = Pin<Box<dyn Stream<Item = Result<String, ViewError>> + Send>>;

/// Maximum size of a message with text, in bytes: clients accept messages of 4 MiB by default.
const PIECE_BYTES: usize = 64 * 1024;

/// Maximum number of readers of the ruleset over gRPC and HTTP: each may hold a snapshot of some hundred megabytes.
pub(super) const PRINTS: usize = 2;

/// A running proxy; tests script it. Cheap to clone. A call that waits delays only calls of the same method.
pub trait ProxyView: Clone + Send + Sync + 'static {
    fn state(&self) -> impl Future<Output = Result<pb::State, ViewError>> + Send;

    fn explain(&self, question: Question) -> impl Future<Output = Result<pb::Explanation, ViewError>> + Send;

    /// The whole ruleset, as text for `nft -f`. It is one state, whatever changes while it is read.
    fn print(&self) -> impl Future<Output = Result<Chunks, ViewError>> + Send;

    /// Incremented whenever the state has changed. A spurious increment costs little; a missed one leaves a page
    /// outdated.
    fn changes(&self) -> watch::Receiver<u64>;

    /// Samples of the last hour.
    fn history(&self) -> History;

    /// Whether the process should continue: fails only for what a restart can repair.
    fn livez(&self) -> impl Future<Output = Vec<Check>> + Send;

    /// Whether Services work here as in the newest known state.
    fn readyz(&self) -> impl Future<Output = Vec<Check>> + Send;

    /// All metrics as OpenMetrics text, `# EOF` included.
    fn metrics(&self) -> impl Future<Output = String> + Send;
}

impl From<QuestionError> for ViewError {
    fn from(error: QuestionError) -> Self {
        Self::Invalid(error.to_string())
    }
}

pub(super) async fn within<T>(answer: impl Future<Output = T>) -> Result<T, ViewError> {
    within_time("the proxy did not answer", "it may be blocked in the kernel", answer).await
}

/// [`within`] for fallible answers.
pub(super) async fn answer<T>(answer: impl Future<Output = Result<T, ViewError>>) -> Result<T, ViewError> {
    within(answer).await.and_then(|answer| answer)
}

/// Slots for readers of the ruleset, shared by the servers of a proxy.
#[derive(Debug, Clone)]
pub struct PrintSlots(Arc<Semaphore>);

impl Default for PrintSlots {
    fn default() -> Self {
        Self(Arc::new(Semaphore::new(PRINTS)))
    }
}

impl PrintSlots {
    /// The ruleset in chunks that fit into a message. The slot is held as long as the stream.
    pub(super) async fn print<V: ProxyView>(
        &self,
        view: &V,
    ) -> Result<impl Stream<Item = Result<String, ViewError>> + Send + use<V>, ViewError> {
        let slot = self.0.clone().try_acquire_owned().map_err(|_| {
            ViewError::Busy(format!("{PRINTS} clients are already printing the ruleset; retry later"))
        })?;
        Ok(pieces(answer(view.print()).await?).map(move |piece| {
            let _ = &slot;
            piece
        }))
    }
}

/// Splits the text into chunks that fit into a message.
fn pieces(chunks: Chunks) -> impl Stream<Item = Result<String, ViewError>> + Send {
    chunks.flat_map(|chunk| {
        stream::iter(match chunk {
            Ok(text) => cut(text).into_iter().map(Ok).collect(),
            Err(error) => vec![Err(error)],
        })
    })
}

fn cut(mut text: String) -> Vec<String> {
    let mut pieces = Vec::new();
    while text.len() > PIECE_BYTES {
        // A character has at most 4 bytes, so a boundary exists.
        let end = (0..=PIECE_BYTES).rev().find(|&end| text.is_char_boundary(end)).unwrap_or(text.len());
        let rest = text.split_off(end);
        pieces.push(std::mem::replace(&mut text, rest));
    }
    pieces.push(text);
    pieces.retain(|piece| !piece.is_empty());
    pieces
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_split_between_characters_without_loss() {
        for text in [
            String::new(),
            "a".into(),
            "a".repeat(PIECE_BYTES),
            "\u{20ac}".repeat(PIECE_BYTES),
            "ab".repeat(PIECE_BYTES),
        ] {
            let pieces = cut(text.clone());
            assert!(pieces.iter().all(|piece| !piece.is_empty() && piece.len() <= PIECE_BYTES));
            assert!(pieces.len() <= text.len() / (PIECE_BYTES - 4) + 1);
            assert_eq!(pieces.concat(), text);
        }
    }
}
