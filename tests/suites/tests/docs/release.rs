//! docs/release.md: the version of a tag, in a repository of the test.

use crate::stories::{Story, blocks_of};
use anyhow::{Context as _, Result, ensure};
use keelson_harness::documents::repository;
use keelson_harness::scratch::Scratch;
use std::fs;
use std::path::Path;
use std::process::Command;

/// Standard output of a script in `folder`, with no settings of git but these.
fn run(folder: &Path, script: &str) -> Result<String> {
    let mut bash = Command::new("bash");
    bash.args(["-ec", script]).current_dir(folder).env("HOME", folder);
    for (key, value) in [("GIT_CONFIG_GLOBAL", "/dev/null"), ("GIT_CONFIG_SYSTEM", "/dev/null")] {
        bash.env(key, value);
    }
    for who in ["AUTHOR", "COMMITTER"] {
        bash.env(format!("GIT_{who}_NAME"), "a test").env(format!("GIT_{who}_EMAIL"), "test@example.com");
    }
    let output = bash.output().context("cannot run bash")?;
    ensure!(output.status.success(), "{script:?}: {output:?}");
    Ok(String::from_utf8(output.stdout)?.trim().to_owned())
}

/// As the head of scripts/version.sh and docs/release.md say.
#[test]
fn the_version_is_that_of_the_tag() -> Result<()> {
    let scratch = Scratch::new()?;
    let folder = scratch.dir("repository")?;
    scratch.dir("repository/scripts")?;
    for file in ["scripts/version.sh", "Cargo.toml"] {
        fs::copy(repository().join(file), folder.join(file)).with_context(|| format!("no {file}"))?;
    }
    let version = || run(&folder, "scripts/version.sh");
    let commit = |name: &str| {
        run(&folder, &format!("echo {name} > file && git add . && git commit -q -m {name}"))?;
        run(&folder, "git rev-parse --short=7 HEAD")
    };
    let declared = env!("CARGO_PKG_VERSION");
    ensure!(version()? == format!("{declared}-dev"), "without git: {}", version()?);

    run(&folder, "git init -q")?;
    commit("one")?;
    let hash = commit("two")?;
    ensure!(version()? == format!("{declared}-dev.2+g{hash}"), "without a tag: {}", version()?);
    run(&folder, "echo changed > file")?;
    ensure!(version()? == format!("{declared}-dev.2+g{hash}.dirty"), "changed: {}", version()?);
    run(&folder, "git checkout -q file")?;

    // Without packages and checks: the tag and its version.
    let blocks = blocks_of(Story::Release)?;
    let [block] = &*blocks else { anyhow::bail!("one block of commands makes the tag, not {blocks:?}") };
    let told = block.code.split_once("scripts/version.sh").context("the document asks for the version")?.1;
    let told = told.trim().trim_start_matches('#').trim().split(',').next().unwrap_or_default();
    ensure!(run(&folder, &block.code)? == told, "{told:?} is told, and it is {}", version()?);
    ensure!(told == "0.1.0", "the tag is v0.1.0, and {told:?} is told");
    ensure!(version()? == told, "the version is {}", version()?);
    run(&folder, "echo changed > file")?;
    ensure!(version()? == "0.1.0+dirty", "changed at the tag: {}", version()?);

    let hash = commit("three")?;
    ensure!(version()? == format!("0.1.0+1.g{hash}"), "after the tag: {}", version()?);
    run(&folder, "echo changed > file")?;
    ensure!(version()? == format!("0.1.0+1.g{hash}.dirty"), "changed after the tag: {}", version()?);
    Ok(())
}
