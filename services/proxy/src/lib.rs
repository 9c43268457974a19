//! Makes Services work on a node: the backends of `keelson proxy`.
//!
//! Owns: what every backend needs of a Service ([`model`]), and the nftables backend ([`nft`]).
//! In: the states of the Endpoints API (by `keelson_client`). Out: rules in the kernel.

pub mod addresses;
pub mod conntrack;
pub mod health;
pub mod inspect;
pub mod ip_families;
pub mod leftovers;
pub mod metrics;
pub mod model;
pub mod nft;
pub mod once;
pub mod options;
mod pace;
pub mod programmer;
pub mod run;
#[cfg(test)]
mod testing;
