//! Owns one generation: a sled database with its seal. In: batches. Out: the confirmation that a batch is durable,
//! and at opening the proof that every acknowledged batch is present. Runs on the guarded thread only (see
//! [`crate::guard`]).
//!
//! All tables are in one sled tree, distinguished by the first byte of the key, because batches are atomic within one
//! tree.

use std::collections::{BTreeMap, HashSet};
use std::ffi::OsString;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use crate::batch::Batch;
use crate::manifest::sync_dir;
use crate::migrate::{Records, SEALED_SINCE};
use crate::seal::{Acked, SCHEMA_KEY, SEAL_KEY, Seal, is_internal};
use crate::store::Keyed;
use crate::table::Table;

/// sled's page cache. Records are few and small; evicted pages are read from the file again.
const CACHE_BYTES: u64 = 1024 * 1024;
/// Time to wait for the lock of a database that was just closed: sled's threads release it a moment later.
const LOCK_TIMEOUT: Duration = Duration::from_secs(5);
const FILL_BATCH: usize = 500;

#[derive(Debug)]
pub(crate) enum EngineError {
    /// The files do not contain what was acknowledged.
    Damaged(String),
    Sled {
        operation: &'static str,
        source: sled::Error,
    },
    Io {
        operation: &'static str,
        path: PathBuf,
        source: io::Error,
    },
}

type Result<T> = std::result::Result<T, EngineError>;

#[derive(Debug, Clone, Default)]
pub(crate) struct Totals {
    pub(crate) by_tag: BTreeMap<u8, u64>,
    /// Size of all keys and values.
    pub(crate) live_bytes: u64,
}

impl Totals {
    fn add(&mut self, key: &[u8], value: &[u8]) {
        if let Some(tag) = key.first() {
            *self.by_tag.entry(*tag).or_default() += 1;
        }
        self.live_bytes += (key.len() + value.len()) as u64;
    }

    fn remove(&mut self, key: &[u8], value: &[u8]) {
        if let Some(count) = key.first().and_then(|tag| self.by_tag.get_mut(tag)) {
            *count = count.saturating_sub(1);
        }
        self.live_bytes = self.live_bytes.saturating_sub((key.len() + value.len()) as u64);
    }
}

pub(crate) struct Engine {
    db: sled::Db,
    dir: PathBuf,
    log: File,
    acked: Acked,
    synced_blobs: HashSet<OsString>,
    seal: Seal,
    totals: Totals,
}

impl Engine {
    /// Opens a generation with this schema version and reads every record.
    pub(crate) fn open(dir: &Path, schema: u32) -> Result<Engine> {
        let db = open_sled(dir)?;
        let log = File::open(dir.join("db")).map_err(|error| open_error(dir, error.into()))?;
        let acked = Acked::open(dir).map_err(|error| open_error(dir, error.into()))?;
        let mut engine = Engine {
            db,
            dir: dir.to_owned(),
            log,
            acked,
            synced_blobs: HashSet::new(),
            seal: Seal::default(),
            totals: Totals::default(),
        };
        engine.verify(schema)?;
        Ok(engine)
    }

    /// Creates a durable generation with these records. `dir` must not exist.
    pub(crate) fn create(dir: &Path, records: &Records, schema: u32, batch: u64) -> Result<()> {
        let operation = "filling a new generation";
        let sled_error = |source| EngineError::Sled { operation, source };
        let db = open_sled(dir)?;
        let mut seal = Seal { batch, ..Seal::default() };
        let mut chunk = sled::Batch::default();
        for (index, (key, value)) in records.iter().enumerate() {
            seal.add(key, value);
            chunk.insert(key.as_slice(), value.as_slice());
            if index % FILL_BATCH == FILL_BATCH - 1 {
                db.apply_batch(std::mem::take(&mut chunk)).map_err(sled_error)?;
            }
        }
        chunk.insert(SCHEMA_KEY, schema.to_string().into_bytes());
        chunk.insert(SEAL_KEY, &seal.to_bytes());
        db.apply_batch(chunk).map_err(sled_error)?;
        db.flush().map_err(sled_error)?;
        drop(db);
        sync_tree(dir).map_err(|source| EngineError::Io { operation, path: dir.to_owned(), source })
    }

