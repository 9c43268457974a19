//! Owns: where the real components are. In: nothing. Out: paths of the programs, built or found once a test process.

use anyhow::{Context as _, Result, anyhow, bail};
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// containerd 2.4 and its shim, built from the Go modules in `tests/peers`.
pub fn containerd_v2() -> Result<PathBuf> {
    Ok(built("containerd")?.join("containerd"))
}

/// The CRI client of another make, built from `tests/peers/cri-driver`.
pub fn cri_driver() -> Result<PathBuf> {
    Ok(built("cri-driver")?.join("cri-driver"))
}

/// A program of the system, found in `PATH` or the folders of system programs.
pub fn system(program: &str, package: &str) -> Result<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .chain(["/usr/sbin", "/usr/bin", "/sbin", "/bin"].map(PathBuf::from))
        .map(|folder| folder.join(program))
        .find(|candidate| candidate.is_file())
        .ok_or_else(|| anyhow!("{program} is missing: install the Debian package {package} (make test does)"))
}

/// The `keelson` program: `KEELSON_BIN`, or the one in the target folder that this program was built into.
pub fn keelson() -> Result<PathBuf> {
    let path = match std::env::var_os("KEELSON_BIN") {
        Some(path) => PathBuf::from(path),
        None => {
            let own = std::env::current_exe().context("cannot tell where this program is")?;
            // target/<profile>/deps/<test>, or target/<profile>/<program>.
            let folder = own.parent().context("a program is in a folder")?;
            let profile = if folder.ends_with("deps") {
                folder.parent().context("deps is in a folder")?
            } else {
                folder
            };
            profile.join("keelson")
        }
    };
    if !path.is_file() {
        bail!("{} does not exist: build it (make test does), or name it in KEELSON_BIN", path.display());
    }
    Ok(path)
}

/// The folder of a peer, which is built when it is not there yet.
fn built(name: &str) -> Result<PathBuf> {
    static BUILT: OnceLock<Result<HashMap<String, PathBuf>, String>> = OnceLock::new();
    let all =
        BUILT.get_or_init(|| build().map_err(|e| format!("{e:#}"))).as_ref().map_err(|e| anyhow!("{e}"))?;
    all.get(name).cloned().with_context(|| format!("tests/peers/build.sh knows no {name}"))
}

fn build() -> Result<HashMap<String, PathBuf>> {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("peers/build.sh");
    let output =
        Command::new(&script).output().with_context(|| format!("cannot run {}", script.display()))?;
    if !output.status.success() {
        bail!(
            "{} failed with {}:\n{}",
            script.display(),
            output.status,
            String::from_utf8_lossy(&output.stderr)
        );
    }
    let text = String::from_utf8(output.stdout).context("build.sh prints text")?;
    Ok(text
        .lines()
        .filter_map(|line| line.split_once('='))
        .map(|(name, path)| (name.to_owned(), PathBuf::from(path)))
        .collect())
}
