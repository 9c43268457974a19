//! Owns the errors of the crate: [`StoreError`] for a store that is open, [`OpenError`] for opening one.

use std::io;
use std::path::PathBuf;

use crate::table::{BadRecord, Table};

/// A failed operation.
///
/// After an error of [`crate::StateStore::apply`] the batch is not acknowledged: it is applied completely or not at
/// all, and it is safe to apply it again.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    #[error("a key of {len} bytes for table {table} is too long: at most {max} bytes")]
    KeyTooLong { table: Table, len: usize, max: usize },
    #[error("a value of {len} bytes for {table}/{key} is too long: at most {max} bytes")]
    ValueTooLong { table: Table, key: String, len: usize, max: usize },
    #[error("cannot encode record {table}/{key} as JSON")]
    Encode { table: Table, key: String, source: serde_json::Error },
    #[error("{0}")]
    Decode(BadRecord),
    /// sled reported an error; the next call reopens the store.
    #[error("{operation} failed in the state store {path}; it is reopened at the next use")]
    Backend { operation: &'static str, path: PathBuf, source: sled::Error },
    /// The file system reported an error; the next call reopens the store.
    #[error("{operation} failed in the state store {path}; check the disk's health and free space")]
    Io { operation: &'static str, path: PathBuf, source: io::Error },
    /// sled panicked; the next call reopens the store.
    #[error("{operation} panicked in the state store {path} ({message}); it is reopened at the next use")]
    Panicked { operation: &'static str, path: PathBuf, message: String },
    /// The disk (or sled) did not answer in time; the next call copies and reopens the store.
    #[error("{operation} did not end within {seconds} s in the state store {path}; check the disk's health")]
    TimedOut { operation: &'static str, path: PathBuf, seconds: u64 },
    /// The store is not open: its disk fails or hangs, another process holds it, or it is closed.
    #[error("the state store {path} is not open: {reason}")]
    NotOpen { path: PathBuf, reason: String },
    /// The content of the disk differs from what was acknowledged.
    #[error(
        "the state store {path} is damaged: {reason}; the next start moves it aside and creates an empty one"
    )]
    Damaged { path: PathBuf, reason: String },
}

#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    #[error(
        "the state directory {path} is in use by {holder}; stop that process or set another state_dir",
        holder = pid.map_or_else(|| "another process".to_owned(), |pid| format!("process {pid}"))
    )]
    InUse {
        path: PathBuf,
        /// The process that holds it, if its lock file names one.
        pid: Option<u32>,
    },
    /// The disk did not answer in time. The store is not damaged; open it again.
    #[error("cannot open the state store {path} within {seconds} s; check the disk's health")]
    TimedOut { path: PathBuf, seconds: u64 },
    #[error("cannot {action} {path}: {advice}")]
    Io { action: &'static str, path: PathBuf, advice: &'static str, source: io::Error },
    /// An older store could not be migrated. It is unchanged.
    #[error(
        "cannot migrate the state store {path} from schema version {from} to {to}: {reason}; the store is \
         unchanged"
    )]
    Migration { path: PathBuf, from: u32, to: u32, reason: String },
    /// A store that was just created cannot be used.
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
