//! Explanations compared with a reference that knows no rules, for arbitrary Services.

use std::collections::BTreeSet;

use proptest::{collection::vec, prelude::*, sample::subsequence};

use super::*;
use crate::explain::explain_with;

const EXTERNAL: [&str; 3] = ["198.51.100.10", "203.0.113.10", "203.0.113.11"];
const PODS: [&str; 2] = ["10.244.0.9", "10.244.9.9"];
const OUTSIDE: [&str; 3] = ["192.0.2.1", "192.0.2.200", "203.0.113.10"];

#[derive(Debug, Clone)]
struct Setup {
    ports: Vec<ServicePort>,
    detector: bool,
    masquerade_all: bool,
    all_local: bool,
}

prop_compose! {
    fn any_port()(
        service in prop::sample::select(vec!["a", "b", "c"]),
        (name, number) in prop::sample::select(vec![("http", 80), ("alt", 8080)]),
        protocol in prop::sample::select(Protocol::ALL.to_vec()),
        address in 10_u8..13,
        external in subsequence(EXTERNAL.to_vec(), 0..=3),
        split in 0_usize..4,
        node_port in prop::sample::select(vec![0, 30_080, 30_081]),
        (internal_local, external_local, affinity) in any::<(bool, bool, bool)>(),
        ranges in subsequence(vec!["192.0.2.0/25", "192.168.0.0/24", "10.244.9.0/24"], 0..=3),
        names in subsequence(vec!["L8", "L9", "R1", "R2", "R3"], 0..=5),
        elsewhere in any::<bool>(),
    ) -> ServicePort {
        let mut port = web(&names);
        port.name = PortName { service: ServiceName::new("default", service), port: name.into(), protocol };
        (port.port, port.node_port) = (number, node_port);
        port.cluster_ip = ip(&format!("10.96.0.{address}"));
        let (x, w) = external.split_at(split.min(external.len()));
        port.external_ips = x.iter().map(|address| ip(address)).collect();
        port.load_balancer_ips = w.iter().map(|address| ip(address)).collect();
        port.source_ranges = ranges.iter().map(|range| net(range)).collect();
        port.affinity_seconds = if affinity { 60 } else { 0 };
        let external_local = external_local && port.is_external();
        port = local(port, internal_local, external_local);
        if internal_local && !port.is_external() {
            // ClusterSet is unused, so `has_any` alone tells that endpoints exist elsewhere.
            port.cluster.clear();
            port.has_any = !port.local.is_empty() || elsewhere;
        }
        if !internal_local && !external_local {
            port.local.clear();
        }
        port
    }
}

prop_compose! {
    fn setup()(
        ports in vec(any_port(), 0..=6),
        (detector, masquerade_all, all_local) in any::<(bool, bool, bool)>(),
    ) -> Setup {
        // A Service has one cluster IP, and no port twice.
        let mut ports: Vec<ServicePort> = ports;
        ports.sort_by(|a, b| a.name.cmp(&b.name));
        ports.dedup_by(|later, first| later.name == first.name);
        let first = ports.clone();
        for port in &mut ports {
            if let Some(same) = first.iter().find(|other| other.name.service == port.name.service) {
                port.cluster_ip = same.cluster_ip;
            }
        }
        Setup { ports, detector, masquerade_all, all_local }
    }
}

impl Setup {
    fn world(&self) -> World {
        let world = World::new(self.ports.clone()).with(|base| {
            if !self.detector {
                base.detector = None;
            }
            base.masquerade_all = self.masquerade_all;
            if self.all_local {
                base.node_ports = NodePortMatch::AllLocal;
            }
        });
        if self.all_local { world.facts(|facts| facts.node_port_addresses.clear()) } else { world }
    }

    /// The expected result, in short form.
    fn expected(&self, world: &World, target: Target, from: IpAddr) -> String {
        let Target { address, port, protocol } = target;
        let is_node = world.local.contains(&from);
        let is_pod = self.detector && net("10.244.0.0/16").contains(&from);
        let mut claims: Vec<&ServicePort> =
            self.ports.iter().filter(|it| it.name.protocol == protocol).collect();
        // A cluster IP comes first, then addresses that a controller assigned, then those that a user wrote.
        let rank = |it: &ServicePort| {
            let kinds = [it.cluster_ip == address, it.load_balancer_ips.contains(&address)];
            kinds.into_iter().position(|is| is).unwrap_or(kinds.len())
        };
        claims.sort_by(|a, b| (rank(a), &a.name).cmp(&(rank(b), &b.name)));
        let at = |it: &ServicePort| {
            it.port == port
                && (it.cluster_ip == address
                    || it.external_ips.contains(&address)
                    || it.load_balancer_ips.contains(&address))
        };
        let node_ports_answer = match self.all_local {
            true => world.local.contains(&address) && !address.is_loopback(),
            false => address == ip(N),
        };
        if let Some(owner) = claims.iter().find(|it| at(it)) {
            if owner.cluster_ip == address {
                return self.internal(owner, is_pod, from);
            }
            let filtered = owner.load_balancer_ips.contains(&address) && !owner.source_ranges.is_empty();
            let admits = |source: IpAddr| owner.source_ranges.iter().any(|range| range.contains(&source));
            if filtered && !admits(from) && !(admits(ip(N)) && from == address) {
                return "dropped".into();
            }
            return external(owner, is_pod, is_node, from);
        }
        if let Some(owner) =
            claims.iter().find(|it| it.node_port == port && port != 0).filter(|_| node_ports_answer)
        {
            return external(owner, is_pod, is_node, from);
        }
        let is_cluster_ip = self.ports.iter().any(|it| it.cluster_ip == address);
        match (is_cluster_ip, net("10.96.0.0/16").contains(&address)) {
            (true, _) => "rejected".into(),
            (false, true) => "dropped".into(),
            (false, false) => "untouched".into(),
        }
    }

