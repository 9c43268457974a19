//! Where programs are attached and pinned.
//!
//! Owns: the places of pins and the cgroup. In: the mounts of this process, a setting, the network namespace of the calling thread. Out: paths.
//!
//! ```text
//! /sys/fs/bpf/keelson/netns-4026531840/     one for each network namespace, as the rules of the other backends
//!     maps-2-8c3fa1d2/frontends ...         the layout of the maps
//!     links-5b01ee77/connect4 ...           the programs
//!     direct-maps-..., direct-links-...     those of direct return
//!     pods-maps-..., pods-links-...         those of pod devices
//! ```

use std::{
    fs, io,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
};

use super::{KernelError, filters, links};

const USUAL_BPF: &str = "/sys/fs/bpf";
/// With version 2 alone, and beside version 1.
const USUAL_CGROUPS: [&str; 2] = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"];
const FOLDER: &str = "keelson";
pub(super) const MAPS_PREFIX: &str = "maps-";
pub(super) const LINKS_PREFIX: &str = "links-";
pub(crate) const DIRECT_MAPS_PREFIX: &str = "direct-maps-";
pub(crate) const DIRECT_LINKS_PREFIX: &str = "direct-links-";
pub(crate) const PODS_MAPS_PREFIX: &str = "pods-maps-";
pub(crate) const PODS_LINKS_PREFIX: &str = "pods-links-";

/// The folder of this network namespace, whether it exists or not.
pub(crate) fn own_folder() -> Result<PathBuf, KernelError> {
    let mounts = fs::read_to_string("/proc/thread-self/mounts").unwrap_or_default();
    let root = preferred(&mounts, "bpf", &[USUAL_BPF]).ok_or(KernelError::NoBpfMount)?;
    let namespace = Path::new("/proc/thread-self/ns/net");
    let inode = fs::metadata(namespace).map_err(KernelError::file("read", namespace))?.ino();
    Ok(root.join(FOLDER).join(format!("netns-{inode}")))
}

/// The cgroup to attach to: the one of the setting, or the root of the hierarchy if its sockets belong to this network
/// namespace and its pods.
pub(crate) fn cgroup(setting: Option<&Path>) -> Result<PathBuf, KernelError> {
    let path = match setting {
        Some(path) => path.to_owned(),
        None => {
            let mounts = fs::read_to_string("/proc/thread-self/mounts").unwrap_or_default();
            let path = preferred(&mounts, "cgroup2", &USUAL_CGROUPS).ok_or(KernelError::NoCgroupMount)?;
            if is_root(&path) && !is_first_network_namespace() {
                return Err(KernelError::OtherSockets { path });
            }
            path
        }
    };
    // Every folder of cgroup v2 has it.
    match fs::metadata(path.join("cgroup.procs")) {
        Ok(_) => Ok(path),
        Err(error) => Err(KernelError::Cgroup { path, reason: error.to_string() }),
    }
}

/// Why the root of the hierarchy, as this process sees it, may not have the sockets of the node and its pods.
pub(crate) fn unsuitable_cgroup() -> Option<String> {
    let path = cgroup(None).ok().filter(|path| !is_root(path))?;
    Some(format!(
        "{} is not the root of cgroup v2, but the cgroup of a container; mount that of the node, and set \
         proxy.ebpf_cgroup",
        path.display()
    ))
}

/// Every other cgroup has this file, also where a cgroup namespace shows it as the root.
fn is_root(cgroup: &Path) -> bool {
    !cgroup.join("cgroup.type").exists()
}

/// The kernel has this setting there and in no other network namespace. (That of process 1 cannot be read without CAP_SYS_PTRACE.)
fn is_first_network_namespace() -> bool {
    Path::new("/proc/sys/net/core/netdev_max_backlog").exists()
}

/// The number by which the kernel knows a cgroup.
pub(crate) fn cgroup_id(path: &Path) -> Result<u64, KernelError> {
    Ok(fs::metadata(path).map_err(KernelError::file("read", path))?.ino())
}

