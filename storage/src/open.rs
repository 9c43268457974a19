//! Owns the opening of the state folder: the lock, the distinction of new, current, older, newer and damaged stores,
//! and moving aside the last two. In: the folder. Out: a complete store, or an error that says what to do. For any
//! content of the folder, this neither hangs nor panics nor deletes a record.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use crate::engine::{Engine, EngineError, Totals};
use crate::error::OpenError;
use crate::generation::{self, make_private_dir};
use crate::guard::{Unfinished, Worker};
use crate::manifest::{Manifest, ManifestError, store_dir, sync_dir};
use crate::migrate::{OLDEST_VERSION, Records, SCHEMA_VERSION, migrate};
use crate::seal::checksum;
use crate::sled_store::{OPEN_LIMIT, SledStore};

/// Maximum number of processes in a row that end while they open a store, before the store counts as the cause: the
/// content may make sled abort the process, which no thread can catch.
const OPENING_ATTEMPTS: u32 = 5;
const OPENING_FILE: &str = "opening";
/// Held while a store is open; contains the pid of its holder.
pub const LOCK_FILE: &str = "lock";

#[derive(Debug)]
pub struct Opened {
    /// Holds the folder's lock until it is dropped.
    pub store: Arc<SledStore>,
    pub outcome: Outcome,
}

#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Outcome {
    /// The store is new.
    Created,
    /// A complete store of the current schema version.
    Opened,
    /// A complete store of an older schema version, which has been migrated.
    Migrated { from: u32, to: u32 },
    /// A store of a newer schema version, which has been moved aside untouched. The store is new.
    NewerSetAside { found: u32, moved_to: PathBuf },
    /// A damaged store, which has been moved aside. The store is new.
    Recovered { moved_to: PathBuf, reason: String },
}

/// Opens the store in `state_dir`, which is created if it is missing.
pub fn open(state_dir: &Path) -> Result<Opened, OpenError> {
    open_within(state_dir, OPEN_LIMIT)
}

/// [`open`] with this limit for each step that waits for the disk.
pub(crate) fn open_within(state_dir: &Path, limit: Duration) -> Result<Opened, OpenError> {
    let io_error = |action, path: &Path| {
        let path = path.to_owned();
        move |source| OpenError::io(action, path, source)
    };
    make_private_dir(state_dir).map_err(io_error("create the state directory", state_dir))?;
    let lock = Arc::new(take_lock(state_dir)?);
    let store = store_dir(state_dir);
    if is_absent(&store).map_err(io_error("stat", &store))? {
        let (worker, manifest, totals) = create(state_dir, 1, limit)?;
        let store = Arc::new(SledStore::new(store, lock, worker, manifest, &totals, None));
        return Ok(Opened { store, outcome: Outcome::Created });
    }
    let manifest = match Manifest::read_from(&store) {
        Ok(manifest) if manifest.schema > SCHEMA_VERSION => {
            return set_aside(state_dir, lock, manifest.schema, limit);
        }
        Ok(manifest) if manifest.schema < OLDEST_VERSION => {
            let reason = format!("schema version {} is unknown", manifest.schema);
            return recover(state_dir, lock, reason, limit);
        }
        Ok(manifest) => manifest,
        Err(ManifestError::Damaged { path, reason }) => {
            return recover(state_dir, lock, format!("{}: {reason}", path.display()), limit);
        }
        Err(ManifestError::Io { source, .. }) if source.kind() == io::ErrorKind::NotADirectory => {
            return recover(state_dir, lock, "it is not a directory".to_owned(), limit);
        }
        Err(ManifestError::Io { path, source }) => return Err(OpenError::io("read", path, source)),
    };
    let Some(attempt) = Attempt::begin(&store) else {
        let reason = format!("{OPENING_ATTEMPTS} consecutive processes died while opening it");
        return recover(state_dir, lock, reason, limit);
    };
    let opened = open_store(&store, manifest, &lock, limit);
    drop(attempt);
    match opened? {
        Found::Whole { worker, manifest, totals, outcome } => {
            generation::remove_others(&store, &manifest);
            let store = Arc::new(SledStore::new(store, lock, worker, manifest, &totals, None));
            Ok(Opened { store, outcome })
        }
        Found::Damaged(reason) => recover(state_dir, lock, reason, limit),
    }
}

/// An ID of a state folder: 16 hexadecimal digits derived from its absolute path, so that it does not depend on a
/// store and survives its loss.
pub fn folder_id(state_dir: &Path) -> String {
    let path = std::path::absolute(state_dir).unwrap_or_else(|_| state_dir.to_owned());
    format!("{:016x}", checksum(&[path.as_os_str().as_encoded_bytes()]))
}

