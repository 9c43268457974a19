//! Owns the store that the agent uses: one open generation on the guarded thread, and the recovery after a failure.
//! In: calls from any thread. Out: calls to the guarded thread, one at a time.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::batch::Batch;
use crate::engine::{Engine, EngineError, Totals, size_of_tree};
use crate::error::{StoreError, text_of};
use crate::generation;
use crate::guard::{Unfinished, Worker};
use crate::manifest::Manifest;
use crate::migrate::SCHEMA_VERSION;
use crate::store::{Keyed, StateStore, StoreStats};
use crate::table::Table;

/// Time after which opening counts as hung.
pub(crate) const OPEN_LIMIT: Duration = Duration::from_secs(60);
/// Limit for any other call. A disk that is slower cannot hold a lease or a queue.
const CALL_LIMIT: Duration = Duration::from_secs(30);
/// Time to wait again for a call that did not end in time, before the store is copied.
const COME_BACK_LIMIT: Duration = Duration::from_secs(2);
const CLOSE_LIMIT: Duration = Duration::from_secs(10);
/// Bytes left to the file system. sled may wait forever on a full disk, and so may every later sled of this process,
/// because they share threads; so it does not receive writes that would fill the disk.
const RESERVE: u64 = 2 * 1024 * 1024;
/// Bytes written between two checks of the size on disk.
const SIZE_CHECK_EVERY: u64 = 4 * 1024 * 1024;
/// Approximate size of a batch on disk, without its keys and values.
const BATCH_OVERHEAD: u64 = 1024;

/// The store on disk. Created by [`crate::open`]; dropping it closes the store and releases the folder.
#[derive(Debug)]
pub struct SledStore {
    dir: PathBuf,
    /// Held while anything may write to the folder.
    lock: Option<Arc<File>>,
    inner: Mutex<Inner>,
    facts: Mutex<Facts>,
}

#[derive(Debug)]
struct Inner {
    worker: Worker<Engine>,
    copier: Option<Worker<Engine>>,
    manifest: Manifest,
    /// A call failed, so sled's state in memory cannot be trusted.
    broken: bool,
    /// Bytes written since the last check of the size on disk.
    written: u64,
}

/// Reported facts about the store, separate from `inner` so that reading them does not wait for a write.
#[derive(Debug, Default)]
struct Facts {
    by_tag: BTreeMap<u8, u64>,
    generation: PathBuf,
    last_error: Option<String>,
    errors: u64,
    damaged_moved_to: Option<PathBuf>,
}

impl SledStore {
    pub(crate) fn new(
        dir: PathBuf,
        lock: Arc<File>,
        worker: Worker<Engine>,
        manifest: Manifest,
        totals: &Totals,
        damaged_moved_to: Option<PathBuf>,
    ) -> Self {
        let generation = manifest.generation_dir(&dir);
        let facts = Facts { by_tag: totals.by_tag.clone(), generation, damaged_moved_to, ..Facts::default() };
        let store = SledStore {
            dir,
            lock: Some(lock),
            inner: Mutex::new(Inner { worker, copier: None, manifest, broken: false, written: 0 }),
            facts: Mutex::new(facts),
        };
        store.compact_if_bloated(&mut store.inner(), totals);
        store
    }

    /// `<state_dir>/state`.
    pub fn path(&self) -> &Path {
        &self.dir
    }

    /// Closes the database, opens it from the disk and checks every record. Not needed after an error: the next call
    /// does it.
    pub fn reopen(&self) -> Result<(), StoreError> {
        let result = self.reopen_locked(&mut self.inner());
        self.note(result)
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn facts(&self) -> MutexGuard<'_, Facts> {
        self.facts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records an error for [`StateStore::stats`].
    fn note<R>(&self, result: Result<R, StoreError>) -> Result<R, StoreError> {
        if let Err(error) = &result {
            let mut facts = self.facts();
            let text = text_of(error);
            if facts.last_error.as_ref() != Some(&text) {
                tracing::error!(error = text, "state store failed");
            }
            facts.last_error = Some(text);
            facts.errors += 1;
        }
        result
    }

    /// Runs `job` on the engine, and reopens the store first if an earlier call failed.
    fn run<R: Send + 'static>(
        &self,
        inner: &mut Inner,
        operation: &'static str,
        job: impl FnOnce(&mut Engine) -> Result<R, EngineError> + Send + 'static,
    ) -> Result<R, StoreError> {
        if inner.broken {
            self.reopen_locked(inner)?;
        }
        let result = inner.worker.call(CALL_LIMIT, move |slot| slot.as_mut().map(job));
        match result {
            Ok(Some(Ok(value))) => Ok(value),
            Ok(Some(Err(error))) => {
                inner.broken = true;
                Err(self.engine_error(error))
            }
            Ok(None) => {
                inner.broken = true;
                Err(self.engine_error(EngineError::Damaged("it is not open".to_owned())))
            }
            Err(unfinished) => {
                inner.broken = true;
                Err(self.unfinished(operation, unfinished))
            }
        }
    }

