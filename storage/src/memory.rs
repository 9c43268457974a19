//! Owns the store in memory, with the same contract as the one on disk.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::batch::Batch;
use crate::error::StoreError;
use crate::migrate::SCHEMA_VERSION;
use crate::store::{Keyed, StateStore, StoreStats};
use crate::table::Table;

/// For tests and for an agent that must not write to a disk.
#[derive(Debug, Default)]
pub struct MemoryStore {
    records: Mutex<BTreeMap<Vec<u8>, Vec<u8>>>,
}

impl MemoryStore {
    pub fn new() -> Self {
        Self::default()
    }

    fn records(&self) -> MutexGuard<'_, BTreeMap<Vec<u8>, Vec<u8>>> {
        // No code panics while it holds the lock, so a poisoned map is consistent.
        self.records.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl StateStore for MemoryStore {
    fn apply(&self, batch: &Batch) -> Result<(), StoreError> {
        batch.check()?;
        let mut records = self.records();
        for (key, value) in batch.net() {
            match value {
                Some(value) => records.insert(key, value.to_owned()),
                None => records.remove(&key),
            };
        }
        Ok(())
    }

    fn get(&self, table: Table, key: &[u8]) -> Result<Option<Vec<u8>>, StoreError> {
        Ok(self.records().get(&table.raw_key(key)).cloned())
    }

    fn scan(&self, table: Table) -> Result<Keyed<Vec<u8>>, StoreError> {
        let records = self.records();
        let of_table = records.range(vec![table.tag()]..vec![table.tag() + 1]);
        Ok(of_table.map(|(key, value)| (key[1..].to_vec(), value.clone())).collect())
    }

    fn stats(&self) -> StoreStats {
        let records = self.records();
        let count = |table: &Table| {
            let of_table = records.range(vec![table.tag()]..vec![table.tag() + 1]);
            (table.name().to_owned(), of_table.count() as u64)
        };
        StoreStats {
            backend: "memory".to_owned(),
            path: None,
            schema_version: SCHEMA_VERSION,
            size_bytes: records.iter().map(|(key, value)| (key.len() + value.len()) as u64).sum(),
            last_error: None,
            errors: 0,
            damaged_moved_to: None,
            tables: Table::ALL.iter().map(count).collect(),
        }
    }
}
