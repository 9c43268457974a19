//! The API server, for the parts that need one.
//!
//! Owns: its address and credentials from the settings, and the metrics of requests to it. In: section `[kube]`. Out:
//! [`Cluster`], which makes connections; `None` if no API server is configured.

use std::{sync::Arc, time::Duration};

use keelson_actor_system::{clock::unix_ms, cluster::JobHealth};
use keelson_config::{Gate, Settings};
use keelson_kube::{
    ApiServer, ApiServerParts, ClusterSource, CredentialsInUse, ExplicitSource, Node, ServerSignals,
};
use prometheus_client::{metrics::counter::Counter, registry::Registry};
use tokio::sync::watch;

use super::{
    credentials::{CertificateFiles, Credentials, Renewal, certificate_file},
    rest_client::RestClientMetrics,
};

/// The Node as last seen. `None`: not read yet; `Some(None)`: it does not exist.
pub(super) type NodeSeen = Option<Option<Arc<Node>>>;

/// The API server of the settings. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Cluster {
    source: ClusterSource,
    rest_client: RestClientMetrics,
    signals: ServerSignals,
    rollbacks: Counter,
    /// What the connections read of the credentials.
    pub(super) credentials: Credentials,
    pub(crate) request_timeout: Duration,
}

impl Cluster {
    /// `None` if the settings name no API server.
    pub(crate) fn of(settings: &Settings) -> Option<Self> {
        let source = source(settings)?;
        let request_timeout = settings.kube.request_timeout;
        let rollbacks = Counter::default();
        let count = rollbacks.clone();
        let signals = ServerSignals::new(move |_| {
            count.inc();
        });
        let (rest_client, credentials) = (RestClientMetrics::default(), Credentials::default());
        Some(Self { source, rest_client, credentials, signals, rollbacks, request_timeout })
    }

    pub(crate) fn connect(&self, timeout: Duration) -> ApiServer {
        ApiServer::new(ApiServerParts {
            timeout,
            observer: self.rest_client.observer(),
            signals: self.signals.clone(),
            credentials: self.credentials.observer.clone(),
            ..ApiServerParts::new(self.source.clone())
        })
    }

    /// What the connections have read of the credentials.
    pub(crate) fn credentials_in_use(&self) -> CredentialsInUse {
        self.credentials.observer.in_use()
    }

    /// A connection with other credentials than those of the agent.
    fn connect_by(&self, source: ClusterSource) -> ApiServer {
        ApiServer::new(ApiServerParts {
            timeout: self.request_timeout,
            observer: self.rest_client.observer(),
            ..ApiServerParts::new(source)
        })
    }

    /// The job that requests and renews the client certificate; `None` if another process does.
    pub(super) fn renewal(&self, settings: &Settings) -> Option<Renewal> {
        let path = settings.kube.bootstrap_kubeconfig.clone()?;
        Some(Renewal {
            node: settings.agent.node_name.clone(),
            files: CertificateFiles::new(&settings.kube.certificate_dir),
            kubeconfig: path.clone(),
            bootstrap: self.connect_by(ClusterSource::Kubeconfig { path, context: None }),
            current: self.connect(self.request_timeout),
            credentials: self.credentials.clone(),
        })
    }

    /// Registers the metrics of requests and credentials.
    pub(super) fn register(&self, registry: &mut Registry) {
        self.rest_client.register(registry);
        registry.sub_registry_with_prefix("keelson_kube").register(
            "store_rollbacks",
            "Rollbacks of the API server's store that were detected, for example after a restore of etcd",
            self.rollbacks.clone(),
        );
        self.credentials.register(registry);
    }
}

pub(super) fn watches_pods(settings: &Settings) -> bool {
    let is_on = |gate| settings.feature_gates.enabled(gate);
    source(settings).is_some() && is_on(Gate::NodeHeartbeats) && is_on(Gate::PodAwarePulls)
}

/// Health of a watch that panicked or ended.
pub(super) fn watch_failed(reason: &str) -> JobHealth {
    let reason = format!("the watch failed; restarting: {reason}");
    JobHealth::Failing { reason, since_unix_ms: unix_ms(), refused: false }
}

/// Reports that a watch has failed until the restarted one succeeds.
pub(super) fn shows_failure(health: Arc<watch::Sender<JobHealth>>) -> impl Fn(&str) + Send + 'static {
    move |reason| drop(health.send_replace(watch_failed(reason)))
}

pub(super) fn node_channel() -> (watch::Sender<NodeSeen>, watch::Receiver<NodeSeen>) {
    watch::channel(None)
}

/// `None` if the settings name no API server.
fn source(settings: &Settings) -> Option<ClusterSource> {
    let kube = &settings.kube;
    if let Some(path) = &kube.kubeconfig {
        let context = (!kube.context.is_empty()).then(|| kube.context.clone());
        return Some(ClusterSource::Kubeconfig { path: path.clone(), context });
    }
    if let Some(path) = &kube.bootstrap_kubeconfig {
        let certificate = certificate_file(settings);
        return Some(ClusterSource::Issued { kubeconfig: path.clone(), certificate });
    }
    if kube.in_cluster {
        return Some(ClusterSource::InCluster);
    }
    (!kube.server.is_empty()).then(|| {
        ClusterSource::Explicit(ExplicitSource {
            server: kube.server.clone(),
            ca_file: kube.certificate_authority.clone(),
            token_file: kube.token_file.clone(),
            client_certificate_file: kube.client_certificate.clone(),
            client_key_file: kube.client_key.clone(),
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_api_server_address_comes_from_the_settings() {
        let mut settings = Settings::default();
        assert_eq!(source(&settings), None);
        settings.kube.server = "https://10.0.0.1:6443".into();
        settings.kube.token_file = Some("/etc/token".into());
        let Some(ClusterSource::Explicit(explicit)) = source(&settings) else { panic!("explicit") };
        assert_eq!(
            (&*explicit.server, explicit.token_file),
            ("https://10.0.0.1:6443", settings.kube.token_file)
        );
        let mut settings = Settings::default();
        settings.kube.in_cluster = true;
        assert_eq!(source(&settings), Some(ClusterSource::InCluster));
        let mut settings = Settings::default();
        settings.kube.kubeconfig = Some("/etc/kubeconfig".into());
        settings.kube.context = "prod".into();
        let named =
            ClusterSource::Kubeconfig { path: "/etc/kubeconfig".into(), context: Some("prod".into()) };
        assert_eq!(source(&settings), Some(named));
        let mut settings = Settings::default();
        settings.kube.bootstrap_kubeconfig = Some("/etc/bootstrap".into());
        let certificate = "/var/lib/keelson/pki/client-current.pem".into();
        let issued = ClusterSource::Issued { kubeconfig: "/etc/bootstrap".into(), certificate };
        assert_eq!(source(&settings), Some(issued));
    }
}