/// One of the usual places, or the first one.
fn preferred(mounts: &str, kind: &str, usual: &[&str]) -> Option<PathBuf> {
    let all: Vec<PathBuf> = mounted(mounts, kind).collect();
    let is_mounted = |path: &&&str| all.iter().any(|found| found.as_path() == Path::new(path));
    usual.iter().find(is_mounted).map(PathBuf::from).or_else(|| all.first().cloned())
}

/// Where file systems of a type are mounted, in the order of `/proc/self/mounts`.
fn mounted<'a>(mounts: &'a str, kind: &'a str) -> impl Iterator<Item = PathBuf> + 'a {
    mounts.lines().filter_map(move |line| {
        let mut fields = line.split(' ').skip(1);
        let (path, found) = (fields.next()?, fields.next()?);
        // Spaces and other odd characters are octal there; no such path is meant for BPF.
        (found == kind && !path.contains('\\')).then(|| PathBuf::from(path))
    })
}

/// The folders of a kind in the folder of a network namespace.
pub(crate) fn folders(own: &Path, prefix: &str) -> Result<Vec<PathBuf>, KernelError> {
    let entries = match fs::read_dir(own) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(KernelError::file("list", own)(error)),
    };
    let paths = entries.flatten().map(|entry| entry.path());
    let is_meant = |path: &PathBuf| {
        path.file_name().and_then(|name| name.to_str()).is_some_and(|name| name.starts_with(prefix))
    };
    let mut found: Vec<PathBuf> = paths.filter(is_meant).collect();
    found.sort();
    Ok(found)
}

/// Removes a folder of pins, and returns how many there were. Nothing else can be below the BPF file system.
pub(crate) fn remove(folder: &Path) -> Result<usize, KernelError> {
    links::detach(folder);
    let mut removed = 0;
    for entry in fs::read_dir(folder).map_err(KernelError::file("list", folder))?.flatten() {
        let pin = entry.path();
        filters::detach_pinned(&pin)?;
        fs::remove_file(&pin).map_err(KernelError::file("remove", &pin))?;
        removed += 1;
    }
    fs::remove_dir(folder).map_err(KernelError::file("remove", folder))?;
    Ok(removed)
}

/// Removes a folder if it is empty.
pub(super) fn remove_empty(folder: &Path) {
    let _ = fs::remove_dir(folder);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_usual_mount_is_preferred() {
        let text = "proc /proc proc rw 0 0\nbpf /tmp/bpf bpf rw,mode=700 0 0\nnone /a\\040b cgroup2 rw 0 0\n\
                    cgroup2 /sys/fs/cgroup/unified cgroup2 rw 0 0\n";
        let bpf = |text: &str| preferred(text, "bpf", &[USUAL_BPF]);
        assert_eq!(bpf(text), Some("/tmp/bpf".into()));
        assert_eq!(bpf(&format!("{text}bpf /sys/fs/bpf bpf rw 0 0\n")), Some("/sys/fs/bpf".into()));
        assert_eq!(bpf("proc /proc proc rw 0 0\n\nbroken\n"), None);
        let cgroup = |text: &str| preferred(text, "cgroup2", &USUAL_CGROUPS);
        assert_eq!(cgroup(text), Some("/sys/fs/cgroup/unified".into()));
        assert_eq!(cgroup(&format!("none /a cgroup2 rw 0 0\n{text}")), Some("/sys/fs/cgroup/unified".into()));
        assert_eq!(cgroup("none /a cgroup2 rw 0 0\n"), Some("/a".into()));
    }

    #[test]
    fn a_folder_that_is_no_cgroup_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let error = cgroup(Some(folder.path())).unwrap_err().to_string();
        assert!(
            error.contains("is not a folder of cgroup v2") && error.contains("proxy.ebpf_cgroup"),
            "{error}"
        );
    }
}
