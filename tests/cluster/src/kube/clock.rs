//! Owns: another wall clock for one program. In: steps, at any moment. Out: what to add to the program's environment.
//!
//! The clock goes on at its own pace after a step. The monotonic clock stays what it is, as on a machine whose wall
//! clock is set.

use super::pki::write_secret;
use anyhow::{Context as _, Result};
use keelson_harness::peers;
use std::path::{Path, PathBuf};

/// A wall clock that can be set, for programs that are started with its environment.
#[derive(Debug)]
pub struct FakeClock {
    library: PathBuf,
    file: PathBuf,
}

impl FakeClock {
    /// A clock that is right as yet. Its setting is kept in the folder.
    pub fn new(folder: &Path) -> Result<Self> {
        let clock = Self { library: peers::libfaketime()?, file: folder.join("clock") };
        clock.set(0)?;
        Ok(clock)
    }

    /// From now on the programs' clock is this many seconds ahead of the true one, or behind it.
    pub fn set(&self, seconds: i64) -> Result<()> {
        // Replaced in one step: the programs read it whenever they ask what time it is.
        write_secret(&self.file, &format!("{seconds:+}s\n")).context("cannot set the clock")
    }

    /// What a program needs in its environment, which is read at its start.
    pub fn env(&self) -> [(String, String); 4] {
        [
            ("LD_PRELOAD", self.library.display().to_string()),
            ("FAKETIME_TIMESTAMP_FILE", self.file.display().to_string()),
            ("FAKETIME_NO_CACHE", "1".to_owned()),
            ("FAKETIME_DONT_FAKE_MONOTONIC", "1".to_owned()),
        ]
        .map(|(name, value)| (name.to_owned(), value))
    }
}
