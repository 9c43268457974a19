//! The debug API over gRPC.
//!
//! Owns: the server on the unix socket: the services Debug, Node and Inspection, reflection (v1 and v1alpha) and
//! health. In: a bound listener, the view, and a shutdown future. Out: answers until shutdown, then a short time to
//! finish.

mod inspection;
mod node;
mod service;
#[cfg(test)]
mod tests;

use std::future::Future;

use keelson_proto::{
    debug::debug_server::DebugServer, endpoints::inspection_server::InspectionServer,
    node::node_server::NodeServer,
};
use keelson_serve::grpc::{GrpcApi, serve_ready};
use tokio::net::UnixListener;
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;

use crate::{AgentView, ServeError, view::with_timeout};

pub(crate) use service::{DEFAULT_QUEUED, max_queued, no_such_actor};

const API: GrpcApi = GrpcApi {
    name: "debug API",
    services: &["keelson.debug.v1.Debug", "keelson.node.v1.Node", "keelson.endpoints.v1.Inspection"],
    connections: 512,
    calls: 128,
};

/// Health follows [`AgentView::readyz`]. At shutdown watchers get UNAVAILABLE, and calls that do not
/// finish within a second are cut off.
///
/// # Errors
/// The descriptors are broken.
pub async fn serve_grpc<V: AgentView>(
    listener: UnixListener,
    view: V,
    shutdown: impl Future<Output = ()> + Send,
) -> Result<(), ServeError> {
    let routes = |stop: CancellationToken| {
        Routes::new(DebugServer::new(service::DebugService::new(view.clone(), stop)))
            .add_service(NodeServer::new(node::NodeService::new(view.clone())))
            .add_service(InspectionServer::new(inspection::InspectionService::new(view.clone())))
    };
    let ready = || async {
        with_timeout(view.readyz()).await.is_ok_and(|checks| checks.iter().all(|check| check.ok))
    };
    serve_ready(listener, API, ready, routes, shutdown).await
}