    fn internal(&self, owner: &ServicePort, is_pod: bool, from: IpAddr) -> String {
        let set = if owner.internal_local { &owner.local } else { &owner.cluster };
        let masqueraded = self.masquerade_all || (self.detector && !is_pod);
        outcome(owner, set, masqueraded, from)
    }
}

fn external(owner: &ServicePort, is_pod: bool, is_node: bool, from: IpAddr) -> String {
    match (owner.external_local, is_pod, is_node) {
        (false, ..) => outcome(owner, &owner.cluster, true, from),
        (true, true, _) => outcome(owner, &owner.cluster, false, from),
        (true, false, true) => outcome(owner, &owner.cluster, true, from),
        (true, false, false) => outcome(owner, &owner.local, false, from),
    }
}

fn outcome(owner: &ServicePort, set: &[Endpoint], masqueraded: bool, from: IpAddr) -> String {
    match (owner.has_any, set.is_empty()) {
        (false, _) => "rejected".into(),
        (true, true) => "dropped".into(),
        (true, false) => {
            // A pod that can only reach itself.
            let hairpin = set.iter().all(|endpoint| endpoint.ip == from && owner.on_node.contains(endpoint));
            short(&pb::Way {
                verdict: "forwarded".into(),
                masqueraded: masqueraded || hairpin,
                endpoints: set.iter().map(ToString::to_string).collect(),
                ..Default::default()
            })
        }
    }
}

fn targets() -> Vec<Target> {
    let mut addresses: BTreeSet<String> = EXTERNAL.iter().map(ToString::to_string).collect();
    addresses.extend((9..13).map(|last| format!("10.96.0.{last}")));
    addresses.extend([N, "192.168.0.2", "8.8.8.8"].map(String::from));
    let ports = [80, 8080, 81, 30_080, 30_081];
    let each = |address: &String| {
        let address = ip(address);
        ports.into_iter().flat_map(move |port| {
            Protocol::ALL.into_iter().map(move |protocol| Target { address, port, protocol })
        })
    };
    addresses.iter().flat_map(each).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn explanations_match_the_services(setup in setup()) {
        let world = setup.world();
        let whole = ReachableElements::of(world.plan.elements());
        for target in targets() {
            for from in PODS.iter().chain(&OUTSIDE).chain(&[N]).map(|from| ip(from)) {
                let question = Question::new(target, Source::Address(from)).unwrap();
                let output = explain(&world.context(), &question);
                prop_assert_eq!(output.ways.len(), 1);
                prop_assert_eq!(
                    short(&output.ways[0]), setup.expected(&world, target, from), "{} -> {}: {:#?}", from, target, output
                );
                prop_assert_eq!(&output, &explain_with(&world.context(), &whole, &question), "not all elements were looked at");
            }
        }
    }

    /// A kind of source is explained like any of its members.
    #[test]
    fn source_kinds_match_their_addresses(setup in setup()) {
        let world = setup.world();
        for target in targets() {
            for (kind, members) in [(Source::Pod, &PODS[..]), (Source::Outside, &OUTSIDE[..2]), (Source::Node, &[N][..])] {
                let ways = |from| -> BTreeSet<String> {
                    let output = explain(&world.context(), &Question::new(target, from).unwrap());
                    output.ways.iter().map(short).collect()
                };
                let of_kind = ways(kind);
                for member in members {
                    // A pod that reaches itself is mentioned within the way of its kind.
                    let of_member = ways(Source::Address(ip(member)));
                    let same = |way: &String| of_kind.contains(way) || of_kind.contains(&way.replace("+M", "-M"));
                    prop_assert!(of_member.iter().all(same), "{} {}: {:?} {:?}", target, member, of_kind, of_member);
                }
            }
        }
    }
}
