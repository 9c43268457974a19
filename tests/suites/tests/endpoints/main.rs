//! Service endpoints from a real API server: the agent as a process, consumers on both APIs by the client library, and
//! whatever happens to any of them. What is asserted is that consumers come to what the API server's own objects mean
//! ([`Truth`](keelson_cluster::endpoints::Truth)), which revisions they see on the way and which they do not, and what must
//! be true of every single state.
//!
//! Names with `case_N` are case N of section 8 of the reference on service proxies. The other cases are tables beside the
//! function that decides them, in `actors/endpoints/src/view/tests/`.

// What a test tells is shown when it fails: times, seeds and figures.
#![allow(clippy::print_stderr)]

use keelson_harness::suite::Suite;

mod changes;
mod consistency;
mod demand;
mod disk;
mod kills;
mod large;
mod outages;
mod restarts;
mod restored;
mod rig;
mod rights;

#[test]
fn in_one_process() -> anyhow::Result<()> {
    Suite { test: "in_one_process", threads: 2, skip: &[], env: &[] }.run()
}

/// What depends on the version of the control plane, before the oldest one that is supported.
#[test]
fn in_one_process_on_1_31() -> anyhow::Result<()> {
    let skip = &["large::", "kills::", "consistency::", "disk::", "restarts::"];
    let env = &[("KEELSON_TEST_KUBERNETES", "1.31")];
    Suite { test: "in_one_process_on_1_31", threads: 2, skip, env }.run()
}
