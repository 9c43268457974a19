//! Tests of the view, and builders of Services and slices that other tests may use.
//!
//! In tables an endpoint is a word: `L1` is 10.1.0.1 on node n1, the node of the view, and `R1` is 10.2.0.1 on node
//! n2; a `6` before the number makes it fd00:1::1 or fd00:2::1. The suffix is the difference from a ready endpoint
//! without hints: `~` terminating but serving, `!` not ready, `-` terminating and not serving, `+` ready although
//! terminating, `s` serving only, `@a,b` hints for zones a and b, `#n1` hints for node n1.

mod cases_endpoints;
mod cases_inputs;
mod cases_traffic;
mod explained;
mod properties;
mod reference;

use std::net::IpAddr;

use keelson_proto::{
    kubernetes::{
        ClientIpConfig, Endpoint, EndpointConditions, EndpointHints, EndpointPort, ForNode, ForZone,
        LoadBalancerIngress, LoadBalancerStatus, ObjectMeta, ObjectReference, ServicePort, ServiceSpec,
        ServiceStatus, SessionAffinityConfig,
    },
    localnetv1::{self, ServiceEndpoints},
};

use super::{EndpointSlice, NodeView, Service, explain, pb, trim_service, trim_slice, view};

/// The cluster IPs, external IPs and load balancer IPs of tests.
pub(crate) const V: &str = "10.96.0.10";
pub(crate) const V6: &str = "fd00:96::10";
pub(crate) const X: &str = "198.51.100.7";
pub(crate) const W: &str = "203.0.113.9";

#[derive(Debug, Clone)]
pub(crate) struct Svc(Service);

/// `ns/web` of type ClusterIP at [`V`], without ports.
pub(crate) fn internal() -> Svc {
    let spec = ServiceSpec {
        cluster_ip: V.to_owned(),
        cluster_ips: vec![V.to_owned()],
        ip_families: vec!["IPv4".to_owned()],
        r#type: "ClusterIP".to_owned(),
        session_affinity: "None".to_owned(),
        ..ServiceSpec::default()
    };
    let metadata = ObjectMeta { name: "web".to_owned(), namespace: "ns".to_owned(), ..ObjectMeta::default() };
    Svc(Service { metadata: Some(metadata), spec: Some(spec), status: None })
}

/// `ns/web` of type LoadBalancer at [`V`] and [`W`], without ports.
pub(crate) fn balanced() -> Svc {
    internal().kind("LoadBalancer").ingress(W, None)
}

/// [`balanced`] with port http, 80/TCP, at node port 30080: the base of the conformance cases.
pub(crate) fn svc() -> Svc {
    balanced().port("http", "TCP", 80).node_port(30080)
}

impl Svc {
    pub(crate) fn edit(mut self, edit: impl FnOnce(&mut ServiceSpec)) -> Self {
        edit(self.0.spec.get_or_insert_default());
        self
    }

    pub(crate) fn named(mut self, namespace: &str, name: &str) -> Self {
        let metadata = self.0.metadata.get_or_insert_default();
        (metadata.namespace, metadata.name) = (namespace.to_owned(), name.to_owned());
        self
    }

    pub(crate) fn label(mut self, label: &str, value: &str) -> Self {
        self.0.metadata.get_or_insert_default().labels.insert(label.to_owned(), value.to_owned());
        self
    }

