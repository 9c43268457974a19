//! Owns the plain file that is read first: the schema version of the store and the current generation (sled folder).
//! It is replaced by a rename, so that a switch to another generation is atomic, and has a checksum, so that a
//! damaged one is not taken for a newer one.

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use crate::seal::checksum;

const FILE: &str = "manifest";
const NEW_FILE: &str = "manifest.new";
const FIRST_LINE: &str = "keelson-state";

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Manifest {
    pub schema: u32,
    pub generation: u64,
}

#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ManifestError {
    #[error("cannot read {path}")]
    Io { path: PathBuf, source: io::Error },
    #[error("{path}: {reason}")]
    Damaged { path: PathBuf, reason: String },
}

impl Manifest {
    /// Reads the manifest of the store in `<state_dir>/state`.
    pub fn read(state_dir: &Path) -> Result<Manifest, ManifestError> {
        Self::read_from(&store_dir(state_dir))
    }

    /// Replaces the manifest of the store in `<state_dir>/state`, durably. No store may be open there.
    pub fn write(&self, state_dir: &Path) -> io::Result<()> {
        self.write_to(&store_dir(state_dir))
    }

    pub(crate) fn read_from(store: &Path) -> Result<Manifest, ManifestError> {
        let path = store.join(FILE);
        match fs::read(&path) {
            Ok(bytes) => parse(&bytes).map_err(|reason| ManifestError::Damaged { path, reason }),
            Err(source) => match source.kind() {
                io::ErrorKind::NotFound => {
                    Err(ManifestError::Damaged { path, reason: "the file is missing".to_owned() })
                }
                io::ErrorKind::IsADirectory => {
                    Err(ManifestError::Damaged { path, reason: "it is a directory".to_owned() })
                }
                _ => Err(ManifestError::Io { path, source }),
            },
        }
    }

    pub(crate) fn write_to(&self, store: &Path) -> io::Result<()> {
        let new = store.join(NEW_FILE);
        let mut file = File::create(&new)?;
        file.write_all(self.text().as_bytes())?;
        file.sync_all()?;
        fs::rename(&new, store.join(FILE))?;
        sync_dir(store)
    }

    pub(crate) fn generation_dir(&self, store: &Path) -> PathBuf {
        store.join(format!("g{}", self.generation))
    }

    fn text(&self) -> String {
        let body = self.body();
        format!("{body}check {:016x}\n", checksum(&[body.as_bytes()]))
    }

    fn body(&self) -> String {
        format!("{FIRST_LINE}\nschema {}\ngeneration {}\n", self.schema, self.generation)
    }
}

/// The generation that has this folder name.
pub(crate) fn generation_of(name: &str) -> Option<u64> {
    name.strip_prefix('g')?.parse().ok()
}

/// Makes renames and new files in a folder durable.
pub(crate) fn sync_dir(path: &Path) -> io::Result<()> {
    File::open(path)?.sync_all()
}

/// A newer version may add lines between the known ones and the checksum.
fn parse(bytes: &[u8]) -> Result<Manifest, String> {
    let text = std::str::from_utf8(bytes).map_err(|_| "it is not valid UTF-8".to_owned())?;
    let (body, check) = text.rsplit_once("check ").ok_or("it has no checksum")?;
    if check.trim_end() != format!("{:016x}", checksum(&[body.as_bytes()])) {
        return Err("its checksum does not match its content".to_owned());
    }
    let value = |name: &str| {
        let line = body.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        line.and_then(|value| value.parse::<u64>().ok()).ok_or(format!("it has no number for {name}"))
    };
    if body.lines().next() != Some(FIRST_LINE) {
        return Err(format!("the first line is not {FIRST_LINE:?}"));
    }
    let schema = u32::try_from(value("schema")?).map_err(|_| "the schema version is out of range")?;
    Ok(Manifest { schema, generation: value("generation")? })
}

pub(crate) fn store_dir(state_dir: &Path) -> PathBuf {
    state_dir.join("state")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packets_survive_a_round_trip() {
        let dir = tempfile::tempdir().unwrap();
        for manifest in [Manifest { schema: 2, generation: 1 }, Manifest { schema: 99, generation: u64::MAX }]
        {
            manifest.write_to(dir.path()).unwrap();
            assert_eq!(Manifest::read_from(dir.path()).unwrap(), manifest);
        }
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "nothing else is left behind");
    }

    #[test]
    fn every_flipped_bit_and_every_truncation_is_found() {
        let good = Manifest { schema: 2, generation: 17 }.text().into_bytes();
        assert!(parse(&good).is_ok());
        for position in 0..good.len() - 1 {
            for bit in 0..8 {
                let mut bad = good.clone();
                bad[position] ^= 1 << bit;
                assert!(parse(&bad).is_err(), "byte {position} bit {bit}");
            }
            assert!(parse(&good[..position]).is_err(), "cut at {position}");
        }
    }
}
