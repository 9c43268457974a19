//! The debug endpoint of the agent: looking inside while it works.
//!
//! Owns: the gRPC services `keelson.debug.v1.Debug`, `keelson.node.v1.Node` and `keelson.endpoints.v1.Inspection`
//! with reflection and `grpc.health.v1` ([`serve_grpc`]), and over HTTP the probes, metrics, JSON documents, the event
//! stream and the page ([`serve_http`]).
//! In: bound listeners, and an [`AgentView`], the trait by which the agent lets itself be looked at.
//! Out: answers. Nothing here decides anything about pulls, heartbeats or endpoints; what can be changed, the
//! limit and the node conditions of other processes, is handed to the view.
//!
//! Every client is taken to be slow, stuck or broken: watchers get the newest state and not a backlog,
//! connections are bounded in number, header size and time, and a view that does not answer becomes a
//! clear error after [`ANSWER_TIMEOUT`].

mod access;
mod endpoints;
mod grpc;
mod http;
mod view;

#[cfg(test)]
mod fake;

pub use grpc::serve_grpc;
pub use http::serve_http;
pub use keelson_serve::{ANSWER_TIMEOUT, Check, ServeError, ViewError};
pub use view::{AgentView, ConditionError};
