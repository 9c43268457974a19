//! Who follows the endpoints.
//!
//! Owns: [`Watchers`], every call that is being served, and [`Watching`], one call's place among them. In: calls as they
//! come, and what they are sent. Out: a place or a refusal, and the list for whoever looks inside.

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::{SystemTime, UNIX_EPOCH},
};

use keelson_actors::endpoints::EndpointsFeed;
use keelson_proto::endpoints::Watcher;

use super::{
    connection::Peer,
    metrics::{ApiLabel, ServerMetrics},
    plan::{Position, behind},
};

/// Every call that is being served. Cheap to clone: all clones are one.
#[derive(Debug, Clone)]
pub struct Watchers {
    feed: EndpointsFeed,
    metrics: ServerMetrics,
    most: usize,
    calls: Arc<Mutex<Calls>>,
}

#[derive(Debug, Default)]
struct Calls {
    last_id: u64,
    all: BTreeMap<u64, Arc<Call>>,
}

#[derive(Debug)]
struct Call {
    peer: Arc<Peer>,
    api: &'static str,
    since_unix_ms: i64,
    at: Mutex<Option<Position>>,
    items: AtomicU64,
    bytes: AtomicU64,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing in here panics half way.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Watchers {
    pub(super) fn new(feed: EndpointsFeed, metrics: ServerMetrics, most: usize) -> Self {
        Self { feed, metrics, most, calls: Arc::default() }
    }

    /// A place for a call, unless its listener has as many as there may be: callers at a port that is open to everybody take
    /// no place at a socket.
    pub(super) fn admit(&self, peer: Arc<Peer>, api: &'static str, at: Option<Position>) -> Option<Watching> {
        let mut calls = lock(&self.calls);
        let beside = calls.all.values().filter(|call| call.peer.listener == peer.listener).count();
        if beside >= self.most {
            self.metrics.refused.inc();
            return None;
        }
        calls.last_id += 1;
        let id = calls.last_id;
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let call = Arc::new(Call {
            peer,
            api,
            since_unix_ms: i64::try_from(since.as_millis()).unwrap_or(i64::MAX),
            at: Mutex::new(at),
            items: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
        });
        calls.all.insert(id, call.clone());
        drop(calls);
        self.metrics.watchers.get_or_create(&ApiLabel { api }).inc();
        Some(Watching { id, call, watchers: self.clone() })
    }

    /// The calls that are being served, oldest first; those of Next that wait are among them.
    #[must_use]
    pub fn list(&self) -> Vec<Watcher> {
        let newest = self.feed.published.borrow().as_deref().map(Position::of);
        let calls: Vec<_> = lock(&self.calls).all.iter().map(|(id, call)| (*id, call.clone())).collect();
        calls.into_iter().map(|(id, call)| call.show(id, newest)).collect()
    }

    /// How many there are, and how many there may be at each listener.
    #[must_use]
    pub fn count(&self) -> (usize, usize) {
        (lock(&self.calls).all.len(), self.most)
    }
}

impl Call {
    fn show(&self, id: u64, newest: Option<Position>) -> Watcher {
        let at = *lock(&self.at);
        let comparable = |at: &Position| newest.is_none_or(|newest| newest.instance_id == at.instance_id);
        Watcher {
            id,
            peer: self.peer.name.clone(),
            listener: self.peer.listener.to_string(),
            api: self.api.to_owned(),
            since_unix_ms: self.since_unix_ms,
            rev: at.filter(comparable).map_or(0, |at| at.rev),
            behind: behind(at, newest),
            items: self.items.load(Ordering::Relaxed),
            bytes: self.bytes.load(Ordering::Relaxed),
        }
    }
}

/// One call's place, given back when dropped.
#[derive(Debug)]
pub(super) struct Watching {
    id: u64,
    call: Arc<Call>,
    watchers: Watchers,
}

impl Watching {
    /// These were handed to the connection.
    pub(super) fn sent(&self, items: u64, bytes: u64) {
        self.call.items.fetch_add(items, Ordering::Relaxed);
        self.call.bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// A state was handed over whole.
    pub(super) fn reached(&self, position: Position) {
        *lock(&self.call.at) = Some(position);
    }
}

impl Drop for Watching {
    fn drop(&mut self) {
        lock(&self.watchers.calls).all.remove(&self.id);
        self.watchers.metrics.watchers.get_or_create(&ApiLabel { api: self.call.api }).dec();
    }
}
