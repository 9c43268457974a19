//! The parts of a running agent.
//!
//! Owns: making them from settings, in order. In: settings and the CRI listener. Out: [`Running`].

use std::{path::PathBuf, sync::Arc};

use keelson_actor_system::{
    clock::Clock,
    inspect::{Mailbox, Recorder},
    supervise,
};
use keelson_config::{Enforce, Gate, Loaded, Settings, WhenFull};
use keelson_cri::{
    front::{FrontParts, FrontSettings},
    runtime::ContainerRuntime,
};
use keelson_host::LinuxHost;
use keelson_pulls::{
    coordinator::{
        HandedState, Inspected, LimitView, NOTICES_WAITING, PodNotice, Policy, PullCoordinator,
        PullCoordinatorParts, write_notices,
    },
    metrics::Metrics,
    request::CredentialsSalt,
    runtime::{Health, RuntimeClient, RuntimeClientParts, RuntimeState},
};
use keelson_storage::DeferredStore;
use tokio::{
    net::UnixListener,
    sync::{mpsc, watch},
};

use super::{
    cluster::Cluster,
    credentials,
    endpoints::{self, EndpointsParts, EndpointsServing},
    front::FrontThread,
    handles::Handle,
    heartbeats::{self, HeartbeatsParts},
    jobs::{self, Job},
    store,
    view::{View, ViewParts},
};

/// The mailbox of the PullCoordinator: larger than any burst a node makes (kubelets run at most a few
/// hundred pods), so that "busy" means trouble; a message is some hundred bytes.
const PULLS_MAILBOX: usize = 32_768;
/// The mailbox of the RuntimeClient: each message belongs to one of the coordinator's.
const RUNTIME_MAILBOX: usize = 32_768;
/// What changes at run time, and what ends.
pub(super) struct Running {
    pub(super) loaded: watch::Sender<Arc<Loaded>>,
    pub(super) pulls: Mailbox<PullCoordinator>,
    pub(super) front: FrontThread,
    /// None while that chore is off.
    pub(super) endpoints: Option<EndpointsServing>,
    pub(super) front_settings: watch::Sender<FrontSettings>,
    pub(super) progress_interval: watch::Sender<std::time::Duration>,
    pub(super) stop_debug: watch::Sender<bool>,
    pub(super) store: Arc<DeferredStore>,
    pub(super) view: View,
    /// For a successor.
    pub(super) salt: CredentialsSalt,
}

impl Running {
    /// Closes the store, so that a successor can open it.
    pub(super) fn close_store(&self, limit: std::time::Duration) {
        if !self.store.close(limit) {
            tracing::warn!("the state store was not closed in time; the successor opens it later");
        }
    }
}

/// What the core of pulls decides by.
pub(super) fn policy(settings: &Settings) -> Policy {
    let (pulls, gates) = (&settings.pulls, &settings.feature_gates);
    let some = |duration: std::time::Duration| (!duration.is_zero()).then_some(duration);
    Policy {
        limit: if pulls.serialize_image_pulls { 1 } else { pulls.max_parallel_image_pulls },
        reject: pulls.when_full == WhenFull::Reject,
        enforce_by_runtime: pulls.enforce == Enforce::Runtime && gates.enabled(Gate::PullOption),
        per_registry: pulls.per_registry_max_parallel_image_pulls,
        present_slots: pulls.max_parallel_present_images,
        max_queue_time: some(pulls.max_queue_time),
        max_callers: pulls.max_queued_callers as usize,
        cancel_grace: pulls.cancel_grace,
        resume_window: pulls.resume_window,
        record_max_age: pulls.record_max_age,
        await_pods: heartbeats::watches_pods(settings),
        keep_progress: pulls.keep_progress && gates.enabled(Gate::KeepPullProgress),
        progress_retention: pulls.progress_retention,
        retained_bytes_max: pulls.retained_bytes_max.0,
        retain_min_free_percent: pulls.retain_min_free_percent,
        stall_timeout: some(pulls.stall_timeout),
        max_pull_time: some(pulls.max_pull_time),
        reject_retries: pulls.reject_retries,
        reject_interval: pulls.reject_retry_interval,
        runtime_retries: pulls.runtime_retries,
        reentry_window: pulls.reentry_window,
        queued_event_after: some(pulls.queued_event_after),
        hold: settings.cri.hold_timeout,
        deduplicate: gates.enabled(Gate::PullDeduplication),
        fast_lane: gates.enabled(Gate::PresentImageFastLane),
        resume: gates.enabled(Gate::ResumePulls),
        obey_option: gates.enabled(Gate::PullOption),
    }
}

