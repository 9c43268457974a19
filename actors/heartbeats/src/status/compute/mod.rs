//! The status of the Node, out of what was read.
//!
//! Owns: [`compute`], a pure function from the readings and the Node as it is to the Node's status as it should
//! be. In: [`Inputs`], the policy, what is remembered between passes ([`Memory`]). Out: a status that differs from
//! the Node's only where something differs: what the agent does not own, what could not be read, and amounts that
//! are equal stay as they are, byte for byte.

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
    reports::{EndpointsView, FlowView, RuntimeReport},
};
use keelson_storage::StoreState;
use serde::{Deserialize, Serialize};

pub use conditions::problem::Spell;

pub(super) use super::moment::{Moment, millis, moment};

use super::{
    external::Externals,
    policy::{Role, StatusPolicy},
};
use crate::host::{HostFacts, HostReadings};

#[derive(Debug, Clone)]
pub struct Inputs {
    /// What does not change.
    pub facts: HostFacts,
    pub readings: HostReadings,
    /// Time since boot, when this was read.
    pub since_boot: Duration,
    pub runtime: RuntimeView,
    /// How pulls fare, or why that is not known.
    pub flow: Result<FlowView, String>,
    pub endpoints: EndpointsView,
    pub store: StoreState,
}

#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum RuntimeView {
    /// It has not been heard, and that says nothing yet: what the Node says stands.
    #[default]
    Unheard,
    Said(RuntimeReport),
    Down(String),
    /// It serves, but has not said for long how it is.
    Silent(String),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Pressure {
    Memory,
    Disk,
    Pid,
}

/// What is remembered from one status to the next.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Memory {
    /// When each pressure was last seen, in milliseconds of the monotonic clock.
    pub seen: BTreeMap<Pressure, Moment>,
    /// Why the Node was last not ready: what kinds of reasons, and their text.
    pub not_ready: Option<(BTreeSet<String>, String)>,
    /// What was found of each problem condition, and since when. A restart begins anew, so that what the Node says
    /// stands for as long as after a change.
    pub spells: BTreeMap<&'static str, Spell>,
}

/// The status of `node` as it should be now. `memory` is brought up to date. With `fresh_texts` the text of a
/// condition may change although nothing but the text has.
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
    use keelson_actor_system::reports::RuntimeFlow;

    /// Pulls of which none waits.
    pub(in crate::status) fn idle() -> FlowView {
        FlowView {
            queued: 0,
            running: 0,
            oldest_wait: None,
            since_moved: None,
            runtime: RuntimeFlow::Up,
            durable: true,
        }
    }

    /// Nothing was read.
    pub(super) fn inputs() -> Inputs {
        Inputs {
            facts: HostFacts::default(),
            readings: HostReadings::default(),
            since_boot: Duration::ZERO,
            runtime: RuntimeView::default(),
            flow: Ok(idle()),
            endpoints: EndpointsView::default(),
            store: StoreState::Open,
        }
    }
}
