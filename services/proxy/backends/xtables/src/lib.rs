//! What the backends iptables and ipvs share: rules, IP sets, and the programs that write them.
//!
//! Owns: the names of chains and sets ([`names`]), rules as text ([`rule`]), what the kernel has ([`save`]), the difference
//! to what is wanted ([`changes`]), its way into the kernel ([`ruleset`]), the programs ([`programs`]), and what an
//! explanation or a report says ([`explain`], [`report`]). In: a [`ruleset::Plan`] of each family. Out: runs of `iptables-restore` and
//! `ipset`; netlink requests for entries of sets (`entries`).
//!
//! Both backends use the prefix [`names::PREFIX`]: the first full sync of one removes the chains and sets of the other.

pub mod changes;
mod entries;
pub mod explain;
mod generation;
pub mod names;
pub mod programs;
pub mod report;
pub mod rule;
pub mod ruleset;
pub mod save;
#[cfg(test)]
#[path = "../../../src/testing.rs"]
mod testing;

pub use programs::removal;
