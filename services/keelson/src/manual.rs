//! `keelson manual` (hidden, only in builds with debug assertions): the man pages of all commands.
//!
//! In: the definitions of the command line. Out: files `keelson.1`, `keelson-COMMAND.1` and so on. Packages ship the files, and a
//! program without this module.

use std::{fs, path::Path, process::ExitCode};

use anyhow::Context as _;

pub(crate) fn write(command: clap::Command, folder: &Path) -> anyhow::Result<ExitCode> {
    let doing = || format!("cannot write man pages to {}", folder.display());
    fs::create_dir_all(folder).with_context(doing)?;
    clap_mangen::generate_to(command, folder).with_context(doing)?;
    Ok(ExitCode::SUCCESS)
}
