//! One family's rules and sets in the kernel.
//!
//! Owns: the [`Plan`] of the family, and what is known of its rules. In: changes of the plan; [`Programs`]. Out: calls of
//! programs: sets, then rules, then entries that no rule needs.
//!
//! There is no cheap way to see that another program has changed something, so a check reads everything. What was read
//! may be older than a sync: a difference is only a reason to read again, by a full sync.

use std::collections::BTreeSet;

use keelson_proxy::backend::Outcome;

use crate::{
    names::Table,
    plan::{Changes, NodeFacts, Plan, SECTION},
    programs::{ProgramError, Programs},
    save::Found,
};

/// Sets that are destroyed by one call of a program.
const DESTROYED_AT_ONCE: usize = 1_000;

#[derive(Debug)]
pub(crate) struct Ruleset {
    plan: Plan,
    synced: bool,
    /// Sets that no rule uses any more. The kernel may use one for a moment longer.
    unused_sets: BTreeSet<String>,
    pub(crate) kube_proxy: Option<String>,
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
        Self { plan, synced: false, unused_sets: BTreeSet::new(), kube_proxy: None }
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
        let changes = self.plan.take_wanted().changes(&found, !is_drift);
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

    /// Whether a read state is worth a comparison.
    pub(crate) fn can_check(&self) -> bool {
        !self.plan.has_changes()
    }

    /// Compares what was read, and repairs drift.
    pub(crate) fn check(
        &mut self,
        found: &Found,
        programs: &mut dyn Programs,
    ) -> Result<Outcome, ProgramError> {
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
