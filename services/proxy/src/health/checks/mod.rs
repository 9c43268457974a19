//! The health check node ports of Services (`spec.healthCheckNodePort`), by which load balancers learn which nodes have
//! endpoints of a Service whose externalTrafficPolicy is Local.
//!
//! Owns: [`HealthChecks`], a task that runs a server on every wanted socket that it can bind. In: the Services that
//! have such a port, with their counts, and the listen addresses. Out: responses with kube-proxy's status, headers and
//! body, and [`HealthCheckState`]s for display.
//!
//! kube-proxy has such a server per family, which counts the endpoints of its family. So here each socket responds with
//! the count of its own family.

mod pages;
mod plan;
#[cfg(test)]
mod tests;

use std::{
    collections::BTreeMap,
    future,
    net::SocketAddr,
    sync::Arc,
    time::{Duration, Instant},
};

use keelson_client::ServiceName;
use keelson_serve::{http::exposed::serve, tcp::listen};
use tokio::{sync::watch, task::JoinHandle};
use tokio_util::sync::{CancellationToken, DropGuard};

pub(crate) use self::plan::{ListenAddresses, ServiceHealthCheck};
use self::{pages::CheckPages, plan::WantedSockets};
use super::status::Health;
use crate::model::Family;

/// Interval of retrying sockets that could not be bound. Every [`HealthChecks::apply`] also retries.
pub(crate) const DEFAULT_RETRY: Duration = Duration::from_secs(10);

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum SocketState {
    Open,
    /// It cannot be bound, for this reason, and is retried.
    Failing(String),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Socket {
    pub(crate) address: SocketAddr,
    pub(crate) state: SocketState,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct HealthCheckState {
    pub(crate) check: ServiceHealthCheck,
    /// Ordered. Empty if no local address matches `proxy.nodeport_addresses`.
    pub(crate) sockets: Vec<Socket>,
}

/// Serves the health check node ports until it is dropped.
#[derive(Debug)]
pub(crate) struct HealthChecks {
    wanted: watch::Sender<Arc<WantedSockets>>,
    states: watch::Receiver<Arc<Vec<HealthCheckState>>>,
    task: JoinHandle<()>,
}

impl HealthChecks {
    /// Starts without any port. `retry`: see [`DEFAULT_RETRY`]. Must be called within a runtime.
    pub(crate) fn start(health: Health, retry: Duration) -> Self {
        let (wanted, receiver) = watch::channel(Arc::new(WantedSockets::default()));
        let (sender, states) = watch::channel(Arc::new(Vec::new()));
        let servers = Servers { health, open: BTreeMap::new(), failing: BTreeMap::new() };
        let task = tokio::spawn(servers.run(receiver, sender, retry));
        Self { wanted, states, task }
    }

    /// Replaces the wanted ports. Counts change at once, sockets shortly after. Failed sockets are retried.
    pub(crate) fn apply(&self, checks: Vec<ServiceHealthCheck>, listen: ListenAddresses) {
        self.wanted.send_replace(Arc::new(WantedSockets { checks, listen }));
    }

    /// Status of each health check, in the order of [`Self::apply`], live.
    pub(crate) fn states(&self) -> watch::Receiver<Arc<Vec<HealthCheckState>>> {
        self.states.clone()
    }
}

impl Drop for HealthChecks {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Serves one socket until it is dropped.
struct Server {
    pages: Arc<CheckPages>,
    stop: DropGuard,
    task: JoinHandle<()>,
}

impl Server {
    /// Stops the server; its address is free afterwards.
    async fn close(self) {
        drop(self.stop);
        // The task does not panic; if it did, the socket would be closed as well.
        self.task.await.ok();
    }
}

struct Servers {
    health: Health,
    open: BTreeMap<SocketAddr, Server>,
    /// By address and Service, because two Services may want one address.
    failing: BTreeMap<(SocketAddr, ServiceName), String>,
}

impl Servers {
    async fn run(
        mut self,
        mut wanted: watch::Receiver<Arc<WantedSockets>>,
        states: watch::Sender<Arc<Vec<HealthCheckState>>>,
        retry: Duration,
    ) {
        let mut done = Arc::new(WantedSockets::default());
        loop {
            let again = async {
                match self.failing.is_empty() {
                    true => future::pending().await,
                    false => tokio::time::sleep(retry).await,
                }
            };
            tokio::select! {
                changed = wanted.changed() => {
                    if changed.is_err() {
                        return;
                    }
                }
                () = again => {}
            }
            let now = wanted.borrow_and_update().clone();
            if now == done && self.failing.is_empty() {
                continue;
            }
            self.reconcile(&now).await;
            states.send_replace(Arc::new(self.states(&now)));
            done = now;
        }
    }

    async fn reconcile(&mut self, wanted: &WantedSockets) {
        let started = Instant::now();
        let holders = self.open.iter().map(|(address, server)| (*address, server.pages.name())).collect();
        let plan = wanted.plan(&holders);
        for (address, check) in &plan.sockets {
            if let Some(server) = self.open.get(address).filter(|server| *server.pages.name() == check.name) {
                server.pages.set_local(check.local(family(address)).unwrap_or(0));
            }
        }
        let gone: Vec<SocketAddr> = (self.open.iter())
            .filter(|(address, server)| {
                plan.sockets.get(address).map(|check| &check.name) != Some(server.pages.name())
            })
            .map(|(address, _)| *address)
            .collect();
        for address in gone {
            if let Some(server) = self.open.remove(&address) {
                tracing::info!(service = %server.pages.name(), %address, "health check node port closed");
                server.close().await;
            }
        }
        let mut failing = BTreeMap::new();
        for (address, check) in &plan.sockets {
            if self.open.contains_key(address) {
                continue;
            }
            match self.serve(*address, check) {
                Ok(server) => {
                    tracing::info!(service = %check.name, %address, "health check node port open");
                    self.open.insert(*address, server);
                }
                Err(error) => {
                    failing.insert((*address, check.name.clone()), error.to_string());
                }
            }
        }
        for (address, name, holder) in plan.conflicts {
            failing.insert((address, name), format!("the port is used by Service {holder}"));
        }
        for ((address, name), reason) in &failing {
            if self.failing.get(&(*address, name.clone())) != Some(reason) {
                // The reason of kube-proxy's event for it.
                tracing::warn!(
                    reason = "FailedToStartServiceHealthcheck", service = %name, %address, error = reason,
                    "cannot listen on a health check node port"
                );
            }
        }
        self.failing = failing;
        tracing::debug!(took = ?started.elapsed(), sockets = self.open.len(), "health check node ports synced");
    }

    fn serve(&self, address: SocketAddr, check: &ServiceHealthCheck) -> std::io::Result<Server> {
        let listener = listen(address)?;
        let local = check.local(family(&address)).unwrap_or(0);
        let pages = Arc::new(CheckPages::new(check.name.clone(), local, self.health.clone()));
        let stop = CancellationToken::new();
        let task = tokio::spawn(serve(listener, pages.clone(), stop.clone()));
        Ok(Server { pages, stop: stop.drop_guard(), task })
    }

    fn states(&self, wanted: &WantedSockets) -> Vec<HealthCheckState> {
        let mut sockets: BTreeMap<&ServiceName, Vec<Socket>> = BTreeMap::new();
        for (address, server) in &self.open {
            let socket = Socket { address: *address, state: SocketState::Open };
            sockets.entry(server.pages.name()).or_default().push(socket);
        }
        for ((address, name), reason) in &self.failing {
            let socket = Socket { address: *address, state: SocketState::Failing(reason.clone()) };
            sockets.entry(name).or_default().push(socket);
        }
        let state = |check: &ServiceHealthCheck| {
            let mut sockets = sockets.get(&check.name).cloned().unwrap_or_default();
            sockets.sort_by_key(|socket| socket.address);
            HealthCheckState { check: check.clone(), sockets }
        };
        wanted.checks.iter().map(state).collect()
    }
}

fn family(address: &SocketAddr) -> Family {
    match address {
        SocketAddr::V4(_) => Family::V4,
        SocketAddr::V6(_) => Family::V6,
    }
}
