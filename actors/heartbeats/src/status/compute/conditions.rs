//! Conditions of the Node.
//!
//! Owns: the agent's conditions in each role, and when each is True, with the kubelet's reasons where it has one;
//! [`problem`] has those that the kubelet does not have. In: readings, the runtime's and the pulls' views, conditions
//! of others. Out: the Node's conditions; a transition time changes only with the status, and no text contains a count
//! or an age, so that the texts of an unchanged node do not change.

pub(in crate::status) mod problem;

use std::collections::BTreeSet;

use super::{Inputs, Memory, Moment, Pressure, RuntimeView, capacity, millis, moment};
use crate::{
    host::HostReadings,
    status::{
        external::Externals,
        kinds::{CONTESTED, ConditionStatus, DISK_PRESSURE, ENDPOINTS, PULLS, READY, RETIRED, STATE},
        policy::{Role, StatusPolicy},
        settings::Signal,
    },
};
use jiff::Timestamp;
use k8s_openapi::{
    api::core::v1::{NodeCondition, NodeStatus},
    apimachinery::pkg::apis::meta::v1::Time,
};
use keelson_actor_system::{
    clock::Now,
    reports::{NETWORK_READY, RUNTIME_READY, RuntimeReport},
};
pub(in crate::status) use problem::{withhold_stale_endpoints, would_be_unavailable};

/// Those of [`Pressure`] first and in its order.
const OWN: [&str; 8] =
    ["MemoryPressure", DISK_PRESSURE, "PIDPressure", PULLS, ENDPOINTS, STATE, CONTESTED, READY];

pub(in crate::status) fn own(role: Role) -> &'static [&'static str] {
    match role {
        Role::Node => &OWN,
        Role::Companion => &[PULLS, ENDPOINTS, STATE, CONTESTED],
    }
}

/// Truncated to seconds, as in the API.
pub(in crate::status) fn time(unix_ms: i64) -> Time {
    Time(Timestamp::from_second(unix_ms.div_euclid(1000)).unwrap_or_default())
}

struct Assessment {
    kind: &'static str,
    status: ConditionStatus,
    reason: String,
    message: String,
}

impl Assessment {
    fn new(kind: &'static str, status: ConditionStatus, reason: &str, message: impl Into<String>) -> Self {
        Self { kind, status, reason: reason.into(), message: message.into() }
    }
}

/// When the text of a condition changes.
#[derive(PartialEq)]
enum Text {
    /// With the status.
    OnFlip,
    /// Whenever it differs.
    Always,
}

fn put(
    list: &mut Vec<NodeCondition>,
    assessment: (&str, ConditionStatus, String, String),
    text: &Text,
    now: Now,
) {
    let (kind, status, reason, message) = assessment;
    let now = time(now.unix_ms);
    let Some(known) = list.iter_mut().find(|condition| condition.type_ == kind) else {
        list.push(NodeCondition {
            type_: kind.to_owned(),
            status: status.name().to_owned(),
            reason: Some(reason),
            message: Some(message),
            last_heartbeat_time: Some(now.clone()),
            last_transition_time: Some(now),
        });
        return;
    };
    let flips = known.status != status.name();
    if flips || known.last_transition_time.is_none() {
        known.last_transition_time = Some(now.clone());
    }
    let changes = match text {
        Text::OnFlip => flips,
        Text::Always => true,
    };
    if changes {
        known.reason = Some(reason);
        known.message = Some(message);
    }
    known.status = status.name().to_owned();
    known.last_heartbeat_time = Some(now);
}

