//! File systems of the host.
//!
//! Owns: the size of a file system, and the trait [`FileSystemReader`] that a service implements. In: paths. Out:
//! readings, or why there is none.

use std::path::PathBuf;

use futures_util::future::BoxFuture;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct FileSystem {
    pub capacity_bytes: u64,
    /// Bytes that an unprivileged user can still have.
    pub available_bytes: u64,
    /// Inodes in all; 0 where the file system does not count them.
    pub inodes: u64,
    pub inodes_free: u64,
}

pub trait FileSystemReader: Send + Sync + 'static {
    /// The file system that holds `path`, or why it is not known. Never takes long: one that hangs is an error.
    fn file_system(&self, path: PathBuf) -> BoxFuture<'static, Result<FileSystem, String>>;
}
