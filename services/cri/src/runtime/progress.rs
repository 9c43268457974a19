//! Progress of pulls, from containerd's content API.
//!
//! Owns: what is known of manifests and blobs. In: the leases of running pulls. Out: [`Readings`]: every
//! ingest of the runtime, and for each known lease the progress of its pull and which ingests are its own.
//! A pull's lease lists the blobs it has and the ingests it writes; the manifest among those blobs
//! gives the number of bytes and layers. Every blob is read at most once, and only small ones.
//!
//! A lease belongs to an image and a handler. After a tag has moved it may hold two manifests: the one whose blobs
//! were written last is that of the running pull; until a blob is written, the one that arrived last.

use std::{
    collections::{HashMap, HashSet},
    time::Duration,
};

use keelson_proto::containerd::{
    content::{InfoRequest, ListStatusesRequest, ReadContentRequest, content_client::ContentClient},
    leases::{ListResourcesRequest, leases_client::LeasesClient},
};
use keelson_pulls::runtime::{Ingest, Phase, Progress, PullReading, Readings};
use serde::Deserialize;
use tokio::time::Instant;
use tonic::{Code, Status, transport::Channel};

use super::leases::in_namespace;

/// Larger blobs are layers, not manifests (limit for manifests in the distribution specification).
const MAX_MANIFEST: i64 = 4 * 1024 * 1024;

/// How long the data of an unreferenced blob is kept.
const FORGET_AFTER: Duration = Duration::from_secs(60);

#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
struct Manifest {
    config: Blob,
    layers: Vec<Blob>,
}

#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
struct Blob {
    digest: String,
    size: u64,
}

/// A timestamp of containerd, in Unix milliseconds.
type At = i64;

/// A manifest in the content store.
#[derive(Debug, Clone)]
struct Known {
    manifest: Manifest,
    /// The latest sign of use by a pull: its arrival, or a write to one of its blobs.
    used: At,
    arrived: At,
}

