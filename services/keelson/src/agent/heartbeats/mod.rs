//! Heartbeats, and the pod events for image pulls.
//!
//! Owns: LeaseRenewer and StatusReporter with their connections and watches, or the reason why they are disabled. In:
//! settings, the other actors. Out: [`Heartbeats`] for the view, and the handles of its actors.
//!
//! A companion has a LeaseRenewer only with `node.companion_lease`. The StatusReporter shares an arbiter and a
//! connection with the watches of the Node and of the pods.

mod inspection;
mod lease;
mod node;
mod pods;
pub(crate) mod removal;
mod sources;
mod status;

use keelson_actor_system::{clock::Clock, cluster::JobHealth, reports::EndpointsView};
use keelson_config::Gate;
use keelson_debug::Check;
use keelson_heartbeats::{
    lease::{Contention, LeaseState},
    status::{CountNow, Role, StatusPolicy, StatusState},
};
use keelson_kube::ApiServer;
use prometheus_client::registry::Registry;
use tokio::sync::watch;

use self::{lease::Lease, node::NodeWatch, pods::PodWatch, status::Status};
use super::{
    actor_handle::ActorHandle,
    cluster::{Cluster, NodeSeen},
    credentials::Credentials,
    jobs,
    pulls::Pulls,
    shared::Shared,
};
use crate::node_settings;

/// Why a companion has no LeaseRenewer.
const NO_LEASE: &str = "node.companion_lease is false";

pub(super) enum Heartbeats {
    Disabled(&'static str),
    Enabled(Box<EnabledHeartbeats>),
}

pub(super) struct EnabledHeartbeats {
    role: Role,
    node_name: String,
    takes_conditions: bool,
    removes_conditions: bool,
    /// `None` in role companion, unless the settings request it.
    lease: Option<Lease>,
    status: Status,
    node: NodeWatch,
    pods: Option<PodWatch>,
    clock: Clock,
    rest: ApiServer,
    credentials: Credentials,
    arbiter: actix::ArbiterHandle,
}

pub(super) fn build(
    shared: &Shared,
    cluster: Option<&Cluster>,
    pulls: &Pulls,
    endpoints: watch::Receiver<EndpointsView>,
) -> anyhow::Result<Heartbeats> {
    // Loading the settings reports errors; this is for callers that loaded them in another way.
    let policy = node_settings::status_policy(&shared.settings).map_err(|wrong| {
        let wrong: Vec<String> = wrong.iter().map(|of| format!("{}: {}", of.key, of.error)).collect();
        anyhow::anyhow!(wrong.join("; "))
    })?;
    let Some(cluster) = cluster else {
        return Ok(Heartbeats::Disabled("no API server is configured (section [kube])"));
    };
    if !shared.settings.feature_gates.enabled(Gate::NodeHeartbeats) {
        return Ok(Heartbeats::Disabled("feature gate NodeHeartbeats is disabled"));
    }
    Ok(Heartbeats::Enabled(Box::new(build_on(shared, cluster, pulls, endpoints, policy))))
}

fn build_on(
    shared: &Shared,
    cluster: &Cluster,
    pulls: &Pulls,
    endpoints: watch::Receiver<EndpointsView>,
    policy: StatusPolicy,
) -> EnabledHeartbeats {
    let settings = &shared.settings;
    let lease = node_settings::renews_lease(settings).then(|| lease::build(shared, cluster));
    let rest = cluster.connect(cluster.request_timeout);
    let (role, node_name, takes_conditions) =
        (policy.role, policy.node_name.clone(), policy.external_conditions);
    let arbiter = jobs::arbiter(c"node-status").handle();
    // Without a Lease there is nothing to contest.
    let contention = match &lease {
        Some(lease) => lease.contention.clone(),
        None => watch::channel(Contention::Uncontested).1,
    };
    let observed = status::Observed { endpoints, contention };
    let status = status::build(shared, pulls, policy, &rest, observed, &arbiter);
    let receivers = node::Receivers {
        lease: lease.as_ref().map(|lease| lease.renewer.clone()),
        status: status.reporter.clone(),
        pulls: (role == Role::Companion).then(|| pulls.coordinator.clone()),
    };
    let renewals = lease.as_ref().map(|lease| lease.health.clone());
    let node = node::build(&rest, &node_name, receivers, renewals, shared.changes.clone(), &arbiter);
    let pods = settings
        .feature_gates
        .enabled(Gate::PodAwarePulls)
        .then(|| pods::build(&rest, &node_name, &pulls.coordinator, shared.changes.clone(), &arbiter));
    EnabledHeartbeats {
        role,
        node_name,
        takes_conditions,
        removes_conditions: settings.node.remove_conditions_on_stop,
        lease,
        status,
        node,
        pods,
        clock: shared.clock,
        rest,
        credentials: cluster.credentials.clone(),
        arbiter,
    }
}

impl Heartbeats {
    /// Its actors and watches.
    pub(super) fn actors(&self) -> Vec<ActorHandle> {
        match self {
            Self::Disabled(why) => {
                vec![ActorHandle::off(lease::ACTOR, why), ActorHandle::off(status::ACTOR, why)]
            }
            Self::Enabled(on) => on.actors(),
        }
    }

