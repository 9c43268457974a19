//! Accepting connections, and its failures.
//!
//! Owns: [`LogLimit`], [`AcceptFailures`], and the maximum number of connections of one listener ([`admit`]).

use std::{future::Future, io, sync::Arc, time::Duration};

use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    time::{Instant, sleep},
};

/// Pause after a failed accept.
pub const PAUSE: Duration = Duration::from_millis(50);
/// Minimum interval between two log lines about the same lasting problem.
const LOG_EVERY: Duration = Duration::from_secs(10);

/// Limits the log lines about a lasting problem to one in 10 s.
#[derive(Debug, Default)]
pub struct LogLimit(Option<Instant>);

impl LogLimit {
    /// Whether to log now; if so, it returns false for the next 10 s.
    pub fn is_due(&mut self) -> bool {
        let is_due = self.0.is_none_or(|at| at.elapsed() >= LOG_EVERY);
        if is_due {
            self.0 = Some(Instant::now());
        }
        is_due
    }
}

/// Failed accepts of one listener. The usual cause is that no file descriptor is left. Descriptors in use are freed
/// some time, so a failure is no reason to stop.
#[derive(Debug)]
pub struct AcceptFailures {
    server: &'static str,
    log: LogLimit,
}

impl AcceptFailures {
    /// `server`: for the log.
    #[must_use]
    pub fn new(server: &'static str) -> Self {
        Self { server, log: LogLimit::default() }
    }

    /// Logs the failure, unless one was logged lately, and pauses.
    pub async fn pause(&mut self, error: &io::Error) {
        if self.log.is_due() {
            tracing::warn!(server = self.server, %error, "cannot accept a connection");
        }
        sleep(PAUSE).await;
    }
}

/// The next connection, once a slot is free.
pub(crate) async fn admit<S, F: Future<Output = io::Result<S>>>(
    slots: &Arc<Semaphore>,
    failures: &mut AcceptFailures,
    accept: impl Fn() -> F,
) -> (S, OwnedSemaphorePermit) {
    let Ok(slot) = slots.clone().acquire_owned().await else {
        // The semaphore is never closed.
        return std::future::pending().await;
    };
    loop {
        match accept().await {
            Ok(stream) => return (stream, slot),
            Err(error) => failures.pause(&error).await,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn slots_bound_the_connections_and_errors_do_not_end_accepting() {
        let slots = Arc::new(Semaphore::new(1));
        let mut failures = AcceptFailures::new("test");
        let results = RefCell::new(vec![Ok(1), Err(io::Error::other("too many open files"))]);
        let accept = || std::future::ready(results.borrow_mut().pop().unwrap_or(Ok(2)));
        let (first, slot) = admit(&slots, &mut failures, accept).await;
        assert_eq!(first, 1);
        let second = admit(&slots, &mut failures, accept);
        tokio::pin!(second);
        let waited = tokio::time::timeout(Duration::from_secs(60), &mut second).await;
        assert!(waited.is_err(), "no slot was free");
        drop(slot);
        assert_eq!(second.await.0, 2);
    }

    #[tokio::test(start_paused = true)]
    async fn a_lasting_problem_is_logged_every_ten_seconds() {
        let mut limit = LogLimit::default();
        assert!(limit.is_due() && !limit.is_due());
        tokio::time::advance(LOG_EVERY).await;
        assert!(limit.is_due() && !limit.is_due());
    }
}