/// The ingests of all blobs, by digest: the ref, and what is known.
type ByDigest<'a> = HashMap<&'a str, (&'a str, Ingest, At)>;

pub(super) struct ProgressReader {
    content: ContentClient<Channel>,
    leases: LeasesClient<Channel>,
    /// By digest; `None`: not a manifest.
    blobs: HashMap<String, Option<Known>>,
    /// Layers that are complete although the lease does not list them: they existed before.
    present: HashSet<String>,
    /// When a reading last referred to a blob.
    seen: HashMap<String, Instant>,
}

impl ProgressReader {
    pub(super) fn new(channel: Channel) -> Self {
        Self {
            content: ContentClient::new(channel.clone()),
            leases: LeasesClient::new(channel),
            blobs: HashMap::new(),
            present: HashSet::new(),
            seen: HashMap::new(),
        }
    }

    /// A call without effect, to find out whether the runtime has a content API.
    pub(super) fn ask(&self) -> impl Future<Output = Result<(), Status>> + use<> {
        let none = ListStatusesRequest { filters: vec!["ref==keelson-probe".into()] };
        let mut content = self.content.clone();
        async move { content.list_statuses(in_namespace(none)).await.map(drop) }
    }

    /// Reads all ingests, and what belongs to these leases. An unreadable lease does not prevent the reading of others.
    pub(super) async fn read(&mut self, leases: Vec<String>) -> Result<(Readings, Option<Status>), Status> {
        let all =
            self.content.list_statuses(in_namespace(ListStatusesRequest { filters: Vec::new() })).await?;
        let statuses = all.into_inner().statuses;
        let mut readings = Readings::default();
        let mut by_digest = ByDigest::new();
        for status in &statuses {
            let ingest = Ingest {
                offset: u64::try_from(status.offset).unwrap_or(0),
                started_unix_ms: unix_ms(status.started_at.as_ref()),
            };
            readings.ingests.insert(status.r#ref.clone(), ingest);
            let updated = unix_ms(status.updated_at.as_ref());
            by_digest.insert(digest_of(&status.r#ref), (&status.r#ref, ingest, updated));
        }
        let (mut seen, mut failed) = (HashSet::new(), None);
        for lease in leases {
            match self.of_lease(&lease, &by_digest, &mut seen).await {
                Ok(Some(reading)) => drop(readings.pulls.insert(lease, reading)),
                Ok(None) => {}
                Err(status) => failed = Some(status),
            }
        }
        // Data that no running pull refers to is dropped, but not at once: a reading need not cover all pulls.
        let now = Instant::now();
        self.seen.extend(seen.into_iter().map(|digest| (digest, now)));
        self.seen.retain(|_, at| now.duration_since(*at) < FORGET_AFTER);
        self.blobs.retain(|digest, _| self.seen.contains_key(digest));
        self.present.retain(|digest| self.seen.contains_key(digest));
        Ok((readings, failed))
    }

    async fn of_lease(
        &mut self,
        lease: &str,
        ingests: &ByDigest<'_>,
        seen: &mut HashSet<String>,
    ) -> Result<Option<PullReading>, Status> {
        let list = ListResourcesRequest { id: lease.to_owned() };
        let resources = match self.leases.list_resources(in_namespace(list)).await {
            Ok(resources) => resources.into_inner().resources,
            // Between two pulls, or not created yet.
            Err(status) if status.code() == Code::NotFound => return Ok(None),
            Err(status) => return Err(status),
        };
        let content = resources.into_iter().filter(|resource| resource.r#type == "content");
        let complete: HashSet<String> = content.map(|resource| resource.id).collect();
        for digest in &complete {
            seen.insert(digest.clone());
            self.learn(digest, &complete).await?;
        }
        let Some(manifest) = self.manifest_in_use(&complete, ingests) else {
            return Ok(Some(PullReading::default()));
        };
        for blob in manifest.blobs() {
            seen.insert(blob.digest.clone());
            if !complete.contains(&blob.digest) && !ingests.contains_key(blob.digest.as_str()) {
                self.look_for(&blob.digest).await?;
            }
        }
        let is_there = |digest: &str| complete.contains(digest) || self.present.contains(digest);
        Ok(Some(measure(&manifest, is_there, ingests)))
    }

    /// The manifest of the running pull, among those of its lease.
    fn manifest_in_use(&mut self, complete: &HashSet<String>, ingests: &ByDigest<'_>) -> Option<Manifest> {
        let mut newest: Option<(At, At, &str)> = None;
        for digest in complete {
            let Some(Some(known)) = self.blobs.get_mut(digest) else { continue };
            let written = known.manifest.blobs().filter_map(|blob| ingests.get(blob.digest.as_str()));
            let written = written.map(|(_, _, updated)| *updated).max();
            known.used = known.used.max(written.unwrap_or(known.used));
            newest = newest.max(Some((known.used, known.arrived, digest)));
        }
        let (_, _, digest) = newest?;
        self.blobs.get(digest).and_then(Option::as_ref).map(|known| known.manifest.clone())
    }

    /// Determines once whether this blob is a manifest.
    async fn learn(&mut self, digest: &str, complete: &HashSet<String>) -> Result<(), Status> {
        if self.blobs.contains_key(digest) {
            return Ok(());
        }
        let has_layer = |known: &Known| known.manifest.layers.iter().any(|layer| layer.digest == digest);
        let is_layer = complete.iter().filter_map(|other| self.blobs.get(other)).flatten().any(has_layer);
        let known = if is_layer { None } else { self.fetch(digest).await? };
        self.blobs.insert(digest.to_owned(), known);
        Ok(())
    }

    async fn fetch(&mut self, digest: &str) -> Result<Option<Known>, Status> {
        let Some((size, arrived)) = self.info(digest).await? else { return Ok(None) };
        if size > MAX_MANIFEST {
            return Ok(None);
        }
        let request = ReadContentRequest { digest: digest.to_owned(), offset: 0, size: 0 };
        let mut stream = self.content.read(in_namespace(request)).await?.into_inner();
        let mut bytes = Vec::new();
        while let Some(piece) = stream.message().await? {
            bytes.extend_from_slice(&piece.data);
        }
        let manifest = serde_json::from_slice(&bytes).ok();
        Ok(manifest.map(|manifest| Known { manifest, used: arrived, arrived }))
    }

    /// Size and time of arrival of a complete blob.
    async fn info(&mut self, digest: &str) -> Result<Option<(i64, At)>, Status> {
        match self.content.info(in_namespace(InfoRequest { digest: digest.to_owned() })).await {
            Ok(info) => Ok(info.into_inner().info.map(|info| (info.size, unix_ms(info.created_at.as_ref())))),
            Err(status) if status.code() == Code::NotFound => Ok(None),
            Err(status) => Err(status),
        }
    }

    async fn look_for(&mut self, digest: &str) -> Result<(), Status> {
        if !self.present.contains(digest) && self.info(digest).await?.is_some() {
            self.present.insert(digest.to_owned());
        }
        Ok(())
    }
}

impl Manifest {
    /// The layers and the config.
    fn blobs(&self) -> impl Iterator<Item = &Blob> {
        self.layers.iter().chain([&self.config])
    }
}

fn unix_ms(at: Option<&prost_types::Timestamp>) -> At {
    at.map_or(0, |at| at.seconds.saturating_mul(1000).saturating_add(i64::from(at.nanos) / 1_000_000))
}

/// containerd names an ingest after the kind of the blob and its digest, such as `layer-sha256:..`; a name from
/// the annotation `org.opencontainers.image.ref.name` may be between them, followed by `@`.
fn digest_of(reference: &str) -> &str {
    reference.rsplit(['-', '@']).next().unwrap_or(reference)
}

fn measure(manifest: &Manifest, complete: impl Fn(&str) -> bool, ingests: &ByDigest<'_>) -> PullReading {
    let mut progress = Progress {
        layers_total: u32::try_from(manifest.layers.len()).unwrap_or(u32::MAX),
        ..Progress::default()
    };
    let mut refs = Vec::new();
    for blob in manifest.blobs() {
        progress.bytes_total = progress.bytes_total.saturating_add(blob.size);
        if complete(&blob.digest) {
            progress.bytes_done = progress.bytes_done.saturating_add(blob.size);
        } else if let Some((reference, ingest, _)) = ingests.get(blob.digest.as_str()) {
            refs.push((*reference).to_owned());
            progress.bytes_done = progress.bytes_done.saturating_add(ingest.offset.min(blob.size));
        }
    }
    let done = manifest.layers.iter().filter(|layer| complete(&layer.digest)).count();
    progress.layers_done = u32::try_from(done).unwrap_or(u32::MAX);
    // The runtime needs the config before it unpacks. After that, layers that neither exist nor are being written are
    // not fetched at all: their snapshots exist (containerd `discard_unpacked_layers`).
    progress.phase = match (refs.is_empty(), complete(&manifest.config.digest)) {
        (false, _) => Phase::Downloading,
        (true, true) => Phase::Unpacking,
        (true, false) if done == manifest.layers.len() => Phase::Unpacking,
        (true, false) => Phase::Resolving,
    };
    PullReading { progress, has_manifest: true, refs }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn manifest() -> Manifest {
        let json = r#"{"schemaVersion":2,"config":{"digest":"sha256:c","size":10,"mediaType":"x"},
            "layers":[{"digest":"sha256:a","size":100},{"digest":"sha256:b","size":300}]}"#;
        serde_json::from_str(json).expect("a manifest")
    }

    #[test]
    fn an_index_is_not_a_manifest() {
        assert!(
            serde_json::from_str::<Manifest>(r#"{"manifests":[{"digest":"sha256:a","size":1}]}"#).is_err()
        );
    }

    /// I3: a layer that neither exists nor is being written is not a download.
    #[test]
    fn phases_and_bytes() {
        let measured = |complete: &[&str], ingests: &[(&'static str, u64)]| {
            let ingest = |offset| Ingest { offset, started_unix_ms: 0 };
            let ingests =
                ingests.iter().map(|(name, bytes)| (digest_of(name), (*name, ingest(*bytes), 0))).collect();
            let reading = measure(&manifest(), |digest| complete.contains(&digest), &ingests);
            let Progress { phase, bytes_done, layers_done, .. } = reading.progress;
            (phase, bytes_done, layers_done, reading.refs.len())
        };
        let (a, b, c) = ("sha256:a", "sha256:b", "sha256:c");
        assert_eq!(measured(&[], &[]), (Phase::Resolving, 0, 0, 0));
        assert_eq!(measured(&[], &[("config-sha256:c", 3)]), (Phase::Downloading, 3, 0, 1));
        assert_eq!(measured(&[c], &[("layer-sha256:a", 40)]), (Phase::Downloading, 50, 0, 1));
        assert_eq!(measured(&[c, a], &[("layer-name-x@sha256:b", 999)]), (Phase::Downloading, 410, 1, 1));
        assert_eq!(
            measured(&[c, a], &[("layer-sha256:z", 1)]),
            (Phase::Unpacking, 110, 1, 0),
            "b is discarded"
        );
        assert_eq!(measured(&[c, a, b], &[]), (Phase::Unpacking, 410, 2, 0));
        let total = measure(&manifest(), |_| false, &ByDigest::new()).progress;
        assert_eq!((total.bytes_total, total.layers_total), (410, 2));
    }
}
