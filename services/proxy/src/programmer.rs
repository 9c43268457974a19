//! Both families' tables, from the states of the Endpoints API.
//!
//! Owns: the [`Programme`]s, when each is brought up to date, and when a failed one is tried again. In: Services, the node,
//! the node's addresses, ticks. Out: transactions, by [`Tables`]; what became of them, to the caller.
//!
//! Each family is on its own: what fails in one stops nothing in the other.

use std::{
    net::IpAddr,
    time::{Duration, Instant},
};

use keelson_client::{NodeInfo, ServiceName};

use crate::{
    model::{Family, ServicePort},
    nft::{
        chain::Chain,
        element::SetName,
        kernel::{Change, KernelError, TABLE, Tables},
        programme::{Difference, Outcome, Programme},
        ruleset::{Base, NodePortMatch, rules},
    },
    options::Options,
};

/// How often it is asked whether somebody else has committed anything.
pub const LOOK: Duration = Duration::from_secs(10);

/// When somebody has, the table is read no more often than this.
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
    pub mended: u64,
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
    /// Since when something waits to be brought to the kernel.
    pub pending: Option<Instant>,
    /// Why it could not be.
    pub failure: Option<Failure>,
    /// What it has been through.
    pub tally: Tally,
    read: Option<Instant>,
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

/// Both families.
pub struct Programmer {
    tables: Box<dyn Tables>,
    options: Options,
    node: NodeInfo,
    local: Vec<IpAddr>,
    sides: [Side; 2],
    /// There has been a whole state.
    whole: bool,
    /// The node has said what the rules depend on.
    known: bool,
    looked: Option<Instant>,
}

impl std::fmt::Debug for Programmer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Programmer").field("sides", &self.sides).finish_non_exhaustive()
    }
}

impl Programmer {
    /// Checks that the kernel can do what will be asked of it, without leaving anything, and reads what an earlier run
    /// left.
    ///
    /// # Errors
    /// It cannot.
    pub fn open(mut tables: Box<dyn Tables>, options: Options) -> Result<Self, KernelError> {
        let ours = tables.tables()?.into_iter().filter(|(_, name)| name == TABLE);
        let have: Vec<Family> = ours.map(|(family, _)| family).collect();
        for family in Family::ALL.into_iter().filter(|family| !have.contains(family)) {
            rehearse(tables.as_mut(), &placeholder(family, &options))?;
        }
        Self::without_rehearsal(tables, options)
    }

    /// As [`Self::open`], for who will bring nothing to the kernel.
    ///
    /// # Errors
    /// The tables that there are cannot be read.
    pub fn without_rehearsal(mut tables: Box<dyn Tables>, options: Options) -> Result<Self, KernelError> {
        let mut side = |family| {
            let programme = Programme::open(placeholder(family, &options), tables.as_mut())?;
            Ok::<_, KernelError>(Side {
                programme,
                pending: None,
                failure: None,
                tally: Tally::default(),
                read: None,
            })
        };
        let sides = [side(Family::V4)?, side(Family::V6)?];
        Ok(Self {
            tables,
            options,
            node: NodeInfo::default(),
            local: Vec::new(),
            sides,
            whole: false,
            known: false,
            looked: None,
        })
    }

    /// A family.
    #[must_use]
    pub fn side(&self, family: Family) -> &Side {
        &self.sides[family as usize]
    }

