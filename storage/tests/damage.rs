//! For any damage to the files, opening returns every acknowledged record, or moves the store aside and creates an
//! empty one. It never fails, hangs, ends the process or deletes.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::print_stdout)]

#[path = "common/mod.rs"]
mod common;

use std::collections::BTreeMap;
use std::fs::{self, OpenOptions};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use common::{Content, content, copy_dir, files, filled};
use keelson_storage::{Batch, Outcome, StateStore as _, Table, open, panic_is_guarded};
use libtest_mimic::{Arguments, Trial};
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};

const CASES: u64 = 600;

static GUARDED_PANICS: AtomicUsize = AtomicUsize::new(0);
static OTHER_PANICS: Mutex<Vec<String>> = Mutex::new(Vec::new());

fn main() {
    // As the hook of an agent: a panic that is not confined to the storage threads would end the process.
    let print = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        if panic_is_guarded() {
            GUARDED_PANICS.fetch_add(1, Ordering::Relaxed);
        } else {
            print(info);
            OTHER_PANICS.lock().unwrap().push(info.to_string());
        }
    }));
    let trial = Trial::test("damaged_stores_open", || {
        damaged_stores_open();
        Ok(())
    });
    libtest_mimic::run(&Arguments::from_args(), vec![trial]).exit();
}

fn damaged_stores_open() {
    let cases = std::env::var("KEELSON_DAMAGE_CASES").ok().and_then(|n| n.parse().ok()).unwrap_or(CASES);
    let (template, expected) = filled();
    let mut tally = BTreeMap::<String, usize>::new();
    for seed in 0..cases {
        let (what, outcome) = one_case(template.path(), &expected, seed);
        *tally.entry(format!("{what}: {outcome}")).or_default() += 1;
    }
    for (line, count) in &tally {
        println!("{count:5}  {line}");
    }
    println!("guarded panics: {}", GUARDED_PANICS.load(Ordering::Relaxed));
    let sum = |word: &str| -> usize {
        tally.iter().filter(|(line, _)| line.contains(word)).map(|(_, count)| count).sum()
    };
    assert!(sum("whole") > 0, "some damage is harmless (a stale file, a byte that is not in use)");
    assert!(sum("moved aside") > 0, "some damage is not");
    assert!(OTHER_PANICS.lock().unwrap().is_empty(), "no panic outside the guarded threads");
    println!("damage: {cases} cases ok");
}

fn one_case(template: &Path, expected: &Content, seed: u64) -> (&'static str, String) {
    let dir = tempfile::tempdir().unwrap();
    copy_dir(&template.join("state"), &dir.path().join("state"));
    let mut random = StdRng::seed_from_u64(seed);
    let what = damage(&dir.path().join("state"), &mut random);
    let before = files(&dir.path().join("state")).len();
    let opened = match open(dir.path()) {
        Ok(opened) => opened,
        Err(error) => panic!("seed {seed}: {what}: {error:?}"),
    };
    let seen = content(&*opened.store);
    let outcome = match &opened.outcome {
        Outcome::Opened => {
            assert!(seen == *expected, "seed {seed}: {what}: an incomplete store was opened");
            "whole".to_owned()
        }
        Outcome::Recovered { moved_to, reason } => {
            assert!(seen.is_empty(), "seed {seed}: {what}: a new store has records");
            assert!(moved_to.exists(), "seed {seed}: {what}");
            assert_eq!(opened.store.stats().damaged_moved_to.as_ref(), Some(moved_to));
            assert!(!reason.is_empty());
            if moved_to.is_dir() {
                assert!(before.abs_diff(files(moved_to).len()) <= 4, "seed {seed}: {what}: files are gone");
            }
            format!("moved aside: {}", general(reason, dir.path()))
        }
        other => panic!("seed {seed}: {what}: {other:?}"),
    };
    opened.store.apply(Batch::new().put(Table::Meta, "after", "damage")).unwrap();
    let after = content(&*opened.store);
    drop(opened);
    let again = open(dir.path()).unwrap();
    assert_eq!(
        again.outcome,
        Outcome::Opened,
        "seed {seed}: {what}: the second start finds nothing to repair"
    );
    assert!(content(&*again.store) == after, "seed {seed}: {what}");
    (what, outcome)
}

/// A reason without the parts that differ between cases.
fn general(reason: &str, dir: &Path) -> String {
    let reason = reason.replace(dir.to_str().unwrap(), "");
    let reason: String = reason.chars().map(|c| if c.is_ascii_digit() { '9' } else { c }).take(110).collect();
    let mut short = String::new();
    for c in reason.chars() {
        if !(c == '9' && short.ends_with('9')) {
            short.push(c);
        }
    }
    short
}

fn damage(state: &Path, random: &mut StdRng) -> &'static str {
    let all = files(state);
    let (plain, folders): (Vec<PathBuf>, Vec<PathBuf>) = all.into_iter().partition(|path| path.is_file());
    // Mostly the log, which contains the records; sometimes any file.
    let log = plain.iter().find(|path| path.ends_with("db")).unwrap().clone();
    let file = if random.random_bool(0.5) { log } else { pick(&plain, random) };
    let length = fs::metadata(&file).unwrap().len();
    let open = || OpenOptions::new().read(true).write(true).open(&file).unwrap();
    match random.random_range(0..10) {
        0 | 1 => {
            let position = random.random_range(0..length);
            let mut byte = [0];
            let open = open();
            open.read_exact_at(&mut byte, position).unwrap();
            open.write_all_at(&[byte[0] ^ (1 << random.random_range(0..8u32))], position).unwrap();
            "one bit flipped"
        }
        2 => {
            let open = open();
            for _ in 0..20 {
                open.write_all_at(&[random.random()], random.random_range(0..length)).unwrap();
            }
            "20 bytes overwritten"
        }
        3 => {
            let start = random.random_range(0..length);
            let end = random.random_range(start..=length);
            open().write_all_at(&vec![0; (end - start) as usize], start).unwrap();
            "a range zeroed"
        }
        4 => {
            open().set_len(random.random_range(0..length)).unwrap();
            "truncated"
        }
        5 => {
            fs::write(&file, "").unwrap();
            "emptied"
        }
        6 => {
            let garbage: Vec<u8> = (0..length).map(|_| random.random()).collect();
            fs::write(&file, garbage).unwrap();
            "garbage"
        }
        7 => {
            fs::remove_file(&file).unwrap();
            fs::create_dir(&file).unwrap();
            "a folder instead of the file"
        }
        8 => {
            fs::remove_file(&file).unwrap();
            "removed"
        }
        _ => {
            let folder = pick(&folders, random);
            fs::remove_dir_all(&folder).unwrap();
            fs::write(&folder, "not a folder").unwrap();
            "a file instead of the folder"
        }
    }
}

fn pick(paths: &[PathBuf], random: &mut StdRng) -> PathBuf {
    paths[random.random_range(0..paths.len())].clone()
}
