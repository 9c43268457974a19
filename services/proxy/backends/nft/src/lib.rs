//! The nftables backend of the proxy.
//!
//! Owns: the tables `ip keelson` and `ip6 keelson`, and nothing else in the kernel. In: calls of [`keelson_proxy::backend`].
//! Out: netlink transactions.
//!
//! The layout (see `docs/decisions`): every frontend (address, protocol, port) is one element of a map that gives the
//! *number* of its service port. The priority of the packet holds the number until the packet is translated a few rules later,
//! in the same chain traversal; `nat-postrouting` clears it. All further maps are keyed by the number. So the number of chains
//! depends on how many *different counts* of endpoints there are, and a change of one endpoint is a change of some elements.
//!
//! The modules, each of which uses those below it: [`Nft`] (driver) and [`NftBackend`]; `table` (what one family's table is and
//! what brings it up to date) and `explain`; `plan` (its elements); [`kernel`] (netlink); [`ruleset`] (rules, as text and as
//! expressions); [`chain`] and [`element`] (names).

mod backend;
pub mod chain;
mod driver;
pub mod element;
mod explain;
mod flowtable;
pub mod kernel;
mod kube_proxy;
mod plan;
pub mod ruleset;
mod table;
#[cfg(test)]
#[path = "../../../src/testing.rs"]
mod testing;

pub use backend::NftBackend;
pub use driver::Nft;
