//! The folder on disk.
//!
//! Owns: [`Folder`]: which files exist, what was read of them, and their faults. In: the file system, and [`Hints`]
//! about changes. Out: an up-to-date [`Catalog`], and faults.
//!
//! Everything here blocks, and must run on a blocking thread. Only files whose stamp has changed are read, and only
//! those whose content has changed are parsed.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    fs::{self, File, OpenOptions},
    io::{self, Read as _},
    os::unix::fs::{MetadataExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant, SystemTime},
};

use keelson_endpoint_publisher::{ServiceName, SourceKind};
use nix::fcntl::OFlag;
use sha2::{Digest as _, Sha256};
use tracing::{info, warn};

use super::{
    catalog::{Catalog, FileName},
    document::Fault,
    parse,
    settle::{Due, FilesTiming, Pending, Stamp},
};

/// Maximum number of consecutive scans to find a state that does not change while it is read.
const MAX_ROUNDS: usize = 5;

/// Granularity of file system times: a file that was read within this time after a write may have been written
/// again since without a visible change.
const MAX_TIME_GRANULARITY: Duration = Duration::from_secs(2);

/// What is known of changes without scanning the folder.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(super) struct Hints {
    /// Files that were closed after writing or moved here: they are complete.
    pub(super) complete: HashSet<String>,
    /// Files that a program is writing to.
    pub(super) open: HashSet<String>,
}

