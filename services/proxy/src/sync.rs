//! The sync loop: when a backend is brought to the newest state, and when a failed sync is retried.
//!
//! Owns: [`SyncLoop`], a [`Backend`] and the schedule of its syncs and checks. In: Services, the node, the node's addresses,
//! ticks. Out: calls of the backend; their results.
//!
//! The families are independent: an error in one does not delay the other.

use std::{
    net::IpAddr,
    time::{Duration, Instant},
};

use keelson_client::{NodeInfo, ServiceName};

use crate::{
    addresses::{Interface, LocalAddresses},
    backend::{Backend, BackendError, Check, Drain, Outcome},
    model::{Family, ServicePort},
    options::Options,
    pace::Pace,
};

/// Interval of checking whether another program has changed anything.
pub const CHECK_INTERVAL: Duration = Duration::from_secs(10);

/// After such a change, minimum time between two reads of the rules.
pub const READ_INTERVAL: Duration = Duration::from_secs(15);

/// The first pause after a failure; each further one is twice as long, up to the sync period.
pub const FIRST_PAUSE: Duration = Duration::from_secs(1);

#[derive(Debug, Clone)]
pub struct Failure {
    pub error: BackendError,
    pub times: u32,
    next: Instant,
}

/// Checks that failed, without one since that did not.
#[derive(Debug, Clone)]
pub struct Unchecked {
    pub error: BackendError,
    pub times: u32,
    /// Whether there was something to read. Otherwise it is not known whether there was.
    has_begun: bool,
}

#[derive(Debug, Clone, Default)]
pub struct SyncTotals {
    /// Successful syncs.
    pub syncs: u64,
    /// Successful full syncs.
    pub full: u64,
    pub failures: u64,
    /// Successful syncs that repaired drift.
    pub repaired: u64,
    /// Result of the last successful sync.
    pub last: Outcome,
    /// Duration of the last successful sync.
    pub took: Duration,
}

#[derive(Debug, Default)]
pub struct FamilySync {
    /// Since when a change waits for a sync.
    pub pending: Option<Instant>,
    pub failure: Option<Failure>,
    /// Drift is neither found nor repaired meanwhile.
    pub unchecked: Option<Unchecked>,
    pub totals: SyncTotals,
    last_read: Option<Instant>,
}

#[derive(Debug)]
pub struct Synced {
    pub family: Family,
    pub result: Result<Outcome, BackendError>,
    pub took: Duration,
}

#[derive(Debug)]
pub enum Checked {
    /// Changes wait for a sync: check again soon.
    Postponed,
    Clean,
    /// Drift: repaired, or the repair failed.
    Repaired(Synced),
}

pub struct SyncLoop {
    backend: Box<dyn Backend>,
    options: Options,
    node: NodeInfo,
    local: Vec<IpAddr>,
    interfaces: Vec<Interface>,
    families: [FamilySync; 2],
    has_state: bool,
    /// The rules' dependencies on the node are known.
    has_node: bool,
    pace: Pace,
    /// Earliest time of the next commit, by the pace.
    not_before: Option<Instant>,
}

impl std::fmt::Debug for SyncLoop {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SyncLoop").field("families", &self.families).finish_non_exhaustive()
    }
}

impl SyncLoop {
    /// Nothing is programmed before [`Self::begin`]. The rules of the first sync already depend on the addresses of the node.
    #[must_use]
    pub fn new(backend: Box<dyn Backend>, options: Options, local: &LocalAddresses) -> Self {
        let mut sync = Self {
            backend,
            pace: Pace::new(options.min_sync_period),
            options,
            node: NodeInfo::default(),
            local: local.as_slice().to_vec(),
            interfaces: Vec::new(),
            families: Default::default(),
            has_state: false,
            has_node: false,
            not_before: None,
        };
        sync.set_interfaces(local.interfaces());
        sync
    }

    #[must_use]
    pub fn backend(&self) -> &dyn Backend {
        self.backend.as_ref()
    }

    #[must_use]
    pub fn family(&self, family: Family) -> &FamilySync {
        &self.families[family as usize]
    }

    pub fn enabled(&self) -> impl Iterator<Item = Family> {
        Family::ALL.into_iter().filter(|family| self.backend.disabled_reason(*family).is_none())
    }

    /// Whether every family that this node supports has been synced.
    #[must_use]
    pub fn has_synced(&self) -> bool {
        self.enabled().all(|family| self.backend.has_synced(family))
    }

    #[must_use]
    pub fn options(&self) -> &Options {
        &self.options
    }

