//! The service proxy of a node, without the backends.
//!
//! Owns: the interface that backends implement ([`backend`]), the model of Services, the sync loop, health, conntrack,
//! metrics and the servers of a proxy. In: the states of the Endpoints API (through `keelson_client`), a
//! [`backend::Driver`]. Out: calls of the backend, which programs the kernel.
//!
//! What a backend needs compiles on every system; following the agent, the servers and conntrack need a unix.

pub mod addresses;
pub mod backend;
pub mod choice;
pub mod conntrack;
pub mod explain;
#[cfg(unix)]
mod health;
#[cfg(unix)]
pub mod inspect;
#[cfg(target_os = "linux")]
pub mod instance;
pub mod ip_families;
#[cfg(unix)]
pub mod leftovers;
#[cfg(unix)]
mod metrics;
pub mod model;
#[cfg(unix)]
pub mod netlink;
pub mod options;
mod pace;
#[cfg(unix)]
pub mod preview;
#[cfg(unix)]
pub mod run;
pub mod sync;
#[cfg(unix)]
pub mod takeover;
#[cfg(test)]
extern crate self as keelson_proxy; // For `testing`, which tests of backends include, too.
#[cfg(test)]
mod testing;
