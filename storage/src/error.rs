//! Owns the errors of the crate: [`StoreError`] for a store that is open, [`OpenError`] for opening one.

use std::io;
use std::path::PathBuf;

use crate::store::BadRecord;
use crate::table::Table;

/// A store could not do what it was asked.
///
/// After an error of [`crate::StateStore::apply`] the batch has not been acknowledged: it is there whole or not
/// at all, and applying it again is right.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// A key is longer than [`crate::MAX_KEY_LEN`].
    #[error("a key of {len} bytes for table {table} is too long: at most {max} bytes")]
    KeyTooLong {
        /// The table it was for.
        table: Table,
        /// Its length.
        len: usize,
        /// The limit.
        max: usize,
    },
    /// A value is longer than [`crate::MAX_VALUE_LEN`].
    #[error("a value of {len} bytes for {table}/{key} is too long: at most {max} bytes")]
    ValueTooLong {
        /// The table it was for.
        table: Table,
        /// The record's key.
        key: String,
        /// Its length.
        len: usize,
        /// The limit.
        max: usize,
    },
    /// A value could not be turned into JSON.
    #[error("cannot encode record {table}/{key} as JSON")]
    Encode {
        /// The table it was for.
        table: Table,
        /// The record's key.
        key: String,
        /// Why.
        source: serde_json::Error,
    },
    /// A record is not what its reader expects.
    #[error("{0}")]
    Decode(BadRecord),
    /// sled reported an error; the store reopens itself at the next call.
    #[error("{operation} failed in the state store {path}; it is reopened at the next use")]
    Backend {
        /// What was being done.
        operation: &'static str,
        /// The store's folder.
        path: PathBuf,
        /// What sled said.
        source: sled::Error,
    },
    /// The file system reported an error; the store reopens itself at the next call.
    #[error("{operation} failed in the state store {path}; check the disk's health and free space")]
    Io {
        /// What was being done.
        operation: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// sled panicked; the store reopens itself at the next call.
    #[error("{operation} panicked in the state store {path} ({message}); it is reopened at the next use")]
    Panicked {
        /// What was being done.
        operation: &'static str,
        /// The store's folder.
        path: PathBuf,
        /// The panic's message.
        message: String,
    },
    /// The disk (or sled) did not answer in time; the store is copied and reopened at the next call.
    #[error("{operation} did not end within {seconds} s in the state store {path}; check the disk's health")]
    TimedOut {
        /// What was being done.
        operation: &'static str,
        /// The store's folder.
        path: PathBuf,
        /// How long was waited.
        seconds: u64,
    },
    /// The store is not open: its disk refuses or hangs, another process holds it, or it has been closed.
    #[error("the state store {path} is not open: {reason}")]
    NotOpen {
        /// The store's folder.
        path: PathBuf,
        /// Why not.
        reason: String,
    },
    /// What is on disk no longer is what was acknowledged.
    #[error(
        "the state store {path} is damaged: {reason}; the next start moves it aside and creates an empty one"
    )]
    Damaged {
        /// The store's folder.
        path: PathBuf,
        /// What was found.
        reason: String,
    },
}

/// The state folder could not be opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// Another agent holds the folder.
    #[error(
        "the state directory {path} is in use by {holder}; stop that process or set another state_dir",
        holder = pid.map_or_else(|| "another process".to_owned(), |pid| format!("process {pid}"))
    )]
    InUse {
        /// The state folder.
        path: PathBuf,
        /// The process that holds it, where its lock file says so.
        pid: Option<u32>,
    },
    /// The disk did not answer in time. The store is not damaged for that; opening it again is right.
    #[error("cannot open the state store {path} within {seconds} s; check the disk's health")]
    TimedOut {
        /// The store's folder.
        path: PathBuf,
        /// How long was waited.
        seconds: u64,
    },
    /// The file system refused.
    #[error("cannot {action} {path}: {advice}")]
    Io {
        /// What was being done.
        action: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// What to do about it.
        advice: &'static str,
        /// What the system said.
        source: io::Error,
    },
    /// An older store could not be migrated. It is as it was.
    #[error(
        "cannot migrate the state store {path} from schema version {from} to {to}: {reason}; the store is \
         unchanged"
    )]
    Migration {
        /// The store's folder.
        path: PathBuf,
        /// Version of the store.
        from: u32,
        /// Version this binary works with.
        to: u32,
        /// Why not.
        reason: String,
    },
    /// A store that was just made cannot be used.
    #[error("cannot use the new state store {path}: {reason}; check the disk's health")]
    Unusable {
        /// The store's folder.
        path: PathBuf,
        /// Why not.
        reason: String,
    },
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
