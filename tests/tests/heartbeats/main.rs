//! Heartbeats: the real agent as a process before a real API server, etcd and node lifecycle controller, while what is
//! between them or one of them fails. What is asserted is what the API server's audit log and its objects say, or the
//! record of a proxy before it, and then what the agent says of itself.
//!
//! Names with `case_N` are case N of section 7 of the reference on heartbeats. What would take hours is proven on
//! paused time beside the actors: `case_27_an_idle_hour_...` in `actors/heartbeats/src/status/core/tests/economy.rs`, and the
//! cases 22 to 30 of the Lease in `actors/heartbeats/src/lease/core/case_tests.rs`.

// What a test tells is shown when it fails: times and figures.
#![allow(clippy::print_stderr)]

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
