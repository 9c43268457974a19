//! Test clusters: a control plane with kubelets ([`kube`]), service endpoints with consumers of them ([`endpoints`]),
//! the network of a node with its clients and servers ([`net`]), and a whole cluster of one node ([`one_node`]).
//!
//! In: the programs that `make test` installs and builds, and the hosts of `keelson-harness`. Out: nothing: every
//! process, namespace and file of a test is removed when it ends, however it ends. The program `keelson-cluster` is
//! `make cluster`.

// Tests log to stderr.
#![allow(clippy::print_stderr)]

pub mod endpoints;
pub mod kube;
pub mod manifests;
pub mod net;
pub mod one_node;
