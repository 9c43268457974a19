//! The facts of a Service that count.
//!
//! Owns: whether a Service is served, its frontends of each family, its policies, and which fields are ignored and
//! why. In: a Service. Out: [`Facts`], which borrow the Service's names.
//!
//! As in kube-proxy: `pkg/proxy/serviceport.go`, `servicechangetracker.go`, `util/utils.go`.

use std::net::IpAddr;

use ipnet::IpNet;
use keelson_proto::{
    kubernetes::{Service, ServicePort, ServiceSpec},
    localnetv1::Protocol,
};

use super::parse::{self, Family, PerFamily};

/// The label that selects another proxy than the usual one; any value counts, even an empty one, which no proxy serves.
pub(super) const PROXY_NAME: &str = "service.kubernetes.io/service-proxy-name";

/// Set by the API server if affinity has no timeout, in seconds.
const AFFINITY_DEFAULT: i32 = 10_800;
/// Maximum affinity timeout of the API, in seconds.
const MAX_AFFINITY_SECONDS: i32 = 86_400;

#[derive(Debug, Clone, PartialEq)]
pub(super) struct Facts<'a> {
    /// Whether it has a frontend; if not, the first reason.
    pub(super) served: Result<(), Unserved<'a>>,
    /// The value of [`PROXY_NAME`]; empty: it does not have the label.
    pub(super) proxy_name: &'a str,
    /// `spec.type`.
    pub(super) kind: &'a str,
    pub(super) cluster: PerFamily<Option<IpAddr>>,
    /// `spec.clusterIP` if it is served, else the first served one in the order of `ipFamilies`.
    pub(super) primary: Option<IpAddr>,
    /// Sorted and distinct, as the two that follow.
    pub(super) external: PerFamily<Vec<IpAddr>>,
    pub(super) load_balancer: PerFamily<Vec<IpAddr>>,
    /// Empty: every source is allowed.
    pub(super) ranges: PerFamily<Vec<IpNet>>,
    pub(super) internal_local: bool,
    /// True only if it has an effect.
    pub(super) external_local: bool,
    /// In seconds; 0: no affinity.
    pub(super) affinity: i32,
    /// Set only if it has an effect; 0: none.
    pub(super) health_check_node_port: u16,
    pub(super) ports: Vec<Port<'a>>,
    pub(super) ignored: Vec<Ignored<'a>>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Port<'a> {
    pub(super) name: &'a str,
    pub(super) protocol: Protocol,
    pub(super) port: u16,
    /// 0: none.
    pub(super) node_port: u16,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Unserved<'a> {
    Missing,
    /// It has the label [`PROXY_NAME`] with this value.
    OtherProxy(&'a str),
    NoClusterIp,
    Headless,
    ExternalName,
    /// It has no usable cluster IP of any family.
    NoFamily,
    NoPort,
}

/// A field of a Service that has no effect.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Ignored<'a> {
    /// `ipFamilies` names this family, but the cluster IP at its index has another.
    ClusterIp(Family, &'a str),
    /// `ipFamilies` has this entry, and `clusterIPs` none at its index.
    FamilyWithoutIp(&'a str),
    Address(AddressKind, &'a str),
    /// An address of a family without a cluster IP.
    AddressOfFamily(AddressKind, IpAddr),
    /// An address of the load balancer with an `ipMode` other than VIP.
    IngressNotVip(&'a str, &'a str),
    SourceRange(&'a str),
    SourceRangeOfFamily(IpNet),
    /// The ranges of this family do not filter, because one contains every address.
    SourceRangesOfEverything(Family),
    PortNumber {
        name: &'a str,
        number: i32,
    },
    Protocol {
        name: &'a str,
        protocol: &'a str,
    },
    /// A later port has the same name and protocol.
    PortRepeated {
        name: &'a str,
        number: i32,
    },
    /// An earlier port has the same number and protocol.
    FrontendRepeated {
        name: &'a str,
        number: i32,
    },
    NodePort {
        name: &'a str,
        number: i32,
    },
    /// externalTrafficPolicy Local on a Service without frontends for outside traffic.
    ExternalPolicy,
    HealthCheckNodePort(i32),
    /// An affinity timeout out of range, in seconds.
    Affinity(i32),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum AddressKind {
    External,
    LoadBalancer,
}

pub(super) fn port_number(number: i32) -> Option<u16> {
    u16::try_from(number).ok().filter(|number| *number != 0)
}

/// An empty name is TCP, the default of the API.
pub(super) fn protocol(name: &str) -> Option<Protocol> {
    match name {
        "" | "TCP" => Some(Protocol::Tcp),
        "UDP" => Some(Protocol::Udp),
        "SCTP" => Some(Protocol::Sctp),
        _ => None,
    }
}

impl<'a> Facts<'a> {
    /// `proxy_names`: the values of [`PROXY_NAME`] whose Services are published.
    pub(super) fn of(service: &'a Service, proxy_names: &[String]) -> Self {
        let mut ignored = Vec::new();
        let Some(spec) = &service.spec else {
            return Self::unserved(Unserved::NoClusterIp);
        };
        let (cluster, primary) = cluster_ips(spec, &mut ignored);
        let external_local = external_policy(spec, &mut ignored);
        let ports = ports(&spec.ports, &mut ignored);
        let served = served(service, spec, proxy_names, primary.is_some(), !ports.is_empty());
        let vips = load_balancer_vips(service, &mut ignored);
        let external = spec.external_ips.iter().map(String::as_str);
        Self {
            served,
            proxy_name: proxy_name(service).unwrap_or_default(),
            kind: if spec.r#type.is_empty() { "ClusterIP" } else { &spec.r#type },
            cluster,
            primary,
            external: addresses(AddressKind::External, external, &cluster, &mut ignored),
            load_balancer: addresses(AddressKind::LoadBalancer, vips, &cluster, &mut ignored),
            ranges: source_ranges(spec, &cluster, &mut ignored),
            internal_local: spec.internal_traffic_policy.as_deref() == Some("Local"),
            external_local,
            affinity: affinity(spec, &mut ignored),
            health_check_node_port: health_check_node_port(spec, external_local, &mut ignored),
            ports,
            ignored,
        }
    }

    pub(super) fn unserved(reason: Unserved<'a>) -> Self {
        Self {
            served: Err(reason),
            proxy_name: "",
            kind: "ClusterIP",
            cluster: PerFamily::default(),
            primary: None,
            external: PerFamily::default(),
            load_balancer: PerFamily::default(),
            ranges: PerFamily::default(),
            internal_local: false,
            external_local: false,
            affinity: 0,
            health_check_node_port: 0,
            ports: Vec::new(),
            ignored: Vec::new(),
        }
    }

    /// Whether a port has a frontend other than its cluster IP in this family.
    pub(super) fn reached_from_outside(&self, port: &Port<'_>, family: Family) -> bool {
        port.node_port != 0 || !self.external[family].is_empty() || !self.load_balancer[family].is_empty()
    }
}

fn proxy_name(service: &Service) -> Option<&str> {
    service.metadata.as_ref()?.labels.get(PROXY_NAME).map(String::as_str)
}

fn served<'a>(
    service: &'a Service,
    spec: &ServiceSpec,
    proxy_names: &[String],
    has_family: bool,
    has_port: bool,
) -> Result<(), Unserved<'a>> {
    let label =
        proxy_name(service).filter(|name| name.is_empty() || !proxy_names.iter().any(|it| it == name));
    match (label, spec.cluster_ip.as_str()) {
        (Some(name), _) => Err(Unserved::OtherProxy(name)),
        (None, "") if spec.r#type == "ExternalName" => Err(Unserved::ExternalName),
        (None, "") => Err(Unserved::NoClusterIp),
        (None, "None") => Err(Unserved::Headless),
        (None, _) if spec.r#type == "ExternalName" => Err(Unserved::ExternalName),
        (None, _) if !has_family => Err(Unserved::NoFamily),
        (None, _) if !has_port => Err(Unserved::NoPort),
        (None, _) => Ok(()),
    }
}

/// The cluster IP of each family, and the primary one.
fn cluster_ips<'a>(
    spec: &'a ServiceSpec,
    ignored: &mut Vec<Ignored<'a>>,
) -> (PerFamily<Option<IpAddr>>, Option<IpAddr>) {
    let mut ips = PerFamily::default();
    let single = parse::address(&spec.cluster_ip);
    if spec.ip_families.is_empty() {
        if let Some(ip) = single {
            ips[Family::of(ip)] = Some(ip);
        }
        return (ips, single);
    }
    let mut first = None;
    let mut seen: PerFamily<bool> = PerFamily::default();
    for (place, name) in spec.ip_families.iter().enumerate() {
        let (Some(family), Some(text)) = (Family::named(name), spec.cluster_ips.get(place)) else {
            ignored.push(Ignored::FamilyWithoutIp(name));
            continue;
        };
        // Only the first entry of a family counts, even if it is unusable.
        if std::mem::replace(&mut seen[family], true) {
            ignored.push(Ignored::ClusterIp(family, text));
            continue;
        }
        match parse::address(text).filter(|ip| Family::of(*ip) == family) {
            Some(ip) => {
                ips[family] = Some(ip);
                first = first.or(Some(ip));
            }
            None => ignored.push(Ignored::ClusterIp(family, text)),
        }
    }
    let primary = single.filter(|ip| ips[Family::of(*ip)] == Some(*ip)).or(first);
    (ips, primary)
}

/// Load balancer addresses for which this node captures the traffic.
fn load_balancer_vips<'a>(service: &'a Service, ignored: &mut Vec<Ignored<'a>>) -> Vec<&'a str> {
    let load_balancer = service.status.as_ref().and_then(|status| status.load_balancer.as_ref());
    let mut vips = Vec::new();
    for ingress in load_balancer.iter().flat_map(|load_balancer| &load_balancer.ingress) {
        match ingress.ip_mode.as_deref() {
            // Only a host name.
            _ if ingress.ip.is_empty() => {}
            None | Some("VIP") => vips.push(ingress.ip.as_str()),
            Some(mode) => ignored.push(Ignored::IngressNotVip(&ingress.ip, mode)),
        }
    }
    vips
}

/// Sorted and distinct, of families with a cluster IP.
fn addresses<'a>(
    kind: AddressKind,
    texts: impl IntoIterator<Item = &'a str>,
    cluster: &PerFamily<Option<IpAddr>>,
    ignored: &mut Vec<Ignored<'a>>,
) -> PerFamily<Vec<IpAddr>> {
    let mut found: PerFamily<Vec<IpAddr>> = PerFamily::default();
    for text in texts {
        match parse::address(text) {
            None => ignored.push(Ignored::Address(kind, text)),
            Some(ip) if cluster[Family::of(ip)].is_none() => ignored.push(Ignored::AddressOfFamily(kind, ip)),
            Some(ip) => found[Family::of(ip)].push(ip),
        }
    }
    for family in Family::ALL {
        found[family].sort_unstable();
        found[family].dedup();
    }
    found
}

fn source_ranges<'a>(
    spec: &'a ServiceSpec,
    cluster: &PerFamily<Option<IpAddr>>,
    ignored: &mut Vec<Ignored<'a>>,
) -> PerFamily<Vec<IpNet>> {
    let mut ranges: PerFamily<Vec<IpNet>> = PerFamily::default();
    for text in &spec.load_balancer_source_ranges {
        match parse::cidr(text.trim()) {
            None => ignored.push(Ignored::SourceRange(text)),
            Some(cidr) if cluster[Family::of(cidr.addr())].is_none() => {
                ignored.push(Ignored::SourceRangeOfFamily(cidr))
            }
            Some(cidr) => ranges[Family::of(cidr.addr())].push(cidr),
        }
    }
    for family in Family::ALL {
        let ranges = &mut ranges[family];
        if ranges.iter().any(|cidr| cidr.prefix_len() == 0) {
            ranges.clear();
            ignored.push(Ignored::SourceRangesOfEverything(family));
        }
        ranges.sort_unstable();
        ranges.dedup();
    }
    ranges
}

