//! Maps that the programs of direct return and of pod devices both use, where both are on.
//!
//! Owns: [`Shared`]. In: the folders of both. Out: pins. Each has one of each map in its own folder, so that either finds out when
//! the maps of the other one are made anew.

use std::{
    fs, io,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
};

use super::KernelError;
use crate::layout::SHARED_MAPS;

#[derive(Debug, Clone)]
pub(crate) struct Shared {
    /// The maps of the other object.
    theirs: PathBuf,
}

impl Shared {
    pub(crate) const fn with(theirs: PathBuf) -> Self {
        Self { theirs }
    }

    /// Pins in `own` that lead to other maps than those of the other object, as far as it has some.
    fn differing(&self, own: &Path) -> Result<Vec<(PathBuf, PathBuf)>, KernelError> {
        let mut found = Vec::new();
        for map in SHARED_MAPS {
            let (theirs, ours) = (self.theirs.join(map.name), own.join(map.name));
            let is = inode(&theirs)?;
            if is.is_some() && is != inode(&ours)? {
                found.push((theirs, ours));
            }
        }
        Ok(found)
    }

    pub(crate) fn differs(&self, own: &Path) -> Result<bool, KernelError> {
        Ok(!self.differing(own)?.is_empty())
    }

    /// Before programs are loaded: the pins in `own` become those of the other object. Returns whether one was another one.
    pub(crate) fn take(&self, own: &Path) -> Result<bool, KernelError> {
        let mut was_another = false;
        for (theirs, ours) in self.differing(own)? {
            if ours.exists() {
                was_another = true;
                fs::remove_file(&ours).map_err(KernelError::file("remove", &ours))?;
            }
            link(&theirs, &ours)?;
        }
        Ok(was_another)
    }

    /// After programs were loaded: the other object finds what it does not have.
    pub(crate) fn give(&self, own: &Path) -> Result<(), KernelError> {
        fs::create_dir_all(&self.theirs).map_err(KernelError::file("make", &self.theirs))?;
        for map in SHARED_MAPS {
            let theirs = self.theirs.join(map.name);
            if !theirs.exists() {
                link(&own.join(map.name), &theirs)?;
            }
        }
        Ok(())
    }
}

fn link(from: &Path, to: &Path) -> Result<(), KernelError> {
    fs::hard_link(from, to).map_err(KernelError::file("make", to))
}

fn inode(pin: &Path) -> Result<Option<u64>, KernelError> {
    match fs::metadata(pin) {
        Ok(found) => Ok(Some(found.ino())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(KernelError::file("read", pin)(error)),
    }
}
