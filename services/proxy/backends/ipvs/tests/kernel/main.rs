//! The backend in a kernel with IPVS: packets between network namespaces. The kernel of the machine may have no IPVS, so
//! everything but `in_the_vm` is ignored there, and `in_the_vm` runs it in a virtual machine (`tests/vm/run.sh`).

#![allow(clippy::unwrap_used, clippy::expect_used)]

#[path = "../../../../src/testing.rs"]
mod testing;

mod life;
mod traffic;
mod world;

use std::{path::Path, process::Command};

/// Runs the ignored tests of this program in the VM. Their output is this test's.
#[test]
fn in_the_vm() {
    let runner = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../../tests/vm/run.sh");
    let program = std::env::current_exe().unwrap();
    // One after the other: their network namespaces have the same names.
    let ended = Command::new(runner).arg(program).args(["--ignored", "--test-threads=1"]).status();
    assert!(ended.expect("tests/vm/run.sh").success(), "the tests in the VM failed");
}
