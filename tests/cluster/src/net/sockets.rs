//! Owns: where a proxy with programs at the socket level runs: a cgroup for the sockets of a node and its pods, and a BPF file
//! system. In: namespaces. Out: their sockets in the cgroup, programs that see both at the usual places. Everything is
//! removed when the test process has exited, in any way.
//!
//! The cgroup is a threaded one, because a namespace of the harness is entered by a thread; clients outside of the node are
//! other threads of the same process. No program is ever attached to a cgroup of the machine.

use super::namespace::{Namespace, watch_over};
use anyhow::{Context as _, Result};
use keelson_harness::process::Program;
use nix::mount::{MsFlags, mount};
use nix::unistd::gettid;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

/// Folders of mounts, one for each test process; the watcher removes them.
const PREFIX: &str = "/run/kt-ebpf-";

/// In the program's own mount namespace, which `ip netns exec` makes.
const AT_THE_USUAL_PLACES: &str =
    "mount --bind \"$0/bpf\" /sys/fs/bpf && mount --bind \"$1\" /sys/fs/cgroup && shift && exec \"$@\"";

/// Where the cgroup of the world is, as its proxy sees it.
pub(super) const CGROUP: &str = "/sys/fs/cgroup";

/// Where the threads of a namespace belong, if anywhere.
#[derive(Clone, Debug, Default)]
pub struct Threads(Option<PathBuf>);

impl Threads {
    pub(super) fn of(cgroup: &Path) -> Self {
        Self(Some(cgroup.join("cgroup.threads")))
    }

    /// Moves the calling thread: sockets that it makes from now on are those of the node or its pods.
    pub fn join(&self) -> Result<()> {
        let Some(file) = &self.0 else { return Ok(()) };
        fs::write(file, gettid().to_string()).with_context(|| format!("cannot write {}", file.display()))
    }
}

/// Removed on drop.
#[derive(Debug)]
pub(super) struct SocketLevel {
    folder: PathBuf,
    cgroup: PathBuf,
}

/// What a program of the world sees.
#[derive(Clone, Debug)]
pub(super) struct SocketPlaces {
    folder: PathBuf,
    cgroup: PathBuf,
}

impl SocketLevel {
    pub(super) fn new() -> Result<Self> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let folder = mounts()?;
        let name = format!("kt{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let cgroup = folder.join("cgroup").join(name);
        fs::create_dir(&cgroup).with_context(|| format!("cannot make the cgroup {}", cgroup.display()))?;
        let level = Self { folder, cgroup };
        fs::write(level.cgroup.join("cgroup.type"), "threaded").context("cannot make a threaded cgroup")?;
        Ok(level)
    }

    /// Sockets that the namespace makes from now on are in the cgroup.
    pub(super) fn join(&self, namespace: &Namespace) -> Result<()> {
        let threads = namespace.set_cgroup(&self.cgroup);
        namespace.run(move || threads.join())?
    }

    pub(super) fn bpf(&self) -> PathBuf {
        self.folder.join("bpf")
    }

    pub(super) fn places(&self) -> SocketPlaces {
        SocketPlaces { folder: self.folder.clone(), cgroup: self.cgroup.clone() }
    }
}

impl SocketPlaces {
    /// The same program, with the BPF file system and the cgroup at the places of a node.
    pub(super) fn at_the_usual_places(&self, program: &Program) -> Program {
        let mut inside = program.clone();
        inside.path = "/bin/sh".into();
        let (folder, cgroup) = (self.folder.display().to_string(), self.cgroup.display().to_string());
        inside.args = ["-c", AT_THE_USUAL_PLACES, &folder, &cgroup].map(str::to_owned).into();
        inside.args.push(program.path.display().to_string());
        inside.args.extend(program.args.iter().cloned());
        inside
    }
}

impl Drop for SocketLevel {
    fn drop(&mut self) {
        let parent = self.folder.join("cgroup/cgroup.threads");
        for thread in fs::read_to_string(self.cgroup.join("cgroup.threads")).unwrap_or_default().lines() {
            let _ = fs::write(&parent, thread);
        }
        if let Err(error) = fs::remove_dir(&self.cgroup) {
            eprintln!("cannot remove the cgroup {}: {error}", self.cgroup.display());
        }
    }
}

/// The mounts of this process.
fn mounts() -> Result<PathBuf> {
    static MADE: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    let made = MADE.get_or_init(|| make_mounts().map_err(|error| format!("{error:#}")));
    made.clone().map_err(anyhow::Error::msg)
}

fn make_mounts() -> Result<PathBuf> {
    watch_over()?;
    let folder = PathBuf::from(format!("{PREFIX}{}", std::process::id()));
    for (name, kind) in [("cgroup", "cgroup2"), ("bpf", "bpf")] {
        let at: &Path = &folder.join(name);
        fs::create_dir_all(at).with_context(|| format!("cannot make {}", at.display()))?;
        mount(Some("none"), at, Some(kind), MsFlags::empty(), None::<&str>)
            .with_context(|| format!("cannot mount {kind} at {}", at.display()))?;
    }
    Ok(folder)
}
