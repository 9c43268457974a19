//! The network namespaces of this machine that can be seen.
//!
//! Owns: [`others`], [`NetNamespace::enter`]. In: `/run/netns` (names that container runtimes give), `/proc` (those of
//! processes). Out: namespaces, each once, without that of the calling thread.

use std::{
    collections::HashMap,
    fmt,
    fs::{self, File},
    io,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    process,
};

use nix::{
    errno::Errno,
    sched::{CloneFlags, setns},
};

const NAMED: &str = "/run/netns";

#[derive(Debug)]
pub(super) struct NetNamespace {
    /// All that lead to it: one may end while another stays.
    paths: Vec<PathBuf>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Entered {
    Yes,
    /// It ended after it was found.
    Gone,
}

/// What an error of a path to a namespace means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Obstacle {
    /// The path does not lead to the namespace any more.
    Gone,
    Other,
}

/// A path was looked at before with the same rights, so it was permitted: the process ends now.
fn of_open(error: &io::Error) -> Obstacle {
    match error.raw_os_error().map(Errno::from_raw) {
        Some(Errno::ENOENT | Errno::ESRCH | Errno::EACCES) => Obstacle::Gone,
        _ => Obstacle::Other,
    }
}

/// The file of a name whose mount is gone is no namespace.
const fn of_setns(error: Errno) -> Obstacle {
    match error {
        Errno::EINVAL => Obstacle::Gone,
        _ => Obstacle::Other,
    }
}

impl NetNamespace {
    #[cfg(test)]
    pub(super) fn at(paths: Vec<PathBuf>) -> Self {
        Self { paths }
    }

    /// Moves the calling thread. An error is not that of a namespace which has just ended.
    pub(super) fn enter(&self) -> io::Result<Entered> {
        for path in &self.paths {
            let file = match File::open(path) {
                Err(error) if of_open(&error) == Obstacle::Gone => continue,
                file => file?,
            };
            match setns(file, CloneFlags::CLONE_NEWNET) {
                Ok(()) => return Ok(Entered::Yes),
                Err(error) if of_setns(error) == Obstacle::Gone => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(Entered::Gone)
    }
}

impl fmt::Display for NetNamespace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let path = self.paths.first().map(|path| path.display());
        write!(f, "the network namespace {}", path.map(|path| path.to_string()).unwrap_or_default())
    }
}

/// Why those of pods cannot be entered.
pub(super) fn cannot_enter() -> Option<String> {
    if process::id() == 1 && !Path::new(NAMED).is_dir() {
        return Some(format!(
            "this container sees no network namespaces of others; mount {NAMED} of the node"
        ));
    }
    // To enter the own one changes nothing, and needs the same right.
    let own =
        File::open("/proc/thread-self/ns/net").and_then(|file| Ok(setns(file, CloneFlags::CLONE_NEWNET)?));
    own.err().map(|error| format!("cannot enter a network namespace: {error}; it needs CAP_SYS_ADMIN"))
}

pub(super) fn others() -> Vec<NetNamespace> {
    let named = entries(Path::new(NAMED));
    let of_processes = entries(Path::new("/proc")).into_iter().filter(|path| {
        path.file_name().and_then(|name| name.to_str()).is_some_and(|name| name.parse::<u32>().is_ok())
    });
    let of_processes = of_processes.map(|path| path.join("ns/net"));
    let identity = |path: &Path| fs::metadata(path).map(|found| (found.dev(), found.ino())).ok();
    let own = identity(Path::new("/proc/thread-self/ns/net"));
    let mut places: HashMap<(u64, u64), usize> = HashMap::new();
    let mut found: Vec<NetNamespace> = Vec::new();
    for path in named.into_iter().chain(of_processes) {
        // A name may lead to a file that is no namespace (its mount is gone): it is on another device.
        let is_other = |of: &(u64, u64)| Some(*of) != own && Some(of.0) == own.map(|(device, _)| device);
        let Some(of) = identity(&path).filter(is_other) else { continue };
        let place = *places.entry(of).or_insert_with(|| {
            found.push(NetNamespace { paths: Vec::new() });
            found.len() - 1
        });
        found[place].paths.push(path);
    }
    found
}

fn entries(folder: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
    entries.flatten().map(|entry| entry.path()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_namespace_that_ended_is_passed_over() {
        for (error, expected) in [
            (Errno::ENOENT, Obstacle::Gone),
            (Errno::ESRCH, Obstacle::Gone),
            (Errno::EACCES, Obstacle::Gone),
            (Errno::EMFILE, Obstacle::Other),
            (Errno::ENOMEM, Obstacle::Other),
        ] {
            assert_eq!(of_open(&error.into()), expected, "{error}");
        }
        assert_eq!(of_open(&io::Error::other("no number")), Obstacle::Other);
        for (error, expected) in [
            (Errno::EINVAL, Obstacle::Gone),
            (Errno::EPERM, Obstacle::Other),
            (Errno::ENOMEM, Obstacle::Other),
        ] {
            assert_eq!(of_setns(error), expected, "{error}");
        }
    }

    #[test]
    fn a_name_without_its_mount_is_no_namespace() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let gone = NetNamespace::at(vec![file.path().to_owned(), "/nowhere".into()]);
        assert_eq!(gone.enter().unwrap(), Entered::Gone);
    }
}
