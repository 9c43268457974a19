//! How actors use a store that may not be open.
//!
//! Owns: the time that an actor waits for the store when it starts, and the rule that a failure is logged once per
//! reason. In: the store's state. Out: what the store held, or why it could not be read.

use std::{sync::Arc, time::Duration};

use keelson_storage::{StateStore, StoreError, StoreState};

/// How long an actor that starts waits for the store. After that it starts without persisted facts.
const OPEN_PATIENCE: Duration = Duration::from_secs(2);

/// Waits for the store to be open, but no longer than [`OPEN_PATIENCE`].
pub async fn wait_for_store(store: &dyn StateStore) {
    let mut state = store.subscribe();
    // What keeps it from being open comes out of the next call.
    let _ = tokio::time::timeout(OPEN_PATIENCE, state.wait_for(StoreState::is_open)).await;
}

/// Reads from the store, off this thread, once it is open or [`OPEN_PATIENCE`] is over.
///
/// # Errors
/// The inner one is the store's: [`StoreError::NotOpen`] if it is not open by then. The outer one: the reading thread
/// panicked.
pub async fn read_at_start<T: Send + 'static>(
    store: Arc<dyn StateStore>,
    read: impl FnOnce(&Arc<dyn StateStore>) -> Result<T, StoreError> + Send + 'static,
) -> Result<Result<T, StoreError>, tokio::task::JoinError> {
    wait_for_store(&*store).await;
    tokio::task::spawn_blocking(move || read(&store)).await
}

/// Why writes fail, as far as it has been logged.
#[derive(Debug, Default)]
pub struct LoggedFailure(Option<String>);

impl LoggedFailure {
    /// Whether this reason is another one than that logged last.
    pub fn is_new(&mut self, reason: &str) -> bool {
        let new = self.0.as_deref() != Some(reason);
        if new {
            self.0 = Some(reason.to_owned());
        }
        new
    }

    /// A write succeeded: the next failure is logged.
    pub fn clear(&mut self) {
        self.0 = None;
    }
}
