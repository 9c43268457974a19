//! The chore that needs an API server: heartbeats, and what image pulls learn from pods.
//!
//! Owns: LeaseRenewer and StatusReporter with their connections and watches, or the reason why they are off.
//! In: settings, the other actors. Out: [`Heartbeats`], which the view asks, and the actors' handles.
//!
//! A companion has a LeaseRenewer only with `node.companion_lease`. It has an arbiter and a connection of its own, as the kubelet has a client for heartbeats alone, so
//! that nothing that the rest does with the API server delays a renewal. The StatusReporter shares an arbiter and a
//! connection with the watches of the Node and of the pods.

mod pods;
pub(crate) mod removal;
mod show;
mod sources;

use std::sync::Arc;

use keelson_actor_system::{
    clock::{Clock, unix_ms},
    cluster::ChoreHealth,
    inspect::{Mailbox, Recorder},
    reports::EndpointsView,
    supervise,
};
use keelson_config::{EndpointsSource, Gate, Settings};
use keelson_debug::Check;
use keelson_heartbeats::{
    lease::{self, Contention, LeaseMetrics, LeasePolicy, LeaseRenewer, LeaseRenewerParts, LeaseState},
    status::{
        self, EndpointsOrigin, Labels, NodeIps, Register, ResourceList, Role, SettingError, StatusMetrics,
        StatusPolicy, StatusReporter, StatusReporterParts, StatusState, Taint, Thresholds,
    },
};
use keelson_host::LinuxHost;
use keelson_kube::{ApiServer, KnownPods, Node, watch_node};
use keelson_pulls::{
    coordinator::{PullCoordinator, PullEvent},
    runtime::{Health, RuntimeClient},
};
use keelson_storage::DeferredStore;
use prometheus_client::registry::Registry;
use tokio::sync::watch;

use super::{
    cluster::{Cluster, NodeSeen, node_channel},
    credentials::Credentials,
    handles::Handle,
    jobs::{self, Job},
};

const LEASE_ACTOR: &str = "LeaseRenewer";
const STATUS_ACTOR: &str = "StatusReporter";
const NODE_JOB: &str = "NodeWatch";
const POD_JOB: &str = "PodWatch";
/// Why a companion has no LeaseRenewer.
const NO_LEASE: &str = "node.companion_lease is false";
/// Both get a message for each change of the Node, and questions from people.
const MAILBOX: usize = 1024;

/// What the chore needs of the rest of the agent.
pub(super) struct HeartbeatsParts {
    pub(super) settings: Arc<Settings>,
    pub(super) store: Arc<DeferredStore>,
    pub(super) clock: Clock,
    pub(super) pulls: Mailbox<PullCoordinator>,
    pub(super) runtime: Mailbox<RuntimeClient>,
    pub(super) runtime_health: watch::Receiver<Health>,
    pub(super) changes: watch::Sender<u64>,
    pub(super) cluster: Option<Cluster>,
    /// How the service endpoints fare.
    pub(super) endpoints: watch::Receiver<EndpointsView>,
}

