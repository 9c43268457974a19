//! The harness of Keelson's suites: real components, each of the test's own.
//!
//! Owns: a containerd or CRI-O ([`containerd`], [`crio`]), a registry ([`registry`]), images ([`images`]), a proxy that
//! measures and breaks what goes between them ([`proxy`]), an agent ([`agent`]), CRI clients of two makes ([`cri`],
//! [`driver`], and
//! under load [`load`]), small disks that fill up or hang ([`disk`]), a cluster: etcd, API server, controllers and
//! kubelets ([`kube`]), service endpoints with consumers of them ([`endpoints`]), the network of a node with everybody
//! who asks and answers in it ([`net`]).
//! In: nothing but the programs that `make test` installs and builds. Out: nothing: every process, mount and file
//! that a test made is gone when it ends, however it ends.
//!
//! A missing component is a failure, never a skip. Everything listens on loopback or on unix sockets in the folder
//! of the test ([`scratch`]). [`node::Node`] holds what most tests need together.

// A test tells what it does on stderr; the demonstration talks to a person on stdout.
#![allow(clippy::print_stderr)]

pub mod agent;
pub mod containerd;
pub mod cri;
pub mod crio;
pub mod disk;
pub mod driver;
pub mod endpoints;
pub mod images;
pub mod kube;
pub mod load;
pub mod net;
pub mod node;
pub mod peers;
pub mod process;
pub mod proxy;
pub mod registry;
pub mod scratch;
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

/// Makes one test on CRI-O of each function named, which takes a [`containerd::Kind`] and returns
/// `anyhow::Result<()>`: `crio::NAME`.
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