fn take_lock(state_dir: &Path) -> Result<File, OpenError> {
    let path = state_dir.join(LOCK_FILE);
    let io_error = |action| {
        let path = path.clone();
        move |source| OpenError::io(action, path, source)
    };
    let mut file = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .open(&path)
        .map_err(io_error("open the lock file"))?;
    match file.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => {
            let pid = fs::read_to_string(&path).ok().and_then(|text| text.trim().parse().ok());
            return Err(OpenError::InUse { path: state_dir.to_owned(), pid });
        }
        Err(TryLockError::Error(source)) => return Err(io_error("lock")(source)),
    }
    // Only the error message of a second agent uses the pid, so a full disk is no reason to fail here.
    let written = file.set_len(0).and_then(|()| writeln!(file, "{}", std::process::id()));
    if let Err(error) = written {
        tracing::warn!(%error, path = %path.display(), "cannot write the pid into the lock file");
    }
    Ok(file)
}

/// Also true for an empty folder.
fn is_absent(store: &Path) -> io::Result<bool> {
    match fs::read_dir(store) {
        Ok(mut entries) => Ok(entries.next().is_none()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            // A dangling symbolic link is in the way.
            Ok(fs::symlink_metadata(store).is_err())
        }
        Err(error) if error.kind() == io::ErrorKind::NotADirectory => Ok(false),
        Err(error) => Err(error),
    }
}

/// Creates a new store beside its place and moves it there, so that an incomplete one is never found.
fn create(
    state_dir: &Path,
    generation: u64,
    limit: Duration,
) -> Result<(Worker<Engine>, Manifest, Totals), OpenError> {
    let (store, new) = (store_dir(state_dir), state_dir.join("state.new"));
    let io_error = |action, path: &Path| {
        let path = path.to_owned();
        move |source| OpenError::io(action, path, source)
    };
    match fs::remove_dir_all(&new) {
        Err(source) if source.kind() != io::ErrorKind::NotFound => {
            return Err(OpenError::io("remove the incomplete store", new, source));
        }
        _ => {}
    }
    make_private_dir(&new).map_err(io_error("make", &new))?;
    let manifest = Manifest { schema: SCHEMA_VERSION, generation };
    let mut worker = Worker::start().map_err(io_error("start the storage thread for", &store))?;
    let dir = manifest.generation_dir(&new);
    let made = worker
        .call(limit, move |_: &mut Option<Engine>| Engine::create(&dir, &Records::new(), SCHEMA_VERSION, 0));
    fresh(&store, made)?;
    manifest.write_to(&new).map_err(io_error("write the manifest in", &new))?;
    fs::rename(&new, &store).map_err(io_error("move the new store to", &store))?;
    sync_dir(state_dir).map_err(io_error("sync", state_dir))?;
    let dir = manifest.generation_dir(&store);
    let totals = fresh(&store, worker.call(limit, move |slot| open_engine(slot, &dir, SCHEMA_VERSION)))?;
    Ok((worker, manifest, totals))
}

/// The result of a job on a store that was just created: no error here means damage.
fn fresh<R>(store: &Path, result: Result<Result<R, EngineError>, Unfinished>) -> Result<R, OpenError> {
    let reason = match result {
        Ok(Ok(value)) => return Ok(value),
        Ok(Err(EngineError::Io { path, source, .. })) => return Err(OpenError::io("write", path, source)),
        Ok(Err(EngineError::Sled { source: sled::Error::Io(source), .. })) => {
            return Err(OpenError::io("write", store, source));
        }
        Ok(Err(EngineError::Sled { source, .. })) => source.to_string(),
        Ok(Err(EngineError::Damaged(reason))) | Err(Unfinished::Panicked(reason)) => reason,
        Err(Unfinished::TimedOut(limit)) => format!("the disk did not answer within {} s", limit.as_secs()),
    };
    Err(OpenError::Unusable { path: store.to_owned(), reason })
}

fn open_engine(slot: &mut Option<Engine>, dir: &Path, schema: u32) -> Result<Totals, EngineError> {
    let engine = Engine::open(dir, schema)?;
    let totals = engine.totals().clone();
    *slot = Some(engine);
    Ok(totals)
}

enum Found {
    Whole { worker: Worker<Engine>, manifest: Manifest, totals: Totals, outcome: Outcome },
    Damaged(String),
}

fn open_store(
    store: &Path,
    manifest: Manifest,
    lock: &Arc<File>,
    limit: Duration,
) -> Result<Found, OpenError> {
    let mut worker =
        Worker::start().map_err(|source| OpenError::io("start the storage thread for", store, source))?;
    let (dir, schema) = (manifest.generation_dir(store), manifest.schema);
    if !dir.is_dir() {
        return Ok(Found::Damaged(format!("{} is missing", dir.display())));
    }
    // Held while the thread may use the files, even if no caller waits for it any more.
    let held = lock.clone();
    let opening = move |slot: &mut Option<Engine>| {
        let opened = open_engine(slot, &dir, schema);
        drop(held);
        opened
    };
    let totals = match worker.call(limit, opening) {
        Ok(Ok(totals)) => totals,
        Ok(Err(EngineError::Damaged(reason))) => return Ok(Found::Damaged(reason)),
        Ok(Err(EngineError::Io { path, source, .. })) => return Err(OpenError::io("open", path, source)),
        Ok(Err(EngineError::Sled { source, .. })) => {
            return Err(OpenError::Unusable { path: store.to_owned(), reason: source.to_string() });
        }
        Err(Unfinished::Panicked(message)) => {
            return Ok(Found::Damaged(format!("sled panicked while reading it: {message}")));
        }
        Err(Unfinished::TimedOut(limit)) => {
            // Slow is not damaged.
            return Err(OpenError::TimedOut { path: store.to_owned(), seconds: limit.as_secs() });
        }
    };
    if schema == SCHEMA_VERSION {
        return Ok(Found::Whole { worker, manifest, totals, outcome: Outcome::Opened });
    }
    migrate_store(store, worker, &manifest, limit)
}

