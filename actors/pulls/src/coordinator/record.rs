//! What of a pull outlives the agent.
//!
//! Owns: the journal's record types. In: a pull of the core. Out: JSON in the tables `pulls` and
//! `leases` of the store. The fields are a closed list, and none can hold a credential: a pull that
//! needs some says only that it does.

use serde::{Deserialize, Serialize};

use crate::request::Pod;

/// Whether the runtime was already asked when the record was written.
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
    /// Its place in the queue: lower is earlier. Equal to the id but for a pull that asks again with
    /// other credentials. Absent in records of schema 1.
    #[serde(default)]
    pub order: Option<u64>,
    /// As the caller wrote it.
    pub image: String,
    /// Empty: the runtime's default.
    pub runtime_handler: String,
    /// When the first caller asked, Unix milliseconds.
    pub requested_unix_ms: i64,
    /// When a caller was last known to want it, Unix milliseconds, to within a quarter of `pulls.record_max_age`. Absent in
    /// records of older agents.
    #[serde(default)]
    pub wanted_unix_ms: Option<i64>,
    pub attempts: u32,
    /// It had credentials; they are not here.
    pub with_credentials: bool,
    /// How far it was.
    pub state: RecordState,
    /// Who asked first.
    #[serde(default)]
    pub pod: Option<Pod>,
    /// The containerd lease that keeps its progress, once one was made.
    #[serde(default)]
    pub lease: Option<String>,
}

/// A lease whose pull ended without success: its bytes are kept for the next try. Table `leases`,
/// keyed by the lease's id.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeptLease {
    /// The lease's id in containerd.
    pub lease: String,
    /// The image that its bytes belong to.
    pub image: String,
    /// When the agent gives the bytes up, Unix milliseconds.
    pub expires_unix_ms: i64,
}

/// One change to the journal.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Write {
    PutPull(PullRecord),
    /// Removes the record of the pull with this id.
    DeletePull(u64),
    PutLease(KeptLease),
    /// Removes a kept lease by its id.
    DeleteLease(String),
    /// Writes the limit that was set by hand; `None` removes it.
    Limit(Option<u32>),
}
