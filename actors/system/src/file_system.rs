//! File systems of the host.
//!
//! Owns: the size of a file system, and the trait [`FileSystemReader`] that a service implements. In: paths. Out:
//! readings, or the reason why there is none.

use std::path::PathBuf;

use futures_util::future::BoxFuture;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct FileSystem {
    pub capacity_bytes: u64,
    /// Available to unprivileged users.
    pub available_bytes: u64,
    /// 0 if the file system does not count inodes.
    pub inodes: u64,
    pub inodes_free: u64,
}

pub trait FileSystemReader: Send + Sync + 'static {
    /// The file system that contains `path`. Returns soon: a hanging file system is an error.
    fn file_system(&self, path: PathBuf) -> BoxFuture<'static, Result<FileSystem, String>>;
}
