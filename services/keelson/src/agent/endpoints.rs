//! The chore of service endpoints.
//!
//! Owns: EndpointPublisher with its source and the server of the Endpoints API, or the reason why they are off.
//! In: settings, listeners, the Node that the heartbeats watch. Out: [`Endpoints`], which the view asks, and the
//! actor's handle.
//!
//! EndpointPublisher and its source share an arbiter and a connection of their own, so that a list of ten thousand
//! slices delays no heartbeat; the server has a thread of its own, so that five hundred watchers delay nobody else.

mod show;

use std::{path::PathBuf, sync::Arc};

use anyhow::Context as _;
use futures_util::future::{join, join_all};
use keelson_actor_system::{
    clock::Clock,
    cluster::ChoreHealth,
    inspect::{Mailbox, Recorder},
    reports::EndpointsView,
    supervise,
};
use keelson_config::{EndpointsSource, EndpointsWatch, Gate, ListenSpec, Settings};
use keelson_cri::listen::Bound;
use keelson_endpoint_publisher::{
    Answer, ClientEvent, EndpointMetrics, EndpointPublisher, EndpointPublisherParts, EndpointsCount,
    EndpointsFeed, EndpointsPolicy, EventSink, History, InspectEndpoints, Marker, SourceEvent, SourceKind,
};
use keelson_endpoints::{
    files::{FilesHandle, FilesParts, FilesSource},
    server::{EndpointsServer, Listener, Revealed, ServerMetrics, ServerSettings},
};
use keelson_heartbeats::host::Host as _;
use keelson_host::LinuxHost;
use keelson_kube::{ApiServer, Node, node_view, watch_endpoints, watch_node};
use keelson_storage::DeferredStore;
use tokio::{net::TcpListener, sync::watch};

use super::{
    LAST_WORDS,
    cluster::{Cluster, NodeSeen, node_channel},
    handles::Handle,
    heartbeats::watch_failed,
    jobs::{self, Attempt, Job, Jobs},
};

const ACTOR: &str = "EndpointPublisher";
const SERVER: &str = "EndpointsServer";
const SOURCE: &str = "EndpointsSource";
/// The marker, beside the debug socket: outside of the state folder, and gone after a boot.
const MARKER: &str = "endpoints-revision";
/// A source waits for the answer to each of its messages; the rest are questions from people.
const MAILBOX: usize = 1024;
/// Names that the history may hold for each revision on average, before it forgets the oldest.
const NAMES_A_REVISION: usize = 20;

/// What the chore needs of the rest of the agent.
pub(super) struct EndpointsParts {
    pub(super) settings: Arc<Settings>,
    pub(super) store: Arc<DeferredStore>,
    pub(super) clock: Clock,
    pub(super) cluster: Option<Cluster>,
    /// The Node as the heartbeats watch it.
    pub(super) node: Option<(watch::Receiver<NodeSeen>, watch::Receiver<ChoreHealth>)>,
    pub(super) view: watch::Sender<EndpointsView>,
    pub(super) changes: watch::Sender<u64>,
}

/// The chore, or why it is off.
pub(super) enum Endpoints {
    Off(&'static str),
    On(Box<On>),
}

/// The running chore.
pub(super) struct On {
    publisher: Mailbox<EndpointPublisher>,
    feed: EndpointsFeed,
    metrics: EndpointMetrics,
    server: EndpointsServer,
    server_metrics: ServerMetrics,
    job: Job,
    source_job: Job,
    view: watch::Receiver<EndpointsView>,
    place: Place,
    arbiter: actix::ArbiterHandle,
}

/// Where Services come from.
enum Place {
    Kube(ApiServer),
    Files(FilesHandle),
}

/// Which source the settings mean.
enum Source {
    Kube(Box<Cluster>),
    Files(PathBuf),
}

impl Source {
    fn kube(cluster: Cluster) -> Self {
        Self::Kube(Box::new(cluster))
    }

    /// Whether it is asked only once somebody follows. A folder costs nobody anything.
    fn is_on_demand(&self, settings: &Settings) -> bool {
        matches!(self, Self::Kube(_)) && settings.endpoints.watch == EndpointsWatch::OnDemand
    }

