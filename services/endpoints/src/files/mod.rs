//! A folder of manifests as a source.
//!
//! Owns: [`FilesSource`], which reads a folder of plain Kubernetes manifests, keeps watch over it and tells an
//! [`EventSink`] what is in it, as the API server's source does. In: files. Out: [`SourceEvent`]s, and by
//! [`FilesHandle`] what is wrong with which file.
//!
//! **What is read.** `*.yaml`, `*.yml` (any number of documents) and `*.json` (any number of objects) directly in the
//! folder; folders in it are not looked into, as the kubelet does it with static pods. Names that begin with a
//! dot are skipped, and so is what editors leave (`x.yaml~`, `x.yaml.swp`, `x.yaml.tmp`). Of the objects those of kind `v1`
//! Service and Node (the one of this node), `discovery.k8s.io/v1` EndpointSlice and
//! `networking.k8s.io/v1` ServiceCIDR are read, also as items of `List` or of a list of their kind; others are passed
//! over. Nothing is filled in but the namespace, `default`.
//!
//! **What counts.** A file is one whole. When something is wrong with it its last good version stays in use until it is
//! mended or deleted; a file that was wrong from the start has none. Of two objects of one name the one in the
//! file whose name is first counts.
//!
//! **When it is read.** At once when it was moved into place, or closed after writing; else when it has been quiet for
//! a short time ([`FilesTiming`]). Links are followed; `..data` of a mounted ConfigMap that is switched over changes all its files
//! at once. A file that vanished is missed only after a short time, for many editors move the old one away first. While the folder is
//! missing what was last known stays, and the kinds' health says so.
//!
//! ```text
//!  inotify ──hints──► folder (stamps, hashes) ──changed files──► parse ──objects──► catalog ──changes──► teller ──events──► sink
//!  poll ────────────►
//! ```

mod catalog;
mod folder;
mod locate;
mod node;
mod notice;
mod object;
mod parse;
mod say;
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

use keelson_actor_system::{clock::unix_ms, cluster::ChoreHealth};
use keelson_endpoint_publisher::EventSink;
use keelson_proto::endpoints::FileFault;
use tokio::time::sleep;
use tracing::{info, warn};

use self::{
    folder::{Folder, Hints, Look},
    notice::{Noticed, Notices},
    say::Teller,
};

pub use self::settle::FilesTiming;

#[cfg(doc)]
use keelson_endpoint_publisher::SourceEvent;

/// The largest file that is read, in bytes.
pub const MOST_FILE_BYTES: u64 = 32 * 1024 * 1024;

/// While nothing but writing is noticed, notices are not taken more often than this.
const WRITING_PAUSE: Duration = Duration::from_millis(5);

/// The longest rest after a look.
const MOST_REST: Duration = Duration::from_millis(250);

/// What a [`FilesSource`] is made of.
#[derive(Clone)]
pub struct FilesParts {
    /// The folder. It need not exist.
    pub folder: PathBuf,
    /// The name of this node.
    pub node_name: String,
    /// Who is told.
    pub sink: Arc<dyn EventSink>,
    /// The largest file that is read, in bytes; [`MOST_FILE_BYTES`] if there is no reason for another.
    pub max_file_bytes: u64,
    /// Whether the kernel is asked for notices of changes. Where it is known to give none, changes are found by looking
    /// every [`FilesTiming::poll`].
    pub notices: bool,
    /// Intervals; the default unless a test has a reason.
    pub timing: FilesTiming,
}

impl FilesParts {
    /// With the usual limits.
    #[must_use]
    pub fn new(folder: PathBuf, node_name: String, sink: Arc<dyn EventSink>) -> Self {
        let timing = FilesTiming::default();
        Self { folder, node_name, sink, max_file_bytes: MOST_FILE_BYTES, notices: true, timing }
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

/// Shows how the source fares. Cheap to clone; goes on showing the last when the source is gone.
#[derive(Debug, Clone)]
pub struct FilesHandle(Arc<Shared>);

impl FilesHandle {
    /// Everything that is wrong with the files, in the order of names and lines.
    #[must_use]
    pub fn faults(&self) -> Vec<FileFault> {
        self.0.faults.lock().unwrap_or_else(PoisonError::into_inner).to_vec()
    }

    /// The folder.
    #[must_use]
    pub fn place(&self) -> &str {
        &self.0.place
    }
}

/// A folder of manifests as a source. See the module. A clone that runs after this one failed has the same handles.
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

/// What a look found.
type Found = Result<Look, String>;

fn locked(folder: &Mutex<Folder>) -> MutexGuard<'_, Folder> {
    folder.lock().unwrap_or_else(PoisonError::into_inner)
}

impl FilesSource {
    /// A source that has not begun.
    #[must_use]
    pub fn new(parts: FilesParts) -> Self {
        let shared = Shared { place: parts.folder.display().to_string(), faults: Mutex::new(Arc::new([])) };
        Self { parts, shared: Arc::new(shared) }
    }

