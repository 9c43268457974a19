//! Owns: a record of the requests through the proxy. In: requests, and the bytes of their responses. Out: a list that
//! the suites assert.

use bytes::Bytes;
use http::Method;
use keelson_harness::registry_proxy::Outcome;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

#[derive(Clone, Debug)]
pub struct ApiSeen {
    /// Index of its connection, from 0.
    pub connection: usize,
    pub http2: bool,
    pub method: Method,
    pub path: String,
    /// Empty if there is none.
    pub query: String,
    pub user_agent: String,
    pub content_type: String,
    pub accept: String,
    pub body: Bytes,
    /// Status of the response, also if the proxy made it; None before the response.
    pub status: Option<u16>,
    /// The API server was asked.
    pub forwarded: bool,
    /// Bytes of the response body sent so far.
    pub response_bytes: u64,
    pub started: Instant,
    pub answered: Option<Instant>,
    pub finished: Option<Instant>,
    pub outcome: Outcome,
}

impl ApiSeen {
    pub fn is_watch(&self) -> bool {
        self.query.split('&').any(|part| matches!(part, "watch=true" | "watch=1"))
    }
}

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

/// The entry of one request. If dropped before [`Ticket::end`], the client has disconnected.
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
