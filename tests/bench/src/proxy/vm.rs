//! The backend ipvs, which this machine's kernel may lack.
//!
//! Owns: [`measure`]: the same program in a virtual machine, once for each size. In: options. Out: the tables that it
//! prints. The control plane is outside of it, because the virtual machine has one processor. System calls are slow there: what is
//! measured compares two programs, and is no figure of a node.

use std::{env, path::Path, process::Command};

use anyhow::{Context as _, Result, ensure};
use keelson_cluster::kube::{ApiOptions, Cluster};
use keelson_harness::scratch::Scratch;

use super::{options::Options, test_env::OUTSIDE};

/// Address of this machine's loopback inside.
const LOOPBACK: &str = "10.0.2.2";
/// Of the virtual machine, in MiB: a control plane is not in it.
const MEMORY: &str = "6000";
/// After this many seconds it is ended, whatever it measures.
const TIMEOUT: &str = "5400";

/// Whether this is the program in the virtual machine.
pub(super) fn is_inside() -> bool {
    env::var_os(OUTSIDE).is_some()
}

/// Runs `wanted`, the command line, for each size.
pub(super) async fn measure(options: &Options, wanted: &[String]) -> Result<()> {
    for size in &options.sizes {
        let scratch = Scratch::new()?;
        let api = ApiOptions { args: vec!["--audit-log-path=".to_owned()], ..ApiOptions::default() };
        let cluster = Cluster::start_with(&scratch, &api).await?;
        let mut vm = Command::new(Path::new(env!("CARGO_MANIFEST_DIR")).join("../vm/run.sh"));
        vm.env("KEELSON_VM_MEMORY", MEMORY).env("KEELSON_VM_TIMEOUT", TIMEOUT);
        vm.arg("env").arg(format!("{OUTSIDE}={}", cluster.description(LOOPBACK)));
        vm.args(env::var("KEELSON_PEERS").map(|peers| format!("KEELSON_PEERS={peers}")));
        vm.arg(env::current_exe().context("cannot tell this program")?).args(wanted);
        // The last of two counts.
        vm.arg("--sizes").arg(format!("{}x{}", size.services, size.each));
        let ended = tokio::task::spawn_blocking(move || vm.status())
            .await?
            .context("cannot start tests/vm/run.sh")?;
        ensure!(ended.success(), "the measurement in the virtual machine ended with {ended}");
    }
    Ok(())
}
