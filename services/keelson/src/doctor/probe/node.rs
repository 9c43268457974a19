//! Files and file systems of the node.
//!
//! In: paths. Out: modes, owners, free space.

use std::{
    fs,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
};

use keelson_config::Settings;
use nix::{
    sys::statvfs::{FsFlags, statvfs},
    unistd::{Gid, Group},
};

use super::super::facts::{FileMode, StateFolder};
use crate::kubelet::Options;

/// Where patches of kubeadm usually are: `kubeadm upgrade node --patches`.
const PATCHES: &str = "/etc/kubernetes/patches";

pub(super) fn file_mode(path: &Path) -> Option<FileMode> {
    let found = fs::metadata(path).ok()?;
    let group = Group::from_gid(Gid::from_raw(found.gid())).ok().flatten();
    Some(FileMode {
        owner: found.uid(),
        group: group.map_or_else(|| found.gid().to_string(), |group| group.name),
        mode: found.mode(),
    })
}

pub(super) fn state(settings: &Settings) -> StateFolder {
    let dir = &settings.agent.state_dir;
    let existing = dir.ancestors().find(|folder| folder.exists());
    let file_system = existing.and_then(|folder| statvfs(folder).ok());
    StateFolder {
        file: file_mode(dir),
        free: file_system
            .as_ref()
            .map(|found| found.blocks_available().saturating_mul(found.fragment_size())),
        is_read_only: file_system.is_some_and(|found| found.flags().contains(FsFlags::ST_RDONLY)),
        error: (dir.exists() && !dir.is_dir()).then(|| "it is not a directory".to_owned()),
    }
}

/// Patches of the kubelet's configuration that name the agent's socket.
pub(super) fn patches(settings: &Settings, options: &Options) -> Vec<PathBuf> {
    let socket = settings.cri.listen.path().display().to_string();
    let entries = fs::read_dir(options.at(PATCHES)).into_iter().flatten().flatten();
    let is_patch = |path: &PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        name.starts_with("kubeletconfiguration")
            && fs::read_to_string(path).is_ok_and(|text| text.contains(&socket))
    };
    entries.map(|entry| entry.path()).filter(is_patch).collect()
}

/// A unit that is enabled, or a proxy that has run.
pub(super) fn has_proxy(settings: &Settings, options: &Options) -> bool {
    let wants = options.at("/etc/systemd/system/multi-user.target.wants/keelson-proxy.service");
    wants.symlink_metadata().is_ok() || settings.proxy.listen.path().exists()
}
