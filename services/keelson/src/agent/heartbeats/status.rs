//! The StatusReporter of the agent.

use std::sync::Arc;

use keelson_actor_system::{
    clock::unix_ms,
    cluster::JobHealth,
    inspect::{Mailbox, Recorder},
    reports::EndpointsView,
    supervise,
};
use keelson_heartbeats::{
    lease::Contention,
    status::{StatusMetrics, StatusPolicy, StatusReporter, StatusReporterParts},
};
use keelson_host::LinuxHost;
use keelson_kube::ApiServer;
use tokio::sync::watch;

use super::sources::{PullReports, RuntimeReports};
use crate::agent::{pulls::Pulls, shared::Shared};

pub(super) const ACTOR: &str = "StatusReporter";
/// It gets a message for each change of the Node, and requests of users.
const MAILBOX: usize = 1024;

pub(super) struct Status {
    pub(super) reporter: Mailbox<StatusReporter>,
    pub(super) metrics: StatusMetrics,
    pub(super) health: watch::Receiver<JobHealth>,
}

/// The watched state that the StatusReporter uses.
pub(super) struct Observed {
    pub(super) endpoints: watch::Receiver<EndpointsView>,
    pub(super) contention: watch::Receiver<Contention>,
}

pub(super) fn build(
    shared: &Shared,
    pulls: &Pulls,
    policy: StatusPolicy,
    api: &ApiServer,
    observed: Observed,
    arbiter: &actix::ArbiterHandle,
) -> Status {
    let metrics = StatusMetrics::default();
    let (health, health_seen) = watch::channel(JobHealth::Pending);
    let recorder = Recorder::new(ACTOR, MAILBOX);
    let (client, runtime_health) = (pulls.runtime.clone(), pulls.runtime_health.clone());
    let parts = StatusReporterParts {
        api: Arc::new(api.clone()),
        host: Arc::new(LinuxHost::new()),
        runtime: Arc::new(RuntimeReports { client, health: runtime_health }),
        pulls: Arc::new(PullReports(pulls.coordinator.clone())),
        endpoints: observed.endpoints,
        contention: observed.contention,
        store: shared.store.clone(),
        clock: shared.clock,
        wall: unix_ms,
        policy,
        metrics: metrics.clone(),
        health,
        changes: shared.changes.clone(),
        recorder: recorder.clone(),
    };
    let reporter = supervise::start(Some(arbiter), recorder, move |_| StatusReporter::new(parts));
    Status { reporter, metrics, health: health_seen }
}