    /// # Errors
    /// Why there is none.
    fn of(settings: &Settings, cluster: Option<Cluster>) -> Result<Self, &'static str> {
        if !settings.feature_gates.enabled(Gate::ServiceEndpoints) {
            return Err("feature gate ServiceEndpoints is disabled");
        }
        let files = || settings.endpoints.manifests.clone().map(Self::Files);
        match settings.endpoints.source {
            EndpointsSource::Off => Err("endpoints.source is off"),
            // Without a cluster or a folder the settings are refused before.
            EndpointsSource::Kube => cluster.map(Self::kube).ok_or("no API server is configured"),
            EndpointsSource::Files => files().ok_or("no directory of manifests is configured"),
            EndpointsSource::Auto => cluster.map(Self::kube).or_else(files).ok_or(
                "neither an API server (section [kube]) nor a directory of manifests (endpoints.manifests) \
                 is configured",
            ),
        }
    }
}

/// Whether the settings turn the chore on, so that its sockets are needed.
pub(super) fn wanted(settings: &Settings) -> bool {
    Source::of(settings, Cluster::of(settings)).is_ok()
}

/// Where the newest revision is noted.
pub(crate) fn marker_path(settings: &Settings) -> PathBuf {
    settings.debug.listen.path().with_file_name(MARKER)
}

/// What is known of the endpoints before anything is.
pub(super) fn first_view(settings: &Settings) -> EndpointsView {
    if wanted(settings) { EndpointsView::Starting } else { EndpointsView::Off }
}

/// Serves the API at one address until the attempt is told to stop. A socket's file goes with the attempt.
///
/// # Errors
/// The address cannot be had, or there is no thread.
async fn serve(
    spec: ListenSpec,
    mode: u32,
    server: EndpointsServer,
    mut attempt: Attempt,
) -> anyhow::Result<()> {
    let label = spec.to_string();
    let (listener, _file) = match spec {
        ListenSpec::Unix(socket) => {
            let (listener, file) = Bound::bind(socket.path(), mode).await?.into_parts();
            (Listener::Unix(listener, label.clone()), Some(file))
        }
        ListenSpec::Tcp(address) => {
            let listener = TcpListener::bind(address).await;
            let listener =
                listener.with_context(|| format!("cannot listen on {label} (endpoints.listen)"))?;
            // With port 0, the one that was given.
            let label = listener.local_addr().map_or(label, |address| format!("tcp://{address}"));
            if !address.ip().to_canonical().is_loopback() {
                tracing::warn!(
                    address = label,
                    "the Endpoints API is reachable from other machines without authentication \
                     (endpoints.allow_remote)"
                );
            }
            (Listener::Tcp(listener, label), None)
        }
    };
    let label = listener.name().to_owned();
    let mut thread = server.start(vec![listener])?;
    attempt.serves(label);
    tokio::select! {
        () = thread.ended() => {}
        () = attempt.stopped() => thread.stop(LAST_WORDS).await,
    }
    Ok(())
}

/// The servers of the chore, at all its addresses.
pub(super) struct EndpointsServing {
    stop: watch::Sender<bool>,
    tasks: Vec<tokio::task::JoinHandle<()>>,
}

impl EndpointsServing {
    /// Takes no new callers, ends the calls there are, and waits at most `patience` for that.
    pub(super) async fn stop(self, patience: std::time::Duration) {
        self.stop.send_replace(true);
        if tokio::time::timeout(patience, futures_util::future::join_all(self.tasks)).await.is_err() {
            tracing::info!("closing connections to the Endpoints API");
        }
    }
}

/// Starts the chore, if the settings say so. Returns with it the handles of the actor and of the server.
pub(super) fn start(parts: EndpointsParts) -> (Endpoints, Vec<Handle>) {
    match Source::of(&parts.settings, parts.cluster.clone()) {
        Err(why) => (Endpoints::Off(why), vec![Handle::off(ACTOR, why)]),
        Ok(source) => {
            let on = start_on(parts, source);
            let handle = Handle::on(&on.publisher, || InspectEndpoints {}, || EndpointsCount {});
            let jobs = [&on.source_job, &on.job].map(|job| Handle::job(job.recorder()));
            let handles = std::iter::once(handle).chain(jobs).collect();
            (Endpoints::On(Box::new(on)), handles)
        }
    }
}

impl Endpoints {
    /// Serves at every address of the settings; none while the chore is off.
    pub(super) async fn serve(&self, settings: &Settings) -> Option<EndpointsServing> {
        let Self::On(on) = self else { return None };
        let (stop, stopped) = watch::channel(false);
        let mut serving = Jobs::new(stopped);
        let mode = settings.endpoints.socket_mode.bits();
        for (index, spec) in settings.endpoints.listen.iter().enumerate() {
            let (spec, server) = (spec.clone(), on.server.clone());
            serving.keep(&on.job, index, move |attempt| serve(spec.clone(), mode, server.clone(), attempt));
        }
        Some(EndpointsServing { stop, tasks: serving.tried().await })
    }
}

