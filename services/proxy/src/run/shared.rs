//! State that the threads of a proxy share.
//!
//! Owns: [`Shared`]: the [`SyncLoop`] behind a lock, the connection to the agent, and the last events. In: results of
//! the follower. Out: what the servers show. The lock is held while the kernel works, usually milliseconds, and a
//! second at the start of a large cluster; servers wait for it on threads of their own.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use keelson_client::{Position, ServiceName};
use keelson_proto::{proxy as pb, unix_ms};
use tokio::sync::{Notify, watch};

use super::{
    RunConfig,
    affinity::{AffinityCounter, MAX_AGE},
};
use crate::{
    backend::{BackendInfo, Observer},
    conntrack::Setting,
    health::{Health, HealthChecks, ListenAddresses, ServiceHealthCheck},
    leftovers::{self, Places},
    metrics::ProxyMetrics,
    model::Family,
    sync::{SyncLoop, Synced},
};

/// Interval of [`SyncLoop::tick`] and of the checks.
pub(super) const TICK: Duration = Duration::from_millis(500);

/// Health check node ports.
pub(super) type Checks = BTreeMap<ServiceName, ServiceHealthCheck>;

const EVENTS: usize = 50;

/// Maximum number of pending changes whose latency is measured.
const MAX_TRIGGERED: usize = 1_000;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Link {
    Connecting,
    Following,
    Failing(String),
}

#[derive(Debug, Clone)]
pub(super) struct ProxyStatus {
    pub(super) link: Link,
    /// The last full state that was received, and the last that is in effect.
    received: Position,
    pub(super) applied: Position,
    /// When each family's rules were last synced, in Unix milliseconds.
    pub(super) synced_unix_ms: [i64; 2],
    /// Of both families.
    pub(super) service_ports: u64,
    pub(super) other_proxies: Vec<(Family, String)>,
    /// From whom this process has taken over.
    pub(super) take_overs: Vec<String>,
    pub(super) conntrack: Vec<Setting>,
    pub(super) events: VecDeque<pb::Event>,
    /// UDP endpoints have changed since conntrack of the family was cleaned.
    udp: [bool; 2],
    /// Times of the changes in the API that wait for a sync, in Unix milliseconds.
    triggered: Vec<i64>,
    wanted: WantedChecks,
}

/// The wanted health check node ports and their listen addresses; whether these have changed.
#[derive(Debug, Clone, Default)]
struct WantedChecks {
    checks: Checks,
    listen: Option<ListenAddresses>,
    changed: bool,
}

#[derive(Debug)]
pub(super) struct Shared {
    sync: Mutex<SyncLoop>,
    pub(super) backend: BackendInfo,
    status: Mutex<ProxyStatus>,
    changes: watch::Sender<u64>,
    /// Notified when a sync has to wait for the pace.
    pub(super) deferred: Notify,
    pub(super) health: Health,
    pub(super) metrics: ProxyMetrics,
    pub(super) checks: HealthChecks,
    pub(super) affinity: AffinityCounter,
    pub(super) target: String,
    pub(super) settings: Vec<String>,
    pub(super) started_unix_ms: i64,
    pub(super) families: Vec<Family>,
}

impl Shared {
    pub(super) fn new(
        sync: SyncLoop,
        counting: Box<dyn Observer>,
        health: Health,
        metrics: ProxyMetrics,
        checks: HealthChecks,
        config: &RunConfig,
    ) -> Self {
        let families: Vec<Family> = sync.enabled().collect();
        Self {
            affinity: AffinityCounter::new(counting, families.clone()),
            families,
            backend: sync.backend().info(),
            sync: Mutex::new(sync),
            status: Mutex::new(ProxyStatus {
                link: Link::Connecting,
                received: Position::default(),
                applied: Position::default(),
                synced_unix_ms: [0; 2],
                service_ports: 0,
                other_proxies: Vec::new(),
                take_overs: Vec::new(),
                conntrack: Vec::new(),
                events: VecDeque::new(),
                udp: [false; 2],
                triggered: Vec::new(),
                wanted: WantedChecks::default(),
            }),
            changes: watch::Sender::new(0),
            deferred: Notify::new(),
            health,
            metrics,
            checks,
            target: config.target.to_string(),
            settings: config.settings_text.clone(),
            started_unix_ms: unix_ms(),
        }
    }

    /// A panic while the lock is held ends the process, so poisoning is ignored.
    pub(super) fn sync(&self) -> MutexGuard<'_, SyncLoop> {
        self.sync.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn status(&self) -> MutexGuard<'_, ProxyStatus> {
        self.status.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    pub(super) fn changed(&self) {
        self.changes.send_modify(|count| *count = count.wrapping_add(1));
    }

    pub(super) fn record_event(&self, text: String) {
        let mut status = self.status();
        status.events.push_front(pb::Event { at_unix_ms: unix_ms(), text });
        status.events.truncate(EVENTS);
        drop(status);
        self.changed();
    }

    /// Sets how the agent is reached, and records an event when that changes.
    pub(super) fn link(&self, link: Link) {
        let mut status = self.status();
        if status.link == link {
            return;
        }
        let text = match &link {
            Link::Connecting => "connecting to the agent".to_owned(),
            Link::Following => "connected to the agent".to_owned(),
            Link::Failing(reason) => format!("disconnected from the agent; rules stay unchanged: {reason}"),
        };
        // The text of the reason may vary between attempts.
        let same = matches!((&status.link, &link), (Link::Failing(_), Link::Failing(_)));
        self.metrics.connected(link == Link::Following);
        self.health.agent(link == Link::Following);
        status.link = link;
        drop(status);
        if same { self.changed() } else { self.record_event(text) }
    }

