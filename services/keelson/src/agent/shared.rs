//! Shared by every part of the agent.

use std::sync::Arc;

use keelson_actor_system::clock::Clock;
use keelson_config::Settings;
use keelson_storage::{DeferredStore, folder_id};
use tokio::sync::watch;

use super::store;

pub(super) struct Shared {
    pub(super) settings: Arc<Settings>,
    pub(super) store: Arc<DeferredStore>,
    /// The label of the agent's leases in the runtime: the same for one state folder at every start, with or without a
    /// store.
    pub(super) state_folder_id: String,
    pub(super) clock: Clock,
    /// Incremented with each visible change.
    pub(super) changes: watch::Sender<u64>,
}

impl Shared {
    pub(super) fn new(settings: Arc<Settings>) -> anyhow::Result<Self> {
        Ok(Self {
            store: store::start(&settings)?,
            state_folder_id: folder_id(&settings.agent.state_dir),
            clock: Clock::start(),
            changes: watch::channel(0).0,
            settings,
        })
    }
}
