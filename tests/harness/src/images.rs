//! Owns: images that the tests make. In: a description. Out: the image in a registry, with all digests.
//!
//! Layers are uncompressed tar files of incompressible bytes, so that their size on the wire is what the test asked
//! for. No builder is needed: blobs and manifest are pushed over the registry's HTTP API.

use crate::registry::User;
use crate::util::{Answer, http};
use anyhow::{Context as _, Result, bail};
use bytes::Bytes;
use futures_util::{StreamExt as _, TryStreamExt as _};
use http::{Method, StatusCode};
use rand::rngs::SmallRng;
use rand::{Rng as _, SeedableRng as _};
use serde_json::json;
use sha2::{Digest as _, Sha256};
use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::process::Command;

const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
const CONFIG: &str = "application/vnd.oci.image.config.v1+json";
const LAYER: &str = "application/vnd.oci.image.layer.v1.tar";

/// Size in bytes of a layer that takes some time: more than the first MiB that containerd writes unseen.
pub const LARGE: u64 = 9 << 20;

/// Size in bytes of a layer that takes no time.
pub const TINY: u64 = 1 << 10;

#[derive(Clone, Debug)]
pub enum LayerSpec {
    /// One file of random bytes. The same seed gives the same layer, and so the same digest.
    Random { bytes: u64, seed: u64 },
    /// One executable of this machine.
    Program {
        from: PathBuf,
        /// Its path in the image, without the leading slash.
        to: String,
    },
}

impl LayerSpec {
    pub fn random(bytes: u64, seed: u64) -> Self {
        Self::Random { bytes, seed }
    }

    fn tar(&self) -> Result<Vec<u8>> {
        let (name, mode, content) = match self {
            Self::Random { bytes, seed } => {
                let mut content = vec![0; usize::try_from(*bytes)?];
                SmallRng::seed_from_u64(*seed).fill_bytes(&mut content);
                // Layers of one image must not hide each other's file.
                (format!("data/{seed:016x}"), 0o644, content)
            }
            Self::Program { from, to } => (
                to.clone(),
                0o755,
                fs::read(from).with_context(|| format!("cannot read {}", from.display()))?,
            ),
        };
        let mut tar = tar::Builder::new(Vec::with_capacity(content.len() + 4096));
        let mut header = tar::Header::new_ustar();
        header.set_entry_type(tar::EntryType::Regular);
        header.set_mode(mode);
        header.set_size(content.len() as u64);
        tar.append_data(&mut header, name, content.as_slice()).context("cannot pack a layer")?;
        tar.into_inner().context("cannot pack a layer")
    }
}

#[derive(Clone, Debug)]
pub struct ImageSpec {
    /// Such as `apps/web`.
    pub repo: String,
    pub tag: String,
    /// The lowest first.
    pub layers: Vec<LayerSpec>,
    pub entrypoint: Vec<String>,
}

impl ImageSpec {
    /// An image with tag `v1` and one layer of random bytes, unique to this repository.
    pub fn single(repo: &str, bytes: u64) -> Self {
        Self::new(repo, &[bytes])
    }

    /// An image with tag `v1` and layers of these sizes in bytes, unique to this repository.
    pub fn new(repo: &str, layers: &[u64]) -> Self {
        let own = Sha256::digest(repo.as_bytes());
        let seed = own.iter().take(8).fold(0_u64, |seed, byte| seed << 8 | u64::from(*byte));
        let layers = layers.iter().zip(0..).map(|(bytes, n)| LayerSpec::random(*bytes, seed.wrapping_add(n)));
        Self { repo: repo.to_owned(), tag: "v1".to_owned(), layers: layers.collect(), entrypoint: Vec::new() }
    }

    /// An image with a static program as its only file and entrypoint.
    pub fn program(repo: &str, program: &Path, args: &[&str]) -> Self {
        let layer = LayerSpec::Program { from: program.to_owned(), to: "program".to_owned() };
        let entrypoint = std::iter::once("/program").chain(args.iter().copied()).map(str::to_owned).collect();
        Self { repo: repo.to_owned(), tag: "v1".to_owned(), layers: vec![layer], entrypoint }
    }

