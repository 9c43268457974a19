//! The nftables backend.
//!
//! Owns: the tables `ip keelson` and `ip6 keelson`, and nothing else in the kernel. In: [`crate::model::ServicePort`]s.
//! Out: netlink transactions.
//!
//! The layout (see `docs/decisions`): every frontend (address, protocol, port) is one element of a map that gives the
//! *number* of its service port. The priority of the packet holds the number until the packet is translated a few rules later,
//! in the same chain traversal; `nat-postrouting` clears it. All further maps are keyed by the number. So the number of chains depends on how many *different counts* of endpoints there are, and a change of one
//! endpoint is a change of some elements.

pub mod chain;
pub mod element;
pub mod explain;
pub mod flowtable;
pub mod kernel;
pub mod plan;
pub mod programme;
pub mod ruleset;
pub mod strangers;
