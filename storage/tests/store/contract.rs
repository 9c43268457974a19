//! The contract of every store.

use std::collections::BTreeMap;
use std::sync::Arc;

use keelson_storage::{
    Batch, MAX_KEY_LEN, MAX_VALUE_LEN, MemoryStore, StateStore, StateStoreExt as _, StoreError, Table, open,
};
use proptest::prelude::*;
use serde::{Deserialize, Serialize};

use crate::common::{Content, content};

type Made = (Arc<dyn StateStore>, Option<tempfile::TempDir>);

fn sled_store() -> Made {
    let dir = tempfile::tempdir().unwrap();
    (open(dir.path()).unwrap().store, Some(dir))
}

fn memory_store() -> Made {
    (Arc::new(MemoryStore::new()), None)
}

macro_rules! contract {
    ($($name:ident),+ $(,)?) => {
        mod sled {
            $(#[test] fn $name() { super::$name(super::sled_store); })+
        }
        mod memory {
            $(#[test] fn $name() { super::$name(super::memory_store); })+
        }
    };
}

contract!(
    a_new_store_is_empty,
    records_are_put_and_deleted,
    the_last_write_to_a_key_wins,
    tables_do_not_see_each_other,
    scans_are_in_key_order,
    empty_keys_and_values_are_records,
    an_empty_batch_changes_nothing,
    the_largest_record_fits_and_a_larger_one_changes_nothing,
    json_goes_in_and_out_and_bad_records_are_reported,
    stats_count_records,
    batches_of_many_threads_stay_whole,
    any_history_agrees_with_a_map,
);

fn a_new_store_is_empty(make: fn() -> Made) {
    let (store, _dir) = make();
    assert!(content(&*store).is_empty());
    assert_eq!(store.get(Table::Pulls, b"x").unwrap(), None);
    assert!(store.stats().tables.iter().all(|(_, records)| *records == 0));
}

fn records_are_put_and_deleted(make: fn() -> Made) {
    let (store, _dir) = make();
    store
        .apply(
            Batch::new()
                .put(Table::Pulls, "a", "1")
                .put(Table::Pulls, "b", "2")
                .delete(Table::Pulls, "never there"),
        )
        .unwrap();
    store.apply(Batch::new().delete(Table::Pulls, "a").put(Table::Pulls, "b", "3")).unwrap();
    assert_eq!(store.get(Table::Pulls, b"a").unwrap(), None);
    assert_eq!(store.scan(Table::Pulls).unwrap(), [(b"b".to_vec(), b"3".to_vec())]);
}

fn the_last_write_to_a_key_wins(make: fn() -> Made) {
    let (store, _dir) = make();
    let mut batch = Batch::new();
    batch.put(Table::Meta, "a", "1").delete(Table::Meta, "a").put(Table::Meta, "a", "2");
    batch.put(Table::Meta, "b", "1").delete(Table::Meta, "b");
    store.apply(&batch).unwrap();
    assert_eq!(store.scan(Table::Meta).unwrap(), [(b"a".to_vec(), b"2".to_vec())]);
}

fn tables_do_not_see_each_other(make: fn() -> Made) {
    let (store, _dir) = make();
    for table in Table::ALL {
        store.apply(Batch::new().put(*table, "key", table.name())).unwrap();
    }
    for table in Table::ALL {
        assert_eq!(store.scan(*table).unwrap(), [(b"key".to_vec(), table.name().as_bytes().to_vec())]);
    }
    store.apply(Batch::new().delete(Table::Pulls, "key")).unwrap();
    assert_eq!(content(&*store).len(), Table::ALL.len() - 1);
}

fn scans_are_in_key_order(make: fn() -> Made) {
    let (store, _dir) = make();
    let numbers = [300u64, 2, 1, 70_000, 255, 256, 0];
    let mut batch = Batch::new();
    for number in numbers {
        batch.put(Table::Pulls, number.to_be_bytes(), "");
    }
    store.apply(batch.put(Table::Pulls, [0xff; 40], "last").put(Table::Pulls, [0u8; 3], "")).unwrap();
    let keys: Vec<Vec<u8>> = store.scan(Table::Pulls).unwrap().into_iter().map(|(key, _)| key).collect();
    assert!(keys.is_sorted());
    assert_eq!(keys.len(), numbers.len() + 2);
}

fn empty_keys_and_values_are_records(make: fn() -> Made) {
    let (store, _dir) = make();
    store.apply(Batch::new().put(Table::Settings, "", "").put(Table::Leases, "", "x")).unwrap();
    assert_eq!(store.get(Table::Settings, b"").unwrap(), Some(vec![]));
    assert_eq!(store.scan(Table::Leases).unwrap(), [(vec![], b"x".to_vec())]);
}

fn an_empty_batch_changes_nothing(make: fn() -> Made) {
    let (store, _dir) = make();
    let empty = Batch::new();
    assert!(empty.is_empty());
    assert_eq!(empty.len(), 0);
    store.apply(&empty).unwrap();
    assert!(content(&*store).is_empty());
}

fn the_largest_record_fits_and_a_larger_one_changes_nothing(make: fn() -> Made) {
    let (store, _dir) = make();
    let (key, value) = (vec![7; MAX_KEY_LEN], vec![9; MAX_VALUE_LEN]);
    store.apply(Batch::new().put(Table::Meta, key.clone(), value.clone())).unwrap();
    assert_eq!(store.get(Table::Meta, &key).unwrap().as_ref(), Some(&value));
    let before = content(&*store);
    let error = store.apply(Batch::new().put(Table::Meta, "fine", "").put(
        Table::Pulls,
        "big",
        vec![0; MAX_VALUE_LEN + 1],
    ));
    assert!(matches!(error, Err(StoreError::ValueTooLong { .. })), "{error:?}");
    let error =
        store.apply(Batch::new().put(Table::Meta, "fine", "").delete(Table::Pulls, vec![0; MAX_KEY_LEN + 1]));
    assert!(matches!(error, Err(StoreError::KeyTooLong { .. })), "{error:?}");
    assert_eq!(content(&*store), before);
    assert_eq!(store.stats().errors, 0, "a caller's mistake is no failure of the store");
}

#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct Pull {
    image: String,
    attempts: u32,
}

fn json_goes_in_and_out_and_bad_records_are_reported(make: fn() -> Made) {
    let (store, _dir) = make();
    let pull = Pull { image: "docker.io/library/busybox".to_owned(), attempts: 2 };
    store.put_json(Table::Pulls, &1u64.to_be_bytes(), &pull).unwrap();
    store
        .apply(Batch::new().put(Table::Pulls, 2u64.to_be_bytes(), "{ not json").put(
            Table::Pulls,
            "three",
            "{}",
        ))
        .unwrap();
    assert_eq!(store.get_json::<Pull>(Table::Pulls, &1u64.to_be_bytes()).unwrap().as_ref(), Some(&pull));
    assert_eq!(store.get_json::<Pull>(Table::Pulls, b"absent").unwrap(), None);
    let error = store.get_json::<Pull>(Table::Pulls, b"three").unwrap_err().to_string();
    assert!(error.contains("pulls/three") && error.contains("missing field `image`"), "{error}");
    let (good, bad) = store.scan_json::<Pull>(Table::Pulls).unwrap();
    assert_eq!(good, [(1u64.to_be_bytes().to_vec(), pull)]);
    let keys: Vec<&[u8]> = bad.iter().map(|record| &record.key[..]).collect();
    assert_eq!(keys, [&2u64.to_be_bytes()[..], b"three"]);
    assert!(bad[0].to_string().starts_with("cannot decode record pulls/2: "), "{}", bad[0]);
}

fn stats_count_records(make: fn() -> Made) {
    let (store, _dir) = make();
    store
        .apply(Batch::new().put(Table::Pulls, "a", "1").put(Table::Pulls, "b", "1").put(
            Table::Leases,
            "a",
            "1",
        ))
        .unwrap();
    store
        .apply(Batch::new().put(Table::Pulls, "a", "2").delete(Table::Pulls, "b").delete(Table::Pulls, "c"))
        .unwrap();
    let stats = store.stats();
    let counts: BTreeMap<&str, u64> = stats.tables.iter().map(|(name, count)| (&name[..], *count)).collect();
    let expected =
        [("endpoints", 0), ("heartbeats", 0), ("leases", 1), ("meta", 0), ("pulls", 1), ("settings", 0)];
    assert_eq!(counts, BTreeMap::from(expected));
    assert_eq!(stats.schema_version, keelson_storage::SCHEMA_VERSION);
    assert!(stats.size_bytes > 0);
    assert_eq!(stats.last_error, None);
}

fn batches_of_many_threads_stay_whole(make: fn() -> Made) {
    let (store, _dir) = make();
    std::thread::scope(|scope| {
        for writer in 0..4u64 {
            let store = &store;
            scope.spawn(move || {
                for round in 0..25u64 {
                    let value = format!("{writer}.{round}");
                    let mut batch = Batch::new();
                    for key in 0..10u64 {
                        batch.put(Table::ALL[key as usize % 4], key.to_be_bytes(), value.clone());
                    }
                    store.apply(&batch).unwrap();
                    let seen = store.get(Table::Meta, &0u64.to_be_bytes()).unwrap().unwrap();
                    assert!(!seen.is_empty());
                }
            });
        }
    });
    let seen = content(&*store);
    assert_eq!(seen.len(), 10);
    let first = seen.values().next().unwrap();
    assert!(seen.values().all(|value| value == first), "{seen:?}");
}

fn any_history_agrees_with_a_map(make: fn() -> Made) {
    let op = (0..Table::ALL.len(), proptest::collection::vec(0u8..4, 0..3), prop::option::of(0usize..40_000));
    let history = proptest::collection::vec(proptest::collection::vec(op, 0..12), 1..8);
    proptest!(ProptestConfig::with_cases(24), |(history in history)| {
        let (store, dir) = make();
        let mut model = Content::new();
        for ops in history {
            let mut batch = Batch::new();
            for (table, key, value) in ops {
                let table = Table::ALL[table];
                match value {
                    Some(length) => {
                        let value = vec![length as u8; length];
                        batch.put(table, key.clone(), value.clone());
                        model.insert((table, key), value);
                    }
                    None => {
                        batch.delete(table, key.clone());
                        model.remove(&(table, key));
                    }
                }
            }
            store.apply(&batch).unwrap();
            prop_assert!(content(&*store) == model);
        }
        drop(store);
        if let Some(dir) = dir {
            let again = open(dir.path()).unwrap();
            prop_assert_eq!(&again.outcome, &keelson_storage::Outcome::Opened);
            prop_assert!(content(&*again.store) == model);
        }
    });
}
