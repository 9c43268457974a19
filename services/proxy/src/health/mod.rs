//! Health of the proxy, served over HTTP.
//!
//! Owns: [`ProxyHealth`] (per family: whether a change has waited too long to be programmed), the server of `/livez`
//! and `/healthz`, the servers of Services' health check node ports ([`HealthChecks`]), and the server of the metrics.
//! In: syncs ([`Health::queued`], [`Health::synced`]), the Node ([`Health::node`]), the Services that have such a port.
//! Out: responses for load balancers and probes, with kube-proxy's statuses, headers and bodies. Nothing here knows a
//! backend.
//!
//! Use, on a tokio runtime:
//! 1. `let health = Health::new(sync_period, max_staleness)`, cloned where it is needed. [`Health::queued`] is called
//!    when a change of a family arrives, [`Health::synced`] when everything of that family is programmed,
//!    [`Health::node`] with every NodeInfo.
//! 2. [`BoundServer::health`] and [`BoundServer::metrics`] for the two addresses in the settings; each serves until it
//!    is dropped.
//! 3. `let checks = HealthChecks::start(health, DEFAULT_RETRY)`; [`HealthChecks::apply`] after each sync, and when the
//!    node's addresses change.

mod checks;
mod server;
mod status;
#[cfg(test)]
mod tests;
mod zpages;

pub(crate) use checks::{
    DEFAULT_RETRY, HealthCheckState, HealthChecks, ListenAddresses, ServiceHealthCheck, SocketState,
};
pub(crate) use server::{BoundServer, MetricsPages};
pub(crate) use status::Health;
