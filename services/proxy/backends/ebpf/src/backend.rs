//! The eBPF backend: the socket level and the packet level behind the interface of the proxy.
//!
//! Owns: [`EbpfBackend`]. In: calls of the proxy. Out: changes of maps, through [`Sockets`], and those of the backend nft.
//!
//! The packet level comes first in every sync: the socket level sends connections to it that it does not decide. Only maps of which no
//! program reads anything yet, or nothing of the family, are filled at the same time.

use std::{net::IpAddr, panic, thread, time::Instant};

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
    options::{DetectLocal, NodeConfig, Options},
};

use crate::{
    direct::{self, Direct},
    explain::{self, Context},
    kernel::{KernelError, Loader, Shared, SocketKernel},
    layout::MapName,
    observer::EbpfObserver,
    plan::{NodeFacts, Usage},
    pods::{self, Pods},
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
    /// `None`: direct return is off.
    direct: Option<Direct>,
    /// `None`: packets between pods take the way through the network of the node.
    pods: Option<Pods>,
    /// The program of pod devices may be there by a former setting.
    has_former_pods: bool,
    /// The addresses of the node's interfaces.
    local: Vec<IpAddr>,
    nodes: [Option<NodeConfig>; 2],
    masquerade_all: bool,
    untracked_pods: bool,
    /// Pods are detected by their networks.
    has_pod_networks: bool,
}

