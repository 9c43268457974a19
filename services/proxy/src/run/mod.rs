//! A running proxy: its threads, its servers, and what it tells of itself.
//!
//! Owns: the thread that follows the agent and programs the kernel ([`follow`]), the thread that cleans conntrack
//! ([`cleaner`]), the servers of health, health check node ports, metrics and debugging, and the reports to the agent. In:
//! [`Options`], [`Doors`], a token that ends it. Out: rules; they stay when it ends, so that traffic goes on until the next one
//! takes over.

mod affinity;
mod checker;
mod cleaner;
mod follow;
mod report;
mod settings;
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
    addresses::{self, AddressError, Notices},
    health::{BoundServer, DEFAULT_RETRY, Health, HealthChecks, MetricsPages},
    inspect::{self, PrintSlots},
    leftovers::{self, Places},
    metrics::ProxyMetrics,
    nft::kernel::{KernelError, Tables},
    options::Options,
    programmer::{Offload, Programmer, Side},
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
    /// End where one of these two cannot be listened on. Source: kube-proxy's `bindAddressHardFail`.
    pub bind_hard_fail: bool,
    /// The debug API.
    pub debug: UnixListener,
    /// Where that is, as the agent shall show it.
    pub debug_name: String,
    /// Page and JSON.
    pub http: Option<TcpListener>,
    /// Host names by which the page may be called, besides `localhost` and addresses.
    pub http_hosts: Arc<[String]>,
    /// The settings in force, for `/configz`.
    pub settings: serde_json::Value,
    /// The same in words, for the state.
    pub settings_in_words: Vec<String>,
}

/// Why a proxy ended, or did not start.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// The kernel cannot do what is needed, or does not let us.
    #[error("cannot program Services on this node; fix the reported kernel error and restart the proxy")]
    Kernel(#[source] KernelError),
    /// The node's addresses are not known.
    #[error(
        "cannot list or watch the addresses of this node; allow rtnetlink sockets (AF_NETLINK) and restart \
         the proxy"
    )]
    Addresses(#[source] AddressError),
    /// `NodeCIDR` and no pod CIDR.
    #[error(
        "the Node has had no spec.podCIDRs for {} s, which detect_local_mode NodeCIDR requires; check the \
         pod network of the node or set another mode", .0.as_secs()
    )]
    NoPodCidrs(Duration),
    /// A server cannot listen, and `bind_hard_fail` is set.
    #[error(
        "cannot listen on {address}: {reason}; stop the process that listens there, change {setting}, or \
         unset proxy.bind_address_hard_fail"
    )]
    Bind {
        /// The setting that names the address.
        setting: &'static str,
        /// The address.
        address: SocketAddr,
        /// Why not.
        reason: String,
    },
    /// A thread could not be started, or its runtime.
    #[error("cannot start a thread")]
    Thread(#[source] std::io::Error),
    /// The thread that programs the kernel ended by itself.
    #[error("the thread that programs the kernel exited unexpectedly")]
    Ended,
}

/// Three sockets to the nf_tables of one network namespace: checks of a table and counts of clients read it without the lock of the
/// programmer, and delay no change. A full sync reads its table under that lock.
pub struct Kernel {
    /// For changes.
    pub programming: Box<dyn Tables>,
    /// For checks of what the kernel has.
    pub checking: Box<dyn Tables>,
    /// For counts of clients with session affinity.
    pub counting: Box<dyn Tables>,
}

