//! The life of a proxy: killed, restarted, upgraded, with its table changed by others, beside a kube-proxy's leftovers, with
//! few rights, without an agent; and what clients of the Services notice of that, which is nothing.
//!
//! Real processes in a real network of a node ([`keelson_cluster::net::World`]), real connections. The agent reads a folder of
//! manifests, but where the API server is the point. What the kernel has is read by `nft -j` and followed from frontends to
//! endpoints by a reference of this suite's own ([`kernel`]), which shares no code with the proxy. Names with `case_N` are
//! case N of section 8 of the reference on service proxies.

// A test tells what it does on stderr.
#![allow(clippy::print_stderr)]

mod absent;
mod churn;
mod configuration;
mod foreign;
mod kernel;
mod kills;
mod kube_proxy;
mod model;
mod once;
mod readers;
mod restarts;
mod rig;
mod rights;
mod single_stack;
mod traffic;
