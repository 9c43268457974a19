//! Credentials that change on disk.
//!
//! Owns: [`LinkKeeper`]: the link in use, and when its source is checked and read again. In: requests that need a link,
//! answers of 401, timeouts. Out: the latest [`Link`], and for the observer the content of the credentials that is not
//! secret. If a source becomes unreadable, the last valid link stays in use, and the error is reported. Without a valid
//! one every request fails, and the next request reads the source again.

use std::{
    path::PathBuf,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use keelson_actor_system::cluster::ApiErrorKind;
use tokio::time::Instant;

use crate::{
    answers::Failure,
    identity::{Credential, CredentialsObserver},
    source::{ClusterSource, Loaded, SourceError, Stamp, load},
    transport::{KeepAlive, Link},
};

/// Minimum interval between checks of the files.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// A link, and a number that distinguishes it from earlier ones.
#[derive(Debug, Clone)]
pub(crate) struct HeldLink {
    pub(crate) link: Link,
    generation: u64,
}

/// When to check the source, and what a check means; never waits.
#[derive(Debug, Default)]
struct Memory {
    stamps: Vec<(PathBuf, Stamp)>,
    last_check: Option<Instant>,
    /// A server answered 401: check at the next request, whenever the last check was.
    refused: bool,
    /// The last credentials came from a plugin.
    plugin: bool,
    last_error: Option<String>,
}

impl Memory {
    fn due(&self, now: Instant) -> bool {
        self.refused
            || self.last_check.is_none_or(|last_check| now.duration_since(last_check) >= CHECK_INTERVAL)
    }

    /// Whether to read the source again, given the current stamps of its files.
    fn stale(&self, held: bool, now_seen: &[(PathBuf, Stamp)]) -> bool {
        // After an error the file may be complete by now with the same stamp, or be one that was not known before.
        !held || self.last_error.is_some() || self.stamps != now_seen || (self.refused && self.plugin)
    }
}

#[derive(Debug)]
pub(crate) struct LinkKeeper {
    source: ClusterSource,
    keep_alive: KeepAlive,
    observer: CredentialsObserver,
    held: Mutex<Option<HeldLink>>,
    memory: Mutex<Memory>,
    /// Held while the source is read, so that concurrent requests cause one read.
    reading: tokio::sync::Mutex<()>,
}

impl LinkKeeper {
    pub(crate) fn new(source: ClusterSource, keep_alive: KeepAlive, observer: CredentialsObserver) -> Self {
        Self {
            source,
            keep_alive,
            observer,
            held: Mutex::default(),
            memory: Mutex::default(),
            reading: tokio::sync::Mutex::default(),
        }
    }

    /// The latest link, after a check of the source if one is due.
    pub(crate) async fn link(&self) -> Result<HeldLink, Failure> {
        if self.memory().due(Instant::now()) || self.held().is_none() {
            let _one_at_a_time = self.reading.lock().await;
            // Another request may have checked while this one waited.
            if self.memory().due(Instant::now()) || self.held().is_none() {
                self.check_source().await;
            }
        }
        self.held().clone().ok_or_else(|| {
            let reason = self.memory().last_error.clone();
            Failure::new(ApiErrorKind::Credentials, reason.unwrap_or_else(|| "not read yet".to_owned()))
        })
    }

    /// The server rejected the credentials: they may have been replaced.
    pub(crate) fn mark_rejected(&self) {
        self.memory().refused = true;
    }

    /// Drops the connections of `used`, unless newer ones are in use by now.
    pub(crate) fn drop_connections_of(&self, used: &HeldLink) {
        let mut held = self.held();
        if held.as_ref().is_some_and(|held| held.generation == used.generation) {
            *held = Some(used.next());
        }
    }

    /// Drops the connections in use.
    pub(crate) fn close_connections(&self) {
        let mut held = self.held();
        *held = held.as_ref().map(HeldLink::next);
    }

    /// The server's URL; the source while the URL is not known.
    pub(crate) fn server(&self) -> String {
        self.held().as_ref().map_or_else(|| self.source.to_string(), |held| held.link.server())
    }

    /// `host:port` of the server, if known.
    pub(crate) fn host(&self) -> String {
        self.held().as_ref().map_or_else(String::new, |held| held.link.host())
    }

    async fn check_source(&self) {
        let source = self.source.clone();
        let keep_alive = self.keep_alive;
        let paths: Vec<_> = self.memory().stamps.iter().map(|(path, _)| path.clone()).collect();
        // Read on a blocking thread: files, and the run of a plugin.
        let seen = blocking(move || stamps(paths)).await;
        let Some(seen) = seen else { return };
        let stale = {
            let mut memory = self.memory();
            let stale = memory.stale(self.held().is_some(), &seen);
            memory.last_check = Some(Instant::now());
            memory.refused = false;
            stale
        };
        if !stale {
            return;
        }
        if let Some(read) = blocking(move || read(&source, keep_alive)).await {
            self.take(read);
        }
    }

    fn take(&self, read: Result<Read, SourceError>) {
        let mut memory = self.memory();
        memory.last_check = Some(Instant::now());
        match read {
            Ok(read) => {
                let mut held = self.held();
                if held.is_some() {
                    tracing::info!(source = %self.source, "credentials reloaded");
                }
                let generation = held.as_ref().map_or(0, |held| held.generation + 1);
                *held = Some(HeldLink { link: read.link, generation });
                self.observer.read(read.credentials, read.warnings);
                memory.stamps = read.stamps;
                memory.plugin = read.plugin;
                memory.last_error = None;
            }
            Err(err) => {
                let text = err.to_string();
                if memory.last_error.as_ref() != Some(&text) {
                    tracing::warn!(
                        reason = %text,
                        last_good = self.held().is_some(),
                        "cannot read the credentials; the last valid ones stay in use"
                    );
                }
                self.observer.failed(text.clone());
                memory.last_error = Some(text);
            }
        }
    }

    fn held(&self) -> MutexGuard<'_, Option<HeldLink>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn memory(&self) -> MutexGuard<'_, Memory> {
        self.memory.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl HeldLink {
    fn next(&self) -> Self {
        Self { link: self.link.renewed(), generation: self.generation + 1 }
    }
}

struct Read {
    link: Link,
    stamps: Vec<(PathBuf, Stamp)>,
    plugin: bool,
    credentials: Vec<Credential>,
    warnings: Vec<String>,
}

fn read(source: &ClusterSource, keep_alive: KeepAlive) -> Result<Read, SourceError> {
    let Loaded { files, .. } = load(source)?;
    // The stamps are taken before the content is read: a file that changes in between is read again.
    let stamps = stamps(files);
    let loaded = load(source)?;
    let link = Link::new(source, &loaded, keep_alive)?;
    let Loaded { plugin, credentials, warnings, .. } = loaded;
    Ok(Read { link, stamps, plugin, credentials, warnings })
}

fn stamps(paths: Vec<PathBuf>) -> Vec<(PathBuf, Stamp)> {
    paths
        .into_iter()
        .map(|path| {
            let stamp = Stamp::of(&path);
            (path, stamp)
        })
        .collect()
}

async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Option<T> {
    let done = tokio::task::spawn_blocking(work).await;
    done.inspect_err(|err| tracing::error!(%err, "cannot read the credentials: the task failed")).ok()
}

pub(crate) type SharedLinkKeeper = Arc<LinkKeeper>;

#[cfg(test)]
mod tests {
    use super::*;

    fn memory(last_check: Instant) -> Memory {
        Memory { last_check: Some(last_check), ..Memory::default() }
    }

    #[tokio::test(start_paused = true)]
    async fn files_are_looked_at_once_a_second_and_at_once_after_401() {
        let start = Instant::now();
        assert!(Memory::default().due(start));
        let mut memory = memory(start);
        assert!(!memory.due(start + Duration::from_millis(999)));
        assert!(memory.due(start + CHECK_INTERVAL));
        memory.refused = true;
        assert!(memory.due(start));
    }

    #[tokio::test(start_paused = true)]
    async fn the_source_is_read_again_when_it_has_to_be() {
        let seen = vec![(PathBuf::from("/a"), Stamp::of(std::path::Path::new("/")))];
        let gone = vec![(PathBuf::from("/a"), Stamp::of(std::path::Path::new("/no/such/file")))];
        let mut memory = Memory { stamps: seen.clone(), ..memory(Instant::now()) };
        assert!(!memory.stale(true, &seen));
        assert!(memory.stale(false, &seen), "nothing was ever read");
        assert!(memory.stale(true, &gone), "the file changed");
        memory.refused = true;
        assert!(!memory.stale(true, &seen), "a 401 alone does not make files newer");
        memory.plugin = true;
        assert!(memory.stale(true, &seen), "but a plugin may say something else now");
        memory.refused = false;
        memory.last_error = Some("half-written".into());
        assert!(memory.stale(true, &seen));
    }
}
