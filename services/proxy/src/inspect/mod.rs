//! Inspection of a running proxy.
//!
//! Owns: the gRPC service `keelson.proxy.v1.Proxy` with reflection and `grpc.health.v1` ([`serve_grpc`]), and over HTTP
//! the probes, metrics, JSON documents, the event stream, the ruleset as text and the page ([`serve_http`]). In: bound
//! listeners, and a [`ProxyView`]. Out: responses. Nothing can be changed here. Connections are limited by the same
//! code as those of the agent's debug endpoint.

mod grpc;
mod http;
mod view;

#[cfg(test)]
mod fake;

pub use grpc::serve_grpc;
pub use http::serve_http;
pub use keelson_serve::{Check, ServeError, ViewError};
pub use view::{Chunks, PrintSlots, ProxyView};