/// The chore, or why it is off.
pub(super) enum Heartbeats {
    Off(&'static str),
    On(Box<On>),
}

/// The running chore.
pub(super) struct On {
    role: Role,
    node_name: String,
    takes_conditions: bool,
    removes_conditions: bool,
    /// None in role companion, unless it is asked for.
    lease: Option<LeasePart>,
    status: Mailbox<StatusReporter>,
    status_metrics: StatusMetrics,
    clock: Clock,
    rest: ApiServer,
    credentials: Credentials,
    healths: Healths,
    node: watch::Receiver<NodeSeen>,
    node_job: Job,
    pod_job: Option<Job>,
    arbiter: actix::ArbiterHandle,
}

/// The LeaseRenewer, which has a connection and an arbiter of its own.
struct LeasePart {
    renewer: Mailbox<LeaseRenewer>,
    metrics: LeaseMetrics,
    health: watch::Receiver<ChoreHealth>,
    contention: watch::Receiver<Contention>,
    arbiter: actix::ArbiterHandle,
}

/// How each part fares.
pub(super) struct Healths {
    status: watch::Receiver<ChoreHealth>,
    node_watch: watch::Receiver<ChoreHealth>,
    pod_watch: Option<watch::Receiver<ChoreHealth>>,
}

/// What is wrong with a setting of section `[node]`.
pub(crate) struct NodeProblem {
    /// `node.KEY`.
    pub(crate) key: &'static str,
    /// A sentence.
    pub(crate) error: SettingError,
}

/// Collects what is wrong, with a value that is never used in the place of what is.
fn read<T: Default>(key: &'static str, read: Result<T, SettingError>, problems: &mut Vec<NodeProblem>) -> T {
    read.unwrap_or_else(|error| {
        problems.push(NodeProblem { key, error });
        T::default()
    })
}

/// The settings of section `[node]` as the StatusReporter takes them.
///
/// # Errors
/// Every text that is not what it should be.
pub(crate) fn policy(settings: &Settings) -> Result<StatusPolicy, Vec<NodeProblem>> {
    let node = &settings.node;
    let role = match node.role {
        keelson_config::Role::Companion => Role::Companion,
        keelson_config::Role::Node => Role::Node,
    };
    let own = StatusPolicy::new(role, &settings.agent.node_name);
    let mut wrong = Vec::new();
    let policy = StatusPolicy {
        update_frequency: node.node_status_update_frequency,
        report_frequency: node.node_status_report_frequency,
        lease_duration: node.lease_duration,
        pulls_stalled_after: node.pulls_stalled_after,
        endpoints_origin: endpoints_origin(settings),
        external_conditions: settings.feature_gates.enabled(Gate::ExternalNodeConditions),
        register: match node.register_node {
            keelson_config::Register::Once => Register::Once,
            keelson_config::Register::Always => Register::Always,
            keelson_config::Register::Never => Register::Never,
        },
        labels: read("node.node_labels", Labels::parse_list(&node.node_labels), &mut wrong),
        taints: read("node.register_with_taints", Taint::parse_list(&node.register_with_taints), &mut wrong),
        zone: node.zone.clone(),
        region: node.region.clone(),
        provider_id: node.provider_id.clone(),
        node_ips: read("node.node_ip", NodeIps::parse_list(&node.node_ip), &mut wrong),
        kube_reserved: read("node.kube_reserved", ResourceList::parse(&node.kube_reserved), &mut wrong),
        system_reserved: read("node.system_reserved", ResourceList::parse(&node.system_reserved), &mut wrong),
        eviction_hard: read("node.eviction_hard", Thresholds::parse(&node.eviction_hard), &mut wrong),
        pressure_transition: node.eviction_pressure_transition_period,
        max_pods: node.max_pods,
        max_images: i32::try_from(node.node_status_max_images).unwrap_or(i32::MAX),
        root_dir: node.root_dir.clone(),
        kubelet_version: match node.kubelet_version.is_empty() {
            true => own.kubelet_version.clone(),
            false => node.kubelet_version.clone(),
        },
        ..own
    };
    if wrong.is_empty() { Ok(policy) } else { Err(wrong) }
}

/// Where service endpoints come from when heartbeats run, which is where an API server is configured.
fn endpoints_origin(settings: &Settings) -> EndpointsOrigin {
    match settings.endpoints.source {
        EndpointsSource::Files => EndpointsOrigin::Manifests,
        EndpointsSource::Off | EndpointsSource::Kube | EndpointsSource::Auto => EndpointsOrigin::ApiServer,
    }
}

/// Whether the agent renews a Lease: in role node that of the node, in role companion one of its own if that is asked for.
fn renews_lease(settings: &Settings) -> bool {
    settings.node.role == keelson_config::Role::Node || settings.node.companion_lease
}

pub(crate) fn lease_policy(settings: &Settings) -> LeasePolicy {
    let node = settings.agent.node_name.clone();
    let name = match settings.node.role {
        keelson_config::Role::Node => node.clone(),
        keelson_config::Role::Companion => format!("keelson-{node}"),
    };
    LeasePolicy {
        name,
        holder: node.clone(),
        node,
        duration: settings.node.lease_duration,
        lean: settings.feature_gates.enabled(Gate::LeanLeases),
        may_stand_back: settings.node.role == keelson_config::Role::Node
            && settings.node.when_contested == keelson_config::WhenContested::StandBack,
    }
}

/// Whether the pods of the node are watched.
pub(super) fn watches_pods(settings: &Settings) -> bool {
    let on = |gate| settings.feature_gates.enabled(gate);
    Cluster::of(settings).is_some() && on(Gate::NodeHeartbeats) && on(Gate::PodAwarePulls)
}

/// Starts the chore, if the settings say so. Returns with it the handles of its actors and watches.
///
/// # Errors
/// A setting of section `[node]` that makes no sense.
pub(super) fn start(parts: HeartbeatsParts) -> anyhow::Result<(Heartbeats, Vec<Handle>)> {
    // Loading the settings has said which; this is for who comes here otherwise.
    let policy = policy(&parts.settings).map_err(|wrong| {
        let wrong: Vec<String> = wrong.iter().map(|of| format!("{}: {}", of.key, of.error)).collect();
        anyhow::anyhow!(wrong.join("; "))
    })?;
    let off = |why: &'static str| {
        (Heartbeats::Off(why), vec![Handle::off(LEASE_ACTOR, why), Handle::off(STATUS_ACTOR, why)])
    };
    let Some(cluster) = parts.cluster.clone() else {
        return Ok(off("no API server is configured (section [kube])"));
    };
    if !parts.settings.feature_gates.enabled(Gate::NodeHeartbeats) {
        return Ok(off("feature gate NodeHeartbeats is disabled"));
    }
    let on = start_on(parts, policy, &cluster);
    let mut handles = vec![
        match &on.lease {
            Some(lease) => Handle::on(&lease.renewer, || LeaseState {}, || LeaseState {}),
            None => Handle::off(LEASE_ACTOR, NO_LEASE),
        },
        Handle::on(&on.status, || StatusState {}, || StatusState {}),
        Handle::job(on.node_job.recorder()),
    ];
    handles.extend(on.pod_job.as_ref().map(|job| Handle::job(job.recorder())));
    Ok((Heartbeats::On(Box::new(on)), handles))
}

