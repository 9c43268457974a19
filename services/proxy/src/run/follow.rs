//! Follows the agent and programs its states.
//!
//! Owns: a thread with a runtime of its own. In: the agent's states, the node's addresses, ticks. Out: calls of
//! [`crate::sync::SyncLoop`]; updates of health, health check node ports, metrics and conntrack. The first state is received while the
//! backend is being opened.

use std::{
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use keelson_client::{BoxError, Client, Handlers, NodeInfo, Options, Position, ServiceName, Target};
use keelson_proto::unix_ms;
use tokio::sync::{oneshot, watch};
use tokio_util::sync::CancellationToken;

use super::{
    RunError,
    cleaner::Cleaner,
    received::Received,
    shared::{Link, Shared, TICK},
    take_over,
};
use crate::{
    addresses::{LocalAddresses, Match, node_port_addresses},
    health::ListenAddresses,
    metrics::{NoLocalEndpoints, SyncKind},
    model::{Family, ServicePort},
    sync::Synced,
};

/// How long `NodeCIDR` waits for the node's pod CIDRs. Source: kube-proxy.
const POD_CIDRS: Duration = Duration::from_secs(300);

/// What the thread works with once the backend is open.
#[derive(Debug, Clone)]
pub(super) struct Opened {
    pub(super) shared: Arc<Shared>,
    pub(super) cleaner: Cleaner,
}

#[derive(Debug)]
pub(super) struct Follower {
    opened: watch::Sender<Option<Opened>>,
    ended: oneshot::Receiver<Option<RunError>>,
}

impl Follower {
    /// States are programmed from now on.
    pub(super) fn begin(&self, opened: Opened) {
        self.opened.send_replace(Some(opened));
    }

    /// Waits for the end of the thread. `None`: it was stopped.
    pub(super) async fn ended(self) -> Option<RunError> {
        self.ended.await.unwrap_or(Some(RunError::Ended))
    }
}

/// Starts the thread, in the network namespace of the caller. It ends with the follower, or when it is stopped.
pub(super) fn start(
    target: Target,
    service_proxy_name: String,
    addresses: watch::Receiver<Arc<LocalAddresses>>,
    stop: CancellationToken,
) -> Result<Follower, RunError> {
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(RunError::Thread)?;
    let mut client = Client::new(Options { target, service_proxy_name, ..Options::default() });
    client.cancel_with(stop);
    let (opened, opening) = watch::channel(None);
    let (done, ended) = oneshot::channel();
    let body = move || {
        let outcome = runtime.block_on(async {
            tokio::select! {
                () = follow(client, opening.clone()) => None,
                error = ticks(opening.clone(), addresses) => error,
            }
        });
        // The receiver is gone when the process ends.
        drop(done.send(outcome));
    };
    thread::Builder::new().name("sync".to_owned()).spawn(body).map_err(RunError::Thread)?;
    Ok(Follower { opened, ended })
}

/// `None`: the backend could not be opened.
async fn open(mut opening: watch::Receiver<Option<Opened>>) -> Option<Opened> {
    opening.wait_for(Option::is_some).await.ok()?.clone()
}

async fn follow(mut client: Client, opening: watch::Receiver<Option<Opened>>) {
    client.receive_ahead().await;
    let Some(Opened { shared, cleaner }) = open(opening).await else { return };
    let failing = shared.clone();
    client.on_error(move |report| failing.link(Link::Failing(report.error.to_string())));
    // After a reconnect without a new state, the consumer is not called.
    let recovered = shared.clone();
    client.on_recovery(move || recovered.link(Link::Following));
    client.run(&mut Consumer::new(shared, cleaner)).await;
}

/// Passes addresses and time to the sync loop. Returns when the wait for pod CIDRs times out; `None`: the backend could not be
/// opened.
async fn ticks(
    opening: watch::Receiver<Option<Opened>>,
    mut addresses: watch::Receiver<Arc<LocalAddresses>>,
) -> Option<RunError> {
    let Opened { shared, cleaner } = open(opening).await?;
    let mut interval = tokio::time::interval(TICK);
    interval.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut waiting: Option<Instant> = None;
    loop {
        let due = shared.sync().due();
        tokio::select! {
            _ = interval.tick() => {}
            // The sender lives as long as the process.
            _ = addresses.changed() => {}
            () = shared.deferred.notified(), if due.is_none() => continue,
            () = sleep_until(due) => {}
        }
        let now = Instant::now();
        let local = addresses.borrow_and_update().clone();
        let mut sync = shared.sync();
        sync.set_addresses(local.as_slice(), now);
        sync.set_interfaces(local.interfaces());
        let synced = sync.tick(now);
        let waits = sync.waits_for_pod_cidrs();
        drop(sync);
        finish(&shared, &cleaner, &synced, None);
        shared.apply_checks();
        waiting = waits.then(|| waiting.unwrap_or(now));
        if waiting.is_some_and(|since| now.saturating_duration_since(since) >= POD_CIDRS) {
            return Some(RunError::NoPodCidrs(POD_CIDRS));
        }
    }
}

/// Waits forever if `due` is `None`.
async fn sleep_until(due: Option<Instant>) {
    match due {
        Some(due) => tokio::time::sleep_until(due.into()).await,
        None => std::future::pending().await,
    }
}

struct Consumer {
    shared: Arc<Shared>,
    cleaner: Cleaner,
    no_local: [NoLocalEndpoints; 2],
    services: u64,
    queued: bool,
    /// Services of other proxies were received: the agent does not select them.
    has_others: bool,
}

impl Consumer {
    fn new(shared: Arc<Shared>, cleaner: Cleaner) -> Self {
        let no_local = Family::ALL.map(|family| NoLocalEndpoints::new(family, shared.metrics.clone()));
        Self { shared, cleaner, no_local, services: 0, queued: false, has_others: false }
    }

    /// Marks every family as queued, at the first change of a state.
    fn queue(&mut self) {
        if !std::mem::replace(&mut self.queued, true) {
            for &family in &self.shared.families {
                self.shared.health.queued(family);
                self.shared.metrics.queued(family);
            }
        }
    }

    /// Syncs, unless the pace defers the changes to the ticks.
    fn program(&self) -> Vec<Synced> {
        let now = Instant::now();
        let mut sync = self.shared.sync();
        sync.begin(now);
        let synced = sync.sync(now);
        if sync.due().is_some() {
            self.shared.deferred.notify_one();
        }
        synced
    }

    /// A Service of another proxy: an agent that is older than this proxy does not know of names, and sends those without
    /// any.
    fn refuse(&mut self, name: &ServiceName) {
        if !std::mem::replace(&mut self.has_others, true) {
            tracing::error!(
                service = %name,
                "the agent sends Services of other proxies, which are not served; update the agent, and set \
                 endpoints.service_proxy_names"
            );
            self.shared.record_event(
                "the agent is older than this proxy and sends Services of other proxies, which are not served".into(),
            );
        }
        self.delete(name);
    }

    /// Changes one Service in the sync loop, and updates the metric of its ports.
    fn change(&mut self, name: &ServiceName, ports: [Vec<ServicePort>; 2]) {
        self.queue();
        self.services += 1;
        for (no_local, ports) in self.no_local.iter_mut().zip(&ports) {
            no_local.set(name, ports);
        }
        self.shared.sync().set(name, ports, Instant::now());
    }
}

impl Handlers<Received> for Consumer {
    fn node(&mut self, node: NodeInfo) {
        self.shared.health.node(Some(&node));
        self.shared.sync().set_node(node, Instant::now());
        self.shared.changed();
    }

    fn delete(&mut self, name: &ServiceName) {
        self.change(name, [(); 2].map(|()| Vec::new()));
        self.shared.check(name, None);
    }

    fn set(&mut self, name: &ServiceName, service: Received) {
        if service.service_proxy_name != self.shared.sync().options().service_proxy_name {
            return self.refuse(name);
        }
        let has_udp = service.has_udp;
        let (ports, check) = service.within(&self.shared.families);
        self.change(name, ports);
        self.shared.check(name, check);
        if has_udp {
            self.shared.udp_changed();
        }
    }

    async fn sync(&mut self, position: &Position) -> Result<(), BoxError> {
        self.shared.link(Link::Following);
        self.shared.health.stale_since(position.stale_since_unix_ms);
        // The agent does not send whether the Service or a slice of it changed: a change counts as both.
        let changes = std::mem::take(&mut self.services);
        self.shared.metrics.changes_received(changes, changes);
        let synced = self.program();
        self.queued = false;
        finish(&self.shared, &self.cleaner, &synced, Some(position));
        self.shared.apply_checks();
        // The ticks retry failed syncs; receiving everything again would not help.
        Ok(())
    }
}

/// Updates health, metrics and conntrack after syncs.
pub(super) fn finish(shared: &Shared, cleaner: &Cleaner, synced: &[Synced], position: Option<&Position>) {
    let triggered = shared.triggered(position, !synced.is_empty());
    let scope = |family| shared.sync().backend().scope(family);
    for Synced { family, result, took } in synced {
        match result {
            Ok(outcome) => {
                let kind = if outcome.full { SyncKind::Full } else { SyncKind::Partial };
                shared.metrics.synced(*family, kind, *took);
                shared.metrics.transactions(*family, outcome.transactions, outcome.operations());
                if outcome.repaired {
                    shared.metrics.repaired(*family, outcome.operations());
                }
                if shared.is_synced(*family) {
                    shared.health.synced(*family);
                }
                for triggered in &triggered {
                    let late = u64::try_from(unix_ms().saturating_sub(*triggered)).unwrap_or_default();
                    shared.metrics.programmed(*family, Duration::from_millis(late));
                }
                if outcome.repaired {
                    shared.record_event(format!(
                        "{} was modified by another program; repaired: {} elements added, {} deleted, {} chains or sets written",
                        scope(*family), outcome.added, outcome.deleted, outcome.structure
                    ));
                }
                if let Some(former) = outcome.replaced {
                    take_over::record_replaced(shared, *family, former);
                }
                if shared.take_udp_changed(*family) {
                    cleaner.clean(*family);
                }
            }
            Err(error) => {
                // A failed sync may have been of either kind; its retry is a full one.
                shared.metrics.sync_failed(*family, SyncKind::Full, *took);
                shared.record_event(format!("cannot sync {}: {error}", scope(*family)));
            }
        }
    }
    shared.record_syncs(synced, position);
}

impl Shared {
    pub(super) fn apply_checks(&self) {
        let sync = self.sync();
        let options = sync.options();
        let on = |family| -> Match {
            let ips = options.node_ips(sync.node(), family);
            node_port_addresses(&options.node_port_addresses, &ips, sync.local_addresses(), family)
        };
        let listen = ListenAddresses { v4: on(Family::V4), v6: on(Family::V6) };
        drop(sync);
        self.apply_wanted(listen);
    }
}
