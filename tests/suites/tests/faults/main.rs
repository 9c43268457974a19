//! Faults: the real agent between real callers, a real containerd and a real registry, while one of them dies, hangs,
//! or violates the protocol. The tests check what callers, the registry and containerd see rather than what the agent
//! reports, wherever they can be told apart.
//!
//! Names with `case_N` are case N of section 7 of the reference on CRI image pulls.

// Seeds and figures, shown if a test fails.
#![allow(clippy::print_stderr)]

mod cleanup;
mod clients;
mod common;
mod connection;
mod crowd;
mod fake;
mod image_fs;
mod jobs;
mod kills;
mod looking;
mod messages;
mod outage;
mod registry;
mod resume;
mod settings;
mod signals;
mod state;
mod store;
mod systemd;
