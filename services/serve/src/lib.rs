//! Servers of Keelson: the shared parts.
//!
//! Owns: sockets ([`unix`], [`tcp`]), accepting connections ([`AcceptFailures`]), gRPC framing, server, health and
//! reflection ([`grpc`]), over HTTP the gate, probes, JSON documents, event streams and pages ([`http`]), and the samples
//! of the last hour ([`history`]). In: bound listeners, and what is to be served. Out: answers. Nothing here depends on actors, settings or a service.

mod accept;
mod connection;
mod error;
mod follow;
pub mod grpc;
pub mod history;
pub mod http;
pub mod tcp;
pub mod text;
pub mod unix;
mod view;

pub use accept::{AcceptFailures, LogLimit, PAUSE as ACCEPT_PAUSE};
pub use error::ServeError;
pub use follow::{Due, Follower};
pub use view::{ANSWER_TIMEOUT, Check, ViewError, within_time};
