//! The source of Services: the API server, or a folder of manifests.
//!
//! Owns: the choice by the settings, and the job that reads the source. In: objects and the Node. Out: events for the
//! EndpointPublisher.

use std::{path::PathBuf, sync::Arc};

use futures_util::future::{join, join_all};
use keelson_actor_system::cluster::JobHealth;
use keelson_config::{EndpointsSource, EndpointsWatch, Gate, Settings};
use keelson_endpoint_publisher::{Ack, EventSink, SourceEvent, SourceKind};
use keelson_endpoints::{
    files::{FilesHandle, FilesParts, FilesSource},
    server::ClientHints,
};
use keelson_kube::{ApiServer, Node, ServiceSelection, node_view, watch_endpoints, watch_node};
use tokio::sync::watch;

use crate::agent::{
    cluster::{Cluster, NodeSeen, node_channel, watch_failed},
    jobs::Job,
};

/// The Node that the heartbeats watch, and the health of that watch.
pub(in crate::agent) type WatchedNode = (watch::Receiver<NodeSeen>, watch::Receiver<JobHealth>);

pub(super) enum Place {
    Kube(ApiServer),
    Files(FilesHandle),
}

pub(super) enum Source {
    Kube(Box<Cluster>),
    Files(PathBuf),
}

impl Source {
    fn kube(cluster: Cluster) -> Self {
        Self::Kube(Box::new(cluster))
    }

    /// Whether it is read only after the first client has connected. A folder costs nothing.
    pub(super) fn is_on_demand(&self, settings: &Settings) -> bool {
        matches!(self, Self::Kube(_)) && settings.endpoints.watch == EndpointsWatch::OnDemand
    }

    /// # Errors
    /// Why there is no source.
    pub(super) fn of(settings: &Settings, cluster: Option<Cluster>) -> Result<Self, &'static str> {
        if !settings.feature_gates.enabled(Gate::ServiceEndpoints) {
            return Err("feature gate ServiceEndpoints is disabled");
        }
        let files = || settings.endpoints.manifests.clone().map(Self::Files);
        match settings.endpoints.source {
            EndpointsSource::Off => Err("endpoints.source is off"),
            // The settings require a cluster or a folder.
            EndpointsSource::Kube => cluster.map(Self::kube).ok_or("no API server is configured"),
            EndpointsSource::Files => files().ok_or("no directory of manifests is configured"),
            EndpointsSource::Auto => cluster.map(Self::kube).or_else(files).ok_or(
                "neither an API server (section [kube]) nor a directory of manifests (endpoints.manifests) \
                 is configured",
            ),
        }
    }
}

/// Which Services are watched, and from when on.
pub(super) struct Scope {
    pub(super) services: ServiceSelection,
    /// Wait for the first client.
    pub(super) demand: Option<watch::Receiver<ClientHints>>,
}

/// Reads the source as parts 0 and 1 of `job`.
pub(super) fn follow(
    source: Source,
    job: &Job,
    arbiter: &actix::ArbiterHandle,
    sink: Arc<dyn EventSink>,
    node_name: String,
    node: Option<WatchedNode>,
    scope: Scope,
) -> Place {
    let Scope { services, demand } = scope;
    match source {
        Source::Kube(cluster) => {
            let api = cluster.connect(cluster.request_timeout);
            let objects = [SourceKind::Services, SourceKind::EndpointSlices, SourceKind::ServiceCidrs];
            let failed = reports_failure(sink.clone(), objects.to_vec());
            let (watched, to, wanted) = (api.clone(), sink.clone(), demand.clone());
            job.keep_on(arbiter, 0, failed, move || {
                let (api, sink, wanted) = (watched.clone(), to.clone(), wanted.clone());
                async move {
                    first_client(wanted).await;
                    watch_endpoints(&api, sink, services).await
                }
            });
            let failed = reports_failure(sink.clone(), vec![SourceKind::Node]);
            let watched = api.clone();
            job.keep_on(arbiter, 1, failed, move || {
                let (api, name, node, sink) =
                    (watched.clone(), node_name.clone(), node.clone(), sink.clone());
                let wanted = demand.clone();
                async move {
                    first_client(wanted).await;
                    follow_node(&api, name, node, sink).await
                }
            });
            Place::Kube(api)
        }
        Source::Files(folder) => {
            let failed = reports_failure(sink.clone(), SourceKind::ALL.to_vec());
            let files = FilesSource::new(FilesParts::new(folder, node_name, sink));
            let handle = files.handle();
            job.keep_on(arbiter, 0, failed, move || files.clone().run());
            Place::Files(handle)
        }
    }
}

