//! A folder of manifests as a source.
//!
//! Owns: [`FilesSource`], which reads a folder of plain Kubernetes manifests, watches it and sends its content to an
//! [`EventSink`], as the API server's source does. In: files. Out: [`SourceEvent`]s, and through
//! [`FilesHandle`] the faults of the files.
//!
//! **What is read.** `*.yaml`, `*.yml` (any number of documents) and `*.json` (any number of objects) directly in the
//! folder, not in its subfolders, as the kubelet does with static pods. Names that begin with a
//! dot are skipped, and so are files that editors leave (`x.yaml~`, `x.yaml.swp`, `x.yaml.tmp`). Objects of kind `v1`
//! Service and Node (only this node's), `discovery.k8s.io/v1` EndpointSlice and
//! `networking.k8s.io/v1` ServiceCIDR are read, also as items of `List` or of a list of their kind; others are ignored.
//! The only default that is filled in is the namespace, `default`.
//!
//! **What is used.** A file is used as a whole. While it is not valid its last valid version stays in use, until it is
//! repaired or deleted; a file that was never valid has none. Of two objects of one name, that of the file whose name
//! sorts first is used.
//!
//! **When it is read.** At once if it was moved into place, or closed after writing; else after it has been quiet for
//! a short time ([`FilesTiming`]). Links are followed; when `..data` of a mounted ConfigMap is switched, all its files
//! change at once. A file that vanished is dropped only after a short time, because many editors move the old one away
//! first. While the folder is missing, the last known content stays, and the health of the kinds says so.
//!
//! ```text
//!  inotify ──hints──► folder (stamps, hashes) ──changed files──► parse ──objects──► catalog ──changes──► delivery ──events──► sink
//!  poll ────────────►
//! ```

mod catalog;
mod delivery;
mod document;
mod folder;
mod locate;
mod node;
mod notice;
mod object;
mod parse;
mod settle;
#[cfg(test)]
mod tests;
mod yaml;

use std::{
    fmt,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant, SystemTime},
};

use keelson_actor_system::cluster::JobHealth;
use keelson_endpoint_publisher::EventSink;
use keelson_proto::{endpoints::FileFault, unix_ms};
use tokio::time::sleep;
use tracing::{info, warn};

use self::{
    delivery::Delivery,
    folder::{Folder, Hints, Scan},
    notice::{NoticeResult, Notices},
};

pub use self::settle::FilesTiming;

#[cfg(doc)]
use keelson_endpoint_publisher::SourceEvent;

/// Default of [`FilesParts::max_file_bytes`].
pub const MAX_FILE_BYTES: u64 = 32 * 1024 * 1024;

/// Minimum interval between reads of notices while a program is writing.
const WRITING_PAUSE: Duration = Duration::from_millis(5);

/// Maximum pause after a scan.
const MAX_REST: Duration = Duration::from_millis(250);

#[derive(Clone)]
pub struct FilesParts {
    /// Need not exist.
    pub folder: PathBuf,
    pub node_name: String,
    pub sink: Arc<dyn EventSink>,
    /// Maximum size of a file in bytes.
    pub max_file_bytes: u64,
    /// Use inotify. On file systems without notices, changes are found by a scan every [`FilesTiming::poll`].
    pub notices: bool,
    pub timing: FilesTiming,
}

impl FilesParts {
    /// With default limits.
    #[must_use]
    pub fn new(folder: PathBuf, node_name: String, sink: Arc<dyn EventSink>) -> Self {
        let timing = FilesTiming::default();
        Self { folder, node_name, sink, max_file_bytes: MAX_FILE_BYTES, notices: true, timing }
    }
}

impl fmt::Debug for FilesParts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FilesParts")
            .field("folder", &self.folder)
            .field("node_name", &self.node_name)
            .finish()
    }
}

#[derive(Debug)]
struct Shared {
    place: String,
    faults: Mutex<Arc<[FileFault]>>,
}

/// The faults of a source. Cheap to clone; returns the last ones when the source is gone.
#[derive(Debug, Clone)]
pub struct FilesHandle(Arc<Shared>);

impl FilesHandle {
    /// All faults, ordered by file name and line.
    #[must_use]
    pub fn faults(&self) -> Vec<FileFault> {
        self.0.faults.lock().unwrap_or_else(PoisonError::into_inner).to_vec()
    }

    #[must_use]
    pub fn place(&self) -> &str {
        &self.0.place
    }
}

/// A folder of manifests as a source. A clone that runs after this one failed has the same handles.
#[derive(Clone)]
pub struct FilesSource {
    parts: FilesParts,
    shared: Arc<Shared>,
}

impl fmt::Debug for FilesSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("FilesSource").field(&self.parts).finish()
    }
}

type Found = Result<Scan, String>;

fn locked(folder: &Mutex<Folder>) -> MutexGuard<'_, Folder> {
    folder.lock().unwrap_or_else(PoisonError::into_inner)
}

impl FilesSource {
    #[must_use]
    pub fn new(parts: FilesParts) -> Self {
        let shared = Shared { place: parts.folder.display().to_string(), faults: Mutex::new(Arc::new([])) };
        Self { parts, shared: Arc::new(shared) }
    }

    #[must_use]
    pub fn handle(&self) -> FilesHandle {
        FilesHandle(Arc::clone(&self.shared))
    }

