//! Heartbeats: the real agent as a process before a real API server, etcd and node lifecycle controller, while what is
//! between them or one of them fails. What is asserted is what the API server's audit log and its objects say, or the
//! record of a proxy before it, and then what the agent says of itself.
//!
//! Names with `case_N` are case N of section 7 of the reference on heartbeats. What would take hours is proven on
//! paused time beside the actors: `case_27_an_idle_hour_...` in `actors/heartbeats/src/status/core/tests/economy.rs`, and the
//! cases 22 to 30 of the Lease in `actors/heartbeats/src/lease/core/case_tests.rs`.

// What a test tells is shown when it fails: times and figures.
#![allow(clippy::print_stderr)]

use keelson_harness::suite::Suite;

mod absent;
mod answers;
mod bootstrap;
mod bound;
mod clock;
mod conditions;
mod contest;
mod controller;
mod credentials;
mod economy;
mod endpoints;
mod lease;
mod off;
mod rig;
mod runtime;

#[test]
fn in_one_process() -> anyhow::Result<()> {
    Suite { test: "in_one_process", threads: 4, skip: &[], env: &[] }.run()
}

/// What depends on the version of the control plane, before the oldest one that is supported.
#[test]
fn in_one_process_on_1_31() -> anyhow::Result<()> {
    let skip =
        &["absent::", "answers::", "clock::", "contest::", "economy::", "off::", "case_23", "runtime::"];
    let env = &[("KEELSON_TEST_KUBERNETES", "1.31")];
    Suite { test: "in_one_process_on_1_31", threads: 4, skip, env }.run()
}