/// Sets the conditions of the role; the others stay as they are.
pub(super) fn set(
    status: &mut NodeStatus,
    inputs: &Inputs,
    externals: &Externals,
    policy: &StatusPolicy,
    memory: &mut Memory,
    fresh_texts: bool,
    now: Now,
) {
    let mut list = status.conditions.take().unwrap_or_default();
    let is_true = |list: &[NodeCondition], kind: &str| {
        list.iter().any(|condition| condition.type_ == kind && condition.status == "True")
    };
    let set = |list: &mut Vec<NodeCondition>, assessment: Assessment, text: Text| {
        put(list, (assessment.kind, assessment.status, assessment.reason, assessment.message), &text, now);
    };
    if policy.role == Role::Node {
        for pressure in [Pressure::Memory, Pressure::Disk, Pressure::Pid] {
            let before = is_true(&list, OWN[pressure as usize]);
            let held = holds(pressure, before, &inputs.readings, policy, memory, moment(now));
            set(&mut list, assess_pressure(pressure, held), Text::OnFlip);
        }
    }
    problem::set(&mut list, inputs, policy, memory, now);
    list.retain(|condition| !RETIRED.contains(&condition.type_.as_str()));
    for view in externals.views(moment(now), now.unix_ms) {
        put(&mut list, (&view.kind, view.status, view.reason, view.message), &Text::Always, now);
    }
    for kind in externals.cleared() {
        list.retain(|condition| condition.type_ != kind);
    }
    if policy.role == Role::Node {
        let was_ready = is_true(&list, READY);
        let problems = problems(&inputs.runtime, was_ready, capacity::missing(status));
        set(&mut list, ready(problems, memory, fresh_texts), Text::Always);
    }
    status.conditions = Some(list);
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::status) enum Contest {
    None,
    /// It renews the Lease.
    Lease,
    /// It writes this agent's conditions.
    Conditions,
    /// It renews the Lease, and this agent stands back.
    StandingBack,
}

/// Sets [`CONTESTED`], which is absent on a Node that was never contested. The text changes with the status only, so
/// that two agents that both report it agree.
pub(in crate::status) fn set_contested(status: &mut NodeStatus, contest: Contest, now: Now) {
    let list = status.conditions.get_or_insert_default();
    let (value, reason, message) = match contest {
        Contest::None if list.iter().all(|condition| condition.type_ != CONTESTED) => return,
        Contest::None => (ConditionStatus::False, "NotContested", "no other process reports for the node"),
        Contest::Lease => (
            ConditionStatus::True,
            "LeaseRenewedByAnother",
            "another process renews the agent's Lease, for example an agent with the same node name",
        ),
        Contest::Conditions => (
            ConditionStatus::True,
            "ConditionsWrittenByAnother",
            "another process writes conditions of the agent; see keelson node",
        ),
        Contest::StandingBack => (
            ConditionStatus::True,
            "StandingBack",
            "another process renews the node's Lease, for example a kubelet; the agent stands back and \
             reports only this condition",
        ),
    };
    put(list, (CONTESTED, value, reason.into(), message.into()), &Text::OnFlip, now);
    let last = list.len().saturating_sub(1);
    if list[last].type_ == CONTESTED && last > 0 && list[last - 1].type_ == READY {
        list.swap(last - 1, last);
    }
}

/// Whether the pressure is present, or was within the transition period.
fn holds(
    pressure: Pressure,
    before: bool,
    readings: &HostReadings,
    policy: &StatusPolicy,
    memory: &mut Memory,
    now: Moment,
) -> bool {
    let signals: &[Signal] = match pressure {
        Pressure::Memory => &[Signal::MemoryAvailable],
        Pressure::Disk => &[
            Signal::NodeFsAvailable,
            Signal::NodeFsInodesFree,
            Signal::ImageFsAvailable,
            Signal::ImageFsInodesFree,
        ],
        Pressure::Pid => &[Signal::PidAvailable],
    };
    let met = |signal: &Signal| {
        let (Some(least), Some((left, all))) =
            (policy.eviction_hard.get(*signal), available(*signal, readings))
        else {
            return false;
        };
        left < least.of(all)
    };
    if signals.iter().any(met) {
        memory.seen.insert(pressure, now);
        return true;
    }
    if before {
        // Seen by an earlier process without a record of the time.
        memory.seen.entry(pressure).or_insert(now);
    }
    memory.seen.get(&pressure).is_some_and(|at| now.saturating_sub(*at) < millis(policy.pressure_transition))
}

/// Available amount and capacity of a signal.
fn available(signal: Signal, readings: &HostReadings) -> Option<(u64, u64)> {
    let (node_fs, image_fs) = (readings.node_fs, readings.image_fs);
    match signal {
        Signal::MemoryAvailable => Some((readings.memory_available_bytes?, readings.memory_capacity_bytes?)),
        Signal::NodeFsAvailable => node_fs.map(|fs| (fs.available_bytes, fs.capacity_bytes)),
        Signal::ImageFsAvailable => image_fs.map(|fs| (fs.available_bytes, fs.capacity_bytes)),
        // A file system without inode counts has no shortage of inodes.
        Signal::NodeFsInodesFree => node_fs.filter(|fs| fs.inodes > 0).map(|fs| (fs.inodes_free, fs.inodes)),
        Signal::ImageFsInodesFree => {
            image_fs.filter(|fs| fs.inodes > 0).map(|fs| (fs.inodes_free, fs.inodes))
        }
        Signal::PidAvailable => readings.pids.map(|(most, are)| (most.saturating_sub(are), most)),
    }
}

