//! Service endpoints.
//!
//! Owns: EndpointPublisher with its source and the server of the Endpoints API, or the reason why they are disabled.
//! In: settings, listeners, the Node that the heartbeats watch. Out: [`Endpoints`] for the view, and the handles of the
//! actor and its jobs.
//!
//! EndpointPublisher and its source share an arbiter and a connection of their own, so that a list of ten thousand
//! slices delays no heartbeat; the server has a thread of its own, so that five hundred watchers delay no other part.

mod inspection;
mod server;
mod source;

use std::{path::PathBuf, sync::Arc};

use keelson_actor_system::{
    inspect::{Mailbox, Recorder},
    reports::EndpointsView,
    supervise,
};
use keelson_config::{Gate, Settings};
use keelson_endpoint_publisher::{
    ClientEvent, EndpointMetrics, EndpointPublisher, EndpointPublisherParts, EndpointsCount, EndpointsFeed,
    EndpointsPolicy, EventSink, History, InspectEndpoints, Marker, Published,
};
use keelson_endpoints::server::{ClientHints, EndpointsServer, ServerMetrics, ServerSettings};
use keelson_heartbeats::host::Host as _;
use keelson_host::LinuxHost;
use keelson_kube::ServiceSelection;
use tokio::sync::watch;

pub(super) use self::server::EndpointsServing;
use self::source::{Place, Scope, Source, WatchedNode};
use super::{
    actor_handle::ActorHandle,
    cluster::Cluster,
    jobs::{self, Job},
    shared::Shared,
};

const ACTOR: &str = "EndpointPublisher";
/// The marker file, beside the debug socket: outside of the state folder, and removed by a reboot.
const MARKER: &str = "endpoints-revision";
/// A source waits for the answer to each of its messages; the other messages are requests of users.
const MAILBOX: usize = 1024;
/// Average number of names per revision in the history before it drops the oldest.
const NAMES_PER_REVISION: usize = 20;

pub(super) enum Endpoints {
    Disabled(&'static str),
    Enabled(Box<EnabledEndpoints>),
}

pub(super) struct EnabledEndpoints {
    publisher: Mailbox<EndpointPublisher>,
    feed: EndpointsFeed,
    metrics: EndpointMetrics,
    server: EndpointsServer,
    server_metrics: ServerMetrics,
    server_job: Job,
    source_job: Job,
    view: watch::Receiver<EndpointsView>,
    place: Place,
    arbiter: actix::ArbiterHandle,
}

/// The file with the latest revision.
pub(crate) fn marker_path(settings: &Settings) -> PathBuf {
    settings.debug.listen.path().with_file_name(MARKER)
}

/// The view of the endpoints before they are read.
pub(super) fn first_view(settings: &Settings) -> EndpointsView {
    match Source::of(settings, Cluster::of(settings)) {
        Ok(_) => EndpointsView::Pending,
        Err(_) => EndpointsView::Disabled,
    }
}

/// `node`: the Node as the heartbeats watch it.
pub(super) fn build(
    shared: &Shared,
    cluster: Option<Cluster>,
    node: Option<WatchedNode>,
    view: watch::Sender<EndpointsView>,
) -> Endpoints {
    match Source::of(&shared.settings, cluster) {
        Err(why) => Endpoints::Disabled(why),
        Ok(source) => Endpoints::Enabled(Box::new(build_on(shared, source, node, view))),
    }
}

impl Endpoints {
    pub(super) fn actors(&self) -> Vec<ActorHandle> {
        match self {
            Self::Disabled(why) => vec![ActorHandle::off(ACTOR, why)],
            Self::Enabled(on) => {
                let publisher = ActorHandle::on(&on.publisher, || InspectEndpoints {}, || EndpointsCount {});
                let jobs = [&on.source_job, &on.server_job].map(|job| ActorHandle::job(job.recorder()));
                std::iter::once(publisher).chain(jobs).collect()
            }
        }
    }

