//! A running proxy: its threads, its servers, and its reports.
//!
//! Owns: the thread that follows the agent and programs the kernel ([`follow`]), the thread that cleans conntrack
//! ([`cleaner`]), the servers of health, health check node ports, metrics and debugging, and the reports to the agent.
//! In: [`Options`], [`RunConfig`], a cancellation token. Out: rules. They stay when the proxy stops, so that traffic
//! continues until the next one takes over.

mod affinity;
mod checker;
mod cleaner;
mod follow;
mod history;
mod received;
mod report;
mod settings;
mod shared;
mod take_over;
mod view;

use std::{net::SocketAddr, sync::Arc, time::Duration};

use keelson_client::Target;
use prometheus_client::registry::Registry;
use tokio::net::{TcpListener, UnixListener};
use tokio_util::sync::CancellationToken;

use follow::Opened;
use shared::Shared;
use take_over::TakeOverTask;
use view::View;

use crate::{
    addresses::{self, AddressError, WatchScope},
    backend::{Access, Backend, BackendError, Driver},
    health::{BoundServer, DEFAULT_RETRY, Health, HealthChecks, MetricsPages},
    inspect::{self, PrintSlots},
    leftovers::{self, Places},
    metrics::ProxyMetrics,
    model::Family,
    options::Options,
    sync::SyncLoop,
};

/// The backends of the program.
pub struct Backends {
    pub own: &'static dyn Driver,
    /// All, with the own one.
    pub all: Vec<&'static dyn Driver>,
    /// Remove the rules of the others, and of a kube-proxy, after the first sync.
    pub take_over: bool,
}

impl std::fmt::Debug for Backends {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Backends").field("own", &self.own.info().name).finish_non_exhaustive()
    }
}

#[derive(Debug)]
pub struct RunConfig {
    pub target: Target,
    /// `/healthz` and `/livez`.
    pub healthz: Option<SocketAddr>,
    pub metrics: Option<SocketAddr>,
    /// Exit if one of these two addresses cannot be bound. Source: kube-proxy's `bindAddressHardFail`; required beside another
    /// proxy, which has the default addresses.
    pub bind_hard_fail: bool,
    pub debug: UnixListener,
    /// Address of the debug API, for the agent to show.
    pub debug_name: String,
    /// Page and JSON.
    pub http: Option<TcpListener>,
    /// Allowed host names of the page, besides `localhost` and addresses.
    pub http_hosts: Arc<[String]>,
    /// The settings in force, for `/configz`.
    pub settings: serde_json::Value,
    /// The same as text, for the state.
    pub settings_text: Vec<String>,
    /// What happened before, such as the choice of the backend, for the events.
    pub notes: Vec<String>,
}