    #[must_use]
    pub fn node(&self) -> &NodeInfo {
        &self.node
    }

    #[must_use]
    pub fn local_addresses(&self) -> &[IpAddr] {
        &self.local
    }

    /// Whether a full state waits for the Node to have pod CIDRs.
    #[must_use]
    pub fn waits_for_pod_cidrs(&self) -> bool {
        self.has_state && !self.has_node
    }

    /// Sets all ports of a Service, by family; without any it is deleted. Nothing is programmed before [`Self::sync`].
    pub fn set(&mut self, name: &ServiceName, ports: [Vec<ServicePort>; 2], now: Instant) {
        for (family, mut ports) in Family::ALL.into_iter().zip(ports) {
            if self.backend.disabled_reason(family).is_some() {
                continue;
            }
            if !self.options.allow_external_ips {
                ports.iter_mut().for_each(|port| port.external_ips.clear());
            }
            self.backend.set_service(family, name, ports);
            self.families[family as usize].pending.get_or_insert(now);
        }
    }

    pub fn set_node(&mut self, node: NodeInfo, now: Instant) {
        if self.node != node {
            self.node = node;
            self.configure(now);
        }
    }

    pub fn set_addresses(&mut self, local: &[IpAddr], now: Instant) {
        if self.local != local {
            self.local = local.to_vec();
            self.configure(now);
        }
    }

    pub fn set_interfaces(&mut self, interfaces: &[Interface]) {
        if self.interfaces != interfaces {
            self.interfaces = interfaces.to_vec();
            self.backend.set_interfaces(interfaces);
        }
    }

    /// The Services of a full state have been set and may be programmed.
    pub fn begin(&mut self, now: Instant) {
        if !self.has_state {
            self.has_state = true;
            self.configure(now);
        }
    }

    fn configure(&mut self, now: Instant) {
        self.backend.set_addresses(&self.local);
        for family in Family::ALL {
            if self.backend.disabled_reason(family).is_some() {
                continue;
            }
            let Some(config) = self.options.node_config(&self.node, &self.local, family) else {
                // Existing rules stay in effect.
                return;
            };
            self.backend.set_node(config);
            self.families[family as usize].pending.get_or_insert(now);
        }
        self.has_node = true;
    }

    /// When to call [`Self::sync`], if changes wait only for the pace.
    #[must_use]
    pub fn due(&self) -> Option<Instant> {
        let waits = self.families.iter().any(|family| family.pending.is_some() && family.failure.is_none());
        self.not_before.filter(|_| waits && self.has_state && self.has_node)
    }

    /// Whether every change is in effect.
    #[must_use]
    pub fn is_current(&self) -> bool {
        self.families.iter().all(|family| family.pending.is_none() && family.failure.is_none())
    }

    /// Programs pending changes, unless the family waits after a failure or the pace defers them. Returns the families
    /// that were synced.
    pub fn sync(&mut self, now: Instant) -> Vec<Synced> {
        if !self.has_state || !self.has_node || self.is_too_early(now) {
            return Vec::new();
        }
        let mut all = Vec::new();
        for family in Family::ALL {
            let sync = self.family(family);
            let waits = sync.failure.as_ref().is_some_and(|failure| now < failure.next);
            let is_synced = self.backend.disabled_reason(family).is_some() || self.backend.has_synced(family);
            if !waits && (sync.pending.is_some() || !is_synced) {
                let begun = Instant::now();
                let result = self.backend.sync(family, now);
                all.push(self.record(family, result, begun.elapsed(), now));
            }
        }
        let is_commit =
            |synced: &Synced| synced.result.as_ref().is_ok_and(|outcome| outcome.transactions > 0);
        if all.iter().any(is_commit) {
            let took = all.iter().map(|synced| synced.took).sum();
            let end = now + took;
            let elements = Family::ALL.map(|family| self.backend.counts(family).elements).iter().sum();
            let pause = self.pace.committed(end, took, elements);
            self.not_before = (!pause.is_zero()).then(|| end + pause);
        }
        all
    }

    fn is_too_early(&self, now: Instant) -> bool {
        self.not_before.is_some_and(|at| now < at)
    }

    /// Retries failed syncs and does the backend's maintenance. Must be called at least once a second.
    pub fn tick(&mut self, now: Instant) -> Vec<Synced> {
        let mut all = self.sync(now);
        if self.is_too_early(now) {
            return all;
        }
        for family in Family::ALL {
            let sync = self.family(family);
            if !self.backend.has_synced(family) || sync.failure.is_some() || sync.pending.is_some() {
                continue;
            }
            let begun = Instant::now();
            let result = self.backend.maintain(family, now);
            if !result.as_ref().is_ok_and(Outcome::is_nothing) {
                all.push(self.record(family, result, begun.elapsed(), now));
            }
        }
        all
    }

