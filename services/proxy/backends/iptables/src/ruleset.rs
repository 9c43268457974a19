//! One family's rules and sets in the kernel.
//!
//! Owns: the [`Plan`] of the family, and what is known of its rules. In: changes of the plan; [`Programs`]. Out: calls of
//! programs: sets, then rules, then entries that no rule needs.
//!
//! nf_tables counts changes; iptables-legacy and IP sets do not, so everything is read from time to time
//! ([`Ruleset::begin_check`]). What was read may be older than a sync: a difference is only a reason to read again, by a
//! full sync.

use std::{
    collections::BTreeSet,
    time::{Duration, Instant},
};

use keelson_proxy::backend::Outcome;

use crate::{
    names::Table,
    plan::{Changes, NodeFacts, Plan, SECTION},
    programs::{ProgramError, Programs},
    save::Found,
};

/// Reading everything is followed by a pause of this number of times as long. At 10,000 Services of 10 endpoints it takes
/// half a second with iptables-legacy, and 4 seconds with iptables-nft.
const READ_SHARE: u32 = 50;

/// The same, if another program has changed some rules.
const CHANGED_READ_SHARE: u32 = 10;

/// Sets that are destroyed by one call of a program.
const DESTROYED_AT_ONCE: usize = 1_000;

#[derive(Debug)]
pub(crate) struct Ruleset {
    plan: Plan,
    synced: bool,
    /// Sets that no rule uses any more. The kernel may use one for a moment longer.
    unused_sets: BTreeSet<String>,
    pub(crate) kube_proxy: Option<String>,
    /// Changes of rules, as last known.
    generation: Option<u32>,
    /// When everything was last read to be compared, and how long that took.
    last_read: Option<(Instant, Duration)>,
}

pub(crate) fn read(programs: &mut dyn Programs, plan: &Plan) -> Result<Found, ProgramError> {
    read_family(programs, plan.family())
}

pub(crate) fn read_family(
    programs: &mut dyn Programs,
    family: keelson_proxy::model::Family,
) -> Result<Found, ProgramError> {
    let mut found = Found::default();
    for table in Table::ALL {
        found.add_rules(table, &programs.save(table)?);
    }
    found.add_sets(family, &programs.save_sets()?);
    Ok(found)
}

impl Ruleset {
    pub(crate) fn new(plan: Plan) -> Self {
        Self {
            plan,
            synced: false,
            unused_sets: BTreeSet::new(),
            kube_proxy: None,
            generation: None,
            last_read: None,
        }
    }

    pub(crate) fn plan(&self) -> &Plan {
        &self.plan
    }

    pub(crate) fn plan_mut(&mut self) -> &mut Plan {
        &mut self.plan
    }

    pub(crate) fn set_facts(&mut self, facts: NodeFacts) {
        self.plan.set_facts(facts);
    }

    pub(crate) fn has_synced(&self) -> bool {
        self.synced
    }

    #[cfg(test)]
    pub(crate) fn has_unused_sets(&self) -> bool {
        !self.unused_sets.is_empty()
    }

    pub(crate) fn sync(&mut self, programs: &mut dyn Programs) -> Result<Outcome, ProgramError> {
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
        let found = read(programs, &self.plan)?;
        self.kube_proxy.clone_from(&found.kube_proxy);
        let wanted = self.plan.take_wanted();
        for set in wanted.sets.keys() {
            self.unused_sets.remove(set.as_str());
        }
        let changes = wanted.changes(&found, !is_drift);
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
    pub(crate) fn begin_check(&mut self, programs: &dyn Programs, now: Instant) -> bool {
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

    pub(crate) fn replace_generation(&mut self, before: Option<u32>, after: Option<u32>) {
        if self.generation == before {
            self.generation = after;
        }
    }

    /// Whether a read state is worth a comparison.
    pub(crate) fn can_check(&self) -> bool {
        !self.plan.has_changes()
    }

    /// Compares what was read, and repairs drift.
    pub(crate) fn check(
        &mut self,
        (found, took): &(Found, Duration),
        programs: &mut dyn Programs,
        now: Instant,
    ) -> Result<Outcome, ProgramError> {
        self.last_read = Some((now, *took));
        self.kube_proxy.clone_from(&found.kube_proxy);
        match self.without_unused(self.plan.wanted().changes(found, false)).is_empty() {
            true => Ok(Outcome::default()),
            false => self.sync_full(programs, true),
        }
    }

    pub(crate) fn difference(&self, programs: &mut dyn Programs) -> Result<Changes, ProgramError> {
        let found = read(programs, &self.plan)?;
        Ok(self.without_unused(self.plan.wanted().changes(&found, true)))
    }

    /// Destroys sets that no rule uses.
    pub(crate) fn maintain(&mut self, programs: &mut dyn Programs) -> Outcome {
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
