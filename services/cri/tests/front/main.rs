//! The CRI front and the runtime connection against a scripted runtime, through real sockets.

mod passthrough;
mod support;
