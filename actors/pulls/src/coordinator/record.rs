//! The journal's record types.
//!
//! In: a pull of the core. Out: JSON in the tables `pulls` and `leases` of the store. The list of fields is closed, and
//! no field can hold a credential: a record says only whether the pull had any.

use serde::{Deserialize, Serialize};

use crate::request::Pod;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RecordState {
    Queued,
    /// The runtime had been asked, or was about to be.
    Running,
}

/// A queued or running pull, table `pulls`, keyed by the id as eight big-endian bytes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PullRecord {
    /// Unique in this store, ascending.
    pub id: u64,
    /// Its place in the queue: lower is earlier. Equal to the ID except for a pull that asks again with other
    /// credentials. Absent in records of schema 1.
    #[serde(default)]
    pub order: Option<u64>,
    /// As the caller wrote it.
    pub image: String,
    /// Empty: the runtime's default.
    pub runtime_handler: String,
    /// When the first caller asked.
    pub requested_unix_ms: i64,
    /// When a caller last wanted it, Unix milliseconds, to within a quarter of `pulls.record_max_age`. Absent in
    /// records of older agents.
    #[serde(default)]
    pub wanted_unix_ms: Option<i64>,
    pub attempts: u32,
    /// The credentials themselves are not stored.
    pub with_credentials: bool,
    pub state: RecordState,
    /// The pod that asked first.
    #[serde(default)]
    pub pod: Option<Pod>,
    /// The containerd lease that keeps its progress; `None` until one was made.
    #[serde(default)]
    pub lease: Option<String>,
}

#[cfg(test)]
impl PullRecord {
    pub(crate) fn queued(id: u64, image: &str) -> Self {
        Self {
            id,
            order: Some(id),
            image: image.into(),
            runtime_handler: String::new(),
            requested_unix_ms: 5,
            wanted_unix_ms: None,
            attempts: 0,
            with_credentials: false,
            state: RecordState::Queued,
            pod: None,
            lease: None,
        }
    }
}

/// A lease whose pull ended without success: its bytes are kept for a retry. Table `leases`, keyed by the lease's ID.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeptLease {
    /// ID in containerd.
    pub lease: String,
    pub image: String,
    /// When the bytes are released, Unix milliseconds.
    pub expires_unix_ms: i64,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Write {
    PutPull(PullRecord),
    DeletePull(u64),
    PutLease(KeptLease),
    DeleteLease(String),
    /// The limit that was set by hand; `None` removes it.
    Limit(Option<u32>),
}
