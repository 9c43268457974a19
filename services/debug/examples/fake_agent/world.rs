//! The world that the fake agent lives in: images that download themselves.
//!
//! In: ticks. Out: pulls that start, progress, wait, fail and finish, the same on every run.

use std::{
    collections::VecDeque,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use keelson_proto::debug as pb;

/// How often the world moves.
pub(crate) const TICK: Duration = Duration::from_millis(250);

const IMAGES: &[&str] = &[
    "registry.k8s.io/kube-apiserver:v1.36.3",
    "docker.io/library/postgres:17.2",
    "quay.io/prometheus/prometheus:v3.4.0",
    "ghcr.io/acme-research/large-language-model-serving/inference-runtime-cuda12.8-tensorrt@sha256:\
     7d7c1d7aab4bb6a1a3a0b7f1f41e2bbeb0d8a6b1a3a0b7f1f41e2bbeb0d8a6b1",
    "docker.io/library/nginx:1.29",
    "registry.internal.example:5000/team-payments/ledger/settlement-worker:2026.11.21-rc.4",
    "docker.io/library/redis:8",
    "registry.k8s.io/coredns/coredns:v1.13.1",
    "<script>alert(1)</script>.example/evil:latest",
    "quay.io/cilium/cilium:v1.18.2",
];

/// What there is to see.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Scene {
    /// Full: running, queued, held, failed.
    Busy,
    /// Nothing to do.
    Idle,
    /// The runtime is away.
    Down,
}

/// Everything about pulls.
#[derive(Debug)]
pub(crate) struct World {
    pub(crate) scene: Scene,
    pub(crate) limit: Option<u32>,
    pub(crate) running: Vec<pb::Pull>,
    pub(crate) queue: VecDeque<pb::Pull>,
    pub(crate) finished: VecDeque<pb::Pull>,
    next: u64,
}

pub(crate) fn now_ms() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_millis()).unwrap_or_default()
}

fn registry(image: &str) -> String {
    image.split('/').next().unwrap_or_default().into()
}

impl World {
    pub(crate) fn new(scene: Scene) -> Self {
        let mut world = Self {
            scene,
            limit: None,
            running: Vec::new(),
            queue: VecDeque::new(),
            finished: VecDeque::new(),
            next: 1,
        };
        if scene == Scene::Idle {
            return world;
        }
        for index in 0..15 {
            let mut pull = world.request(now_ms() - 97_000 + index * 6_500);
            pull.resumed = index == 1;
            world.queue.push_back(pull);
        }
        world.finish_some();
        world.tick();
        // Readings in the middle, so that there is something to see at once.
        for (pull, part) in world.running.iter_mut().zip([62, 31, 0]) {
            if let Some(progress) = &mut pull.progress {
                progress.bytes_done = progress.bytes_total / 100 * part;
            }
        }
        world
    }

    pub(crate) fn limit(&self) -> u32 {
        self.limit.unwrap_or(3)
    }

    fn request(&mut self, at: i64) -> pb::Pull {
        let id = self.next;
        self.next += 1;
        let image = IMAGES[usize::try_from(id).unwrap_or_default() % IMAGES.len()];
        pb::Pull {
            id,
            image: image.into(),
            registry: registry(image),
            state: if id % 13 == 5 { pb::PullState::Checking } else { pb::PullState::Queued }.into(),
            callers: if id.is_multiple_of(5) { 4 } else { 1 },
            with_credentials: id % 4 == 3,
            pod: [
                "kube-system/kube-apiserver-node-7",
                "payments/settlement-worker-6f7d9c5b8-x2x9q",
                "web/front-0",
            ][usize::try_from(id % 3).unwrap_or_default()]
            .into(),
            requested_unix_ms: at,
            ..Default::default()
        }
    }

