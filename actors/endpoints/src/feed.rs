//! The feed that readers follow.
//!
//! Owns: [`Published`], a state at one revision, [`History`], which Services changed at which revision, and
//! [`EndpointsFeed`], both together. In: revisions of the EndpointPublisher. Out: immutable states. A slow reader
//! keeps only the memory that its state does not share with later ones.

use std::{
    collections::{BTreeSet, VecDeque},
    sync::{Arc, Mutex, PoisonError},
};

use bytes::Bytes;
use keelson_proto::localnetv1::NodeInfo;
use rpds::RedBlackTreeMapSync;
use tokio::sync::watch;

use super::ServiceName;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Item {
    /// A `localnetv1.NextItem` with only `Endpoints` set; the same bytes are a `keelson.endpoints.v1.WatchItem` with
    /// `set`.
    pub message: Bytes,
    /// The revision of its last change.
    pub rev: u64,
    /// The label `service.kubernetes.io/service-proxy-name`; `None`: it has none.
    pub proxy_name: Option<Box<str>>,
}

/// [`Item::proxy_name`] of a message.
pub(super) fn proxy_name(text: &str) -> Option<Box<str>> {
    (!text.is_empty()).then(|| text.into())
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Freshness {
    /// As far as known.
    Synced,
    /// The source is unavailable or not synced: this is the last known state.
    Stale {
        /// A sentence that does not change while nothing changes.
        reason: Arc<str>,
        since_unix_ms: i64,
    },
}

#[derive(Debug, Clone)]
pub struct Published {
    /// Random, kept with the state on disk; never 0.
    pub instance_id: u64,
    pub rev: u64,
    pub services: RedBlackTreeMapSync<ServiceName, Item>,
    pub node: Arc<NodeInfo>,
    pub freshness: Freshness,
    /// When the oldest change that led to this revision was made, in Unix milliseconds, if known.
    pub triggered_unix_ms: Option<i64>,
    pub bytes: u64,
    /// Encoded size of all Services that were replaced or deleted since the process started. The difference between
    /// two states is the maximum of what they do not share.
    pub replaced: u64,
}

#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Changes {
    /// Services that were set or deleted; the newer state tells which.
    pub services: BTreeSet<ServiceName>,
    pub node: bool,
}

#[derive(Debug)]
struct Entry {
    rev: u64,
    services: Box<[ServiceName]>,
    node: bool,
}

#[derive(Debug, Default)]
struct Entries {
    instance_id: u64,
    /// All changes after this revision are known.
    since: u64,
    kept: VecDeque<Entry>,
    /// Number of names in `kept`.
    names: usize,
}

/// Which Services changed at which revision, for a bounded number of revisions and names.
#[derive(Debug)]
pub struct History {
    entries: Mutex<Entries>,
    most_revs: usize,
    most_names: usize,
}

impl History {
    /// `most_revs` and `most_names` are maxima. A revision with more names is not kept: a reader behind it gets the
    /// full state, which is no larger.
    #[must_use]
    pub fn new(most_revs: usize, most_names: usize) -> Arc<Self> {
        Arc::new(Self { entries: Mutex::default(), most_revs, most_names })
    }

    fn entries(&self) -> std::sync::MutexGuard<'_, Entries> {
        // No code panics while it holds the lock.
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Forgets everything; changes after `rev` of `instance_id` follow.
    pub fn restart(&self, instance_id: u64, rev: u64) {
        *self.entries() = Entries { instance_id, since: rev, ..Entries::default() };
    }

    /// Records what changed at `rev`, which follows the last recorded one. Call it before the state is published.
    pub fn note(&self, rev: u64, services: Vec<ServiceName>, node: bool) {
        let mut entries = self.entries();
        entries.names += services.len();
        entries.kept.push_back(Entry { rev, services: services.into(), node });
        while entries.kept.len() > self.most_revs || entries.names > self.most_names {
            let Some(oldest) = entries.kept.pop_front() else { break };
            entries.names -= oldest.services.len();
            entries.since = oldest.rev;
        }
    }

    /// What changed after revision `from`, up to and including `to`; `None` if unknown.
    #[must_use]
    pub fn between(&self, instance_id: u64, from: u64, to: u64) -> Option<Changes> {
        let entries = self.entries();
        if entries.instance_id != instance_id || from < entries.since || from > to {
            return None;
        }
        let mut changes = Changes::default();
        let first = entries.kept.partition_point(|entry| entry.rev <= from);
        for entry in entries.kept.range(first..).take_while(|entry| entry.rev <= to) {
            changes.services.extend(entry.services.iter().cloned());
            changes.node |= entry.node;
        }
        Some(changes)
    }
}

/// Cheap to clone.
#[derive(Debug, Clone)]
pub struct EndpointsFeed {
    /// `None` until there is a state that may be served.
    pub published: watch::Receiver<Option<Arc<Published>>>,
    pub history: Arc<History>,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(names: &[&str]) -> Vec<ServiceName> {
        names.iter().map(|name| ServiceName::new("ns", name)).collect()
    }

    fn changes(services: &[&str], node: bool) -> Option<Changes> {
        Some(Changes { services: names(services).into_iter().collect(), node })
    }

    #[test]
    fn changes_accumulate_from_the_revision_of_a_reader() {
        let history = History::new(10, 100);
        history.restart(7, 3);
        history.note(4, names(&["a", "b"]), false);
        history.note(5, names(&["b", "c"]), false);
        history.note(6, Vec::new(), true);
        assert_eq!(history.between(7, 3, 6), changes(&["a", "b", "c"], true));
        assert_eq!(history.between(7, 4, 5), changes(&["b", "c"], false));
        assert_eq!(history.between(7, 6, 6), changes(&[], false));
        for (instance, from) in [(8, 6), (7, 2), (7, 7), (7, 0)] {
            assert_eq!(history.between(instance, from, 6), None, "{instance} {from}");
        }
    }

    #[test]
    fn the_history_is_bounded_in_revisions_and_names() {
        let history = History::new(2, 3);
        history.restart(7, 0);
        history.note(1, names(&["a"]), false);
        history.note(2, names(&["b"]), false);
        assert_eq!(history.between(7, 0, 2), changes(&["a", "b"], false));
        history.note(3, names(&["c"]), false);
        assert_eq!(history.between(7, 0, 3), None);
        assert_eq!(history.between(7, 1, 3), changes(&["b", "c"], false));
        history.note(4, names(&["d", "e", "f"]), false);
        assert_eq!(history.between(7, 2, 4), None);
        assert_eq!(history.between(7, 3, 4), changes(&["d", "e", "f"], false));
        history.note(5, names(&["g", "h", "i", "j"]), false);
        assert_eq!(history.between(7, 4, 5), None, "more than is ever kept");
        assert_eq!(history.between(7, 5, 5), changes(&[], false));
        history.restart(8, 5);
        assert_eq!(history.between(7, 5, 5), None);
        assert_eq!(history.between(8, 5, 5), changes(&[], false));
    }
}
