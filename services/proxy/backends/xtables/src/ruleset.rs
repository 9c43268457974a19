//! One family's rules and sets in the kernel.
//!
//! Owns: a [`Plan`] of the family, and what is known of its rules. In: changes of the plan; [`Programs`]. Out: calls of
//! programs: sets, then rules, then entries that no rule needs.
//!
//! nf_tables counts changes; iptables-legacy and IP sets do not, so everything is read from time to time
//! ([`Ruleset::begin_check`]). What was read may be older than a sync: a difference is only a reason to read again, by a
//! full sync.

use std::{
    collections::BTreeSet,
    time::{Duration, Instant},
};

use keelson_proxy::{backend::Outcome, model::Family};

use crate::{
    changes::{Changes, SECTION, Wanted},
    names::Table,
    programs::{ProgramError, Programs},
    save::Found,
};

/// The wanted chains and sets of a family. Pure: no I/O, no clock.
pub trait Plan {
    /// The tables that it may have chains in.
    const TABLES: &'static [Table];

    fn family(&self) -> Family;

    /// Whether something has changed since the last time, or everything has to be compared.
    fn has_changes(&self) -> bool;

    /// Forgets what was taken: the next sync compares everything.
    fn invalidate(&mut self);

    /// The changes since the last time; `None`: everything has to be compared.
    fn take_changes(&mut self) -> Option<Changes>;

    /// Everything, to be compared; from now on changes are recorded.
    fn take_wanted(&mut self) -> Wanted;

    fn wanted(&self) -> Wanted;
}

/// Reading everything is followed by a pause of this number of times as long. At 10,000 Services of 10 endpoints it takes
/// half a second with iptables-legacy, and 4 seconds with iptables-nft.
const READ_SHARE: u32 = 50;

/// The same, if another program has changed some rules.
const CHANGED_READ_SHARE: u32 = 10;

/// Sets that are destroyed by one call of a program.
const DESTROYED_AT_ONCE: usize = 1_000;

#[derive(Debug)]
pub struct Ruleset<P> {
    plan: P,
    synced: bool,
    /// Sets that no rule uses any more. The kernel may use one for a moment longer.
    unused_sets: BTreeSet<String>,
    pub kube_proxy: Option<String>,
    /// Changes of rules, as last known.
    generation: Option<u32>,
    /// When everything was last read to be compared, and how long that took.
    last_read: Option<(Instant, Duration)>,
}

/// Reads all sets of a family, and the chains of these tables.
pub fn read_family(
    programs: &mut dyn Programs,
    family: Family,
    tables: &[Table],
) -> Result<Found, ProgramError> {
    let mut found = Found::default();
    for &table in tables {
        found.add_rules(table, &programs.save(table)?);
    }
    found.add_sets(family, &programs.save_sets()?);
    Ok(found)
}

impl<P: Plan> Ruleset<P> {
    pub fn new(plan: P) -> Self {
        Self {
            plan,
            synced: false,
            unused_sets: BTreeSet::new(),
            kube_proxy: None,
            generation: None,
            last_read: None,
        }
    }

    fn read(&self, programs: &mut dyn Programs) -> Result<Found, ProgramError> {
        read_family(programs, self.plan.family(), P::TABLES)
    }

    pub fn plan(&self) -> &P {
        &self.plan
    }

    pub fn plan_mut(&mut self) -> &mut P {
        &mut self.plan
    }

    pub fn has_synced(&self) -> bool {
        self.synced
    }

    pub fn sync(&mut self, programs: &mut dyn Programs) -> Result<Outcome, ProgramError> {
        match self.plan.take_changes() {
            Some(changes) => {
                let mut outcome = Outcome::default();
                self.apply(programs, changes, &mut outcome)?;
                Ok(outcome)
            }
            None => self.sync_full(programs, false),
        }
    }

    fn sync_full(&mut self, programs: &mut dyn Programs, is_drift: bool) -> Result<Outcome, ProgramError> {
        self.plan.invalidate();
        let found = self.read(programs)?;
        self.kube_proxy.clone_from(&found.kube_proxy);
        let wanted = self.plan.take_wanted();
        for set in wanted.sets.keys() {
            self.unused_sets.remove(set.as_str());
        }
        let changes = wanted.into_changes(&found, !is_drift);
        let mut outcome = Outcome { full: true, ..Outcome::default() };
        self.apply(programs, self.without_unused(changes), &mut outcome)?;
        outcome.repaired = is_drift && !outcome.is_nothing();
        self.synced = true;
        Ok(outcome)
    }

