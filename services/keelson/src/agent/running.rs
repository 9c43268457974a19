//! A running agent: what is needed until it stops.

use std::{sync::Arc, time::Duration};

use keelson_config::Loaded;
use keelson_storage::DeferredStore;
use tokio::sync::watch;

use super::{endpoints::EndpointsServing, pulls::Pulls, view::View};

pub(super) struct Running {
    pub(super) loaded: watch::Sender<Arc<Loaded>>,
    pub(super) pulls: Pulls,
    /// `None` while the Endpoints API is disabled.
    pub(super) endpoints_server: Option<EndpointsServing>,
    pub(super) stop_debug: watch::Sender<bool>,
    pub(super) store: Arc<DeferredStore>,
    pub(super) view: View,
}

impl Running {
    /// Closes the store, so that a successor can open it.
    pub(super) fn close_store(&self, limit: Duration) {
        if !self.store.close(limit) {
            tracing::warn!("the state store was not closed in time; the successor opens it later");
        }
    }
}
