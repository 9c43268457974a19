//! Owns: what went through the proxy. In: requests and the bytes sent for them. Out: counts that the suites assert.

use crate::images::{Blob, BlobDigest, Image};
use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// What a request was for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// The version check, `/v2/`.
    Ping,
    /// A manifest.
    Manifest,
    /// A blob that a manifest names as a layer.
    Layer,
    /// Another blob, such as a config.
    Blob,
    /// Anything else.
    Other,
}

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It has not.
    Open,
    /// The whole answer was sent.
    Complete,
    /// The client went away before.
    Aborted,
    /// The proxy broke the connection, or the registry did.
    Broken,
}

/// One request.
#[derive(Clone, Debug)]
pub struct Seen {
    /// The method.
    pub method: http::Method,
    /// The path.
    pub path: String,
    /// What it was for.
    pub kind: Kind,
    /// The repository.
    pub repo: Option<String>,
    /// The digest in the path.
    pub digest: Option<BlobDigest>,
    /// The `Authorization` header. (The users of the tests are no secret.)
    pub authorization: Option<String>,
    /// Where the range that was asked for begins.
    pub range_start: Option<u64>,
    /// The status of the answer; `None` while there is none.
    pub status: Option<u16>,
    /// How many bytes of the body were sent so far.
    pub bytes: u64,
    /// When it came.
    pub started: Instant,
    /// When it ended.
    pub finished: Option<Instant>,
    /// How it ended.
    pub outcome: Outcome,
}

impl Seen {
    fn is_get(&self) -> bool {
        self.method == http::Method::GET
    }
}

/// Everything that went through one proxy.
#[derive(Clone, Debug, Default)]
pub struct Records(Arc<Mutex<Inner>>);

#[derive(Debug, Default)]
struct Inner {
    seen: Vec<Seen>,
    layers: HashSet<BlobDigest>,
}

impl Records {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn learn_layers(&self, digests: impl IntoIterator<Item = BlobDigest>) {
        self.lock().layers.extend(digests);
    }

    pub(super) fn is_layer(&self, digest: &BlobDigest) -> bool {
        self.lock().layers.contains(digest)
    }

    pub(super) fn open(&self, seen: Seen) -> Ticket {
        let mut inner = self.lock();
        inner.seen.push(seen);
        Ticket { records: self.clone(), at: inner.seen.len() - 1, outcome: Outcome::Aborted }
    }

    /// Every request so far, in the order they came.
    pub fn all(&self) -> Vec<Seen> {
        self.lock().seen.clone()
    }

    /// How many requests came so far: a mark for [`Records::since`].
    pub fn count(&self) -> usize {
        self.lock().seen.len()
    }

    /// The requests after a mark.
    pub fn since(&self, mark: usize) -> Vec<Seen> {
        self.lock().seen.iter().skip(mark).cloned().collect()
    }

    /// The GETs of one blob, in the order they came.
    pub fn gets(&self, digest: &BlobDigest) -> Vec<Seen> {
        self.lock().seen.iter().filter(|s| s.is_get() && s.digest.as_ref() == Some(digest)).cloned().collect()
    }

    /// The bytes of a blob that were sent in all.
    pub fn bytes_sent(&self, digest: &BlobDigest) -> u64 {
        self.gets(digest).iter().map(|seen| seen.bytes).sum()
    }

    /// How many times over a blob was sent: 1.0 when no byte was sent twice.
    pub fn fetches(&self, blob: &Blob) -> f64 {
        self.bytes_sent(&blob.digest) as f64 / blob.size as f64
    }

    /// How many times a blob was sent in full from its first byte to its last.
    pub fn full_fetches(&self, blob: &Blob) -> usize {
        self.gets(&blob.digest).iter().filter(|seen| seen.bytes >= blob.size).count()
    }

    /// The most of [`Records::fetches`] among the layers of an image.
    pub fn most_fetches(&self, image: &Image) -> f64 {
        image.layers.iter().map(|layer| self.fetches(layer)).fold(0.0, f64::max)
    }

    /// How many blobs were being sent at once at the most.
    pub fn max_concurrent_blob_gets(&self) -> usize {
        self.peak(|seen| matches!(seen.kind, Kind::Layer | Kind::Blob), |all| all.len())
    }

