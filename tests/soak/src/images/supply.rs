//! Owns: the wanted images. In: arrivals. Out: wants that never run dry while faults are injected.
//!
//! Images come in groups of one to four. Those of a group may share a layer, and every layer belongs to only one group,
//! so that the registry should send it once. When a whole group has arrived, its images are removed from the runtime
//! and from the registry, so that neither disk grows with the length of the run.

use crate::Phase;
use crate::deck::chooser;
use crate::images::test_env::{TestEnv, program};
use crate::timeline::Timeline;
use anyhow::{Context as _, Result};
use keelson_harness::images::{BlobDigest, Image, ImageSpec, LayerSpec};
use rand::rngs::SmallRng;
use rand::seq::IndexedRandom as _;
use rand::{Rng as _, RngExt as _};
use std::collections::{BTreeSet, HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::watch;

#[derive(Debug)]
pub(crate) struct Want {
    /// The name with which it is pulled.
    pub(crate) name: String,
    pub(crate) private: bool,
    group: usize,
}

#[derive(Debug)]
struct Group {
    private: bool,
    images: Vec<Image>,
    missing: usize,
}

#[derive(Clone, Debug)]
pub(crate) struct Layer {
    pub(crate) repo: String,
    pub(crate) size: u64,
}

/// Clones share it.
#[derive(Clone, Debug)]
pub(crate) struct Supply {
    env: Arc<TestEnv>,
    timeline: Timeline,
    seed: u64,
    inner: Arc<Mutex<Inner>>,
}

#[derive(Debug, Default)]
struct Inner {
    direct: VecDeque<Arc<Want>>,
    pods: VecDeque<Arc<Want>>,
    groups: Vec<Group>,
    missing: BTreeSet<String>,
    layers: HashMap<BlobDigest, Layer>,
    arrived: u64,
    wanted_bytes: u64,
}

/// Wants that wait for a caller, so that every caller finds one.
const DIRECT_AHEAD: usize = 6;
/// Attempts to push an image to a registry before the run fails.
const PUSHES: u32 = 10;
const PODS_AHEAD: usize = 2;

/// Sizes of layers in bytes: below and above the first MiB that containerd writes unseen.
const SIZES: [u64; 5] = [64 << 10, 512 << 10, 1 << 20, 3 << 20, 6 << 20];

impl Supply {
    pub(crate) fn new(env: &Arc<TestEnv>, timeline: &Timeline, seed: u64) -> Self {
        Self { env: env.clone(), timeline: timeline.clone(), seed, inner: Arc::default() }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn take_direct(&self) -> Option<Arc<Want>> {
        self.lock().direct.pop_front()
    }

    pub(crate) fn take_pod(&self) -> Option<Arc<Want>> {
        self.lock().pods.pop_front()
    }

    /// The wanted images that have not arrived.
    pub(crate) fn missing(&self) -> BTreeSet<String> {
        self.lock().missing.clone()
    }

    pub(crate) fn arrived_count(&self) -> u64 {
        self.lock().arrived
    }

    /// Bytes of all layers that were wanted, each counted once.
    pub(crate) fn wanted_bytes(&self) -> u64 {
        self.lock().wanted_bytes
    }

    pub(crate) fn layers(&self) -> HashMap<BlobDigest, Layer> {
        self.lock().layers.clone()
    }

    /// Records the arrival of an image. The last one of a group removes the group.
    pub(crate) async fn arrived(&self, want: &Want) -> Result<()> {
        self.timeline.record("arrived", &want.name);
        let complete = {
            let mut inner = self.lock();
            inner.missing.remove(&want.name);
            inner.arrived += 1;
            let group = inner.groups.get_mut(want.group).context("a want belongs to a group")?;
            group.missing -= 1;
            (group.missing == 0).then(|| (group.private, std::mem::take(&mut group.images)))
        };
        match complete {
            Some((private, images)) => self.remove(private, &images).await,
            None => Ok(()),
        }
    }

    async fn remove(&self, private: bool, images: &[Image]) -> Result<()> {
        let cri = self.env.cri()?;
        let source = self.env.source(private);
        for image in images {
            let name = image.at(source.proxy.address());
            // Faults do not last long; an image that stays takes only some space.
            for _ in 0..20 {
                match tokio::time::timeout(Duration::from_secs(20), cri.remove(&name)).await {
                    Ok(Ok(())) => break,
                    _ => tokio::time::sleep(Duration::from_millis(500)).await,
                }
            }
            source.registry.delete_image(image)?;
        }
        Ok(())
    }

    /// Pushes an image. Blobs that groups have in common, such as equal configs, may be removed with another group
    /// between the push of the blob and that of the manifest; then all of it is pushed again.
    async fn push(&self, private: bool, spec: &ImageSpec) -> Result<Image> {
        let mut left = PUSHES;
        loop {
            left -= 1;
            match self.env.push(private, spec).await {
                Err(error) if left > 0 => self.timeline.record("pushed again", &format!("{error:#}")),
                pushed => return pushed,
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }

    async fn add(&self, rng: &mut SmallRng, number: usize, pods: bool) -> Result<()> {
        let private = !pods && rng.random_bool(0.4);
        let specs = group(rng, number, pods);
        let mut images = Vec::new();
        for spec in &specs {
            images.push(self.push(private, spec).await?);
        }
        let address = self.env.source(private).proxy.address();
        let mut inner = self.lock();
        let group = inner.groups.len();
        for image in &images {
            for layer in image.layers.iter().skip(usize::from(pods)) {
                let known = Layer { repo: image.repo.clone(), size: layer.size };
                if inner.layers.insert(layer.digest.clone(), known).is_none() {
                    inner.wanted_bytes += layer.size;
                }
            }
            let want = Arc::new(Want { name: image.at(address), private, group });
            inner.missing.insert(want.name.clone());
            let queue = if pods { &mut inner.pods } else { &mut inner.direct };
            queue.push_back(want);
        }
        inner.groups.push(Group { private, missing: images.len(), images });
        Ok(())
    }
}

/// The images of a group. Those for pods have the program as their lowest layer, which the runtime has already.
fn group(rng: &mut SmallRng, number: usize, pods: bool) -> Vec<ImageSpec> {
    let count = rng.random_range(1..=if pods { 2 } else { 4 });
    let shared = rng.random_bool(0.6).then(|| layer(rng));
    let kind = if pods { "pod" } else { "direct" };
    let image = |n: usize| {
        let repo = format!("soak/{kind}/{number}-{n}");
        let mut spec = if pods { program(&repo) } else { ImageSpec::new(&repo, &[]) };
        spec.layers.extend(shared.clone());
        spec.layers.extend((0..rng.random_range(1..=3)).map(|_| layer(rng)));
        spec
    };
    (0..count).map(image).collect()
}

fn layer(rng: &mut SmallRng) -> LayerSpec {
    let size = SIZES.choose(rng).copied().unwrap_or(64 << 10);
    LayerSpec::random(size, rng.next_u64())
}

pub(crate) async fn produce(supply: Supply, phases: watch::Receiver<Phase>) -> Result<()> {
    let mut rng = chooser(supply.seed, "supply");
    let mut number = 0;
    while *phases.borrow() == Phase::Faults {
        let (direct, pods) = {
            let inner = supply.lock();
            (inner.direct.len() < DIRECT_AHEAD, inner.pods.len() < PODS_AHEAD)
        };
        if direct || pods {
            number += 1;
            supply.add(&mut rng, number, !direct).await.context("cannot supply images")?;
        } else {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }
    Ok(())
}