    /// Fails if there may be no room for this number of bytes. Other errors are left to the write.
    fn room_for(&self, inner: &mut Inner, bytes: u64) -> Result<(), StoreError> {
        let path = self.dir.clone();
        // On the guarded thread, because a file system may hang too.
        let free = inner.worker.call(CALL_LIMIT, move |_| {
            let stat = nix::sys::statvfs::statvfs(&path).ok()?;
            Some(stat.blocks_available() * stat.fragment_size())
        });
        match free {
            // Written data may temporarily exist twice.
            Ok(Some(free)) if free < RESERVE + 2 * bytes => Err(StoreError::Io {
                operation: "applying a batch",
                path: self.dir.clone(),
                source: io::ErrorKind::StorageFull.into(),
            }),
            _ => Ok(()),
        }
    }

    fn reopen_locked(&self, inner: &mut Inner) -> Result<(), StoreError> {
        let operation = "reopening";
        inner.broken = true;
        if !inner.worker.is_stuck() || inner.worker.wait_until_free(COME_BACK_LIMIT) {
            // After a panic while closing, nothing is open either.
            let closed = inner.worker.call(CLOSE_LIMIT, |slot| drop(slot.take()));
            if let Err(unfinished @ Unfinished::TimedOut(_)) = closed {
                return Err(self.unfinished("closing", unfinished));
            }
        }
        let io_error = |source| StoreError::Io { operation, path: self.dir.clone(), source };
        let mut manifest = inner.manifest.clone();
        let copied = inner.worker.is_stuck();
        if copied {
            // The stuck thread holds sled's lock on the old files. Its result is not read any more.
            manifest = self.copy_of_stuck(inner)?;
        }
        let (dir, schema) = (manifest.generation_dir(&self.dir), manifest.schema);
        let opened = inner.worker.call(OPEN_LIMIT, move |slot| {
            let engine = Engine::open(&dir, schema)?;
            let totals = engine.totals().clone();
            *slot = Some(engine);
            Ok(totals)
        });
        let totals = match opened {
            Ok(Ok(totals)) => totals,
            Ok(Err(error)) if copied => {
                // The stuck thread may have written while its files were copied. This does not make them damaged.
                let left = manifest.generation_dir(&self.dir);
                inner.worker.call(CALL_LIMIT, move |_| std::fs::remove_dir_all(left)).ok();
                let error = self.engine_error(error);
                return Err(io_error(io::Error::other(text_of(&error))));
            }
            Ok(Err(error)) => return Err(self.engine_error(error)),
            Err(unfinished) => return Err(self.unfinished(operation, unfinished)),
        };
        if manifest != inner.manifest {
            manifest.write_to(&self.dir).map_err(io_error)?;
        }
        self.switched(inner, manifest, &totals);
        inner.broken = false;
        tracing::info!(path = %self.dir.display(), "state store reopened");
        Ok(())
    }

    /// Copies the generation that a stuck thread holds, on a worker that replaces it. If the disk hangs, and not
    /// sled, the copy hangs too; then both are left alone until the disk answers.
    fn copy_of_stuck(&self, inner: &mut Inner) -> Result<Manifest, StoreError> {
        let operation = "copying the store";
        let io_error = |source| StoreError::Io { operation, path: self.dir.clone(), source };
        let mut copier = match inner.copier.take() {
            Some(copier) => copier,
            None => Worker::start().map_err(io_error)?,
        };
        if copier.is_stuck() && !copier.wait_until_free(COME_BACK_LIMIT) {
            inner.copier = Some(copier);
            return Err(self.unfinished(operation, Unfinished::TimedOut(COME_BACK_LIMIT)));
        }
        let (dir, manifest) = (self.dir.clone(), inner.manifest.clone());
        let copied = match copier.call(CALL_LIMIT, move |_| generation::copy(&dir, &manifest)) {
            Ok(copied) => copied.map_err(io_error)?,
            Err(unfinished) => {
                inner.copier = Some(copier);
                return Err(self.unfinished(operation, unfinished));
            }
        };
        if inner.worker.wait_until_free(COME_BACK_LIMIT) {
            // The disk was the cause. The next call uses the original files; the next opening removes the copy.
            return Err(io_error(io::Error::other("disk answers again")));
        }
        inner.worker = copier;
        Ok(copied)
    }

