//! Owns: what went through the proxy. In: requests, and the bytes of their answers. Out: a list that the suites assert.

use bytes::Bytes;
use http::Method;
use keelson_harness::registry_proxy::Outcome;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// One request.
#[derive(Clone, Debug)]
pub struct ApiSeen {
    /// Which connection it came over, counted from 0.
    pub connection: usize,
    /// Whether it came by HTTP/2.
    pub http2: bool,
    /// The method.
    pub method: Method,
    /// The path.
    pub path: String,
    /// The query; empty when there is none.
    pub query: String,
    /// The `User-Agent` header.
    pub user_agent: String,
    /// The `Content-Type` header.
    pub content_type: String,
    /// The `Accept` header.
    pub accept: String,
    /// What was sent.
    pub body: Bytes,
    /// The status of the answer, the proxy's own included; `None` while there is none.
    pub status: Option<u16>,
    /// Whether the API server was asked.
    pub forwarded: bool,
    /// How many bytes of the answer's body were sent so far.
    pub response_bytes: u64,
    /// When it came.
    pub started: Instant,
    /// When its answer began.
    pub answered: Option<Instant>,
    /// When it ended.
    pub finished: Option<Instant>,
    /// How it ended.
    pub outcome: Outcome,
}

impl ApiSeen {
    /// Whether it is a watch.
    pub fn is_watch(&self) -> bool {
        self.query.split('&').any(|part| matches!(part, "watch=true" | "watch=1"))
    }
}

/// The requests of one proxy.
#[derive(Clone, Debug, Default)]
pub(super) struct Records(Arc<Mutex<Vec<ApiSeen>>>);

impl Records {
    fn lock(&self) -> MutexGuard<'_, Vec<ApiSeen>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn all(&self) -> Vec<ApiSeen> {
        self.lock().clone()
    }

    pub(super) fn open(&self, seen: ApiSeen) -> Ticket {
        let mut list = self.lock();
        list.push(seen);
        Ticket { records: self.clone(), place: list.len() - 1 }
    }
}

/// The entry of one request. Dropped before [`Ticket::end`], the client has gone away.
#[derive(Debug)]
pub(super) struct Ticket {
    records: Records,
    place: usize,
}

impl Ticket {
    pub(super) fn change(&self, change: impl FnOnce(&mut ApiSeen)) {
        if let Some(seen) = self.records.lock().get_mut(self.place) {
            change(seen);
        }
    }

    pub(super) fn answered(&self, status: u16) {
        self.change(|seen| {
            seen.status = Some(status);
            seen.answered = Some(Instant::now());
        });
    }

    pub(super) fn end(&self, outcome: Outcome) {
        self.change(|seen| {
            if seen.finished.is_none() {
                seen.outcome = outcome;
                seen.finished = Some(Instant::now());
            }
        });
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.end(Outcome::Aborted);
    }
}
