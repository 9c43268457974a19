//! Records of the StatusReporter.
//!
//! Owns: [`Reported`], the last report, and its storage. In: a successful report. Out: its age, independent of changes
//! of the wall clock: within one boot by the time since boot, otherwise by the wall clock.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use k8s_openapi::api::core::v1::NodeStatus;
use keelson_actor_system::clock::Now;
use keelson_storage::{Batch, MAX_VALUE_LEN, StateStore, StoreError, Table};
use serde::{Deserialize, Serialize};

use super::{
    compute::{Memory, Moment, Pressure, millis, moment},
    external::{ExternalRecord, ExternalWrite},
};

const STATUS_KEY: &[u8] = b"status";
const CONDITION_PREFIX: &str = "condition/";

/// A moment that remains comparable after a restart.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stamp {
    /// `nodeInfo.bootID`.
    pub boot_id: String,
    pub since_boot_ms: i64,
    pub unix_ms: i64,
}

impl Stamp {
    #[must_use]
    pub fn new(boot_id: &str, since_boot: Duration, now: Now) -> Self {
        Self { boot_id: boot_id.to_owned(), since_boot_ms: millis(since_boot), unix_ms: now.unix_ms }
    }

    pub(super) fn earlier(self, ms: i64) -> Self {
        let (since_boot_ms, unix_ms) =
            (self.since_boot_ms.saturating_sub(ms), self.unix_ms.saturating_sub(ms));
        Self { since_boot_ms, unix_ms, ..self }
    }

    /// How far the wall clock was set back between this moment and another, in milliseconds; 0: not, or not detectably.
    /// Across boots only a lower bound is known.
    pub(super) fn step_back_until(&self, then: &Self) -> i64 {
        let wall = then.unix_ms.saturating_sub(self.unix_ms);
        let passed = if self.boot_id == then.boot_id && !self.boot_id.is_empty() {
            then.since_boot_ms.saturating_sub(self.since_boot_ms).max(0)
        } else {
            0
        };
        passed.saturating_sub(wall).max(0)
    }

    /// Milliseconds from this moment to another; `None` if negative, because a clock went backwards.
    fn elapsed_until(&self, then: &Self) -> Option<i64> {
        let passed = if self.boot_id == then.boot_id && !self.boot_id.is_empty() {
            then.since_boot_ms.checked_sub(self.since_boot_ms)
        } else {
            then.unix_ms.checked_sub(self.unix_ms)
        };
        passed.filter(|passed| *passed >= 0)
    }
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Reported {
    pub uid: String,
    /// The Node's resourceVersion after the report.
    pub resource_version: String,
    pub at: Stamp,
    /// How much later than usual the next report is due, in milliseconds; often negative.
    pub delay_ms: i64,
    /// In role node the full status, otherwise the agent's own conditions. Empty if it was too large.
    pub status: NodeStatus,
    /// How long before the report each pressure was last seen, in milliseconds.
    pub seen_before_ms: BTreeMap<Pressure, i64>,
    /// [`Memory::not_ready`].
    pub not_ready: Option<(BTreeSet<String>, String)>,
}

impl Reported {
    /// The moment of the report, by this process's clock; `None` if unknown.
    pub(super) fn moment(&self, stamp: &Stamp, now: Now) -> Option<Moment> {
        Some(moment(now).saturating_sub(self.at.elapsed_until(stamp)?))
    }

    /// The record on disk. A status that is too large for a record is omitted: it is only used by a watch that begins
    /// in the past, which is rare.
    fn encoded(&self) -> Result<Vec<u8>, StoreError> {
        let error = |source| StoreError::Encode { table: Table::Heartbeats, key: "status".into(), source };
        let full = serde_json::to_vec(self).map_err(error)?;
        if full.len() <= MAX_VALUE_LEN {
            return Ok(full);
        }
        serde_json::to_vec(&Self { status: NodeStatus::default(), ..self.clone() }).map_err(error)
    }

