//! What direct return does with a connection, and how full its maps are.
//!
//! In: the plan of this level, a [`Question`], the explanation of the packet level. Out: the explanation with the ways of
//! outside clients as the programs decide them; numbers for metrics. Pure.

use keelson_proto::proxy as pb;
use keelson_proxy::{
    backend::MapFill,
    explain::{Question, Source},
    model::Family,
};

use super::{Direct, layout::FLOWS};
use crate::{
    explain::Context,
    layout::{MapName, REPLIES, SOURCE_RANGES, SetKind},
    sockets::usual_capacity,
};

impl Direct {
    /// The packet level names each way by its source; only outside ones arrive at the devices.
    pub(crate) fn explain(
        &self,
        context: &Context<'_>,
        question: &Question,
        mut explanation: pb::Explanation,
    ) -> pb::Explanation {
        let is_outside = match question.from {
            Source::Outside => true,
            Source::Address(ip) => !self.is_inside(ip) && !context.local.contains(&ip),
            _ => false,
        };
        let Some((frontend, port, decided)) = context.find(question.target).filter(|_| is_outside) else {
            return explanation;
        };
        let devices = self.devices();
        let devices = if devices.is_empty() { "no device".to_owned() } else { devices.join(", ") };
        let set = match decided {
            Ok(set) => set,
            Err(reason) => {
                let text = format!("direct return: left to nftables, because {}", reason.describe());
                explanation.ways.iter_mut().for_each(|way| way.steps.insert(0, text.clone()));
                return explanation;
            }
        };
        let kind = set.set_kind().unwrap_or(SetKind::Cluster);
        let placed = context.plan.placed(question.target.family(), &port.name);
        let endpoints = placed.map_or(&[][..], |placed| placed.endpoints(kind));
        let of_nftables = std::mem::take(&mut explanation.ways);
        let by_device = self.hands_over.then(|| {
            "pod devices: to an endpoint of this node by its device, and back in the same way, if the pod has sent something in the \
             second before"
                .to_owned()
        });
        // Nftables drops clients outside of the source ranges.
        let admitted = of_nftables.iter().find(|way| way.verdict == "forwarded");
        let by_range = set.has_ranges().then(|| {
            format!(
                "map {}: one of {} has the client; others are left to nftables",
                MapName::SourceRanges.as_str(),
                placed.map_or(0, |placed| placed.source_ranges().len())
            )
        });
        let direct = admitted.map(|way| pb::Way {
            from: format!("{} at {devices}", way.from),
            verdict: "forwarded".into(),
            masqueraded: false,
            endpoints: endpoints.iter().map(ToString::to_string).collect(),
            steps: [
                format!("direct return: program {}", self.program()),
                format!("map {}: {frontend} : set {set}", MapName::Frontends.as_str()),
            ]
            .into_iter()
            .chain(by_range)
            .chain([format!("map {}: one at random, for each flow", MapName::Slots.as_str())])
            .chain(by_device)
            .chain([
                "the endpoint's node answers the client; fragments, IPv4 options and clients in the cluster are left to \
                 nftables"
                    .to_owned(),
            ])
            .collect(),
        });
        let elsewhere = of_nftables.into_iter().map(|mut way| {
            way.steps.insert(
                0,
                "direct return: left to nftables at other devices, and what its programs leave".to_owned(),
            );
            way
        });
        explanation.ways = direct.into_iter().chain(elsewhere).collect();
        explanation
    }

    pub(crate) fn map_fills(&self) -> Vec<MapFill> {
        let usage = Family::ALL.map(|family| self.sockets.plan.usage(family));
        let capacity = usual_capacity();
        let size = |number: u32| usize::try_from(number).unwrap_or(usize::MAX);
        let fill = |map, elements, max| MapFill { map, elements, max };
        let (networks, devices) = self.targets.get().numbers();
        let remembered = self.flows.counts();
        vec![
            fill("direct_frontends", usage.iter().map(|usage| usage.frontends).sum(), capacity.frontends),
            fill("direct_sets", usage.iter().map(|usage| usage.sets).sum(), capacity.sets),
            fill("direct_members", usage.iter().map(|usage| usage.members).sum(), capacity.members),
            // Each family has the slots of both.
            fill("direct_slots", size(usage[0].slots), size(capacity.slots)),
            fill(
                SOURCE_RANGES.name,
                usage.iter().map(|usage| usage.source_ranges).sum(),
                capacity.source_ranges,
            ),
            fill("networks", networks, self.max_networks),
            fill("devices", devices, self.max_devices),
            fill(FLOWS.name, remembered.flows, size(FLOWS.max_entries)),
            fill(REPLIES.name, remembered.replies, size(REPLIES.max_entries)),
        ]
    }
}
