//! Service endpoints in the debug API.
//!
//! Owns: nothing. In: requests of the view. Out: the messages of `keelson.endpoints.v1.Inspection`, checks, metrics.

use keelson_actor_system::{clock::unix_ms, reports::EndpointsView};
use keelson_debug::{Check, ViewError};
use keelson_endpoint_publisher::{ExplainService, Freshness, ListServices, ServiceName};
use keelson_proto::endpoints as pb;
use prometheus_client::registry::Registry;

use super::{EnabledEndpoints, Endpoints, source::Place};
use crate::agent::actor_handle::ask_with_timeout;

impl Endpoints {
    /// Stops the actor: another agent serves the endpoints.
    pub(in crate::agent) fn stop(&self) {
        if let Self::Enabled(on) = self {
            on.arbiter.stop();
        }
    }

    /// The sync status, and at most `max` Services.
    pub(in crate::agent) async fn show(&self, namespace: &str, max: u32) -> Result<pb::State, ViewError> {
        match self {
            Self::Disabled(why) => {
                Ok(pb::State { state: "disabled".into(), reason: (*why).into(), ..pb::State::default() })
            }
            Self::Enabled(on) => on.show(namespace, max).await,
        }
    }

    /// `None` if nothing of that name is known.
    pub(in crate::agent) async fn explain(
        &self,
        namespace: &str,
        name: &str,
    ) -> Result<Option<pb::Explanation>, ViewError> {
        match self {
            Self::Disabled(why) => {
                Err(ViewError::Unavailable(format!("service endpoints are disabled: {why}")))
            }
            Self::Enabled(on) => {
                ask_with_timeout(on.publisher.ask(ExplainService { name: ServiceName::new(namespace, name) }))
                    .await
            }
        }
    }

    /// The last reports of the backends; none while endpoints are disabled.
    pub(in crate::agent) fn backends(&self) -> Vec<pb::Backend> {
        match self {
            Self::Disabled(_) => Vec::new(),
            Self::Enabled(on) => on.server.backends().list(),
        }
    }

    /// The readiness checks: none while endpoints are disabled.
    pub(in crate::agent) fn checks(&self) -> Vec<Check> {
        match self {
            Self::Disabled(_) => Vec::new(),
            Self::Enabled(on) => vec![on.check()],
        }
    }

    /// Registers the metrics; none while endpoints are disabled.
    pub(in crate::agent) fn register(&self, registry: &mut Registry) {
        if let Self::Enabled(on) = self {
            on.metrics.register(registry);
            on.server_metrics.register(registry);
            registry.register_collector(Box::new(on.server.backends().clone()));
        }
    }
}

impl EnabledEndpoints {
    async fn show(&self, namespace: &str, max: u32) -> Result<pb::State, ViewError> {
        let question = ListServices { namespace: namespace.to_owned(), max: max as usize };
        let mut state = ask_with_timeout(self.publisher.ask(question)).await?;
        state.listen = self.server_job.listens();
        state.watchers = self.server.watchers().list();
        state.backends = self.server.backends().list();
        match &self.place {
            Place::Kube(api) => {
                state.source = "kube".into();
                state.source_place = api.url();
            }
            Place::Files(files) => {
                state.source = "files".into();
                state.source_place = files.place().to_owned();
                state.faults = files.faults();
            }
        }
        Ok(state)
    }

    fn check(&self) -> Check {
        let name = "endpoints".to_owned();
        let has_state = self.feed.published.borrow().is_some();
        let reason = match &*self.view.borrow() {
            EndpointsView::Disabled | EndpointsView::Synced => None,
            EndpointsView::NotWatched => {
                let message = "not watched: no client is connected yet".to_owned();
                return Check { name, ok: true, message, since_unix_ms: 0 };
            }
            // Just restarted, and served from disk.
            EndpointsView::Pending if has_state => None,
            EndpointsView::Pending => Some("reading the state from disk".to_owned()),
            EndpointsView::Stale { reason, .. } => Some(reason.clone()),
        };
        let since_unix_ms = match self.feed.published.borrow().as_deref().map(|state| &state.freshness) {
            Some(Freshness::Stale { since_unix_ms, .. }) => *since_unix_ms,
            Some(Freshness::Synced) | None => 0,
        };
        match reason {
            None => Check { name, ok: true, message: "ok".into(), since_unix_ms: 0 },
            Some(message) => Check { name, ok: false, message, since_unix_ms: since_unix_ms.min(unix_ms()) },
        }
    }
}
