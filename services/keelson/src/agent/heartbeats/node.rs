//! The watch of the Node.
//!
//! Owns: the job that watches. In: the Node. Out: messages to LeaseRenewer, StatusReporter and PullCoordinator, and the Node
//! for the endpoints.

use std::sync::Arc;

use keelson_actor_system::{cluster::JobHealth, inspect::Mailbox};
use keelson_heartbeats::{
    lease::{self, LeaseRenewer},
    status::{self, StatusReporter},
};
use keelson_kube::{ApiServer, Node, watch_node};
use keelson_pulls::coordinator::{PullCoordinator, PullEvent};
use tokio::sync::watch;

use crate::agent::{
    cluster::{NodeSeen, node_channel, shows_failure},
    jobs::Job,
};

pub(super) struct NodeWatch {
    pub(super) job: Job,
    pub(super) node: watch::Receiver<NodeSeen>,
    pub(super) health: watch::Receiver<JobHealth>,
}

/// The receivers of a message for each change of the Node.
#[derive(Clone)]
pub(super) struct Receivers {
    pub(super) lease: Option<Mailbox<LeaseRenewer>>,
    pub(super) status: Mailbox<StatusReporter>,
    /// `None` in role node, in which the StatusReporter computes the condition DiskPressure.
    pub(super) pulls: Option<Mailbox<PullCoordinator>>,
}

/// `renewals`: wakes the watches when it succeeds after failures.
pub(super) fn build(
    api: &ApiServer,
    name: &str,
    receivers: Receivers,
    renewals: Option<watch::Receiver<JobHealth>>,
    changes: watch::Sender<u64>,
    arbiter: &actix::ArbiterHandle,
) -> NodeWatch {
    let (health, health_seen) = watch::channel(JobHealth::Pending);
    let (seen, node) = node_channel();
    let health = Arc::new(health);
    let watched =
        WatchedNode { api: api.clone(), name: name.to_owned(), health: health.clone(), seen, receivers };
    let job = Job::new("NodeWatch", changes);
    job.keep_on(arbiter, 0, shows_failure(health), move || watched.clone().follow());
    if let Some(renewals) = renewals {
        let api = api.clone();
        job.keep_on(arbiter, 1, |_| {}, move || wake_watches(api.clone(), renewals.clone()));
    }
    NodeWatch { job, node, health: health_seen }
}

/// Wakes the watches when a renewal succeeds after failures: their own back-off may be up to a minute. Without a Lease
/// the first watch that succeeds wakes the others.
async fn wake_watches(api: ApiServer, mut renewals: watch::Receiver<JobHealth>) {
    let mut is_failing = false;
    while renewals.changed().await.is_ok() {
        let is_healthy = *renewals.borrow_and_update() == JobHealth::Healthy;
        if is_failing && is_healthy {
            api.wake_watches();
        }
        is_failing = !is_healthy;
    }
    // The LeaseRenewer was stopped.
    std::future::pending().await
}

#[derive(Clone)]
struct WatchedNode {
    api: ApiServer,
    name: String,
    health: Arc<watch::Sender<JobHealth>>,
    seen: watch::Sender<NodeSeen>,
    receivers: Receivers,
}

impl WatchedNode {
    async fn follow(self) {
        let Self { api, name, health, seen, receivers: Receivers { lease, status, pulls } } = self;
        let mut pressure = None;
        let tell = move |node: Option<Arc<Node>>| {
            seen.send_replace(Some(node.clone()));
            let is_true = node.as_deref().is_some_and(has_disk_pressure);
            if let Some(pulls) = &pulls
                && pressure.replace(is_true) != Some(is_true)
            {
                pulls.deliver(PullEvent::DiskPressure(is_true));
            }
            let uid = node.as_ref().and_then(|node| node.metadata.uid.clone());
            // A lost message would leave an actor with an outdated Node; a Node changes a few times per minute.
            if let Some(lease) = &lease {
                lease.deliver(lease::NodeChanged { uid });
            }
            status.deliver(status::NodeChanged { node });
        };
        watch_node(&api, &name, &health, tell).await;
    }
}

fn has_disk_pressure(node: &Node) -> bool {
    let conditions = node.status.as_ref().and_then(|status| status.conditions.as_deref());
    conditions
        .unwrap_or_default()
        .iter()
        .any(|condition| condition.type_ == status::DISK_PRESSURE && condition.status == "True")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn disk_pressure_is_read_from_the_node() {
        let node = |conditions: serde_json::Value| -> Node {
            serde_json::from_value(serde_json::json!({"status": {"conditions": conditions}})).expect("a Node")
        };
        let condition = |kind: &str, status: &str| serde_json::json!({"type": kind, "status": status});
        assert!(has_disk_pressure(&node(serde_json::json!([condition("DiskPressure", "True")]))));
        for other in [condition("DiskPressure", "Unknown"), condition("MemoryPressure", "True")] {
            assert!(!has_disk_pressure(&node(serde_json::json!([other]))));
        }
        assert!(!has_disk_pressure(&Node::default()));
    }
}