    fn switched(&self, inner: &mut Inner, manifest: Manifest, totals: &Totals) {
        let mut facts = self.facts();
        facts.generation = manifest.generation_dir(&self.dir);
        facts.by_tag.clone_from(&totals.by_tag);
        inner.manifest = manifest;
    }

    /// sled keeps its file within a few times the size of its records, but does not reliably free space in time.
    fn compact_if_bloated(&self, inner: &mut Inner, totals: &Totals) {
        let generation = inner.manifest.generation_dir(&self.dir);
        if !generation::is_bloated(&generation, totals) {
            return;
        }
        let before = size_of_tree(&generation);
        let (store, old) = (self.dir.clone(), inner.manifest.clone());
        let rewritten =
            inner.worker.call(OPEN_LIMIT, move |slot| generation::rewrite(slot, &store, &old, |_| ()));
        match rewritten {
            Ok(Ok((manifest, totals))) => {
                let after = size_of_tree(&manifest.generation_dir(&self.dir));
                self.switched(inner, manifest, &totals);
                tracing::info!(before, after, "state store compacted");
            }
            Ok(Err(error)) => {
                tracing::warn!(?error, before, "cannot compact the state store; retrying later");
            }
            Err(unfinished) => {
                inner.broken = true;
                tracing::error!(?unfinished, "cannot compact the state store; reopening it");
            }
        }
    }

    fn engine_error(&self, error: EngineError) -> StoreError {
        let path = self.dir.clone();
        match error {
            EngineError::Damaged(reason) => StoreError::Damaged { path, reason },
            EngineError::Sled { operation, source } => StoreError::Backend { operation, path, source },
            EngineError::Io { operation, path, source } => StoreError::Io { operation, path, source },
        }
    }

    fn unfinished(&self, operation: &'static str, unfinished: Unfinished) -> StoreError {
        let path = self.dir.clone();
        match unfinished {
            Unfinished::Panicked(message) => StoreError::Panicked { operation, path, message },
            Unfinished::TimedOut(limit) => StoreError::TimedOut { operation, path, seconds: limit.as_secs() },
        }
    }
}

impl StateStore for SledStore {
    fn apply(&self, batch: &Batch) -> Result<(), StoreError> {
        batch.check()?;
        if batch.is_empty() {
            return Ok(());
        }
        let mut inner = self.inner();
        let (batch, bytes) = (batch.clone(), batch.bytes());
        let room = self.room_for(&mut inner, bytes + BATCH_OVERHEAD);
        self.note(room)?;
        let applied = self.run(&mut inner, "applying a batch", move |engine| {
            engine.apply(&batch)?;
            Ok(engine.totals().clone())
        });
        let totals = self.note(applied)?;
        let mut facts = self.facts();
        facts.by_tag.clone_from(&totals.by_tag);
        facts.last_error = None;
        drop(facts);
        inner.written += bytes + BATCH_OVERHEAD;
        if inner.written >= SIZE_CHECK_EVERY {
            inner.written = 0;
            self.compact_if_bloated(&mut inner, &totals);
        }
        Ok(())
    }

    fn get(&self, table: Table, key: &[u8]) -> Result<Option<Vec<u8>>, StoreError> {
        let key = table.raw_key(key);
        let value = self.run(&mut self.inner(), "reading", move |engine| engine.get(&key));
        self.note(value)
    }

    fn scan(&self, table: Table) -> Result<Keyed<Vec<u8>>, StoreError> {
        let records = self.run(&mut self.inner(), "scanning", move |engine| engine.scan(table));
        self.note(records)
    }

