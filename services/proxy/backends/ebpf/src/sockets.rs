//! The socket level: the plan and the kernel, and how they are synced.
//!
//! Owns: [`Sockets`]. In: Services, facts of the node, what an observer read. Out: changes of the maps, programs that are
//! attached, UDP sockets that end.

use std::{
    net::IpAddr,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use keelson_proxy::{
    backend::{Outcome, Snapshots},
    model::Family,
};

use crate::{
    elements::{Change, Contents},
    kernel::{KernelError, SocketKernel, usual_sizes},
    layout::{SOURCE_RANGES, SlotValue},
    plan::{Capacity, Plan},
    stale::{Stale, Sweeper},
};

/// How often all maps are read and compared. Nothing tells that another program has written one; links are checked each time.
const MAPS_INTERVAL: Duration = Duration::from_secs(300);

/// After how long UDP sockets are looked for again that a sweep could not reach.
const SWEEP_RETRY: Duration = Duration::from_secs(10);

/// Of a map, one part in this many is kept for elements that are put before others are deleted.
const HEADROOM: u32 = 8;

/// What an observer read.
#[derive(Debug, Clone)]
pub(crate) struct Seen {
    pub(crate) contents: Contents,
    /// Number of the last sync that had begun before.
    pub(crate) sync: u64,
}

#[derive(Debug, Default, Clone, Copy)]
struct FamilyState {
    /// The kernel has what the plan says, as far as this program knows.
    is_trusted: bool,
    has_synced: bool,
    checked: Option<Instant>,
}

pub(crate) struct Sockets {
    pub(crate) plan: Plan,
    /// `None`: opened to print.
    kernel: Option<Box<dyn SocketKernel>>,
    families: [FamilyState; 2],
    is_enabled: [bool; 2],
    /// The maps have nothing of a family: they are new.
    is_empty: [bool; 2],
    is_attached: bool,
    has_former: bool,
    pub(crate) snapshots: Snapshots<Seen>,
    pub(crate) syncs: Arc<AtomicU64>,
    /// UDP sockets may be connected to endpoints that are gone.
    has_lost_udp: bool,
    /// When those are looked for again after a failure.
    next_sweep: Option<Instant>,
    sweeper: Sweeper,
}

/// The sizes of the maps, without headroom.
pub(crate) fn usual_capacity() -> Capacity {
    let sizes = usual_sizes();
    let without_headroom = |all: u32| usize::try_from(all - all / HEADROOM).unwrap_or(usize::MAX);
    let size = |name: &str| without_headroom(sizes.get(name).copied().unwrap_or_default());
    Capacity {
        frontends: size("frontends"),
        sets: size("sets"),
        members: size("members"),
        node_addresses: size("node_addresses"),
        source_ranges: without_headroom(SOURCE_RANGES.max_entries),
        // Nothing is deleted there.
        slots: sizes.get("slots").copied().unwrap_or_default(),
    }
}

impl Sockets {
    pub(crate) fn new(
        kernel: Option<Box<dyn SocketKernel>>,
        capacity: Capacity,
        is_enabled: [bool; 2],
    ) -> Self {
        Self {
            plan: Plan::new(capacity),
            kernel,
            families: Default::default(),
            is_enabled,
            is_empty: [false; 2],
            is_attached: false,
            has_former: true,
            snapshots: Snapshots::default(),
            syncs: Arc::default(),
            has_lost_udp: false,
            next_sweep: None,
            sweeper: Sweeper::default(),
        }
    }

    pub(crate) fn kernel(&self) -> Option<&dyn SocketKernel> {
        self.kernel.as_deref()
    }

    pub(crate) fn sweeper(&self) -> &Sweeper {
        &self.sweeper
    }

    pub(crate) fn is_attached(&self) -> bool {
        self.is_attached
    }

    pub(crate) fn has_synced(&self, family: Family) -> bool {
        self.families[family as usize].has_synced
    }

    /// Before rules between pods change: the program of pod devices skips them.
    pub(crate) fn remove_former_pods(&mut self) -> Result<usize, KernelError> {
        self.writable()?.remove_former_pods()
    }

    fn writable(&mut self) -> Result<&mut dyn SocketKernel, KernelError> {
        match &mut self.kernel {
            Some(kernel) => Ok(kernel.as_mut()),
            None => Err(KernelError::Print),
        }
    }

    pub(crate) fn sync(&mut self, family: Family, now: Instant) -> Result<Outcome, KernelError> {
        let outcome = self.fill(family, now)?;
        self.finish(outcome)
    }

    /// No program reads what would be filled: the maps, or all that they have of the family. The kernel is asked only before the first
    /// sync.
    pub(crate) fn is_unread(&self, family: Family) -> bool {
        if self.is_empty[family as usize] {
            return true;
        }
        let has_synced = Family::ALL.into_iter().any(|family| self.has_synced(family));
        !has_synced && self.kernel.as_ref().is_some_and(|kernel| !kernel.is_read())
    }

    /// Brings the maps to the wanted state. [`Self::finish`] comes after it.
    pub(crate) fn fill(&mut self, family: Family, now: Instant) -> Result<Outcome, KernelError> {
        let state = self.families[family as usize];
        self.syncs.fetch_add(1, Ordering::SeqCst);
        self.families[family as usize].is_trusted = false;
        let changes = if state.is_trusted {
            self.plan.changes(family, now)
        } else {
            // Looked at again after the maps.
            self.is_attached = false;
            let contents = self.read_all(family)?;
            self.plan.full(family, &contents, now)
        };
        let mut outcome = self.apply(&changes)?;
        // Endpoints may have been lost while no process ran.
        self.has_lost_udp |= self.plan.take_lost_udp() || !state.has_synced;
        outcome.full = !state.is_trusted;
        outcome.repaired = outcome.full && state.has_synced && !changes.is_empty();
        let checked = if state.is_trusted { state.checked } else { Some(now) };
        self.families[family as usize] = FamilyState { is_trusted: true, has_synced: true, checked };
        Ok(outcome)
    }

    pub(crate) fn finish(&mut self, mut outcome: Outcome) -> Result<Outcome, KernelError> {
        outcome.structure += self.attach()?;
        Ok(outcome)
    }

    /// What is in the maps, of which there is nothing to read where this process has made them and not written them since.
    fn read_all(&mut self, family: Family) -> Result<Contents, KernelError> {
        if self.writable()?.prepare()? {
            self.is_empty = [true; 2];
        }
        match std::mem::take(&mut self.is_empty[family as usize]) {
            true => Ok(Contents::default()),
            false => self.writable()?.read(),
        }
    }

    /// Attaches the programs once a family is whole, and ends others when both are.
    fn attach(&mut self) -> Result<usize, KernelError> {
        if self.is_attached && !self.has_former {
            return Ok(0);
        }
        let is_whole = |family: Family| !self.is_enabled[family as usize] || self.has_synced(family);
        let is_whole = Family::ALL.into_iter().all(is_whole);
        let kernel = self.writable()?;
        let mut structure = kernel.attach()?;
        if is_whole {
            structure += kernel.remove_former()?;
        }
        self.is_attached = true;
        self.has_former = !is_whole;
        Ok(structure)
    }

    /// Attaches what has become wanted since. After a failure, the next check finds it missing.
    pub(crate) fn attach_again(&mut self) -> Result<(), KernelError> {
        match self.is_attached {
            true => self.writable()?.attach().map(drop),
            false => Ok(()),
        }
    }

    /// Puts what is wanted before it deletes the rest. A full map ends the puts only, so that the deletions make room.
    fn apply(&mut self, changes: &[Change]) -> Result<Outcome, KernelError> {
        let mut outcome = Outcome { transactions: usize::from(!changes.is_empty()), ..Outcome::default() };
        let mut full = None;
        let kernel = self.writable()?;
        // They come first.
        let slots: Vec<(u32, SlotValue)> = changes.iter().map_while(Change::slot).collect();
        kernel.put_slots(&slots)?;
        outcome.added += slots.len();
        for change in changes.iter().skip(slots.len()) {
            let is_put = matches!(change, Change::Put(_));
            if is_put && full.is_some() {
                continue;
            }
            match kernel.apply(change) {
                Ok(()) if is_put => outcome.added += 1,
                Ok(()) => outcome.deleted += 1,
                Err(error @ KernelError::Full { .. }) if is_put => full = Some(error),
                Err(error) => return Err(error),
            }
        }
        full.map_or(Ok(outcome), Err)
    }

    /// Whether programs are missing, or the maps have not been compared for long.
    pub(crate) fn begin_check(&mut self, family: Family, now: Instant) -> Result<bool, KernelError> {
        let Some(kernel) = &self.kernel else { return Ok(false) };
        if !self.families[family as usize].is_trusted {
            return Ok(false);
        }
        let checked = self.families[family as usize].checked;
        let is_due = checked.is_none_or(|checked| now.saturating_duration_since(checked) >= MAPS_INTERVAL);
        Ok(is_due || (self.is_attached && !kernel.detached()?.is_empty()))
    }

    /// Compares what was read, and repairs.
    pub(crate) fn check(&mut self, family: Family, now: Instant) -> Result<Outcome, KernelError> {
        let Some(seen) = self.snapshots.take(family) else { return Ok(Outcome::default()) };
        if !self.families[family as usize].is_trusted || self.plan.has_changes(family) {
            return Ok(Outcome::default());
        }
        let mut changes = self.plan.difference(&seen.contents, family);
        if !changes.is_empty() && seen.sync != self.syncs.load(Ordering::SeqCst) {
            // Some are those of the syncs since then.
            let contents = self.writable()?.read()?;
            changes = self.plan.difference(&contents, family);
        }
        self.families[family as usize].is_trusted = false;
        let mut outcome = self.apply(&changes)?;
        outcome.structure += self.writable()?.attach()?;
        self.families[family as usize].is_trusted = true;
        self.families[family as usize].checked = Some(now);
        outcome.repaired = !outcome.is_nothing();
        Ok(outcome)
    }

    /// Tries again what had no room, and ends UDP sockets whose endpoint is gone.
    pub(crate) fn maintain(&mut self, family: Family, now: Instant) -> Result<Outcome, KernelError> {
        if !self.families[family as usize].is_trusted {
            return Ok(Outcome::default());
        }
        self.sweep(now)?;
        match self.plan.wake(now) {
            true => self.sync(family, now),
            false => Ok(Outcome::default()),
        }
    }

    fn sweep(&mut self, now: Instant) -> Result<(), KernelError> {
        if self.sweeper.take_retry() {
            self.next_sweep = Some(now + SWEEP_RETRY);
        }
        let is_due = self.has_lost_udp || self.next_sweep.is_some_and(|at| now >= at);
        if !is_due || !self.sweeper.is_free() {
            return Ok(());
        }
        let replies = self.writable()?.udp_replies()?;
        (self.has_lost_udp, self.next_sweep) = (false, None);
        let stale = replies.into_iter().filter(|(key, value)| self.plan.is_stale(value.other, key.remote));
        self.sweeper.start(stale.map(|(key, _)| Stale::from(key)).collect());
        Ok(())
    }

    /// What a full sync would change. The next sync is one.
    pub(crate) fn difference(&mut self, family: Family, now: Instant) -> Result<Vec<Change>, KernelError> {
        let contents = self.writable()?.read()?;
        self.families[family as usize].is_trusted = false;
        Ok(self.plan.full(family, &contents, now))
    }

    pub(crate) fn set_node_addresses(&mut self, family: Family, addresses: &[IpAddr]) {
        let before = self.plan.left_addresses(family);
        self.plan.set_node_addresses(family, addresses);
        let left = self.plan.left_addresses(family);
        if left > 0 && left != before {
            tracing::warn!(%family, left, "no room for all addresses of the node; node ports at the rest are left to nftables");
        }
    }
}