/// Waits for the first client; returns at once without `hints`.
async fn first_client(hints: Option<watch::Receiver<ClientHints>>) {
    let Some(mut hints) = hints else { return };
    if hints.wait_for(|hints| hints.has_followed).await.is_err() {
        // The server is gone: the agent ends.
        std::future::pending().await
    }
}

/// Reports to the sink that the watches of these kinds failed; the restarted ones report when they succeed.
fn reports_failure(sink: Arc<dyn EventSink>, kinds: Vec<SourceKind>) -> impl Fn(&str) + Send + 'static {
    move |reason| {
        let (sink, kinds, health) = (sink.clone(), kinds.clone(), watch_failed(reason));
        actix::spawn(async move {
            join_all(kinds.into_iter().map(|kind| sink.send(SourceEvent::Health(kind, health.clone()))))
                .await;
        });
    }
}

/// Sends the Node to the sink: the one that the heartbeats watch, or one that is watched here.
async fn follow_node(api: &ApiServer, name: String, watched: Option<WatchedNode>, sink: Arc<dyn EventSink>) {
    match watched {
        Some((node, health)) => {
            join(send_node_events(&name, node, &*sink), send_health(health, &*sink)).await;
        }
        None => {
            let (node_sender, node) = node_channel();
            let (health_sender, health) = watch::channel(JobHealth::Pending);
            let take = move |node: Option<Arc<Node>>| {
                node_sender.send_replace(Some(node));
            };
            let watching = watch_node(api, &name, &health_sender, take);
            join(watching, join(send_node_events(&name, node, &*sink), send_health(health, &*sink))).await;
        }
    }
}

async fn send_node_events(name: &str, mut node: watch::Receiver<NodeSeen>, sink: &dyn EventSink) {
    loop {
        let seen = node.borrow_and_update().clone();
        if let Some(node) = seen {
            let event = SourceEvent::Node(node_view(name, node.as_deref()));
            while sink.send(event.clone()).await == Ack::Relist {}
        }
        // Its watch ends only with the agent.
        if node.changed().await.is_err() {
            return std::future::pending().await;
        }
    }
}

async fn send_health(mut health: watch::Receiver<JobHealth>, sink: &dyn EventSink) {
    loop {
        let now = health.borrow_and_update().clone();
        if now != JobHealth::Pending {
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

    fn source_error(settings: &Settings) -> Option<&'static str> {
        Source::of(settings, Cluster::of(settings)).err()
    }

    #[test]
    fn the_source_of_services_comes_from_the_settings() {
        let mut settings = Settings::default();
        assert!(source_error(&settings).is_some_and(|why| why.contains("neither an API server")));
        settings.endpoints.manifests = Some("/etc/keelson/manifests".into());
        assert!(matches!(Source::of(&settings, None), Ok(Source::Files(_))));
        settings.kube.in_cluster = true;
        assert!(matches!(Source::of(&settings, Cluster::of(&settings)), Ok(Source::Kube(_))));
        settings.endpoints.source = EndpointsSource::Files;
        assert!(matches!(Source::of(&settings, Cluster::of(&settings)), Ok(Source::Files(_))));
        settings.feature_gates = settings.feature_gates.with(Gate::ServiceEndpoints, false);
        assert_eq!(source_error(&settings), Some("feature gate ServiceEndpoints is disabled"));
        settings.feature_gates = settings.feature_gates.with(Gate::ServiceEndpoints, true);
        settings.endpoints.source = EndpointsSource::Off;
        assert_eq!(source_error(&settings), Some("endpoints.source is off"));
        assert!(Source::of(&settings, Cluster::of(&settings)).is_err());
    }
}