    /// Families whose rules another program may have changed. The caller has an observer read them, without holding the
    /// sync loop, and calls [`Self::check`]. Must be called every [`CHECK_INTERVAL`].
    pub fn begin_checks(&mut self, now: Instant) -> Vec<Family> {
        let pause = READ_INTERVAL.min(self.options.sync_period);
        let mut families = Vec::new();
        for family in Family::ALL {
            let sync = self.family(family);
            let is_recent = sync.last_read.is_some_and(|read| now.saturating_duration_since(read) < pause);
            if !self.backend.has_synced(family) || sync.failure.is_some() || is_recent {
                continue;
            }
            match self.backend.begin_check(family) {
                Ok(true) => families.push(family),
                Ok(false) => {
                    self.families[family as usize].unchecked.take_if(|unchecked| !unchecked.has_begun);
                }
                Err(error) => {
                    tracing::warn!(%family, %error, "cannot check whether the table was modified");
                    self.not_checked(family, error, false);
                }
            }
        }
        families
    }

    /// Compares what an observer has read of a family since [`Self::begin_checks`], and repairs drift.
    pub fn check(&mut self, family: Family, now: Instant) -> Checked {
        let begun = Instant::now();
        let result = match self.backend.check(family, now) {
            Check::Postponed => return Checked::Postponed,
            Check::Unread(error) => {
                tracing::warn!(%family, %error, "cannot read the table to check it");
                self.not_checked(family, error, true);
                Ok(Outcome::default())
            }
            Check::Done(result) => {
                self.families[family as usize].unchecked = None;
                result
            }
        };
        self.families[family as usize].last_read = Some(now);
        match result {
            Ok(outcome) if outcome.is_nothing() => Checked::Clean,
            result => {
                if result.is_ok() {
                    tracing::warn!(%family, "table modified by another program; repaired");
                }
                Checked::Repaired(self.record(family, result, begun.elapsed(), now))
            }
        }
    }

    fn not_checked(&mut self, family: Family, error: BackendError, has_begun: bool) {
        let unchecked = &mut self.families[family as usize].unchecked;
        let before = unchecked.as_ref();
        let times = before.map_or(0, |before| before.times).saturating_add(1);
        let has_begun = has_begun || before.is_some_and(|before| before.has_begun);
        *unchecked = Some(Unchecked { error, times, has_begun });
    }

    pub fn stop_udp_offload(&mut self, family: Family, now: Instant) -> bool {
        let is_new = self.backend.stop_udp_offload(family);
        if is_new {
            self.families[family as usize].pending.get_or_insert(now);
        }
        is_new
    }

    /// See [`Backend::stop`].
    pub fn stop(&mut self) -> Option<Drain> {
        self.backend.stop()
    }

    /// What a full sync would change, one line each.
    pub fn changes(&mut self) -> Result<Vec<String>, BackendError> {
        self.backend.changes()
    }

    fn record(
        &mut self,
        family: Family,
        result: Result<Outcome, BackendError>,
        took: Duration,
        now: Instant,
    ) -> Synced {
        let sync = &mut self.families[family as usize];
        match &result {
            Ok(outcome) => {
                sync.pending = None;
                if let Some(failure) = sync.failure.take() {
                    tracing::info!(%family, times = failure.times, "table synced again");
                }
                if outcome.full {
                    sync.unchecked = None;
                    sync.last_read = Some(now);
                    sync.totals.full += 1;
                }
                sync.totals.syncs += 1;
                sync.totals.repaired += u64::from(outcome.repaired);
                sync.totals.last = *outcome;
                sync.totals.took = took;
            }
            Err(error) => {
                sync.totals.failures += 1;
                let times = sync.failure.as_ref().map_or(0, |failure| failure.times) + 1;
                let pause = retry_pause(times, self.options.sync_period);
                tracing::error!(%family, %error, times, retry_in = ?pause, "cannot sync the table");
                sync.failure = Some(Failure { error: error.clone(), times, next: now + pause });
                sync.pending.get_or_insert(now);
            }
        }
        Synced { family, result, took }
    }
}

/// `failures`: in a row, at least 1.
#[must_use]
pub fn retry_pause(failures: u32, longest: Duration) -> Duration {
    FIRST_PAUSE.saturating_mul(1 << failures.saturating_sub(1).min(16)).min(longest)
}

#[cfg(test)]
mod tests;
