//! Owns: the folder of one test, and its removal.
//! In: a name. Out: a folder in the temporary folder of the system. On drop every process that was started from it and
//! detached (shims, containers) is ended, mounts below it are unmounted, and it is removed. The next test run removes
//! folders that a killed one left.

use crate::{cgroups, process};
use anyhow::{Context as _, Result, bail};
use nix::mount::{MntFlags, umount2};
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Once;
use std::sync::atomic::{AtomicU32, Ordering};

const PREFIX: &str = "keelson-test-";

/// Keep it alive for as long as anything runs in it.
#[derive(Debug)]
pub struct Scratch {
    path: PathBuf,
}

impl Scratch {
    /// Makes a new folder with a short path: the path of a socket may have at most 107 bytes.
    pub fn new() -> Result<Self> {
        static SWEEP: Once = Once::new();
        static COUNT: AtomicU32 = AtomicU32::new(0);
        SWEEP.call_once(sweep);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("{PREFIX}{}-{count}", std::process::id()));
        fs::create_dir(&path).with_context(|| format!("cannot make the test folder {}", path.display()))?;
        Ok(Self { path })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Creates a folder in it, with parents.
    pub fn dir(&self, name: &str) -> Result<PathBuf> {
        let path = self.path.join(name);
        fs::create_dir_all(&path).with_context(|| format!("cannot make {}", path.display()))?;
        Ok(path)
    }

    /// Creates a new folder in it, with the first free number behind `prefix`.
    pub fn numbered(&self, prefix: &str) -> Result<PathBuf> {
        for number in 0_u64.. {
            let path = self.path.join(format!("{prefix}{number}"));
            match fs::create_dir(&path) {
                Ok(()) => return Ok(path),
                // Another test of the process may have taken the number just now.
                Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
                Err(error) => return Err(error).with_context(|| format!("cannot make {}", path.display())),
            }
        }
        bail!("every number is taken")
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        clear(&self.path);
    }
}

/// Ends processes that run from a folder, unmounts what is mounted below it, and removes it.
pub fn clear(path: &Path) {
    process::kill_processes_below(path);
    cgroups::remove(cgroups::of_containers(&logs_of_runtimes(path)));
    for mount in mounts_below(path) {
        if let Err(e) = umount2(&mount, MntFlags::MNT_DETACH) {
            eprintln!("cannot unmount {}: {e}", mount.display());
        }
    }
    if let Err(e) = fs::remove_dir_all(path)
        && e.kind() != ErrorKind::NotFound
    {
        eprintln!("cannot remove {}: {e}", path.display());
    }
}

/// What the container runtimes below a folder have logged.
fn logs_of_runtimes(path: &Path) -> String {
    let mut logs = String::new();
    for folder in fs::read_dir(path).into_iter().flatten().flatten() {
        for name in ["containerd.log", "crio.log"] {
            let log = fs::read(folder.path().join(name)).unwrap_or_default();
            logs += &String::from_utf8_lossy(&log);
        }
    }
    logs
}

/// The innermost first.
pub fn mounts_below(path: &Path) -> Vec<PathBuf> {
    // Field 5 is the mount point, with spaces and the like as octal escapes; our folders have none.
    let table = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let mut mounts: Vec<_> = table
        .lines()
        .filter_map(|line| line.split(' ').nth(4))
        .map(PathBuf::from)
        .filter(|mount| mount.starts_with(path))
        .collect();
    mounts.reverse();
    mounts
}

/// Clears the folders of test processes that have exited.
fn sweep() {
    let Ok(entries) = fs::read_dir(std::env::temp_dir()) else { return };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let pid = name
            .to_str()
            .and_then(|name| name.strip_prefix(PREFIX))
            .and_then(|rest| rest.split('-').next())
            .and_then(|pid| pid.parse::<u32>().ok());
        if let Some(pid) = pid
            && !Path::new(&format!("/proc/{pid}")).exists()
        {
            clear(&entry.path());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tests_that_run_at_the_same_time_never_share_a_folder() {
        let scratch = Scratch::new().unwrap();
        let make = || (0..200).map(|_| scratch.numbered("a").unwrap()).collect::<Vec<_>>();
        let mut all = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..4).map(|_| scope.spawn(make)).collect();
            threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
        });
        all.sort();
        all.dedup();
        assert_eq!(all.len(), 800);
    }
}
