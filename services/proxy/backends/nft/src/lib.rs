//! The nftables backend of the proxy.
//!
//! Owns: the tables `ip keelson` and `ip6 keelson`, and nothing else in the kernel. In: calls of [`keelson_proxy::backend`].
//! Out: netlink transactions.
//!
//! The layout (see `docs/decisions`): every frontend (address, protocol, port) is one element of a map to the *number*
//! of its service port. The packet's priority holds the number until the packet is translated a few rules later, in the
//! same chain traversal; `nat-postrouting` clears it. All further maps are keyed by the number. So the number of chains
//! depends on the number of *different counts* of endpoints, and a change of one endpoint changes a few elements.
//!
//! The modules, each of which uses those below it: [`Nft`] (driver) and [`NftBackend`]; `table` (one family's table,
//! and how it is synced) and `explain`; `plan` (its elements); [`kernel`] (netlink); [`ruleset`] (rules, as text and as
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
