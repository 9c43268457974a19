//! Owns a store that opens in the background, on a thread of its own. In: calls from any thread; they fail at once
//! while the store is not open or the disk hangs, and never wait longer than [`CALL_LIMIT`]. Out: [`StoreState`],
//! which says whether records are durable now, and why not.
//!
//! The thread may wait for a disk without limit; no caller waits for the thread.

mod thread;

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use tokio::sync::watch;

use crate::batch::Batch;
use crate::error::{OpenError, StoreError};
use crate::migrate::SCHEMA_VERSION;
use crate::state::StoreState;
use crate::store::{Keyed, StateStore, StoreStats};
use crate::table::Table;
use thread::{Failure, Job, StoreThread};

/// Time that a caller waits for the disk. After that the call fails and the store counts as unavailable until the
/// disk answers.
pub const CALL_LIMIT: Duration = Duration::from_secs(5);

/// Opens the store. Called on the store's thread until it succeeds; may block.
pub type Opener = Box<dyn FnMut() -> Result<Arc<dyn StateStore>, OpenError> + Send>;

/// A [`StateStore`] that is opened in the background, with retries.
pub struct DeferredStore {
    shared: Arc<Shared>,
}

struct Shared {
    path: PathBuf,
    state: watch::Sender<StoreState>,
    /// `None` once closed.
    jobs: Mutex<Option<Sender<Job>>>,
    /// As of the last call, because reading the disk could block.
    stats: Mutex<StoreStats>,
    limit: Duration,
}

impl fmt::Debug for DeferredStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeferredStore")
            .field("path", &self.shared.path)
            .field("state", &*self.shared.state.borrow())
            .finish_non_exhaustive()
    }
}

impl DeferredStore {
    /// Starts opening the store of a state folder, see [`crate::open`], and returns at once.
    pub fn start(state_dir: &Path) -> io::Result<Self> {
        let dir = state_dir.to_owned();
        let opener = move || {
            let opened = crate::open(&dir)?;
            Ok(opened.store as Arc<dyn StateStore>)
        };
        Self::with_opener(&crate::manifest::store_dir(state_dir), CALL_LIMIT, Box::new(opener))
    }

    /// [`DeferredStore::start`] with another opener and another limit for calls.
    pub fn with_opener(path: &Path, limit: Duration, opener: Opener) -> io::Result<Self> {
        let (jobs, queue) = channel();
        let (state, _) = watch::channel(StoreState::Opening { since: SystemTime::now() });
        let shared = Arc::new(Shared {
            path: path.to_owned(),
            state,
            jobs: Mutex::new(Some(jobs)),
            stats: Mutex::new(stats_unopened(path)),
            limit,
        });
        StoreThread::spawn(shared.clone(), queue, opener)?;
        Ok(Self { shared })
    }

    pub fn state(&self) -> StoreState {
        self.shared.state.borrow().clone()
    }

    /// Closes the store and releases the folder's lock; calls fail from now on. Returns whether this was done within
    /// `limit`. A disk that hangs delays it until the disk answers.
    pub fn close(&self, limit: Duration) -> bool {
        self.shared.state.send_replace(StoreState::Closed);
        let Some(jobs) = self.shared.jobs().take() else { return true };
        let (done, closed) = sync_channel(1);
        // A thread that has ended has closed the store.
        jobs.send(Job::Close(done)).is_err() || closed.recv_timeout(limit) != Err(RecvTimeoutError::Timeout)
    }