    /// What was remembered with the report, which was made at `at`.
    pub(super) fn memory(&self, at: Moment) -> Memory {
        let seen =
            self.seen_before_ms.iter().map(|(pressure, before)| (*pressure, at.saturating_sub(*before)));
        Memory { seen: seen.collect(), not_ready: self.not_ready.clone(), ..Memory::default() }
    }
}

#[derive(Debug, Default)]
pub struct Restored {
    pub reported: Option<Box<Reported>>,
    pub conditions: Vec<ExternalWrite>,
    /// One sentence per record.
    pub unreadable: Vec<String>,
}

#[derive(Debug, Clone, PartialEq)]
pub enum Write {
    Reported(Box<Reported>),
    Conditions(Vec<ExternalWrite>),
}

pub(super) fn load(store: &Arc<dyn StateStore>) -> Result<Restored, StoreError> {
    let mut restored = Restored::default();
    for (key, value) in store.scan(Table::Heartbeats)? {
        let name = String::from_utf8_lossy(&key).into_owned();
        let kind = name.strip_prefix(CONDITION_PREFIX);
        let result = match kind {
            _ if key == STATUS_KEY => {
                serde_json::from_slice(&value).map(|reported| restored.reported = Some(reported))
            }
            Some(kind) => serde_json::from_slice(&value)
                .map(|record| restored.conditions.push((kind.to_owned(), Some(record)))),
            // A record of another actor.
            None => Ok(()),
        };
        if let Err(error) = result {
            let text = format!("cannot read record {}/{name}; ignoring it: {error}", Table::Heartbeats);
            restored.unreadable.push(text);
        }
    }
    Ok(restored)
}

/// The types of all conditions that other processes have set, including cleared ones that may still be on the Node.
///
/// # Errors
/// The store cannot be read.
pub fn recorded_conditions(store: &Arc<dyn StateStore>) -> Result<Vec<String>, StoreError> {
    Ok(load(store)?.conditions.into_iter().map(|(kind, _)| kind).collect())
}

/// Pending writes: only the newest of each record.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Unsaved {
    reported: Option<Box<Reported>>,
    conditions: BTreeMap<String, Option<ExternalRecord>>,
}

impl Unsaved {
    pub(super) fn is_empty(&self) -> bool {
        self.reported.is_none() && self.conditions.is_empty()
    }

    pub(super) fn has_condition(&self, kind: &str) -> bool {
        self.conditions.contains_key(kind)
    }

    pub(super) fn add(&mut self, write: Write) {
        match write {
            Write::Reported(reported) => self.reported = Some(reported),
            Write::Conditions(writes) => self.conditions.extend(writes),
        }
    }

    /// Returns failed writes to the queue, unless newer ones are pending.
    pub(super) fn put_back(&mut self, older: Self) {
        self.reported = self.reported.take().or(older.reported);
        for (kind, record) in older.conditions {
            self.conditions.entry(kind).or_insert(record);
        }
    }

    /// Writes all of it in one batch.
    pub(super) fn save(&self, store: &Arc<dyn StateStore>) -> Result<(), StoreError> {
        let mut batch = Batch::new();
        if let Some(reported) = &self.reported {
            batch.put(Table::Heartbeats, STATUS_KEY, reported.encoded()?);
        }
        for (kind, record) in &self.conditions {
            let key = format!("{CONDITION_PREFIX}{kind}");
            match record {
                Some(record) => drop(batch.put_json(Table::Heartbeats, key, record)?),
                None => drop(batch.delete(Table::Heartbeats, key)),
            }
        }
        if batch.is_empty() { Ok(()) } else { store.apply(&batch) }
    }
}

#[cfg(test)]
mod tests {
    use keelson_storage::{MemoryStore, StateStoreExt as _};
    use serde_json::json;

    use super::*;
    use crate::status::{
        external::{Externals, tests::condition},
        kinds::ConditionStatus,
    };

    fn stamp(boot: &str, since_boot_ms: i64, unix_ms: i64) -> Stamp {
        Stamp { boot_id: boot.into(), since_boot_ms, unix_ms }
    }

    #[test]
    fn time_passes_by_the_boot_and_across_boots_by_the_wall() {
        let at = stamp("b", 100_000, 5_000_000);
        assert_eq!(at.elapsed_until(&stamp("b", 160_000, 1)), Some(60_000), "the wall clock does not matter");
        assert_eq!(at.elapsed_until(&stamp("b", 99_999, 9_000_000)), None);
        assert_eq!(at.elapsed_until(&stamp("c", 1, 5_010_000)), Some(10_000));
        assert_eq!(at.elapsed_until(&stamp("c", 1, 4_999_999)), None, "stepped back: nothing is known");
        assert_eq!(stamp("", 0, 0).elapsed_until(&stamp("", 5, 9)), Some(9));
    }

