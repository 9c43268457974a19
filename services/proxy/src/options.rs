//! Options of a proxy, and the node's configuration that follows from them.
//!
//! Owns: [`Options`], [`DetectLocal`] and [`NodeConfig`]. In: validated values of the settings; the Node and its
//! addresses. Out: values.

use std::{net::IpAddr, path::PathBuf, time::Duration};

use ipnet::IpNet;

use keelson_client::NodeInfo;

use crate::{
    addresses::{InterfacePattern, Match, NodePortAddresses, node_port_addresses},
    conntrack::ConntrackOptions,
    model::Family,
};

/// How traffic of this node's pods is detected. Source: kube-proxy's `detectLocalMode`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DetectLocal {
    /// A source in the first network of the family; without one, pods are not detected.
    ClusterCidr(Vec<IpNet>),
    /// A source in the Node's `spec.podCIDRs`.
    NodeCidr,
    /// The input interface is this bridge.
    BridgeInterface(String),
    /// The name of the input interface has this prefix.
    InterfaceNamePrefix(String),
}

/// Which iptables programs the backend iptables runs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum IptablesVariant {
    /// The one that the node's `iptables` is, if the kernel supports it.
    #[default]
    Auto,
    Legacy,
    Nft,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IptablesOptions {
    pub variant: IptablesVariant,
    /// Serve node ports at 127.0.0.1. Source: kube-proxy's `iptables.localhostNodePorts`.
    pub localhost_node_ports: bool,
}

impl Default for IptablesOptions {
    fn default() -> Self {
        Self { variant: IptablesVariant::Auto, localhost_node_ports: true }
    }
}

/// Options of the backend ipvs. Source: `KubeProxyConfiguration.ipvs`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IpvsOptions {
    /// Name of the kernel's scheduler, such as `rr`.
    pub scheduler: String,
    /// Answer ARP only for addresses of the interface that is asked.
    pub strict_arp: bool,
    /// Idle timeout of TCP connections; 0: the kernel's. Fractions of a second are dropped, here and below.
    pub tcp_timeout: Duration,
    /// Timeout of TCP connections after a FIN; 0: the kernel's.
    pub tcp_fin_timeout: Duration,
    /// Idle timeout of UDP flows; 0: the kernel's.
    pub udp_timeout: Duration,
}

impl Default for IpvsOptions {
    fn default() -> Self {
        Self {
            scheduler: "rr".into(),
            strict_arp: false,
            tcp_timeout: Duration::ZERO,
            tcp_fin_timeout: Duration::ZERO,
            udp_timeout: Duration::ZERO,
        }
    }
}

/// Options of the backend ebpf.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct EbpfOptions {
    /// The folder of cgroup v2 below which sockets are translated; `None`: the root of the hierarchy.
    pub cgroup: Option<PathBuf>,
    /// Flows between pods that need no translation are not tracked ([`NodeConfig::untracked_pods`]).
    pub untracked_pods: bool,
    /// The devices of pods, on the node's side: packets from one pod to another skip the network of the node. Requires
    /// `untracked_pods`. Empty: off.
    pub pod_devices: Vec<InterfacePattern>,
    /// `None`: packets of outside clients are left to nftables.
    pub direct_return: Option<DirectReturnOptions>,
}

/// Direct return of the backend ebpf.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DirectReturnOptions {
    /// The devices at which outside clients arrive, and by which other nodes are reached.
    pub devices: Vec<InterfacePattern>,
    pub hook: DirectReturnHook,
    /// The networks of the addresses of nodes.
    pub nodes: Vec<IpNet>,
}

/// Where programs see what arrives on a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DirectReturnHook {
    Tc,
    Xdp,
}

impl DirectReturnHook {
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Tc => "tc",
            Self::Xdp => "xdp",
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    /// Serve the Services whose label `service.kubernetes.io/service-proxy-name` has this value; empty: those without it.
    pub service_proxy_name: String,
    /// Addresses that replace the node's own, at most one per family.
    pub bind_address: Vec<IpAddr>,
    pub detect_local: DetectLocal,
    pub masquerade_all: bool,
    /// The bit of the packet mark that requests masquerading: 0 to 31.
    pub masquerade_bit: u32,
    pub node_port_addresses: NodePortAddresses,
    /// Serve `spec.externalIPs`. Source: kube-proxy's feature gate `AllowServiceExternalIPs`.
    pub allow_external_ips: bool,
    /// Interfaces whose established flows of Services are offloaded to a flowtable; empty: no flowtable.
    pub flowtable_interfaces: Vec<InterfacePattern>,
    pub iptables: IptablesOptions,
    pub ipvs: IpvsOptions,
    pub ebpf: EbpfOptions,
    pub conntrack: ConntrackOptions,
    pub relay: RelayOptions,
    /// Minimum time between commits of a lasting burst; 0: no limit. The first commits of a burst are not delayed.
    pub min_sync_period: Duration,
    /// Maximum time until a failed sync is retried, and until drift is repaired.
    pub sync_period: Duration,
    /// How long endpoints may be stale before the node requests no more traffic; `None`: forever.
    pub max_staleness: Option<Duration>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProxyProtocol {
    V1,
    V2,
}

/// Options of backends that accept connections themselves and relay them to endpoints. Other backends ignore them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RelayOptions {
    /// How long the connections of a removed frontend may continue.
    pub drain_timeout: Duration,
    /// How long connections may continue when the process stops.
    pub stop_timeout: Duration,
    /// Idle time after which a UDP session ends.
    pub udp_timeout: Duration,
    /// How long a connection that a policy drops is held open without data.
    pub drop_timeout: Duration,
    /// Maximum number of TCP connections and UDP sessions, together.
    pub max_sessions: usize,
    /// Where the loopback ports begin that replace cluster IPs which cannot be bound; 0: ports that the kernel chooses.
    pub mapped_port_base: u16,
    /// Header that tells endpoints of TCP ports the address of the client.
    pub proxy_protocol: Option<ProxyProtocol>,
    /// Connect to endpoints from the address of the client (IP_TRANSPARENT).
    pub transparent: bool,
    /// Route the addresses of Services to this node where the process may do so.
    pub redirect: bool,
    /// File that keeps session affinity over a restart.
    pub affinity_file: Option<PathBuf>,
}

