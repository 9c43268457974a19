//! What every actor of the agent stands on.
//!
//! Owns: time ([`clock`]), starting and restarting ([`supervise`]), sending and looking into ([`inspect`]), a store that may
//! not be open ([`durable`]), and the nouns that more than one group of actors needs: the API server ([`cluster`]), file
//! systems of the host ([`file_system`]) and what actors report for the node status ([`reports`]).
//! In: actors, messages, what services implement of the traits. Out: mailboxes, restarts, views for people. Nothing is decided
//! here, and no actor is known by its name.

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
