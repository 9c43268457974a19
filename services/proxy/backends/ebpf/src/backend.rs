//! The eBPF backend: the socket level and the packet level behind the interface of the proxy.
//!
//! Owns: [`EbpfBackend`]. In: calls of the proxy. Out: changes of maps, through [`Sockets`], and those of the backend nft.
//!
//! The packet level comes first in every sync: the socket level sends connections to it that it does not decide.

use std::{net::IpAddr, time::Instant};

use keelson_client::ServiceName;
use keelson_proto::proxy as pb;
use keelson_proxy::{
    addresses::{Interface, Match},
    backend::{
        Backend, BackendError, BackendInfo, Check, Counts, Details, Drain, MapFill, Observer, Outcome,
        RulesetPrinter,
    },
    conntrack::UdpFrontend,
    explain::Question,
    model::{Family, ServicePort},
    options::{NodeConfig, Options},
};

use crate::{
    explain::{self, Context},
    kernel::SocketKernel,
    layout::MapName,
    observer::EbpfObserver,
    plan::{NodeFacts, Usage},
    print::MapsText,
    sockets::{Sockets, usual_capacity},
};

pub(crate) const INFO: BackendInfo = BackendInfo {
    name: "ebpf",
    proxy_mode: "ebpf",
    requirements: "CAP_BPF and CAP_NET_ADMIN, Linux 6.1 with cgroup v2, a BPF file system, and what the backend nft needs; \
                   CAP_SYS_ADMIN to end UDP sockets of pods whose endpoint is gone",
    has_chains: false,
};

pub(crate) struct EbpfBackend {
    packets: Box<dyn Backend>,
    sockets: Sockets,
    /// The addresses of the node's interfaces.
    local: Vec<IpAddr>,
    nodes: [Option<NodeConfig>; 2],
    masquerade_all: bool,
}

impl EbpfBackend {
    pub(crate) fn new(
        packets: Box<dyn Backend>,
        kernel: Option<Box<dyn SocketKernel>>,
        options: &Options,
    ) -> Self {
        let is_enabled = Family::ALL.map(|family| packets.disabled_reason(family).is_none());
        Self {
            packets,
            sockets: Sockets::new(kernel, usual_capacity(), is_enabled),
            local: Vec::new(),
            nodes: [None, None],
            masquerade_all: options.masquerade_all,
        }
    }

    fn enabled(&self) -> impl Iterator<Item = Family> {
        Family::ALL.into_iter().filter(|family| self.packets.disabled_reason(*family).is_none())
    }

    /// Facts and addresses of a family, after a change of either.
    fn set_facts(&mut self, family: Family) {
        let Some(node) = &self.nodes[family as usize] else { return };
        let facts = NodeFacts {
            masquerade_all: node.masquerade_all,
            detects_pods: node.detector.is_some(),
            has_cluster_ip: false,
        };
        let served = match &node.node_ports {
            Match::AllLocal => self.local.clone(),
            Match::Addresses(addresses) => addresses.clone(),
        };
        self.sockets.plan.set_facts(family, facts);
        self.sockets.plan.set_local_addresses(family, &self.local);
        self.sockets.set_node_addresses(family, &served);
    }

    fn usage_text(&self, family: Family) -> String {
        let usage = self.sockets.plan.usage(family);
        format!(
            "sockets {family}: {} frontends, {} sets, {} members, {} service ports without room; {} slots of both families",
            usage.frontends, usage.sets, usage.members, usage.left_out, usage.slots
        )
    }
}

impl Backend for EbpfBackend {
    fn info(&self) -> BackendInfo {
        INFO
    }

    fn disabled_reason(&self, family: Family) -> Option<&str> {
        self.packets.disabled_reason(family)
    }

    fn limitations(&self) -> Vec<String> {
        let mut limitations = self.packets.limitations();
        if self.masquerade_all {
            limitations.push(
                "sockets are not masqueraded: with proxy.masquerade_all no connection is translated at the socket level"
                    .to_owned(),
            );
        }
        limitations
    }

    fn features(&self) -> Vec<String> {
        let mut lines = self.packets.features();
        let Some(kernel) = self.sockets.kernel() else { return lines };
        let attached = if self.sockets.is_attached() { "attached" } else { "not attached yet" };
        lines.push(format!("socket level: {attached}, {}", kernel.describe()));
        lines.extend(self.enabled().map(|family| self.usage_text(family)));
        if let Ok(counters) = kernel.counters() {
            let texts = counters.iter().map(|(counter, count)| format!("{count} {}", counter.describe()));
            lines.push(format!("decisions: {}", texts.collect::<Vec<_>>().join(", ")));
        }
        let swept = self.sockets.sweeper().status();
        lines.push(match swept.failure {
            None => format!("stale UDP sockets: {} destroyed", swept.destroyed),
            Some(reason) => format!("stale UDP sockets: {} destroyed; {reason}", swept.destroyed),
        });
        lines
    }