fn start_on(parts: EndpointsParts, source: Source) -> On {
    let endpoints = &parts.settings.endpoints;
    let job = Job::new(SERVER, parts.changes.clone());
    let source_job = Job::new(SOURCE, parts.changes.clone());
    let revisions = endpoints.history as usize;
    let (published, seen) = watch::channel(None);
    let feed =
        EndpointsFeed { published: seen, history: History::new(revisions, revisions * NAMES_A_REVISION) };
    let metrics = EndpointMetrics::default();
    let recorder = Recorder::new(ACTOR, MAILBOX);
    let view = parts.view.subscribe();
    let (on_demand, boot_id) = (source.is_on_demand(&parts.settings), LinuxHost::new().facts().boot_id);
    let marker = marker_path(&parts.settings);
    let publisher_parts = EndpointPublisherParts {
        store: parts.store,
        marker: Some(Marker::new(marker, boot_id.clone())),
        clock: parts.clock,
        policy: EndpointsPolicy {
            node_name: parts.settings.agent.node_name.clone(),
            min_interval: endpoints.min_interval,
            on_demand,
            history: endpoints.history.into(),
            write_timeout: endpoints.write_timeout,
            boot_id,
            max_age_after_boot: endpoints.max_age_after_boot,
        },
        metrics: metrics.clone(),
        published,
        history: feed.history.clone(),
        endpoints_view: parts.view,
        changes: parts.changes,
        recorder: recorder.clone(),
    };
    let arbiter = jobs::arbiter(c"endpoints-view");
    let publisher = supervise::start(Some(&arbiter.handle()), recorder, move |ctx| {
        ctx.set_mailbox_capacity(MAILBOX);
        EndpointPublisher::new(publisher_parts)
    });
    let server_metrics = ServerMetrics::default();
    let settings = ServerSettings {
        max_watchers: endpoints.max_watchers as usize,
        deltas: parts.settings.feature_gates.enabled(Gate::EndpointDeltas),
        on_demand,
    };
    let server = EndpointsServer::new(feed.clone(), settings, server_metrics.clone());
    let (revealed, to) = (server.revealed(), publisher.clone());
    source_job.keep_on(&arbiter.handle(), 3, |_| {}, move || tell_revealed(revealed.clone(), to.clone()));
    let sink: Arc<dyn EventSink> = Arc::new(publisher.clone());
    let node_name = parts.settings.agent.node_name.clone();
    let place = match source {
        Source::Kube(cluster) => {
            let api = cluster.connect(cluster.request_timeout);
            let objects = [SourceKind::Services, SourceKind::EndpointSlices, SourceKind::ServiceCidrs];
            let failed = tells_failure(sink.clone(), objects.to_vec());
            let (watched, to) = (api.clone(), sink.clone());
            let demand = on_demand.then(|| server.revealed());
            let wanted = demand.clone();
            source_job.keep_on(&arbiter.handle(), 0, failed, move || {
                let (api, sink, wanted) = (watched.clone(), to.clone(), wanted.clone());
                async move {
                    followed(wanted).await;
                    watch_endpoints(&api, sink).await
                }
            });
            let failed = tells_failure(sink.clone(), vec![SourceKind::Node]);
            let (watched, node) = (api.clone(), parts.node);
            source_job.keep_on(&arbiter.handle(), 1, failed, move || {
                let (api, name, node, sink) =
                    (watched.clone(), node_name.clone(), node.clone(), sink.clone());
                let wanted = demand.clone();
                async move {
                    followed(wanted).await;
                    follow_node(&api, name, node, sink).await
                }
            });
            Place::Kube(api)
        }
        Source::Files(folder) => {
            let failed = tells_failure(sink.clone(), SourceKind::ALL.to_vec());
            let files = FilesSource::new(FilesParts::new(folder, node_name, sink));
            let handle = files.handle();
            source_job.keep_on(&arbiter.handle(), 0, failed, move || files.clone().run());
            Place::Files(handle)
        }
    };
    let arbiter = arbiter.handle();
    On { publisher, feed, metrics, server, server_metrics, job, source_job, view, place, arbiter }
}

