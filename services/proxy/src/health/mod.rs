//! Health of the proxy, served over HTTP.
//!
//! Owns: [`ProxyHealth`] (by family: has a change waited too long for its way into the kernel?), the server of `/livez` and
//! `/healthz`, the servers of Services' health check node ports ([`HealthChecks`]), and the server of the metrics. In: what
//! the backend does ([`Health::queued`], [`Health::synced`], [`Health::node`]), the Services that have such a port. Out:
//! answers that load balancers and probes read, with kube-proxy's statuses, headers and bodies. Nothing here knows a backend.
//!
//! Use, on a tokio runtime:
//! 1. `let health = Health::new(sync_period, max_staleness)`, cloned where it is needed. The backend says [`Health::queued`] for a family
//!    when it hears of a change, [`Health::synced`] after everything of that family is in the kernel. Every NodeInfo goes to
//!    [`Health::node`].
//! 2. [`BoundServer::health`] and [`BoundServer::metrics`] for the two addresses in the settings; each serves until it is dropped.
//! 3. `let checks = HealthChecks::start(health, DEFAULT_RETRY)`; after each sync, and when the node's addresses change,
//!    [`HealthChecks::apply`].

mod checks;
mod server;
mod status;
#[cfg(test)]
mod tests;
mod zpages;

pub(crate) use checks::{
    DEFAULT_RETRY, HealthCheckState, HealthChecks, ListenOn, ServiceHealthCheck, SocketState,
};
pub(crate) use server::{BoundServer, MetricsPages};
pub(crate) use status::Health;
