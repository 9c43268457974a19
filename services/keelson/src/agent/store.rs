//! The durable state of the agent.
//!
//! Owns: how the store is opened (in the background, so that no disk delays a call) and closed, and the pid file
//! on the same disk. In: settings. Out: the store.

use std::{path::Path, sync::Arc, time::Duration};

use anyhow::Context as _;
use keelson_config::Settings;
use keelson_storage::{CALL_LIMIT, DeferredStore, OpenError, Outcome, StateStore};

/// Holds the agent's process id, in the state folder; removed at a clean end.
const PID_FILE: &str = "keelson.pid";
/// Maximum wait of the agent's end for the disk.
const CLOSE_LIMIT: Duration = Duration::from_secs(3);

/// Starts to open the store of the state folder, and returns at once.
pub(super) fn start(settings: &Settings) -> anyhow::Result<Arc<DeferredStore>> {
    let dir = settings.agent.state_dir.clone();
    let opener = move || open(&dir);
    let path = settings.agent.state_dir.join("state");
    let store = DeferredStore::with_opener(&path, CALL_LIMIT, Box::new(opener));
    Ok(Arc::new(store.context("cannot start the thread of the state store")?))
}

/// Closes the store and removes the pid file, unless the disk hangs.
pub(super) async fn close(store: Arc<DeferredStore>, settings: &Settings) {
    let pid_file = settings.agent.state_dir.join(PID_FILE);
    let (done, closed) = tokio::sync::oneshot::channel();
    // A detached thread: removing a file may hang as well.
    let closing = move || {
        if store.close(CLOSE_LIMIT) {
            // A remaining file names a process that has ended, which is as informative.
            let _ = std::fs::remove_file(pid_file);
        }
        let _ = done.send(());
    };
    let spawned = std::thread::Builder::new().name("closing".into()).spawn(closing);
    let in_time = tokio::time::timeout(CLOSE_LIMIT, closed).await;
    if spawned.is_err() || in_time.is_err() {
        tracing::warn!("state store not closed: the disk does not answer");
    }
}

fn open(state_dir: &Path) -> Result<Arc<dyn StateStore>, OpenError> {
    let opened = keelson_storage::open(state_dir)?;
    match &opened.outcome {
        Outcome::Created => tracing::info!(state_dir = %state_dir.display(), "state store created"),
        Outcome::Opened => {}
        Outcome::Migrated { from, to } => {
            tracing::info!(from, to, "state store migrated to a newer schema version")
        }
        Outcome::Recovered { moved_to, reason, .. } => tracing::error!(
            moved_to = %moved_to.display(),
            reason,
            "state store damaged and moved aside; starting with an empty one"
        ),
        other => tracing::info!(?other, "state store opened"),
    }
    // For people and scripts; the lock, not this file, keeps a second agent out.
    let pid_file = state_dir.join(PID_FILE);
    if let Err(error) = std::fs::write(&pid_file, format!("{}\n", std::process::id())) {
        tracing::warn!(%error, file = %pid_file.display(), "cannot write the pid file");
    }
    Ok(opened.store)
}
