//! Whether the downloads of running pulls progress, wait or hang, decided without I/O.
//!
//! Owns: earlier readings of every unfinished blob (containerd: ingest). In: the running pulls and a reading of the
//! runtime's downloads. Out: one [`Download`] for each of these pulls.
//!
//! containerd 2 opens the ingest of a blob first and waits for its limit on downloads (`max_concurrent_downloads`, one
//! semaphore for the whole daemon, first come, first served) afterwards. An ingest that does not grow therefore either
//! holds a download and hangs, or waits. containerd does not report which. It is known to hold one if
//!
//! - no other pull has an ingest that could hold one, or
//! - it grew before, and no other ingest began to grow since it stopped: it cannot have released its download, or
//! - an ingest that appeared after it stopped has grown: that one asked later and was served, or
//! - none of the others has ever grown, and this pull was first.
//!
//! In every other case it may wait, and waiting is not a stall.

use std::{
    collections::{BTreeMap, HashMap},
    time::Duration,
};

use super::types::{Download, Ingest, Readings};
use crate::request::PullId;

/// Minimum age difference at which the younger ingest is known to have asked later: containerd may be interrupted
/// between opening the ingest and asking for a download.
const ASKED_LATER: Duration = Duration::from_secs(2);
/// An ingest of no running pull that does not grow for this long was left behind by an earlier pull.
const LEFT_BEHIND: Duration = Duration::from_secs(60);

/// With the attempt.
pub(super) type PullKey = (PullId, u32);

#[derive(Debug, Clone)]
pub(super) struct RunningPull {
    pub(super) key: PullKey,
    pub(super) lease: String,
    /// Of this attempt, Unix milliseconds.
    pub(super) started_unix_ms: i64,
}

#[derive(Debug, Clone)]
struct Tracked {
    /// The oldest pull that needs it: that one downloads it.
    owner: Option<PullKey>,
    /// It was begun by its owner, and not left behind by an earlier pull.
    is_fresh: bool,
    first_seen: Duration,
    offset: u64,
    /// When its owner was first seen to write to it.
    began: Option<Duration>,
    /// When it was last seen to grow, or else first seen.
    last_progress: Duration,
}

impl Tracked {
    fn new(ingest: Ingest, now: Duration) -> Self {
        Self {
            owner: None,
            is_fresh: false,
            first_seen: now,
            offset: ingest.offset,
            began: None,
            last_progress: now,
        }
    }

    fn read(&mut self, ingest: Ingest, owner: Option<&RunningPull>, now: Duration) {
        if ingest.offset != self.offset {
            self.offset = ingest.offset;
            self.began.get_or_insert(now);
            self.last_progress = now;
        }
        let Some(pull) = owner.filter(|pull| self.owner != Some(pull.key)) else {
            self.owner = owner.map(|pull| pull.key);
            return;
        };
        let is_fresh = self.owner.is_none() && ingest.started_unix_ms >= pull.started_unix_ms;
        if !is_fresh {
            // Taken over from another pull or from an ended attempt: nothing is known of the new one.
            *self = Self::new(ingest, now);
        } else if ingest.offset > 0 {
            self.began.get_or_insert(self.first_seen);
        }
        self.is_fresh = is_fresh;
        self.owner = Some(pull.key);
    }
}

#[derive(Debug, Default)]
pub(super) struct DownloadTracker {
    ingests: HashMap<String, Tracked>,
    first_read: HashMap<PullKey, Duration>,
    /// The latest time at which any ingest began to grow.
    last_began: Duration,
    /// The latest time at which an ingest appeared that grew since.
    last_served: Option<Duration>,
}

impl DownloadTracker {
    /// Processes a reading. `running` is ordered by start; the result has the same order.
    pub(super) fn observe(
        &mut self,
        running: &[RunningPull],
        readings: &Readings,
        now: Duration,
    ) -> Vec<Download> {
        self.update(running, readings, now);
        let first_read = &mut self.first_read;
        first_read.retain(|key, _| running.iter().any(|pull| pull.key == *key));
        for pull in running {
            first_read.entry(pull.key).or_insert(now);
        }
        running.iter().enumerate().map(|(order, _)| self.classify(order, running, readings, now)).collect()
    }

