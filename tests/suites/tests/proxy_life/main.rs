//! Lifecycle of a proxy: kills, restarts, upgrades, changes of its table by others, leftovers of a kube-proxy, few
//! rights, no agent; clients of the Services must not notice any of that.
//!
//! Real processes in a real network of a node ([`keelson_cluster::net::World`]), real connections. The agent reads a
//! folder of manifests, unless the test is about the API server. The kernel's rules are read with `nft -j` and followed
//! from frontends to endpoints by a separate reference ([`kernel`]), which shares no code with the proxy. Names with
//! `case_N` are case N of section 8 of the reference on service proxies.

// Tests log to stderr.
#![allow(clippy::print_stderr)]

mod absent;
mod any_backend;
mod backends;
mod churn;
mod common;
mod configuration;
mod ebpf;
mod foreign;
mod iptables;
mod ipvs;
mod kernel;
mod kills;
mod kube_proxy;
mod kube_proxy_ipvs;
mod kube_proxy_modes;
mod model;
mod once;
mod readers;
mod restarts;
mod rights;
mod single_stack;
mod traffic;
mod untracked;
mod userspace;
