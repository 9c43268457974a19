//! The eBPF backend of the proxy.
//!
//! Owns: programs at a cgroup and their maps, pinned below the BPF file system; and, through the backend nft, the tables of
//! nftables. In: calls of [`keelson_proxy::backend`]. Out: elements of maps, links, netlink transactions.
//!
//! Two levels (docs/decisions/0077). The *socket level* replaces the address of a Service by that of an endpoint when a
//! program on the node calls connect() or sendmsg(): no packet ever carries the address of the Service, so there is nothing to
//! translate and to track. What it does not translate stays as it is, and arrives at the *packet level*: traffic from outside,
//! and what needs the source of a packet or an answer of the kernel. The packet level is the whole backend nft, so what the
//! socket level leaves out costs time and changes nothing.
//!
//! An option beside them is *direct return* (`direct`, docs/decisions/0078): programs at devices for packets of outside clients,
//! as a second plan with maps of its own. What they leave arrives at the packet level as well.
//!
//! Another one are *pod devices* (`pods`, docs/decisions/0082): a program that hands packets between pods of the node over, where no
//! packet between them needs the tables. With direct return at tc, it hands replies to outside clients over as well, and direct return
//! their packets (docs/decisions/0083); `kernel` has the maps that both share.
//!
//! The modules, each of which uses those below it: [`Ebpf`] (driver) and `EbpfBackend`; `explain` and `print`; `sockets` (the
//! socket level, and how it is synced) and `stale` (UDP sockets of endpoints that are gone); `plan` (what is wanted);
//! `kernel` (maps, programs, links); `elements` and `layout` (what is in the maps). `programs/` has the programs in C.

mod backend;
mod direct;
mod driver;
mod elements;
mod explain;
mod kernel;
mod layout;
#[cfg(test)]
mod nets;
mod observer;
mod plan;
mod pods;
mod print;
mod sockets;
mod stale;
#[cfg(test)]
#[path = "../../../src/testing.rs"]
mod testing;

pub use driver::Ebpf;
