//! A process that applies numbered batches is killed at random moments: every acknowledged batch is present, and of
//! the batch in flight everything or nothing.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::print_stdout)]

#[path = "common/mod.rs"]
mod common;

use std::io::{BufRead as _, BufReader, Write as _};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use keelson_storage::{Batch, Outcome, StateStore, Table, open};
use libtest_mimic::{Arguments, Trial};
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};

const ROUNDS: u64 = 50;
const CHILD: &str = "--apply-batches-below";
const MIGRATIONS: u64 = 20;
const OPENER: &str = "--open";

fn main() {
    let args: Vec<String> = std::env::args().collect();
    if let Some(at) = args.iter().position(|arg| arg == CHILD) {
        apply_for_ever(Path::new(&args[at + 1]));
    }
    if let Some(at) = args.iter().position(|arg| arg == OPENER) {
        drop(open(Path::new(&args[at + 1])).unwrap());
        return;
    }
    let trials = [
        ("killed_while_writing", killed_while_writing as fn()),
        ("killed_while_migrating", killed_while_migrating),
    ];
    let trials = trials.map(|(name, run)| {
        Trial::test(name, move || {
            run();
            Ok(())
        })
    });
    libtest_mimic::run(&Arguments::from_args(), trials.into()).exit();
}

fn killed_while_writing() {
    let dir = tempfile::tempdir().unwrap();
    let mut random = StdRng::seed_from_u64(7);
    let (mut acknowledged, mut in_flight_kept, mut acknowledged_now) = (0, 0, 0);
    for round in 0..ROUNDS {
        let first = acknowledged;
        acknowledged = kill_one(dir.path(), &mut random).max(acknowledged);
        acknowledged_now += acknowledged - first;
        let opened = open(dir.path()).unwrap();
        assert!(
            matches!(opened.outcome, Outcome::Opened | Outcome::Created),
            "round {round}: {:?}",
            opened.outcome
        );
        let found = whole_batch(&*opened.store);
        assert!(
            found == acknowledged || found == acknowledged + 1,
            "round {round}: {acknowledged} were acknowledged, {found} are there"
        );
        in_flight_kept += found - acknowledged;
        acknowledged = found;
    }
    assert!(
        acknowledged_now > ROUNDS,
        "the process got to work: {acknowledged_now} batches in {ROUNDS} rounds"
    );
    println!(
        "kill: {ROUNDS} rounds ok, {acknowledged_now} batches acknowledged, {in_flight_kept} unacknowledged ones kept"
    );
}

/// A migration that is killed at random moments is complete in the end.
fn killed_while_migrating() {
    let template = tempfile::tempdir().unwrap();
    common::version_1(template.path());
    let mut random = StdRng::seed_from_u64(8);
    let (mut old, mut new) = (0, 0);
    for round in 0..MIGRATIONS {
        let dir = tempfile::tempdir().unwrap();
        common::copy_dir(&template.path().join("state"), &dir.path().join("state"));
        for _ in 0..2 {
            let child = Command::new(std::env::current_exe().unwrap()).arg(OPENER).arg(dir.path()).spawn();
            std::thread::sleep(Duration::from_micros(random.random_range(0..25_000)));
            kill(&mut Some(child.unwrap()));
        }
        let opened = open(dir.path()).unwrap();
        match opened.outcome {
            Outcome::Migrated { from: 1, to: 2 } => old += 1,
            Outcome::Opened => new += 1,
            other => panic!("round {round}: {other:?}"),
        }
        let pulls = opened.store.scan(Table::Pulls).unwrap();
        assert_eq!(pulls.len(), 120, "round {round}");
        assert!(pulls.iter().all(|(key, value)| key.len() == 8 && value.starts_with(b"{\"id\":")), "{round}");
        assert_eq!(opened.store.scan(Table::Meta).unwrap().len(), 1, "round {round}");
    }
    println!("kill: {MIGRATIONS} migrations ok, {old} run again, {new} done before the kill");
}

/// Starts the process, kills it a moment later, and returns the last batch it acknowledged.
fn kill_one(dir: &Path, random: &mut StdRng) -> u64 {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .arg(CHILD)
        .arg(dir)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    // Most kills occur while it writes, some while it opens the store.
    let delay = Duration::from_micros(random.random_range(0..60_000));
    let mut child = Some(child);
    let mut last = 0;
    if random.random_bool(0.2) {
        std::thread::sleep(delay);
        kill(&mut child);
    }
    let mut begun = None;
    for line in lines {
        let Ok(number) = line.unwrap().parse() else { continue };
        last = number;
        let begun = begun.get_or_insert_with(std::time::Instant::now);
        if begun.elapsed() >= delay {
            kill(&mut child);
        }
    }
    kill(&mut child);
    last
}

fn kill(child: &mut Option<std::process::Child>) {
    if let Some(mut child) = child.take() {
        child.kill().unwrap();
        child.wait().unwrap();
    }
}

/// The child process: every batch rewrites all 40 records with its number, some of them large, and deletes one.
fn apply_for_ever(dir: &Path) -> ! {
    let opened = open(dir).unwrap();
    let mut out = std::io::stdout();
    for number in whole_batch(&*opened.store) + 1.. {
        let mut batch = Batch::new();
        for record in 0..40u64 {
            let table = Table::ALL[record as usize % Table::ALL.len()];
            let length = if record == 7 && number % 50 == 0 { 150_000 } else { 300 };
            batch.put(table, record.to_be_bytes(), value(number, length));
        }
        batch.delete(Table::Meta, b"odd").put(Table::Meta, b"even", "");
        if number % 2 == 1 {
            batch.delete(Table::Meta, b"even").put(Table::Meta, b"odd", "");
        }
        opened.store.apply(&batch).unwrap();
        writeln!(out, "{number}").unwrap();
        out.flush().unwrap();
    }
    std::process::exit(0)
}

fn value(number: u64, length: usize) -> Vec<u8> {
    number.to_be_bytes().into_iter().cycle().take(length).collect()
}

/// The number of the present batch, all of whose records must be present.
fn whole_batch(store: &dyn StateStore) -> u64 {
    let mut records: Vec<Vec<u8>> = Vec::new();
    let mut marks = Vec::new();
    for table in Table::ALL {
        for (key, value) in store.scan(*table).unwrap() {
            if key.len() == 8 { records.push(value) } else { marks.push(key) }
        }
    }
    let Some(first) = records.first() else {
        assert!(marks.is_empty());
        return 0;
    };
    assert_eq!(records.len(), 40);
    let number = u64::from_be_bytes(first[..8].try_into().unwrap());
    for record in &records {
        assert_eq!(record, &value(number, record.len()), "batch {number} is incomplete");
    }
    assert_eq!(marks, [if number % 2 == 1 { b"odd".to_vec() } else { b"even".to_vec() }]);
    number
}