    /// To look at it while it runs.
    #[must_use]
    pub fn handle(&self) -> FilesHandle {
        FilesHandle(Arc::clone(&self.shared))
    }

    /// Reads, watches and tells until it is dropped; nothing ends it.
    pub async fn run(self) {
        let FilesParts { folder: path, node_name, sink, max_file_bytes, notices, timing } = self.parts;
        info!(folder = %path.display(), "reading manifests");
        let folder = Folder::new(path.clone(), &node_name, max_file_bytes, timing);
        let mut running = Running {
            folder: Arc::new(Mutex::new(folder)),
            watch: Watch { path, wanted: notices, notices: None, complained: false },
            teller: Teller::new(sink, node_name),
            health: ChoreHealth::Starting,
            ready: false,
            shared: self.shared,
            timing,
        };
        let mut hints = Hints::default();
        loop {
            let began = Instant::now();
            let wait = running.look(std::mem::take(&mut hints)).await;
            // Somebody who changes files without end has this work for at most half of the time.
            let rest = began.elapsed().min(MOST_REST);
            sleep(rest).await;
            hints = running.wait(wait.saturating_sub(rest)).await;
        }
    }
}

/// The kernel's notices, as far as they are to be had.
struct Watch {
    path: PathBuf,
    wanted: bool,
    notices: Option<Notices>,
    /// That there are none was said.
    complained: bool,
}

impl Watch {
    /// Sees to it that the folder is watched, before it is looked at: what changes from now on is noticed.
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
                self.complained = false;
            }
            Err(error) if !std::mem::replace(&mut self.complained, true) => {
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

    async fn next(&mut self) -> Noticed {
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
    teller: Teller,
    health: ChoreHealth,
    /// The folder was read whole at least once.
    ready: bool,
    shared: Arc<Shared>,
    timing: FilesTiming,
}

impl Running {
    /// Looks at the folder and tells what is new; returns when to do so again at the latest.
    async fn look(&mut self, hints: Hints) -> Duration {
        self.watch.follow();
        let found = self.read(hints).await;
        let wait = match &found {
            Ok(look) => look.again.unwrap_or(self.timing.poll).min(self.timing.poll),
            Err(_) => self.timing.poll_missing,
        };
        let folder = Arc::clone(&self.folder);
        let all = move |kind| locked(&folder).catalog.all(kind);
        if found.as_ref().is_ok_and(|look| !look.filling) {
            self.ready = true;
            let faults = folder::shown(&locked(&self.folder).faults());
            *self.shared.faults.lock().unwrap_or_else(PoisonError::into_inner) = faults;
            let changes = locked(&self.folder).catalog.changes();
            if changes.is_empty() {
                self.teller.remind(&all).await;
            } else {
                self.teller.tell(changes, &all).await;
            }
        } else if self.ready {
            self.teller.remind(&all).await;
        }
        self.fare(found).await;
        wait
    }

    async fn read(&self, hints: Hints) -> Found {
        let folder = Arc::clone(&self.folder);
        let looked = tokio::task::spawn_blocking(move || {
            locked(&folder).look(hints, Instant::now(), SystemTime::now())
        });
        let path: &Path = &self.watch.path;
        match looked.await {
            Ok(Ok(look)) => Ok(look),
            Ok(Err(error)) => Err(format!("cannot read the manifests directory {}: {error}", path.display())),
            Err(error) => {
                Err(format!("cannot read the manifests directory {} completely: {error}", path.display()))
            }
        }
    }

    async fn fare(&mut self, found: Found) {
        let before = self.health.clone();
        match found {
            Ok(look) if look.filling => {}
            Ok(_) => self.health = ChoreHealth::Well,
            Err(reason) => {
                let since_unix_ms = match &self.health {
                    ChoreHealth::Failing { since_unix_ms, .. } => *since_unix_ms,
                    ChoreHealth::Starting | ChoreHealth::Well => unix_ms(),
                };
                self.health = ChoreHealth::Failing { reason, since_unix_ms, refused: false };
            }
        }
        if self.health == before {
            return;
        }
        match &self.health {
            ChoreHealth::Failing { reason, .. } => warn!("{reason}; the last known manifests stay in use"),
            ChoreHealth::Well => info!(folder = %self.watch.path.display(), "manifests read"),
            ChoreHealth::Starting => {}
        }
        self.teller.health(&self.health).await;
    }

    /// Waits for something to look at, for so long at most.
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
            if noticed.now {
                return hints;
            }
            // The file being written is to be looked at when it has had the time to settle.
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
