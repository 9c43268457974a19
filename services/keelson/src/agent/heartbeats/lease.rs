//! The LeaseRenewer of the agent. Like the kubelet's heartbeat client it has a connection of its own (and an arbiter),
//! so that no other request to the API server delays a renewal.

use std::sync::Arc;

use keelson_actor_system::{
    clock::unix_ms,
    cluster::JobHealth,
    inspect::{Mailbox, Recorder},
    supervise,
};
use keelson_heartbeats::lease::{Contention, LeaseMetrics, LeaseRenewer, LeaseRenewerParts};
use tokio::sync::watch;

use crate::{
    agent::{cluster::Cluster, jobs, shared::Shared},
    node_settings,
};

pub(super) const ACTOR: &str = "LeaseRenewer";
/// It gets a message for each change of the Node, and requests of users.
const MAILBOX: usize = 1024;

pub(super) struct Lease {
    pub(super) renewer: Mailbox<LeaseRenewer>,
    pub(super) metrics: LeaseMetrics,
    pub(super) health: watch::Receiver<JobHealth>,
    pub(super) contention: watch::Receiver<Contention>,
    pub(super) arbiter: actix::ArbiterHandle,
}

pub(super) fn build(shared: &Shared, cluster: &Cluster) -> Lease {
    let policy = node_settings::lease_policy(&shared.settings);
    let api = cluster.connect(policy.request_timeout().min(cluster.request_timeout));
    let metrics = LeaseMetrics::default();
    let (health, health_seen) = watch::channel(JobHealth::Pending);
    // Until the Lease has been read, role node does not know whether it may report.
    let undecided = if policy.may_stand_back { Contention::Undecided } else { Contention::Uncontested };
    let (contention, contention_seen) = watch::channel(undecided);
    let recorder = Recorder::new(ACTOR, MAILBOX);
    let parts = LeaseRenewerParts {
        api: Arc::new(api),
        store: shared.store.clone(),
        clock: shared.clock,
        wall: Arc::new(unix_ms),
        policy,
        metrics: metrics.clone(),
        health,
        contention,
        changes: shared.changes.clone(),
        recorder: recorder.clone(),
    };
    let arbiter = jobs::arbiter(c"lease").handle();
    let renewer = supervise::start(Some(&arbiter), recorder, move |_| LeaseRenewer::new(parts));
    Lease { renewer, metrics, health: health_seen, contention: contention_seen, arbiter }
}