    /// Both families.
    #[must_use]
    pub fn sides(&self) -> &[Side; 2] {
        &self.sides
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

    /// The tables, to look for others besides ours.
    pub fn tables(&mut self) -> &mut dyn Tables {
        self.tables.as_mut()
    }

    /// A Service is new or has changed, with these ports by family; without any it is gone. Nothing reaches the kernel before
    /// [`Self::sync`].
    pub fn set(&mut self, name: &ServiceName, ports: [Vec<ServicePort>; 2], now: Instant) {
        for (side, ports) in self.sides.iter_mut().zip(ports) {
            side.programme.plan_mut().set(name, ports);
            side.pending.get_or_insert(now);
        }
    }

    /// Whether a family failed last time.
    #[must_use]
    pub fn is_failing(&self) -> bool {
        self.sides.iter().any(|side| side.failure.is_some())
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
        for side in &mut self.sides {
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

    /// Brings to the kernel what waits, except in a family that failed just now. Empty where nothing is to be done.
    pub fn sync(&mut self, now: Instant) -> Vec<Synced> {
        if !self.whole || !self.known {
            return Vec::new();
        }
        let mut all = Vec::new();
        for index in 0..self.sides.len() {
            let side = &self.sides[index];
            if side.failure.as_ref().is_some_and(|failure| now < failure.next) {
                continue;
            }
            if side.pending.is_some() || !side.programme.has_synced() {
                all.push(self.sync_side(index, now));
            }
        }
        all
    }

    /// To be called now and then, at least once a second: tries again what failed, looks whether somebody else has changed
    /// anything, and clears chains away that are no longer needed.
    pub fn tick(&mut self, now: Instant) -> Vec<Synced> {
        let mut all = self.sync(now);
        if !self.whole
            || self.looked.is_some_and(|looked| {
                now.saturating_duration_since(looked) < LOOK.min(self.options.sync_period)
            })
        {
            return all;
        }
        self.looked = Some(now);
        for index in 0..self.sides.len() {
            if let Some(synced) = self.look(index, now) {
                all.push(synced);
            }
        }
        all
    }

    /// What each family's table would have to become, without doing it.
    ///
    /// # Errors
    /// A table cannot be read.
    pub fn differences(&mut self) -> Result<Vec<(Family, Difference)>, KernelError> {
        let mut all = Vec::new();
        for side in &mut self.sides {
            all.push((side.programme.family(), side.programme.difference(self.tables.as_mut())?));
        }
        Ok(all)
    }

    fn look(&mut self, index: usize, now: Instant) -> Option<Synced> {
        let side = &mut self.sides[index];
        if !side.programme.has_synced() || side.failure.is_some() {
            return None;
        }
        if let Ok(outcome) = side.programme.collect(self.tables.as_mut(), now) {
            let transactions = outcome.transactions;
            self.tell_others(index, transactions);
        }
        let side = &mut self.sides[index];
        let disturbed = match side.programme.disturbed(self.tables.as_mut()) {
            Ok(disturbed) => disturbed.is_some(),
            Err(error) => {
                tracing::warn!(family = %side.programme.family(), %error, "cannot tell whether the table was changed");
                false
            }
        };
        let recently = side
            .read
            .is_some_and(|read| now.saturating_duration_since(read) < READ.min(self.options.sync_period));
        if !disturbed || recently {
            return None;
        }
        side.programme.distrust();
        let synced = self.sync_side(index, now);
        if let Ok(Outcome { mended: true, .. }) = synced.result {
            tracing::warn!(family = %synced.family, "somebody else had changed the table; it is mended");
        }
        Some(synced)
    }

    fn sync_side(&mut self, index: usize, now: Instant) -> Synced {
        let side = &mut self.sides[index];
        let family = side.programme.family();
        let begun = Instant::now();
        let result = side.programme.sync(self.tables.as_mut(), now);
        let took = begun.elapsed();
        match &result {
            Ok(outcome) => {
                side.pending = None;
                if let Some(failure) = side.failure.take() {
                    tracing::info!(%family, times = failure.times, "the table is up to date again");
                }
                if outcome.full {
                    side.read = Some(now);
                    side.tally.full += 1;
                }
                side.tally.syncs += 1;
                side.tally.mended += u64::from(outcome.mended);
                side.tally.last = *outcome;
                side.tally.took = took;
                let transactions = outcome.transactions;
                self.tell_others(index, transactions);
            }
            Err(error) => {
                side.tally.failures += 1;
                let times = side.failure.as_ref().map_or(0, |failure| failure.times) + 1;
                let pause =
                    FIRST_PAUSE.saturating_mul(1 << (times - 1).min(16)).min(self.options.sync_period);
                tracing::error!(%family, %error, times, "the table could not be brought up to date; next try in {pause:?}");
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
        let affinity = Chain::Affinity { choice, count: 1, seconds: 1 };
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