fn start_lease(parts: &HeartbeatsParts, cluster: &Cluster) -> LeasePart {
    let policy = lease_policy(&parts.settings);
    let api = cluster.connect(policy.request_timeout().min(cluster.request_timeout));
    let metrics = LeaseMetrics::default();
    let (health, seen) = watch::channel(ChoreHealth::Starting);
    // Until the Lease has been read, role node does not know whether it may report.
    let undecided = if policy.may_stand_back { Contention::Undecided } else { Contention::Uncontested };
    let (contention, contention_seen) = watch::channel(undecided);
    let recorder = Recorder::new(LEASE_ACTOR, MAILBOX);
    let lease_parts = LeaseRenewerParts {
        api: Arc::new(api),
        store: parts.store.clone(),
        clock: parts.clock,
        wall: Arc::new(unix_ms),
        policy,
        metrics: metrics.clone(),
        health,
        contention,
        changes: parts.changes.clone(),
        recorder: recorder.clone(),
    };
    let arbiter = jobs::arbiter(c"lease").handle();
    let renewer = supervise::start(Some(&arbiter), recorder, move |_| LeaseRenewer::new(lease_parts));
    LeasePart { renewer, metrics, health: seen, contention: contention_seen, arbiter }
}

fn start_on(parts: HeartbeatsParts, policy: StatusPolicy, cluster: &Cluster) -> On {
    let lease = renews_lease(&parts.settings).then(|| start_lease(&parts, cluster));
    let rest = cluster.connect(cluster.request_timeout);
    let status_metrics = StatusMetrics::default();
    let role = policy.role;
    let takes_conditions = policy.external_conditions;
    let removes_conditions = parts.settings.node.remove_conditions_on_stop;

    // Without a Lease nobody contests it.
    let contention = match &lease {
        Some(lease) => lease.contention.clone(),
        None => watch::channel(Contention::Uncontested).1,
    };
    let (status_health, status_seen) = watch::channel(ChoreHealth::Starting);
    let recorder = Recorder::new(STATUS_ACTOR, MAILBOX);
    let node_name = policy.node_name.clone();
    let status_parts = StatusReporterParts {
        api: Arc::new(rest.clone()),
        host: Arc::new(LinuxHost::new()),
        runtime: Arc::new(sources::RuntimeReports { client: parts.runtime, health: parts.runtime_health }),
        pulls: Arc::new(sources::PullReports(parts.pulls.clone())),
        endpoints: parts.endpoints,
        contention,
        store: parts.store,
        clock: parts.clock,
        wall: unix_ms,
        policy,
        metrics: status_metrics.clone(),
        health: status_health,
        changes: parts.changes.clone(),
        recorder: recorder.clone(),
    };
    let arbiter = jobs::arbiter(c"node-status");
    let status =
        supervise::start(Some(&arbiter.handle()), recorder, move |_| StatusReporter::new(status_parts));

    let (node_health, node_watch) = watch::channel(ChoreHealth::Starting);
    let (node, node_seen) = node_channel();
    let node_health = Arc::new(node_health);
    let watched = WatchedNode {
        api: rest.clone(),
        name: node_name.clone(),
        health: node_health.clone(),
        seen: node,
        lease: lease.as_ref().map(|lease| lease.renewer.clone()),
        status: status.clone(),
        // In the role of a node the StatusReporter works the condition out itself.
        pulls: (role == Role::Companion).then(|| parts.pulls.clone()),
    };
    let node_job = Job::new(NODE_JOB, parts.changes.clone());
    node_job.keep_on(&arbiter.handle(), 0, shows_failure(node_health), move || watched.clone().follow());
    if let Some(lease) = &lease {
        let (api, renewals) = (rest.clone(), lease.health.clone());
        node_job.keep_on(&arbiter.handle(), 1, |_| {}, move || wake_watches(api.clone(), renewals.clone()));
    }
    let (pod_job, pod_watch) = match parts.settings.feature_gates.enabled(Gate::PodAwarePulls) {
        false => (None, None),
        true => {
            let (health, pod_watch) = watch::channel(ChoreHealth::Starting);
            let (api, pulls, health) = (rest.clone(), parts.pulls, Arc::new(health));
            let (known, failed) = (KnownPods::default(), shows_failure(health.clone()));
            let (job, node_name) = (Job::new(POD_JOB, parts.changes), node_name.clone());
            job.keep_on(&arbiter.handle(), 0, failed, move || {
                let (api, name, health) = (api.clone(), node_name.clone(), health.clone());
                let (known, pulls) = (known.clone(), pulls.clone());
                async move { pods::follow(&api, &name, &health, known, pulls).await }
            });
            (Some(job), Some(pod_watch))
        }
    };
    let healths = Healths { status: status_seen, node_watch, pod_watch };
    On {
        role,
        node_name,
        takes_conditions,
        removes_conditions,
        lease,
        status,
        status_metrics,
        clock: parts.clock,
        rest,
        credentials: cluster.credentials.clone(),
        healths,
        node: node_seen,
        node_job,
        pod_job,
        arbiter: arbiter.handle(),
    }
}

