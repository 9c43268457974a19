//! Faults: the real agent between real callers, a real containerd and a real registry, while one of them dies, hangs,
//! lies or misbehaves. What is asserted is what callers, the registry and containerd see, not what the agent says of
//! itself, wherever that can be told apart.
//!
//! Names with `case_N` are case N of section 7 of the reference on CRI image pulls.

// What a test tells is shown when it fails: seeds and figures.
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
