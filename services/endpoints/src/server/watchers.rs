//! The running calls.
//!
//! Owns: [`Watchers`], every running call, and [`Watching`], one call's place among them. In: calls, and what they are
//! sent. Out: a place or a refusal, and the list for inspection.

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

use keelson_endpoint_publisher::{EndpointsFeed, Published};
use keelson_proto::{endpoints::Watcher, unix_ms};
use keelson_serve::grpc::Peer;
use tokio::time::Instant;

use super::{
    metrics::{ApiLabel, ServerMetrics},
    plan::{Revision, behind},
    slow::{self, SnapshotSize, Unread},
};

/// Every running call. Clones share state.
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
    at: Mutex<Option<Revision>>,
    items: AtomicU64,
    bytes: AtomicU64,
    reading: Mutex<Reading>,
}

#[derive(Debug, Default)]
struct Reading {
    /// When data was handed to the connection that it may not have taken yet.
    handed: Option<Instant>,
    /// When the current batch began.
    began: Option<Instant>,
    /// The snapshot of the current batch, until all of it was handed over.
    snapshot: Option<SnapshotSize>,
}

impl Reading {
    /// `None` if it has no data waiting.
    fn unread(&self, id: u64, now: Instant) -> Option<Unread> {
        let waiting = now.saturating_duration_since(self.handed?);
        let sending = self.began.map_or(waiting, |began| now.saturating_duration_since(began));
        Some(Unread { id, waiting, sending, snapshot: self.snapshot })
    }
}

fn size(state: &Published) -> SnapshotSize {
    SnapshotSize { bytes: state.bytes, replaced: state.replaced }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // No update can panic half way.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Watchers {
    pub(super) fn new(feed: EndpointsFeed, metrics: ServerMetrics, most: usize) -> Self {
        Self { feed, metrics, most, calls: Arc::default() }
    }

    /// A place for a call, unless its listener has the maximum: clients of a TCP port take no place at a unix socket.
    pub(super) fn admit(&self, peer: Arc<Peer>, api: &'static str, at: Option<Revision>) -> Option<Watching> {
        let mut calls = lock(&self.calls);
        let beside = calls.all.values().filter(|call| call.peer.listener == peer.listener).count();
        if beside >= self.most {
            self.metrics.refused.inc();
            return None;
        }
        calls.last_id += 1;
        let id = calls.last_id;
        let call = Arc::new(Call {
            peer,
            api,
            since_unix_ms: unix_ms(),
            at: Mutex::new(at),
            items: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
            reading: Mutex::default(),
        });
        calls.all.insert(id, call.clone());
        drop(calls);
        self.metrics.watchers.get_or_create(&ApiLabel { api }).inc();
        Some(Watching { id, call, watchers: self.clone() })
    }

    /// The running calls, oldest first, including waiting calls of Next.
    #[must_use]
    pub fn list(&self) -> Vec<Watcher> {
        let newest = self.feed.published.borrow().as_deref().map(Revision::of);
        let calls: Vec<_> = lock(&self.calls).all.iter().map(|(id, call)| (*id, call.clone())).collect();
        calls.into_iter().map(|(id, call)| call.show(id, newest)).collect()
    }

    /// Closes the connections of callers that do not read, and thereby retain memory.
    pub(super) fn cut_off(&self) {
        let newest = self.feed.published.borrow().as_deref().map(size).unwrap_or_default();
        let (now, calls) = (Instant::now(), lock(&self.calls));
        let open = calls.all.iter().filter(|(_, call)| !call.peer.close.is_cancelled());
        let unread = open.filter_map(|(id, call)| lock(&call.reading).unread(*id, now)).collect();
        for (id, reason) in slow::select_callers_to_close(unread, newest) {
            let Some(call) = calls.all.get(&id) else { continue };
            self.metrics.cut_off.inc();
            tracing::warn!(
                peer = call.peer.name,
                listener = &*call.peer.listener,
                api = call.api,
                reason = reason.as_str(),
                "client of the Endpoints API does not read; closing its connection"
            );
            call.peer.close.cancel();
        }
    }

    /// The number of calls, and the maximum at each listener.
    #[must_use]
    pub fn count(&self) -> (usize, usize) {
        (lock(&self.calls).all.len(), self.most)
    }
}

impl Call {
    fn show(&self, id: u64, newest: Option<Revision>) -> Watcher {
        let at = *lock(&self.at);
        let comparable = |at: &Revision| newest.is_none_or(|newest| newest.instance_id == at.instance_id);
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

/// One call's place, freed when dropped.
#[derive(Debug)]
pub(super) struct Watching {
    id: u64,
    call: Arc<Call>,
    watchers: Watchers,
}

impl Watching {
    /// A batch of this state begins.
    pub(super) fn begins(&self, state: &Published) {
        let mut reading = lock(&self.call.reading);
        (reading.began, reading.snapshot) = (Some(Instant::now()), Some(size(state)));
    }

    /// The connection asks for more: it has room for what was handed to it.
    pub(super) fn takes(&self) {
        lock(&self.call.reading).handed = None;
    }

    /// A chunk is handed to the connection; `is_last`: the last one of its batch, or of the call.
    pub(super) fn hands(&self, is_last: bool) {
        let mut reading = lock(&self.call.reading);
        reading.handed = Some(Instant::now());
        if is_last {
            (reading.began, reading.snapshot) = (None, None);
        }
    }

    pub(super) fn sent(&self, items: u64, bytes: u64) {
        self.call.items.fetch_add(items, Ordering::Relaxed);
        self.call.bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// All of a state was handed over.
    pub(super) fn reached(&self, position: Revision) {
        *lock(&self.call.at) = Some(position);
    }
}

impl Drop for Watching {
    fn drop(&mut self) {
        lock(&self.watchers.calls).all.remove(&self.id);
        self.watchers.metrics.watchers.get_or_create(&ApiLabel { api: self.call.api }).dec();
    }
}
