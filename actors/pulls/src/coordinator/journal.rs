//! Journal writes in batches, before the effects that depend on them.
//!
//! Owns: [`Pipeline`], the order of journal writes and of the effects that wait for them (pure), and [`JournalIo`],
//! which writes and reads the journal. In: the core's effects. Out: effects that may be performed now, and batches to
//! write. While one batch is being written the next one is collected, so that a burst of pulls costs few disk flushes.

use std::sync::{
    Arc, Mutex, PoisonError,
    atomic::{AtomicU64, Ordering},
};

use keelson_storage::{Batch, StateStore, StateStoreExt as _, StoreError, Table};

use super::{
    core::Effect,
    record::{KeptLease, PullRecord, Write},
};
use crate::runtime::RuntimeCommand;

/// Key of the limit that was set by hand, in table `settings`.
const LIMIT_KEY: &[u8] = b"pulls.max_parallel_image_pulls";

#[derive(Debug, Default)]
pub(super) struct Pipeline {
    /// Effects that wait for the write under way.
    writing: Option<Vec<Effect>>,
    /// The next batch, and the effects that wait for it.
    next: Vec<Write>,
    after: Vec<Effect>,
    /// Write even an empty batch, which becomes a rewrite of the whole journal.
    is_asked_for: bool,
    /// Records of ended pulls. Nothing waits for these, and a record that reappears after a crash costs one query, so
    /// they go with the next batch or with [`Pipeline::flush_ended`]: a disk flush for each pull that ends would slow
    /// down running pulls.
    ended: Vec<Write>,
}

impl Pipeline {
    /// Returns the effect if it may be performed now.
    pub(super) fn admit(&mut self, effect: Effect) -> Option<Effect> {
        match effect {
            Effect::Persist(write @ Write::DeletePull(_)) => {
                self.ended.push(write);
                None
            }
            Effect::Persist(write) => {
                self.next.push(write);
                None
            }
            // These do not depend on the journal.
            Effect::Reply { .. }
            | Effect::ReportToSuccessor(_)
            | Effect::Runtime(RuntimeCommand::CheckPresent { .. })
            | Effect::Released(_)
            | Effect::Notice(_)
            | Effect::Count(_)
            | Effect::Note(_) => Some(effect),
            effect if self.is_due() => {
                self.after.push(effect);
                None
            }
            effect => match &mut self.writing {
                Some(waiting) => {
                    waiting.push(effect);
                    None
                }
                None => Some(effect),
            },
        }
    }

    /// Makes [`Pipeline::next_write`] return a batch even if it is empty.
    pub(super) fn ask_for_write(&mut self) {
        self.is_asked_for = true;
    }

    fn is_due(&self) -> bool {
        self.is_asked_for || !self.next.is_empty()
    }

    /// `None` while a write is under way, or if there is nothing to write.
    pub(super) fn next_write(&mut self) -> Option<Vec<Write>> {
        if self.writing.is_some() || !self.is_due() {
            return None;
        }
        self.is_asked_for = false;
        self.writing = Some(std::mem::take(&mut self.after));
        let mut writes = std::mem::take(&mut self.ended);
        writes.append(&mut self.next);
        Some(writes)
    }

    /// A restarted coordinator keeps only the records of ended pulls.
    pub(super) fn next_life(&mut self) -> Self {
        Self { ended: self.take_ended(), ..Self::default() }
    }

    pub(super) fn take_ended(&mut self) -> Vec<Write> {
        std::mem::take(&mut self.ended)
    }

    pub(super) fn has_ended(&self) -> bool {
        !self.ended.is_empty()
    }

    pub(super) fn flush_ended(&mut self) {
        self.ended.append(&mut self.next);
        self.next = std::mem::take(&mut self.ended);
    }

    pub(super) fn written(&mut self) -> Vec<Effect> {
        self.writing.take().unwrap_or_default()
    }

    pub(super) fn is_idle(&self) -> bool {
        self.writing.is_none() && !self.is_due() && self.ended.is_empty()
    }
}

#[derive(Debug, Default)]
pub(super) struct Restored {
    pub(super) pulls: Vec<PullRecord>,
    pub(super) leases: Vec<KeptLease>,
    pub(super) limit: Option<u32>,
    /// One sentence each.
    pub(super) unreadable: Vec<String>,
}

/// Calls block.
#[derive(Clone)]
pub(super) struct JournalIo {
    store: Arc<dyn StateStore>,
    /// Held during each call.
    turn: Arc<Mutex<()>>,
    /// The coordinator's life that this handle belongs to, and the current one.
    instance: u64,
    instances: Arc<AtomicU64>,
}

impl JournalIo {
    pub(super) fn new(store: Arc<dyn StateStore>) -> Self {
        Self { store, turn: Arc::default(), instance: 0, instances: Arc::default() }
    }

    /// The journal of a restarted coordinator: pending writes of its previous life are discarded, so that what it reads
    /// is current.
    pub(super) fn next_life(&self) -> Self {
        let instance = self.instances.fetch_add(1, Ordering::SeqCst) + 1;
        Self { instance, ..self.clone() }
    }

    pub(super) fn store(&self) -> &Arc<dyn StateStore> {
        &self.store
    }

    fn is_superseded(&self) -> bool {
        self.instances.load(Ordering::SeqCst) != self.instance
    }