    fn call<R: Send + 'static>(
        &self,
        operation: &'static str,
        work: impl FnOnce(&dyn StateStore) -> Result<R, StoreError> + Send + 'static,
    ) -> Result<R, StoreError> {
        let shared = &self.shared;
        shared.check()?;
        let Some(jobs) = shared.jobs().clone() else { return Err(shared.not_open()) };
        let (reply, answer) = sync_channel(1);
        let given_up = Arc::new(AtomicBool::new(false));
        let skip = given_up.clone();
        let job = Job::Run(Box::new(move |store| {
            if skip.load(Ordering::SeqCst) {
                // The caller has given up, and may have written something else by now.
                return None;
            }
            let result = work(store?);
            let failure = result.as_ref().map(drop).map_err(Failure::of);
            // The caller may have given up waiting.
            let _ = reply.send(result);
            Some(failure)
        }));
        if jobs.send(job).is_err() {
            return Err(shared.not_open());
        }
        match answer.recv_timeout(shared.limit) {
            Ok(result) => result,
            Err(RecvTimeoutError::Disconnected) => Err(shared.not_open()),
            Err(RecvTimeoutError::Timeout) => {
                given_up.store(true, Ordering::SeqCst);
                shared.disk_hangs();
                // The thread may just have returned: it checks the state again.
                let _ = jobs.send(Job::Wake);
                let seconds = shared.limit.as_secs();
                Err(StoreError::TimedOut { operation, path: shared.path.clone(), seconds })
            }
        }
    }
}

impl Shared {
    fn jobs(&self) -> MutexGuard<'_, Option<Sender<Job>>> {
        self.jobs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn stats(&self) -> MutexGuard<'_, StoreStats> {
        self.stats.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn check(&self) -> Result<(), StoreError> {
        if self.state.borrow().is_open() { Ok(()) } else { Err(self.not_open()) }
    }

    fn not_open(&self) -> StoreError {
        let reason = self.state.borrow().reason().unwrap_or("the storage thread has exited").to_owned();
        StoreError::NotOpen { path: self.path.clone(), reason }
    }

    fn disk_hangs(&self) {
        let reason = format!("the disk of {} does not answer", self.path.display());
        let changed = self.change(|state| {
            state.is_open().then(|| {
                let since = state.since().unwrap_or_else(SystemTime::now);
                StoreState::Unavailable { reason: reason.clone(), since, next_try: None }
            })
        });
        if changed {
            tracing::error!(reason, "state store unavailable");
        }
    }

    /// Changes the state, except [`StoreState::Closed`], which is final.
    fn change(&self, to: impl FnOnce(&StoreState) -> Option<StoreState>) -> bool {
        self.state.send_if_modified(|state| {
            let next = if *state == StoreState::Closed { None } else { to(state) };
            match next {
                Some(next) if next != *state => {
                    *state = next;
                    true
                }
                _ => false,
            }
        })
    }
}

impl StateStore for DeferredStore {
    fn apply(&self, batch: &Batch) -> Result<(), StoreError> {
        batch.check()?;
        let batch = batch.clone();
        self.call("applying a batch", move |store| store.apply(&batch))
    }

    fn get(&self, table: Table, key: &[u8]) -> Result<Option<Vec<u8>>, StoreError> {
        let key = key.to_owned();
        self.call("reading", move |store| store.get(table, &key))
    }

    fn scan(&self, table: Table) -> Result<Keyed<Vec<u8>>, StoreError> {
        self.call("scanning", move |store| store.scan(table))
    }

    fn stats(&self) -> StoreStats {
        let mut stats = self.shared.stats().clone();
        if let Some(reason) = self.shared.state.borrow().reason() {
            stats.last_error = Some(reason.to_owned());
        }
        stats
    }

    fn subscribe(&self) -> watch::Receiver<StoreState> {
        self.shared.state.subscribe()
    }
}

fn stats_unopened(path: &Path) -> StoreStats {
    StoreStats {
        backend: "sled".to_owned(),
        path: Some(path.to_owned()),
        schema_version: SCHEMA_VERSION,
        size_bytes: 0,
        last_error: None,
        errors: 0,
        damaged_moved_to: None,
        tables: Table::ALL.iter().map(|table| (table.name().to_owned(), 0)).collect(),
    }
}

#[cfg(test)]
mod tests;
