//! State of a store that is opened in the background.

use std::time::SystemTime;

#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum StoreState {
    /// The first attempt to open the store is in progress.
    Opening { since: SystemTime },
    /// The store is open and its last write succeeded.
    Open,
    /// The store is open, but its last call failed. Calls are still attempted.
    Failing { reason: String, since: SystemTime },
    /// The store cannot be opened, or the disk does not answer. Calls fail at once.
    Unavailable {
        reason: String,
        since: SystemTime,
        /// When the store is opened again; `None` during an attempt or a call.
        next_try: Option<SystemTime>,
    },
    /// [`crate::DeferredStore::close`] was called. Calls fail from now on.
    Closed,
}

impl StoreState {
    pub fn is_durable(&self) -> bool {
        matches!(self, StoreState::Open)
    }

    pub fn is_open(&self) -> bool {
        matches!(self, StoreState::Open | StoreState::Failing { .. })
    }

    /// `None` if records are durable.
    pub fn reason(&self) -> Option<&str> {
        match self {
            StoreState::Open => None,
            StoreState::Opening { .. } => Some("opening"),
            StoreState::Closed => Some("closed"),
            StoreState::Failing { reason, .. } | StoreState::Unavailable { reason, .. } => Some(reason),
        }
    }

    /// Start of the time in which records are not durable, if known.
    pub fn since(&self) -> Option<SystemTime> {
        match self {
            StoreState::Open | StoreState::Closed => None,
            StoreState::Opening { since }
            | StoreState::Failing { since, .. }
            | StoreState::Unavailable { since, .. } => Some(*since),
        }
    }
}
