//! Lifecycle of a node, from its registration to its failure: the real agent with a real containerd, in a cluster with
//! a real API server, the real node lifecycle controller and, beside the agent, a stock kubelet. The tests check the
//! API server's audit log, its objects and all of their versions.
//!
//! Names with `case_N` are case N of section 7 of the reference on image pulls and heartbeats.

// Times and figures, shown if a test fails.
#![allow(clippy::print_stderr)]

use keelson_harness::suite::Suite;

mod alive;
mod common;
mod crio;
mod daemon_set;
mod dead_agent;
mod events;
mod exec;
mod image_gc;
mod kubectl;
mod pods;
mod register;
mod restarts;
mod rights;
mod runtime;
mod test_env;
mod together;
mod why_service;

#[test]
fn in_one_process() -> anyhow::Result<()> {
    Suite { test: "in_one_process", threads: 4, skip: &[], env: &[] }.run()
}
