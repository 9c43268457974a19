//! Image pulls: RuntimeClient, PullCoordinator, the writer of Events, and the CRI front.
//!
//! Owns: their construction from settings, and the live settings. In: settings and the CRI listener. Out: [`Pulls`].

use std::{sync::Arc, time::Duration};

use keelson_actor_system::{
    cluster::ClusterEvent,
    inspect::{Mailbox, Recorder},
    supervise,
};
use keelson_config::{Enforce, Gate, Settings, WhenFull};
use keelson_cri::{
    front::{FrontParts, FrontSettings},
    runtime::ContainerRuntime,
};
use keelson_host::LinuxHost;
use keelson_pulls::{
    coordinator::{
        EVENTS_WAITING, HandedState, Inspected, LimitView, Policy, PullCoordinator, PullCoordinatorParts,
        PullEvent, write_events,
    },
    metrics::Metrics,
    request::CredentialsSalt,
    runtime::{Health, RuntimeClient, RuntimeClientParts, RuntimeState},
};
use tokio::{
    net::UnixListener,
    sync::{Mutex, mpsc, watch},
};

use super::{
    actor_handle::ActorHandle,
    cluster::{Cluster, watches_pods},
    front::FrontThread,
    jobs::{self, Job},
    shared::Shared,
};

/// Mailbox of the PullCoordinator: larger than any burst of a node (kubelets run at most a few
/// hundred pods), so that "busy" means a problem; a message takes some hundred bytes.
const PULLS_MAILBOX: usize = 32_768;
/// Mailbox of the RuntimeClient: each message belongs to one of the coordinator's.
const RUNTIME_MAILBOX: usize = 32_768;

pub(super) struct Pulls {
    pub(super) coordinator: Mailbox<PullCoordinator>,
    pub(super) runtime: Mailbox<RuntimeClient>,
    pub(super) runtime_health: watch::Receiver<Health>,
    pub(super) front: FrontThread,
    pub(super) metrics: Metrics,
    /// `None` without an API server.
    pub(super) events: Option<EventWriter>,
    /// For a successor.
    pub(super) salt: CredentialsSalt,
    front_settings: watch::Sender<FrontSettings>,
    progress_interval: watch::Sender<Duration>,
}

/// The writer of Events, with its own thread and connection.
pub(super) struct EventWriter {
    pub(super) job: Job,
    pub(super) arbiter: actix::ArbiterHandle,
    pub(super) queue: mpsc::Sender<ClusterEvent>,
}

/// `handed`: what the previous agent handed over.
pub(super) fn build(
    shared: &Shared,
    cluster: Option<&Cluster>,
    listener: UnixListener,
    mut handed: Option<HandedState>,
) -> anyhow::Result<Pulls> {
    let settings = &shared.settings;
    let metrics = Metrics::default();
    let salt = handed.as_mut().and_then(|handed| handed.salt.take()).unwrap_or_else(CredentialsSalt::random);
    let (progress_interval, interval) = watch::channel(settings.pulls.progress_interval);
    let (runtime, runtime_health) = start_runtime(shared, metrics.clone(), interval);
    let events = cluster.map(|cluster| start_event_writer(shared, cluster, &metrics));
    let queue = events.as_ref().map(|writer| writer.queue.clone());
    let coordinator = start_coordinator(shared, runtime.clone(), queue, handed, metrics.clone());
    let (front_settings, live) = watch::channel(settings_of_front(settings));
    let front = FrontParts {
        runtime_socket: settings.cri.runtime_endpoint.path().to_owned(),
        pulls: coordinator.clone(),
        metrics: metrics.clone(),
        settings: live,
        salt: salt.clone(),
        own_socket: settings.cri.listen.path().to_owned(),
        clients: Arc::default(),
    };
    let front = FrontThread::start(listener, front)?;
    Ok(Pulls {
        coordinator,
        runtime,
        runtime_health,
        front,
        metrics,
        events,
        salt,
        front_settings,
        progress_interval,
    })
}