/// What the CRI front goes by.
pub(super) fn front_settings(settings: &Settings) -> FrontSettings {
    FrontSettings {
        hold: settings.cri.hold_timeout,
        decision: settings.cri.decision_timeout,
        offer_pull_option: settings.feature_gates.enabled(Gate::PullOption),
    }
}

/// Sockets that are bound already.
pub(super) struct Listeners {
    /// Where clients reach [`Listeners::cri`].
    pub(super) cri_socket: PathBuf,
    /// Raised by one with each change that people could see.
    pub(super) changes: watch::Sender<u64>,
    pub(super) cri: UnixListener,
    /// Of the debug socket, the page and the hand-over socket.
    pub(super) jobs: [Job; 3],
}

/// `handed`: what the agent before this one handed over.
pub(super) fn start(
    loaded: Loaded,
    listeners: Listeners,
    mut handed: Option<HandedState>,
) -> anyhow::Result<Running> {
    let settings = loaded.settings.clone();
    let store = store::start(&settings)?;
    let instance = store::owner(&settings);
    let clock = Clock::start();
    let metrics = Metrics::default();
    let (health, health_seen) = watch::channel(Health::Unknown);
    let changes = listeners.changes;
    let (progress_interval, interval) = watch::channel(settings.pulls.progress_interval);
    let endpoint = settings.cri.runtime_endpoint.path().to_owned();
    let salt = handed.as_mut().and_then(|handed| handed.salt.take()).unwrap_or_else(CredentialsSalt::random);

    let recorder = Recorder::new("RuntimeClient", RUNTIME_MAILBOX);
    let make = {
        let (recorder, metrics) = (recorder.clone(), metrics.clone());
        let (endpoint, owner) = (endpoint.clone(), instance.clone());
        move |ctx: &mut actix::Context<RuntimeClient>| {
            ctx.set_mailbox_capacity(RUNTIME_MAILBOX);
            // The channel's tasks live where it is made: on this actor's arbiter.
            let runtime = Arc::new(ContainerRuntime::with_metrics(endpoint, &owner, &metrics));
            RuntimeClient::new(RuntimeClientParts {
                runtime,
                file_systems: Arc::new(LinuxHost::new()),
                clock,
                metrics,
                progress_interval: interval,
                health,
                recorder,
            })
        }
    };
    let arbiter = jobs::arbiter(c"runtime");
    let runtime = supervise::start(Some(&arbiter.handle()), recorder, make);

    let cluster = Cluster::of(&settings);
    let keeping = cluster.as_ref().map(|cluster| credentials::start(cluster, &settings, changes.clone()));
    let (credentials_arbiter, credentials_job) = keeping.unzip();
    let event_job = cluster.as_ref().map(|_| Job::new("PodEvents", changes.clone()));
    let notices = cluster.as_ref().zip(event_job.as_ref());
    let notices = notices.map(|(cluster, job)| write_pod_events(cluster, job, &settings, &metrics));
    let recorder = Recorder::new("PullCoordinator", PULLS_MAILBOX);
    let parts = PullCoordinatorParts {
        policy: policy(&settings),
        owner: instance.clone(),
        store: store.clone(),
        clock,
        runtime: runtime.clone(),
        metrics: metrics.clone(),
        notices,
        changes: changes.clone(),
        recorder: recorder.clone(),
    };
    let arbiter = jobs::arbiter(c"pulls");
    let pulls = supervise::start(Some(&arbiter.handle()), recorder, move |ctx| {
        ctx.set_mailbox_capacity(PULLS_MAILBOX);
        PullCoordinator::new(parts).with_handed(handed)
    });

    // Before everything that may wait for a disk or for the API server.
    let (front_settings, live) = watch::channel(front_settings(&settings));
    let front_parts = FrontParts {
        runtime_socket: endpoint,
        pulls: pulls.clone(),
        metrics: metrics.clone(),
        settings: live,
        salt: salt.clone(),
        own_socket: settings.cri.listen.path().to_owned(),
        clients: Arc::default(),
    };
    let front = FrontThread::start(listeners.cri, front_parts)?;

    let (endpoints_view, endpoints_seen) = watch::channel(endpoints::first_view(&settings));
    let (heartbeats, reporters) = heartbeats::start(HeartbeatsParts {
        cluster: cluster.clone(),
        endpoints: endpoints_seen,
        settings: settings.clone(),
        store: store.clone(),
        clock,
        pulls: pulls.clone(),
        runtime: runtime.clone(),
        runtime_health: health_seen.clone(),
        changes: changes.clone(),
    })?;
    let (endpoints, publisher) = endpoints::start(EndpointsParts {
        settings: settings.clone(),
        store: store.clone(),
        clock,
        cluster: cluster.clone(),
        node: heartbeats.node(),
        view: endpoints_view,
        changes: changes.clone(),
    });
    let mut actors = vec![
        Handle::on(&pulls, || Inspected {}, || LimitView {}),
        Handle::on(&runtime, || RuntimeState {}, || RuntimeState {}),
    ];
    actors.extend(reporters);
    actors.extend(publisher);
    actors.extend(credentials_job);
    actors.extend(event_job.iter().map(|job| Handle::job(job.recorder())));
    actors.extend(listeners.jobs.iter().map(|job| Handle::job(job.recorder())));

    let (loaded, loaded_seen) = watch::channel(Arc::new(loaded));
    let (stop_debug, _) = watch::channel(false);
    let view = View::new(ViewParts {
        cri_socket: listeners.cri_socket,
        pulls: pulls.clone(),
        actors,
        heartbeats,
        endpoints,
        cluster,
        credentials: credentials_arbiter,
        health: health_seen,
        changes,
        store: store.clone(),
        instance,
        loaded: loaded_seen,
        metrics,
        control_users: super::control::users(&settings.debug.control_users),
    });
    Ok(Running {
        loaded,
        pulls,
        front,
        endpoints: None,
        front_settings,
        progress_interval,
        stop_debug,
        store,
        view,
        salt,
    })
}

/// Starts what writes Events on pods, with a thread and a connection of its own.
fn write_pod_events(
    cluster: &Cluster,
    job: &Job,
    settings: &Settings,
    metrics: &Metrics,
) -> mpsc::Sender<PodNotice> {
    let (notices, waiting) = mpsc::channel(NOTICES_WAITING);
    let api = cluster.connect(cluster.request_timeout);
    let (node, metrics) = (settings.agent.node_name.clone(), metrics.clone());
    // One writer at a time has it. A panic loses the Event that was being written.
    let waiting = Arc::new(tokio::sync::Mutex::new(waiting));
    job.keep_on(
        &jobs::arbiter(c"pod-events").handle(),
        0,
        |_| {},
        move || {
            let (api, node, metrics, waiting) = (api.clone(), node.clone(), metrics.clone(), waiting.clone());
            async move {
                write_notices(api, node, &mut *waiting.lock().await, metrics).await;
                // The coordinator is gone: the agent ends.
                std::future::pending().await
            }
        },
    );
    notices
}