/// Wakes the watches when a renewal succeeds after failures: their own back-off may be up to a minute. Without a Lease the first
/// watch that succeeds wakes the others.
async fn wake_watches(api: ApiServer, mut renewals: watch::Receiver<ChoreHealth>) {
    let mut failing = false;
    while renewals.changed().await.is_ok() {
        let well = *renewals.borrow_and_update() == ChoreHealth::Well;
        if failing && well {
            api.wake_watches();
        }
        failing = !well;
    }
    // The LeaseRenewer was given up.
    std::future::pending().await
}

/// Shows that a watch has failed until the restarted one succeeds.
pub(super) fn shows_failure(health: Arc<watch::Sender<ChoreHealth>>) -> impl Fn(&str) + Send + 'static {
    move |reason| drop(health.send_replace(watch_failed(reason)))
}

/// Health of a watch that panicked or ended.
pub(super) fn watch_failed(reason: &str) -> ChoreHealth {
    let reason = format!("the watch failed; restarting: {reason}");
    ChoreHealth::Failing { reason, since_unix_ms: unix_ms(), refused: false }
}

#[derive(Clone)]
struct WatchedNode {
    api: ApiServer,
    name: String,
    health: Arc<watch::Sender<ChoreHealth>>,
    seen: watch::Sender<NodeSeen>,
    lease: Option<Mailbox<LeaseRenewer>>,
    status: Mailbox<StatusReporter>,
    pulls: Option<Mailbox<PullCoordinator>>,
}

impl WatchedNode {
    /// Tells the actors and the receivers of `seen` of each change of the Node.
    async fn follow(self) {
        let Self { api, name, health, seen, lease, status, pulls } = self;
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
            // A lost one would leave an actor with a Node that is not there; a Node changes some times a minute.
            if let Some(lease) = &lease {
                lease.deliver(lease::NodeChanged { uid });
            }
            status.deliver(status::NodeChanged { node });
        };
        watch_node(&api, &name, &health, tell).await;
    }
}

/// Whether the Node's condition DiskPressure is True.
fn has_disk_pressure(node: &Node) -> bool {
    let conditions = node.status.as_ref().and_then(|status| status.conditions.as_deref());
    conditions
        .unwrap_or_default()
        .iter()
        .any(|condition| condition.type_ == status::DISK_PRESSURE && condition.status == "True")
}

impl Heartbeats {
    /// Ends the actors: another agent reports for the node.
    pub(super) fn stop(&self) {
        if let Self::On(on) = self {
            on.stop();
        }
    }

    /// The Node as it is watched, and how that watch fares; none while the chore is off.
    pub(super) fn node(&self) -> Option<(watch::Receiver<NodeSeen>, watch::Receiver<ChoreHealth>)> {
        match self {
            Self::Off(_) => None,
            Self::On(on) => Some((on.node.clone(), on.healths.node_watch.clone())),
        }
    }

