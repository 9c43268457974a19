//! Test hosts: real components, separate for each test.
//!
//! Owns: a containerd or CRI-O ([`containerd`], [`crio`]), a registry ([`registry`]), images ([`images`]), a proxy that
//! measures and breaks the traffic between them ([`registry_proxy`]), an agent ([`agent`]), CRI clients in Rust and Go
//! ([`cri`], [`driver`], and under load [`load`]), small disks that fill up or hang ([`disk`]), and the code that the
//! repository's documents show ([`documents`]).
//! In: the programs that `make test` installs and builds. Out: nothing: every process, mount and file of a test is
//! removed when it ends, however it ends.
//!
//! A missing component is a failure, never a skip. Everything listens on loopback or on unix sockets in the folder of
//! the test ([`scratch`]). [`node::Node`] holds what most tests need together. Clusters and the network of a node are
//! in the crate `keelson-cluster`.

// Tests log to stderr.
#![allow(clippy::print_stderr)]

pub mod agent;
mod cgroups;
pub mod command;
pub mod containerd;
pub mod cri;
pub mod crio;
pub mod daemon;
pub mod disk;
pub mod documents;
pub mod driver;
pub mod fake_runtime;
pub mod images;
pub mod leases;
pub mod load;
pub mod node;
pub mod peers;
pub mod process;
pub mod registry;
pub mod registry_proxy;
pub mod scratch;
pub mod suite;
pub mod util;

/// Makes one test for each runtime of each function named, which takes a [`containerd::Kind`] and returns
/// `anyhow::Result<()>`: `debian16::NAME` and `v2::NAME`.
#[macro_export]
macro_rules! on_both_runtimes {
    ($($name:ident),* $(,)?) => {
        mod debian16 {
            $(#[tokio::test(flavor = "multi_thread")]
            async fn $name() -> anyhow::Result<()> {
                super::$name($crate::containerd::Kind::Debian16).await
            })*
        }
        mod v2 {
            $(#[tokio::test(flavor = "multi_thread")]
            async fn $name() -> anyhow::Result<()> {
                super::$name($crate::containerd::Kind::V2).await
            })*
        }
    };
}

/// Makes one test on CRI-O of each function named, which takes a [`containerd::Kind`] and returns `anyhow::Result<()>`:
/// `crio::NAME`.
#[macro_export]
macro_rules! on_crio {
    ($($name:ident),* $(,)?) => {
        mod crio {
            $(#[tokio::test(flavor = "multi_thread")]
            async fn $name() -> anyhow::Result<()> {
                super::$name($crate::containerd::Kind::Crio).await
            })*
        }
    };
}
