//! Agents, proxies and clients of this version beside those of the former one: `make upgrade-check`, which builds the former program.
//!
//! Each test runs both ways: with the former version of one side, and with the former version of the other. docs/compatibility.md says
//! what is promised, and what of it each test shows.

#[path = "../pulls/common.rs"]
#[allow(dead_code)] // The suite pulls uses the rest.
mod common;
mod endpoints;
mod pulls;

use anyhow::Result;
use keelson_harness::peers;
use std::path::PathBuf;

/// This version's program and the former one's.
fn programs() -> Result<[PathBuf; 2]> {
    Ok([peers::keelson()?, peers::former()?])
}
