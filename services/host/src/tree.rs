//! Small files of the kernel and of the system.
//!
//! Owns: [`Tree`], the root folder of these files, and the errors of reading one. In: paths relative
//! to the root. Out: text and numbers, or an error that names the file.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

#[derive(Debug, thiserror::Error)]
pub(crate) enum ReadError {
    #[error("cannot read {path}: {source}", path = .path.display())]
    Io { path: PathBuf, source: io::Error },
    /// The content does not match the kernel's documentation.
    #[error("{path} does not contain {expected}", path = .path.display())]
    Content { path: PathBuf, expected: &'static str },
}

impl ReadError {
    /// A missing file often only means that the kernel lacks a feature.
    pub(crate) fn is_absent(&self) -> bool {
        matches!(self, Self::Io { source, .. } if source.kind() == io::ErrorKind::NotFound)
    }
}

/// The root of the machine's files: `/`, or another folder in a container or a test.
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

    /// A file's text; invalid UTF-8 is replaced.
    pub(crate) fn text(&self, path: impl AsRef<Path>) -> Result<String, ReadError> {
        let path = self.path(path);
        match fs::read(&path) {
            Ok(bytes) => Ok(String::from_utf8_lossy(&bytes).into_owned()),
            Err(source) => Err(ReadError::Io { path, source }),
        }
    }

    /// A file that holds only a number.
    pub(crate) fn number(&self, path: impl AsRef<Path>) -> Result<u64, ReadError> {
        let path = path.as_ref();
        self.text(path)?.trim().parse().map_err(|_| self.content(path, "a whole number"))
    }

    /// The error for a file that does not contain `expected`.
    pub(crate) fn content(&self, path: impl AsRef<Path>, expected: &'static str) -> ReadError {
        ReadError::Content { path: self.path(path), expected }
    }
}
