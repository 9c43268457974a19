//! Both families' tables, from the states of the Endpoints API.
//!
//! Owns: the [`Programme`]s, when each is brought up to date, and when a failed one is tried again. In: Services, the node,
//! the node's addresses, ticks. Out: transactions, by [`Tables`]; what became of them, to the caller.
//!
//! Each family is on its own: what fails in one stops nothing in the other.

mod offload;

use std::{
    collections::BTreeSet,
    net::IpAddr,
    time::{Duration, Instant},
};

use keelson_client::{NodeInfo, ServiceName};

pub use offload::{Devices, Offload};

use crate::{
    addresses::Interface,
    ip_families,
    model::{Family, ServicePort},
    nft::{
        chain::Chain,
        element::SetName,
        kernel::{Change, Found, KernelError, TABLE, Tables},
        programme::{Difference, Outcome, Programme},
        ruleset::{Base, NodePortMatch, rules},
    },
    options::Options,
    pace::Pace,
};

/// How often it is asked whether somebody else has committed anything.
pub const LOOK: Duration = Duration::from_secs(10);

/// When somebody has, the table is checked no more often than this.
const READ: Duration = Duration::from_secs(15);

/// The first pause after a failure; each further one is twice as long, up to the sync period.
const FIRST_PAUSE: Duration = Duration::from_secs(1);

/// Why a family is not up to date.
#[derive(Debug, Clone)]
pub struct Failure {
    /// The last error.
    pub error: KernelError,
    /// How often in a row.
    pub times: u32,
    next: Instant,
}

/// What a family has been through.
#[derive(Debug, Clone, Default)]
pub struct Tally {
    /// Syncs that did not fail.
    pub syncs: u64,
    /// Those of them that read the table and compared.
    pub full: u64,
    /// Those that failed.
    pub failures: u64,
    /// Those that found something that somebody else had changed.
    pub repaired: u64,
    /// What the last one did.
    pub last: Outcome,
    /// How long it took.
    pub took: Duration,
}

/// One family.
#[derive(Debug)]
pub struct Side {
    /// Its table.
    pub programme: Programme,
    /// Why this node does not support the family. Nothing is planned for it or programmed then.
    pub disabled: Option<String>,
    /// Since when something waits to be brought to the kernel.
    pub pending: Option<Instant>,
    /// Why it could not be.
    pub failure: Option<Failure>,
    /// What it has been through.
    pub tally: Tally,
    /// Offload of established flows.
    pub offload: Offload,
    read: Option<Instant>,
}

impl Side {
    fn new(programme: Programme) -> Self {
        let (tally, offload) = (Tally::default(), Offload::default());
        Self { programme, disabled: None, pending: None, failure: None, tally, offload, read: None }
    }

    fn disabled(base: Base, reason: String) -> Self {
        Self { disabled: Some(reason), ..Self::new(Programme::unread(base)) }
    }

    /// Whether its rules are in the kernel, or there are none to be.
    #[must_use]
    pub fn is_done(&self) -> bool {
        self.disabled.is_some() || self.programme.has_synced()
    }
}

/// What became of one family.
#[derive(Debug)]
pub struct Synced {
    /// Which.
    pub family: Family,
    /// What was done, or why not.
    pub result: Result<Outcome, KernelError>,
    /// How long it took.
    pub took: Duration,
}

/// Result of a check.
#[derive(Debug)]
pub enum Check {
    /// Changes wait for a sync: try again soon, with what was read.
    Postponed(Option<Found>),
    /// Nobody had changed the table.
    Clean,
    /// Somebody had, and it was repaired or the repair failed.
    Repaired(Synced),
}

/// Both families.
pub struct Programmer {
    tables: Box<dyn Tables>,
    options: Options,
    node: NodeInfo,
    local: Vec<IpAddr>,
    interfaces: Option<Vec<Interface>>,
    sides: [Side; 2],
    /// There has been a whole state.
    whole: bool,
    /// The node has said what the rules depend on.
    known: bool,
    pace: Pace,
    /// The pace allows no commit before.
    not_before: Option<Instant>,
}

impl std::fmt::Debug for Programmer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Programmer").field("sides", &self.sides).finish_non_exhaustive()
    }
}

impl Programmer {
    /// Checks that the kernel can do what will be asked of it, without leaving anything, and reads what an earlier run
    /// left. A family that this node does not support is disabled, as kube-proxy's single-stack mode does it.
    ///
    /// # Errors
    /// The kernel supports no family, does not let us, or does not answer.
    pub fn open(mut tables: Box<dyn Tables>, options: Options) -> Result<Self, KernelError> {
        let ours = tables.tables()?.into_iter().filter(|(_, name)| name == TABLE);
        let have: Vec<Family> = ours.map(|(family, _)| family).collect();
        let rehearse = |tables: &mut dyn Tables, base: &Base| {
            if have.contains(&base.family) { Ok(()) } else { rehearse(tables, base) }
        };
        Self::open_families(tables, options, rehearse, |tables, family| tables.try_flowtable(family))
    }

