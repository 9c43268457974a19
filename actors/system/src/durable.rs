//! Use of a store that may not be open.
//!
//! Owns: the time that an actor waits for the store when it starts, and the rule that a failure is logged once per
//! reason. In: the store's state. Out: the content of the store, or the reason why it cannot be read.

use std::{sync::Arc, time::Duration};

use keelson_storage::{StateStore, StoreError, StoreState};

/// Time that an actor waits for the store when it starts. After that it starts without persisted state. On a busy node a store
/// has taken 2.5 s to open after a kill.
const OPEN_TIMEOUT: Duration = Duration::from_secs(5);

/// Waits for the store to be open, at most [`OPEN_TIMEOUT`].
pub async fn wait_for_store(store: &dyn StateStore) {
    let mut state = store.subscribe();
    // If the store is not open, the next call returns the reason.
    let _ = tokio::time::timeout(OPEN_TIMEOUT, state.wait_for(StoreState::is_open)).await;
}

/// Reads from the store on another thread, once it is open or after [`OPEN_TIMEOUT`].
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

/// The last logged reason of failed writes.
#[derive(Debug, Default)]
pub struct LoggedFailure(Option<String>);

impl LoggedFailure {
    /// Whether the reason differs from the last logged one.
    pub fn is_new(&mut self, reason: &str) -> bool {
        let new = self.0.as_deref() != Some(reason);
        if new {
            self.0 = Some(reason.to_owned());
        }
        new
    }

    /// Call it after a successful write, so that the next failure is logged.
    pub fn clear(&mut self) {
        self.0 = None;
    }
}
