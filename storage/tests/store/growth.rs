//! The size of a store stays bounded over months.

use std::fs;

use keelson_storage::{Batch, StateStore as _, Table, open};

use crate::common::{check_opens_with, content};

const MIB: u64 = 1024 * 1024;

#[test]
fn twenty_thousand_writes_of_thirty_keys_leave_a_small_folder() {
    let dir = tempfile::tempdir().unwrap();
    let opened = open(dir.path()).unwrap();
    let mut largest = 0;
    for round in 0..20_000u64 {
        let key = (round % 30).to_be_bytes();
        let mut batch = Batch::new();
        if round % 3 == 2 {
            batch.delete(Table::Pulls, key);
        } else {
            batch.put(Table::Pulls, key, vec![round as u8; 300]);
        }
        opened.store.apply(&batch).unwrap();
        if round % 100 == 0 {
            largest = largest.max(opened.store.stats().size_bytes);
        }
    }
    assert!(largest < 8 * MIB, "it grew to {largest} bytes");
    let expected = content(&*opened.store);
    drop(opened);
    check_opens_with(dir.path(), &expected);
}

#[test]
fn large_values_and_a_queue_that_empties_leave_a_bounded_folder() {
    let dir = tempfile::tempdir().unwrap();
    let opened = open(dir.path()).unwrap();
    let mut largest = 0;
    for round in 0..800u64 {
        let mut batch = Batch::new();
        batch.put(Table::Settings, "view", vec![round as u8; 150_000]);
        for id in 0..20 {
            batch.put(Table::Pulls, (round * 20 + id).to_be_bytes(), vec![1; 300]);
        }
        if round >= 10 {
            for id in 0..20 {
                batch.delete(Table::Pulls, ((round - 10) * 20 + id).to_be_bytes());
            }
        }
        opened.store.apply(&batch).unwrap();
        if round % 25 == 0 {
            largest = largest.max(opened.store.stats().size_bytes);
        }
    }
    let last = opened.store.stats().size_bytes;
    println!("largest {largest}, last {last}");
    assert!(largest < 40 * MIB, "it grew to {largest} bytes");
    assert_eq!(opened.store.scan(Table::Pulls).unwrap().len(), 200);
    let generations = fs::read_dir(dir.path().join("state"))
        .unwrap()
        .filter(|entry| entry.as_ref().unwrap().file_name().to_str().unwrap().starts_with('g'));
    assert_eq!(generations.count(), 1, "superseded generations are removed");
    assert_eq!(opened.store.stats().errors, 0);
    let expected = content(&*opened.store);
    drop(opened);
    check_opens_with(dir.path(), &expected);
}
