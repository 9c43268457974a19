//! Image pulls.
//!
//! Owns: the PullCoordinator, which decides which pulls run, wait or end ([`coordinator`]), the RuntimeClient, which
//! makes the calls ([`runtime`]), the decoded requests ([`mod@request`]) and the [`metrics`]. In: requests from the CRI
//! front, changes of pods, commands. Out: calls on the trait [`runtime::Runtime`], which a service implements, answers
//! to callers, the journal, Events on pods. No sockets are opened here.
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
