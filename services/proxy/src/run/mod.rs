//! A running proxy: its threads, its servers, and what it tells of itself.
//!
//! Owns: the thread that follows the agent and programs the kernel ([`follow`]), the thread that cleans conntrack
//! ([`cleaner`]), the servers of health, health check node ports, metrics and debugging, and the reports to the agent. In:
//! [`Options`], [`Doors`], a token that ends it. Out: rules; they stay when it ends, so that traffic goes on until the next one
//! takes over.

mod cleaner;
mod follow;
mod report;
mod shared;
mod view;

use std::{
    net::SocketAddr,
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use keelson_client::Target;
use prometheus_client::registry::Registry;
use tokio::net::{TcpListener, UnixListener};
use tokio_util::sync::CancellationToken;

pub use shared::{EVENTS, Shared};
pub use view::View;

use crate::{
    addresses::{self, AddressError},
    health::{BoundServer, DEFAULT_RETRY, Health, HealthChecks, MetricsPages},
    inspect,
    metrics::ProxyMetrics,
    nft::kernel::{KernelError, Tables},
    options::Options,
    programmer::Programmer,
};

/// kube-proxy's name of the mode.
pub const MODE: &str = "nftables";

/// Where it serves, and whom it follows.
#[derive(Debug)]
pub struct Doors {
    /// Where the agent serves the Endpoints API.
    pub target: Target,
    /// `/healthz` and `/livez`.
    pub healthz: Option<SocketAddr>,
    /// `/metrics`.
    pub metrics: Option<SocketAddr>,
    /// The debug API.
    pub debug: UnixListener,
    /// Where that is, as the agent shall show it.
    pub debug_name: String,
    /// Page and JSON.
    pub http: Option<TcpListener>,
    /// The settings in force, for `/configz`.
    pub settings: serde_json::Value,
    /// The same in words, for the state.
    pub settings_in_words: Vec<String>,
}

/// Why a proxy ended, or did not start.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// The kernel cannot do what is needed, or does not let us.
    #[error("the rules of Services cannot be made on this node")]
    Kernel(#[source] KernelError),
    /// The node's addresses are not to be had.
    #[error("the addresses of this node are not to be had")]
    Addresses(#[source] AddressError),
    /// `NodeCIDR` and no pod CIDR.
    #[error(
        "the Node has had no spec.podCIDRs for {} s, which detect_local_mode NodeCIDR needs: see that the node gets its pod network, or \
         choose another mode", .0.as_secs()
    )]
    NoPodCidrs(Duration),
    /// A thread could not be started, or its runtime.
    #[error("a thread cannot be started")]
    Thread(#[source] std::io::Error),
    /// The thread that programs the kernel ended by itself.
    #[error("the thread that programs the kernel ended by itself")]
    Ended,
}

/// Runs a proxy until it is told to stop. Call it on a runtime with time and I/O.
///
/// `ready` is called once the kernel has been found able and the servers are there; rules come when the agent has said what
/// the Services are.
///
/// # Errors
/// It cannot start, or cannot go on.
pub async fn run(
    tables: Box<dyn Tables>,
    options: Options,
    doors: Doors,
    stop: CancellationToken,
    ready: impl FnOnce(),
) -> Result<(), RunError> {
    let watch = addresses::watch().await.map_err(RunError::Addresses)?;
    let programmer = Programmer::open(tables, options.clone()).map_err(RunError::Kernel)?;
    let health = Health::new(options.sync_period);
    let metrics = ProxyMetrics::default();
    let mut registry = Registry::default();
    metrics.register(&mut registry, "nft");
    let registry = Arc::new(registry);
    let checks = HealthChecks::start(health.clone(), DEFAULT_RETRY);
    let shared = Arc::new(Shared::new(programmer, health.clone(), metrics.clone(), checks, &doors));
    shared.say_strangers();

    let _healthz = doors.healthz.map(|address| BoundServer::health(address, health.clone(), metrics.clone()));
    let _metrics = doors.metrics.map(|address| {
        let pages = MetricsPages { registry: registry.clone(), mode: MODE, settings: doors.settings.clone() };
        BoundServer::metrics(address, pages)
    });
    let view = View::new(shared.clone(), registry);
    let http = doors.http.as_ref().and_then(|listener| listener.local_addr().ok());
    serve(doors.debug, doors.http, view, &stop);
    let reporter = tokio::spawn(report::report(shared.clone(), doors.target.clone(), doors.debug_name, http));
    let cleaner = cleaner::start(metrics.clone()).map_err(RunError::Thread)?;
    let follower = follow::start(shared, doors.target, watch.receiver(), cleaner, stop.clone())?;
    ready();
    let ended = follower.ended().await;
    reporter.abort();
    if stop.is_cancelled() { Ok(()) } else { Err(ended.unwrap_or(RunError::Ended)) }
}

fn serve(debug: UnixListener, http: Option<TcpListener>, view: View, stop: &CancellationToken) {
    let told = stop.clone();
    let grpc = inspect::serve_grpc(debug, view.clone(), async move { told.cancelled().await });
    tokio::spawn(async move {
        if let Err(error) = grpc.await {
            tracing::error!(%error, "the debug socket ended");
        }
    });
    if let Some(listener) = http {
        let told = stop.clone();
        let page = inspect::serve_http(listener, view, async move { told.cancelled().await });
        tokio::spawn(async move {
            if let Err(error) = page.await {
                tracing::error!(%error, "the debug page ended");
            }
        });
    }
}

/// Now, in Unix milliseconds.
pub(crate) fn unix_ms() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_millis()).unwrap_or(i64::MAX)
}
