//! What readers follow.
//!
//! Owns: [`Published`], a state at one revision, [`History`], which Services changed at which revision, and
//! [`EndpointsFeed`], both together. In: revisions of the EndpointPublisher. Out: immutable states: a reader that takes a
//! long time with one keeps no more of it than what later states do not share.

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
    /// A `localnetv1.NextItem` with nothing but `Endpoints`; the same bytes are a `keelson.endpoints.v1.WatchItem`
    /// with `set`.
    pub message: Bytes,
    /// The revision at which it became so.
    pub rev: u64,
}

/// Whether a state is the newest there is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Freshness {
    /// As far as is known.
    Current,
    /// The source cannot be asked: this is what was last heard of.
    Stale {
        /// Why, in a sentence that does not change while nothing changes.
        reason: Arc<str>,
        /// Since when, in Unix milliseconds.
        since_unix_ms: i64,
    },
}

#[derive(Debug, Clone)]
pub struct Published {
    /// Random, as old as the state on disk; never 0.
    pub instance_id: u64,
    pub rev: u64,
    /// Every Service, in the order of their names.
    pub services: RedBlackTreeMapSync<ServiceName, Item>,
    pub node: Arc<NodeInfo>,
    /// Whether there may be a newer state.
    pub freshness: Freshness,
    /// When the oldest change that led to this revision was made, in Unix milliseconds, if it is known.
    pub triggered_unix_ms: Option<i64>,
    /// Bytes of all Services.
    pub bytes: u64,
    /// Bytes of the Services that were replaced or deleted since the process started. Two states keep no more than the
    /// difference between theirs that they do not share.
    pub replaced: u64,
}

#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Changes {
    /// Services that were set or deleted; which of both says the newer state.
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
    /// Everything after this revision is known.
    since: u64,
    kept: VecDeque<Entry>,
    /// Names in `kept`.
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
    /// An empty one with a maximum number of revisions and of names in them. A revision with more names than that
    /// is not kept at all: who is behind it gets the whole state, which is then no larger.
    #[must_use]
    pub fn new(most_revs: usize, most_names: usize) -> Arc<Self> {
        Arc::new(Self { entries: Mutex::default(), most_revs, most_names })
    }

    fn entries(&self) -> std::sync::MutexGuard<'_, Entries> {
        // Nothing in here panics half way.
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Forgets everything; changes after `rev` of `instance_id` will be noted.
    pub fn restart(&self, instance_id: u64, rev: u64) {
        *self.entries() = Entries { instance_id, since: rev, ..Entries::default() };
    }

    /// Notes what changed at `rev`, which follows the one noted before. To be called before the state is published.
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

    /// What changed after revision `from`, up to and with `to`; none when that is not known.
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

/// Where readers find the newest state. Cheap to clone.
#[derive(Debug, Clone)]
pub struct EndpointsFeed {
    /// None until there is a state that may be served.
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
    fn changes_add_up_from_where_a_reader_was() {
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
    fn what_is_kept_is_bounded_in_revisions_and_in_names() {
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
