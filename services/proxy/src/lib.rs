//! Makes Services work on a node: the backends of `keelson proxy`.
//!
//! Owns: what every backend needs of a Service ([`model`]), and the nftables backend ([`nft`]).
//! In: the states of the Endpoints API (by `keelson_client`). Out: rules in the kernel.

pub mod model;
pub mod nft;