fn external_policy<'a>(spec: &'a ServiceSpec, ignored: &mut Vec<Ignored<'a>>) -> bool {
    let local = spec.external_traffic_policy == "Local";
    let outside = match spec.r#type.as_str() {
        "LoadBalancer" | "NodePort" => true,
        "" | "ClusterIP" => !spec.external_ips.is_empty(),
        _ => false,
    };
    if local && !outside {
        ignored.push(Ignored::ExternalPolicy);
    }
    local && outside
}

fn health_check_node_port<'a>(
    spec: &'a ServiceSpec,
    external_local: bool,
    ignored: &mut Vec<Ignored<'a>>,
) -> u16 {
    let port =
        port_number(spec.health_check_node_port).filter(|_| external_local && spec.r#type == "LoadBalancer");
    if port.is_none() && spec.health_check_node_port != 0 {
        ignored.push(Ignored::HealthCheckNodePort(spec.health_check_node_port));
    }
    port.unwrap_or(0)
}

fn affinity<'a>(spec: &'a ServiceSpec, ignored: &mut Vec<Ignored<'a>>) -> i32 {
    if spec.session_affinity != "ClientIP" {
        return 0;
    }
    let config = spec.session_affinity_config.as_ref().and_then(|config| config.client_ip.as_ref());
    match config.and_then(|client_ip| client_ip.timeout_seconds) {
        None => AFFINITY_DEFAULT,
        Some(seconds) if (1..=MAX_AFFINITY_SECONDS).contains(&seconds) => seconds,
        Some(seconds) => {
            ignored.push(Ignored::Affinity(seconds));
            if seconds > MAX_AFFINITY_SECONDS { MAX_AFFINITY_SECONDS } else { AFFINITY_DEFAULT }
        }
    }
}

