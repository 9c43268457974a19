//! The fake agent as the debug endpoint sees it.
//!
//! In: the [`World`], its [`Heartbeats`] and [`Endpoints`]. Out: the documents of the debug API.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use keelson_debug::{AgentView, Check, ConditionError, ViewError};
use keelson_proto::{debug as pb, endpoints, node};
use tokio::sync::watch;

use crate::{
    endpoints::Endpoints,
    heartbeats::Heartbeats,
    world::{Scene, TICK, World, now_ms},
};

/// A view of the world.
#[derive(Debug, Clone)]
pub(crate) struct FakeView {
    world: Arc<Mutex<World>>,
    heartbeats: Arc<Mutex<Heartbeats>>,
    endpoints: Arc<Endpoints>,
    changes: watch::Receiver<u64>,
    started: i64,
}

impl FakeView {
    /// Starts the world.
    pub(crate) fn start(scene: Scene) -> Self {
        let (bump, changes) = watch::channel(0);
        let world = Arc::new(Mutex::new(World::new(scene)));
        let moved = world.clone();
        tokio::spawn(async move {
            loop {
                tokio::time::sleep(TICK).await;
                moved.lock().unwrap_or_else(PoisonError::into_inner).tick();
                if scene == Scene::Busy {
                    bump.send_modify(|n| *n += 1);
                }
            }
        });
        let heartbeats = Arc::new(Mutex::new(Heartbeats::new(scene)));
        let endpoints = Arc::new(Endpoints::new(scene));
        Self { world, heartbeats, endpoints, changes, started: now_ms() - 93_784_000 }
    }

    fn world(&self) -> MutexGuard<'_, World> {
        self.world.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn beats(&self) -> MutexGuard<'_, Heartbeats> {
        self.heartbeats.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn down(&self) -> bool {
        self.world().scene == Scene::Down
    }

    fn limit_now(&self) -> pb::Limit {
        let world = self.world();
        pb::Limit {
            max_parallel_image_pulls: world.limit(),
            configured: 3,
            overridden: world.limit.is_some(),
            when_full: "wait".into(),
            enforced_by: "agent".into(),
            enforce_note: String::new(),
            per_registry: 2,
        }
    }
}

/// What is not ready where everything is away, why, and for how many milliseconds.
const READY_REASONS: [(&str, &str, i64); 2] = [
    ("runtime", "the runtime does not answer on /run/containerd/containerd.sock: connection refused", 12_000),
    (
        "heartbeats",
        "the Lease is not renewed: the API server https://10.96.0.1:443 cannot be reached: connection refused",
        124_000,
    ),
];

impl AgentView for FakeView {
    async fn version(&self) -> pb::GetVersionResponse {
        let down = self.down();
        pb::GetVersionResponse {
            version: env!("CARGO_PKG_VERSION").into(),
            node_name: "worker-7.eu-central-1.compute.internal".into(),
            state_folder_id: "6c0f2b7e91d34a58".into(),
            started_unix_ms: self.started,
            runtime_name: if down { "" } else { "containerd" }.into(),
            runtime_version: if down { "" } else { "v2.4.2" }.into(),
            runtime_endpoint: "unix:///run/containerd/containerd.sock".into(),
            ready: !down,
            not_ready_reasons: if down {
                READY_REASONS.map(|(_, why, _)| why.into()).into()
            } else {
                Vec::new()
            },
        }
    }

    async fn actors(&self) -> Vec<pb::Actor> {
        actors(&self.world(), self.started)
    }

