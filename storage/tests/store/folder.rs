//! The state folder: permissions, lock, and obstacles.

use std::fs;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::process::{Command, Stdio};

use keelson_storage::{Batch, OpenError, Outcome, StateStore as _, Table, open};

use crate::common::{check_opens_with, content, fill, filled};

#[test]
fn a_missing_folder_is_created_for_the_agents_user_only() {
    let dir = tempfile::tempdir().unwrap();
    let state_dir = dir.path().join("var/lib/keelson");
    let opened = open(&state_dir).unwrap();
    assert_eq!(opened.outcome, Outcome::Created);
    for path in [state_dir.clone(), state_dir.join("state")] {
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o700, "{}", path.display());
    }
    let stats = opened.store.stats();
    assert_eq!(stats.backend, "sled");
    assert_eq!(stats.path, Some(state_dir.join("state")));
    assert_eq!(stats.damaged_moved_to, None);
}

#[test]
fn records_survive_many_reopenings() {
    let (dir, expected) = filled();
    for _ in 0..5 {
        check_opens_with(dir.path(), &expected);
    }
}

#[test]
fn a_second_opener_gets_the_holder_of_the_folder() {
    let dir = tempfile::tempdir().unwrap();
    let first = open(dir.path()).unwrap();
    let error = open(dir.path()).unwrap_err();
    match &error {
        OpenError::InUse { path, pid } => {
            assert_eq!(path, dir.path());
            assert_eq!(*pid, Some(std::process::id()));
        }
        other => panic!("{other:?}"),
    }
    let text = error.to_string();
    assert!(text.contains(&format!("process {}", std::process::id())), "{text}");
    assert!(text.contains(dir.path().to_str().unwrap()), "{text}");
    first.store.apply(Batch::new().put(Table::Meta, "still", "works")).unwrap();
    drop(first);
    assert_eq!(open(dir.path()).unwrap().outcome, Outcome::Opened);
}

#[test]
fn a_folder_that_another_process_holds_is_refused_until_that_ends() {
    let dir = tempfile::tempdir().unwrap();
    let mut holder = Command::new("flock")
        .args(["--exclusive", "--no-fork"])
        .arg(dir.path().join("lock"))
        .args(["sh", "-c", "echo held; exec sleep 600"])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    std::io::BufRead::read_line(&mut std::io::BufReader::new(holder.stdout.take().unwrap()), &mut line)
        .unwrap();
    assert_eq!(line, "held\n");
    let error = open(dir.path());
    holder.kill().unwrap();
    holder.wait().unwrap();
    assert!(matches!(error, Err(OpenError::InUse { pid: None, .. })), "{error:?}");
    assert_eq!(open(dir.path()).unwrap().outcome, Outcome::Created);
}

#[test]
fn obstacles_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    fs::write(&file, "").unwrap();
    let text = message(open(&file).unwrap_err());
    assert!(text.contains(file.to_str().unwrap()) && text.contains("state_dir"), "{text}");

    let state_dir = dir.path().join("lock-is-a-folder");
    fs::create_dir_all(state_dir.join("lock")).unwrap();
    let text = message(open(&state_dir).unwrap_err());
    assert!(text.contains("lock-is-a-folder/lock") && text.contains("in its place"), "{text}");

    // sysfs does not allow new folders, not even for root.
    let text = message(open(std::path::Path::new("/sys/keelson")).unwrap_err());
    assert!(text.contains("/sys/keelson"), "{text}");
}

#[test]
fn a_file_or_a_dangling_link_instead_of_the_store_is_moved_aside() {
    for make in [(|path| fs::write(path, "not a store").unwrap()) as fn(&std::path::Path), |path| {
        symlink("/nowhere/at/all", path).unwrap()
    }] {
        let dir = tempfile::tempdir().unwrap();
        make(&dir.path().join("state"));
        let opened = open(dir.path()).unwrap();
        let Outcome::Recovered { moved_to, .. } = opened.outcome else { panic!("{:?}", opened.outcome) };
        assert!(fs::symlink_metadata(moved_to).is_ok());
    }
}

#[test]
fn an_empty_folder_and_an_unfinished_store_are_not_damage() {
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir(dir.path().join("state")).unwrap();
    fs::create_dir_all(dir.path().join("state.new/g1/blobs")).unwrap();
    fs::write(dir.path().join("state.new/g1/db"), "half").unwrap();
    assert_eq!(open(dir.path()).unwrap().outcome, Outcome::Created);
    assert!(!dir.path().join("state.new").exists());
    assert_eq!(open(dir.path()).unwrap().outcome, Outcome::Opened);
}

#[test]
fn an_unfinished_sled_snapshot_is_not_damage() {
    let (dir, expected) = filled();
    for left in [&b""[..], b"half of a snapshot, longer than twelve bytes"] {
        fs::write(dir.path().join("state/g1/snap.00000000FFFFFFFF.generating"), left).unwrap();
        check_opens_with(dir.path(), &expected);
    }
}

#[test]
fn stores_damaged_in_the_same_second_are_all_kept() {
    let dir = tempfile::tempdir().unwrap();
    for _ in 0..5 {
        drop(open(dir.path()).unwrap());
        fs::write(dir.path().join("state/manifest"), "nonsense").unwrap();
    }
    drop(open(dir.path()).unwrap());
    let names =
        fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let damaged: Vec<String> = names.filter(|name| name.starts_with("state.damaged-")).collect();
    assert_eq!(damaged.len(), 5, "{damaged:?}");
    assert!(damaged.iter().all(|name| name.contains('T') && name.contains('Z')), "{damaged:?}");
}

#[test]
fn a_store_that_five_processes_did_not_survive_is_moved_aside() {
    let (dir, expected) = filled();
    let count = dir.path().join("state/opening");
    fs::write(&count, "4\n").unwrap();
    check_opens_with(dir.path(), &expected);
    assert!(!count.exists(), "an opening that came to its end is not counted");
    fs::write(&count, "5\n").unwrap();
    let Outcome::Recovered { reason, .. } = open(dir.path()).unwrap().outcome else { panic!("opened") };
    assert!(reason.contains("5 consecutive processes"), "{reason}");
}

#[test]
fn a_requested_reopening_changes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let opened = open(dir.path()).unwrap();
    let expected = fill(&*opened.store);
    for _ in 0..3 {
        opened.store.reopen().unwrap();
        assert!(content(&*opened.store) == expected);
    }
    assert_eq!(opened.store.stats().last_error, None);
}

/// The error with its sources, as printed by the agent.
fn message(error: OpenError) -> String {
    let mut text = error.to_string();
    let mut source = std::error::Error::source(&error);
    while let Some(error) = source {
        text.push_str(": ");
        text.push_str(&error.to_string());
        source = error.source();
    }
    text
}
