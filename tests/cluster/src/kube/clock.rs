//! Owns: a separate wall clock for one program. In: steps, at any moment. Out: additions to the program's environment.
//!
//! The clock continues at its own rate after a step. The monotonic clock does not change, as on a machine whose wall
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
    /// A clock without an offset. Its setting is stored in the folder.
    pub fn new(folder: &Path) -> Result<Self> {
        let clock = Self { library: peers::libfaketime()?, file: folder.join("clock") };
        clock.set(0)?;
        Ok(clock)
    }

    /// Sets how many seconds the programs' clock is ahead of the true one, or behind it if negative.
    pub fn set(&self, seconds: i64) -> Result<()> {
        // Replaced atomically: the programs read it at every query of the time.
        write_secret(&self.file, &format!("{seconds:+}s\n")).context("cannot set the clock")
    }

    /// Environment of a program, which is read at its start.
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
