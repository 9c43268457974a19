//! HTTP: servers for people and tools on the node, and servers that the network reaches.
//!
//! Owns: [`serve`] and [`gated`] (loopback servers: limits, hosts and methods), [`probe`], JSON documents
//! ([`Document`], [`Failure`]), event streams ([`EventStreams`]) and pages ([`Page`]); [`exposed`] for ports that any
//! client may reach.

mod document;
mod events;
pub mod exposed;
mod gate;
mod page;
mod probe;
mod server;

pub use document::{Document, Failure, OPEN_METRICS};
pub use events::{EventReader, EventStreams, event};
pub use gate::{Hosts, gated};
pub use page::Page;
pub use probe::probe;
pub use server::serve;

/// Content type of plain text.
pub const TEXT: &str = "text/plain; charset=utf-8";
/// Content type of JSON.
pub const JSON: &str = "application/json";
