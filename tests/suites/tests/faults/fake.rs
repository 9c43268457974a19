//! Owns: a runtime whose lists may be huge, and whose ten thousand pulls end when the test lets them.

use anyhow::Result;
use keelson_harness::fake_runtime::{FakeAnswers, FakeRuntime};
use keelson_harness::scratch::Scratch;
use keelson_proto::cri::Image;
use std::collections::BTreeSet;
use std::ops::Deref;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::watch;
use tonic::Status;

/// The error of a pull of an image without `good` in its name.
pub(crate) const REFUSAL: &str = "RegistryUnavailable: no such image";

/// A runtime that does not really pull.
pub(crate) struct GatedRuntime {
    server: FakeRuntime,
    shared: RuntimeState,
}

#[derive(Clone)]
struct RuntimeState {
    open: watch::Sender<bool>,
    inner: Arc<Mutex<Inner>>,
}

#[derive(Default)]
struct Inner {
    /// Number of images, and length of each tag.
    list: (usize, usize),
    present: BTreeSet<String>,
    pulls: usize,
    running: usize,
    max_running: usize,
}

impl RuntimeState {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl GatedRuntime {
    /// Starts one below `scratch`. Its pulls wait until [`GatedRuntime::open`].
    pub(crate) fn start(scratch: &Scratch) -> Result<Self> {
        let shared = RuntimeState { open: watch::Sender::new(false), inner: Arc::default() };
        Ok(Self { server: FakeRuntime::start(scratch, shared.clone())?, shared })
    }

    /// Sets the number of images that it lists, and the bytes of each tag.
    pub(crate) fn list(&self, images: usize, bytes: usize) {
        self.shared.lock().list = (images, bytes);
    }

    /// Lets pulls continue, also later ones. Images with `good` in their name arrive, others do not exist.
    pub(crate) fn open(&self) {
        self.shared.open.send_replace(true);
    }

    pub(crate) fn pulls(&self) -> usize {
        self.shared.lock().pulls
    }

    pub(crate) fn max_running(&self) -> usize {
        self.shared.lock().max_running
    }
}

impl Deref for GatedRuntime {
    type Target = FakeRuntime;

    fn deref(&self) -> &FakeRuntime {
        &self.server
    }
}

/// Counts a pull as ended on drop, however it ends.
struct Running(RuntimeState);

impl Drop for Running {
    fn drop(&mut self) {
        self.0.lock().running -= 1;
    }
}

#[tonic::async_trait]
impl FakeAnswers for RuntimeState {
    fn images(&self) -> Vec<Image> {
        let (images, bytes) = self.lock().list;
        let image = |n: usize| {
            let id = format!("sha256:{n:064x}");
            let tag = format!("registry.example/{n}:{}", "t".repeat(bytes));
            Image { id, repo_tags: vec![tag], size: 1, ..Image::default() }
        };
        (0..images).map(image).collect()
    }

    fn image(&self, name: &str) -> Option<Image> {
        let is_present = self.lock().present.contains(name);
        is_present.then(|| Image { id: format!("id of {name}"), size: 1, ..Image::default() })
    }

    async fn pull(&self, name: &str) -> Result<(), Status> {
        {
            let mut inner = self.lock();
            inner.pulls += 1;
            inner.running += 1;
            inner.max_running = inner.max_running.max(inner.running);
        }
        let _running = Running(self.clone());
        // The sender is in `self`.
        let _ = self.open.subscribe().wait_for(|open| *open).await;
        if !name.contains("good") {
            return Err(Status::unknown(REFUSAL));
        }
        self.lock().present.insert(name.to_owned());
        Ok(())
    }

    fn remove(&self, name: &str) {
        self.lock().present.remove(name);
    }
}
