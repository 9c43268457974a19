//! What of the Lease outlives the process.
//!
//! Owns: the record's form and key. In: the Lease as the server last confirmed it. Out: JSON in the table
//! `heartbeats` of the store, written when it changes and never for a renewal.

use serde::{Deserialize, Serialize};

/// Key of the record in [`keelson_storage::Table::Heartbeats`].
pub(super) const LEASE_KEY: &[u8] = b"lease";

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeaseRecord {
    /// `metadata.name`.
    pub name: String,
    /// `metadata.uid`.
    pub uid: String,
    /// `spec.leaseTransitions`.
    pub transitions: i32,
    /// `spec.holderIdentity`.
    pub holder: String,
    /// Whether the record of who set which field was dropped from the Lease with this uid.
    #[serde(default)]
    pub managers_forgotten: bool,
    /// `spec.acquireTime` in Unix microseconds, where the agent may stand back: its claim.
    #[serde(default)]
    pub acquired_unix_us: Option<i64>,
    /// The agent had left the Lease to another process.
    #[serde(default)]
    pub stood_back: bool,
}