    pub(crate) fn kind(self, kind: &str) -> Self {
        self.edit(|spec| spec.r#type = kind.to_owned())
    }

    pub(crate) fn port(self, name: &str, protocol: &str, port: i32) -> Self {
        let port = ServicePort { name: name.to_owned(), protocol: protocol.to_owned(), port, node_port: 0 };
        self.edit(|spec| spec.ports.push(port))
    }

    pub(crate) fn node_port(self, number: i32) -> Self {
        self.edit(|spec| spec.ports.last_mut().unwrap().node_port = number)
    }

    pub(crate) fn external_ip(self, ip: &str) -> Self {
        self.edit(|spec| spec.external_ips.push(ip.to_owned()))
    }

    pub(crate) fn ingress(mut self, ip: &str, mode: Option<&str>) -> Self {
        let status = self.0.status.get_or_insert_default().load_balancer.get_or_insert_default();
        status.ingress.push(LoadBalancerIngress { ip: ip.to_owned(), ip_mode: mode.map(str::to_owned) });
        self
    }

    pub(crate) fn dual_stack(self) -> Self {
        self.edit(|spec| {
            spec.cluster_ips.push(V6.to_owned());
            spec.ip_families.push("IPv6".to_owned());
        })
    }

    pub(crate) fn internal_local(self) -> Self {
        self.edit(|spec| spec.internal_traffic_policy = Some("Local".to_owned()))
    }

    pub(crate) fn external_local(self) -> Self {
        self.edit(|spec| spec.external_traffic_policy = "Local".to_owned())
    }

    pub(crate) fn affinity(self, seconds: Option<i32>) -> Self {
        self.edit(|spec| {
            spec.session_affinity = "ClientIP".to_owned();
            let client_ip = Some(ClientIpConfig { timeout_seconds: seconds });
            spec.session_affinity_config = Some(SessionAffinityConfig { client_ip });
        })
    }

    pub(crate) fn source_ranges(self, ranges: &[&str]) -> Self {
        self.edit(|spec| {
            spec.load_balancer_source_ranges = ranges.iter().map(|range| (*range).to_owned()).collect();
        })
    }

    pub(crate) fn build(self) -> Service {
        self.0
    }
}

#[derive(Debug, Clone)]
pub(crate) struct Slice(EndpointSlice);

/// A slice of IPv4 addresses without ports.
pub(crate) fn slice(name: &str) -> Slice {
    let labels = [("kubernetes.io/service-name".to_owned(), "web".to_owned())].into();
    let metadata =
        ObjectMeta { name: name.to_owned(), namespace: "ns".to_owned(), labels, ..ObjectMeta::default() };
    Slice(EndpointSlice {
        metadata: Some(metadata),
        address_type: "IPv4".to_owned(),
        ..EndpointSlice::default()
    })
}

/// A slice whose port http is 8080/TCP, with the endpoints in the words.
pub(crate) fn http(name: &str, endpoints: &str) -> Slice {
    slice(name).port("http", "TCP", 8080).words(endpoints)
}

impl Slice {
    pub(crate) fn edit(mut self, edit: impl FnOnce(&mut EndpointSlice)) -> Self {
        edit(&mut self.0);
        self
    }

    pub(crate) fn of(self, namespace: &str, service: &str) -> Self {
        self.edit(|slice| namespace.clone_into(&mut slice.metadata.get_or_insert_default().namespace))
            .label("kubernetes.io/service-name", service)
    }

    pub(crate) fn label(self, label: &str, value: &str) -> Self {
        let (label, value) = (label.to_owned(), value.to_owned());
        self.edit(|slice| {
            slice.metadata.get_or_insert_default().labels.insert(label, value);
        })
    }

    pub(crate) fn kind(self, address_type: &str) -> Self {
        self.edit(|slice| address_type.clone_into(&mut slice.address_type))
    }

    pub(crate) fn port(self, name: &str, protocol: &str, number: i32) -> Self {
        self.any_port(Some(name), Some(protocol), Some(number))
    }

    pub(crate) fn any_port(self, name: Option<&str>, protocol: Option<&str>, number: Option<i32>) -> Self {
        let port = EndpointPort {
            name: name.map(str::to_owned),
            protocol: protocol.map(str::to_owned),
            port: number,
        };
        self.edit(|slice| slice.ports.push(port))
    }

    pub(crate) fn endpoint(self, address: &str, node: Option<&str>) -> Self {
        let endpoint = Endpoint {
            addresses: vec![address.to_owned()],
            node_name: node.map(str::to_owned),
            ..Endpoint::default()
        };
        self.edit(|slice| slice.endpoints.push(endpoint))
    }