fn assess_pressure(pressure: Pressure, held: bool) -> Assessment {
    let kind = OWN[pressure as usize];
    let (reason, message) = match (pressure, held) {
        (Pressure::Memory, false) => {
            ("KubeletHasSufficientMemory", "available memory is above the eviction threshold")
        }
        (Pressure::Memory, true) => {
            ("KubeletHasInsufficientMemory", "available memory is below the eviction threshold")
        }
        (Pressure::Disk, false) => {
            ("KubeletHasNoDiskPressure", "available disk space and inodes are above the eviction thresholds")
        }
        (Pressure::Disk, true) => {
            ("KubeletHasDiskPressure", "available disk space or inodes are below an eviction threshold")
        }
        (Pressure::Pid, false) => {
            ("KubeletHasSufficientPID", "available process IDs are above the eviction threshold")
        }
        (Pressure::Pid, true) => {
            ("KubeletHasInsufficientPID", "available process IDs are below the eviction threshold")
        }
    };
    Assessment::new(kind, if held { ConditionStatus::True } else { ConditionStatus::False }, reason, message)
}

/// Whether the runtime takes pods: as the kubelet, both conditions must be present and true.
pub(in crate::status) fn takes_pods(report: &RuntimeReport) -> bool {
    let holds = |kind: &str| report.conditions.iter().any(|condition| condition.kind == kind && condition.ok);
    holds(RUNTIME_READY) && holds(NETWORK_READY)
}

/// Why the Node is not ready: kinds of reasons, which decide whether the text changes, and sentences.
fn problems(runtime: &RuntimeView, was_ready: bool, missing: Vec<&str>) -> Vec<(String, String)> {
    let mut all = Vec::new();
    let mut add = |kind: &str, text: String| all.push((kind.to_owned(), text));
    match runtime {
        RuntimeView::Unknown if was_ready => {}
        RuntimeView::Unknown => add("Unheard", "the container runtime has not answered yet".into()),
        RuntimeView::Down(reason) => add("Down", format!("the container runtime is down: {reason}")),
        RuntimeView::Stale(reason) => {
            add("Silent", format!("the container runtime does not report whether it is ready: {reason}"));
        }
        RuntimeView::Reported(report) => {
            for (kind, what) in [(RUNTIME_READY, "the container runtime"), (NETWORK_READY, "the pod network")]
            {
                match report.conditions.iter().find(|condition| condition.kind == kind) {
                    Some(condition) if condition.ok => {}
                    Some(condition) => {
                        let why: Vec<_> = [condition.reason.as_str(), condition.message.as_str()]
                            .into_iter()
                            .filter(|text| !text.is_empty())
                            .collect();
                        let why = if why.is_empty() { "no reason given".into() } else { why.join(": ") };
                        add(kind, format!("{what} is not ready: {why}"));
                    }
                    None => add(kind, format!("{what} is not ready: the runtime does not report {kind}")),
                }
            }
        }
    }
    if !missing.is_empty() {
        add("Capacity", format!("cannot read the capacity of {}", missing.join(", ")));
    }
    all
}

fn ready(problems: Vec<(String, String)>, memory: &mut Memory, fresh_texts: bool) -> Assessment {
    if problems.is_empty() {
        memory.not_ready = None;
        let message = "the container runtime and the pod network are ready, and the capacity is known";
        return Assessment::new(READY, ConditionStatus::True, "KubeletReady", message);
    }
    let kinds: BTreeSet<String> = problems.iter().map(|(kind, _)| kind.clone()).collect();
    let texts: Vec<_> = problems.into_iter().map(|(_, text)| text).collect();
    let message = match &memory.not_ready {
        // A runtime that is down fails with varying texts; the first one stays until the next report.
        Some((known, text)) if *known == kinds && !fresh_texts => text.clone(),
        _ => texts.join("; "),
    };
    memory.not_ready = Some((kinds, message.clone()));
    Assessment::new(READY, ConditionStatus::False, "KubeletNotReady", message)
}
