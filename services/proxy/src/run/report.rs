//! Reports the status of the proxy to the agent, which shows it.
//!
//! Owns: one task. In: changes of the displayed status. Out: `keelson.endpoints.v1.Endpoints/Report`, at most one per
//! second and at least one per 10 s. The agent only shows it. The follower reports that the agent cannot be reached.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use keelson_client::{Reporter, Target};
use keelson_proto::endpoints::Backend;

use super::shared::Shared;
use crate::model::Family;

/// Minimum time between reports.
const MIN_INTERVAL: Duration = Duration::from_secs(1);
/// Maximum time between reports. Source: endpoints.proto.
const MAX_INTERVAL: Duration = Duration::from_secs(10);

/// Reports until it is dropped.
pub(super) async fn report(shared: Arc<Shared>, target: Target, debug: String, http: Option<SocketAddr>) {
    let mut changes = shared.changes();
    let mut reporter = Reporter::new(target);
    loop {
        let backend = backend(&shared, &debug, http).await;
        // The follower reports an unreachable agent.
        if let Err(error) = reporter.report(backend).await {
            tracing::debug!(%error, "cannot report the proxy status to the agent");
        }
        tokio::time::sleep(MIN_INTERVAL).await;
        // The sender lives as long as this task. After a timeout the report is repeated.
        drop(tokio::time::timeout(MAX_INTERVAL - MIN_INTERVAL, changes.changed()).await);
    }
}

/// "pending", "synced" or "failing", with the reason; and how often drift was repaired.
pub(super) async fn sync_status(shared: &Arc<Shared>) -> (&'static str, String, u64) {
    let shared_for_thread = shared.clone();
    // The lock may be held for a second while a large cluster is loaded.
    let found = tokio::task::spawn_blocking(move || {
        let sync = shared_for_thread.sync();
        let failure = Family::ALL.into_iter().find_map(|family| {
            let failure = sync.family(family).failure.as_ref()?;
            Some(format!("{family}: {}", failure.error))
        });
        let repaired = Family::ALL.into_iter().map(|family| sync.family(family).totals.repaired).sum();
        (failure, sync.has_synced(), repaired)
    });
    match found.await.unwrap_or_default() {
        (Some(reason), _, repaired) => ("failing", reason, repaired),
        (None, true, repaired) => ("synced", String::new(), repaired),
        (None, false, repaired) => ("pending", String::new(), repaired),
    }
}

async fn backend(shared: &Arc<Shared>, debug: &str, http: Option<SocketAddr>) -> Backend {
    let (state, reason, repaired) = sync_status(shared).await;
    let status = shared.status().clone();
    Backend {
        name: shared.backend.name.to_owned(),
        pid: std::process::id(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        debug: debug.to_owned(),
        http: http.map(|address| format!("http://{address}/")).unwrap_or_default(),
        instance_id: status.applied.instance_id,
        rev: status.applied.rev,
        state: state.to_owned(),
        reason,
        last_sync_unix_ms: Family::ALL
            .map(|family| status.synced_unix_ms[family as usize])
            .into_iter()
            .max()
            .unwrap_or(0),
        service_ports: status.service_ports,
        repaired,
        ..Backend::default()
    }
}
