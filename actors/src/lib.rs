//! The actors of the agent.
//!
//! Owns: what the agent decides. Each actor is a folder with a pure core (state + event + `now` ->
//! effects) and a thin actor that performs those effects.
//! In: verbs from the services above (typed messages), and settings.
//! Out: calls on the traits declared here ([`runtime::Runtime`], [`cluster::LeaseApi`], [`cluster::NodeApi`],
//! [`host::Host`]) and on [`keelson_storage::StateStore`]; services implement the former, so that every actor runs in a test on paused time with scripted
//! neighbours. No sockets are opened here.

pub mod clock;
pub mod cluster;
pub mod durable;
pub mod endpoints;
pub mod file_system;
pub mod host;
pub mod inspect;
pub mod lease;
pub mod metrics;
pub mod pulls;
pub mod reports;
pub mod request;
pub mod runtime;
pub mod status;
pub mod supervise;

#[cfg(test)]
mod actor_tests;
