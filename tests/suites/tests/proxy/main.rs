//! Packets through a service proxy: real Services and EndpointSlices at a real API server, a real network of a node in
//! network namespaces, real connections over TCP, UDP and SCTP. The tests check who answered, which source it saw, and
//! whether a connection without an endpoint was rejected or dropped.
//!
//! Names with `case_N` are case N of section 8 of the reference on service proxies. `KEELSON_PROXY_SUBJECT=kube-proxy`
//! runs the same against the real kube-proxy, in mode nftables or that of `KEELSON_TEST_PROXY_BACKEND` (`make conformance-kube-proxy`). Both must behave the same: a test that branches on the subject is about how rules are
//! written, and `docs/kube-proxy-differences.md` explains why.

// Shown if a test fails.
#![allow(clippy::print_stderr)]

use keelson_harness::suite::Suite;
use std::path::Path;
use std::process::Command;

mod affinity;
mod choice;
mod common;
mod conntrack;
mod crowd;
mod expect;
mod frontends;
mod health;
mod held;
mod node;
mod node_ports;
mod objects;
mod operations;
mod packets;
mod policies;
mod priority;
mod ranges;
mod slices;
mod subject;
mod topology;

#[test]
fn in_one_process() -> anyhow::Result<()> {
    Suite { test: "in_one_process", threads: 4, skip: &[], env: &[] }.run()
}

#[test]
fn in_one_process_with_iptables_legacy() -> anyhow::Result<()> {
    with_backend(
        "in_one_process_with_iptables_legacy",
        &[IPTABLES, ("KEELSON_PROXY__IPTABLES_VARIANT", "legacy")],
    )
}

#[test]
fn in_one_process_with_iptables_nft() -> anyhow::Result<()> {
    with_backend("in_one_process_with_iptables_nft", &[IPTABLES, ("KEELSON_PROXY__IPTABLES_VARIANT", "nft")])
}

/// The kernel of the machine may have no IPVS.
#[test]
fn in_one_process_with_ipvs_in_the_vm() -> anyhow::Result<()> {
    in_the_vm(
        "in_one_process_with_ipvs_in_the_vm",
        &[(subject::BACKEND, "ipvs"), ("KEELSON_TEST_PATIENCE", "2")],
    )
}

/// The oldest kernel of docs/ebpf.md, without JIT.
#[test]
fn in_one_process_with_ebpf_in_the_vm() -> anyhow::Result<()> {
    in_the_vm(
        "in_one_process_with_ebpf_in_the_vm",
        &[(subject::BACKEND, "ebpf"), ("KEELSON_TEST_PATIENCE", "2")],
    )
}

/// In a virtual machine, with the control plane outside of it.
fn in_the_vm(test: &'static str, env: &'static [(&'static str, &'static str)]) -> anyhow::Result<()> {
    if std::env::var_os("NEXTEST_RUN_ID").is_none() {
        return Ok(());
    }
    let cluster = common::run(async { Ok(common::shared().await?.cluster.description("10.0.2.2")) })?;
    let mut vm = Command::new(Path::new(env!("CARGO_MANIFEST_DIR")).join("../vm/run.sh"));
    vm.env("KEELSON_VM_MEMORY", "2500").env("KEELSON_VM_TIMEOUT", "3000");
    vm.args(["env", &format!("{}={cluster}", keelson_cluster::kube::OUTSIDE)]);
    if let Ok(subject) = std::env::var(subject::SUBJECT) {
        vm.arg(format!("{}={subject}", subject::SUBJECT));
    }
    let is_kube_proxy = subject::Subject::get() == subject::Subject::KubeProxy;
    let known = if is_kube_proxy { subject::KUBE_PROXY_IPVS } else { &[] };
    Suite { test, threads: 2, skip: &[], env }.run_by(vm, known)
}

#[test]
fn in_one_process_with_ebpf() -> anyhow::Result<()> {
    with_backend("in_one_process_with_ebpf", &[(subject::BACKEND, "ebpf")])
}

#[test]
fn in_one_process_with_userspace() -> anyhow::Result<()> {
    with_backend("in_one_process_with_userspace", &[(subject::BACKEND, "userspace")])
}

const IPTABLES: (&str, &str) = (subject::BACKEND, "iptables");

fn with_backend(test: &'static str, env: &'static [(&'static str, &'static str)]) -> anyhow::Result<()> {
    Suite { test, threads: 4, skip: &[], env }.run()
}
