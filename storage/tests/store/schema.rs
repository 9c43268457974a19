//! Newer and older stores.

use std::fs;
use std::path::Path;

use keelson_storage::{Manifest, Outcome, SCHEMA_VERSION, StateStore as _, Table, open};

use crate::common::{content, copy_dir, filled, hashes, version_1};

#[test]
fn i4_a_newer_store_is_set_aside_byte_for_byte_and_an_empty_one_is_opened() {
    let (dir, expected) = filled();
    let current = Manifest::read(dir.path()).unwrap();
    assert_eq!(current.schema, SCHEMA_VERSION);
    let newer = SCHEMA_VERSION + 1;
    Manifest { schema: newer, ..current }.write(dir.path()).unwrap();
    let before = hashes(&dir.path().join("state"));
    let aside = dir.path().join(format!("state.schema-{newer}"));
    let opened = open(dir.path()).unwrap();
    assert_eq!(opened.outcome, Outcome::NewerSetAside { found: newer, moved_to: aside.clone() });
    assert!(content(&*opened.store).is_empty());
    drop(opened);
    assert_eq!(hashes(&aside), before);
    assert_eq!(open(dir.path()).unwrap().outcome, Outcome::Opened, "once");
    // A second rollback keeps both stores.
    let now = Manifest::read(dir.path()).unwrap();
    Manifest { schema: newer, ..now }.write(dir.path()).unwrap();
    let moved_to = dir.path().join(format!("state.schema-{newer}-2"));
    assert_eq!(open(dir.path()).unwrap().outcome, Outcome::NewerSetAside { found: newer, moved_to });
    // After an upgrade, the newer agent finds its records.
    fs::remove_dir_all(dir.path().join("state")).unwrap();
    fs::rename(&aside, dir.path().join("state")).unwrap();
    current.write(dir.path()).unwrap();
    assert!(content(&*open(dir.path()).unwrap().store) == expected);
}

fn check_migrated(state_dir: &Path) {
    let opened = open(state_dir).unwrap();
    assert_eq!(opened.outcome, Outcome::Opened);
    let pulls = opened.store.scan(Table::Pulls).unwrap();
    assert_eq!(pulls.len(), 120);
    for (id, (key, value)) in (1..).zip(&pulls) {
        assert_eq!(*key, u64::to_be_bytes(id));
        let expected = format!(
            r#"{{"id":{id},"image":"registry.example/app:{id}","runtime_handler":"runc","requested_unix_ms":{},"attempts":0,"with_credentials":false,"state":"queued"}}"#,
            id * 1000
        );
        assert_eq!(String::from_utf8(value.clone()).unwrap(), expected);
    }
    assert_eq!(opened.store.get(Table::Leases, b"lease").unwrap().unwrap(), b"kept as it is");
    let meta = opened.store.scan(Table::Meta).unwrap();
    assert_eq!(meta.len(), 1, "{meta:?}");
    assert!(meta[0].0.starts_with(b"unmigrated/1/pulls/"));
    assert_eq!(meta[0].1, b"{}");
    let manifest = Manifest::read(state_dir).unwrap();
    assert_eq!(manifest, Manifest { schema: 2, generation: 5 });
    assert!(!state_dir.join("state/g4").exists());
}

#[test]
fn a_store_of_version_1_is_migrated_once() {
    let dir = tempfile::tempdir().unwrap();
    version_1(dir.path());
    let opened = open(dir.path()).unwrap();
    assert_eq!(opened.outcome, Outcome::Migrated { from: 1, to: 2 });
    assert_eq!(opened.store.stats().schema_version, 2);
    drop(opened);
    check_migrated(dir.path());
}

#[test]
fn a_migration_that_was_killed_is_run_again() {
    let dir = tempfile::tempdir().unwrap();
    let source = tempfile::tempdir().unwrap();
    version_1(source.path());
    // Killed while the new generation was filled.
    copy_dir(&source.path().join("state"), &dir.path().join("state"));
    let half = dir.path().join("state/g5");
    fs::create_dir_all(half.join("blobs")).unwrap();
    fs::write(half.join("db"), vec![7; 5000]).unwrap();
    fs::write(dir.path().join("state/manifest.new"), "keelson-sta").unwrap();
    assert_eq!(open(dir.path()).unwrap().outcome, Outcome::Migrated { from: 1, to: 2 });
    assert!(!half.exists(), "the half-made generation is gone");
    assert_eq!(open(dir.path()).unwrap().outcome, Outcome::Opened);

    // Killed between the switch and the removal of the old generation.
    let dir = tempfile::tempdir().unwrap();
    copy_dir(&source.path().join("state"), &dir.path().join("state"));
    drop(open(dir.path()).unwrap());
    copy_dir(&source.path().join("state/g4"), &dir.path().join("state/g4"));
    drop(open(dir.path()).unwrap());
    check_migrated(dir.path());
}

#[test]
fn a_damaged_store_of_version_1_is_moved_aside() {
    let dir = tempfile::tempdir().unwrap();
    version_1(dir.path());
    fs::write(dir.path().join("state/g4/db"), vec![0x55; 700_000]).unwrap();
    let opened = open(dir.path()).unwrap();
    assert!(matches!(opened.outcome, Outcome::Recovered { .. }), "{:?}", opened.outcome);
}

#[test]
fn a_manifest_and_a_store_that_disagree_are_moved_aside() {
    let (dir, expected) = filled();
    Manifest { schema: 1, ..Manifest::read(dir.path()).unwrap() }.write(dir.path()).unwrap();
    let opened = open(dir.path()).unwrap();
    let Outcome::Recovered { moved_to, reason } = opened.outcome else { panic!("{:?}", opened.outcome) };
    assert!(reason.contains("2 in the store and 1 in the manifest"), "{reason}");
    drop(opened.store);
    // Repairing the manifest by hand restores everything.
    let rescued = tempfile::tempdir().unwrap();
    copy_dir(&moved_to, &rescued.path().join("state"));
    Manifest { schema: 2, generation: 1 }.write(rescued.path()).unwrap();
    assert!(content(&*open(rescued.path()).unwrap().store) == expected);
}