/// The usable ports, in the order of the Service. The API server rejects a repeated name, and a repeated number with
/// the same protocol. If they occur, the last one of a name counts, as in kube-proxy, and the first one of a number.
fn ports<'a>(all: &'a [ServicePort], ignored: &mut Vec<Ignored<'a>>) -> Vec<Port<'a>> {
    let mut ports: Vec<Port<'a>> = Vec::with_capacity(all.len());
    for (place, port) in all.iter().enumerate() {
        let (name, number) = (port.name.as_str(), port.port);
        let Some(protocol) = protocol(&port.protocol) else {
            ignored.push(Ignored::Protocol { name, protocol: &port.protocol });
            continue;
        };
        let Some(usable) = port_number(number) else {
            ignored.push(Ignored::PortNumber { name, number });
            continue;
        };
        let later = all.get(place + 1..).unwrap_or_default();
        if later.iter().any(|later| later.name == name && self::protocol(&later.protocol) == Some(protocol)) {
            ignored.push(Ignored::PortRepeated { name, number });
            continue;
        }
        if ports.iter().any(|earlier| (earlier.port, earlier.protocol) == (usable, protocol)) {
            ignored.push(Ignored::FrontendRepeated { name, number });
            continue;
        }
        let node_port = port_number(port.node_port);
        if node_port.is_none() && port.node_port != 0 {
            ignored.push(Ignored::NodePort { name, number: port.node_port });
        }
        ports.push(Port { name, protocol, port: usable, node_port: node_port.unwrap_or(0) });
    }
    ports
}
