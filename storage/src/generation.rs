//! Owns the change from one generation to the next. A generation is filled and fsynced under its own name before one
//! rename of the manifest makes it the current one. A crash at any moment leaves either the old or the new one
//! current, and leftovers that the next opening removes.

use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::Path;

use crate::engine::{Engine, EngineError, Totals, size_of_tree};
use crate::manifest::{Manifest, generation_of, sync_dir};
use crate::migrate::{Records, SCHEMA_VERSION};

/// Smaller stores are never compacted, because sled allocates in steps of half a megabyte.
const COMPACT_FROM_BYTES: u64 = 16 * 1024 * 1024;
/// A store is compacted when it takes this many times the size of its records.
const COMPACT_FACTOR: u64 = 8;

pub(crate) fn is_bloated(generation: &Path, totals: &Totals) -> bool {
    size_of_tree(generation) > COMPACT_FROM_BYTES.max(totals.live_bytes.saturating_mul(COMPACT_FACTOR))
}

/// Rewrites the open generation, through `change`, into a new one of the current schema version, and switches to it.
pub(crate) fn rewrite(
    slot: &mut Option<Engine>,
    store: &Path,
    old: &Manifest,
    change: impl FnOnce(&mut Records),
) -> Result<(Manifest, Totals), EngineError> {
    let operation = "rewriting the store";
    let Some(engine) = slot.as_ref() else {
        return Err(EngineError::Damaged("it is not open".to_owned()));
    };
    let mut records = engine.records()?;
    change(&mut records);
    let new = Manifest { schema: SCHEMA_VERSION, generation: next_generation(store, Some(old)) };
    let dir = new.generation_dir(store);
    let result = Engine::create(&dir, &records, new.schema, engine.batch())
        .and_then(|()| Engine::open(&dir, new.schema))
        .and_then(|engine| match new.write_to(store) {
            Ok(()) => Ok(engine),
            Err(source) => Err(EngineError::Io { operation, path: store.to_owned(), source }),
        });
    match result {
        Ok(engine) => {
            let totals = engine.totals().clone();
            *slot = Some(engine);
            remove_others(store, &new);
            Ok((new, totals))
        }
        Err(error) => {
            // It was never current; if it cannot be removed now, the next opening removes it.
            let _ = fs::remove_dir_all(&dir);
            Err(error)
        }
    }
}

/// Copies the files of a generation that a stuck thread still holds into a new one. Does not switch to it.
pub(crate) fn copy(store: &Path, old: &Manifest) -> io::Result<Manifest> {
    let new = Manifest { generation: next_generation(store, Some(old)), ..old.clone() };
    copy_dir(&old.generation_dir(store), &new.generation_dir(store))?;
    Ok(new)
}

/// Removes superseded and incomplete generations.
pub(crate) fn remove_others(store: &Path, current: &Manifest) {
    for (generation, path) in generations(store) {
        if generation != current.generation
            && let Err(error) = fs::remove_dir_all(&path)
        {
            tracing::warn!(%error, path = %path.display(), "cannot remove an old generation");
        }
    }
}

/// A number that no generation of the store has had.
pub(crate) fn next_generation(store: &Path, manifest: Option<&Manifest>) -> u64 {
    let named = generations(store).into_iter().map(|(generation, _)| generation);
    named.chain(manifest.map(|manifest| manifest.generation)).max().unwrap_or(0).saturating_add(1)
}

/// Creates a folder that only the agent's user can enter.
pub(crate) fn make_private_dir(path: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(path)
}

fn generations(store: &Path) -> Vec<(u64, std::path::PathBuf)> {
    let Ok(entries) = fs::read_dir(store) else { return Vec::new() };
    let generation = |entry: fs::DirEntry| Some((generation_of(entry.file_name().to_str()?)?, entry.path()));
    entries.flatten().filter_map(generation).collect()
}

fn copy_dir(from: &Path, to: &Path) -> io::Result<()> {
    make_private_dir(to)?;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let target = to.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            copy_dir(&entry.path(), &target)?;
        } else {
            fs::copy(entry.path(), &target)?;
            fs::File::open(&target)?.sync_all()?;
        }
    }
    sync_dir(to)
}
