//! Owns: a record of the requests through the proxy. In: requests and the bytes sent for them. Out: counts that the
//! suites assert.

use crate::images::{Blob, BlobDigest, Image};
use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// The version check, `/v2/`.
    Ping,
    Manifest,
    /// A blob that a manifest names as a layer.
    Layer,
    /// Another blob, such as a config.
    Blob,
    Other,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    Open,
    Complete,
    /// The client disconnected before.
    Aborted,
    /// The proxy or the registry broke the connection.
    Broken,
}

#[derive(Clone, Debug)]
pub struct Seen {
    pub method: http::Method,
    pub path: String,
    pub kind: Kind,
    pub repo: Option<String>,
    pub digest: Option<BlobDigest>,
    /// The `Authorization` header. (The users of the tests are not secret.)
    pub authorization: Option<String>,
    /// Start of the requested range.
    pub range_start: Option<u64>,
    /// None before the response.
    pub status: Option<u16>,
    /// Bytes of the body sent so far.
    pub bytes: u64,
    pub started: Instant,
    pub finished: Option<Instant>,
    pub outcome: Outcome,
}

impl Seen {
    fn is_get(&self) -> bool {
        self.method == http::Method::GET
    }
}

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

    /// In the order they came.
    pub fn all(&self) -> Vec<Seen> {
        self.lock().seen.clone()
    }

    /// A mark for [`Records::since`].
    pub fn count(&self) -> usize {
        self.lock().seen.len()
    }

    pub fn since(&self, mark: usize) -> Vec<Seen> {
        self.lock().seen.iter().skip(mark).cloned().collect()
    }

    /// In the order they came.
    pub fn gets(&self, digest: &BlobDigest) -> Vec<Seen> {
        self.lock().seen.iter().filter(|s| s.is_get() && s.digest.as_ref() == Some(digest)).cloned().collect()
    }

    pub fn bytes_sent(&self, digest: &BlobDigest) -> u64 {
        self.gets(digest).iter().map(|seen| seen.bytes).sum()
    }

    /// How many times over a blob was sent: 1.0 if no byte was sent twice.
    pub fn fetches(&self, blob: &Blob) -> f64 {
        self.bytes_sent(&blob.digest) as f64 / blob.size as f64
    }

    /// How many times a blob was sent from its first byte to its last.
    pub fn full_fetches(&self, blob: &Blob) -> usize {
        self.gets(&blob.digest).iter().filter(|seen| seen.bytes >= blob.size).count()
    }

    /// Maximum of [`Records::fetches`] over the layers of an image.
    pub fn max_fetches(&self, image: &Image) -> f64 {
        image.layers.iter().map(|layer| self.fetches(layer)).fold(0.0, f64::max)
    }

    /// Maximum number of blobs sent at the same time.
    pub fn max_concurrent_blob_gets(&self) -> usize {
        self.peak(|seen| matches!(seen.kind, Kind::Layer | Kind::Blob), |all| all.len())
    }

    /// Maximum number of repositories that layers were sent from at the same time: the pulls that really ran together.
    pub fn max_concurrent_repos(&self) -> usize {
        self.peak(
            |seen| seen.kind == Kind::Layer,
            |all| all.iter().filter_map(|seen| seen.repo.as_ref()).collect::<BTreeSet<_>>().len(),
        )
    }

    /// Repositories that layers are being sent from now.
    pub fn active_repos(&self) -> BTreeSet<String> {
        let inner = self.lock();
        let open = inner.seen.iter().filter(|s| s.is_get() && s.kind == Kind::Layer && s.finished.is_none());
        open.filter_map(|seen| seen.repo.clone()).collect()
    }

    /// Repositories in the order of the first request for a manifest of each.
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
        // (moment, whether it begins, index): an end sorts before a beginning at the same moment.
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

/// The open record of one request. If dropped before [`Ticket::end`], the client disconnected.
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
    fn peaks_count_overlapping_requests() {
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
