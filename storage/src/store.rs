//! Owns the interface of a store: the trait, its typed helpers, and its statistics.

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
/// Calls block until the disk answers, so do not call them on the actors' threads. Calls are served one at a time.
pub trait StateStore: Send + Sync + 'static {
    /// Writes the batch: atomic across tables, and durable (fsynced) when this returns `Ok`.
    ///
    /// After an error the batch is applied completely or not at all; the store works again when the cause (such as a
    /// full disk) is gone, without being reopened.
    fn apply(&self, batch: &Batch) -> Result<(), StoreError>;

    fn get(&self, table: Table, key: &[u8]) -> Result<Option<Vec<u8>>, StoreError>;

    /// In key order.
    fn scan(&self, table: Table) -> Result<Keyed<Vec<u8>>, StoreError>;

    /// Never waits for writes.
    fn stats(&self) -> StoreStats;

    /// Whether records are durable, and each change. A store that is open from the start and cannot tell stays
    /// [`StoreState::Open`].
    fn subscribe(&self) -> watch::Receiver<StoreState> {
        watch::channel(StoreState::Open).1
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoreStats {
    /// `sled` or `memory`.
    pub backend: String,
    pub path: Option<PathBuf>,
    pub schema_version: u32,
    /// On disk; for a store in memory, the size of keys and values.
    pub size_bytes: u64,
    /// Reset when a batch has been applied.
    pub last_error: Option<String>,
    /// Since the store was opened.
    pub errors: u64,
    /// The folder of a damaged store that was moved aside when this one was opened.
    pub damaged_moved_to: Option<PathBuf>,
    pub tables: Vec<(String, u64)>,
}

pub trait StateStoreExt: StateStore {
    /// Returns when the record is durable.
    fn put_json<T: Serialize + ?Sized>(&self, table: Table, key: &[u8], value: &T) -> Result<(), StoreError> {
        let mut batch = Batch::new();
        batch.put_json(table, key, value)?;
        self.apply(&batch)
    }

    /// [`StoreError::Decode`] if the record exists but is not a `T`.
    fn get_json<T: DeserializeOwned>(&self, table: Table, key: &[u8]) -> Result<Option<T>, StoreError> {
        match self.get(table, key)? {
            None => Ok(None),
            Some(value) => decode(table, key, &value).map(Some).map_err(StoreError::Decode),
        }
    }

    /// Records that are not a `T` are returned separately, for the caller to report and skip.
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