impl Default for RelayOptions {
    fn default() -> Self {
        Self {
            drain_timeout: Duration::from_secs(30),
            stop_timeout: Duration::from_secs(5),
            udp_timeout: Duration::from_secs(60),
            drop_timeout: Duration::from_secs(10),
            max_sessions: 16_384,
            mapped_port_base: 0,
            proxy_protocol: None,
            transparent: false,
            redirect: true,
            affinity_file: None,
        }
    }
}

/// How the traffic of pods is detected. A detector that cannot match (a network of the other family, an empty name)
/// counts as none.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Detector {
    /// The source address is in this network (ClusterCIDR, NodeCIDR).
    Cidr(IpNet),
    /// The name of the input interface; at most 15 bytes count, as in the kernel.
    Bridge(String),
    /// A prefix of the name of the input interface; at most 15 bytes count.
    InterfacePrefix(String),
}

impl Detector {
    /// The network that pods of the family have to themselves, if that is how they are detected.
    #[must_use]
    pub fn network(&self, family: Family) -> Option<IpNet> {
        match self {
            Self::Cidr(net) if family.has(&net.addr()) && net.prefix_len() > 0 => Some(net.trunc()),
            _ => None,
        }
    }
}

/// What the rules of a family depend on besides Services.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeConfig {
    pub family: Family,
    pub masquerade_all: bool,
    /// The bit of the packet mark that requests masquerading, as a mask.
    pub mark: u32,
    /// `None`: traffic to cluster IPs is not masqueraded, and pods are treated as outside sources.
    pub detector: Option<Detector>,
    /// The CIDRs of every ServiceCIDR, in any order. None if another proxy may serve addresses in them.
    pub service_cidrs: Vec<IpNet>,
    /// The addresses of the node in source ranges.
    pub node_ips: Vec<IpAddr>,
    pub node_ports: Match,
    /// TCP and UDP between pods that needs no translation is not tracked, where pods are detected by their network; what is
    /// translated between them is masqueraded. For the backend ebpf, which translates before there is a packet.
    pub untracked_pods: bool,
}

impl Options {
    /// The mask of [`Self::masquerade_bit`].
    #[must_use]
    pub fn mark(&self) -> u32 {
        1_u32.checked_shl(self.masquerade_bit).unwrap_or(0)
    }

    /// The node's address of the family: the configured one, otherwise the Node's first.
    #[must_use]
    pub fn node_ips(&self, node: &NodeInfo, family: Family) -> Vec<IpAddr> {
        let given = self.bind_address.iter().copied().filter(|ip| family.has(ip) && !ip.is_unspecified());
        let ips = node.i_ps.as_ref();
        let texts = match family {
            Family::V4 => ips.map(|ips| &ips.v4),
            Family::V6 => ips.map(|ips| &ips.v6),
        };
        let known = texts.into_iter().flatten().filter_map(|text| text.parse().ok());
        given.chain(known.filter(|ip| family.has(ip))).take(1).collect()
    }

    /// `None`: the networks of the node's pods are not known yet.
    #[must_use]
    pub fn node_config(&self, node: &NodeInfo, local: &[IpAddr], family: Family) -> Option<NodeConfig> {
        let node_ips = self.node_ips(node, family);
        let service_cidrs = node.service_cid_rs.iter().filter_map(|text| text.parse::<IpNet>().ok());
        Some(NodeConfig {
            family,
            masquerade_all: self.masquerade_all,
            mark: self.mark(),
            detector: self.detector(node, family)?,
            // Addresses without a Service of this proxy may belong to another one.
            service_cidrs: service_cidrs
                .filter(|cidr| !self.is_beside_another(node) && family.has(&cidr.addr()))
                .collect(),
            node_ports: node_port_addresses(&self.node_port_addresses, &node_ips, local, family),
            node_ips,
            untracked_pods: false,
        })
    }

    /// Whether another proxy may serve Services of this node.
    fn is_beside_another(&self, node: &NodeInfo) -> bool {
        !self.service_proxy_name.is_empty() || !node.service_proxy_names.is_empty()
    }

    /// The outer `None`: not known yet.
    fn detector(&self, node: &NodeInfo, family: Family) -> Option<Option<Detector>> {
        let first = |cidrs: &[IpNet]| cidrs.iter().find(|cidr| family.has(&cidr.addr())).copied();
        Some(match &self.detect_local {
            DetectLocal::ClusterCidr(cidrs) => first(cidrs).map(Detector::Cidr),
            DetectLocal::NodeCidr => {
                let cidrs: Vec<IpNet> = node.pod_cid_rs.iter().filter_map(|text| text.parse().ok()).collect();
                if cidrs.is_empty() {
                    return None;
                }
                first(&cidrs).map(Detector::Cidr)
            }
            DetectLocal::BridgeInterface(name) => Some(Detector::Bridge(name.clone())),
            DetectLocal::InterfaceNamePrefix(prefix) => Some(Detector::InterfacePrefix(prefix.clone())),
        })
    }
}
