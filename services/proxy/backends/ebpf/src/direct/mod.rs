//! Direct return: packets of outside clients go to an endpoint without connection tracking and masquerading, and replies go from
//! the endpoint's node to the client.
//!
//! Owns: [`Direct`], the level of programs at devices. In: Services, facts of the node, interfaces. Out: elements of its maps,
//! programs that are attached.
//!
//! It is a level of its own beside the socket level (docs/decisions/0078): the same plan with other rules, maps of the same
//! layout, and other programs. What it does not decide is left to the packet level.
//!
//! The modules: `layout` and `kernel` (maps, programs), `flows` (what programs remember of flows that have ended).

mod explain;
mod flows;
mod kernel;
mod layout;

use std::{collections::BTreeMap, net::IpAddr, time::Instant};

use ipnet::IpNet;
use keelson_proxy::{
    addresses::{Interface, matching},
    backend::Outcome,
    model::Family,
    options::{DetectLocal, Detector, DirectReturnHook, DirectReturnOptions, NodeConfig, Options},
};
use nix::ifaddrs::getifaddrs;

use self::{
    flows::FlowSweeper,
    kernel::{Device, DirectKernel, SharedTargets},
    layout::{DEVICES, FLOWS, NETWORK_NODES, NETWORK_PODS, NETWORKS},
};
use crate::{
    kernel::{Hook, KernelError, Loader, Shared, Sizes, SocketKernel},
    layout::network_key,
    plan::NodeFacts,
    sockets::{Sockets, usual_capacity},
};

pub(crate) use self::kernel::{maps_folder, usual_sizes};

/// ARPHRD_ETHER (linux/if_arp.h).
const ETHERNET: u16 = 1;

pub(crate) struct Direct {
    pub(crate) sockets: Sockets,
    options: DirectReturnOptions,
    targets: SharedTargets,
    interfaces: Vec<Interface>,
    /// Of every family, whether nodes serve it or not.
    pod_networks: Vec<IpNet>,
    detected: [Option<IpNet>; 2],
    /// Devices of the setting that programs cannot be attached to.
    unsuitable: Vec<String>,
    max_networks: usize,
    max_devices: usize,
    /// Packets to pods of this node go to their devices, as far as pod devices know these.
    hands_over: bool,
    /// Devices for which the map has no room.
    left_devices: Vec<String>,
    flows: FlowSweeper,
}

impl Direct {
    /// `None`: it is off. `uses_kernel`: otherwise opened to print. `shared`: with pod devices.
    pub(crate) fn open(
        options: &Options,
        uses_kernel: bool,
        shared: Option<Shared>,
        is_enabled: [bool; 2],
        loader: &mut Loader,
    ) -> Result<Option<Self>, KernelError> {
        let sizes = uses_kernel.then(|| usual_sizes(shared.is_some()));
        let own = options.ebpf.direct_return.as_ref();
        own.map(|own| Self::open_with(own, options, sizes, shared, is_enabled, loader)).transpose()
    }

    /// `sizes`: those of the maps; `None`: opened to print.
    fn open_with(
        own: &DirectReturnOptions,
        options: &Options,
        sizes: Option<Sizes>,
        shared: Option<Shared>,
        is_enabled: [bool; 2],
        loader: &mut Loader,
    ) -> Result<Self, KernelError> {
        let maps = sizes.clone().unwrap_or_else(|| usual_sizes(false));
        let hands_over = hands_over(options);
        let pod_networks = match &options.detect_local {
            DetectLocal::ClusterCidr(networks) => networks.clone(),
            _ => Vec::new(),
        };
        check_networks(&own.nodes, &pod_networks, size(&maps, NETWORKS))?;
        let targets = SharedTargets::default();
        targets.get().masquerade = options.mark();
        let kernel: Option<Box<dyn SocketKernel>> = match sizes {
            Some(sizes) => {
                let mut kernel = DirectKernel::find(own.hook, targets.clone(), sizes, shared)?;
                if !kernel.has_run() {
                    kernel.probe(loader)?;
                }
                Some(Box::new(kernel))
            }
            None => None,
        };
        let mut direct = Self {
            sockets: Sockets::new(kernel, usual_capacity(), is_enabled),
            options: own.clone(),
            targets,
            interfaces: Vec::new(),
            pod_networks,
            detected: [None, None],
            unsuitable: Vec::new(),
            max_networks: max_networks(size(&maps, NETWORKS)),
            max_devices: size(&maps, DEVICES),
            hands_over,
            left_devices: Vec::new(),
            flows: FlowSweeper::default(),
        };
        direct.set_networks();
        Ok(direct)
    }