    fn finish_some(&mut self) {
        let now = now_ms();
        for (ago, state, error) in [
            (310_000, pb::PullState::Succeeded, ""),
            (190_000, pb::PullState::Cancelled, ""),
            (
                96_000,
                pb::PullState::Failed,
                "rpc error: code = NotFound desc = failed to pull and unpack image \
                 \"registry.internal.example:5000/team-payments/ledger/settlement-worker:2026.11.21-rc.4\": not found",
            ),
            (21_000, pb::PullState::Succeeded, ""),
        ] {
            let mut pull = self.request(now - ago - 64_000);
            pull.started_unix_ms = now - ago - 42_500;
            pull.finished_unix_ms = now - ago;
            pull.attempts = 1 + u32::from(!error.is_empty()) * 3;
            pull.error = error.into();
            pull.callers = 0;
            pull.state = state.into();
            let total = 38_000_000 + pull.id * 91_000_000;
            pull.progress =
                Some(pb::Progress { bytes_done: total, bytes_total: total, ..Default::default() });
            self.finished.push_front(pull);
        }
    }

    /// A quarter of a second passes.
    pub(crate) fn tick(&mut self) {
        if self.scene != Scene::Busy && !(self.scene == Scene::Down && self.running.is_empty()) {
            return;
        }
        self.advance();
        let limit = usize::try_from(self.limit()).unwrap_or(usize::MAX);
        while (limit == 0 || self.running.len() < limit) && !self.queue.is_empty() {
            self.start_next();
        }
        while self.queue.len() < 12 && self.scene == Scene::Busy {
            let pull = self.request(now_ms());
            self.queue.push_back(pull);
        }
        if self.scene == Scene::Down {
            for pull in &mut self.running {
                pull.state = pb::PullState::WaitingForRuntime.into();
            }
        }
    }

    fn start_next(&mut self) {
        let Some(mut pull) = self.queue.pop_front() else { return };
        pull.state = pb::PullState::Running.into();
        pull.started_unix_ms = now_ms();
        pull.attempts = 1 + u32::from(pull.id % 7 == 2);
        pull.progress = (pull.id % 11 != 6).then(|| pb::Progress {
            bytes_total: 60_000_000 + (pull.id % 6) * 400_000_000,
            layers_total: 4 + u32::try_from(pull.id % 9).unwrap_or_default(),
            phase: "resolving".into(),
            ..Default::default()
        });
        self.running.push(pull);
    }

    fn advance(&mut self) {
        let now = now_ms();
        for pull in &mut self.running {
            let Some(progress) = &mut pull.progress else { continue };
            let stalled = pull.id % 6 == 3 && (now / 10_000) % 2 == 0;
            let speed = if stalled { 0 } else { 9_000_000 + (pull.id % 5) * 17_000_000 };
            progress.bytes_per_second = speed;
            progress.idle_ms = if stalled { progress.idle_ms + 250 } else { 0 };
            progress.bytes_done = (progress.bytes_done + speed / 4).min(progress.bytes_total);
            progress.layers_done = u32::try_from(
                u64::from(progress.layers_total) * progress.bytes_done / progress.bytes_total.max(1),
            )
            .unwrap_or_default();
            progress.phase =
                if progress.bytes_done == progress.bytes_total { "unpacking" } else { "downloading" }.into();
        }
        let over = |pull: &pb::Pull| {
            let progress = pull.progress.as_ref();
            progress.map_or(now - pull.started_unix_ms > 9_000, |progress| {
                progress.bytes_done == progress.bytes_total && progress.bytes_total > 0
            })
        };
        let (done, running): (Vec<_>, Vec<_>) = self.running.drain(..).partition(over);
        self.running = running;
        for mut pull in done {
            pull.finished_unix_ms = now;
            pull.callers = 0;
            pull.state =
                if pull.id % 9 == 8 { pb::PullState::Failed } else { pb::PullState::Succeeded }.into();
            if pull.id % 9 == 8 {
                pull.error = "rpc error: code = Unavailable desc = registry answered 503 four times".into();
            }
            self.finished.push_front(pull);
        }
        self.finished.truncate(20);
    }
}
