//! Shared by the suites: stores with known content and folders compared byte by byte.
#![allow(dead_code, clippy::unwrap_used, clippy::expect_used)]

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use keelson_storage::{Batch, Manifest, Outcome, StateStore, Table, open};
use sha2::{Digest as _, Sha256};
use tempfile::TempDir;

pub(crate) type Content = BTreeMap<(Table, Vec<u8>), Vec<u8>>;

pub(crate) fn content(store: &dyn StateStore) -> Content {
    let of_table = |table: &Table| {
        let table = *table;
        store.scan(table).unwrap().into_iter().map(move |(key, value)| ((table, key), value))
    };
    Table::ALL.iter().flat_map(of_table).collect()
}

/// Fills a store through many batches, deletions and one large value, so that its files have a history.
pub(crate) fn fill(store: &dyn StateStore) -> Content {
    for round in 0..60u64 {
        let mut batch = Batch::new();
        for id in 0..12u64 {
            batch.put(
                Table::Pulls,
                (round * 4 + id).to_be_bytes(),
                format!("pull {id} of {round} ").repeat(9),
            );
        }
        batch.delete(Table::Pulls, (round * 3).to_be_bytes());
        batch.put(Table::Leases, format!("lease-{}", round % 7), round.to_string());
        batch.put(Table::Meta, "instance", format!("instance {round}"));
        store.apply(&batch).unwrap();
    }
    let mut large = Batch::new();
    large.put(Table::Settings, "large", vec![b'x'; 200_000]).put(Table::Settings, "limit", "3");
    store.apply(&large).unwrap();
    content(store)
}

/// A folder with a store that has been closed, and its content.
pub(crate) fn filled() -> (TempDir, Content) {
    let dir = tempfile::tempdir().unwrap();
    let content = fill(&*open(dir.path()).unwrap().store);
    (dir, content)
}

/// Opens the store, which is neither new nor damaged, and compares its content.
#[track_caller]
pub(crate) fn check_opens_with(dir: &Path, expected: &Content) {
    let opened = open(dir).unwrap();
    assert_eq!(opened.outcome, Outcome::Opened);
    assert!(content(&*opened.store) == *expected);
}

/// Every file below a folder with its hash, every folder with `None`.
pub(crate) fn hashes(dir: &Path) -> BTreeMap<PathBuf, Option<Vec<u8>>> {
    files(dir)
        .into_iter()
        .map(|path| {
            let hash = path.is_file().then(|| Sha256::digest(fs::read(&path).unwrap()).to_vec());
            (path.strip_prefix(dir).unwrap().to_owned(), hash)
        })
        .collect()
}

/// Every file and folder below a folder, in order.
pub(crate) fn files(dir: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(files(&path));
        }
        found.push(path);
    }
    found.sort();
    found
}

pub(crate) fn copy_dir(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let target = to.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            copy_dir(&entry.path(), &target);
        } else {
            fs::copy(entry.path(), target).unwrap();
        }
    }
}

/// A store in the format of version 1, made with sled alone.
pub(crate) fn version_1(state_dir: &Path) {
    let dir = state_dir.join("state/g4");
    fs::create_dir_all(&dir).unwrap();
    let db = sled::Config::new().path(&dir).flush_every_ms(None).open().unwrap();
    db.insert(b"\x00schema_version", "1").unwrap();
    for id in 1..=120u64 {
        let json = format!(
            r#"{{"image":"registry.example/app:{id}","handler":"runc","queued_at_ms":{}}}"#,
            id * 1000
        );
        db.insert([b"\x02", id.to_string().as_bytes()].concat(), json.into_bytes()).unwrap();
    }
    db.insert(b"\x02not-a-number", "{}").unwrap();
    db.insert(b"\x03lease", "kept as it is").unwrap();
    db.flush().unwrap();
    drop(db);
    Manifest { schema: 1, generation: 4 }.write(state_dir).unwrap();
}