    #[test]
    fn e18_only_steps_back_count() {
        let at = stamp("b", 100_000, 5_000_000);
        for (then, back) in [
            (stamp("b", 160_000, 5_060_000), 0),
            (stamp("b", 160_000, 9_000_000), 0),
            (stamp("b", 160_000, 5_020_000), 40_000),
            (stamp("b", 160_000, 0), 5_060_000),
            (stamp("c", 1, 9_000_000), 0),
            (stamp("c", 900_000, 5_000_001), 0),
            (stamp("c", 1, 4_990_000), 10_000),
        ] {
            assert_eq!(at.step_back_until(&then), back, "{then:?}");
        }
    }

    fn save<const N: usize>(store: &Arc<dyn StateStore>, writes: [Write; N]) {
        let mut unsaved = Unsaved::default();
        writes.into_iter().for_each(|write| unsaved.add(write));
        unsaved.save(store).expect("saved");
    }

    #[test]
    fn a_failed_write_does_not_hide_newer_state() {
        let mut externals = Externals::default();
        let first = externals.set(condition("X", ConditionStatus::True), 0).expect("taken");
        let second = externals.set(condition("X", ConditionStatus::False), 0).expect("taken");
        let (mut older, mut newer) = (Unsaved::default(), Unsaved::default());
        older.add(Write::Conditions(first.into_iter().chain([("Y".to_owned(), None)]).collect()));
        newer.add(Write::Conditions(second.clone().into_iter().collect()));
        newer.put_back(older);
        let expected: Vec<_> = second.into_iter().chain([("Y".to_owned(), None)]).collect();
        assert_eq!(newer.conditions.into_iter().collect::<Vec<_>>(), expected);
    }

    #[test]
    fn a_status_that_is_too_large_for_a_record_costs_the_status_only() {
        let store: Arc<dyn StateStore> = Arc::new(MemoryStore::new());
        let mut reported = some();
        let image = json!([{"names": ["x".repeat(MAX_VALUE_LEN)], "sizeBytes": 1}]);
        reported.status.images = serde_json::from_value(image).expect("images");
        save(&store, [Write::Reported(Box::new(reported.clone()))]);
        let loaded = *load(&store).expect("loaded").reported.expect("there");
        assert_eq!(loaded, Reported { status: NodeStatus::default(), ..reported });
    }

    fn some() -> Reported {
        Reported {
            uid: "u".into(),
            resource_version: "7".into(),
            at: stamp("b", 1, 2),
            delay_ms: -5,
            status: serde_json::from_value(json!({"capacity": {"cpu": "4"}})).expect("a status"),
            seen_before_ms: BTreeMap::from([(Pressure::Disk, 3)]),
            not_ready: Some((BTreeSet::from(["Down".to_owned()]), "text".into())),
        }
    }

    #[test]
    fn saved_state_is_loaded_and_damaged_records_are_named() {
        let store: Arc<dyn StateStore> = Arc::new(MemoryStore::new());
        let reported = some();
        let mut externals = Externals::default();
        let write = externals.set(condition("example.com/X", ConditionStatus::True), 0).expect("taken");
        save(&store, [Write::Reported(Box::new(reported.clone()))]);
        save(&store, [Write::Conditions(write.clone().into_iter().collect())]);
        store.put_json(Table::Heartbeats, b"lease", &json!({"other": 1})).expect("saved");
        let restored = load(&store).expect("loaded");
        assert_eq!(restored.reported.as_deref(), Some(&reported));
        assert_eq!(restored.conditions, write.into_iter().collect::<Vec<_>>());
        assert!(restored.unreadable.is_empty(), "{:?}", restored.unreadable);

        store.put_json(Table::Heartbeats, STATUS_KEY, &json!(1)).expect("saved");
        store.put_json(Table::Heartbeats, b"condition/Y", &json!({})).expect("saved");
        save(&store, [Write::Conditions(vec![("example.com/X".into(), None)])]);
        let restored = load(&store).expect("loaded");
        assert!(restored.reported.is_none() && restored.conditions.is_empty());
        assert_eq!(restored.unreadable.len(), 2, "{:?}", restored.unreadable);
        assert!(restored.unreadable[0].contains("heartbeats/condition/Y"), "{:?}", restored.unreadable);
    }
}