    pub(super) fn load(&self) -> Result<Restored, StoreError> {
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        let (pulls, bad_pulls) = self.store.scan_json::<PullRecord>(Table::Pulls)?;
        let (leases, bad_leases) = self.store.scan_json::<KeptLease>(Table::Leases)?;
        let mut unreadable: Vec<String> =
            bad_pulls.iter().chain(&bad_leases).map(ToString::to_string).collect();
        let limit = match self.store.get_json::<u32>(Table::Settings, LIMIT_KEY) {
            Ok(limit) => limit,
            Err(StoreError::Decode(bad)) => {
                unreadable.push(bad.to_string());
                None
            }
            Err(error) => return Err(error),
        };
        Ok(Restored {
            pulls: pulls.into_iter().map(|(_, record)| record).collect(),
            leases: leases.into_iter().map(|(_, record)| record).collect(),
            limit,
            unreadable,
        })
    }

    pub(super) fn write(&self, writes: &[Write]) -> Result<(), StoreError> {
        let mut batch = Batch::new();
        for write in writes {
            add(&mut batch, write)?;
        }
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        if batch.is_empty() || self.is_superseded() {
            return Ok(());
        }
        self.store.apply(&batch)
    }

    /// Replaces the journal after writes were lost (a full disk).
    pub(super) fn rewrite(&self, journal_writes: &[Write]) -> Result<(), StoreError> {
        let mut batch = Batch::new();
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        if self.is_superseded() {
            return Ok(());
        }
        for table in [Table::Pulls, Table::Leases] {
            for (key, _) in self.store.scan(table)? {
                batch.delete(table, key);
            }
        }
        for write in journal_writes {
            add(&mut batch, write)?;
        }
        self.store.apply(&batch)
    }
}

fn add(batch: &mut Batch, write: &Write) -> Result<(), StoreError> {
    match write {
        Write::PutPull(record) => batch.put_json(Table::Pulls, record.id.to_be_bytes(), record)?,
        Write::DeletePull(id) => batch.delete(Table::Pulls, id.to_be_bytes()),
        Write::PutLease(lease) => batch.put_json(Table::Leases, lease.lease.as_bytes(), lease)?,
        Write::DeleteLease(lease) => batch.delete(Table::Leases, lease.as_bytes()),
        Write::Limit(Some(limit)) => batch.put_json(Table::Settings, LIMIT_KEY, limit)?,
        Write::Limit(None) => batch.delete(Table::Settings, LIMIT_KEY),
    };
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{coordinator::core::Note, request::PullId};

    fn cancel(id: u64) -> Effect {
        Effect::Runtime(RuntimeCommand::CancelPull { pull: PullId(id), attempt: 1 })
    }

    fn ids(effects: &[Effect]) -> Vec<u64> {
        effects
            .iter()
            .map(|effect| {
                if let Effect::Runtime(RuntimeCommand::CancelPull { pull, .. }) = effect { pull.0 } else { 0 }
            })
            .collect()
    }

    #[test]
    fn a_journal_of_an_earlier_instance_writes_nothing() {
        let former = JournalIo::new(Arc::new(keelson_storage::MemoryStore::new()));
        former.write(&[Write::Limit(Some(1))]).expect("written");
        let journal = former.next_life();
        assert_eq!(journal.load().expect("read").limit, Some(1));
        former.write(&[Write::Limit(Some(2))]).expect("left out");
        former.rewrite(&[Write::Limit(Some(2))]).expect("left out");
        assert_eq!(journal.load().expect("read").limit, Some(1));
        journal.write(&[Write::Limit(Some(3))]).expect("written");
        assert_eq!(journal.load().expect("read").limit, Some(3));
    }

    #[test]
    fn effects_without_a_pending_write_run_at_once() {
        let mut pipeline = Pipeline::default();
        assert!(pipeline.admit(cancel(1)).is_some());
        assert!(pipeline.next_write().is_none());
    }

    #[test]
    fn ended_pulls_delay_no_effect_and_go_with_the_next_write() {
        let mut pipeline = Pipeline::default();
        assert!(pipeline.admit(Effect::Persist(Write::DeletePull(1))).is_none());
        assert!(pipeline.next_write().is_none());
        assert!(pipeline.admit(cancel(1)).is_some(), "nothing waits for it");
        assert!(!pipeline.is_idle() && pipeline.has_ended());
        assert!(pipeline.admit(Effect::Persist(Write::Limit(None))).is_none());
        assert_eq!(pipeline.next_write().expect("both"), [Write::DeletePull(1), Write::Limit(None)]);
        pipeline.written();
        assert!(pipeline.is_idle() && !pipeline.has_ended());
        assert!(pipeline.admit(Effect::Persist(Write::DeletePull(2))).is_none());
        pipeline.flush_ended();
        assert_eq!(pipeline.next_write().expect("on its own"), [Write::DeletePull(2)]);
    }

    #[test]
    fn effects_wait_for_the_write_before_them_and_keep_their_order() {
        let mut pipeline = Pipeline::default();
        assert!(pipeline.admit(Effect::Persist(Write::Limit(Some(1)))).is_none());
        assert!(pipeline.admit(cancel(1)).is_none());
        assert_eq!(pipeline.next_write().expect("one write").len(), 1);
        // During the first write: one without a write of its own, one with, and a note.
        assert!(pipeline.admit(cancel(2)).is_none());
        assert!(pipeline.admit(Effect::Persist(Write::Limit(Some(3)))).is_none());
        assert!(pipeline.admit(cancel(3)).is_none());
        assert!(pipeline.admit(Effect::Note(Note { warn: false, text: String::new() })).is_some());
        assert!(pipeline.next_write().is_none(), "one at a time");
        assert_eq!(ids(&pipeline.written()), [1, 2]);
        assert!(!pipeline.is_idle());
        assert_eq!(pipeline.next_write().expect("the second").len(), 1);
        assert_eq!(ids(&pipeline.written()), [3]);
        assert!(pipeline.is_idle());
    }
}