    /// An image with programs of this machine, by their paths in the image without the leading slash, and the libraries that they are
    /// linked to.
    pub fn with_libraries(repo: &str, programs: &[(&Path, &str)]) -> Result<Self> {
        let mut files = BTreeMap::new();
        for (program, to) in programs {
            let output = Command::new("ldd").arg(program).output().context("cannot run ldd")?;
            let text = String::from_utf8_lossy(&output.stdout);
            // ldd fails for a program that is linked to nothing.
            for library in text.split_whitespace().filter(|word| word.starts_with('/')) {
                files.insert(library.trim_start_matches('/').to_owned(), PathBuf::from(library));
            }
            files.insert((*to).to_owned(), program.to_path_buf());
        }
        let layers = files.into_iter().map(|(to, from)| LayerSpec::Program { from, to }).collect();
        Ok(Self { repo: repo.to_owned(), tag: "v1".to_owned(), layers, entrypoint: Vec::new() })
    }

    /// Packs the image and pushes it to the registry at `address` (`127.0.0.1:PORT`).
    pub async fn push(&self, address: &str, user: Option<&User>) -> Result<Image> {
        let push = Push { address, repo: &self.repo, user };
        let mut layers = Vec::new();
        for spec in &self.layers {
            let spec = spec.clone();
            let tar = tokio::task::spawn_blocking(move || spec.tar()).await.context("packing panicked")??;
            layers.push(push.blob(tar.into()).await?);
        }
        let config = json!({
            "architecture": "amd64", "os": "linux",
            "config": { "Entrypoint": self.entrypoint },
            // Uncompressed, so blob and content have the same digest.
            "rootfs": { "type": "layers", "diff_ids": layers.iter().map(|l| &l.digest.0).collect::<Vec<_>>() },
        });
        let config = push.blob(serde_json::to_vec(&config)?.into()).await?;
        let manifest = json!({
            "schemaVersion": 2, "mediaType": MANIFEST,
            "config": descriptor(CONFIG, &config),
            "layers": layers.iter().map(|l| descriptor(LAYER, l)).collect::<Vec<_>>(),
        });
        let manifest = push.manifest(&self.tag, serde_json::to_vec(&manifest)?.into()).await?;
        Ok(Image { repo: self.repo.clone(), tag: self.tag.clone(), manifest, config: config.digest, layers })
    }
}

/// Pushes the image for this machine's kind of processor in an OCI archive (a tar file of an OCI layout) to the registry at `address`.
pub async fn push_archive(archive: &Path, address: &str, repo: &str, tag: &str) -> Result<()> {
    let mut files = BTreeMap::new();
    let mut tar =
        tar::Archive::new(fs::File::open(archive).with_context(|| format!("no {}", archive.display()))?);
    for entry in tar.entries().context("an OCI archive is a tar file")? {
        let mut entry = entry?;
        let name = entry.path()?.display().to_string();
        let mut content = Vec::new();
        entry.read_to_end(&mut content)?;
        files.insert(name.trim_start_matches("./").to_owned(), Bytes::from(content));
    }
    let push = Push { address, repo, user: None };
    let blob = |descriptor: &serde_json::Value| {
        let digest = descriptor["digest"].as_str().unwrap_or_default().replace(':', "/");
        let content = files.get(&format!("blobs/{digest}")).cloned();
        content.with_context(|| format!("{} has no blob {digest}", archive.display()))
    };
    let mut index = files.get("index.json").cloned().context("an OCI layout has an index.json")?;
    // An index may hold an index of the images for each kind of processor.
    loop {
        let document: serde_json::Value = serde_json::from_slice(&index).context("index.json is no JSON")?;
        let Some(manifests) = document["manifests"].as_array() else { break };
        let fits = |it: &&serde_json::Value| {
            let kind = it["platform"]["architecture"].as_str();
            kind.is_none_or(|kind| kind == if cfg!(target_arch = "aarch64") { "arm64" } else { "amd64" })
        };
        index = blob(manifests.iter().find(fits).context("the archive has no image for this machine")?)?;
    }
    let document: serde_json::Value = serde_json::from_slice(&index)?;
    for part in document["layers"].as_array().into_iter().flatten().chain([&document["config"]]) {
        push.blob(blob(part)?).await?;
    }
    let kind = document["mediaType"].as_str().unwrap_or(MANIFEST).to_owned();
    push.manifest_of(tag, &kind, index).await.map(drop)
}

