//! The debug API of the agent.
//!
//! Owns: the gRPC services `keelson.debug.v1.Debug`, `keelson.node.v1.Node` and `keelson.endpoints.v1.Inspection`
//! ([`serve_grpc`]), and over HTTP the probes, metrics, JSON documents, the event stream and the page ([`serve_http`]).
//! In: bound listeners, and an [`AgentView`], the trait through which the agent is inspected. Out: answers. Nothing
//! here makes decisions about pulls, heartbeats or endpoints; changes of the limit and of the node conditions of other
//! processes are passed to the view.
//!
//! Every client may be slow, stuck or broken: watchers get the latest state and not a backlog, and a view that does not
//! answer becomes an error after [`ANSWER_TIMEOUT`].

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
