//! Owns: the folder `run` below the current one. In: nothing. Out: a folder that no other run uses and that holds
//! nothing of an earlier one; after drop, only logs are left in it.

use anyhow::{Context as _, Result, bail};
use keelson_harness::scratch::clear;
use std::fs::{self, File, TryLockError};
use std::path::{Path, PathBuf};

/// The longest path of a socket in the folder, relative to it.
const LONGEST_SOCKET: &str = "containerd/containerd.sock.ttrpc";
/// Maximum length in bytes of the path of a unix socket.
const SOCKET_LIMIT: usize = 107;
const LOGS: &str = "logs";

pub(crate) struct Folder {
    path: PathBuf,
    /// Held as long as the folder is in use; the kernel releases the lock when this process exits.
    _lock: File,
}

impl Folder {
    pub(crate) fn claim() -> Result<Self> {
        let path = std::env::current_dir().context("cannot read the current directory")?.join("run");
        if path.join(LONGEST_SOCKET).as_os_str().len() > SOCKET_LIMIT {
            bail!(
                "the path {} is too long: a socket below it would exceed {SOCKET_LIMIT} bytes; move the \
                 checkout to a shorter path",
                path.display()
            );
        }
        fs::create_dir_all(&path).with_context(|| format!("cannot create {}", path.display()))?;
        let lock = File::open(&path).with_context(|| format!("cannot open {}", path.display()))?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => bail!("another make run is using {}", path.display()),
            Err(TryLockError::Error(e)) => {
                return Err(e).with_context(|| format!("cannot lock {}", path.display()));
            }
        }
        // A run that was killed could not clean up.
        clear_within(&path, &[]);
        Ok(Self { path, _lock: lock })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// The path relative to the checkout.
    pub(crate) fn shown(&self) -> &'static str {
        "run"
    }

    /// Copies the logs to the folder in which they stay.
    pub(crate) fn keep_logs(&self) {
        let logs = self.path.join(LOGS);
        let kept = fs::create_dir_all(&logs).and_then(|()| {
            for folder in [self.path.clone(), self.path.join("containerd"), self.path.join("registry")] {
                let Ok(entries) = fs::read_dir(folder) else { continue };
                for entry in entries.flatten().filter(|e| e.path().extension().is_some_and(|x| x == "log")) {
                    fs::copy(entry.path(), logs.join(entry.file_name()))?;
                }
            }
            Ok(())
        });
        if let Err(e) = kept {
            eprintln!("cannot keep the logs in {}: {e}", logs.display());
        }
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        clear_within(&self.path, &[LOGS]);
    }
}

/// Clears everything in a folder but `keep`. The folder itself stays: it holds the lock.
fn clear_within(folder: &Path, keep: &[&str]) {
    // First for the whole folder: a process may hold any part of it.
    keelson_harness::process::kill_processes_below(folder);
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        if entry.file_name().to_str().is_some_and(|name| keep.contains(&name)) {
            continue;
        }
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            clear(&entry.path());
        } else if let Err(e) = fs::remove_file(entry.path()) {
            eprintln!("cannot remove {}: {e}", entry.path().display());
        }
    }
}