    /// Serves at every address of the settings; `None` while endpoints are disabled.
    pub(super) async fn serve(&self, settings: &Settings) -> Option<EndpointsServing> {
        match self {
            Self::Disabled(_) => None,
            Self::Enabled(on) => Some(server::serve_all(&on.server, &on.server_job, settings).await),
        }
    }
}

fn build_on(
    shared: &Shared,
    source: Source,
    node: Option<WatchedNode>,
    view: watch::Sender<EndpointsView>,
) -> EnabledEndpoints {
    let settings = &shared.settings;
    let is_on_demand = source.is_on_demand(settings);
    let (published, seen) = watch::channel(None);
    let revisions = settings.endpoints.history as usize;
    let feed =
        EndpointsFeed { published: seen, history: History::new(revisions, revisions * NAMES_PER_REVISION) };
    let metrics = EndpointMetrics::default();
    let view_seen = view.subscribe();
    let arbiter = jobs::arbiter(c"endpoints-view").handle();
    let publisher = start_publisher(
        shared,
        is_on_demand,
        published,
        feed.history.clone(),
        metrics.clone(),
        view,
        &arbiter,
    );
    let server_metrics = ServerMetrics::default();
    let server_settings = ServerSettings {
        max_watchers: settings.endpoints.max_watchers as usize,
        deltas: settings.feature_gates.enabled(Gate::EndpointDeltas),
        on_demand: is_on_demand,
    };
    let server = EndpointsServer::new(feed.clone(), server_settings, server_metrics.clone());
    let [server_job, source_job] =
        ["EndpointsServer", "EndpointsSource"].map(|name| Job::new(name, shared.changes.clone()));
    let (hints, to) = (server.client_hints(), publisher.clone());
    source_job.keep_on(&arbiter, 3, |_| {}, move || pass_hints_on(hints.clone(), to.clone()));
    let sink: Arc<dyn EventSink> = Arc::new(publisher.clone());
    let demand = is_on_demand.then(|| server.client_hints());
    let node_name = settings.agent.node_name.clone();
    let services = match shared.settings.endpoints.service_proxy_names.is_empty() {
        true => ServiceSelection::Unlabelled,
        false => ServiceSelection::All,
    };
    let place =
        source::follow(source, &source_job, &arbiter, sink, node_name, node, Scope { services, demand });
    EnabledEndpoints {
        publisher,
        feed,
        metrics,
        server,
        server_metrics,
        server_job,
        source_job,
        view: view_seen,
        place,
        arbiter,
    }
}

fn start_publisher(
    shared: &Shared,
    on_demand: bool,
    published: watch::Sender<Option<Arc<Published>>>,
    history: Arc<History>,
    metrics: EndpointMetrics,
    view: watch::Sender<EndpointsView>,
    arbiter: &actix::ArbiterHandle,
) -> Mailbox<EndpointPublisher> {
    let endpoints = &shared.settings.endpoints;
    let boot_id = LinuxHost::new().facts().boot_id;
    let recorder = Recorder::new(ACTOR, MAILBOX);
    let parts = EndpointPublisherParts {
        store: shared.store.clone(),
        marker: Some(Marker::new(marker_path(&shared.settings), boot_id.clone())),
        clock: shared.clock,
        policy: EndpointsPolicy {
            node_name: shared.settings.agent.node_name.clone(),
            min_interval: endpoints.min_interval,
            on_demand,
            service_proxy_names: endpoints.service_proxy_names.iter().map(ToString::to_string).collect(),
            history: endpoints.history.into(),
            write_timeout: endpoints.write_timeout,
            boot_id,
            max_age_after_boot: endpoints.max_age_after_boot,
        },
        metrics,
        published,
        history,
        endpoints_view: view,
        changes: shared.changes.clone(),
        recorder: recorder.clone(),
    };
    supervise::start(Some(arbiter), recorder, move |ctx| {
        ctx.set_mailbox_capacity(MAILBOX);
        EndpointPublisher::new(parts)
    })
}

/// Passes what clients reveal to the publisher.
async fn pass_hints_on(mut hints: watch::Receiver<ClientHints>, publisher: Mailbox<EndpointPublisher>) {
    loop {
        let ClientHints { has_followed, later_revision } = *hints.borrow_and_update();
        if has_followed {
            let _ = publisher.ask_waiting(ClientEvent::Followed).await;
        }
        if let Some((instance_id, rev)) = later_revision {
            let _ = publisher.ask_waiting(ClientEvent::LaterRevision { instance_id, rev }).await;
        }
        if hints.changed().await.is_err() {
            return std::future::pending().await;
        }
    }
}