    /// What readiness depends on: nothing while the chore is off.
    pub(super) fn checks(&self) -> Vec<Check> {
        match self {
            Self::Off(_) => Vec::new(),
            Self::On(on) => on.checks(),
        }
    }

    /// Enters the chore's metrics; none while it is off.
    pub(super) fn register(&self, registry: &mut Registry) {
        if let Self::On(on) = self {
            if let Some(lease) = &on.lease {
                lease.metrics.register(registry);
            }
            on.status_metrics.register(registry, on.role);
        }
    }

    /// Brings gauges that grow with time up to date.
    pub(super) fn count_now(&self) {
        if let Self::On(on) = self {
            if let Some(lease) = &on.lease {
                lease.metrics.now_gauges(on.clock.now());
            }
            // An answer is not waited for: a reporter that is stuck must not hide the metrics that say so.
            let _ = on.status.offer(status::CountNow {});
        }
    }
}

impl On {
    fn stop(&self) {
        if let Some(lease) = &self.lease {
            lease.arbiter.stop();
        }
        self.arbiter.stop();
    }

    fn checks(&self) -> Vec<Check> {
        let healths = &self.healths;
        let lease = self.lease.as_ref();
        let mut checks: Vec<_> = lease.iter().map(|lease| check("lease", &lease.health)).collect();
        checks.push(check("node-status", &healths.status));
        checks.push(check("node-watch", &healths.node_watch));
        checks.extend(healths.pod_watch.as_ref().map(|health| check("pod-watch", health)));
        checks.push(self.credentials.check());
        checks
    }
}

/// A part that has not succeeded yet is no trouble before it has failed.
fn check(name: &str, health: &watch::Receiver<ChoreHealth>) -> Check {
    let health = health.borrow();
    let (ok, message, since_unix_ms) = match &*health {
        ChoreHealth::Starting | ChoreHealth::Well => (true, "ok".to_owned(), 0),
        ChoreHealth::Failing { reason, since_unix_ms, .. } => (false, reason.clone(), *since_unix_ms),
    };
    Check { name: name.to_owned(), ok, message, since_unix_ms }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_setting_that_makes_no_sense_is_named() {
        let mut settings = Settings::default();
        assert!(policy(&settings).is_ok(), "the defaults do");
        settings.node.eviction_hard = "memory.available".into();
        settings.node.register_with_taints = "a=b:Never".into();
        settings.node.node_ip = "10.0.0.1,10.0.0.2".into();
        let keys: Vec<_> =
            policy(&settings).expect_err("three mistakes").into_iter().map(|of| of.key).collect();
        assert_eq!(keys, ["node.register_with_taints", "node.node_ip", "node.eviction_hard"]);
    }

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

    /// E7: it costs the API server more than the status saves, and nothing reads it.
    #[test]
    fn e7_a_companion_renews_a_lease_only_where_that_is_asked_for() {
        let mut settings = Settings::default();
        assert!(!renews_lease(&settings));
        settings.node.companion_lease = true;
        assert!(renews_lease(&settings));
        settings.node.companion_lease = false;
        settings.node.role = keelson_config::Role::Node;
        assert!(renews_lease(&settings), "a node's heartbeat");
    }

    /// E17.
    #[test]
    fn e17_the_conditions_texts_go_by_the_source_of_endpoints() {
        let mut settings = Settings::default();
        let origin = |settings: &Settings| policy(settings).map(|policy| policy.endpoints_origin).ok();
        assert_eq!(origin(&settings), Some(EndpointsOrigin::ApiServer));
        settings.endpoints.source = EndpointsSource::Files;
        assert_eq!(origin(&settings), Some(EndpointsOrigin::Manifests));
    }

    #[test]
    fn a_companion_has_a_lease_of_its_own_name() {
        let mut settings = Settings::default();
        settings.agent.node_name = "n1".into();
        let lease = lease_policy(&settings);
        assert_eq!(
            (&*lease.name, &*lease.holder, &*lease.node, lease.lean),
            ("keelson-n1", "n1", "n1", true)
        );
        settings.node.role = keelson_config::Role::Node;
        settings.feature_gates = settings.feature_gates.with(Gate::LeanLeases, false);
        let lease = lease_policy(&settings);
        assert_eq!((&*lease.name, lease.lean, lease.may_stand_back), ("n1", false, true));
        settings.node.when_contested = keelson_config::WhenContested::Continue;
        assert!(!lease_policy(&settings).may_stand_back);
    }
}
