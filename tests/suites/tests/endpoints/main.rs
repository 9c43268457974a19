//! Service endpoints from a real API server: the agent as a process, consumers of both APIs with the client library,
//! and faults of all of them. The tests check that consumers reach the state that the API server's objects result in
//! ([`ExpectedState`](keelson_cluster::endpoints::ExpectedState)), which revisions they see before and which they do
//! not, and the invariants of every state.
//!
//! Names with `case_N` are case N of section 8 of the reference on service proxies. The other cases are tables beside
//! the function that decides them, in `actors/endpoints/src/view/tests/`.

// Times, seeds and figures, shown if a test fails.
#![allow(clippy::print_stderr)]

use keelson_harness::suite::Suite;

mod changes;
mod common;
mod consistency;
mod demand;
mod disk;
mod kills;
mod large;
mod outages;
mod restarts;
mod restored;
mod rights;

/// One more than clusters that are in use most of the time: a test that waits for a cluster keeps it, and it is not started again.
const THREADS: u32 = 3;

#[test]
fn in_one_process() -> anyhow::Result<()> {
    Suite { test: "in_one_process", threads: THREADS, skip: &[], env: &[] }.run()
}

/// Tests that depend on the version of the control plane, with the oldest supported one unless the environment names another
/// (`make kubernetes-check`).
#[test]
fn in_one_process_on_another_version() -> anyhow::Result<()> {
    let skip = &["large::", "kills::", "consistency::", "disk::", "restarts::"];
    let env = &[("KEELSON_TEST_KUBERNETES", "1.31")];
    Suite { test: "in_one_process_on_another_version", threads: THREADS, skip, env }.run()
}
