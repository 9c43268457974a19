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
//! The modules, each of which uses those below it: [`Iptables`] (driver); `backend`; `explain`, `print`, `removal`, `probe`;
//! `ruleset` (one family, and how it is synced); `plan` (its chains and sets); `save` (what the kernel has); `programs` and
//! `generation`; `tree`, `rule`, `names`.

mod backend;
mod driver;
mod explain;
mod generation;
mod names;
mod plan;
mod print;
mod probe;
mod programs;
mod removal;
mod rule;
mod ruleset;
mod save;
#[cfg(test)]
#[path = "../../../src/testing.rs"]
mod testing;
mod tree;

pub use driver::Iptables;
