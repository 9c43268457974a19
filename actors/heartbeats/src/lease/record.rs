//! The record of the Lease.
//!
//! In: the Lease as the server last confirmed it. Out: JSON in the table `heartbeats` of the store, written when it
//! changes but not for renewals.

use serde::{Deserialize, Serialize};

/// In [`keelson_storage::Table::Heartbeats`].
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
    /// Whether `metadata.managedFields` was dropped from the Lease with this uid.
    #[serde(default)]
    pub managers_forgotten: bool,
    /// `spec.acquireTime` in Unix microseconds: the agent's claim, if it may stand back.
    #[serde(default)]
    pub acquired_unix_us: Option<i64>,
    /// The agent left the Lease to another process.
    #[serde(default)]
    pub stood_back: bool,
}
