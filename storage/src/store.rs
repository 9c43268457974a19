//! Owns what a store is: the trait, its typed helpers, and what it tells about itself.

use std::path::PathBuf;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tokio::sync::watch;

use crate::batch::Batch;
use crate::error::StoreError;
use crate::state::StoreState;
use crate::table::{BadRecord, Table};

pub type Keyed<T> = Vec<(Vec<u8>, T)>;

/// Records in tables, ordered by key, written in batches.
///
/// Calls block until the disk has answered: run them off the actors' threads. One call at a time is served.
pub trait StateStore: Send + Sync + 'static {
    /// Writes the batch: atomic across tables, and durable (fsynced) when this returns `Ok`.
    ///
    /// After an error the batch is there whole or not at all; the store goes on working when its cause (a full
    /// disk, say) is gone, without being opened anew.
    fn apply(&self, batch: &Batch) -> Result<(), StoreError>;

    fn get(&self, table: Table, key: &[u8]) -> Result<Option<Vec<u8>>, StoreError>;

    /// All records of a table, in key order.
    fn scan(&self, table: Table) -> Result<Keyed<Vec<u8>>, StoreError>;

    /// What an operator wants to know. Never waits for the disk's writes.
    fn stats(&self) -> StoreStats;

    /// Whether records are durable now, and each change of that. A store that is open from the start and cannot
    /// tell is [`StoreState::Open`] for good.
    fn subscribe(&self) -> watch::Receiver<StoreState> {
        watch::channel(StoreState::Open).1
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoreStats {
    /// `sled` or `memory`.
    pub backend: String,
    /// The store's folder, if it has one.
    pub path: Option<PathBuf>,
    pub schema_version: u32,
    /// Bytes on disk; for a store in memory, bytes of keys and values.
    pub size_bytes: u64,
    /// The last failure, until a batch has been applied again.
    pub last_error: Option<String>,
    /// Failures since the store was opened.
    pub errors: u64,
    /// Where a damaged store was moved to when this one was opened.
    pub damaged_moved_to: Option<PathBuf>,
    pub tables: Vec<(String, u64)>,
}

/// Typed access to any store, as JSON.
pub trait StateStoreExt: StateStore {
    /// Writes one record and returns when it is durable.
    fn put_json<T: Serialize + ?Sized>(&self, table: Table, key: &[u8], value: &T) -> Result<(), StoreError> {
        let mut batch = Batch::new();
        batch.put_json(table, key, value)?;
        self.apply(&batch)
    }

    /// Reads one record; [`StoreError::Decode`] if it is there but is not a `T`.
    fn get_json<T: DeserializeOwned>(&self, table: Table, key: &[u8]) -> Result<Option<T>, StoreError> {
        match self.get(table, key)? {
            None => Ok(None),
            Some(value) => decode(table, key, &value).map(Some).map_err(StoreError::Decode),
        }
    }

    /// Reads a table. Records that are not a `T` come back beside the others, for the caller to report and skip.
    fn scan_json<T: DeserializeOwned>(&self, table: Table) -> Result<(Keyed<T>, Vec<BadRecord>), StoreError> {
        let (mut good, mut bad) = (Vec::new(), Vec::new());
        for (key, value) in self.scan(table)? {
            match decode(table, &key, &value) {
                Ok(record) => good.push((key, record)),
                Err(record) => bad.push(record),
            }
        }
        Ok((good, bad))
    }
}

impl<S: StateStore + ?Sized> StateStoreExt for S {}

fn decode<T: DeserializeOwned>(table: Table, key: &[u8], value: &[u8]) -> Result<T, BadRecord> {
    serde_json::from_slice(value).map_err(|error| BadRecord {
        table,
        key: key.to_owned(),
        reason: error.to_string(),
    })
}
