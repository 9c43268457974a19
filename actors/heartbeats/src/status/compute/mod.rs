//! The desired status of the Node.
//!
//! Owns: [`compute`], a pure function from the readings and the present Node to the desired status. In: [`Inputs`], the
//! policy, the state kept between passes ([`Memory`]). Out: a status that differs from the Node's only where something
//! differs: fields that the agent does not own or could not read, and equal amounts, stay byte for byte.

pub(super) mod capacity;
pub(super) mod conditions;
mod images;
mod info;

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use k8s_openapi::api::core::v1::{Node, NodeStatus};
use keelson_actor_system::{
    clock::Now,
    reports::{EndpointsView, PullsView, RuntimeReport},
};
use keelson_storage::StoreState;
use serde::{Deserialize, Serialize};

pub use conditions::problem::FindingPeriod;

pub(super) use super::moment::{Moment, millis, moment};

use super::{
    external::Externals,
    policy::{Role, StatusPolicy},
};
use crate::host::{HostFacts, HostReadings};

#[derive(Debug, Clone)]
pub struct Inputs {
    pub facts: HostFacts,
    pub readings: HostReadings,
    /// When this was read.
    pub since_boot: Duration,
    pub runtime: RuntimeView,
    /// An error if unknown.
    pub pulls_view: Result<PullsView, String>,
    pub endpoints: EndpointsView,
    pub store: StoreState,
}

#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum RuntimeView {
    /// No answer yet, and that means nothing: the Node's condition stands.
    #[default]
    Unknown,
    Reported(RuntimeReport),
    Down(String),
    /// It is up, but has not reported its status for long.
    Stale(String),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Pressure {
    Memory,
    Disk,
    Pid,
}

/// State kept from one status to the next.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Memory {
    /// When each pressure was last seen, in milliseconds of the monotonic clock.
    pub seen: BTreeMap<Pressure, Moment>,
    /// Why the Node was last not ready: the kinds of reasons, and their text.
    pub not_ready: Option<(BTreeSet<String>, String)>,
    /// The current finding of each problem condition, and since when. Reset by a restart, so that the Node's condition
    /// stands for as long as after a change.
    pub periods: BTreeMap<&'static str, FindingPeriod>,
}

/// Updates `memory`. With `fresh_texts` the text of a condition may change without another change.
pub(super) fn compute(
    node: &Node,
    inputs: &Inputs,
    externals: &Externals,
    policy: &StatusPolicy,
    memory: &mut Memory,
    fresh_texts: bool,
    now: Now,
) -> NodeStatus {
    let mut status = node.status.clone().unwrap_or_default();
    if policy.role == Role::Node {
        info::addresses(&mut status, inputs, policy);
        capacity::set(&mut status, inputs, policy);
        info::node_info(&mut status, inputs, policy);
        images::set(&mut status, inputs, policy.max_images);
    }
    conditions::set(&mut status, inputs, externals, policy, memory, fresh_texts, now);
    status
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use keelson_actor_system::reports::RuntimeAvailability;

    /// No pull waits.
    pub(crate) fn idle() -> PullsView {
        PullsView {
            queued: 0,
            running: 0,
            oldest_wait: None,
            since_progress: None,
            runtime: RuntimeAvailability::Up,
            durable: true,
        }
    }

    pub(super) fn inputs() -> Inputs {
        Inputs {
            facts: HostFacts::default(),
            readings: HostReadings::default(),
            since_boot: Duration::ZERO,
            runtime: RuntimeView::default(),
            pulls_view: Ok(idle()),
            endpoints: EndpointsView::default(),
            store: StoreState::Open,
        }
    }
}
