//! Looking into a proxy while it works.
//!
//! Owns: the gRPC service `keelson.proxy.v1.Proxy` with reflection and `grpc.health.v1` ([`serve_grpc`]), and over HTTP the
//! probes, metrics, JSON documents, the event stream, the ruleset as text and the page ([`serve_http`]).
//! In: bound listeners, and a [`ProxyView`], the trait by which a proxy lets itself be looked at.
//! Out: answers. Nothing can be changed here. Connections are bounded and watched as those of the agent's debug endpoint
//! are, by the same code.

mod grpc;
mod http;
mod view;

#[cfg(test)]
mod fake;

pub use grpc::serve_grpc;
pub use http::serve_http;
pub use keelson_serve::{Check, ServeError, ViewError};
pub use view::{Chunks, PrintSlots, ProxyView};