#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// The kernel lacks a feature, or does not permit it.
    #[error("cannot program Services on this node; fix the reported kernel error and restart the proxy")]
    Backend(#[source] BackendError),
    #[error(
        "cannot list or watch the addresses of this node; allow rtnetlink sockets (AF_NETLINK) and restart \
         the proxy"
    )]
    Addresses(#[source] AddressError),
    #[error(
        "the Node has had no spec.podCIDRs for {} s, which detect_local_mode NodeCIDR requires; check the \
         pod network of the node or set another mode", .0.as_secs()
    )]
    NoPodCidrs(Duration),
    /// `bind_hard_fail` is set.
    #[error(
        "cannot listen on {address}: {reason}; stop the process that listens there, or set {setting} to another address; \
         proxy.bind_address_hard_fail or proxy.service_proxy_name requires it"
    )]
    Bind {
        /// The setting that contains the address.
        setting: &'static str,
        address: SocketAddr,
        reason: String,
    },
    #[cfg(target_os = "linux")]
    #[error(transparent)]
    Claim(#[from] crate::instance::ClaimError),
    #[error("cannot start a thread")]
    Thread(#[source] std::io::Error),
    /// The thread that programs the kernel ended by itself.
    #[error("the thread that programs the kernel exited unexpectedly")]
    Ended,
}

/// Runs a proxy until it is stopped. Must be called on a runtime with time and I/O.
///
/// `ready` is called once the backend is open and the servers listen; rules follow when the agent has sent the
/// Services.
///
/// # Errors
/// The proxy cannot start or continue.
pub async fn run(
    backends: Backends,
    options: Options,
    config: RunConfig,
    stop: CancellationToken,
    ready: impl FnOnce(),
) -> Result<(), RunError> {
    let driver = backends.own;
    #[cfg(target_os = "linux")]
    let _claims = claim(driver, &options.service_proxy_name).await?;
    let scope = match options.flowtable_interfaces.is_empty()
        && options.ebpf.direct_return.is_none()
        && options.ebpf.pod_devices.is_empty()
    {
        true => WatchScope::Addresses,
        false => WatchScope::AddressesAndInterfaces,
    };
    let watch = addresses::watch(scope).await.map_err(RunError::Addresses)?;
    let name = options.service_proxy_name.clone();
    let follower = follow::start(config.target.clone(), name, watch.receiver(), stop.clone())?;
    let backend = driver.open(&options, Access::Program).map_err(RunError::Backend)?;
    // Checks and counts read the kernel without the lock of the sync loop. A full sync reads it under that lock.
    let mut checking = backend.observer().map_err(RunError::Backend)?;
    let counting = backend.observer().map_err(RunError::Backend)?;
    let limitations = backend.limitations();
    let health = Health::new(options.sync_period, options.max_staleness);
    let metrics = ProxyMetrics::default();
    metrics.affinity_clients_max(backend.affinity_capacity());
    report_families(backend.as_ref(), &health, &metrics);
    let sync = SyncLoop::new(backend, options.clone(), &watch.receiver().borrow());
    let mut registry = Registry::default();
    metrics.register(&mut registry, driver.info().name);
    let registry = Arc::new(registry);
    let checks = HealthChecks::start(health.clone(), DEFAULT_RETRY);
    let shared = Arc::new(Shared::new(sync, counting, health.clone(), metrics.clone(), checks, &config));
    shared.look_for_other_proxies(checking.as_mut());
    log_unlistable();
    config.notes.iter().for_each(|text| shared.record_event(text.clone()));
    limitations.into_iter().for_each(|text| shared.record_event(text));

    let _servers = serve_health(&config, driver.info().proxy_mode, &health, &metrics, &registry).await?;
    let view = View::new(shared.clone(), registry, history::start(shared.clone()));
    let http = config.http.as_ref().and_then(|listener| listener.local_addr().ok());
    serve(config.debug, config.http.map(|listener| (listener, config.http_hosts)), view, &stop);
    let reporter = tokio::spawn(report::report(shared.clone(), config.target, config.debug_name, http));
    let settings = tokio::spawn(settings::apply_settings(
        shared.clone(),
        options.conntrack.clone(),
        options.sync_period,
    ));
    let cleaner = cleaner::start(shared.clone()).map_err(RunError::Thread)?;
    let take_over = backends.take_over.then(|| {
        TakeOverTask::new(driver, backends.all, options.service_proxy_name.clone(), options.sync_period)
    });
    checker::start(shared.clone(), checking, cleaner.clone(), take_over, options.sync_period, stop.clone())
        .map_err(RunError::Thread)?;
    follower.begin(Opened { shared: shared.clone(), cleaner });
    ready();
    let ended = follower.ended().await;
    reporter.abort();
    settings.abort();
    drain(&shared).await;
    if stop.is_cancelled() { Ok(()) } else { Err(ended.unwrap_or(RunError::Ended)) }
}

fn report_families(backend: &dyn Backend, health: &Health, metrics: &ProxyMetrics) {
    for family in Family::ALL {
        let disabled = backend.disabled_reason(family);
        metrics.family_enabled(family, disabled.is_none());
        match disabled {
            // As `SyncLoop` of kube-proxy: /livez lists each enabled family from the start.
            None => health.synced(family),
            Some(reason) => tracing::warn!(
                %family, reason,
                "IP family not supported by this node; Services of the family do not work; restart the proxy \
                 after enabling it"
            ),
        }
    }
}

fn log_unlistable() {
    for (family, reason) in leftovers::unlistable(&Places::default()) {
        tracing::info!(
            %family, reason,
            "cannot check whether iptables-legacy has chains of kube-proxy; to remove them, run `keelson \
             proxy cleanup --kube-proxy` as root"
        );
    }
}

/// Gives connections that the backend serves itself time to end.
async fn drain(shared: &Shared) {
    let Some(drain) = shared.sync().stop() else { return };
    if let Err(error) = tokio::task::spawn_blocking(drain).await {
        tracing::error!(%error, "cannot wait for connections to end");
    }
}

/// Claims the rules of the backend and the Services in this network namespace.
#[cfg(target_os = "linux")]
async fn claim(
    driver: &dyn Driver,
    service_proxy_name: &str,
) -> Result<Vec<crate::instance::Claim>, RunError> {
    use crate::instance::{Subject, claim};
    let mut subjects: Vec<Subject> =
        std::iter::once(driver.info().name).chain(driver.includes()).map(Subject::Backend).collect();
    if driver.info().has_chains {
        subjects.push(Subject::Chains);
    }
    subjects.push(Subject::Services(service_proxy_name.to_owned()));
    let mut claims = Vec::new();
    for subject in &subjects {
        claims.push(claim(subject).await?);
    }
    Ok(claims)
}

/// Starts the health and metrics servers, which serve until they are dropped.
async fn serve_health(
    config: &RunConfig,
    proxy_mode: &'static str,
    health: &Health,
    metrics: &ProxyMetrics,
    registry: &Arc<Registry>,
) -> Result<Vec<BoundServer>, RunError> {
    let of_health = |address| BoundServer::health(address, health.clone(), metrics.clone());
    let of_metrics = |address| {
        let pages = MetricsPages::new(registry.clone(), proxy_mode, config.settings.clone());
        BoundServer::metrics(address, pages)
    };
    let mut servers = Vec::new();
    for (setting, address, server) in [
        ("proxy.healthz_bind_address", config.healthz, config.healthz.map(of_health)),
        ("proxy.metrics_bind_address", config.metrics, config.metrics.map(of_metrics)),
    ] {
        let (Some(address), Some(server)) = (address, server) else { continue };
        if config.bind_hard_fail {
            let bound = server.bound().await;
            bound.map_err(|reason| RunError::Bind { setting, address, reason })?;
        }
        servers.push(server);
    }
    Ok(servers)
}

fn serve(
    debug: UnixListener,
    http: Option<(TcpListener, Arc<[String]>)>,
    view: View,
    stop: &CancellationToken,
) {
    let prints = PrintSlots::default();
    let output = stop.clone();
    let grpc =
        inspect::serve_grpc(debug, view.clone(), prints.clone(), async move { output.cancelled().await });
    tokio::spawn(async move {
        if let Err(error) = grpc.await {
            tracing::error!(%error, "debug socket failed");
        }
    });
    if let Some((listener, hosts)) = http {
        let output = stop.clone();
        let page =
            inspect::serve_http(listener, view, prints, hosts, async move { output.cancelled().await });
        tokio::spawn(async move {
            if let Err(error) = page.await {
                tracing::error!(%error, "debug page failed");
            }
        });
    }
}
