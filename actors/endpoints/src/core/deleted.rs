//! Deleted Services.
//!
//! Owns: which Services were deleted recently and at which revision, so that a client that resumes from an earlier
//! revision receives the deletions, even across a restart. In: deletions. Out: those that are no longer needed.

use std::collections::{BTreeMap, BTreeSet};

use super::super::ServiceName;

const MAX_DELETED: usize = 10_000;
/// Maximum number of entries forgotten per revision beyond those added, so that the work per revision is bounded.
const EXTRA_FORGOTTEN: usize = 32;

#[derive(Debug, Default)]
pub(super) struct Deleted {
    by_name: BTreeMap<ServiceName, u64>,
    by_rev: BTreeSet<(u64, ServiceName)>,
    /// All deletions after this revision are known.
    since: u64,
}

impl Deleted {
    pub(super) fn new(by_name: BTreeMap<ServiceName, u64>, since: u64) -> Self {
        let by_rev = by_name.iter().map(|(name, rev)| (*rev, name.clone())).collect();
        Self { by_name, by_rev, since }
    }

    pub(super) fn by_name(&self) -> &BTreeMap<ServiceName, u64> {
        &self.by_name
    }

    pub(super) fn len(&self) -> usize {
        self.by_name.len()
    }

    pub(super) fn since(&self) -> u64 {
        self.since
    }

    pub(super) fn add(&mut self, name: ServiceName, rev: u64) {
        self.remove(&name);
        self.by_rev.insert((rev, name.clone()));
        self.by_name.insert(name, rev);
    }

    pub(super) fn remove(&mut self, name: &ServiceName) {
        if let Some(rev) = self.by_name.remove(name) {
            self.by_rev.remove(&(rev, name.clone()));
        }
    }

    /// Forgets entries that are older than `history` revisions or exceed the maximum. `rev` deleted `added` Services.
    pub(super) fn forget(&mut self, rev: u64, history: u64, added: usize) -> Vec<ServiceName> {
        let mut forgotten = Vec::new();
        let oldest = rev.saturating_sub(history);
        while forgotten.len() < added + EXTRA_FORGOTTEN {
            let Some((deleted, _)) = self.by_rev.first() else { break };
            if *deleted >= oldest && self.by_rev.len() <= MAX_DELETED {
                break;
            }
            let Some((deleted, name)) = self.by_rev.pop_first() else { break };
            self.by_name.remove(&name);
            self.since = self.since.max(deleted);
            forgotten.push(name);
        }
        forgotten
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(number: u64) -> ServiceName {
        ServiceName::new("ns", &number.to_string())
    }

    #[test]
    fn old_deletions_are_forgotten_and_the_oldest_complete_revision_is_known() {
        let mut deleted = Deleted::new(BTreeMap::from([(name(3), 3)]), 1);
        deleted.add(name(4), 4);
        assert_eq!(deleted.forget(5, 10, 0), []);
        assert_eq!(deleted.since(), 1);
        assert_eq!(deleted.forget(14, 10, 0), [name(3)]);
        assert_eq!((deleted.since(), deleted.len()), (3, 1));
        deleted.add(name(4), 14);
        assert_eq!(deleted.forget(20, 10, 0), [], "deleted again since");
        deleted.remove(&name(4));
        assert_eq!(deleted.forget(40, 10, 0), [], "made again");
        assert_eq!(deleted.since(), 3);
    }

    #[test]
    fn the_number_of_deletions_is_bounded_and_reduced_in_steps() {
        let mut deleted = Deleted::default();
        for number in 0..12_000 {
            deleted.add(name(number), 1);
        }
        let mut forgotten = 0;
        for rev in 2..100 {
            let some = deleted.forget(rev, 1000, 0).len();
            assert!(some <= EXTRA_FORGOTTEN);
            forgotten += some;
        }
        assert_eq!((forgotten, deleted.len(), deleted.since()), (2000, MAX_DELETED, 1));
    }
}
