//! The base of every actor.
//!
//! Owns: time ([`clock`]), starting and restarting ([`supervise`]), sending and inspection ([`inspect`]), a store
//! that may not be open ([`durable`]), and the types that several groups of actors need: the API server
//! ([`cluster`]), file systems of the host ([`file_system`]) and reports for the node status ([`reports`]).
//! In: actors, messages, implementations of the traits by services. Out: mailboxes, restarts, views for the debug
//! API. This crate makes no decisions and knows no actor by name.

pub mod clock;
pub mod cluster;
pub mod durable;
pub mod file_system;
pub mod inspect;
pub mod reports;
pub mod supervise;
#[cfg(feature = "test-support")]
pub mod test_support;
pub mod timer;
