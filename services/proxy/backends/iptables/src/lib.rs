//! The iptables backend of the proxy, for kernels without usable nftables.
//!
//! Owns: the chains and IP sets whose names begin with `KEELSON-`, a jump to them in each of six built-in chains, and the
//! sysctl `route_localnet`. In: calls of [`keelson_proxy::backend`]. Out: runs of `iptables-restore` and `ipset`.
//!
//! The layout (see `docs/decisions/0062`): a tree of chains leads from the destination address to the rules of its
//! frontends in a few steps, however many Services there are; another one does so for node ports. A service port has one
//! chain for each set of endpoints, with one rule per endpoint. What is refused and what is a hairpin connection is in IP
//! sets.
//!
//! The modules, each of which uses those below it: [`Iptables`] (driver); `backend`; `explain`, `print`, `probe`; `plan` (chains
//! and sets of a family); `tree`, `names`. How a family is synced, what the kernel has, programs and rules are in
//! [`keelson_proxy_xtables`].

mod backend;
mod driver;
mod explain;
mod names;
mod plan;
mod print;
mod probe;
#[cfg(test)]
#[path = "../../../src/testing.rs"]
mod testing;
mod tree;

pub use driver::Iptables;
use keelson_proxy_xtables::{changes, programs, removal, report, rule, ruleset, save};
