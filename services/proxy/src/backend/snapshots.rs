//! What observers read, on its way to the backend.
//!
//! Owns: [`Snapshots`]. In: what [`Observer::read`](super::Observer::read) read of a family. Out: the same, once, for
//! [`Backend::check`](super::Backend::check).

use std::sync::{Arc, Mutex, PoisonError};

use crate::model::Family;

/// What observers last read of each family. Clones share it.
#[derive(Debug)]
pub struct Snapshots<T>(Arc<Mutex<[Option<T>; 2]>>);

impl<T> Default for Snapshots<T> {
    fn default() -> Self {
        Self(Arc::new(Mutex::new([None, None])))
    }
}

impl<T> Clone for Snapshots<T> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<T> Snapshots<T> {
    pub fn put(&self, family: Family, seen: T) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)[family as usize] = Some(seen);
    }

    #[must_use]
    pub fn take(&self, family: Family) -> Option<T> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)[family as usize].take()
    }
}