    /// As [`Self::open`], for who will bring nothing to the kernel.
    ///
    /// # Errors
    /// The tables that there are cannot be read.
    pub fn without_rehearsal(tables: Box<dyn Tables>, options: Options) -> Result<Self, KernelError> {
        Self::open_families(tables, options, |_, _| Ok(()), |_, _| Ok(()))
    }

    fn open_families(
        mut tables: Box<dyn Tables>,
        options: Options,
        try_out: impl Fn(&mut dyn Tables, &Base) -> Result<(), KernelError>,
        try_flowtable: impl Fn(&mut dyn Tables, Family) -> Result<(), KernelError>,
    ) -> Result<Self, KernelError> {
        let mut refused = None;
        let mut side = |family| {
            let base = placeholder(family, &options);
            if let Some(reason) = ip_families::disabled(family) {
                return Ok(Side::disabled(base, reason.to_owned()));
            }
            let opened =
                try_out(tables.as_mut(), &base).and_then(|()| Programme::open(base.clone(), tables.as_mut()));
            match opened {
                Ok(programme) if options.flowtable_interfaces.is_empty() => Ok(Side::new(programme)),
                Ok(mut programme) => {
                    let mut offload = Offload::of_try(family, try_flowtable(tables.as_mut(), family));
                    if let Offload::Enabled(devices) = &mut offload {
                        devices.tcp_only = programme.is_tcp_only();
                        programme.set_devices(Some(BTreeSet::new()));
                    }
                    Ok(Side { offload, ..Side::new(programme) })
                }
                Err(error) if error.is_unsupported() => {
                    let side = Side::disabled(base, error.to_string());
                    refused = Some(error);
                    Ok(side)
                }
                Err(error) => Err(error),
            }
        };
        let sides = [side(Family::V4)?, side(Family::V6)?];
        // IPv4 is disabled only by an error.
        if let Some(error) = refused.filter(|_| sides.iter().all(|side| side.disabled.is_some())) {
            return Err(error);
        }
        Ok(Self {
            pace: Pace::new(options.min_sync_period),
            not_before: None,
            tables,
            options,
            node: NodeInfo::default(),
            local: Vec::new(),
            interfaces: None,
            sides,
            whole: false,
            known: false,
        })
    }

    /// A family.
    #[must_use]
    pub fn side(&self, family: Family) -> &Side {
        &self.sides[family as usize]
    }

    /// Whether this node supports a family.
    #[must_use]
    pub fn supports(&self, family: Family) -> bool {
        self.side(family).disabled.is_none()
    }

    /// The families that this node supports.
    pub fn enabled(&self) -> impl Iterator<Item = &Side> {
        self.sides.iter().filter(|side| side.disabled.is_none())
    }

    /// Both families.
    #[must_use]
    pub fn sides(&self) -> &[Side; 2] {
        &self.sides
    }

    /// Elements of both tables, as planned.
    #[must_use]
    pub fn elements(&self) -> usize {
        let of_side = |side: &Side| {
            let counts = side.programme.plan().counts();
            SetName::ALL.iter().map(|&set| counts.elements(set)).sum::<usize>()
        };
        self.sides.iter().map(of_side).sum()
    }

    /// What it is told to do.
    #[must_use]
    pub fn options(&self) -> &Options {
        &self.options
    }

    /// The node, as the agent knows it.
    #[must_use]
    pub fn node_info(&self) -> &NodeInfo {
        &self.node
    }

    /// The node's own addresses.
    #[must_use]
    pub fn local_addresses(&self) -> &[IpAddr] {
        &self.local
    }

    /// Whether it waits for the node to say which networks its pods have.
    #[must_use]
    pub fn waits_for_pod_cidrs(&self) -> bool {
        self.whole && !self.known
    }

    /// A Service is new or has changed, with these ports by family; without any it is gone. Nothing reaches the kernel before
    /// [`Self::sync`].
    pub fn set(&mut self, name: &ServiceName, ports: [Vec<ServicePort>; 2], now: Instant) {
        for (side, mut ports) in self.sides.iter_mut().zip(ports) {
            if side.disabled.is_some() {
                continue;
            }
            if !self.options.allow_external_ips {
                ports.iter_mut().for_each(|port| port.external_ips.clear());
            }
            side.programme.plan_mut().set(name, ports);
            side.pending.get_or_insert(now);
        }
    }

