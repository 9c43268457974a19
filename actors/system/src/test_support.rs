//! Support for tests of actors: paused time, and a store that fails on demand.
//!
//! Owns: [`run`], functions that advance time and messages, and [`FakeStore`]. In: tests of crates with actors. Out:
//! nothing in a program: the feature `test-support` is on for tests only.

#![allow(clippy::expect_used)] // A test that cannot go on ends.

use std::{
    future::Future,
    sync::{
        Arc, Condvar, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use keelson_storage::{Batch, Keyed, MemoryStore, StateStore, StoreError, StoreState, StoreStats, Table};
use tokio::sync::watch;

use crate::inspect::Recorder;

/// Runs a test in an actix system with paused time, which advances to the next timer when no task can run.
///
/// # Panics
/// No runtime can be created.
pub fn run<F: Future<Output = ()>>(test: F) {
    let system = actix::System::with_tokio_rt(|| {
        tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .start_paused(true)
            .build()
            .expect("a tokio runtime")
    });
    system.block_on(test);
}

/// Runs all tasks that can run, without advancing time.
pub async fn settle() {
    for _ in 0..200 {
        tokio::task::yield_now().await;
    }
}

/// Waits for other threads, without advancing time, until `done`.
///
/// # Panics
/// `done` does not become true.
pub async fn until(what: &str, done: impl Fn() -> bool) {
    for _ in 0..20_000 {
        if done() {
            return;
        }
        tokio::task::yield_now().await;
        std::thread::sleep(Duration::from_millis(if done() { 0 } else { 1 }));
    }
    panic!("never happened: {what}");
}

pub async fn pass(millis: u64) {
    tokio::time::sleep(Duration::from_millis(millis)).await;
}

#[must_use]
pub fn handled(recorder: &Recorder, message: &str) -> u64 {
    recorder.overview().messages.iter().find(|of| of.message == message).map_or(0, |of| of.handled)
}

/// A store in memory that fails, or blocks its callers, on demand.
pub struct FakeStore {
    inner: MemoryStore,
    failing: AtomicBool,
    blocked: Mutex<bool>,
    unblocked: Condvar,
    /// Number of batches received.
    pub writes: AtomicU64,
    /// The reported state, which does not depend on the store.
    pub state: watch::Sender<StoreState>,
}

impl FakeStore {
    #[must_use]
    pub fn new() -> Arc<Self> {
        Arc::new(Self {
            inner: MemoryStore::new(),
            failing: AtomicBool::new(false),
            blocked: Mutex::new(false),
            unblocked: Condvar::new(),
            writes: AtomicU64::new(0),
            state: watch::channel(StoreState::Open).0,
        })
    }

    pub fn fail(&self, failing: bool) {
        self.failing.store(failing, Ordering::SeqCst);
    }

    /// Must be undone before time can advance: the clock waits for blocked threads.
    ///
    /// # Panics
    /// A thread panicked while it held the lock.
    pub fn block(&self, blocked: bool) {
        *self.blocked.lock().expect("unharmed") = blocked;
        self.unblocked.notify_all();
    }

    fn gate(&self) -> Result<(), StoreError> {
        let mut blocked = self.blocked.lock().expect("unharmed");
        while *blocked {
            blocked = self.unblocked.wait(blocked).expect("unharmed");
        }
        if self.failing.load(Ordering::SeqCst) {
            return Err(StoreError::Io {
                operation: "a write",
                path: "/nowhere".into(),
                source: std::io::ErrorKind::StorageFull.into(),
            });
        }
        Ok(())
    }

    /// The content, even if the store fails or blocks.
    #[must_use]
    pub fn contents(&self) -> &MemoryStore {
        &self.inner
    }
}

impl StateStore for FakeStore {
    fn apply(&self, batch: &Batch) -> Result<(), StoreError> {
        self.writes.fetch_add(1, Ordering::SeqCst);
        self.gate()?;
        self.inner.apply(batch)
    }

    fn get(&self, table: Table, key: &[u8]) -> Result<Option<Vec<u8>>, StoreError> {
        self.gate()?;
        self.inner.get(table, key)
    }

    fn scan(&self, table: Table) -> Result<Keyed<Vec<u8>>, StoreError> {
        self.gate()?;
        self.inner.scan(table)
    }

    fn stats(&self) -> StoreStats {
        self.inner.stats()
    }

    fn subscribe(&self) -> watch::Receiver<StoreState> {
        self.state.subscribe()
    }
}
