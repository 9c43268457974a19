//! The network namespaces of this machine that can be seen.
//!
//! Owns: [`others`]. In: `/run/netns` (names that container runtimes give), `/proc` (those of processes). Out: namespaces,
//! each once, without that of the calling thread.

use std::{
    collections::HashSet,
    fmt,
    fs::{self, File},
    io,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    process,
};

use nix::sched::{CloneFlags, setns};

const NAMED: &str = "/run/netns";

pub(super) struct NetNamespace {
    path: PathBuf,
}

impl NetNamespace {
    /// Moves the calling thread.
    pub(super) fn enter(&self) -> io::Result<()> {
        let file = File::open(&self.path)?;
        setns(file, CloneFlags::CLONE_NEWNET).map_err(io::Error::from)
    }
}

impl fmt::Display for NetNamespace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the network namespace {}", self.path.display())
    }
}

/// Why those of pods cannot be entered.
pub(super) fn cannot_enter() -> Option<String> {
    if process::id() == 1 && !Path::new(NAMED).is_dir() {
        return Some(format!(
            "this container sees no network namespaces of others; mount {NAMED} of the node"
        ));
    }
    let own = NetNamespace { path: "/proc/thread-self/ns/net".into() };
    // To enter the own one changes nothing, and needs the same right.
    own.enter()
        .err()
        .map(|error| format!("cannot enter a network namespace: {error}; it needs CAP_SYS_ADMIN"))
}

pub(super) fn others() -> Vec<NetNamespace> {
    let named = entries(Path::new(NAMED));
    let of_processes = entries(Path::new("/proc")).into_iter().filter(|path| {
        path.file_name().and_then(|name| name.to_str()).is_some_and(|name| name.parse::<u32>().is_ok())
    });
    let of_processes = of_processes.map(|path| path.join("ns/net"));
    let identity = |path: &Path| fs::metadata(path).map(|found| (found.dev(), found.ino())).ok();
    let own = identity(Path::new("/proc/thread-self/ns/net"));
    let mut seen: HashSet<(u64, u64)> = own.into_iter().collect();
    // A name may lead to a file that is no namespace (its mount is gone): it is on another device.
    let device = own.map(|(device, _)| device);
    let is_new =
        |path: &PathBuf| identity(path).is_some_and(|found| Some(found.0) == device && seen.insert(found));
    named.into_iter().chain(of_processes).filter(is_new).map(|path| NetNamespace { path }).collect()
}

fn entries(folder: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
    entries.flatten().map(|entry| entry.path()).collect()
}
