//! State of the endpoints outside of the state folder.
//!
//! Owns: [`Marker`], a file in the agent's folder under `/run` with the last published revision. In: revisions that
//! are about to be published. Out: whether they are noted, and so may be published before they are on disk; the reason why a
//! state on disk must not continue under its instance ID, if there is one.
//!
//! An agent that is killed between the publication of a revision and its write has an older revision on disk. After a
//! boot, what was written without being synced may be lost.
//!
//! A state folder that was restored from a backup has an older revision. The agent would reuse the numbers of later
//! revisions for other content, and a client that has one of those would consider itself up to date. The folder alone
//! does not reveal this. `/run` is in no backup, is empty after a boot, and outlives every agent process.

use std::{
    fs::{File, OpenOptions},
    io::{self, Read as _},
    os::unix::fs::{FileExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
};

/// Maximum number of bytes read; a marker has about a hundred.
const MAX_BYTES: u64 = 4096;

#[derive(Debug, Clone, PartialEq, Eq)]
struct Mark {
    boot_id: String,
    instance_id: u64,
    rev: u64,
}

impl Mark {
    /// One line. Its length depends only on the boot ID, so one write replaces it entirely.
    fn line(&self) -> String {
        format!("keelson-endpoints 1 {:016x} {:016x} {}\n", self.instance_id, self.rev, self.boot_id)
    }

    fn parse(text: &str) -> Option<Self> {
        let line = text.strip_prefix("keelson-endpoints 1 ")?.strip_suffix('\n')?;
        let (instance_id, rest) = line.split_once(' ')?;
        let (rev, boot_id) = rest.split_once(' ')?;
        let number = |text: &str| u64::from_str_radix(text, 16).ok();
        Some(Self { boot_id: boot_id.to_owned(), instance_id: number(instance_id)?, rev: number(rev)? })
    }
}

/// Why a state on disk must not continue under its instance ID; `None`: it may.
fn mismatch(mark: Option<&Mark>, boot_id: &str, instance_id: u64, rev: u64) -> Option<String> {
    match mark {
        None => Some("no record of the served instance since the node booted".to_owned()),
        Some(mark) if mark.boot_id != boot_id => {
            Some("the node has booted since the state was served".to_owned())
        }
        Some(mark) if mark.instance_id != instance_id => Some(
            "another instance was served since the node booted: the agent was killed before it had written it, \
             or the state directory was replaced or restored"
                .to_owned(),
        ),
        Some(mark) if mark.rev > rev => Some(format!(
            "revision {} was served since the node booted, but the state directory has revision {rev}: the \
             agent was killed before it had written it, or it was restored from a backup",
            mark.rev
        )),
        Some(_) => None,
    }
}

fn read(path: &Path) -> io::Result<String> {
    let mut text = String::new();
    File::open(path)?.take(MAX_BYTES).read_to_string(&mut text)?;
    Ok(text)
}

#[derive(Debug)]
pub struct Marker {
    path: PathBuf,
    boot_id: String,
    file: Option<File>,
    /// What this process has written to the file.
    written: Option<(u64, u64)>,
    is_failing: bool,
}

impl Marker {
    /// The file may be missing; its folder should exist.
    #[must_use]
    pub fn new(path: PathBuf, boot_id: String) -> Self {
        Self { path, boot_id, file: None, written: None, is_failing: false }
    }

    /// Why a state on disk must not continue under its instance ID; `None`: it may. An unreadable file counts as
    /// missing.
    pub(super) fn mismatch(&self, instance_id: u64, rev: u64) -> Option<String> {
        let mark = read(&self.path).ok().and_then(|text| Mark::parse(&text));
        mismatch(mark.as_ref(), &self.boot_id, instance_id, rev)
    }

    /// Records a revision before it is published. Returns whether it may be published before it is on disk: not if this
    /// failed, and not if a boot could not be told. If it failed, clients receive the full state after the next start.
    pub(super) fn note(&mut self, instance_id: u64, rev: u64) -> bool {
        let is_noted = self.written == Some((instance_id, rev)) || self.try_note(instance_id, rev);
        is_noted && !self.boot_id.is_empty()
    }

    fn try_note(&mut self, instance_id: u64, rev: u64) -> bool {
        match self.write(instance_id, rev) {
            Ok(()) => (self.written, self.is_failing) = (Some((instance_id, rev)), false),
            Err(error) => {
                self.file = None;
                if !std::mem::replace(&mut self.is_failing, true) {
                    let path = self.path.display();
                    tracing::warn!(%path, %error, "cannot record the served revision; the next start uses a \
                                                   new instance ID");
                }
            }
        }
        !self.is_failing
    }

    fn write(&mut self, instance_id: u64, rev: u64) -> io::Result<()> {
        let mark = Mark { boot_id: self.boot_id.clone(), instance_id, rev };
        let line = mark.line();
        let file = match &self.file {
            Some(file) => file,
            None => {
                let mut options = OpenOptions::new();
                let file = options.write(true).create(true).truncate(false).mode(0o600).open(&self.path)?;
                // A line of another program or version may be longer.
                file.set_len(line.len() as u64)?;
                self.file.insert(file)
            }
        };
        // A process that is killed leaves either the old line or the new one.
        file.write_all_at(line.as_bytes(), 0)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn e12_a_state_continues_unless_a_later_one_was_served_in_this_boot() {
        let mark = |boot: &str, instance_id, rev| Mark { boot_id: boot.into(), instance_id, rev };
        for (name, mark, says) in [
            ("the newest", Some(mark("b", 7, 5)), None),
            ("killed after the write, before the note", Some(mark("b", 7, 4)), None),
            ("a backup of before", Some(mark("b", 7, 6)), Some("revision 6 was served")),
            ("a backup of another instance", Some(mark("b", 8, 2)), Some("replaced or restored")),
            ("killed with a new instance ID, before its write", Some(mark("b", 8, 5)), Some("was killed")),
            ("a boot", Some(mark("a", 7, 5)), Some("booted")),
            ("/run was emptied", None, Some("no record")),
        ] {
            let mismatch = mismatch(mark.as_ref(), "b", 7, 5);
            assert_eq!(mismatch.is_some(), says.is_some(), "{name}: {mismatch:?}");
            assert!(mismatch.unwrap_or_default().contains(says.unwrap_or_default()), "{name}");
        }
    }

    #[test]
    fn e12_a_marker_survives_its_process_and_an_invalid_one_is_ignored() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("endpoints-revision");
        let boot = "3c1f0a0e-0000-4000-8000-000000000001";
        let marker = || Marker::new(path.clone(), boot.into());
        assert!(marker().mismatch(7, 5).is_some_and(|why| why.contains("no record")));
        let mut first = marker();
        for rev in [1, 5, u64::MAX, 5] {
            first.note(7, rev);
        }
        assert_eq!(marker().mismatch(7, 5), None);
        assert!(marker().mismatch(7, 4).is_some_and(|why| why.contains("revision 5 was served")));
        assert!(
            Marker::new(path.clone(), "another".into())
                .mismatch(7, 5)
                .is_some_and(|why| why.contains("booted"))
        );
        for garbage in ["", "keelson-endpoints 1 7 5", "keelson-endpoints 2 0 0 x\n", "\u{0}\u{1}"] {
            fs::write(&path, garbage).expect("writes");
            assert!(marker().mismatch(7, 5).is_some_and(|why| why.contains("no record")), "{garbage:?}");
        }
        fs::write(&path, "x".repeat(1000)).expect("writes");
        marker().note(7, 6);
        assert_eq!(marker().mismatch(7, 6), None, "what was longer is replaced");
        // Without the folder, only the marker is missing.
        let mut nowhere = Marker::new(folder.path().join("no/such"), boot.into());
        nowhere.note(7, 6);
        assert!(nowhere.mismatch(7, 6).is_some());
    }
}