    fn update(&mut self, running: &[RunningPull], readings: &Readings, now: Duration) {
        let mut owners: BTreeMap<&str, &RunningPull> = BTreeMap::new();
        for pull in running {
            let reading = readings.pulls.get(&pull.lease);
            for reference in reading.into_iter().flat_map(|reading| &reading.refs) {
                owners.entry(reference).or_insert(pull);
            }
        }
        self.ingests.retain(|reference, _| readings.ingests.contains_key(reference));
        for (reference, ingest) in &readings.ingests {
            let tracked = self.ingests.entry(reference.clone()).or_insert_with(|| Tracked::new(*ingest, now));
            tracked.read(*ingest, owners.get(reference.as_str()).copied(), now);
            if let Some(began) = tracked.began {
                self.last_began = self.last_began.max(began);
                if tracked.is_fresh {
                    self.last_served = self.last_served.max(Some(tracked.first_seen));
                }
            }
        }
    }

    fn classify(
        &self,
        order: usize,
        running: &[RunningPull],
        readings: &Readings,
        now: Duration,
    ) -> Download {
        let Some(pull) = running.get(order) else { return Download::Unknown };
        let Some(reading) = readings.pulls.get(&pull.lease) else { return Download::Unknown };
        let first_read = self.first_read.get(&pull.key).copied().unwrap_or(now);
        let mine = |reference: &str, tracked: &Tracked| match reading.has_manifest {
            true => tracked.owner == Some(pull.key),
            // It is unknown which of the manifests under way belongs to this pull: it may be any.
            false => tracked.owner.is_none() && is_manifest(reference) && tracked.last_progress >= first_read,
        };
        let (own, others): (Vec<_>, Vec<_>) =
            self.ingests.iter().partition(|(reference, tracked)| mine(reference, tracked));
        let has_moved =
            |reference: &String| self.ingests.get(reference).is_some_and(|one| one.last_progress == now);
        if reading.refs.iter().any(has_moved) || own.iter().any(|(_, tracked)| tracked.last_progress == now) {
            return Download::Moving;
        }
        if reading.has_manifest && own.is_empty() {
            return if reading.refs.is_empty() { Download::Unknown } else { Download::Waiting };
        }
        let is_resolving =
            |one: &RunningPull| readings.pulls.get(&one.lease).is_some_and(|reading| !reading.has_manifest);
        if !reading.has_manifest && !own.is_empty() && running.iter().take(order).any(is_resolving) {
            return Download::Waiting;
        }
        let own = || own.iter().map(|(_, tracked)| *tracked);
        let since =
            own().map(|tracked| tracked.last_progress).chain((!reading.has_manifest).then_some(first_read));
        let since = since.max().unwrap_or(now);
        let first = own().map(|tracked| tracked.first_seen).min().unwrap_or(first_read).min(since);
        let others: Vec<&Tracked> =
            others.into_iter().map(|(_, tracked)| tracked).filter(|other| other.is_in_use(now)).collect();
        let has_grown = own().any(|tracked| tracked.began.is_some());
        // A resumed ingest is read first, which may take long, and asks for its download afterwards.
        let asked_at_once = has_grown || !reading.has_manifest || own().any(|tracked| tracked.is_fresh);
        let is_before = |other: &Tracked| {
            let of_other = running.iter().position(|one| Some(one.key) == other.owner);
            (other.first_seen, of_other) < (first, Some(order))
        };
        let holds = others.is_empty()
            || (has_grown && self.last_began <= since)
            || (asked_at_once && self.last_served.is_some_and(|served| served > since + ASKED_LATER))
            || (!has_grown && !others.iter().any(|other| other.began.is_some() || is_before(other)));
        if holds { Download::Idle } else { Download::Waiting }
    }
}

impl Tracked {
    /// Whether it may hold a download: a running pull needs it, or another client downloads it.
    fn is_in_use(&self, now: Duration) -> bool {
        self.owner.is_some() || (self.began.is_some() && now.saturating_sub(self.last_progress) < LEFT_BEHIND)
    }
}

/// Names of ingests of manifests and indexes in containerd.
fn is_manifest(reference: &str) -> bool {
    reference.starts_with("manifest-") || reference.starts_with("index-")
}

#[cfg(test)]
mod tests;
