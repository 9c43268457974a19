//! Measures the store on the disk that holds the given folder (default: the system's temporary folder):
//! `cargo run --release -p keelson-storage --example measure -- [DIR]`.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::print_stdout)]

use std::time::{Duration, Instant};

use keelson_storage::{Batch, StateStore as _, Table, open};

fn main() {
    let base = std::env::args().nth(1).map_or_else(std::env::temp_dir, Into::into);
    let dir = base.join(format!("keelson-measure-{}", std::process::id()));
    let memory = resident_kib();
    let begun = Instant::now();
    let opened = open(&dir).unwrap();
    println!("first open                     {:>10.2?}", begun.elapsed());
    println!("memory, new store              {:>7} KiB", resident_kib() - memory);
    let store = &opened.store;
    times("apply, 1 put of 300 bytes", 500, |round| {
        store
            .apply(Batch::new().put(Table::Pulls, (round % 30).to_be_bytes(), vec![round as u8; 300]))
            .unwrap();
    });
    times("apply, batch of 100", 100, |round| {
        let mut batch = Batch::new();
        for id in 0..100 {
            batch.put(Table::Pulls, (round * 100 + id).to_be_bytes(), vec![id as u8; 300]);
        }
        store.apply(&batch).unwrap();
    });
    times("apply, 1 put among 10,000", 500, |round| {
        store
            .apply(Batch::new().put(Table::Pulls, (round * 7).to_be_bytes(), vec![round as u8; 300]))
            .unwrap();
    });
    times("get", 500, |round| {
        store.get(Table::Pulls, &(round * 7).to_be_bytes()).unwrap().unwrap();
    });
    times("scan of 10,000", 20, |_| assert_eq!(store.scan(Table::Pulls).unwrap().len(), 10_000));
    println!("memory, 10,000 records         {:>7} KiB", resident_kib() - memory);
    println!("on disk, 10,000 records        {:>7} KiB", store.stats().size_bytes / 1024);
    drop(opened);
    times("open with 10,000 records", 20, |_| drop(open(&dir).unwrap()));
    std::fs::remove_dir_all(&dir).unwrap();
}

fn times(what: &str, rounds: u64, mut act: impl FnMut(u64)) {
    let mut taken: Vec<Duration> = (0..rounds)
        .map(|round| {
            let begun = Instant::now();
            act(round);
            begun.elapsed()
        })
        .collect();
    taken.sort();
    let at = |part: f64| taken[((taken.len() - 1) as f64 * part) as usize];
    println!("{what:<30} median {:>9.2?}  p99 {:>9.2?}  max {:>9.2?}", at(0.5), at(0.99), at(1.0));
}

fn resident_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.split_whitespace().next().unwrap().parse().unwrap()
}