/// Waits for the first client that follows; without `revealed` for nothing.
async fn followed(revealed: Option<watch::Receiver<Revealed>>) {
    let Some(mut revealed) = revealed else { return };
    if revealed.wait_for(|revealed| revealed.followed).await.is_err() {
        // The server is gone: the agent ends.
        std::future::pending().await
    }
}

/// Tells the publisher what callers reveal.
async fn tell_revealed(mut revealed: watch::Receiver<Revealed>, publisher: Mailbox<EndpointPublisher>) {
    loop {
        let Revealed { followed, later } = *revealed.borrow_and_update();
        if followed {
            let _ = publisher.ask_waiting(ClientEvent::Followed).await;
        }
        if let Some((instance_id, rev)) = later {
            let _ = publisher.ask_waiting(ClientEvent::LaterRevision { instance_id, rev }).await;
        }
        if revealed.changed().await.is_err() {
            return std::future::pending().await;
        }
    }
}

/// Tells the sink that the watches of these kinds have failed; the restarted ones tell it when they succeed.
fn tells_failure(sink: Arc<dyn EventSink>, kinds: Vec<SourceKind>) -> impl Fn(&str) + Send + 'static {
    move |reason| {
        let (sink, kinds, health) = (sink.clone(), kinds.clone(), watch_failed(reason));
        actix::spawn(async move {
            join_all(kinds.into_iter().map(|kind| sink.send(SourceEvent::Health(kind, health.clone()))))
                .await;
        });
    }
}

/// Tells the sink of the Node: of the one that the heartbeats watch, or of one that is watched here.
async fn follow_node(
    api: &ApiServer,
    name: String,
    watched: Option<(watch::Receiver<NodeSeen>, watch::Receiver<ChoreHealth>)>,
    sink: Arc<dyn EventSink>,
) {
    match watched {
        Some((node, health)) => {
            join(tell_node(&name, node, &*sink), tell_health(health, &*sink)).await;
        }
        None => {
            let (send_node, node) = node_channel();
            let (send_health, health) = watch::channel(ChoreHealth::Starting);
            let take = move |node: Option<Arc<Node>>| {
                send_node.send_replace(Some(node));
            };
            let watching = watch_node(api, &name, &send_health, take);
            join(watching, join(tell_node(&name, node, &*sink), tell_health(health, &*sink))).await;
        }
    }
}

async fn tell_node(name: &str, mut node: watch::Receiver<NodeSeen>, sink: &dyn EventSink) {
    loop {
        let seen = node.borrow_and_update().clone();
        if let Some(node) = seen {
            let event = SourceEvent::Node(node_view(name, node.as_deref()));
            while sink.send(event.clone()).await == Answer::ListAgain {}
        }
        // Its watch ends with the agent only.
        if node.changed().await.is_err() {
            return std::future::pending().await;
        }
    }
}

async fn tell_health(mut health: watch::Receiver<ChoreHealth>, sink: &dyn EventSink) {
    loop {
        let now = health.borrow_and_update().clone();
        if now != ChoreHealth::Starting {
            sink.send(SourceEvent::Health(SourceKind::Node, now)).await;
        }
        if health.changed().await.is_err() {
            return std::future::pending().await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn why(settings: &Settings) -> Option<&'static str> {
        Source::of(settings, Cluster::of(settings)).err()
    }

    #[test]
    fn the_settings_say_where_services_come_from() {
        let mut settings = Settings::default();
        assert!(why(&settings).is_some_and(|why| why.contains("neither an API server")));
        settings.endpoints.manifests = Some("/etc/keelson/manifests".into());
        assert!(matches!(Source::of(&settings, None), Ok(Source::Files(_))));
        settings.kube.in_cluster = true;
        assert!(matches!(Source::of(&settings, Cluster::of(&settings)), Ok(Source::Kube(_))));
        settings.endpoints.source = EndpointsSource::Files;
        assert!(matches!(Source::of(&settings, Cluster::of(&settings)), Ok(Source::Files(_))));
        settings.feature_gates = settings.feature_gates.with(Gate::ServiceEndpoints, false);
        assert_eq!(why(&settings), Some("feature gate ServiceEndpoints is disabled"));
        settings.feature_gates = settings.feature_gates.with(Gate::ServiceEndpoints, true);
        settings.endpoints.source = EndpointsSource::Off;
        assert_eq!(why(&settings), Some("endpoints.source is off"));
        assert!(!wanted(&settings));
    }
}
