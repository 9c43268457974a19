//! Which endpoints take traffic.
//!
//! Owns: for each port of a Service in each family the topology mode, and which endpoints are in the cluster set
//! (traffic to any node) and in the local set (traffic that must stay on the node). In: merged endpoints. Out: their
//! [`Place`] in both sets, and a [`Decision`] for each port and family.
//!
//! As in kube-proxy: `pkg/proxy/topology.go`, `CategorizeEndpoints`.

use super::{
    merge::{Candidate, Place},
    parse::{Family, PerFamily},
    service::Facts,
};

/// How hints select among ready endpoints.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum Mode {
    #[default]
    Anywhere,
    /// Those with a hint for this node.
    Node,
    /// Those with a hint for this node's zone.
    Zone,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Tally {
    pub(super) ready: usize,
    /// Ready ones with hints for nodes, and those of them with a hint for this node.
    pub(super) with_node_hints: usize,
    pub(super) naming_node: usize,
    /// The same for zones.
    pub(super) with_zone_hints: usize,
    pub(super) naming_zone: usize,
    /// Not ready, but serving and terminating.
    pub(super) draining: usize,
    pub(super) local_ready: usize,
    pub(super) local_draining: usize,
    pub(super) in_cluster: usize,
    pub(super) in_local: usize,
}

impl Tally {
    fn count(&mut self, it: &Candidate<'_>) {
        let (ready, draining) = (it.ready, it.draining());
        self.ready += usize::from(ready);
        self.with_node_hints += usize::from(ready && it.hints.has_nodes);
        self.naming_node += usize::from(ready && it.hints.names_node);
        self.with_zone_hints += usize::from(ready && it.hints.has_zones);
        self.naming_zone += usize::from(ready && it.hints.names_zone);
        self.draining += usize::from(draining);
        self.local_ready += usize::from(ready && it.local);
        self.local_draining += usize::from(draining && it.local);
    }

    /// A mode requires hints on every ready endpoint, and one for this node or its zone.
    fn mode(&self) -> Mode {
        if self.with_node_hints == self.ready && self.naming_node > 0 {
            Mode::Node
        } else if self.with_zone_hints == self.ready && self.naming_zone > 0 {
            Mode::Zone
        } else {
            Mode::Anywhere
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Decision {
    /// Whether some traffic may go to any node, and whether some must stay on the node.
    pub(super) uses_cluster: bool,
    pub(super) uses_local: bool,
    pub(super) mode: Mode,
    pub(super) tally: Tally,
}

impl Decision {
    /// Whether any endpoint, here or elsewhere, could serve the port.
    pub(super) fn has_any(&self) -> bool {
        self.tally.ready + self.tally.draining > 0
    }

    fn cluster_place(&self, it: &Candidate<'_>) -> Place {
        if !self.uses_cluster {
            return Place::Unused;
        }
        match (it.ready, self.mode) {
            (true, Mode::Anywhere) => Place::Ready,
            (true, Mode::Node) if it.hints.names_node => Place::HintedNode,
            (true, Mode::Node) => Place::OtherNode,
            (true, Mode::Zone) if it.hints.names_zone => Place::HintedZone,
            (true, Mode::Zone) => Place::OtherZone,
            (false, _) if !it.draining() => Place::NotEligible,
            (false, _) if self.tally.ready > 0 => Place::NotNeeded,
            (false, _) => Place::Draining,
        }
    }

    fn local_place(&self, it: &Candidate<'_>) -> Place {
        if !self.uses_local {
            return Place::Unused;
        }
        match (it.ready, it.local) {
            (false, _) if !it.draining() => Place::NotEligible,
            (_, false) => Place::Remote,
            (true, true) => Place::Ready,
            (false, true) if self.tally.local_ready > 0 => Place::NotNeeded,
            (false, true) => Place::Draining,
        }
    }
}

/// Decides for every port, in the order of the Service, and sets the places of every candidate.
pub(super) fn decide(facts: &Facts<'_>, candidates: &mut [Candidate<'_>]) -> Vec<PerFamily<Decision>> {
    let mut decisions: Vec<PerFamily<Decision>> = facts
        .ports
        .iter()
        .map(|port| {
            let decision = |family| {
                let outside = facts.reached_from_outside(port, family);
                Decision {
                    uses_cluster: !facts.internal_local || outside,
                    uses_local: facts.internal_local || (facts.external_local && outside),
                    ..Decision::default()
                }
            };
            PerFamily::new(decision(Family::V4), decision(Family::V6))
        })
        .collect();
    for it in candidates.iter().filter(|it| !it.superseded) {
        if let Some(decision) = decisions.get_mut(it.port as usize) {
            decision[Family::of(it.ip)].tally.count(it);
        }
    }
    for decision in &mut decisions {
        for family in Family::ALL {
            let decision = &mut decision[family];
            decision.mode = decision.tally.mode();
        }
    }
    for it in candidates {
        let Some(decision) = decisions.get_mut(it.port as usize) else { continue };
        let decision = &mut decision[Family::of(it.ip)];
        if it.superseded {
            (it.cluster_place, it.local_place) = (Place::Superseded, Place::Superseded);
            continue;
        }
        it.cluster_place = decision.cluster_place(it);
        it.local_place = decision.local_place(it);
        decision.tally.in_cluster += usize::from(it.cluster_place.is_in());
        decision.tally.in_local += usize::from(it.local_place.is_in());
    }
    decisions
}