    pub(crate) fn conditions(
        self,
        ready: Option<bool>,
        serving: Option<bool>,
        terminating: Option<bool>,
    ) -> Self {
        self.edit(|slice| {
            let conditions = EndpointConditions { ready, serving, terminating };
            slice.endpoints.last_mut().unwrap().conditions = Some(conditions);
        })
    }

    /// Endpoints as words, see the module.
    pub(crate) fn words(self, words: &str) -> Self {
        words.split_whitespace().fold(self, |slice, word| {
            let endpoint = endpoint_of(word);
            slice.edit(|slice| slice.endpoints.push(endpoint))
        })
    }

    pub(crate) fn build(self) -> EndpointSlice {
        self.0
    }
}

fn endpoint_of(word: &str) -> Endpoint {
    let (head, node_hints) = word.split_once('#').map_or((word, None), |(head, hints)| (head, Some(hints)));
    let (head, zone_hints) = head.split_once('@').map_or((head, None), |(head, hints)| (head, Some(hints)));
    let name = head.trim_end_matches(['~', '!', '-', '+', 's']);
    let [ready, serving, terminating] = match head.strip_prefix(name).unwrap() {
        "" => [true, true, false],
        "~" => [false, true, true],
        "!" => [false, false, false],
        "-" => [false, false, true],
        "+" => [true, true, true],
        "s" => [false, true, false],
        other => panic!("{other}"),
    }
    .map(Some);
    let (kind, number) = name.split_at(1);
    let (net, node) = match kind {
        "L" => (1, "n1"),
        "R" => (2, "n2"),
        other => panic!("{other}"),
    };
    let address = match number.strip_prefix('6') {
        Some(number) if !number.is_empty() => format!("fd00:{net}::{number}"),
        _ => format!("10.{net}.0.{number}"),
    };
    let names = |hints: Option<&str>| -> Vec<String> {
        hints.into_iter().flat_map(|hints| hints.split(',')).map(str::to_owned).collect()
    };
    let has_hints = zone_hints.is_some() || node_hints.is_some();
    Endpoint {
        addresses: vec![address],
        conditions: Some(EndpointConditions { ready, serving, terminating }),
        target_ref: Some(ObjectReference {
            kind: "Pod".to_owned(),
            name: format!("pod-{name}").to_lowercase(),
        }),
        node_name: Some(node.to_owned()),
        hints: has_hints.then(|| hints(names(zone_hints), names(node_hints))),
        ..Endpoint::default()
    }
}

fn hints<T: Into<String>>(zones: Vec<T>, nodes: Vec<T>) -> EndpointHints {
    EndpointHints {
        for_zones: zones.into_iter().map(|name| ForZone { name: name.into() }).collect(),
        for_nodes: nodes.into_iter().map(|name| ForNode { name: name.into() }).collect(),
    }
}

/// Node n1 in zone a.
pub(crate) fn n1() -> NodeView {
    let zone = Some("a".to_owned());
    NodeView { name: "n1".to_owned(), exists: true, zone, eligible: true, ..NodeView::default() }
}

fn word(address: &str) -> String {
    let words = [("10.1.0.", "L"), ("10.2.0.", "R"), ("fd00:1::", "L6"), ("fd00:2::", "R6")];
    let found = words.iter().find_map(|(net, word)| Some(format!("{word}{}", address.strip_prefix(net)?)));
    found.unwrap_or_else(|| address.to_owned())
}

fn list(addresses: impl Iterator<Item = String>) -> String {
    let mut words: Vec<String> = addresses.map(|address| word(&address)).collect();
    words.sort();
    words.dedup();
    format!("{{{}}}", words.join(" "))
}

pub(crate) struct Scene {
    pub(crate) service: Service,
    pub(crate) slices: Vec<EndpointSlice>,
    pub(crate) node: NodeView,
}

pub(crate) fn scene(service: Svc, slices: impl IntoIterator<Item = Slice>) -> Scene {
    Scene { service: service.build(), slices: slices.into_iter().map(Slice::build).collect(), node: n1() }
}

/// Traffic of one family to a Service's first port. Its fate is `{L1 R1}`, `DROP` or `REJECT`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum To {
    /// The cluster IP, from anywhere.
    ClusterIp,
    /// An external IP, a load balancer IP or a node port, from outside.
    Outside,
    /// The same from a pod or from the node.
    Inside,
}