    /// Reads, watches and sends until it is dropped; does not return.
    pub async fn run(self) {
        let FilesParts { folder: path, node_name, sink, max_file_bytes, notices, timing } = self.parts;
        info!(folder = %path.display(), "reading manifests");
        let folder = Folder::new(path.clone(), &node_name, max_file_bytes, timing);
        let mut running = Running {
            folder: Arc::new(Mutex::new(folder)),
            watch: Watch { path, wanted: notices, notices: None, is_logged: false },
            delivery: Delivery::new(sink, node_name),
            health: JobHealth::Pending,
            ready: false,
            shared: self.shared,
            timing,
        };
        let mut hints = Hints::default();
        loop {
            let began = Instant::now();
            let wait = running.scan(std::mem::take(&mut hints)).await;
            // Files that change without pause take at most half of the time.
            let rest = began.elapsed().min(MAX_REST);
            sleep(rest).await;
            hints = running.wait(wait.saturating_sub(rest)).await;
        }
    }
}

/// The kernel's notices, if they are available.
struct Watch {
    path: PathBuf,
    wanted: bool,
    notices: Option<Notices>,
    /// The failure to watch was logged.
    is_logged: bool,
}

impl Watch {
    /// Watches the folder before it is scanned, so that every later change is noticed.
    fn follow(&mut self) {
        if !self.wanted || !self.path.is_dir() {
            self.notices = None;
            return;
        }
        let following = match self.notices.take() {
            Some(notices) => Ok(notices),
            None => Notices::new(),
        };
        let followed = following.and_then(|mut notices| notices.follow(&self.path).map(|()| notices));
        match followed {
            Ok(notices) => {
                self.notices = Some(notices);
                self.is_logged = false;
            }
            Err(error) if !std::mem::replace(&mut self.is_logged, true) => {
                warn!(
                    folder = %self.path.display(),
                    %error,
                    "cannot watch the manifests directory with inotify; polling it instead; raise \
                     fs.inotify.max_user_instances and max_user_watches"
                );
            }
            Err(_) => {}
        }
    }

    async fn next(&mut self) -> NoticeResult {
        let Some(notices) = &self.notices else { return std::future::pending().await };
        match notices.next().await {
            Ok(noticed) => noticed,
            Err(error) => {
                warn!(folder = %self.path.display(), %error, "inotify events were lost; watching the \
                                                              manifests directory again");
                self.notices = None;
                std::future::pending().await
            }
        }
    }
}

struct Running {
    folder: Arc<Mutex<Folder>>,
    watch: Watch,
    delivery: Delivery,
    health: JobHealth,
    /// The folder was read completely at least once.
    ready: bool,
    shared: Arc<Shared>,
    timing: FilesTiming,
}

impl Running {
    /// Scans the folder and sends the changes; returns the maximum wait until the next scan.
    async fn scan(&mut self, hints: Hints) -> Duration {
        self.watch.follow();
        let found = self.read(hints).await;
        let wait = match &found {
            Ok(scan) => scan.rescan_after.unwrap_or(self.timing.poll).min(self.timing.poll),
            Err(_) => self.timing.poll_missing,
        };
        let folder = Arc::clone(&self.folder);
        let all = move |kind| locked(&folder).catalog.all(kind);
        if found.as_ref().is_ok_and(|scan| !scan.filling) {
            self.ready = true;
            let faults = folder::faults_to_proto(&locked(&self.folder).faults());
            *self.shared.faults.lock().unwrap_or_else(PoisonError::into_inner) = faults;
            let changes = locked(&self.folder).catalog.changes();
            if changes.is_empty() {
                self.delivery.send_empty_changes(&all).await;
            } else {
                self.delivery.send_changes(changes, &all).await;
            }
        } else if self.ready {
            self.delivery.send_empty_changes(&all).await;
        }
        self.report_health(found).await;
        wait
    }

    async fn read(&self, hints: Hints) -> Found {
        let folder = Arc::clone(&self.folder);
        let scanned = tokio::task::spawn_blocking(move || {
            locked(&folder).scan(hints, Instant::now(), SystemTime::now())
        });
        let path: &Path = &self.watch.path;
        match scanned.await {
            Ok(Ok(scan)) => Ok(scan),
            Ok(Err(error)) => Err(format!("cannot read the manifests directory {}: {error}", path.display())),
            Err(error) => {
                Err(format!("cannot read the manifests directory {} completely: {error}", path.display()))
            }
        }
    }

    async fn report_health(&mut self, found: Found) {
        let before = self.health.clone();
        match found {
            Ok(scan) if scan.filling => {}
            Ok(_) => self.health = JobHealth::Healthy,
            Err(reason) => {
                let since_unix_ms = match &self.health {
                    JobHealth::Failing { since_unix_ms, .. } => *since_unix_ms,
                    JobHealth::Pending | JobHealth::Healthy => unix_ms(),
                };
                self.health = JobHealth::Failing { reason, since_unix_ms, refused: false };
            }
        }
        if self.health == before {
            return;
        }
        match &self.health {
            JobHealth::Failing { reason, .. } => {
                warn!(%reason, "cannot read the manifests; the last known ones stay in use");
            }
            JobHealth::Healthy => info!(folder = %self.watch.path.display(), "manifests read"),
            JobHealth::Pending => {}
        }
        self.delivery.health(&self.health).await;
    }

    /// Waits for a reason to scan, for up to `most`.
    async fn wait(&mut self, most: Duration) -> Hints {
        let mut hints = Hints::default();
        let end = sleep(most);
        tokio::pin!(end);
        let mut writing = false;
        loop {
            let noticed = tokio::select! {
                () = &mut end => return hints,
                noticed = self.watch.next() => noticed,
            };
            hints.add(noticed.hints);
            if noticed.is_complete {
                return hints;
            }
            // A file that is being written is scanned after it has had time to settle.
            if !std::mem::replace(&mut writing, true) {
                let settled = tokio::time::Instant::now() + self.timing.settle;
                if settled < end.deadline() {
                    end.as_mut().reset(settled);
                }
            }
            sleep(WRITING_PAUSE).await;
        }
    }
}
