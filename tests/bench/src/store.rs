//! The store on the disk of a folder: its latency and memory.
//!
//! Owns: its own store. In: the folder. Out: a table.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use keelson_harness::process::resident_kib;
use keelson_storage::{Batch, StateStore as _, Table, open};

use super::quantile;

const RECORDS: u64 = 10_000;

pub(crate) fn store(folder: &Path) -> Result<()> {
    let work = tempfile::tempdir_in(folder).context("cannot make a folder")?;
    let folder = work.path().join("store");
    let memory = resident_kib(std::process::id())?;
    let begun = Instant::now();
    let opened = open(&folder)?;
    let grown = || Ok::<_, anyhow::Error>(resident_kib(std::process::id())?.saturating_sub(memory));
    println!("first open                     {:>10.2?}", begun.elapsed());
    println!("memory, new store              {:>7} KiB", grown()?);
    let store = &opened.store;
    let put = |batch: &mut Batch, id: u64| {
        batch.put(Table::Pulls, id.to_be_bytes(), vec![id.to_le_bytes()[0]; 300]);
    };
    let apply = |ids: &mut dyn Iterator<Item = u64>| {
        let mut batch = Batch::new();
        ids.for_each(|id| put(&mut batch, id));
        store.apply(&batch).context("cannot write")
    };
    times("apply, 1 put of 300 bytes", 500, |round| apply(&mut std::iter::once(round % 30)))?;
    times("apply, batch of 100", RECORDS / 100, |round| apply(&mut (round * 100..round * 100 + 100)))?;
    times("apply, 1 put among 10,000", 500, |round| apply(&mut std::iter::once(round * 7)))?;
    times("get", 500, |round| {
        store.get(Table::Pulls, &(round * 7).to_be_bytes())?.context("no record").map(drop)
    })?;
    times("scan of 10,000", 20, |_| {
        let records = store.scan(Table::Pulls)?.len();
        ensure!(records as u64 == RECORDS, "there are {records} records");
        Ok(())
    })?;
    println!("memory, 10,000 records         {:>7} KiB", grown()?);
    println!("on disk, 10,000 records        {:>7} KiB", store.stats().size_bytes / 1024);
    drop(opened);
    times("open with 10,000 records", 20, |_| open(&folder).map(drop).context("cannot open"))
}

fn times(what: &str, rounds: u64, mut act: impl FnMut(u64) -> Result<()>) -> Result<()> {
    let mut taken = Vec::<Duration>::new();
    for round in 0..rounds {
        let begun = Instant::now();
        act(round)?;
        taken.push(begun.elapsed());
    }
    taken.sort();
    let at = |q| quantile(&taken, q).unwrap_or_default();
    println!("{what:<30} median {:>9.2?}  p99 {:>9.2?}  max {:>9.2?}", at(0.5), at(0.99), at(1.0));
    Ok(())
}
