//! What the suites share: a scripted runtime, the agent's parts in one process, and raw clients.
//!
//! Everything runs on one thread on paused time: a hold of 100 s takes no time, and a test that would hang runs out of
//! its virtual hour at once.

pub(crate) mod client;
mod containerd;
mod runtime;
mod tap;

use std::{
    future::Future,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use futures_util::{FutureExt as _, future::BoxFuture};
use keelson_actor_system::{
    clock::Clock,
    file_system::{FileSystem, FileSystemReader},
    inspect::{Mailbox, Recorder},
    supervise,
};
use keelson_cri::{
    front::{self, FrontParts, FrontSettings, Phase},
    runtime::ContainerRuntime,
};
use keelson_proto::cri;
use keelson_pulls::{
    coordinator::{Policy, PullCoordinator, PullCoordinatorParts},
    metrics::Metrics,
    request::CredentialsSalt,
    runtime::{Health, RuntimeClient, RuntimeClientParts},
};
use keelson_serve::unix::{Bound, SocketFile};
use keelson_storage::MemoryStore;
use tokio::{sync::watch, task::JoinHandle};

pub(crate) use client::{Client, EMPTY, RawClient, frame, frame_bytes, unframe};
pub(crate) use containerd::Containerd;
pub(crate) use runtime::{
    Call, FakeRuntime, IMAGE_FS_INFO, IMAGE_STATUS, PULL_IMAGE, VERSION, grpc_head, grpc_ok, grpc_status, on,
};
pub(crate) use tap::Frame;
use tap::{Frames, Tap};

/// How long the front and the pulls hold a call while the runtime is away.
pub(crate) const HOLD: Duration = Duration::from_secs(100);

/// How long a pull waits for the coordinator.
pub(crate) const DECISION: Duration = Duration::from_secs(10);

pub(crate) fn run<F: Future<Output = ()>>(test: F) {
    let runtime = || {
        let mut builder = tokio::runtime::Builder::new_current_thread();
        builder.enable_all().start_paused(true).build().expect("a runtime")
    };
    actix::System::with_tokio_rt(runtime).block_on(async {
        tokio::time::timeout(Duration::from_secs(3600), test).await.expect("the test hangs");
    });
}

pub(crate) async fn until(what: &str, mut holds: impl FnMut() -> bool) {
    for _ in 0..600_000 {
        if holds() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    panic!("waited 10 minutes in vain until {what}");
}

/// The folder of the sockets; the runtime and the agent keep it.
#[derive(Clone)]
pub(crate) struct Sockets(Arc<tempfile::TempDir>);

impl Sockets {
    pub(crate) fn new() -> Self {
        Self(Arc::new(tempfile::tempdir().expect("a folder")))
    }

    pub(crate) fn runtime(&self) -> PathBuf {
        self.0.path().join("runtime.sock")
    }

    fn front(&self) -> PathBuf {
        self.0.path().join("cri.sock")
    }
}

/// A runtime with this handler, the agent in front of it, and a client of the agent.
pub(crate) async fn connect<F, H>(handler: H) -> (FakeRuntime, Agent, Client)
where
    F: Future<Output = ()> + Send + 'static,
    H: Fn(Call) -> F + Send + Sync + 'static,
{
    connect_with(policy(), handler).await
}

pub(crate) async fn connect_with<F, H>(policy: Policy, handler: H) -> (FakeRuntime, Agent, Client)
where
    F: Future<Output = ()> + Send + 'static,
    H: Fn(Call) -> F + Send + Sync + 'static,
{
    let sockets = Sockets::new();
    let runtime = FakeRuntime::start(&sockets, handler);
    let agent = Agent::start_with(&sockets, policy).await;
    let client = agent.client().await;
    (runtime, agent, client)
}

pub(crate) fn policy() -> Policy {
    Policy { hold: HOLD, ..Policy::default() }
}

/// The agent's ID, which its leases carry.
pub(crate) const OWNER: &str = "0123456789abcdef";

/// The real front and the real actors.
pub(crate) struct Agent {
    pub(crate) socket: PathBuf,
    pub(crate) settings: watch::Sender<FrontSettings>,
    pub(crate) phase: watch::Sender<Phase>,
    pub(crate) serving: Option<JoinHandle<()>>,
    pub(crate) pulls: Mailbox<PullCoordinator>,
    pub(crate) health: watch::Receiver<Health>,
    pub(crate) metrics: Metrics,
    _file: SocketFile,
    _sockets: Sockets,
}

struct NoFileSystems;

impl FileSystemReader for NoFileSystems {
    fn file_system(&self, path: PathBuf) -> BoxFuture<'static, Result<FileSystem, String>> {
        std::future::ready(Err(format!("{} is not read in this test", path.display()))).boxed()
    }
}

impl Agent {
    /// Starts the agent; the runtime need not exist yet.
    pub(crate) async fn start(sockets: &Sockets) -> Self {
        Self::start_with(sockets, policy()).await
    }

    pub(crate) async fn start_with(sockets: &Sockets, policy: Policy) -> Self {
        let (clock, metrics) = (Clock::start(), Metrics::default());
        let (health, health_seen) = watch::channel(Health::Unknown);
        let (_, progress_interval) = watch::channel(Duration::from_secs(1));
        let recorder = Recorder::new("RuntimeClient", 32_768);
        let parts = RuntimeClientParts {
            runtime: Arc::new(ContainerRuntime::new(sockets.runtime(), OWNER)),
            file_systems: Arc::new(NoFileSystems),
            clock,
            metrics: metrics.clone(),
            progress_interval,
            health,
            recorder: recorder.clone(),
        };
        let runtime = supervise::start(None, recorder, move |_| RuntimeClient::new(parts));
        let recorder = Recorder::new("PullCoordinator", 32_768);
        let parts = PullCoordinatorParts {
            policy,
            owner: OWNER.into(),
            store: Arc::new(MemoryStore::new()),
            clock,
            runtime,
            metrics: metrics.clone(),
            events: None,
            changes: watch::channel(0).0,
            recorder: recorder.clone(),
        };
        let pulls = supervise::start(None, recorder, move |_| PullCoordinator::new(parts));
        let (settings, live) =
            watch::channel(FrontSettings { hold: HOLD, decision: DECISION, offer_pull_option: true });
        let (phase, phases) = watch::channel(Phase::Serving);
        let parts = FrontParts {
            runtime_socket: sockets.runtime(),
            pulls: pulls.clone(),
            metrics: metrics.clone(),
            settings: live,
            salt: CredentialsSalt::random(),
            own_socket: sockets.front(),
            clients: Arc::default(),
        };
        let socket = sockets.front();
        let (listener, file) = Bound::bind(&socket, 0o600).await.expect("binds").into_parts();
        let serving = Some(tokio::spawn(front::serve(listener, parts, phases)));
        Self {
            socket,
            settings,
            phase,
            serving,
            pulls,
            health: health_seen,
            metrics,
            _file: file,
            _sockets: sockets.clone(),
        }
    }

    pub(crate) async fn client(&self) -> Client {
        Client::connect(&self.socket).await
    }

    pub(crate) async fn runtime_up(&self) {
        until("the runtime is up", || matches!(*self.health.borrow(), Health::Up { .. })).await;
    }

    pub(crate) fn handled(&self, message: &str) -> u64 {
        let messages = self.pulls.recorder().overview().messages;
        messages.iter().find(|of| of.message == message).map_or(0, |of| of.handled)
    }
}

/// A request as the kubelet sends it, with the pod.
pub(crate) fn pull_request(image: &str) -> cri::PullImageRequest {
    let metadata = cri::PodSandboxMetadata {
        name: "web-0".into(),
        uid: "uid-0".into(),
        namespace: "shop".into(),
        attempt: 0,
    };
    cri::PullImageRequest {
        image: Some(cri::ImageSpec { image: image.into(), ..Default::default() }),
        auth: None,
        sandbox_config: Some(cri::PodSandboxConfig { metadata: Some(metadata), ..Default::default() }),
    }
}

/// A channel of tonic, as a second implementation of a client.
pub(crate) async fn tonic_channel(socket: &Path) -> tonic::transport::Channel {
    let socket = socket.to_owned();
    let connect = tower::service_fn(move |_: tonic::transport::Uri| {
        let socket = socket.clone();
        async move { tokio::net::UnixStream::connect(socket).await.map(hyper_util::rt::TokioIo::new) }
    });
    tonic::transport::Endpoint::from_static("http://localhost")
        .connect_with_connector(connect)
        .await
        .expect("connects")
}