/// Runs a proxy until it is told to stop. Call it on a runtime with time and I/O.
///
/// `ready` is called once the kernel has been found able and the servers are there; rules come when the agent has said what
/// the Services are.
///
/// # Errors
/// It cannot start, or cannot go on.
pub async fn run(
    Kernel { programming, mut checking, counting }: Kernel,
    options: Options,
    doors: Doors,
    stop: CancellationToken,
    ready: impl FnOnce(),
) -> Result<(), RunError> {
    let notices = match options.flowtable_interfaces.is_empty() {
        true => Notices::Addresses,
        false => Notices::AddressesAndInterfaces,
    };
    let watch = addresses::watch(notices).await.map_err(RunError::Addresses)?;
    let programmer = Programmer::open(programming, options.clone()).map_err(RunError::Kernel)?;
    let health = Health::new(options.sync_period, options.max_staleness);
    let metrics = ProxyMetrics::default();
    metrics.affinity_clients_max(affinity::capacity());
    for side in programmer.sides() {
        let family = side.programme.family();
        metrics.family_enabled(family, side.disabled.is_none());
        match &side.disabled {
            // As `SyncLoop` of kube-proxy: /livez names each family that is programmed, from the start.
            None => health.synced(family),
            Some(reason) => tracing::warn!(
                %family, reason,
                "IP family not supported by this node; Services of the family do not work; restart the proxy \
                 after enabling it"
            ),
        }
    }
    let mut registry = Registry::default();
    metrics.register(&mut registry, "nft");
    let registry = Arc::new(registry);
    let checks = HealthChecks::start(health.clone(), DEFAULT_RETRY);
    let shared = Arc::new(Shared::new(programmer, counting, health.clone(), metrics.clone(), checks, &doors));
    shared.say_strangers(checking.as_mut());
    for (family, reason) in leftovers::unseen(&Places::default()) {
        tracing::info!(
            %family, reason,
            "cannot check whether iptables-legacy has chains of kube-proxy; to remove them, run `keelson \
             proxy cleanup --kube-proxy` as root"
        );
    }
    say_offload(&shared);

    let _servers = serve_health(&doors, &health, &metrics, &registry).await?;
    let view = View::new(shared.clone(), registry);
    let http = doors.http.as_ref().and_then(|listener| listener.local_addr().ok());
    serve(doors.debug, doors.http.map(|listener| (listener, doors.http_hosts)), view, &stop);
    let reporter = tokio::spawn(report::report(shared.clone(), doors.target.clone(), doors.debug_name, http));
    let settings =
        tokio::spawn(settings::make(shared.clone(), options.conntrack.clone(), options.sync_period));
    let cleaner = cleaner::start(shared.clone()).map_err(RunError::Thread)?;
    checker::start(shared.clone(), checking, cleaner.clone(), options.sync_period, stop.clone())
        .map_err(RunError::Thread)?;
    let follower = follow::start(shared, doors.target, watch.receiver(), cleaner, stop.clone())?;
    ready();
    let ended = follower.ended().await;
    reporter.abort();
    settings.abort();
    if stop.is_cancelled() { Ok(()) } else { Err(ended.unwrap_or(RunError::Ended)) }
}

/// Says which families have no offload although it was asked for.
fn say_offload(shared: &Shared) {
    let unsupported = |side: &Side| match &side.offload {
        Offload::Unsupported(reason) => Some((side.programme.family(), reason.clone())),
        Offload::Disabled | Offload::Enabled(_) => None,
    };
    let all: Vec<_> = shared.programmer().sides().iter().filter_map(unsupported).collect();
    for (family, reason) in all {
        shared.say(format!("{family}: established flows are not offloaded: {reason}"));
    }
}

/// Starts the servers of health and metrics, which serve until they are dropped.
async fn serve_health(
    doors: &Doors,
    health: &Health,
    metrics: &ProxyMetrics,
    registry: &Arc<Registry>,
) -> Result<Vec<BoundServer>, RunError> {
    let of_health = |address| BoundServer::health(address, health.clone(), metrics.clone());
    let of_metrics = |address| {
        let pages = MetricsPages::new(registry.clone(), MODE, doors.settings.clone());
        BoundServer::metrics(address, pages)
    };
    let mut servers = Vec::new();
    for (setting, address, server) in [
        ("proxy.healthz_bind_address", doors.healthz, doors.healthz.map(of_health)),
        ("proxy.metrics_bind_address", doors.metrics, doors.metrics.map(of_metrics)),
    ] {
        let (Some(address), Some(server)) = (address, server) else { continue };
        if doors.bind_hard_fail {
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
    let told = stop.clone();
    let grpc =
        inspect::serve_grpc(debug, view.clone(), prints.clone(), async move { told.cancelled().await });
    tokio::spawn(async move {
        if let Err(error) = grpc.await {
            tracing::error!(%error, "debug socket failed");
        }
    });
    if let Some((listener, hosts)) = http {
        let told = stop.clone();
        let page = inspect::serve_http(listener, view, prints, hosts, async move { told.cancelled().await });
        tokio::spawn(async move {
            if let Err(error) = page.await {
                tracing::error!(%error, "debug page failed");
            }
        });
    }
}

/// Now, in Unix milliseconds.
pub(crate) fn unix_ms() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_millis()).unwrap_or(i64::MAX)
}
