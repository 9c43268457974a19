//! Heartbeats: the real agent as a process with a real API server, etcd and node lifecycle controller, during faults of
//! one of them or of the network. The tests check the API server's audit log and its objects, or the record of a proxy
//! before it, and then what the agent reports.
//!
//! Names with `case_N` are case N of section 7 of the reference on heartbeats. Cases that would take hours are tested
//! on paused time beside the actors: `case_27_an_idle_hour_...` in
//! `actors/heartbeats/src/status/core/tests/economy.rs`, and the cases 22 to 30 of the Lease in
//! `actors/heartbeats/src/lease/core/case_tests.rs`.

// Times and figures, shown if a test fails.
#![allow(clippy::print_stderr)]

use keelson_harness::suite::Suite;

mod absent;
mod answers;
mod bootstrap;
mod bound;
mod clock;
mod common;
mod conditions;
mod contest;
mod controller;
mod credentials;
mod economy;
mod endpoints;
mod lease;
mod off;
mod runtime;

#[test]
fn in_one_process() -> anyhow::Result<()> {
    Suite { test: "in_one_process", threads: 4, skip: &[], env: &[] }.run()
}

/// Tests that depend on the version of the control plane, with the oldest supported one unless the environment names another
/// (`make kubernetes-check`).
#[test]
fn in_one_process_on_another_version() -> anyhow::Result<()> {
    let skip =
        &["absent::", "answers::", "clock::", "contest::", "economy::", "off::", "case_23", "runtime::"];
    let env = &[("KEELSON_TEST_KUBERNETES", "1.31")];
    Suite { test: "in_one_process_on_another_version", threads: 4, skip, env }.run()
}
