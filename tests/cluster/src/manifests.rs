//! Owns: the shipped manifests, which tests use unchanged, and folders of manifests. In: objects. Out: files.

use anyhow::{Context as _, Result};
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};

/// Rights of companions, for the account `keelson-agent` of `kube-system`.
pub const COMPANION: &str = include_str!("../../../packaging/kustomize/companion/companion.yaml");

/// The same for companions that have a Lease.
pub const COMPANION_WITH_LEASE: &str = concat!(
    include_str!("../../../packaging/kustomize/companion/companion.yaml"),
    "---\n",
    include_str!("../../../packaging/kustomize/companion-lease/companion-lease.yaml")
);

pub const NODE: &str = include_str!("../../../packaging/kustomize/node/node.yaml");

pub const BOOTSTRAP: &str = include_str!("../../../packaging/kustomize/bootstrap/bootstrap.yaml");

pub const DAEMON_SET: &str = include_str!("../../../packaging/kustomize/daemonset/daemonset.yaml");

pub const PROXY: &str = include_str!("../../../packaging/kustomize/proxy/proxy.yaml");

/// A folder for `endpoints.manifests`. Cheap to clone.
#[derive(Clone, Debug)]
pub struct ManifestFolder(PathBuf);

impl ManifestFolder {
    pub fn new(folder: PathBuf) -> Self {
        Self(folder)
    }

    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Writes a file with these objects.
    pub fn put(&self, file: &str, objects: &[Value]) -> Result<()> {
        self.write(file, &json!({"apiVersion": "v1", "kind": "List", "items": objects}).to_string())
    }

    /// Replaces a file atomically, by renaming.
    pub fn write(&self, file: &str, text: &str) -> Result<()> {
        let (draft, path) = (self.0.join(format!(".{file}")), self.0.join(file));
        fs::write(&draft, text).with_context(|| format!("cannot write {}", draft.display()))?;
        fs::rename(&draft, &path).with_context(|| format!("cannot write {}", path.display()))
    }

    pub fn remove(&self, file: &str) -> Result<()> {
        fs::remove_file(self.0.join(file)).with_context(|| format!("cannot remove {file}"))
    }
}