    pub(crate) fn set_node(&mut self, node: &NodeConfig, served: &[IpAddr]) {
        let facts = NodeFacts {
            masquerade_all: node.masquerade_all,
            detects_pods: node.detector.is_some(),
            has_cluster_ip: false,
            is_direct_return: true,
        };
        self.sockets.plan.set_facts(node.family, facts);
        self.sockets.set_node_addresses(node.family, served);
        self.detected[node.family as usize] = match &node.detector {
            Some(Detector::Cidr(network)) => Some(*network),
            Some(Detector::Bridge(_) | Detector::InterfacePrefix(_)) | None => None,
        };
        self.set_networks();
    }

    /// Networks of pods are those of the setting, too: where an interface tells pods, nothing else names them.
    fn set_networks(&mut self) {
        let pods = self.pod_networks.iter().chain(self.detected.iter().flatten());
        let networks = networks(&self.options.nodes, pods);
        self.set_targets(|targets| targets.networks = networks);
    }

    pub(crate) fn set_interfaces(&mut self, interfaces: &[Interface]) {
        self.interfaces = interfaces.to_vec();
        self.set_devices();
    }

    /// Looks at the devices again: their hardware addresses change without a word about interfaces.
    fn set_devices(&mut self) {
        let wanted = matching(&self.options.devices, &self.interfaces);
        let links = match links() {
            Ok(links) => links,
            Err(error) => {
                return tracing::warn!(%error, "cannot list the hardware addresses of devices (getifaddrs)");
            }
        };
        let mut devices = BTreeMap::new();
        self.unsuitable.clear();
        for name in wanted {
            match links.get(&name) {
                Some((number, Some(hardware_address))) => {
                    let device = Device { name, hardware_address: *hardware_address };
                    devices.insert(*number, device);
                }
                _ => self.unsuitable.push(name),
            }
        }
        // Those that were made first stay.
        let left = devices.keys().nth(self.max_devices).copied().map(|first| devices.split_off(&first));
        let left: Vec<String> = left.unwrap_or_default().into_values().map(|device| device.name).collect();
        if self.left_devices != left && !left.is_empty() {
            tracing::warn!(max = self.max_devices, devices = ?left, "no room for programs of direct return at some devices");
        }
        self.left_devices = left;
        self.set_targets(|targets| targets.devices = devices);
    }

    fn set_targets(&mut self, change: impl FnOnce(&mut kernel::Targets)) {
        let mut targets = self.targets.get();
        let before = targets.clone();
        change(&mut targets);
        let is_same = *targets == before;
        drop(targets);
        if is_same {
            return;
        }
        if let Err(error) = self.sockets.attach_again() {
            tracing::warn!(%error, "cannot attach the programs of direct return; retrying with the next check");
        }
    }

    pub(crate) fn begin_check(&mut self, family: Family, now: Instant) -> Result<bool, KernelError> {
        self.set_devices();
        self.sockets.begin_check(family, now)
    }

    pub(crate) fn maintain(&mut self, family: Family, now: Instant) -> Result<Outcome, KernelError> {
        let kernel = self.sockets.kernel().filter(|_| self.sockets.is_attached());
        if let Some(kernel) = kernel {
            self.flows.start_if_due(kernel.maps_folder(), now);
        }
        self.sockets.maintain(family, now)
    }