    fn scope(&self, family: Family) -> &'static str {
        match family {
            Family::V4 => "table ip keelson or the eBPF maps of IPv4",
            Family::V6 => "table ip6 keelson or the eBPF maps of IPv6",
        }
    }

    fn set_service(&mut self, family: Family, service: &ServiceName, ports: Vec<ServicePort>) {
        self.sockets.plan.set(family, service, ports.clone());
        self.packets.set_service(family, service, ports);
    }

    fn set_node(&mut self, node: NodeConfig) {
        let family = node.family;
        self.nodes[family as usize] = Some(node.clone());
        self.set_facts(family);
        self.packets.set_node(node);
    }

    fn set_interfaces(&mut self, interfaces: &[Interface]) {
        self.packets.set_interfaces(interfaces);
    }

    fn set_addresses(&mut self, local: &[IpAddr]) {
        self.local = local.to_vec();
        Family::ALL.into_iter().for_each(|family| self.set_facts(family));
        self.packets.set_addresses(local);
    }

    fn has_synced(&self, family: Family) -> bool {
        self.packets.has_synced(family) && self.sockets.has_synced(family)
    }

    fn sync(&mut self, family: Family, now: Instant) -> Result<Outcome, BackendError> {
        let outcome = self.packets.sync(family, now)?;
        Ok(outcome.plus(self.sockets.sync(family, now)?))
    }

    fn maintain(&mut self, family: Family, now: Instant) -> Result<Outcome, BackendError> {
        let outcome = self.packets.maintain(family, now)?;
        Ok(outcome.plus(self.sockets.maintain(family, now)?))
    }

    fn stop_udp_offload(&mut self, family: Family) -> bool {
        self.packets.stop_udp_offload(family)
    }

    fn stop(&mut self) -> Option<Drain> {
        self.packets.stop()
    }

    fn observer(&self) -> Result<Box<dyn Observer>, BackendError> {
        Ok(Box::new(EbpfObserver::new(
            self.packets.observer()?,
            self.sockets.kernel().map(SocketKernel::maps_folder),
            self.sockets.snapshots.clone(),
            self.sockets.syncs.clone(),
        )))
    }

    fn begin_check(&mut self, family: Family) -> Result<bool, BackendError> {
        let packets = self.packets.begin_check(family)?;
        Ok(self.sockets.begin_check(family, Instant::now())? || packets)
    }

    fn check(&mut self, family: Family, now: Instant) -> Check {
        let packets = match self.packets.check(family, now) {
            Check::Done(Ok(outcome)) => outcome,
            other => return other,
        };
        let sockets = self.sockets.check(family, now);
        Check::Done(sockets.map(|sockets| packets.plus(sockets)).map_err(BackendError::from))
    }

    fn changes(&mut self) -> Result<Vec<String>, BackendError> {
        let mut lines = self.packets.changes()?;
        let now = Instant::now();
        for family in self.enabled().collect::<Vec<_>>() {
            let changes = self.sockets.difference(family, now)?;
            lines.extend(changes.iter().map(ToString::to_string));
        }
        if let Some(kernel) = self.sockets.kernel() {
            lines.extend(kernel.detached()?.into_iter().map(|hook| format!("attach the program {hook}")));
            let former = kernel.former()?.into_iter();
            lines.extend(former.map(|folder| format!("remove {} of another version", folder.display())));
        }
        Ok(lines)
    }

    fn ruleset(&self) -> RulesetPrinter {
        let packets = self.packets.ruleset();
        let plan = self.sockets.plan.settled(Instant::now());
        let maps: Vec<MapsText> =
            self.enabled().map(|family| MapsText::new(family, plan.contents(family))).collect();
        Box::new(move |out| {
            packets(out)?;
            maps.iter().try_for_each(|text| text.print(out))
        })
    }

    fn explain(&self, question: &Question, local: &[IpAddr]) -> pb::Explanation {
        let node = self.nodes[question.target.family() as usize].as_ref();
        let plan = self.sockets.plan.settled(Instant::now());
        let context = Context { plan: &plan, node, local };
        explain::explain(&context, question, &|question| self.packets.explain(question, local))
    }

    fn counts(&self, family: Family) -> Counts {
        let counts = self.packets.counts(family);
        let usage = self.sockets.plan.usage(family);
        Counts { elements: counts.elements + usage.frontends + usage.sets + usage.members, ..counts }
    }

    fn details(&self, family: Family) -> Details {
        let mut details = self.packets.details(family);
        let usage = self.sockets.plan.usage(family);
        for (map, number) in [
            (MapName::Frontends, usage.frontends),
            (MapName::Sets, usage.sets),
            (MapName::Members, usage.members),
        ] {
            if number > 0 {
                details.elements.insert(format!("ebpf-{}", map.as_str()), number as u64);
            }
        }
        if usage.left_out > 0 {
            details.elements.insert("ebpf-left-out".to_owned(), usage.left_out as u64);
        }
        details
    }

    fn map_fills(&self) -> Vec<MapFill> {
        let usage = Family::ALL.map(|family| self.sockets.plan.usage(family));
        let capacity = usual_capacity();
        let sum = |of: fn(&Usage) -> usize| usage.iter().map(of).sum();
        let slots = |number: u32| usize::try_from(number).unwrap_or(usize::MAX);
        let fill = |map: MapName, elements, max| MapFill { map: map.as_str(), elements, max };
        vec![
            fill(MapName::Frontends, sum(|usage| usage.frontends), capacity.frontends),
            fill(MapName::Sets, sum(|usage| usage.sets), capacity.sets),
            fill(MapName::Members, sum(|usage| usage.members), capacity.members),
            // Each family has the slots of both.
            fill(MapName::Slots, slots(usage[0].slots), slots(capacity.slots)),
        ]
    }

    fn decisions(&self) -> Vec<(&'static str, u64)> {
        let counters = self.sockets.kernel().and_then(|kernel| kernel.counters().ok()).unwrap_or_default();
        counters.into_iter().map(|(counter, total)| (counter.as_str(), total)).collect()
    }

    /// Of packets: sockets are asked for each datagram, or ended.
    fn udp_frontends(&self, family: Family) -> Vec<UdpFrontend> {
        self.packets.udp_frontends(family)
    }

    fn affinity_capacity(&self) -> u64 {
        self.packets.affinity_capacity()
    }
}

#[cfg(test)]
mod tests;
