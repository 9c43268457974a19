//! How far pulls are, from containerd's content API.
//!
//! Owns: what was learned of manifests and blobs. In: the leases of running pulls. Out: a
//! [`Progress`] for each of which something is known. A pull's lease lists the blobs it has and the
//! ingests it writes; the manifest among those blobs says how many bytes and layers there will be.
//! Every blob is read at most once, and only small ones.

use std::collections::{HashMap, HashSet};

use keelson_actors::runtime::{Phase, Progress};
use keelson_proto::containerd::{
    content::{InfoRequest, ListStatusesRequest, ReadContentRequest, content_client::ContentClient},
    leases::{ListResourcesRequest, leases_client::LeasesClient},
};
use serde::Deserialize;
use tonic::{Code, Status, transport::Channel};

use super::leases::{answers, in_namespace};

/// Larger blobs are layers, not manifests (the distribution specification's limit for manifests).
const MAX_MANIFEST: i64 = 4 * 1024 * 1024;

/// A manifest, as far as it matters here.
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

/// Bytes written so far, by ingest ref.
type Ingests = HashMap<String, u64>;

pub(super) struct ProgressReader {
    content: ContentClient<Channel>,
    leases: LeasesClient<Channel>,
    /// By digest; `None`: it is no manifest.
    blobs: HashMap<String, Option<Manifest>>,
    /// Layers that are complete although the lease does not list them: they were there before.
    there: HashSet<String>,
}

impl ProgressReader {
    pub(super) fn new(channel: Channel) -> Self {
        Self {
            content: ContentClient::new(channel.clone()),
            leases: LeasesClient::new(channel),
            blobs: HashMap::new(),
            there: HashSet::new(),
        }
    }

    /// Whether the runtime has a content API at all.
    pub(super) async fn supported(&mut self) -> Result<bool, Status> {
        let none = ListStatusesRequest { filters: vec!["ref==keelson-probe".into()] };
        answers(self.content.list_statuses(in_namespace(none)).await)
    }