    /// Durable when this returns.
    pub(crate) fn apply(&mut self, batch: &Batch) -> Result<()> {
        let operation = "applying a batch";
        let sled_error = |source| EngineError::Sled { operation, source };
        let (mut seal, mut totals) = (self.seal, self.totals.clone());
        let mut writes = sled::Batch::default();
        for (key, value) in batch.net() {
            if let Some(old) = self.db.get(&key).map_err(sled_error)? {
                seal.remove(&key, &old);
                totals.remove(&key, &old);
            }
            match value {
                Some(value) => {
                    seal.add(&key, value);
                    totals.add(&key, value);
                    writes.insert(key, value);
                }
                None => writes.remove(key),
            }
        }
        seal.batch += 1;
        writes.insert(SEAL_KEY, &seal.to_bytes());
        self.db.apply_batch(writes).map_err(sled_error)?;
        self.db.flush().map_err(sled_error)?;
        self.sync().map_err(|source| EngineError::Io { operation, path: self.dir.clone(), source })?;
        (self.seal, self.totals) = (seal, totals);
        if let Err(error) = self.acked.write(seal.batch) {
            // The batch is durable; only the check of the next start is weaker.
            tracing::warn!(%error, dir = %self.dir.display(), "cannot note the last acknowledged batch");
        }
        Ok(())
    }

    pub(crate) fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>> {
        let value = self.db.get(key).map_err(|source| EngineError::Sled { operation: "reading", source })?;
        Ok(value.map(|value| value.to_vec()))
    }

    /// In key order, without the table's tag.
    pub(crate) fn scan(&self, table: Table) -> Result<Keyed<Vec<u8>>> {
        let records = self.db.scan_prefix([table.tag()]).map(|record| match record {
            Ok((key, value)) => Ok((key[1..].to_vec(), value.to_vec())),
            Err(source) => Err(EngineError::Sled { operation: "scanning", source }),
        });
        records.collect()
    }

    /// All records except the store's own.
    pub(crate) fn records(&self) -> Result<Records> {
        let mut records = Records::new();
        for record in self.db.iter() {
            let (key, value) =
                record.map_err(|source| EngineError::Sled { operation: "reading all records", source })?;
            if !is_internal(&key) {
                records.insert(key.to_vec(), value.to_vec());
            }
        }
        Ok(records)
    }

    pub(crate) fn totals(&self) -> &Totals {
        &self.totals
    }

    pub(crate) fn batch(&self) -> u64 {
        self.seal.batch
    }

    /// sled writes with `sync_file_range`, which neither flushes the disk's cache nor writes the file's length, and
    /// does not sync large values (its "blobs").
    fn sync(&mut self) -> io::Result<()> {
        let blobs = self.dir.join("blobs");
        let mut present = HashSet::new();
        for entry in fs::read_dir(&blobs)? {
            let entry = entry?;
            if !self.synced_blobs.contains(&entry.file_name()) {
                match File::open(entry.path()) {
                    Ok(file) => file.sync_all()?,
                    // sled has replaced it.
                    Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                    Err(error) => return Err(error),
                }
            }
            present.insert(entry.file_name());
        }
        if present != self.synced_blobs {
            sync_dir(&blobs)?;
            self.synced_blobs = present;
        }
        self.log.sync_data()
    }

    /// Reads every record and compares the sum with the seal.
    fn verify(&mut self, schema: u32) -> Result<()> {
        let (mut found, mut totals) = (Seal::default(), Totals::default());
        let (mut seal, mut version) = (None, None);
        for record in self.db.iter() {
            let (key, value) = record.map_err(|error| EngineError::Damaged(error.to_string()))?;
            match &key[..] {
                SEAL_KEY => seal = Some(value),
                SCHEMA_KEY => version = Some(value),
                key if is_internal(key) => {}
                key => {
                    found.add(key, &value);
                    totals.add(key, &value);
                }
            }
        }
        check_version(version.as_deref(), schema)?;
        if schema >= SEALED_SINCE {
            let seal = seal.as_deref().and_then(Seal::from_bytes);
            let seal = seal.ok_or_else(|| EngineError::Damaged("the seal record is missing".to_owned()))?;
            found.batch = seal.batch;
            check_seal(found, seal, self.acked.read())?;
        }
        (self.seal, self.totals) = (found, totals);
        Ok(())
    }
}