    /// From how many repositories layers were being sent at once at the most: the pulls that really ran together.
    pub fn max_concurrent_repos(&self) -> usize {
        self.peak(
            |seen| seen.kind == Kind::Layer,
            |all| all.iter().filter_map(|seen| seen.repo.as_ref()).collect::<BTreeSet<_>>().len(),
        )
    }

    /// The repositories that layers are being sent from now.
    pub fn active_repos(&self) -> BTreeSet<String> {
        let inner = self.lock();
        let open = inner.seen.iter().filter(|s| s.is_get() && s.kind == Kind::Layer && s.finished.is_none());
        open.filter_map(|seen| seen.repo.clone()).collect()
    }

    /// The repositories in the order of the first request for a manifest of each.
    pub fn order(&self) -> Vec<String> {
        let inner = self.lock();
        let mut known = HashSet::new();
        let manifests = inner.seen.iter().filter(|seen| seen.kind == Kind::Manifest);
        manifests.filter_map(|seen| seen.repo.clone()).filter(|repo| known.insert(repo.clone())).collect()
    }

    /// The highest `measure` of the GETs that were open at the same moment.
    fn peak(&self, wanted: impl Fn(&Seen) -> bool, measure: impl Fn(&[&Seen]) -> usize) -> usize {
        let inner = self.lock();
        let gets: Vec<_> = inner.seen.iter().filter(|seen| seen.is_get() && wanted(seen)).collect();
        // (moment, whether it begins, which): an end goes before a beginning at the same moment.
        let mut moments: Vec<_> =
            gets.iter().enumerate().map(|(at, seen)| (seen.started, true, at)).collect();
        moments.extend(gets.iter().enumerate().filter_map(|(at, seen)| Some((seen.finished?, false, at))));
        moments.sort();
        let mut open: HashMap<usize, &Seen> = HashMap::new();
        let mut peak = 0;
        for (_, begins, at) in moments {
            if begins {
                open.insert(at, gets[at]);
                peak = peak.max(measure(&open.values().copied().collect::<Vec<_>>()));
            } else {
                open.remove(&at);
            }
        }
        peak
    }
}

/// The open record of one request. Dropped before [`Ticket::end`] it means that the client went away.
#[derive(Debug)]
pub(super) struct Ticket {
    records: Records,
    at: usize,
    outcome: Outcome,
}

impl Ticket {
    pub(super) fn status(&self, status: u16) {
        self.records.lock().seen[self.at].status = Some(status);
    }

    pub(super) fn sent(&self, bytes: usize) {
        self.records.lock().seen[self.at].bytes += bytes as u64;
    }

    pub(super) fn end(mut self, outcome: Outcome) {
        self.outcome = outcome;
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let mut inner = self.records.lock();
        let seen = &mut inner.seen[self.at];
        seen.finished = Some(Instant::now());
        seen.outcome = self.outcome;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn layer(repo: &str, begin: u64, end: Option<u64>, base: Instant) -> Seen {
        Seen {
            method: http::Method::GET,
            path: String::new(),
            kind: Kind::Layer,
            repo: Some(repo.to_owned()),
            digest: None,
            authorization: None,
            range_start: None,
            status: Some(200),
            bytes: 0,
            started: base + Duration::from_millis(begin),
            finished: end.map(|end| base + Duration::from_millis(end)),
            outcome: Outcome::Complete,
        }
    }

    #[test]
    fn peaks_count_what_overlaps() {
        let base = Instant::now();
        let records = Records::default();
        records.lock().seen = vec![
            layer("a", 0, Some(10), base),
            layer("a", 5, Some(20), base),
            layer("b", 10, Some(30), base),
            layer("c", 30, None, base),
            layer("d", 40, Some(50), base),
        ];
        assert_eq!(records.max_concurrent_blob_gets(), 2, "a ends when b begins, b when c begins");
        assert_eq!(records.max_concurrent_repos(), 2, "a and b, then c and d");
        assert_eq!(records.active_repos(), BTreeSet::from(["c".to_owned()]));
    }
}
