//! The service proxy of a node, without the backends.
//!
//! Owns: the interface that backends implement ([`backend`]), the model of Services, the sync loop, health, conntrack,
//! metrics and the servers of a proxy. In: the states of the Endpoints API (through `keelson_client`), a
//! [`backend::Driver`]. Out: calls of the backend, which programs the kernel.

pub mod addresses;
pub mod backend;
pub mod conntrack;
pub mod explain;
mod health;
pub mod inspect;
pub mod ip_families;
pub mod leftovers;
mod metrics;
pub mod model;
pub mod options;
mod pace;
pub mod preview;
pub mod run;
pub mod sync;
#[cfg(test)]
extern crate self as keelson_proxy; // For `testing`, which tests of backends include, too.
#[cfg(test)]
mod testing;
