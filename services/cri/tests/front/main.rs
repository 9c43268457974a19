//! The CRI front and the runtime connection against a scripted runtime, through real sockets.

mod containerd_api;
mod limits;
mod outage;
mod passthrough;
mod pull;
mod pull_bad_input;
mod support;