    pub(super) async fn read(&mut self, leases: Vec<String>) -> Result<Vec<(String, Progress)>, Status> {
        let all =
            self.content.list_statuses(in_namespace(ListStatusesRequest { filters: Vec::new() })).await?;
        let ingests: Ingests = all
            .into_inner()
            .statuses
            .into_iter()
            .map(|status| (status.r#ref, u64::try_from(status.offset).unwrap_or(0)))
            .collect();
        let mut read = Vec::with_capacity(leases.len());
        let mut seen = HashSet::new();
        for lease in leases {
            if let Some(progress) = self.of_lease(&lease, &ingests, &mut seen).await? {
                read.push((lease, progress));
            }
        }
        // What no running pull refers to is forgotten.
        self.blobs.retain(|digest, _| seen.contains(digest));
        self.there.retain(|digest| seen.contains(digest));
        Ok(read)
    }

    async fn of_lease(
        &mut self,
        lease: &str,
        ingests: &Ingests,
        seen: &mut HashSet<String>,
    ) -> Result<Option<Progress>, Status> {
        let list = ListResourcesRequest { id: lease.to_owned() };
        let resources = match self.leases.list_resources(in_namespace(list)).await {
            Ok(resources) => resources.into_inner().resources,
            // Between two pulls, or not made yet.
            Err(status) if status.code() == Code::NotFound => return Ok(None),
            Err(status) => return Err(status),
        };
        let mut complete = HashSet::new();
        for resource in resources.into_iter().filter(|resource| resource.r#type == "content") {
            complete.insert(resource.id);
        }
        let mut manifest = None;
        for digest in &complete {
            seen.insert(digest.clone());
            let known = self.manifest(digest, &complete).await?;
            manifest = manifest.or(known);
        }
        let Some(manifest) = manifest else { return Ok(Some(Progress::default())) };
        for layer in &manifest.layers {
            seen.insert(layer.digest.clone());
            if !complete.contains(&layer.digest) && ingest(ingests, &layer.digest).is_none() {
                self.look_for(&layer.digest).await?;
            }
        }
        Ok(Some(measure(
            &manifest,
            |digest| complete.contains(digest) || self.there.contains(digest),
            ingests,
        )))
    }

    /// The manifest that this blob is, if it is one.
    async fn manifest(
        &mut self,
        digest: &str,
        complete: &HashSet<String>,
    ) -> Result<Option<Manifest>, Status> {
        if let Some(known) = self.blobs.get(digest) {
            return Ok(known.clone());
        }
        let known_layer = |manifest: &Manifest| manifest.layers.iter().any(|layer| layer.digest == digest);
        let is_layer = complete.iter().filter_map(|other| self.blobs.get(other)).flatten().any(known_layer);
        let manifest = if is_layer { None } else { self.fetch(digest).await? };
        self.blobs.insert(digest.to_owned(), manifest.clone());
        Ok(manifest)
    }

    async fn fetch(&mut self, digest: &str) -> Result<Option<Manifest>, Status> {
        let Some(size) = self.size(digest).await? else { return Ok(None) };
        if size > MAX_MANIFEST {
            return Ok(None);
        }
        let request = ReadContentRequest { digest: digest.to_owned(), offset: 0, size: 0 };
        let mut stream = self.content.read(in_namespace(request)).await?.into_inner();
        let mut bytes = Vec::new();
        while let Some(piece) = stream.message().await? {
            bytes.extend_from_slice(&piece.data);
        }
        Ok(serde_json::from_slice(&bytes).ok())
    }

    async fn size(&mut self, digest: &str) -> Result<Option<i64>, Status> {
        match self.content.info(in_namespace(InfoRequest { digest: digest.to_owned() })).await {
            Ok(info) => Ok(info.into_inner().info.map(|info| info.size)),
            Err(status) if status.code() == Code::NotFound => Ok(None),
            Err(status) => Err(status),
        }
    }

    async fn look_for(&mut self, digest: &str) -> Result<(), Status> {
        if !self.there.contains(digest) && self.size(digest).await?.is_some() {
            self.there.insert(digest.to_owned());
        }
        Ok(())
    }
}

/// containerd names a layer's ingest after its digest.
fn ingest(ingests: &Ingests, digest: &str) -> Option<u64> {
    ingests.get(&format!("layer-{digest}")).copied()
}

fn measure(manifest: &Manifest, complete: impl Fn(&str) -> bool, ingests: &Ingests) -> Progress {
    let mut progress = Progress {
        layers_total: u32::try_from(manifest.layers.len()).unwrap_or(u32::MAX),
        ..Progress::default()
    };
    let mut downloading = false;
    for blob in manifest.layers.iter().chain([&manifest.config]) {
        progress.bytes_total = progress.bytes_total.saturating_add(blob.size);
        if complete(&blob.digest) {
            progress.bytes_done = progress.bytes_done.saturating_add(blob.size);
        } else if let Some(offset) = ingest(ingests, &blob.digest) {
            downloading = true;
            progress.bytes_done = progress.bytes_done.saturating_add(offset.min(blob.size));
        }
    }
    let done = manifest.layers.iter().filter(|layer| complete(&layer.digest)).count();
    progress.layers_done = u32::try_from(done).unwrap_or(u32::MAX);
    progress.phase = match (done == manifest.layers.len(), downloading) {
        (true, _) => Phase::Unpacking,
        (false, true) => Phase::Downloading,
        (false, false) => Phase::Resolving,
    };
    progress
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
    fn an_index_is_no_manifest() {
        assert!(
            serde_json::from_str::<Manifest>(r#"{"manifests":[{"digest":"sha256:a","size":1}]}"#).is_err()
        );
    }

    #[test]
    fn phases_and_bytes() {
        let measured = |complete: &[&str], ingests: &[(&str, u64)]| {
            let ingests = ingests.iter().map(|(name, bytes)| ((*name).to_owned(), *bytes)).collect();
            let progress = measure(&manifest(), |digest| complete.contains(&digest), &ingests);
            (progress.phase, progress.bytes_done, progress.layers_done)
        };
        assert_eq!(measured(&[], &[]), (Phase::Resolving, 0, 0));
        assert_eq!(measured(&["sha256:c"], &[("layer-sha256:a", 40)]), (Phase::Downloading, 50, 0));
        assert_eq!(
            measured(&["sha256:c", "sha256:a"], &[("layer-sha256:b", 999)]),
            (Phase::Downloading, 410, 1)
        );
        assert_eq!(measured(&["sha256:c", "sha256:a", "sha256:b"], &[]), (Phase::Unpacking, 410, 2));
        let total = measure(&manifest(), |_| false, &Ingests::new());
        assert_eq!((total.bytes_total, total.layers_total), (410, 2));
    }
}
