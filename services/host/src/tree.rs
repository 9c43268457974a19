//! Small files of the kernel and of the system.
//!
//! Owns: [`Tree`], the root below which they lie, and the ways in which reading one fails. In: paths relative
//! to the root. Out: text and numbers, or an error that names the file.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

/// Why something of the host is not known.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ReadError {
    /// The file cannot be read.
    #[error("cannot read {path}: {source}", path = .path.display())]
    Io { path: PathBuf, source: io::Error },
    /// The file says something else than the kernel's documentation promises.
    #[error("{path} does not contain {expected}", path = .path.display())]
    Content { path: PathBuf, expected: &'static str },
}

impl ReadError {
    /// Whether there is no such file, which often only means that the kernel lacks a feature.
    pub(crate) fn is_absent(&self) -> bool {
        matches!(self, Self::Io { source, .. } if source.kind() == io::ErrorKind::NotFound)
    }
}

/// Where the machine's files lie: `/`, or where a container or a test has them.
#[derive(Debug, Clone)]
pub(crate) struct Tree {
    root: PathBuf,
}

impl Tree {
    /// `root` holds `proc`, `sys` and `etc`.
    pub(crate) fn new(root: PathBuf) -> Self {
        Self { root }
    }

    pub(crate) fn path(&self, path: impl AsRef<Path>) -> PathBuf {
        self.root.join(path)
    }

    /// A file's text; what is not UTF-8 is replaced.
    pub(crate) fn text(&self, path: impl AsRef<Path>) -> Result<String, ReadError> {
        let path = self.path(path);
        match fs::read(&path) {
            Ok(bytes) => Ok(String::from_utf8_lossy(&bytes).into_owned()),
            Err(source) => Err(ReadError::Io { path, source }),
        }
    }

    /// A file that holds nothing but a number.
    pub(crate) fn number(&self, path: impl AsRef<Path>) -> Result<u64, ReadError> {
        let path = path.as_ref();
        self.text(path)?.trim().parse().map_err(|_| self.content(path, "a whole number"))
    }

    /// The error for a file that holds no `expected`.
    pub(crate) fn content(&self, path: impl AsRef<Path>, expected: &'static str) -> ReadError {
        ReadError::Content { path: self.path(path), expected }
    }
}
