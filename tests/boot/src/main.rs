//! `make boot-check`: installs, upgrades, breaks and removes the packages on a Debian with systemd that boots in a virtual machine.
//!
//! Owns: the order of the cases. In: packages of this version and of a former one. Out: a table of what was seen, and exit code 1
//! if a case failed.
//!
//! The cases run in order on one node ([`cases`]): each begins with the state that the one before left, so the first that fails
//! ends the run. [`vm`] is the machine, [`guest`] runs commands in it, [`node`] is what the cases ask of the node.

#![allow(clippy::print_stdout, clippy::print_stderr)]

mod cases;
mod control_plane;
mod documents;
mod guest;
mod node;
mod vm;

use std::{
    fmt::Write as _,
    fs,
    path::{Path, PathBuf},
    process::ExitCode,
    time::Instant,
};

use anyhow::{Context as _, Result};
use clap::Parser;

use crate::{
    cases::{CASES, FIRST},
    node::Node,
    vm::Vm,
};

/// Install the packages on a node that boots, and break it
#[derive(Debug, Parser)]
#[command(name = "keelson-boot")]
struct Args {
    /// Package of this version
    #[arg(long, value_name = "DEB")]
    package: PathBuf,
    /// Package of a former version, for upgrades and downgrades
    #[arg(long, value_name = "DEB")]
    former: PathBuf,
    /// The program cri-driver (tests/peers)
    #[arg(long, value_name = "FILE")]
    cri_driver: PathBuf,
    /// Programs of Kubernetes (tests/peers)
    #[arg(long, value_name = "DIR")]
    kubernetes: PathBuf,
    /// The programs crictl and grpcurl (tests/peers)
    #[arg(long, value_name = "DIR")]
    node_tools: PathBuf,
    /// Directory for the report
    #[arg(long, default_value = "boot")]
    out: PathBuf,
    /// Run the cases up to this one
    #[arg(long, value_name = "CASE")]
    until: Option<String>,
    /// Leave out what is between enabling the units and this case
    #[arg(long, value_name = "CASE")]
    from: Option<String>,
}

fn main() -> Result<ExitCode> {
    let args = Args::parse();
    let tools = tempfile::tempdir()?;
    for (file, name) in [
        (&args.package, "keelson.deb"),
        (&args.former, "keelson-former.deb"),
        (&args.cri_driver, "cri-driver"),
        (&args.kubernetes.join("kubelet"), "kubelet"),
        (&args.kubernetes.join("kube-proxy"), "kube-proxy"),
        (&args.kubernetes.join("kubectl"), "kubectl"),
        (&args.node_tools.join("crictl"), "crictl"),
        (&args.node_tools.join("grpcurl"), "grpcurl"),
    ] {
        fs::copy(file, tools.path().join(name)).with_context(|| format!("cannot read {}", file.display()))?;
    }
    let scripts = tools.path().join("node");
    fs::create_dir(&scripts)?;
    for script in fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("node"))? {
        let script = script?;
        fs::copy(script.path(), scripts.join(script.file_name()))?;
    }

    let mut node = Node::new(Vm::create(tools.path())?, args.kubernetes.join("kubectl"), args.out.clone());
    let mut report = String::from("| case | seconds | what was seen |\n|---|---|---|\n");
    let mut failed = false;
    let from = args.from.as_deref().unwrap_or(CASES[FIRST].name);
    let first = CASES.iter().position(|case| case.name == from).context("--from: no such case")?;
    for case in CASES[..FIRST].iter().chain(&CASES[first.max(FIRST)..]) {
        let started = Instant::now();
        let result = (case.run)(&mut node);
        let seconds = started.elapsed().as_secs();
        failed = result.is_err();
        let seen = result.unwrap_or_else(|error| {
            eprintln!("{} failed: {error:#}\n{}", case.name, node.logs());
            format!("FAILED: {}", format!("{error:#}").lines().next().unwrap_or_default())
        });
        println!("{} ({seconds} s): {seen}", case.name);
        writeln!(report, "| {} | {seconds} | {seen} |", case.name)?;
        if failed || args.until.as_deref() == Some(case.name) {
            break;
        }
    }
    fs::create_dir_all(&args.out)?;
    fs::write(args.out.join("report.md"), report)?;
    Ok(if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}