fn migrate_store(
    store: &Path,
    mut worker: Worker<Engine>,
    old: &Manifest,
    limit: Duration,
) -> Result<Found, OpenError> {
    let from = old.schema;
    let (dir, manifest) = (store.to_owned(), old.clone());
    let migrated = worker.call(limit, move |slot| {
        generation::rewrite(slot, &dir, &manifest, |records| migrate(records, from))
    });
    let reason = match migrated {
        Ok(Ok((manifest, totals))) => {
            let outcome = Outcome::Migrated { from, to: manifest.schema };
            return Ok(Found::Whole { worker, manifest, totals, outcome });
        }
        Ok(Err(EngineError::Io { path, source, .. })) => {
            return Err(OpenError::io("write the migrated store to", path, source));
        }
        Ok(Err(EngineError::Sled { source, .. })) => source.to_string(),
        Ok(Err(EngineError::Damaged(reason))) | Err(Unfinished::Panicked(reason)) => reason,
        Err(Unfinished::TimedOut(limit)) => format!("it did not finish within {} s", limit.as_secs()),
    };
    Err(OpenError::Migration { path: store.to_owned(), from, to: SCHEMA_VERSION, reason })
}

/// Moves the damaged store aside and creates an empty one.
fn recover(state_dir: &Path, lock: Arc<File>, reason: String, limit: Duration) -> Result<Opened, OpenError> {
    let store = store_dir(state_dir);
    let generation = generation::next_generation(&store, Manifest::read_from(&store).ok().as_ref());
    let now = humantime::format_rfc3339_seconds(SystemTime::now()).to_string().replace(['-', ':'], "");
    let moved_to = move_aside(state_dir, &store, format!("state.damaged-{now}"))?;
    tracing::error!(
        path = %store.display(),
        moved_to = %moved_to.display(),
        reason,
        "state store damaged and moved aside; starting with an empty one"
    );
    let (worker, manifest, totals) = create(state_dir, generation, limit)?;
    let moved = Some(moved_to.clone());
    let store = Arc::new(SledStore::new(store, lock, worker, manifest, &totals, moved));
    Ok(Opened { store, outcome: Outcome::Recovered { moved_to, reason } })
}

/// Moves the store of a newer agent aside, unchanged, and creates an empty one, so that the agent can be rolled back.
fn set_aside(state_dir: &Path, lock: Arc<File>, found: u32, limit: Duration) -> Result<Opened, OpenError> {
    let store = store_dir(state_dir);
    let moved_to = move_aside(state_dir, &store, format!("state.schema-{found}"))?;
    tracing::warn!(
        found,
        known = SCHEMA_VERSION,
        moved_to = %moved_to.display(),
        "state store written by a newer agent and moved aside; starting with an empty one"
    );
    let (worker, manifest, totals) = create(state_dir, 1, limit)?;
    let store = Arc::new(SledStore::new(store, lock, worker, manifest, &totals, None));
    Ok(Opened { store, outcome: Outcome::NewerSetAside { found, moved_to } })
}

fn move_aside(state_dir: &Path, store: &Path, name: String) -> Result<PathBuf, OpenError> {
    let names = std::iter::once(name.clone()).chain((2..).map(|number| format!("{name}-{number}")));
    let free = names.map(|name| state_dir.join(name)).find(|path| fs::symlink_metadata(path).is_err());
    let target = free.unwrap_or_else(|| state_dir.join(name));
    fs::rename(store, &target)
        .and_then(|()| sync_dir(state_dir))
        .map_err(|source| OpenError::io("move aside the store", store, source))?;
    Ok(target)
}

struct Attempt {
    path: PathBuf,
}

impl Attempt {
    /// `None`: too many.
    fn begin(store: &Path) -> Option<Attempt> {
        let path = store.join(OPENING_FILE);
        let before = fs::read_to_string(&path).ok().and_then(|text| text.trim().parse::<u32>().ok());
        let attempts = before.unwrap_or(0);
        if attempts >= OPENING_ATTEMPTS {
            return None;
        }
        // A full disk prevents the count, but not the opening.
        if let Err(error) = fs::write(&path, format!("{}\n", attempts + 1)) {
            tracing::debug!(%error, path = %path.display(), "cannot record this start in the state directory");
        }
        Some(Attempt { path })
    }
}

impl Drop for Attempt {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}