    /// Stops the actors: another agent reports for the node.
    pub(super) fn stop(&self) {
        if let Self::Enabled(on) = self {
            on.stop();
        }
    }

    /// The watched Node, and the health of the watch; `None` while heartbeats are disabled.
    pub(super) fn node(&self) -> Option<(watch::Receiver<NodeSeen>, watch::Receiver<JobHealth>)> {
        match self {
            Self::Disabled(_) => None,
            Self::Enabled(on) => Some((on.node.node.clone(), on.node.health.clone())),
        }
    }

    /// The readiness checks: none while heartbeats are disabled.
    pub(super) fn checks(&self) -> Vec<Check> {
        match self {
            Self::Disabled(_) => Vec::new(),
            Self::Enabled(on) => on.checks(),
        }
    }

    /// Registers the metrics; none while heartbeats are disabled.
    pub(super) fn register(&self, registry: &mut Registry) {
        if let Self::Enabled(on) = self {
            if let Some(lease) = &on.lease {
                lease.metrics.register(registry);
            }
            on.status.metrics.register(registry, on.role);
        }
    }

    /// Updates gauges that grow with time.
    pub(super) fn count_now(&self) {
        if let Self::Enabled(on) = self {
            if let Some(lease) = &on.lease {
                lease.metrics.now_gauges(on.clock.now());
            }
            // Does not wait for an answer: a reporter that is stuck must not hide the metrics that show it.
            let _ = on.status.reporter.offer(CountNow {});
        }
    }
}

impl EnabledHeartbeats {
    fn actors(&self) -> Vec<ActorHandle> {
        let lease = match &self.lease {
            Some(lease) => ActorHandle::on(&lease.renewer, || LeaseState {}, || LeaseState {}),
            None => ActorHandle::off(lease::ACTOR, NO_LEASE),
        };
        let status = ActorHandle::on(&self.status.reporter, || StatusState {}, || StatusState {});
        let jobs = [&self.node.job].into_iter().chain(self.pods.as_ref().map(|pods| &pods.job));
        [lease, status].into_iter().chain(jobs.map(|job| ActorHandle::job(job.recorder()))).collect()
    }

    fn stop(&self) {
        if let Some(lease) = &self.lease {
            lease.arbiter.stop();
        }
        self.arbiter.stop();
    }

    fn checks(&self) -> Vec<Check> {
        let lease = self.lease.as_ref();
        let mut checks: Vec<_> = lease.iter().map(|lease| check("lease", &lease.health)).collect();
        checks.push(check("node-status", &self.status.health));
        checks.push(check("node-watch", &self.node.health));
        checks.extend(self.pods.as_ref().map(|pods| check("pod-watch", &pods.health)));
        checks.push(self.credentials.check());
        checks
    }
}

/// A part that has neither succeeded nor failed yet counts as ready.
fn check(name: &str, health: &watch::Receiver<JobHealth>) -> Check {
    let health = health.borrow();
    let (ok, message, since_unix_ms) = match &*health {
        JobHealth::Pending | JobHealth::Healthy => (true, "ok".to_owned(), 0),
        JobHealth::Failing { reason, since_unix_ms, .. } => (false, reason.clone(), *since_unix_ms),
    };
    Check { name: name.to_owned(), ok, message, since_unix_ms }
}