    async fn actor(&self, name: &str) -> Option<pb::Actor> {
        let mut actor = self.actors().await.into_iter().find(|actor| actor.name == name)?;
        let now = now_ms();
        actor.events = (0..12)
            .map(|index| pb::ActorEvent {
                unix_ms: now - (12 - index) * 7_300,
                text: format!("pull {} started: docker.io/library/nginx:1.{index}, 2 callers", 40 + index),
            })
            .collect();
        actor.state_json = r#"{"limit":3,"running":[41,42,43],"queue":{"length":12,"head":44},
            "kept_leases":["keelson-6c0f-12"],"runtime":{"health":"up","content_api":true,"pull_option":false}}"#
            .into();
        Some(actor)
    }

    fn actor_names(&self) -> Vec<String> {
        ["PullCoordinator", "RuntimeClient", "LeaseRenewer", "StatusReporter", "EndpointPublisher"]
            .map(String::from)
            .into()
    }

    async fn pulls(&self, max_queued: u32) -> Result<pb::PullList, ViewError> {
        let limit = self.limit_now();
        let world = self.world();
        let now = now_ms();
        let mut pulls = world.running.clone();
        let listed = world.queue.iter().take(usize::try_from(max_queued).unwrap_or(usize::MAX));
        pulls.extend(listed.zip(1..).map(|(pull, position)| pb::Pull { position, ..pull.clone() }));
        if world.scene == Scene::Busy {
            pulls.push(pb::Pull {
                id: 9_001,
                image: "registry.internal.example:5000/private/held-after-restart:1".into(),
                registry: "registry.internal.example:5000".into(),
                state: pb::PullState::Held.into(),
                with_credentials: true,
                requested_unix_ms: now - 140_000,
                resumed: true,
                ..Default::default()
            });
        }
        let count = |len: usize| u32::try_from(len).unwrap_or(u32::MAX);
        Ok(pb::PullList {
            limit: Some(limit),
            running: count(world.running.len()),
            queued: count(world.queue.len()),
            callers: pulls.iter().map(|pull| pull.callers).sum(),
            oldest_wait_ms: world.queue.front().map_or(0, |pull| now - pull.requested_unix_ms),
            pulls,
            finished: world.finished.iter().cloned().collect(),
            runtime_health: if world.scene == Scene::Down { "down" } else { "up" }.into(),
            runtime_error: if world.scene == Scene::Down { "connection refused" } else { "" }.into(),
            ..pb::PullList::default()
        })
    }

    fn changes(&self) -> watch::Receiver<u64> {
        self.changes.clone()
    }

    fn may_change(&self, _: u32) -> bool {
        true
    }

    async fn limit(&self) -> Result<pb::Limit, ViewError> {
        Ok(self.limit_now())
    }

    async fn set_limit(&self, limit: Option<u32>) -> Result<pb::Limit, ViewError> {
        self.world().limit = limit;
        Ok(self.limit_now())
    }

    async fn storage(&self) -> Result<pb::Storage, ViewError> {
        let table = |name: &str, records| pb::StorageTable { name: name.into(), records };
        Ok(pb::Storage {
            backend: "sled".into(),
            path: "/var/lib/keelson/state".into(),
            schema_version: 1,
            size_bytes: 524_288,
            last_error: String::new(),
            not_open_reason: String::new(),
            not_open_since_unix_ms: 0,
            next_try_unix_ms: 0,
            damaged_moved_to: "/var/lib/keelson/state.damaged-20261121T101500Z".into(),
            tables: vec![table("leases", 4), table("pulls", 16), table("settings", 1)],
        })
    }

    async fn config(&self) -> pb::Config {
        let setting = |key: &str, value: &str, origin: &str, live| pb::Setting {
            key: key.into(),
            value: value.into(),
            origin: origin.into(),
            live,
        };
        pb::Config {
            settings: vec![
                setting("pulls.max_parallel_image_pulls", "3", "/etc/keelson/keelson.toml:7", true),
                setting("pulls.when_full", "\"wait\"", "default", true),
            ],
            feature_gates: vec![pb::FeatureGate {
                name: "PullOption".into(),
                stage: "beta".into(),
                enabled: true,
                default: true,
                description: "The limit travels as a pull option".into(),
            }],
        }
    }

    async fn heartbeats(&self) -> Result<node::Heartbeats, ViewError> {
        Ok(self.beats().now())
    }

    async fn set_condition(&self, condition: node::SetConditionRequest) -> Result<bool, ConditionError> {
        self.beats().set(condition)
    }

    async fn clear_condition(&self, kind: &str) -> Result<(), ConditionError> {
        self.beats().clear(kind)
    }

    async fn endpoints(&self, namespace: &str, max_services: u32) -> Result<endpoints::State, ViewError> {
        Ok(self.endpoints.state(namespace, max_services))
    }

    async fn explain(
        &self,
        namespace: &str,
        name: &str,
    ) -> Result<Option<endpoints::Explanation>, ViewError> {
        Ok(self.endpoints.explain(namespace, name))
    }

    async fn livez(&self) -> Vec<Check> {
        vec![Check { name: "actors".into(), ok: true, message: String::new(), since_unix_ms: self.started }]
    }

    async fn readyz(&self) -> Vec<Check> {
        let ok = !self.down();
        let check = |(name, why, ms): (&str, &str, i64)| Check {
            name: name.into(),
            ok,
            message: if ok { String::new() } else { why.into() },
            since_unix_ms: now_ms() - ms,
        };
        READY_REASONS.map(check).into()
    }

    async fn metrics(&self) -> String {
        let queued = self.world().queue.len();
        format!(
            "# HELP keelson_pulls_queued Pulls that wait.\n# TYPE keelson_pulls_queued gauge\nkeelson_pulls_queued {queued}\n# EOF\n"
        )
    }
}

fn actors(world: &World, started: i64) -> Vec<pb::Actor> {
    let now = now_ms();
    let stats = |message: &str, handled, p99_us| pb::MessageStats {
        message: message.into(),
        handled,
        rejected_busy: u64::from(handled > 100_000) * 3,
        p50_us: p99_us / 7,
        p90_us: p99_us / 3,
        p99_us,
        max_us: p99_us * 4,
    };
    let actor = |name: &str, status: &str, summary: &str, depth| pb::Actor {
        name: name.into(),
        status: status.into(),
        summary: summary.into(),
        mailbox_depth: depth,
        mailbox_capacity: 1024,
        started_unix_ms: started,
        ..Default::default()
    };
    let (running, queued) = (world.running.len(), world.queue.len());
    vec![
        pb::Actor {
            messages: vec![stats("RequestPull", 182_344, 412), stats("PullFinished", 182_329, 96), stats("Progress", 9_344_120, 31)],
            ..actor("PullCoordinator", "running", &format!("{running} running, {queued} queued, limit 3"), 2)
        },
        pb::Actor {
            messages: vec![stats("Pull", 182_344, 1_920), stats("Probe", 31_200, 2_410)],
            restarts: 1,
            last_error: "the runtime closed the connection while 3 pulls ran".into(),
            last_error_unix_ms: now - 7_500_000,
            ..actor("RuntimeClient", "running", "containerd v2.4.2 answers; content API there", 0)
        },
        pb::Actor {
            restarts: 14,
            messages: vec![stats("Tick", 4_211, 2_000_113)],
            last_error: "lease worker-7: the API server answered 409 Conflict: the object has been modified; please apply \
                         your changes to the latest version and try again"
                .into(),
            last_error_unix_ms: now - 4_000,
            ..actor("LeaseRenewer", "restarting", "starts again in 4 s", 871)
        },
        actor("StatusReporter", "off", "no API server is configured", 0),
        actor("EndpointPublisher", "running", "revision 81204: 10000 Services", 0),
    ]
}
