//! The user-space backend of the service proxy: it accepts the connections to Services and relays them to endpoints.
//!
//! Owns: sockets that listen at frontends ([`table`]), and what happens to a connection ([`plan`], [`relay`]). In: calls
//! of the proxy ([`keelson_proxy::backend`]). Out: sockets; where permitted, routes that lead the addresses of Services
//! to them. Nothing else of the kernel is changed, and all sockets end with the process.

mod affinity;
mod affinity_file;
mod backend;
mod driver;
mod explain;
#[cfg(test)]
mod isolation;
mod plan;
mod print;
mod proxy_protocol;
mod relay;
mod routes;
mod table;
#[cfg(test)]
#[cfg(target_os = "linux")]
#[path = "../../../src/testing.rs"]
mod testing;

pub use driver::Userspace;
