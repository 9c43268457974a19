//! Image pulls.
//!
//! Owns: the PullCoordinator, which decides which pulls run, wait or end ([`coordinator`]), the RuntimeClient, which makes the
//! calls ([`runtime`]), what callers ask for ([`mod@request`]) and what is counted ([`metrics`]).
//! In: requests from the CRI front, news of pods, commands from people. Out: calls on the trait [`runtime::Runtime`], which
//! a service implements, answers for callers, the journal, Events on pods. No sockets are opened here.
//!
//! ```text
//!  coordinator ──► runtime ──► request
//! ```

pub mod coordinator;
pub mod metrics;
pub mod request;
pub mod runtime;

#[cfg(test)]
mod actor_tests;