impl Scene {
    pub(crate) fn zone(mut self, zone: Option<&str>) -> Self {
        self.node.zone = zone.map(str::to_owned);
        self
    }

    /// The view. Asserts that the fields dropped from the inputs do not change it.
    pub(crate) fn view(&self) -> Option<ServiceEndpoints> {
        let found = view(&self.service, &self.slices, &self.node);
        let slices: Vec<_> = self.slices.iter().rev().cloned().map(trim_slice).collect();
        assert_eq!(found, view(&trim_service(self.service.clone()), &slices, &self.node));
        found
    }

    pub(crate) fn served(&self) -> ServiceEndpoints {
        self.view().expect("it is served")
    }

    pub(crate) fn explain(&self) -> pb::Explanation {
        explain(Some(&self.service), &self.slices, &self.node)
    }

    /// Members of a set for the first port, IPv4.
    pub(crate) fn cluster_set(&self) -> String {
        list(members(&self.served(), 0, false, |port| port.cluster))
    }

    pub(crate) fn local_set(&self) -> String {
        list(members(&self.served(), 0, false, |port| port.local))
    }

    /// The fate as a data path derives it from the published state, by the table in section 2.
    pub(crate) fn outcome(&self, to: To) -> String {
        outcome(&self.served(), 0, false, to)
    }

    pub(crate) fn outcome6(&self, to: To) -> String {
        outcome(&self.served(), 0, true, to)
    }

    /// Asserts the fate of traffic to the cluster IP, from outside, and from pods and the node.
    #[track_caller]
    pub(crate) fn expect(&self, cluster_ip: &str, outside: &str, inside: &str) {
        assert_eq!(self.fates(), [cluster_ip, outside, inside], "{:#?}", self.explain());
    }

    fn fates(&self) -> [String; 3] {
        [To::ClusterIp, To::Outside, To::Inside].map(|to| self.outcome(to))
    }
}

fn members(
    of: &ServiceEndpoints,
    index: u32,
    six: bool,
    is_member: impl Fn(&localnetv1::EndpointPort) -> bool,
) -> impl Iterator<Item = String> {
    let is_in = |endpoint: &&localnetv1::Endpoint| {
        endpoint.ports.iter().any(|port| port.index == index && is_member(port))
    };
    let ips =
        of.endpoints.iter().filter(is_in).flat_map(|endpoint| addresses(endpoint, six)).collect::<Vec<_>>();
    ips.into_iter()
}

fn addresses(endpoint: &localnetv1::Endpoint, six: bool) -> Vec<String> {
    let ips = endpoint.i_ps.clone().unwrap();
    if six { ips.v6 } else { ips.v4 }
}

/// The fate of the port at `index`, in one family.
pub(crate) fn outcome(of: &ServiceEndpoints, index: u32, six: bool, to: To) -> String {
    let port = &of.ports[index as usize];
    let has_any = if six { port.has_any_v6 } else { port.has_any_v4 };
    let local = match to {
        To::ClusterIp => of.internal_traffic_to_local,
        To::Outside => of.external_traffic_to_local,
        To::Inside => false,
    };
    let set = list(members(of, index, six, |port| if local { port.local } else { port.cluster }));
    match (set.as_str(), has_any, local) {
        ("{}", true, true) => "DROP".to_owned(),
        ("{}", true, false) => panic!("no endpoint for {to:?}, although there is one: {of:#?}"),
        ("{}", false, _) => "REJECT".to_owned(),
        _ => set,
    }
}

/// The addresses of all published endpoints, as needed to clean up conntrack.
fn sent(of: &ServiceEndpoints) -> String {
    list(
        of.endpoints
            .iter()
            .flat_map(|endpoint| [addresses(endpoint, false), addresses(endpoint, true)].concat()),
    )
}

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}
