//! What `keelson version` tells of the build.
//!
//! In: `KEELSON_BUILD_VERSION` (`make packages` sets it from the git tag), git, cargo. Out: variables of the compiler. No time, and
//! nothing of the machine: the same commit and compiler build the same program.

use std::{env, process::Command};

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-env-changed=KEELSON_BUILD_VERSION");
    // Both change when another commit is checked out or made. cargo builds again whenever a named file is missing.
    for name in ["HEAD", "logs/HEAD"] {
        if let Some(path) = output("git", &["rev-parse", "--git-path", name])
            && std::path::Path::new(&path).exists()
        {
            println!("cargo:rerun-if-changed={path}");
        }
    }
    let version = env::var("KEELSON_BUILD_VERSION").ok().filter(|version| !version.is_empty());
    let version = version.unwrap_or_else(|| format!("{}-dev", variable("CARGO_PKG_VERSION")));
    let commit = output("git", &["rev-parse", "HEAD"]).unwrap_or_default();
    let compiler = output(&variable("RUSTC"), &["--version"]).unwrap_or_default();
    println!("cargo:rustc-env=KEELSON_BUILD_VERSION={version}");
    println!("cargo:rustc-env=KEELSON_BUILD_COMMIT={commit}");
    println!("cargo:rustc-env=KEELSON_BUILD_TARGET={}", variable("TARGET"));
    println!("cargo:rustc-env=KEELSON_BUILD_COMPILER={compiler}");
}

fn variable(name: &str) -> String {
    env::var(name).unwrap_or_default()
}

/// `None` without the program, and if it fails.
fn output(program: &str, arguments: &[&str]) -> Option<String> {
    let output = Command::new(program).args(arguments).output().ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
}
