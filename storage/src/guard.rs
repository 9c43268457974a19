//! Owns the thread on which sled runs. In: jobs. Out: their results, or an error: a caught panic, or a job that did
//! not end in time.
//!
//! sled 0.34 can panic and can wait forever (its threads wait for each other without a limit). Neither may take down
//! the agent, so no other thread of this process ever calls into sled.

use std::any::Any;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

pub(crate) const THREAD_NAME: &str = "keelson-storage";
/// Prefix of the names of sled's own threads.
const SLED_THREADS: &str = "sled-";

/// Whether a panic on the current thread is caught, or confined to sled, and becomes an error of this crate.
///
/// For a panic hook that ends the process: it must ignore these panics (and may log them).
///
/// ```
/// let default_hook = std::panic::take_hook();
/// std::panic::set_hook(Box::new(move |info| {
///     default_hook(info);
///     if !keelson_storage::panic_is_guarded() {
///         std::process::abort();
///     }
/// }));
/// ```
pub fn panic_is_guarded() -> bool {
    thread::current().name().is_some_and(|name| name == THREAD_NAME || name.starts_with(SLED_THREADS))
}

/// Maximum length of a panic's message.
const MESSAGE_CHARS: usize = 200;

type Job<T> = Box<dyn FnOnce(&mut Option<T>) + Send>;

pub(crate) struct Worker<T> {
    jobs: Sender<Job<T>>,
    stuck: bool,
    /// Number of jobs given to the thread, and of jobs that ended.
    given: u64,
    ended: Arc<AtomicU64>,
}

impl<T> fmt::Debug for Worker<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Worker").field("stuck", &self.stuck).finish_non_exhaustive()
    }
}

/// A job that did not complete.
#[derive(Debug)]
pub(crate) enum Unfinished {
    /// The `T` has been dropped.
    Panicked(String),
    /// The job still runs; this worker takes no more jobs.
    TimedOut(Duration),
}

impl<T: 'static> Worker<T> {
    /// Starts the thread, without a `T`.
    pub(crate) fn start() -> std::io::Result<Self> {
        let (jobs, queue) = channel::<Job<T>>();
        thread::Builder::new().name(THREAD_NAME.to_owned()).spawn(move || run(&queue))?;
        Ok(Self { jobs, stuck: false, given: 0, ended: Arc::default() })
    }

    /// Whether a job did not end in time, so that this worker cannot be used.
    pub(crate) fn is_stuck(&self) -> bool {
        self.stuck
    }

    /// Waits, up to `limit`, for the job that did not end in time. Returns whether it has ended, so that this worker
    /// can be used again.
    pub(crate) fn wait_until_free(&mut self, limit: Duration) -> bool {
        let begun = Instant::now();
        while self.ended.load(Ordering::SeqCst) < self.given {
            if begun.elapsed() >= limit {
                return false;
            }
            thread::sleep(Duration::from_millis(10).min(limit));
        }
        self.stuck = false;
        true
    }

    pub(crate) fn call<R: Send + 'static>(
        &mut self,
        limit: Duration,
        job: impl FnOnce(&mut Option<T>) -> R + Send + 'static,
    ) -> Result<R, Unfinished> {
        if self.stuck {
            return Err(Unfinished::TimedOut(Duration::ZERO));
        }
        let (reply, answer) = sync_channel(1);
        let ended = self.ended.clone();
        self.given += 1;
        let job: Job<T> = Box::new(move |slot| {
            let result = catch_unwind(AssertUnwindSafe(|| job(slot)));
            if result.is_err() {
                // A value that a panic left behind may panic again when dropped.
                let left = slot.take();
                let _ = catch_unwind(AssertUnwindSafe(|| drop(left)));
            }
            ended.fetch_add(1, Ordering::SeqCst);
            // The caller may have given up waiting.
            let _ = reply.send(result.map_err(|payload| message(payload.as_ref())));
        });
        if self.jobs.send(job).is_err() {
            return Err(Unfinished::Panicked("the storage thread has exited".to_owned()));
        }
        match answer.recv_timeout(limit) {
            Ok(result) => result.map_err(Unfinished::Panicked),
            Err(RecvTimeoutError::Timeout) => {
                self.stuck = true;
                Err(Unfinished::TimedOut(limit))
            }
            Err(RecvTimeoutError::Disconnected) => {
                Err(Unfinished::Panicked("the storage thread has exited".to_owned()))
            }
        }
    }
}

fn run<T>(queue: &Receiver<Job<T>>) {
    let mut slot = None;
    while let Ok(job) = queue.recv() {
        job(&mut slot);
    }
    let _ = catch_unwind(AssertUnwindSafe(|| drop(slot)));
}

fn message(payload: &(dyn Any + Send)) -> String {
    let text = payload.downcast_ref::<&str>().map(|text| (*text).to_owned());
    let text = text.or_else(|| payload.downcast_ref::<String>().cloned());
    // sled's messages may contain a whole tree.
    text.map_or_else(|| "no message".to_owned(), |text| text.chars().take(MESSAGE_CHARS).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_secs(60);

    #[test]
    fn jobs_run_on_the_guarded_thread_and_share_the_value() {
        let mut worker = Worker::<u32>::start().unwrap();
        assert!(!panic_is_guarded());
        assert!(worker.call(LIMIT, |_| panic_is_guarded()).unwrap());
        worker.call(LIMIT, |slot| *slot = Some(7)).unwrap();
        assert_eq!(worker.call(LIMIT, |slot| *slot).unwrap(), Some(7));
    }

    #[test]
    fn a_panic_is_an_error_and_drops_the_value_even_if_that_panics_too() {
        struct PanicOnDrop;
        impl Drop for PanicOnDrop {
            fn drop(&mut self) {
                panic!("second");
            }
        }
        let mut worker = Worker::start().unwrap();
        worker.call(LIMIT, |slot| *slot = Some(PanicOnDrop)).unwrap();
        match worker.call(LIMIT, |_| panic!("first {}", 1)) {
            Err(Unfinished::Panicked(message)) => assert_eq!(message, "first 1"),
            other => panic!("{other:?}"),
        }
        assert!(worker.call(LIMIT, |slot| slot.is_none()).unwrap());
    }

    #[test]
    fn a_job_that_hangs_is_given_up_and_the_worker_refuses_the_next() {
        let mut worker = Worker::<()>::start().unwrap();
        let (release, held) = channel::<()>();
        let hang = move |_: &mut Option<()>| held.recv().is_err();
        assert!(matches!(worker.call(Duration::from_millis(20), hang), Err(Unfinished::TimedOut(_))));
        assert!(worker.is_stuck());
        assert!(matches!(worker.call(LIMIT, |_| ()), Err(Unfinished::TimedOut(_))));
        assert!(!worker.wait_until_free(Duration::ZERO));
        drop(release);
        assert!(worker.wait_until_free(LIMIT));
        worker.call(LIMIT, |_| ()).unwrap();
    }
}
