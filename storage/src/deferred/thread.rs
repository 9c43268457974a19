//! Owns the thread of a [`super::DeferredStore`]: the opened store and the time of the next attempt to open it. In:
//! jobs, one at a time. Out: their results and the changes of state.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use super::{Opener, Shared};
use crate::batch::Batch;
use crate::error::{OpenError, StoreError, text_of};
use crate::guard::THREAD_NAME;
use crate::state::StoreState;
use crate::store::StateStore;
use crate::table::Table;

/// Doubles with each failed attempt.
const FIRST_PAUSE: Duration = Duration::from_millis(200);
/// While another process holds the folder: it is usually about to end.
const MAX_PAUSE_IN_USE: Duration = Duration::from_secs(1);
/// After any other failure.
const MAX_PAUSE: Duration = Duration::from_secs(15);
/// How often a hanging disk is checked. The check itself waits for it.
const HUNG_CHECK_INTERVAL: Duration = Duration::from_secs(1);
/// How often a failing store is checked if there are no writes.
const FAILING_CHECK_INTERVAL: Duration = Duration::from_secs(5);
/// A record that does not exist; deleting it is an ordinary write.
const CHECK_KEY: &[u8] = b"write_check";

/// Work on the store, if it is open. `None`: not done.
pub(super) type Work = Box<dyn FnOnce(Option<&dyn StateStore>) -> Option<Result<(), Failure>> + Send>;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Failure {
    /// The disk reported an error; another call may succeed.
    Refused(String),
    /// The disk does not answer; another call would wait as well.
    Hung(String),
}

impl Failure {
    pub(super) fn of(error: &StoreError) -> Self {
        let text = text_of(error);
        if matches!(error, StoreError::TimedOut { .. }) { Self::Hung(text) } else { Self::Refused(text) }
    }
}

pub(super) enum Job {
    Run(Work),
    Wake,
    Close(SyncSender<()>),
}

pub(super) struct StoreThread {
    shared: Arc<Shared>,
    queue: Receiver<Job>,
    opener: Opener,
    store: Option<Arc<dyn StateStore>>,
    failed: Option<Failure>,
    pause: Duration,
}

impl StoreThread {
    pub(super) fn spawn(shared: Arc<Shared>, queue: Receiver<Job>, opener: Opener) -> io::Result<()> {
        let this = Self { shared, queue, opener, store: None, failed: None, pause: FIRST_PAUSE };
        // A panic on a thread with this name is known to be guarded.
        thread::Builder::new().name(THREAD_NAME.to_owned()).spawn(move || this.run()).map(drop)
    }

    fn run(mut self) {
        let mut next_try = Instant::now();
        loop {
            if self.store.is_none() && Instant::now() >= next_try {
                next_try = Instant::now() + self.try_open();
            }
            let job = match self.wait_for_job(next_try) {
                Ok(job) => job,
                Err(RecvTimeoutError::Timeout) if self.store.is_some() => Job::Run(check()),
                Err(RecvTimeoutError::Timeout) => continue,
                Err(RecvTimeoutError::Disconnected) => return self.close(),
            };
            match job {
                Job::Run(work) => self.perform(work),
                Job::Wake => self.publish(),
                Job::Close(done) => {
                    self.close();
                    // The caller may have given up waiting.
                    let _ = done.send(());
                    return;
                }
            }
        }
    }

    fn wait_for_job(&self, next_try: Instant) -> Result<Job, RecvTimeoutError> {
        match (&self.store, &self.failed) {
            (Some(_), None) => self.queue.recv().map_err(RecvTimeoutError::from),
            (Some(_), Some(Failure::Refused(_))) => self.queue.recv_timeout(FAILING_CHECK_INTERVAL),
            (Some(_), Some(Failure::Hung(_))) => self.queue.recv_timeout(HUNG_CHECK_INTERVAL),
            (None, _) => self.queue.recv_timeout(next_try.saturating_duration_since(Instant::now())),
        }
    }

    /// Returns the pause before the next attempt.
    fn try_open(&mut self) -> Duration {
        self.shared.change(|state| match state {
            StoreState::Unavailable { reason, since, .. } => {
                Some(StoreState::Unavailable { reason: reason.clone(), since: *since, next_try: None })
            }
            _ => None,
        });
        let opener = &mut self.opener;
        let (reason, longest) = match catch_unwind(AssertUnwindSafe(opener)) {
            Ok(Ok(store)) => {
                *self.shared.stats() = store.stats();
                self.store = Some(store);
                self.pause = FIRST_PAUSE;
                self.publish();
                return Duration::ZERO;
            }
            Ok(Err(error @ OpenError::InUse { .. })) => (text_of(&error), MAX_PAUSE_IN_USE),
            Ok(Err(error)) => (text_of(&error), MAX_PAUSE),
            Err(_) => ("panic while opening; see the log".to_owned(), MAX_PAUSE),
        };
        let pause = self.pause.min(longest);
        self.pause = pause.saturating_mul(2).min(longest);
        let now = SystemTime::now();
        let mut is_new = false;
        self.shared.change(|state| {
            is_new = state.reason() != Some(&reason);
            let since = state.since().unwrap_or(now);
            Some(StoreState::Unavailable { reason: reason.clone(), since, next_try: Some(now + pause) })
        });
        if is_new {
            tracing::error!(reason, "cannot open the state store; retrying in the background");
        }
        pause
    }

    fn perform(&mut self, work: Work) {
        let Some(store) = self.store.clone() else {
            work(None);
            return;
        };
        match catch_unwind(AssertUnwindSafe(|| work(Some(&*store)))) {
            Ok(Some(result)) => self.failed = result.err(),
            Ok(None) => {}
            Err(_) => self.failed = Some(Failure::Refused("panic in a call; see the log".to_owned())),
        }
        if !matches!(self.failed, Some(Failure::Hung(_))) {
            *self.shared.stats() = store.stats();
        }
        self.publish();
    }

    fn publish(&self) {
        if self.store.is_none() {
            return;
        }
        let now = SystemTime::now();
        let changed = self.shared.change(|state| {
            let since = state.since().unwrap_or(now);
            Some(match self.failed.clone() {
                None => StoreState::Open,
                Some(Failure::Refused(reason)) => StoreState::Failing { reason, since },
                Some(Failure::Hung(reason)) if state.is_open() => {
                    StoreState::Unavailable { reason, since, next_try: None }
                }
                // Known already, possibly with another text.
                Some(Failure::Hung(_)) => state.clone(),
            })
        });
        let path = self.shared.path.display();
        match &self.failed {
            None if changed => tracing::info!(%path, "state store open"),
            Some(Failure::Refused(reason)) if changed => {
                tracing::error!(%path, reason, "state store failing")
            }
            Some(Failure::Hung(reason)) if changed => {
                tracing::error!(%path, reason, "state store unavailable")
            }
            _ => {}
        }
    }

    fn close(&mut self) {
        // Closing may block and, with sled, panic.
        let store = self.store.take();
        let _ = catch_unwind(AssertUnwindSafe(|| drop(store)));
    }
}

fn check() -> Work {
    Box::new(|store| {
        let mut batch = Batch::new();
        batch.delete(Table::Meta, CHECK_KEY);
        Some(store?.apply(&batch).map_err(|error| Failure::of(&error)))
    })
}