/// Pushes a few images at a time.
pub async fn push_all(specs: &[ImageSpec], address: &str, user: Option<&User>) -> Result<Vec<Image>> {
    futures_util::stream::iter(specs).map(|spec| spec.push(address, user)).buffered(4).try_collect().await
}

fn descriptor(media_type: &str, blob: &Blob) -> serde_json::Value {
    json!({ "mediaType": media_type, "digest": blob.digest.0, "size": blob.size })
}

/// `sha256:` and 64 hexadecimal digits.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlobDigest(pub String);

impl BlobDigest {
    pub fn of(content: &[u8]) -> Self {
        let hash = Sha256::digest(content);
        Self(hash.iter().fold("sha256:".to_owned(), |text, byte| text + &format!("{byte:02x}")))
    }
}

impl fmt::Display for BlobDigest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[derive(Clone, Debug)]
pub struct Blob {
    pub digest: BlobDigest,
    /// Size on the wire, in bytes.
    pub size: u64,
}

#[derive(Clone, Debug)]
pub struct Image {
    pub repo: String,
    pub tag: String,
    pub manifest: BlobDigest,
    /// Digest of the config: the image ID of containerd.
    pub config: BlobDigest,
    /// The lowest first.
    pub layers: Vec<Blob>,
}

impl Image {
    /// The name with which it is pulled from `address`, of the registry or of a proxy before it.
    pub fn at(&self, address: &str) -> String {
        format!("{address}/{}:{}", self.repo, self.tag)
    }

    pub fn at_digest(&self, address: &str) -> String {
        format!("{address}/{}@{}", self.repo, self.manifest)
    }

    pub fn size(&self) -> u64 {
        self.layers.iter().map(|layer| layer.size).sum()
    }
}

struct Push<'a> {
    address: &'a str,
    repo: &'a str,
    user: Option<&'a User>,
}

impl Push<'_> {
    async fn call(&self, method: Method, url: &str, kind: &str, body: Bytes) -> Result<Answer> {
        let mut headers = vec![("content-type", kind)];
        headers.extend(self.user.map(|user| ("authorization", user.basic)));
        http(method, url, &headers, body).await
    }

    async fn blob(&self, content: Bytes) -> Result<Blob> {
        let blob = Blob { digest: BlobDigest::of(&content), size: content.len() as u64 };
        let base = format!("http://{}/v2/{}/blobs", self.address, self.repo);
        let stream = "application/octet-stream";
        let there = self.call(Method::HEAD, &format!("{base}/{}", blob.digest), stream, Bytes::new()).await?;
        if there.status == StatusCode::OK {
            return Ok(blob);
        }
        let begun =
            self.call(Method::POST, &format!("{base}/uploads/"), stream, Bytes::new()).await?.success()?;
        let place = begun.headers.get("location").context("the registry names no place for the upload")?;
        let place = place.to_str().context("the place for the upload is no text")?;
        let mark = if place.contains('?') { '&' } else { '?' };
        let url = format!("{place}{mark}digest={}", blob.digest);
        let answer = self.call(Method::PUT, &url, stream, content).await?;
        if answer.status != StatusCode::CREATED {
            bail!("the registry refused a blob of {}: {} {}", self.repo, answer.status, answer.text());
        }
        Ok(blob)
    }

    async fn manifest(&self, tag: &str, content: Bytes) -> Result<BlobDigest> {
        self.manifest_of(tag, MANIFEST, content).await
    }

    async fn manifest_of(&self, tag: &str, kind: &str, content: Bytes) -> Result<BlobDigest> {
        let digest = BlobDigest::of(&content);
        let url = format!("http://{}/v2/{}/manifests/{tag}", self.address, self.repo);
        let answer = self.call(Method::PUT, &url, kind, content).await?;
        if answer.status != StatusCode::CREATED {
            bail!("the registry refused the manifest of {}: {} {}", self.repo, answer.status, answer.text());
        }
        Ok(digest)
    }
}