fn check_version(version: Option<&[u8]>, schema: u32) -> Result<()> {
    let text = version.map(String::from_utf8_lossy);
    match text.as_deref().map(str::parse::<u32>) {
        Some(Ok(version)) if version == schema => Ok(()),
        _ => Err(EngineError::Damaged(format!(
            "the schema version is {} in the store and {schema} in the manifest",
            text.as_deref().unwrap_or("missing")
        ))),
    }
}

fn check_seal(found: Seal, seal: Seal, acked: Option<u64>) -> Result<()> {
    if found.records != seal.records {
        let reason = format!("it has {} records, but {} were acknowledged", found.records, seal.records);
        return Err(EngineError::Damaged(reason));
    }
    if found.sum != seal.sum {
        return Err(EngineError::Damaged("the records differ from those that were acknowledged".to_owned()));
    }
    match acked {
        Some(acked) if acked > seal.batch => {
            let reason = format!("the last batch is {}, but batch {acked} was acknowledged", seal.batch);
            Err(EngineError::Damaged(reason))
        }
        _ => Ok(()),
    }
}

fn open_sled(dir: &Path) -> Result<sled::Db> {
    remove_unfinished_snapshots(dir);
    let config = sled::Config::new()
        .path(dir)
        .mode(sled::Mode::LowSpace)
        .cache_capacity(CACHE_BYTES)
        // Every batch is flushed by its caller, so a background flush is useless.
        .flush_every_ms(None);
    let begun = Instant::now();
    loop {
        match config.open() {
            Ok(db) => return Ok(db),
            Err(error) if is_lock_error(&error) && begun.elapsed() < LOCK_TIMEOUT => {
                thread::sleep(Duration::from_millis(2));
            }
            Err(error) => return Err(open_error(dir, error)),
        }
    }
}

/// sled takes a snapshot that was incomplete when the process was killed, or the disk became full, for the newest one
/// and then reports the store as corrupt. Without it, sled uses the previous one.
fn remove_unfinished_snapshots(dir: &Path) {
    let Ok(entries) = fs::read_dir(dir) else { return };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let unfinished = name.to_str().is_some_and(|name| {
            name.starts_with("snap.") && (name.ends_with(".generating") || name.ends_with(".in___motion"))
        });
        if unfinished && let Err(error) = fs::remove_file(entry.path()) {
            tracing::warn!(%error, path = %entry.path().display(), "cannot remove an unfinished snapshot");
        }
    }
}

fn is_lock_error(error: &sled::Error) -> bool {
    matches!(error, sled::Error::Io(error) if error.to_string().starts_with("could not acquire lock"))
}

/// Distinguishes a damaged store from an error of the disk or system: only the former is moved aside.
fn open_error(dir: &Path, error: sled::Error) -> EngineError {
    match error {
        sled::Error::Io(source) if is_system_error(&source) => {
            EngineError::Io { operation: "opening", path: dir.to_owned(), source }
        }
        error if is_lock_error(&error) => EngineError::Sled { operation: "opening", source: error },
        error => EngineError::Damaged(error.to_string()),
    }
}

fn is_system_error(error: &io::Error) -> bool {
    use io::ErrorKind::{OutOfMemory, PermissionDenied, QuotaExceeded, ReadOnlyFilesystem, StorageFull};
    const ENFILE: i32 = 23;
    const EMFILE: i32 = 24;
    matches!(error.kind(), OutOfMemory | PermissionDenied | QuotaExceeded | ReadOnlyFilesystem | StorageFull)
        || matches!(error.raw_os_error(), Some(ENFILE | EMFILE))
}

fn sync_tree(dir: &Path) -> io::Result<()> {
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            sync_tree(&entry.path())?;
        } else {
            File::open(entry.path())?.sync_all()?;
        }
    }
    sync_dir(dir)
}

/// Size of all files below `dir` in bytes. Files that are deleted meanwhile do not count.
pub(crate) fn size_of_tree(dir: &Path) -> u64 {
    let Ok(entries) = fs::read_dir(dir) else { return 0 };
    let size = |entry: fs::DirEntry| match entry.metadata() {
        Ok(metadata) if metadata.is_dir() => size_of_tree(&entry.path()),
        Ok(metadata) => metadata.len(),
        Err(_) => 0,
    };
    entries.flatten().map(size).sum()
}