    /// The node is known, or has changed.
    pub fn node(&mut self, node: NodeInfo, now: Instant) {
        if self.node != node {
            self.node = node;
            self.refresh(now);
        }
    }

    /// The node's own addresses have changed.
    pub fn addresses(&mut self, local: &[IpAddr], now: Instant) {
        if self.local != local {
            self.local = local.to_vec();
            self.refresh(now);
        }
    }

    /// What there is is whole: from now on it may be brought to the kernel.
    pub fn whole(&mut self, now: Instant) {
        if !self.whole {
            self.whole = true;
            self.refresh(now);
        }
    }

    fn refresh(&mut self, now: Instant) {
        for side in self.sides.iter_mut().filter(|side| side.disabled.is_none()) {
            let family = side.programme.family();
            let Some((base, facts)) = self.options.of_family(&self.node, &self.local, family) else {
                // What held before holds on, if anything did.
                return;
            };
            side.programme.set_base(base);
            side.programme.plan_mut().facts(facts);
            side.pending.get_or_insert(now);
        }
        self.known = true;
    }

    /// When what waits may be committed, if it waits for the pace alone: call [`Self::sync`] then.
    #[must_use]
    pub fn due(&self) -> Option<Instant> {
        let waits = self.sides.iter().any(|side| side.pending.is_some() && side.failure.is_none());
        self.not_before.filter(|_| waits && self.whole && self.known)
    }

    /// Whether all that was planned is in the kernel.
    #[must_use]
    pub fn is_current(&self) -> bool {
        self.sides.iter().all(|side| side.pending.is_none() && side.failure.is_none())
    }

    /// Brings to the kernel what waits, except in a family that failed just now, and not before the pace allows it. Empty where
    /// nothing is to be done.
    pub fn sync(&mut self, now: Instant) -> Vec<Synced> {
        if !self.whole || !self.known || self.not_before.is_some_and(|at| now < at) {
            return Vec::new();
        }
        let mut all = Vec::new();
        for index in 0..self.sides.len() {
            let side = &self.sides[index];
            if side.failure.as_ref().is_some_and(|failure| now < failure.next) {
                continue;
            }
            if side.pending.is_some() || !side.is_done() {
                all.push(self.sync_side(index, now));
            }
        }
        let is_commit =
            |synced: &Synced| synced.result.as_ref().is_ok_and(|outcome| outcome.transactions > 0);
        if all.iter().any(is_commit) {
            let end = now + all.iter().map(|synced| synced.took).sum();
            let pause = self.pace.committed(end, self.elements());
            self.not_before = (!pause.is_zero()).then(|| end + pause);
        }
        all
    }

    /// To be called at least once a second: retries what failed, and deletes chains that are no longer needed.
    pub fn tick(&mut self, now: Instant) -> Vec<Synced> {
        let mut all = self.sync(now);
        for index in 0..self.sides.len() {
            let side = &mut self.sides[index];
            // Changes that wait for the pace go first: what is noted then is that nothing waits.
            if !side.programme.has_synced() || side.failure.is_some() || side.pending.is_some() {
                continue;
            }
            let begun = Instant::now();
            let result = side.programme.collect(self.tables.as_mut(), now);
            if !result.as_ref().is_ok_and(Outcome::is_nothing) {
                all.push(self.note(index, result, begun.elapsed(), now));
            }
        }
        if self.not_before.is_none_or(|at| at <= now) {
            self.sync_devices(now);
        }
        all
    }

    /// Families whose table somebody else may have changed. Read them without holding the programmer, and call
    /// [`Self::check`] with each. To be called every [`LOOK`].
    pub fn begin_checks(&mut self, now: Instant) -> Vec<Family> {
        let pause = READ.min(self.options.sync_period);
        let mut families = Vec::new();
        for side in &mut self.sides {
            let recently = side.read.is_some_and(|read| now.saturating_duration_since(read) < pause);
            if !side.programme.has_synced() || side.failure.is_some() || recently {
                continue;
            }
            let family = side.programme.family();
            match side.programme.begin_check(self.tables.as_mut()) {
                Ok(true) => families.push(family),
                Ok(false) => {}
                Err(error) => {
                    tracing::warn!(%family, %error, "cannot check whether the table was modified");
                }
            }
        }
        families
    }

