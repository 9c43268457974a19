//! Owns: images that the tests make. In: a description. Out: the image in a registry, with all digests.
//!
//! Layers are uncompressed tar files of incompressible bytes, so that their size on the wire is what the test asked
//! for. No builder is needed, and no upload, which costs processor time: blobs and manifest are put
//! into the registry's folder.

use crate::registry::Registry;
use anyhow::{Context as _, Result, ensure};
use futures_util::{StreamExt as _, TryStreamExt as _};
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
use std::sync::atomic::{AtomicU32, Ordering};

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

    /// Packs the image and puts it into the registry.
    pub async fn push(&self, registry: &Registry) -> Result<Image> {
        let (spec, content) = (self.clone(), registry.content());
        tokio::task::spawn_blocking(move || spec.put(&content)).await.context("packing panicked")?
    }

    fn put(&self, registry: &Content) -> Result<Image> {
        let put = |content: &[u8]| registry.put_blob(&self.repo, content);
        let layers: Vec<Blob> = self.layers.iter().map(|layer| put(&layer.tar()?)).collect::<Result<_>>()?;
        let config = json!({
            "architecture": "amd64", "os": "linux",
            "config": { "Entrypoint": self.entrypoint },
            // Uncompressed, so blob and content have the same digest.
            "rootfs": { "type": "layers", "diff_ids": layers.iter().map(|l| &l.digest.0).collect::<Vec<_>>() },
        });
        let config = put(&serde_json::to_vec(&config)?)?;
        let manifest = json!({
            "schemaVersion": 2, "mediaType": MANIFEST,
            "config": descriptor(CONFIG, &config),
            "layers": layers.iter().map(|l| descriptor(LAYER, l)).collect::<Vec<_>>(),
        });
        let manifest = registry.put_manifest(&self.repo, &self.tag, &serde_json::to_vec(&manifest)?)?;
        for Blob { digest, .. } in layers.iter().chain([&config]) {
            ensure!(registry.blob(digest).exists(), "{digest} was removed meanwhile");
        }
        Ok(Image { repo: self.repo.clone(), tag: self.tag.clone(), manifest, config: config.digest, layers })
    }
}

/// Puts the image for this machine's kind of processor in an OCI archive (a tar file of an OCI layout) into the registry.
pub fn push_archive(archive: &Path, registry: &Registry, repo: &str, tag: &str) -> Result<()> {
    let mut files = BTreeMap::new();
    let mut tar =
        tar::Archive::new(fs::File::open(archive).with_context(|| format!("no {}", archive.display()))?);
    for entry in tar.entries().context("an OCI archive is a tar file")? {
        let mut entry = entry?;
        let name = entry.path()?.display().to_string();
        let mut content = Vec::new();
        entry.read_to_end(&mut content)?;
        files.insert(name.trim_start_matches("./").to_owned(), content);
    }
    let blob = |descriptor: &serde_json::Value| {
        let digest = descriptor["digest"].as_str().unwrap_or_default().replace(':', "/");
        let content = files.get(&format!("blobs/{digest}"));
        content.with_context(|| format!("{} has no blob {digest}", archive.display()))
    };
    let mut index = files.get("index.json").context("an OCI layout has an index.json")?;
    // An index may hold an index of the images for each kind of processor.
    loop {
        let document: serde_json::Value = serde_json::from_slice(index).context("index.json is no JSON")?;
        let Some(manifests) = document["manifests"].as_array() else { break };
        let fits = |it: &&serde_json::Value| {
            let kind = it["platform"]["architecture"].as_str();
            kind.is_none_or(|kind| kind == if cfg!(target_arch = "aarch64") { "arm64" } else { "amd64" })
        };
        index = blob(manifests.iter().find(fits).context("the archive has no image for this machine")?)?;
    }
    let (document, registry): (serde_json::Value, _) = (serde_json::from_slice(index)?, registry.content());
    for part in document["layers"].as_array().into_iter().flatten().chain([&document["config"]]) {
        registry.put_blob(repo, blob(part)?)?;
    }
    registry.put_manifest(repo, tag, index).map(drop)
}

/// Puts a few images at a time into the registry.
pub async fn push_all(specs: &[ImageSpec], registry: &Registry) -> Result<Vec<Image>> {
    futures_util::stream::iter(specs).map(|spec| spec.push(registry)).buffered(4).try_collect().await
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

    fn hex(&self) -> &str {
        self.0.trim_start_matches("sha256:")
    }

    /// `sha256/` and the digits.
    fn path(&self) -> PathBuf {
        Path::new("sha256").join(self.hex())
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

/// The images in the folder of a registry, in the form in which it reads them.
#[derive(Clone, Debug)]
pub(crate) struct Content(pub(crate) PathBuf);

impl Content {
    fn put_blob(&self, repo: &str, content: &[u8]) -> Result<Blob> {
        let blob = Blob { digest: BlobDigest::of(content), size: content.len() as u64 };
        let file = self.blob(&blob.digest).join("data");
        if !file.exists() {
            write(&file, content)?;
        }
        let layers = self.repo(repo).join("_layers");
        write(&layers.join(blob.digest.path()).join("link"), blob.digest.0.as_bytes())?;
        Ok(blob)
    }

    fn put_manifest(&self, repo: &str, tag: &str, content: &[u8]) -> Result<BlobDigest> {
        let digest = BlobDigest::of(content);
        write(&self.blob(&digest).join("data"), content)?;
        let (manifests, tag) = (self.repo(repo).join("_manifests"), Path::new("tags").join(tag));
        for folder in [
            Path::new("revisions").join(digest.path()),
            tag.join("index").join(digest.path()),
            tag.join("current"),
        ] {
            write(&manifests.join(folder).join("link"), digest.0.as_bytes())?;
        }
        Ok(digest)
    }

    pub(crate) fn blob(&self, digest: &BlobDigest) -> PathBuf {
        let hex = digest.hex();
        self.0.join("blobs/sha256").join(hex.get(..2).unwrap_or_default()).join(hex)
    }

    pub(crate) fn repo(&self, repo: &str) -> PathBuf {
        self.0.join("repositories").join(repo)
    }
}

/// In one step, as the registry may read the file.
fn write(file: &Path, content: &[u8]) -> Result<()> {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let unfinished = file.with_extension(COUNT.fetch_add(1, Ordering::Relaxed).to_string());
    let failed = || format!("cannot write {}", file.display());
    fs::create_dir_all(file.parent().with_context(failed)?).with_context(failed)?;
    fs::write(&unfinished, content).with_context(failed)?;
    fs::rename(&unfinished, file).with_context(failed)
}