    /// Sets the health check node port of a Service; `None`: it has none.
    pub(super) fn check(&self, name: &ServiceName, check: Option<ServiceHealthCheck>) {
        let wanted = &mut self.status().wanted;
        wanted.changed |= match check {
            Some(check) if wanted.checks.get(name) == Some(&check) => false,
            Some(check) => {
                wanted.checks.insert(name.clone(), check);
                true
            }
            None => wanted.checks.remove(name).is_some(),
        };
    }

    /// Opens and closes health check node ports, if one or the listen addresses have changed.
    pub(super) fn apply_wanted(&self, listen: ListenAddresses) {
        let mut status = self.status();
        let wanted = &mut status.wanted;
        if wanted.changed || wanted.listen.as_ref() != Some(&listen) {
            wanted.changed = false;
            wanted.listen = Some(listen.clone());
            let checks = wanted.checks.values().cloned().collect();
            drop(status);
            self.checks.apply(checks, listen);
        }
    }

    pub(super) fn udp_changed(&self) {
        self.status().udp = [true; 2];
    }

    /// Whether no change of a family waits for a sync.
    pub(super) fn is_synced(&self, family: Family) -> bool {
        self.sync().family(family).pending.is_none()
    }

    /// Whether UDP endpoints have changed since the last call. False while changes of the family wait for a sync.
    pub(super) fn take_udp_changed(&self, family: Family) -> bool {
        let sync = self.sync();
        sync.family(family).pending.is_none() && std::mem::take(&mut self.status().udp[family as usize])
    }

    /// Times in the API of the changes that a sync programs: those of the received state, and those that have waited.
    /// Without a sync they stay pending; the oldest are kept.
    pub(super) fn triggered(&self, position: Option<&Position>, is_synced: bool) -> Vec<i64> {
        let mut status = self.status();
        let received = position.and_then(|position| position.triggered_unix_ms);
        let room = MAX_TRIGGERED.saturating_sub(status.triggered.len());
        let counts = received.filter(|triggered| *triggered >= self.started_unix_ms);
        status.triggered.extend(counts.into_iter().take(room));
        if is_synced { std::mem::take(&mut status.triggered) } else { Vec::new() }
    }

    /// Records the results of syncs, and the state that they programmed.
    pub(super) fn record_syncs(&self, synced: &[Synced], position: Option<&Position>) {
        let sync = self.sync();
        let counts = Family::ALL.map(|family| sync.backend().counts(family));
        let is_current = sync.is_current();
        // Taken before the sync loop is released, so that no later state counts as in effect.
        let mut status = self.status();
        drop(sync);
        for (family, counts) in Family::ALL.into_iter().zip(&counts) {
            self.metrics.elements(family, counts.elements);
        }
        for done in synced.iter().filter(|done| done.result.is_ok()) {
            status.synced_unix_ms[done.family as usize] = unix_ms();
        }
        if let Some(position) = position {
            status.received = position.clone();
        }
        let news = !synced.is_empty() || position.is_some();
        // A family that failed, or waits for the pace, catches up later: the state is in effect when both have it.
        if is_current {
            self.metrics.nothing_pending();
        }
        if is_current && status.received != status.applied {
            status.applied = status.received.clone();
            status.service_ports = counts.iter().map(|counts| counts.service_ports as u64).sum();
            // A Service of both families counts once.
            let services = counts.iter().map(|counts| counts.services).max().unwrap_or(0);
            self.metrics.applied(status.applied.rev, services);
        }
        drop(status);
        if news {
            self.changed();
        }
    }

    pub(super) fn measure_affinity(&self) {
        for (family, clients) in Family::ALL.into_iter().zip(self.affinity.clients(MAX_AGE)) {
            for (map, clients) in clients.into_iter().flatten() {
                self.metrics.affinity_clients(family, map, clients);
            }
        }
    }

    /// How full maps are, and what programs have decided.
    pub(super) fn measure_maps(&self) {
        let (fills, left_out, decisions, direct_return, pod_packets) = {
            let sync = self.sync();
            let backend = sync.backend();
            (
                backend.map_fills(),
                backend.left_out(),
                backend.decisions(),
                backend.direct_return(),
                backend.pod_packets(),
            )
        };
        fills.into_iter().for_each(|fill| self.metrics.map_fill(fill));
        self.metrics.left_out(left_out);
        for (decision, total) in decisions {
            self.metrics.decided(decision, total);
        }
        for (decision, total) in direct_return {
            self.metrics.direct_return(decision, total);
        }
        for (decision, total) in pod_packets {
            self.metrics.pod_packets(decision, total);
        }
    }

    /// Looks for rules of other service proxies, and logs those that are new or gone.
    pub(super) fn look_for_other_proxies(&self, observer: &mut dyn Observer) {
        let found = match observer.other_proxies() {
            Ok(found) => [found, leftovers::found(&Places::default())].concat(),
            Err(error) => {
                tracing::warn!(%error, "cannot check for rules of other service proxies");
                return;
            }
        };
        let before = std::mem::replace(&mut self.status().other_proxies, found.clone());
        for (family, what) in &found {
            if !before.contains(&(*family, what.clone())) {
                tracing::warn!(
                    %family, found = what, table = "keelson",
                    "rules of another service proxy found; run `keelson proxy cleanup --kube-proxy` if that \
                     proxy no longer runs"
                );
                self.record_event(format!("found {what} ({family}); the rules of keelson take precedence"));
            }
        }
        for (family, what) in before {
            if !found.contains(&(family, what.clone())) {
                self.record_event(format!("{what} was removed ({family})"));
            }
        }
    }
}
