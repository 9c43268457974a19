//! Owns the errors of the crate: [`StoreError`] for a store that is open, [`OpenError`] for opening one.

use std::io;
use std::path::PathBuf;

use crate::table::{BadRecord, Table};

/// A store could not do what it was asked.
///
/// After an error of [`crate::StateStore::apply`] the batch has not been acknowledged: it is there whole or not
/// at all, and applying it again is right.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// A key is longer than [`crate::MAX_KEY_LEN`].
    #[error("a key of {len} bytes for table {table} is too long: at most {max} bytes")]
    KeyTooLong { table: Table, len: usize, max: usize },
    /// A value is longer than [`crate::MAX_VALUE_LEN`].
    #[error("a value of {len} bytes for {table}/{key} is too long: at most {max} bytes")]
    ValueTooLong { table: Table, key: String, len: usize, max: usize },
    /// A value could not be turned into JSON.
    #[error("cannot encode record {table}/{key} as JSON")]
    Encode { table: Table, key: String, source: serde_json::Error },
    /// A record is not what its reader expects.
    #[error("{0}")]
    Decode(BadRecord),
    /// sled reported an error; the store reopens itself at the next call.
    #[error("{operation} failed in the state store {path}; it is reopened at the next use")]
    Backend { operation: &'static str, path: PathBuf, source: sled::Error },
    /// The file system reported an error; the store reopens itself at the next call.
    #[error("{operation} failed in the state store {path}; check the disk's health and free space")]
    Io { operation: &'static str, path: PathBuf, source: io::Error },
    /// sled panicked; the store reopens itself at the next call.
    #[error("{operation} panicked in the state store {path} ({message}); it is reopened at the next use")]
    Panicked { operation: &'static str, path: PathBuf, message: String },
    /// The disk (or sled) did not answer in time; the store is copied and reopened at the next call.
    #[error("{operation} did not end within {seconds} s in the state store {path}; check the disk's health")]
    TimedOut { operation: &'static str, path: PathBuf, seconds: u64 },
    /// The store is not open: its disk refuses or hangs, another process holds it, or it has been closed.
    #[error("the state store {path} is not open: {reason}")]
    NotOpen { path: PathBuf, reason: String },
    /// What is on disk no longer is what was acknowledged.
    #[error(
        "the state store {path} is damaged: {reason}; the next start moves it aside and creates an empty one"
    )]
    Damaged { path: PathBuf, reason: String },
}

/// The state folder could not be opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    #[error(
        "the state directory {path} is in use by {holder}; stop that process or set another state_dir",
        holder = pid.map_or_else(|| "another process".to_owned(), |pid| format!("process {pid}"))
    )]
    InUse {
        path: PathBuf,
        /// The process that holds it, where its lock file says so.
        pid: Option<u32>,
    },
    /// The disk did not answer in time. The store is not damaged for that; opening it again is right.
    #[error("cannot open the state store {path} within {seconds} s; check the disk's health")]
    TimedOut { path: PathBuf, seconds: u64 },
    #[error("cannot {action} {path}: {advice}")]
    Io { action: &'static str, path: PathBuf, advice: &'static str, source: io::Error },
    /// An older store could not be migrated. It is as it was.
    #[error(
        "cannot migrate the state store {path} from schema version {from} to {to}: {reason}; the store is \
         unchanged"
    )]
    Migration { path: PathBuf, from: u32, to: u32, reason: String },
    /// A store that was just made cannot be used.
    #[error("cannot use the new state store {path}: {reason}; check the disk's health")]
    Unusable { path: PathBuf, reason: String },
}

impl OpenError {
    /// An [`OpenError::Io`] with the advice that fits the error.
    pub(crate) fn io(action: &'static str, path: impl Into<PathBuf>, source: io::Error) -> Self {
        OpenError::Io { action, path: path.into(), advice: advice(&source), source }
    }
}

fn advice(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            "the disk is full; free space or set state_dir to a directory on another disk"
        }
        io::ErrorKind::PermissionDenied => "grant the user of the agent read and write permission",
        io::ErrorKind::ReadOnlyFilesystem => {
            "the file system is read-only; set state_dir to a writable directory"
        }
        io::ErrorKind::NotADirectory | io::ErrorKind::AlreadyExists | io::ErrorKind::IsADirectory => {
            "another file is in its place; move it or set state_dir to another directory"
        }
        _ => "check the disk's health and the setting state_dir",
    }
}

/// The error and what it stems from, in one line.
pub(crate) fn text_of(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        text.push_str(": ");
        text.push_str(&error.to_string());
        source = error.source();
    }
    text
}