    /// Without sets whose end is awaited.
    fn without_unused(&self, mut changes: Changes) -> Changes {
        changes.destroy_sets.retain(|set| !self.unused_sets.contains(set));
        changes
    }

    /// Whether to read everything: if another program has changed rules, or from time to time.
    pub fn begin_check(&mut self, programs: &dyn Programs, now: Instant) -> bool {
        let generation = programs.generation();
        let is_changed = generation != self.generation;
        let share = if is_changed { CHANGED_READ_SHARE } else { READ_SHARE };
        let is_due = |(at, took): (Instant, Duration)| now.saturating_duration_since(at) >= took * share;
        let reads = self.last_read.is_none_or(is_due);
        if reads {
            // The next check notices later changes.
            self.generation = generation;
        }
        reads
    }

    pub fn replace_generation(&mut self, before: Option<u32>, after: Option<u32>) {
        if self.generation == before {
            self.generation = after;
        }
    }

    /// Whether a read state is worth a comparison.
    pub fn can_check(&self) -> bool {
        !self.plan.has_changes()
    }

    /// Everything was read, which took this long.
    pub fn note_read(&mut self, now: Instant, took: Duration) {
        self.last_read = Some((now, took));
    }

    /// Compares what was read, and repairs drift.
    pub fn check(
        &mut self,
        found: &Found,
        took: Duration,
        programs: &mut dyn Programs,
        now: Instant,
    ) -> Result<Outcome, ProgramError> {
        self.note_read(now, took);
        self.kube_proxy.clone_from(&found.kube_proxy);
        match self.without_unused(self.plan.wanted().into_changes(found, false)).is_empty() {
            true => Ok(Outcome::default()),
            false => self.sync_full(programs, true),
        }
    }

    pub fn difference(&self, programs: &mut dyn Programs) -> Result<Changes, ProgramError> {
        let found = self.read(programs)?;
        Ok(self.without_unused(self.plan.wanted().into_changes(&found, true)))
    }

    /// Destroys sets that no rule uses.
    pub fn maintain(&mut self, programs: &mut dyn Programs) -> Outcome {
        let sets: Vec<String> = self.unused_sets.iter().take(DESTROYED_AT_ONCE).cloned().collect();
        let destroy = |sets: &[String]| sets.iter().map(|set| format!("destroy {set}\n")).collect::<String>();
        if sets.is_empty() {
            return Outcome::default();
        }
        let mut outcome = Outcome { transactions: 1, ..Outcome::default() };
        if programs.restore_sets(&destroy(&sets)).is_ok() {
            outcome.structure = sets.len();
            self.unused_sets.retain(|set| !sets.contains(set));
            return outcome;
        }
        // Some are gone or in use: the program stopped at the first of them.
        let Ok(existing) = programs.count_sets() else { return Outcome::default() };
        let existing: BTreeSet<String> = existing.into_iter().map(|(set, _)| set).collect();
        self.unused_sets.retain(|set| existing.contains(set));
        outcome.structure = sets.iter().filter(|set| !existing.contains(*set)).count();
        outcome
    }

    /// After an error, the next sync compares everything.
    fn apply(
        &mut self,
        programs: &mut dyn Programs,
        changes: Changes,
        outcome: &mut Outcome,
    ) -> Result<(), ProgramError> {
        let result = self.run(programs, &changes, outcome);
        if outcome.transactions > 0 {
            self.generation = programs.generation();
        }
        if result.is_err() {
            self.plan.invalidate();
            return result;
        }
        outcome.added = changes.add_entries.len();
        outcome.deleted = changes.delete_entries.len();
        outcome.structure = changes.structure();
        for set in &changes.create_sets {
            self.unused_sets.remove(set.as_str());
        }
        self.unused_sets.extend(changes.destroy_sets);
        Ok(())
    }

    fn run(
        &self,
        programs: &mut dyn Programs,
        changes: &Changes,
        outcome: &mut Outcome,
    ) -> Result<(), ProgramError> {
        let before = changes.sets_before(self.plan.family());
        if !before.is_empty() {
            programs.restore_sets(&before)?;
            outcome.transactions += 1;
        }
        let section = if programs.prefers_small_sections() { SECTION } else { usize::MAX };
        let rules = changes.rules(section);
        if !rules.is_empty() {
            programs.restore(&rules)?;
            outcome.transactions += rules.matches("\nCOMMIT\n").count();
        }
        let after = changes.sets_after();
        if !after.is_empty() {
            programs.restore_sets(&after)?;
            outcome.transactions += 1;
        }
        Ok(())
    }
}