impl Hints {
    /// Merges later hints.
    pub(super) fn add(&mut self, later: Self) {
        self.complete.retain(|name| !later.open.contains(name));
        self.open.retain(|name| !later.complete.contains(name));
        self.complete.extend(later.complete);
        self.open.extend(later.open);
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Entry {
    stamp: Stamp,
    link: bool,
}

#[derive(Debug)]
struct Known {
    stamp: Stamp,
    link: bool,
    /// Of the content; `None` if it could not be read.
    hash: Option<[u8; 32]>,
    /// The file may have changed without a visible change of its stamp.
    may_have_changed: bool,
    faults: Vec<Fault>,
}

impl Known {
    /// Whether the file has to be read again although its stamp is unchanged.
    fn must_reread(&self, wall: SystemTime) -> bool {
        self.hash.is_none() || (self.may_have_changed && !is_new(&self.stamp, wall))
    }
}

#[derive(Debug, Default)]
struct Listing {
    files: BTreeMap<FileName, Entry>,
    invalid: Vec<(FileName, Fault)>,
    /// Files that exist and cannot be examined.
    unreadable: BTreeSet<FileName>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct FileFault {
    pub(super) file: FileName,
    pub(super) fault: Fault,
    pub(super) earlier_in_use: bool,
}

/// The result of a scan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Scan {
    /// Scan again after this time for some file.
    pub(super) rescan_after: Option<Duration>,
    /// The folder is new and still being filled: the result is not complete.
    pub(super) filling: bool,
}

#[derive(Debug)]
pub(super) struct Folder {
    path: PathBuf,
    node: ServiceName,
    max_file_bytes: u64,
    timing: FilesTiming,
    pub(super) catalog: Catalog,
    known: BTreeMap<FileName, Known>,
    pending: HashMap<FileName, Pending>,
    open: HashSet<String>,
    invalid: Vec<(FileName, Fault)>,
    identity: Option<(u64, u64)>,
    /// Since when the folder is being filled.
    filling: Option<Instant>,
    logged: BTreeSet<(FileName, u32, String)>,
}

impl Folder {
    pub(super) fn new(path: PathBuf, node_name: &str, max_file_bytes: u64, timing: FilesTiming) -> Self {
        Self {
            path,
            node: ServiceName::new("", node_name),
            max_file_bytes,
            timing,
            catalog: Catalog::default(),
            known: BTreeMap::new(),
            pending: HashMap::new(),
            open: HashSet::new(),
            invalid: Vec::new(),
            identity: None,
            filling: None,
            logged: BTreeSet::new(),
        }
    }

    /// Brings the catalog up to date.
    ///
    /// # Errors
    /// The folder cannot be read; the catalog is not changed.
    pub(super) fn scan(&mut self, hints: Hints, now: Instant, wall: SystemTime) -> io::Result<Scan> {
        self.open.retain(|name| !hints.complete.contains(name));
        self.open.extend(hints.open.into_iter().filter(|name| parse::is_manifest(name)));
        let (mut listing, quiet_in) = match self.begin(now, wall) {
            Ok(begun) => begun,
            Err(error) => {
                self.identity = None;
                return Err(error);
            }
        };
        let mut complete = hints.complete;
        let mut rescan_after = None;
        for round in 1..=MAX_ROUNDS {
            let (due, next) = self.due(&listing, &complete, now, wall);
            rescan_after = next;
            let links = due.iter().any(|name| listing.files.get(name).is_some_and(|entry| entry.link));
            let several = links || due.len() > 1 || !self.missing(&listing).is_empty();
            let mut vanished = false;
            for name in &due {
                if let Some(entry) = listing.files.get(name) {
                    vanished |= !self.read(name, *entry, wall);
                } else {
                    self.forget(name);
                }
            }
            complete.clear();
            if round == MAX_ROUNDS || !(several || vanished) {
                break;
            }
            // Otherwise a rename between two reads would be seen in part.
            let newer = self.list()?;
            if newer.files == listing.files && !vanished {
                break;
            }
            listing = newer;
        }
        self.open.retain(|name| listing.files.contains_key(&**name));
        self.invalid = listing.invalid;
        if let Some(since) = self.filling {
            let left = self.timing.settle_max.saturating_sub(now.saturating_duration_since(since));
            let wait = rescan_after.into_iter().chain(quiet_in).min().filter(|_| !left.is_zero());
            rescan_after = wait.map(|wait| wait.min(left)).or(rescan_after);
            self.filling = wait.and(self.filling);
        }
        self.log();
        Ok(Scan { rescan_after, filling: self.filling.is_some() })
    }

    /// The content of the folder, and, while it is still being filled, when it will have been quiet for long enough.
    fn begin(&mut self, now: Instant, wall: SystemTime) -> io::Result<(Listing, Option<Duration>)> {
        let metadata = fs::metadata(&self.path)?;
        let listing = self.list()?;
        let stamp = stamp(&metadata);
        let identity = Some((stamp.device, stamp.inode));
        if self.identity != identity {
            self.identity = identity;
            self.filling = Some(now);
        }
        let left = age(&stamp, wall).map(|age| self.timing.settle.saturating_sub(age));
        Ok((listing, left.filter(|left| !left.is_zero())))
    }

    fn list(&self) -> io::Result<Listing> {
        let mut listing = Listing::default();
        for entry in fs::read_dir(&self.path)? {
            let entry = entry?;
            let name = entry.file_name();
            let lossy: FileName = name.to_string_lossy().into();
            if !parse::is_manifest(&lossy) {
                continue;
            }
            if name.to_str().is_none() {
                let reason = "the file name is not valid UTF-8; the file is ignored".to_owned();
                listing.invalid.push((lossy, Fault { line: 0, reason }));
                continue;
            }
            let link = entry.file_type().is_ok_and(|kind| kind.is_symlink());
            match fs::metadata(entry.path()) {
                Ok(metadata) if metadata.is_file() => {
                    listing.files.insert(lossy, Entry { stamp: stamp(&metadata), link });
                }
                // Folders in the folder, devices and the like are no manifests.
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::NotFound && !link => {}
                Err(error) if error.kind() == io::ErrorKind::NotFound => {
                    listing.invalid.push((
                        lossy,
                        Fault { line: 0, reason: "the symbolic link has no target".to_owned() },
                    ));
                }
                Err(error) => {
                    listing.unreadable.insert(lossy.clone());
                    listing
                        .invalid
                        .push((lossy, Fault { line: 0, reason: format!("cannot stat the file: {error}") }));
                }
            }
        }
        listing.invalid.sort_by(|a, b| a.0.cmp(&b.0));
        Ok(listing)
    }

    fn missing(&self, listing: &Listing) -> Vec<FileName> {
        let here = |name: &FileName| listing.files.contains_key(name) || listing.unreadable.contains(name);
        self.known.keys().filter(|name| !here(name)).cloned().collect()
    }

    /// Which files to read or drop now, and when to scan again for the others.
    fn due(
        &mut self,
        listing: &Listing,
        complete: &HashSet<String>,
        now: Instant,
        wall: SystemTime,
    ) -> (Vec<FileName>, Option<Duration>) {
        let mut due = Vec::new();
        let mut rescan_after: Option<Duration> = None;
        self.pending.retain(|name, _| listing.files.contains_key(name) || self.known.contains_key(name));
        for (name, entry) in &listing.files {
            let known = self.known.get(name);
            self.catalog.set_leaving(name, false);
            let same = known.is_some_and(|known| known.stamp == entry.stamp);
            if same && !complete.contains(&**name) {
                self.pending.remove(name);
                if known.is_some_and(|known| known.must_reread(wall)) && !self.open.contains(&**name) {
                    due.push(name.clone());
                }
                continue;
            }
            // Links are replaced, never written to: the target of a replaced link is complete.
            let switched = entry.link && known.is_none_or(|known| !known.stamp.same_file(&entry.stamp));
            let old = self.filling.is_some()
                && age(&entry.stamp, wall).is_some_and(|age| age >= self.timing.settle);
            if complete.contains(&**name) || switched || (old && !self.open.contains(&**name)) {
                due.push(name.clone());
                continue;
            }
            let pending =
                self.pending.entry(name.clone()).or_insert_with(|| Pending::new(Some(entry.stamp), now));
            match pending.see(Some(entry.stamp), self.open.contains(&**name), now, &self.timing) {
                Due::Now => due.push(name.clone()),
                Due::In(time) => rescan_after = Some(rescan_after.map_or(time, |other| other.min(time))),
            }
        }
        for name in self.missing(listing) {
            self.open.remove(&*name);
            if self.known.get(&name).is_some_and(|known| known.link) {
                due.push(name);
                continue;
            }
            self.catalog.set_leaving(&name, true);
            let pending = self.pending.entry(name.clone()).or_insert_with(|| Pending::new(None, now));
            match pending.see(None, false, now, &self.timing) {
                Due::Now => due.push(name),
                Due::In(time) => rescan_after = Some(rescan_after.map_or(time, |other| other.min(time))),
            }
        }
        for name in &due {
            self.pending.remove(name);
        }
        (due, rescan_after)
    }

    fn forget(&mut self, name: &FileName) {
        self.known.remove(name);
        self.catalog.remove(name);
    }

    /// Reads a file; returns false if it no longer exists.
    fn read(&mut self, name: &FileName, entry: Entry, wall: SystemTime) -> bool {
        let (stamp, content) = match read(&self.path.join(&**name), self.max_file_bytes) {
            Ok((stamp, content)) => (stamp, Ok(content)),
            Err(ReadError::Io(error)) if error.kind() == io::ErrorKind::NotFound => return false,
            Err(error) => (entry.stamp, Err(error)),
        };
        let may_have_changed = is_new(&stamp, wall);
        let hash = content.as_ref().ok().map(|bytes| Sha256::digest(bytes).into());
        let known = self.known.get_mut(name);
        if let (Some(known), Some(hash)) = (known, hash)
            && known.hash == Some(hash)
        {
            *known = Known {
                stamp,
                link: entry.link,
                hash: Some(hash),
                may_have_changed,
                faults: std::mem::take(&mut known.faults),
            };
            return true;
        }
        let parsed = match content {
            Ok(bytes) => parse::parse(name, &bytes),
            Err(error) => Err(vec![Fault { line: 0, reason: error.to_string() }]),
        };
        let faults = match parsed {
            Ok(mut objects) => {
                // Of Nodes only that of this node is used.
                objects.retain(|object| object.key.0 != SourceKind::Node || object.key.1 == self.node);
                self.catalog.set(name, objects);
                Vec::new()
            }
            Err(faults) => faults,
        };
        self.known.insert(name.clone(), Known { stamp, link: entry.link, hash, may_have_changed, faults });
        true
    }

    /// All faults, in the order of files and lines.
    pub(super) fn faults(&self) -> Vec<FileFault> {
        let broken = self.known.iter().flat_map(|(name, known)| {
            let earlier_in_use = self.catalog.has(name);
            known.faults.iter().map(move |fault| FileFault {
                file: name.clone(),
                fault: fault.clone(),
                earlier_in_use,
            })
        });
        let others = self.invalid.iter().map(|(file, fault)| {
            let earlier_in_use = self.catalog.has(file);
            FileFault { file: file.clone(), fault: fault.clone(), earlier_in_use }
        });
        let shadowed_objects = self.catalog.shadowed_objects().into_iter();
        let others = others.chain(shadowed_objects.map(|(file, fault)| FileFault {
            file,
            fault,
            earlier_in_use: false,
        }));
        let mut faults: Vec<FileFault> = broken.chain(others).collect();
        faults.sort_by(|a, b| (&a.file, a.fault.line).cmp(&(&b.file, b.fault.line)));
        faults
    }

    /// Logs each fault once when it appears, and each file once when it is valid again.
    fn log(&mut self) {
        let mut now = BTreeSet::new();
        for FileFault { file, fault: Fault { line, reason }, earlier_in_use } in self.faults() {
            let fault = (file, line, reason);
            if !self.logged.contains(&fault) {
                let (file, line, reason) = &fault;
                warn!(folder = %self.path.display(), %file, line, %reason, earlier_in_use, "invalid manifest");
            }
            now.insert(fault);
        }
        let before: BTreeSet<&FileName> = self.logged.iter().map(|fault| &fault.0).collect();
        for file in before.into_iter().filter(|file| !now.iter().any(|fault| fault.0 == **file)) {
            info!(folder = %self.path.display(), %file, "manifest valid again");
        }
        self.logged = now;
    }
}

fn stamp(metadata: &fs::Metadata) -> Stamp {
    Stamp {
        device: metadata.dev(),
        inode: metadata.ino(),
        size: metadata.size(),
        modified: (metadata.mtime(), metadata.mtime_nsec()),
        changed: (metadata.ctime(), metadata.ctime_nsec()),
    }
}

/// Time since a file was written; `None` if that is in the future.
fn age(stamp: &Stamp, wall: SystemTime) -> Option<Duration> {
    let now = wall.duration_since(SystemTime::UNIX_EPOCH).ok()?;
    let seconds = u64::try_from(stamp.modified.0).unwrap_or(0);
    let nanos = u32::try_from(stamp.modified.1).unwrap_or(0).min(999_999_999);
    now.checked_sub(Duration::new(seconds, nanos))
}

/// Whether a later write could have the same file system time.
fn is_new(stamp: &Stamp, wall: SystemTime) -> bool {
    age(stamp, wall).is_some_and(|age| age < MAX_TIME_GRANULARITY)
}

#[derive(Debug, thiserror::Error)]
enum ReadError {
    #[error("cannot read the file: {0}")]
    Io(#[from] io::Error),
    #[error("the file is larger than {0} bytes, the maximum size of a manifest")]
    TooLarge(u64),
    #[error("the path is no longer a file")]
    NoFile,
}

fn read(path: &Path, most: u64) -> Result<(Stamp, Vec<u8>), ReadError> {
    // Without NONBLOCK the open would block on a pipe that has replaced the file.
    let file: File = OpenOptions::new().read(true).custom_flags(OFlag::O_NONBLOCK.bits()).open(path)?;
    let metadata = file.metadata()?;
    if !metadata.is_file() {
        return Err(ReadError::NoFile);
    }
    if metadata.size() > most {
        return Err(ReadError::TooLarge(most));
    }
    let mut bytes = Vec::with_capacity(usize::try_from(metadata.size()).unwrap_or(0).saturating_add(1));
    file.take(most.saturating_add(1)).read_to_end(&mut bytes)?;
    if u64::try_from(bytes.len()).unwrap_or(u64::MAX) > most {
        return Err(ReadError::TooLarge(most));
    }
    // The stamp from before the read: if the file was written meanwhile, it is read again.
    Ok((stamp(&metadata), bytes))
}

/// The faults as the API returns them.
pub(super) fn faults_to_proto(faults: &[FileFault]) -> Arc<[keelson_proto::endpoints::FileFault]> {
    let shown = faults.iter().map(|fault| keelson_proto::endpoints::FileFault {
        file: fault.file.to_string(),
        line: fault.fault.line,
        reason: fault.fault.reason.clone(),
        earlier_in_use: fault.earlier_in_use,
    });
    shown.collect()
}