impl Pulls {
    /// The actors on the CRI path.
    pub(super) fn actors(&self) -> Vec<ActorHandle> {
        vec![
            ActorHandle::on(&self.coordinator, || Inspected {}, || LimitView {}),
            ActorHandle::on(&self.runtime, || RuntimeState {}, || RuntimeState {}),
        ]
    }

    pub(super) fn configure(&self, settings: &Settings) {
        self.coordinator.deliver(PullEvent::Configure(Box::new(policy(settings))));
        self.front_settings.send_replace(settings_of_front(settings));
        self.progress_interval.send_replace(settings.pulls.progress_interval);
    }
}

fn start_runtime(
    shared: &Shared,
    metrics: Metrics,
    progress_interval: watch::Receiver<Duration>,
) -> (Mailbox<RuntimeClient>, watch::Receiver<Health>) {
    let (health, health_seen) = watch::channel(Health::Unknown);
    let recorder = Recorder::new("RuntimeClient", RUNTIME_MAILBOX);
    let endpoint = shared.settings.cri.runtime_endpoint.path().to_owned();
    let (own, owner, clock) = (recorder.clone(), shared.state_folder_id.clone(), shared.clock);
    let make = move |ctx: &mut actix::Context<RuntimeClient>| {
        ctx.set_mailbox_capacity(RUNTIME_MAILBOX);
        // The channel's tasks run where it is made: on this actor's arbiter.
        let runtime = Arc::new(ContainerRuntime::with_metrics(endpoint, &owner, &metrics));
        RuntimeClient::new(RuntimeClientParts {
            runtime,
            file_systems: Arc::new(LinuxHost::new()),
            clock,
            metrics,
            progress_interval,
            health,
            recorder: own,
        })
    };
    let runtime = supervise::start(Some(&jobs::arbiter(c"runtime").handle()), recorder, make);
    (runtime, health_seen)
}

fn start_coordinator(
    shared: &Shared,
    runtime: Mailbox<RuntimeClient>,
    events: Option<mpsc::Sender<ClusterEvent>>,
    handed: Option<HandedState>,
    metrics: Metrics,
) -> Mailbox<PullCoordinator> {
    let recorder = Recorder::new("PullCoordinator", PULLS_MAILBOX);
    let parts = PullCoordinatorParts {
        policy: policy(&shared.settings),
        owner: shared.state_folder_id.clone(),
        store: shared.store.clone(),
        clock: shared.clock,
        runtime,
        metrics,
        events,
        changes: shared.changes.clone(),
        recorder: recorder.clone(),
    };
    supervise::start(Some(&jobs::arbiter(c"pulls").handle()), recorder, move |ctx| {
        ctx.set_mailbox_capacity(PULLS_MAILBOX);
        PullCoordinator::new(parts).with_handed(handed)
    })
}

fn start_event_writer(shared: &Shared, cluster: &Cluster, metrics: &Metrics) -> EventWriter {
    let job = Job::new("EventWriter", shared.changes.clone());
    let arbiter = jobs::arbiter(c"events").handle();
    let (queue, waiting) = mpsc::channel(EVENTS_WAITING);
    let api = cluster.connect(cluster.request_timeout);
    let (node, metrics) = (shared.settings.agent.node_name.clone(), metrics.clone());
    // Used by one writer at a time. A panic loses the Event that was being written.
    let waiting = Arc::new(Mutex::new(waiting));
    job.keep_on(
        &arbiter,
        0,
        |_| {},
        move || {
            let (api, node, metrics, waiting) = (api.clone(), node.clone(), metrics.clone(), waiting.clone());
            async move {
                write_events(api, node, &mut *waiting.lock().await, metrics).await;
                // Nothing writes Events any more: the agent ends.
                std::future::pending().await
            }
        },
    );
    EventWriter { job, arbiter, queue }
}

fn policy(settings: &Settings) -> Policy {
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
        await_pods: watches_pods(settings),
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

fn settings_of_front(settings: &Settings) -> FrontSettings {
    FrontSettings {
        hold: settings.cri.hold_timeout,
        decision: settings.cri.decision_timeout,
        offer_pull_option: settings.feature_gates.enabled(Gate::PullOption),
    }
}
