//! A full disk: a small tmpfs, which requires root to mount.

use std::fs;
use std::io::ErrorKind;
use std::path::Path;

use keelson_storage::{Batch, OpenError, Outcome, StateStore as _, Table, open};
use nix::mount::{MntFlags, MsFlags, mount, umount2};

use crate::common::{Content, check_opens_with, content, fill};

/// A tmpfs that is unmounted when dropped, also after a panic.
struct SmallDisk {
    dir: tempfile::TempDir,
}

impl SmallDisk {
    fn new(size: &str) -> SmallDisk {
        let dir = tempfile::tempdir().unwrap();
        let options = format!("size={size}");
        mount(Some("tmpfs"), dir.path(), Some("tmpfs"), MsFlags::empty(), Some(options.as_str()))
            .expect("this test mounts a tmpfs and has to run as root");
        SmallDisk { dir }
    }

    fn path(&self) -> &Path {
        self.dir.path()
    }

    fn fill_up(&self) {
        let error = fs::write(self.path().join("ballast"), vec![1; 64 * 1024 * 1024]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::StorageFull);
    }

    fn make_room(&self) {
        fs::remove_file(self.path().join("ballast")).unwrap();
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        if let Err(error) = umount2(self.dir.path(), MntFlags::MNT_DETACH) {
            println!("cannot unmount {}: {error}", self.dir.path().display());
        }
    }
}

#[test]
fn a_store_on_a_full_disk_errs_and_works_again_when_there_is_room() {
    for seed in 0..8u64 {
        let disk = SmallDisk::new("12m");
        let opened = open(disk.path()).unwrap();
        let store = &opened.store;
        let mut expected = fill(&**store);
        // Leave a little room, a different amount each time.
        fs::write(disk.path().join("ballast"), vec![1; (4_000_000 + seed * 333_333) as usize]).unwrap();
        let mut failed = 0;
        let mut errors = 0;
        for round in 0..400u64 {
            let mut batch = Batch::new();
            for id in 0..4 {
                batch.put(Table::Pulls, (round * 4 + id).to_be_bytes(), vec![round as u8; 6_000]);
            }
            batch.put(Table::Meta, "round", round.to_string());
            match store.apply(&batch) {
                Ok(()) => note(&mut expected, &batch),
                Err(error) => {
                    errors += 1;
                    if errors <= 2 && seed == 0 {
                        println!("{error} / {:?}", store.stats().last_error);
                    }
                    assert!(store.stats().last_error.is_some());
                    failed = round;
                    if errors == 5 {
                        break;
                    }
                }
            }
        }
        assert_eq!(errors, 5, "the disk became full");
        disk.make_room();
        let mut batch = Batch::new();
        batch.put(Table::Meta, "room", "again");
        store.apply(&batch).unwrap();
        note(&mut expected, &batch);
        assert_eq!(store.stats().last_error, None);
        assert!(store.stats().errors >= 5);
        check(&content(&**store), &expected, failed);
        let expected = content(&**store);
        drop(opened);
        check_opens_with(disk.path(), &expected);
    }
}

/// Every acknowledged record is present; a rejected batch is present completely or not at all.
fn check(seen: &Content, expected: &Content, last_refused: u64) {
    for (record, value) in expected {
        let found = seen.get(record).unwrap_or_else(|| panic!("{record:?} is missing"));
        if record.1 != b"round" {
            // Rounds use their own keys, one of which `fill` may have used before.
            assert!(found == value || found.len() == 6_000, "{record:?}");
        }
    }
    for round in last_refused.saturating_sub(5)..=last_refused {
        let mine = |id: &u64| {
            seen.get(&(Table::Pulls, (round * 4 + id).to_be_bytes().to_vec()))
                .is_some_and(|value| *value == vec![round as u8; 6_000])
        };
        let there = (0..4u64).filter(mine).count();
        assert!(there == 0 || there == 4, "round {round} is there in part: {there} of 4");
    }
}

fn note(expected: &mut Content, batch: &Batch) {
    for op in batch.ops() {
        match &op.value {
            Some(value) => expected.insert((op.table, op.key.clone()), value.clone()),
            None => expected.remove(&(op.table, op.key.clone())),
        };
    }
}

#[test]
fn opening_on_a_full_disk_says_so_and_moves_nothing() {
    let disk = SmallDisk::new("12m");
    disk.fill_up();
    match open(disk.path()) {
        Err(OpenError::Io { source, path, advice, .. }) => {
            assert_eq!(source.kind(), ErrorKind::StorageFull);
            assert!(path.starts_with(disk.path()));
            assert!(advice.contains("full"), "{advice}");
        }
        other => panic!("{other:?}"),
    }
    disk.make_room();
    let expected = fill(&*open(disk.path()).unwrap().store);
    for _ in 0..3 {
        disk.fill_up();
        match open(disk.path()) {
            Ok(opened) => {
                assert_eq!(opened.outcome, Outcome::Opened);
                assert!(content(&*opened.store) == expected);
            }
            Err(OpenError::Io { source, .. }) => assert_eq!(source.kind(), ErrorKind::StorageFull),
            Err(other) => panic!("{other:?}"),
        }
        disk.make_room();
    }
    check_opens_with(disk.path(), &expected);
}