    pub(crate) fn limitations(&self) -> Vec<String> {
        let mut limitations = Vec::new();
        if self.options.nodes.is_empty() {
            limitations.push(
                "direct return: without proxy.ebpf_direct_return_nodes, node ports lead to endpoints of this node only, and \
                 clients on other nodes are not told from outside ones"
                    .to_owned(),
            );
        }
        limitations
    }

    /// Lines for people.
    pub(crate) fn features(&self) -> Vec<String> {
        let Some(kernel) = self.sockets.kernel() else { return Vec::new() };
        let attached = if self.sockets.is_attached() { "attached" } else { "not attached yet" };
        let mut lines = vec![format!("direct return: {attached}, {}", kernel.describe())];
        if !self.unsuitable.is_empty() {
            lines.push(format!("direct return: not Ethernet: {}", self.unsuitable.join(", ")));
        }
        if !self.left_devices.is_empty() {
            let (max, left) = (self.max_devices, self.left_devices.len());
            lines.push(format!("direct return: {left} devices beyond the first {max} are left out"));
        }
        if let Ok(counters) = kernel.counters() {
            let texts = counters.iter().filter(|decisions| decisions.total > 0);
            let texts: Vec<String> =
                texts.map(|decisions| format!("{} {}", decisions.total, decisions.text)).collect();
            let text = if texts.is_empty() { "no packet yet".to_owned() } else { texts.join(", ") };
            lines.push(format!("direct return: {text}"));
            let flows = self.flows.counts().flows;
            lines.push(format!("direct return: {flows} flows remembered, of {}", FLOWS.max_entries));
        }
        lines
    }

    pub(crate) fn devices(&self) -> Vec<String> {
        self.targets.get().devices.values().map(|device| device.name.clone()).collect()
    }

    pub(crate) fn program(&self) -> &'static str {
        Hook::wanted(self.options.hook)[0].program()
    }

    pub(crate) fn is_inside(&self, ip: IpAddr) -> bool {
        let of_pods = self.pod_networks.iter().chain(self.detected.iter().flatten());
        self.options.nodes.iter().chain(of_pods).any(|network| network.contains(&ip))
    }
}

/// Whether packets to pods of this node go to their devices. XDP sends nothing there.
pub(crate) fn hands_over(options: &Options) -> bool {
    let own = options.ebpf.direct_return.as_ref();
    own.is_some_and(|own| own.hook == DirectReturnHook::Tc) && !options.ebpf.pod_devices.is_empty()
}

fn size(sizes: &Sizes, map: &str) -> usize {
    usize::try_from(sizes.get(map).copied().unwrap_or_default()).unwrap_or(usize::MAX)
}

fn networks<'a>(
    nodes: &'a [IpNet],
    pods: impl IntoIterator<Item = &'a IpNet>,
) -> BTreeMap<(u32, [u8; 16]), u32> {
    let nodes = nodes.iter().map(|network| (network, NETWORK_NODES));
    let mut networks = BTreeMap::new();
    for (network, what) in nodes.chain(pods.into_iter().map(|network| (network, NETWORK_PODS))) {
        *networks.entry(network_key(*network)).or_default() |= what;
    }
    networks
}

/// The map has room for the former networks beside all others, because no network is unknown in between.
const fn max_networks(size: usize) -> usize {
    size / 2
}

/// The pod networks of the node, one of each family, are known later.
fn check_networks(nodes: &[IpNet], pods: &[IpNet], size: usize) -> Result<(), KernelError> {
    let max = max_networks(size).saturating_sub(Family::ALL.len());
    let count = networks(nodes, pods).len();
    if count > max { Err(KernelError::Networks { count, max }) } else { Ok(()) }
}

type Links = BTreeMap<String, (u32, Option<[u8; 6]>)>;

/// The number of each interface, and its address if it has frames of Ethernet.
fn links() -> nix::Result<Links> {
    let links = getifaddrs()?.filter_map(|entry| {
        let link = *entry.address.as_ref()?.as_link_addr()?;
        let address = if link.hatype() == ETHERNET { link.addr() } else { None };
        Some((entry.interface_name, (u32::try_from(link.ifindex()).ok()?, address)))
    });
    Ok(links.collect())
}

#[cfg(test)]
mod tests;