impl EbpfBackend {
    pub(crate) fn new(
        packets: Box<dyn Backend>,
        kernel: Option<Box<dyn SocketKernel>>,
        options: &Options,
        loader: &mut Loader,
    ) -> Result<Self, BackendError> {
        let is_enabled = Family::ALL.map(|family| packets.disabled_reason(family).is_none());
        let (mut of_direct, mut of_pods) = (None, None);
        if kernel.is_some() && direct::hands_over(options) {
            of_direct = Some(Shared::with(direct::maps_folder(&direct::usual_sizes(true))?));
            of_pods = Some(Shared::with(pods::maps_folder(&pods::usual_sizes(true))?));
        }
        Ok(Self {
            direct: Direct::open(options, kernel.is_some(), of_pods, is_enabled, loader)?,
            pods: Pods::open(&options.ebpf.pod_devices, kernel.is_some(), of_direct, loader)?,
            has_former_pods: kernel.is_some(),
            packets,
            sockets: Sockets::new(kernel, usual_capacity(), is_enabled),
            local: Vec::new(),
            nodes: [None, None],
            masquerade_all: options.masquerade_all,
            untracked_pods: options.ebpf.untracked_pods,
            has_pod_networks: match &options.detect_local {
                DetectLocal::ClusterCidr(networks) => networks.iter().any(|network| network.prefix_len() > 0),
                DetectLocal::NodeCidr => true,
                DetectLocal::BridgeInterface(_) | DetectLocal::InterfaceNamePrefix(_) => false,
            },
        })
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
            is_direct_return: false,
        };
        let served = match &node.node_ports {
            Match::AllLocal => self.local.clone(),
            Match::Addresses(addresses) => addresses.clone(),
        };
        if let Some(direct) = &mut self.direct {
            direct.set_node(node, &served);
        }
        self.sockets.plan.set_facts(family, facts);
        self.sockets.plan.set_local_addresses(family, &self.local);
        self.sockets.set_node_addresses(family, &served);
    }

    /// Of packets and sockets.
    fn sync_both(&mut self, family: Family, now: Instant) -> Result<Outcome, BackendError> {
        let Self { packets, sockets, .. } = self;
        if !sockets.is_unread(family) {
            return Ok(packets.sync(family, now)?.plus(sockets.sync(family, now)?));
        }
        let (of_packets, of_sockets) = thread::scope(|scope| {
            let filling = scope.spawn(|| sockets.fill(family, now));
            let of_packets = packets.sync(family, now);
            (of_packets, filling.join().unwrap_or_else(|panic| panic::resume_unwind(panic)))
        });
        Ok(of_packets?.plus(sockets.finish(of_sockets?)?))
    }

    /// Before the rules between pods change: without them, packets of translated connections must not be handed over.
    fn narrow_pods(&mut self, family: Family) -> Result<(), KernelError> {
        let Some(pods) = &mut self.pods else {
            if std::mem::take(&mut self.has_former_pods) {
                self.sockets.remove_former_pods()?;
            }
            return Ok(());
        };
        let node = self.nodes[family as usize].as_ref();
        let node = node.filter(|node| self.untracked_pods && !node.masquerade_all);
        pods.narrow(family, node.and_then(|node| node.detector.as_ref()?.network(family)))
    }

    fn maintain_pods(&mut self, family: Family, now: Instant) -> Result<Outcome, KernelError> {
        let Some(pods) = &mut self.pods else { return Ok(Outcome::default()) };
        pods.set_network(family, self.packets.untracked_pods(family))?;
        Ok(pods.maintain(now))
    }

    fn usage_text(&self, family: Family) -> String {
        let usage = self.sockets.plan.usage(family);
        let addresses = match usage.left_addresses {
            0 => String::new(),
            left => format!("; {left} addresses of the node without room"),
        };
        format!(
            "sockets {family}: {} frontends, {} sets, {} members, {} service ports without room; {} slots of both families{addresses}",
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
        if self.untracked_pods && !self.has_pod_networks {
            limitations.push(
                "pods are tracked: proxy.ebpf_untracked_pods needs their network, by proxy.cluster_cidr or detect_local_mode NodeCIDR"
                    .to_owned(),
            );
        }
        limitations.extend(self.direct.iter().flat_map(Direct::limitations));
        limitations
    }

    fn features(&self) -> Vec<String> {
        let mut lines = self.packets.features();
        let Some(kernel) = self.sockets.kernel() else { return lines };
        let attached = if self.sockets.is_attached() { "attached" } else { "not attached yet" };
        lines.push(format!("socket level: {attached}, {}", kernel.describe()));
        lines.extend(self.enabled().map(|family| self.usage_text(family)));
        if let Ok(counters) = kernel.counters() {
            let texts = counters.iter().map(|decisions| format!("{} {}", decisions.total, decisions.text));
            lines.push(format!("decisions: {}", texts.collect::<Vec<_>>().join(", ")));
        }
        lines.extend(self.direct.iter().flat_map(Direct::features));
        lines.extend(self.pods.iter().flat_map(Pods::features));
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
        if let Some(direct) = &mut self.direct {
            direct.sockets.plan.set(family, service, ports.clone());
        }
        self.packets.set_service(family, service, ports);
    }

    fn set_node(&mut self, node: NodeConfig) {
        let family = node.family;
        self.nodes[family as usize] = Some(node.clone());
        self.set_facts(family);
        // With masquerade_all, every connection of a pod is left to packets.
        let untracked_pods = self.untracked_pods && !node.masquerade_all;
        self.packets.set_node(NodeConfig { untracked_pods, ..node });
    }

    fn set_interfaces(&mut self, interfaces: &[Interface]) {
        if let Some(direct) = &mut self.direct {
            direct.set_interfaces(interfaces);
        }
        if let Some(pods) = &mut self.pods {
            pods.set_interfaces(interfaces);
        }
        self.packets.set_interfaces(interfaces);
    }

    fn set_addresses(&mut self, local: &[IpAddr]) {
        self.local = local.to_vec();
        Family::ALL.into_iter().for_each(|family| self.set_facts(family));
        self.packets.set_addresses(local);
    }

    fn has_synced(&self, family: Family) -> bool {
        let of_direct = self.direct.as_ref().is_none_or(|direct| direct.sockets.has_synced(family));
        self.packets.has_synced(family) && self.sockets.has_synced(family) && of_direct
    }

    fn sync(&mut self, family: Family, now: Instant) -> Result<Outcome, BackendError> {
        self.narrow_pods(family)?;
        let outcome = self.sync_both(family, now)?;
        let Some(direct) = &mut self.direct else { return Ok(outcome) };
        Ok(outcome.plus(direct.sockets.sync(family, now)?))
    }

    fn maintain(&mut self, family: Family, now: Instant) -> Result<Outcome, BackendError> {
        let outcome = self.packets.maintain(family, now)?.plus(self.sockets.maintain(family, now)?);
        let outcome = outcome.plus(self.maintain_pods(family, now)?);
        let Some(direct) = &mut self.direct else { return Ok(outcome) };
        Ok(outcome.plus(direct.maintain(family, now)?))
    }

    fn stop_udp_offload(&mut self, family: Family) -> bool {
        self.packets.stop_udp_offload(family)
    }

    fn stop(&mut self) -> Option<Drain> {
        self.packets.stop()
    }

    fn observer(&self) -> Result<Box<dyn Observer>, BackendError> {
        let direct = self.direct.as_ref().map(|direct| &direct.sockets);
        Ok(Box::new(EbpfObserver::new(self.packets.observer()?, &self.sockets, direct)))
    }

    fn begin_check(&mut self, family: Family) -> Result<bool, BackendError> {
        let packets = self.packets.begin_check(family)?;
        let now = Instant::now();
        let direct = self.direct.as_mut().map_or(Ok(false), |direct| direct.begin_check(family, now))?;
        let pods = self.pods.as_ref().map_or(Ok(false), Pods::begin_check)?;
        Ok(self.sockets.begin_check(family, now)? || packets || direct || pods)
    }

    fn check(&mut self, family: Family, now: Instant) -> Check {
        let packets = match self.packets.check(family, now) {
            Check::Done(Ok(outcome)) => outcome,
            other => return other,
        };
        let mut levels =
            Some(&mut self.sockets).into_iter().chain(self.direct.as_mut().map(|direct| &mut direct.sockets));
        let checked = levels.try_fold(packets, |outcome, level| Ok(outcome.plus(level.check(family, now)?)));
        let pods = self.pods.as_mut();
        let checked =
            checked.and_then(|outcome| Ok(outcome.plus(pods.map_or(Ok(Outcome::default()), Pods::check)?)));
        Check::Done(checked.map_err(|error: KernelError| error.into()))
    }

    fn changes(&mut self) -> Result<Vec<String>, BackendError> {
        let mut lines = self.packets.changes()?;
        let now = Instant::now();
        let families: Vec<Family> = self.enabled().collect();
        let direct = self.direct.as_mut().map(|direct| ("direct return: ", &mut direct.sockets));
        for (prefix, level) in Some(("", &mut self.sockets)).into_iter().chain(direct) {
            let mut changes = Vec::new();
            for family in &families {
                changes.extend(level.difference(*family, now)?.iter().map(ToString::to_string));
            }
            if let Some(kernel) = level.kernel() {
                changes
                    .extend(kernel.detached()?.into_iter().map(|hook| format!("attach the program {hook}")));
                let former = kernel.former()?.into_iter();
                changes
                    .extend(former.map(|folder| format!("remove {} of another version", folder.display())));
            }
            lines.extend(changes.into_iter().map(|line| format!("{prefix}{line}")));
        }
        let of_pods = self.pods.as_ref().map_or(Ok(Vec::new()), Pods::changes)?;
        lines.extend(of_pods.into_iter().map(|line| format!("pod devices: {line}")));
        Ok(lines)
    }

    fn ruleset(&self) -> RulesetPrinter {
        let packets = self.packets.ruleset();
        let plan = self.sockets.plan.settled(Instant::now());
        let mut maps: Vec<MapsText> =
            self.enabled().map(|family| MapsText::new("", family, plan.contents(family))).collect();
        if let Some(direct) = &self.direct {
            let plan = direct.sockets.plan.settled(Instant::now());
            let texts =
                self.enabled().map(|family| MapsText::new("direct return, ", family, plan.contents(family)));
            maps.extend(texts);
        }
        Box::new(move |out| {
            packets(out)?;
            maps.iter().try_for_each(|text| text.print(out))
        })
    }

    fn explain(&self, question: &Question, local: &[IpAddr]) -> pb::Explanation {
        let node = self.nodes[question.target.family() as usize].as_ref();
        let plan = self.sockets.plan.settled(Instant::now());
        let context = Context { plan: &plan, node, local };
        let of_packets = |question: &Question| {
            let explanation = self.packets.explain(question, local);
            let Some(direct) = &self.direct else { return explanation };
            let plan = direct.sockets.plan.settled(Instant::now());
            direct.explain(&Context { plan: &plan, node, local }, question, explanation)
        };
        explain::explain(&context, question, &of_packets)
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
        if usage.left_addresses > 0 {
            details.elements.insert("ebpf-left-addresses".to_owned(), usage.left_addresses as u64);
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
        let mut fills = vec![
            fill(MapName::Frontends, sum(|usage| usage.frontends), capacity.frontends),
            fill(MapName::Sets, sum(|usage| usage.sets), capacity.sets),
            fill(MapName::Members, sum(|usage| usage.members), capacity.members),
            // Each family has the slots of both.
            fill(MapName::Slots, slots(usage[0].slots), slots(capacity.slots)),
            fill(MapName::NodeAddresses, sum(|usage| usage.node_addresses), capacity.node_addresses),
        ];
        fills.extend(self.direct.iter().flat_map(Direct::map_fills));
        fills
    }

    fn left_out(&self) -> usize {
        let levels =
            Some(&self.sockets).into_iter().chain(self.direct.as_ref().map(|direct| &direct.sockets));
        levels.map(|level| Family::ALL.map(|family| level.plan.left_out(family)).iter().sum::<usize>()).sum()
    }

    fn decisions(&self) -> Vec<(&'static str, u64)> {
        let counters = self.sockets.kernel().and_then(|kernel| kernel.counters().ok()).unwrap_or_default();
        counters.into_iter().map(|decisions| (decisions.label, decisions.total)).collect()
    }

    fn direct_return(&self) -> Vec<(&'static str, u64)> {
        let kernel = self.direct.as_ref().and_then(|direct| direct.sockets.kernel());
        let counters = kernel.and_then(|kernel| kernel.counters().ok()).unwrap_or_default();
        counters.into_iter().map(|decisions| (decisions.label, decisions.total)).collect()
    }

    fn pod_packets(&self) -> Vec<(&'static str, u64)> {
        let counters = self.pods.as_ref().map(Pods::counters).unwrap_or_default();
        counters.into_iter().map(|decisions| (decisions.label, decisions.total)).collect()
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