    fn stats(&self) -> StoreStats {
        let facts = self.facts();
        let count = |table: &Table| {
            (table.name().to_owned(), facts.by_tag.get(&table.tag()).copied().unwrap_or_default())
        };
        StoreStats {
            backend: "sled".to_owned(),
            path: Some(self.dir.clone()),
            schema_version: SCHEMA_VERSION,
            size_bytes: size_of_tree(&facts.generation),
            last_error: facts.last_error.clone(),
            errors: facts.errors,
            damaged_moved_to: facts.damaged_moved_to.clone(),
            tables: Table::ALL.iter().map(count).collect(),
        }
    }
}

impl Drop for SledStore {
    fn drop(&mut self) {
        let inner = self.inner.get_mut().unwrap_or_else(PoisonError::into_inner);
        let closed = inner.worker.call(CLOSE_LIMIT, |slot| drop(slot.take()));
        if let Err(Unfinished::TimedOut(_)) = closed {
            // A thread that still writes and an agent that opens the folder must not meet, so only the end of this
            // process releases the lock.
            tracing::error!(path = %self.dir.display(), "closing the state store timed out");
            std::mem::forget(self.lock.take());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Sender, channel};

    use super::*;
    use crate::store::StateStoreExt as _;

    fn with_records() -> (tempfile::TempDir, std::sync::Arc<SledStore>) {
        let dir = tempfile::tempdir().unwrap();
        let store = crate::open(dir.path()).unwrap().store;
        for id in 0..50u64 {
            store.put_json(Table::Pulls, &id.to_be_bytes(), &id).unwrap();
        }
        (dir, store)
    }

    fn check(dir: &tempfile::TempDir, store: std::sync::Arc<SledStore>) {
        store.put_json(Table::Pulls, &50u64.to_be_bytes(), &50).unwrap();
        assert_eq!(store.stats().last_error, None);
        assert_eq!(store.scan(Table::Pulls).unwrap().len(), 51);
        drop(store);
        let again = crate::open(dir.path()).unwrap();
        assert_eq!(again.outcome, crate::Outcome::Opened);
        assert_eq!(again.store.scan_json::<u64>(Table::Pulls).unwrap().0.len(), 51);
    }

    /// Returns what ends the hanging call when it is dropped, and the generation.
    fn hang(store: &SledStore) -> (Sender<()>, u64) {
        let (release, held) = channel::<()>();
        let hang = move |_: &mut Option<Engine>| held.recv().is_err();
        assert!(store.inner().worker.call(Duration::from_millis(20), hang).is_err());
        store.inner().broken = true;
        (release, store.inner().manifest.generation)
    }

    #[test]
    fn a_panic_in_sled_is_an_error_and_the_next_call_works() {
        let (dir, store) = with_records();
        let result = store.run(&mut store.inner(), "testing", |_| -> Result<(), _> { panic!("sled did it") });
        let error = store.note(result).unwrap_err();
        assert!(matches!(error, StoreError::Panicked { .. }), "{error:?}");
        assert!(store.stats().last_error.is_some_and(|text| text.contains("sled did it")));
        check(&dir, store);
    }

    #[test]
    fn a_call_that_hangs_leaves_its_generation_behind_and_loses_nothing() {
        let (dir, store) = with_records();
        let (release, before) = hang(&store);
        assert_eq!(store.scan(Table::Pulls).unwrap().len(), 50);
        assert_eq!(store.inner().manifest.generation, before + 1);
        check(&dir, store);
        drop(release);
    }

    #[test]
    fn i6_a_disk_that_answers_again_causes_no_new_generation() {
        let (dir, store) = with_records();
        let (release, before) = hang(&store);
        drop(release);
        assert_eq!(store.scan(Table::Pulls).unwrap().len(), 50);
        assert_eq!(store.inner().manifest.generation, before);
        check(&dir, store);
    }

    #[test]
    fn damage_found_while_running_is_an_error() {
        let (dir, store) = with_records();
        std::fs::write(dir.path().join("state/g1/db"), "gone").unwrap();
        for _ in 0..2 {
            let error = store.reopen().unwrap_err();
            assert!(matches!(error, StoreError::Damaged { .. }), "{error:?}");
        }
        assert!(store.apply(Batch::new().put(Table::Meta, "a", "b")).is_err());
        drop(store);
        let again = crate::open(dir.path()).unwrap();
        assert!(matches!(again.outcome, crate::Outcome::Recovered { .. }), "{:?}", again.outcome);
    }
}