    /// Checks a family's table by what was read of it since [`Self::begin_checks`], and repairs it.
    pub fn check(&mut self, family: Family, seen: Option<Found>, now: Instant) -> Check {
        let index = family as usize;
        let side = &mut self.sides[index];
        let begun = Instant::now();
        if !side.programme.can_check() {
            return Check::Postponed(seen);
        }
        let result = side.programme.check(seen, self.tables.as_mut(), now);
        side.read = Some(now);
        match result {
            Ok(outcome) if outcome.is_nothing() => Check::Clean,
            // Reading failed, programming did not.
            Err(error) if side.programme.is_trusted() => {
                tracing::warn!(%family, %error, "cannot read the table to check it");
                Check::Clean
            }
            result => {
                if result.is_ok() {
                    tracing::warn!(%family, "table modified by another program; repaired");
                }
                Check::Repaired(self.note(index, result, begun.elapsed(), now))
            }
        }
    }

    /// What each family's table would have to become, without doing it.
    ///
    /// # Errors
    /// A table cannot be read.
    pub fn differences(&mut self) -> Result<Vec<(Family, Difference)>, KernelError> {
        let mut all = Vec::new();
        for side in self.sides.iter_mut().filter(|side| side.disabled.is_none()) {
            all.push((side.programme.family(), side.programme.difference(self.tables.as_mut())?));
        }
        Ok(all)
    }

    fn sync_side(&mut self, index: usize, now: Instant) -> Synced {
        let side = &mut self.sides[index];
        let begun = Instant::now();
        let result = side.programme.sync(self.tables.as_mut(), now);
        self.note(index, result, begun.elapsed(), now)
    }

    fn note(
        &mut self,
        index: usize,
        result: Result<Outcome, KernelError>,
        took: Duration,
        now: Instant,
    ) -> Synced {
        let side = &mut self.sides[index];
        let family = side.programme.family();
        match &result {
            Ok(outcome) => {
                side.pending = None;
                if let Some(failure) = side.failure.take() {
                    tracing::info!(%family, times = failure.times, "table synced again");
                }
                if outcome.full {
                    side.read = Some(now);
                    side.tally.full += 1;
                }
                if outcome.full || outcome.structure > 0 {
                    side.offload.distrust();
                }
                side.tally.syncs += 1;
                side.tally.repaired += u64::from(outcome.repaired);
                side.tally.last = *outcome;
                side.tally.took = took;
                let transactions = outcome.transactions;
                self.tell_others(index, transactions);
            }
            Err(error) => {
                side.tally.failures += 1;
                let times = side.failure.as_ref().map_or(0, |failure| failure.times) + 1;
                let pause = pause_after(times, self.options.sync_period);
                tracing::error!(%family, %error, times, retry_in = ?pause, "cannot sync the table");
                side.failure = Some(Failure { error: error.clone(), times, next: now + pause });
                side.pending.get_or_insert(now);
            }
        }
        Synced { family, result, took }
    }

    /// The kernel counts transactions of all tables: those of one family are no disturbance of the other.
    fn tell_others(&mut self, index: usize, transactions: usize) {
        for (other, side) in self.sides.iter_mut().enumerate() {
            if other != index {
                side.programme.others(transactions);
            }
        }
    }
}

/// The pause after this many failures in a row, 1 or more.
fn pause_after(failures: u32, sync_period: Duration) -> Duration {
    FIRST_PAUSE.saturating_mul(1 << failures.saturating_sub(1).min(16)).min(sync_period)
}

/// What stands in until the node is known; no rule of it reaches the kernel to stay.
fn placeholder(family: Family, options: &Options) -> Base {
    Base {
        family,
        masquerade_all: options.masquerade_all,
        mark: 1_u32.checked_shl(options.masquerade_bit).unwrap_or(0),
        detector: None,
        node_ports: NodePortMatch::AllLocal,
    }
}

/// Makes all that will ever be needed and takes it away again, in one transaction: the kernel checks every part of it, and
/// has nothing afterwards.
fn rehearse(tables: &mut dyn Tables, base: &Base) -> Result<(), KernelError> {
    let counted = |choice| {
        let affinity = Chain::Affinity { choice, count: 1, seconds: 1, group: 0 };
        affinity.companions().into_iter().chain([affinity, Chain::LoadBalance { choice, count: 1 }])
    };
    let chains: Vec<Chain> = Chain::FIXED
        .into_iter()
        .chain(counted(crate::nft::chain::Choice::Cluster))
        .chain(counted(crate::nft::chain::Choice::Local))
        .collect();
    let mut changes = vec![Change::MakeTable];
    changes.extend(SetName::ALL.map(Change::MakeSet));
    changes.extend(chains.iter().copied().map(Change::MakeChain));
    changes.extend(chains.iter().map(|&chain| Change::Rules(chain, rules(base, chain))));
    changes.push(Change::DeleteTable);
    tables.commit(base.family, &changes)
}

#[cfg(test)]
mod tests;
