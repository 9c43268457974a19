//! The ipvs backend of the proxy: virtual servers of the kernel's load balancer.
//!
//! Owns: virtual servers that carry our flag, the dummy interface `keelson-ipvs0`, chains and IP sets whose names begin with
//! `KEELSON-`, a jump to the chains in each of eight built-in chains, and the sysctls of IPVS. In: calls of
//! [`keelson_proxy::backend`]. Out: netlink requests; runs of `iptables-restore` and `ipset`.
//!
//! The layout (see `docs/decisions/0064`): each frontend is a virtual server, whose real servers are the endpoints. The
//! interface has the addresses of Services, so that their packets are delivered to the node, where IPVS takes them. IPVS
//! neither masquerades nor filters: a fixed number of rules does, by IP sets whose entries are the frontends.
//!
//! The modules, each of which uses those below it: [`Ipvs`] (driver); `backend`; `explain`, `print`, `probe`; `family` (one family,
//! and how it is synced); `servers` (virtual servers that are known, and their changes); `plan` (what is wanted); `sysctls`;
//! `kernel` (netlink).

mod backend;
mod driver;
mod explain;
mod family;
mod kernel;
mod plan;
mod print;
mod probe;
mod servers;
mod sysctls;
#[cfg(test)]
#[path = "../../../src/testing.rs"]
mod testing;

pub use driver::Ipvs;
