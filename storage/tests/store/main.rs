//! The stores as the agent uses them: the contract, the folder, schema versions, growth, and a disk that is full.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::print_stdout)]

#[path = "../common/mod.rs"]
mod common;
mod contract;
mod disk_full;
mod folder;
mod growth;
mod schema;
