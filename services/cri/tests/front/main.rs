//! The CRI front and the runtime connection against a scripted runtime, through real sockets.

// The lints exempt test functions, not the helpers beside them.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod containerd_api;
mod containerd_errors;
mod decision;
mod limits;
mod outage;
mod passthrough;
mod pull;
mod pull_bad_input;
mod report;
mod support;
