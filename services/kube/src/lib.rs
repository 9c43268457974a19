//! The agent's connection to the API server.
//!
//! Owns: the address of the API server and the agent's credentials ([`ClusterSource`], [`Credential`]), requests for a
//! client certificate ([`ClientKey`]), the connections to the API server
//! ([`ApiServer`], which implements [`LeaseApi`](keelson_actor_system::cluster::LeaseApi) and
//! [`NodeApi`](keelson_actor_system::cluster::NodeApi)), and the watches of the agent ([`watch_node`], [`watch_pods`],
//! [`watch_endpoints`]).
//! In: calls of the actors. Out: HTTP requests, one for each call; answers and typed errors; the results of watches,
//! passed to a sink. Except for the watches, nothing here decides when or whether to retry.
//!
//! HTTP/2 is used if the server offers it, as every kube-apiserver does: its header compression makes a
//! Lease renewal small, and its PING frames detect a dead network on an idle connection.

mod access;
mod answers;
mod bodies;
mod credentials;
mod csr;
mod identity;
mod observe;
mod protobuf;
mod server;
mod signals;
mod source;
mod transport;
mod watch;

#[cfg(test)]
mod tests;

pub use access::{Access, AccessQuestion};
pub use csr::{
    CertificateError, ClientKey, IssuedValidity, NodeRequest, RequestState, issued_validity, node_user,
};
pub use identity::{Credential, CredentialKind, CredentialsInUse, CredentialsObserver, Validity};
pub use k8s_openapi::api::core::v1::Node;
pub use observe::{RequestObserver, RequestSeen};
pub use server::{ApiServer, ApiServerParts};
pub use signals::{Rollback, ServerSignals};
pub use source::{ClusterSource, ExplicitSource};
pub use transport::{KeepAlive, USER_AGENT};
pub use watch::{
    KnownPods, NodeSink, PodEvent, PodRef, PodSink, ServiceSelection, node_view, watch_endpoints, watch_node,
    watch_pods,
};
