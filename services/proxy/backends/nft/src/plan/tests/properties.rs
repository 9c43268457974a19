//! Invariants for arbitrary changes.

use proptest::{collection::vec, prelude::*, sample::subsequence};

use super::*;

const SERVICES: [&str; 4] = ["a", "b", "c", "d"];
const OUTSIDE: [&str; 2] = ["192.0.2.1", "203.0.113.130"];
const NODE: &str = "192.168.0.1";

/// Some addresses are V of one Service and X or W of another.
const ADDRESSES: [&str; 5] = ["198.51.100.1", "198.51.100.2", "198.51.100.3", "10.96.0.1", "10.96.0.2"];

fn endpoints() -> impl Strategy<Value = Vec<Endpoint>> {
    subsequence((1..=6).map(endpoint).collect::<Vec<_>>(), 0..=6)
}

fn ranges() -> impl Strategy<Value = Vec<IpNet>> {
    let sets: [&[&str]; 5] = [
        &[],
        &["192.0.2.0/24"],
        &["192.0.2.0/25", "203.0.113.0/24"],
        &["203.0.113.128/25", "192.168.0.0/24"],
        &["192.0.0.0/16", "203.0.113.0/25"],
    ];
    (0..sets.len()).prop_map(move |at| sets[at].iter().map(|range| range.parse().unwrap()).collect())
}

prop_compose! {
    fn port(service: usize)(
        name in prop::sample::select(vec!["", "http", "web"]),
        protocol in prop::sample::select(vec![Protocol::Tcp, Protocol::Udp]),
        number in prop::sample::select(vec![80, 443]),
        external in subsequence(ADDRESSES.to_vec(), 0..=2),
        load_balancer in subsequence(ADDRESSES.to_vec(), 0..=2),
        (node_port, affinity) in prop::sample::select(vec![(0, 0), (30_001, 0), (30_002, 10), (0, 20), (30_001, 20)]),
        (internal_local, external_local) in any::<(bool, bool)>(),
        source_ranges in ranges(),
        other_v in prop::bool::weighted(0.1),
        has_any in any::<bool>(),
        cluster in endpoints(),
        local in endpoints(),
        on_node in endpoints(),
    ) -> ServicePort {
        let (name, service_name) = (name.into(), ServiceName::new("default", SERVICES[service]));
        let v = if other_v { 0 } else { service };
        let cluster_ip = IpAddr::from([10, 96, 0, u8::try_from(v).unwrap()]);
        let mut ips: Vec<IpAddr> = external.into_iter().map(ip).filter(|ip| *ip != cluster_ip).collect();
        let external_ips = ips.clone();
        ips.push(cluster_ip);
        let load_balancer_ips: Vec<IpAddr> =
            load_balancer.into_iter().map(ip).filter(|ip| !ips.contains(ip)).collect();
        let mut port = ServicePort {
            name: PortName { service: service_name, port: name, protocol },
            port: number, cluster_ip, external_ips, load_balancer_ips, node_port, internal_local,
            external_local: false, affinity_seconds: affinity, source_ranges, has_any: false,
            cluster, local, on_node, serving: vec![],
        };
        port.external_local = external_local && port.is_external();
        if !port.uses_cluster() { port.cluster.clear(); }
        if !port.uses_local() { port.local.clear(); }
        // As in the API: LocalSet may be empty while ClusterSet, if used, is not.
        if port.cluster.is_empty() && port.uses_cluster() { port.local.clear(); }
        port.has_any = !port.cluster.is_empty() || !port.local.is_empty() || (has_any && !port.uses_cluster());
        port
    }
}

#[derive(Debug, Clone)]
enum Event {
    Set(usize, Vec<ServicePort>),
    Delete(usize),
    Facts(NodeFacts),
}

fn facts() -> impl Strategy<Value = NodeFacts> {
    let cidrs = [&["10.96.0.0/16"][..], &["10.96.0.0/24", "10.97.0.0/24"], &["10.96.0.0/17", "fd00::/64"]];
    (prop::sample::select(cidrs.to_vec()), any::<bool>(), any::<bool>()).prop_map(|(cidrs, node, second)| {
        NodeFacts {
            service_cidrs: cidrs.iter().map(|net| net.parse().unwrap()).collect(),
            node_ips: node.then(|| ip(NODE)).into_iter().collect(),
            node_port_addresses: [Some(ip(NODE)), second.then(|| ip("192.168.0.2"))]
                .into_iter()
                .flatten()
                .collect(),
        }
    })
}

fn event() -> impl Strategy<Value = Event> {
    let set = (0..SERVICES.len())
        .prop_flat_map(|service| vec(port(service), 1..=3).prop_map(move |ports| Event::Set(service, ports)));
    prop_oneof![
        8 => set,
        2 => (0..SERVICES.len()).prop_map(Event::Delete),
        1 => facts().prop_map(Event::Facts),
    ]
}

/// States, each a few changes after the one before.
fn states() -> impl Strategy<Value = Vec<Vec<Event>>> {
    vec(vec(event(), 1..=4), 1..=6)
}

#[derive(Default, Clone)]
struct PlanInput {
    services: std::collections::BTreeMap<usize, Vec<ServicePort>>,
    facts: NodeFacts,
}

fn apply_events(plan: &mut Plan, input: &mut PlanInput, events: &[Event]) {
    for event in events {
        match event.clone() {
            Event::Set(service, ports) => {
                plan.set(&ServiceName::new("default", SERVICES[service]), ports.clone());
                input.services.insert(service, ports);
            }
            Event::Delete(service) => {
                plan.set(&ServiceName::new("default", SERVICES[service]), Vec::new());
                input.services.remove(&service);
            }
            Event::Facts(facts) => {
                plan.facts(facts.clone());
                input.facts = facts;
            }
        }
    }
}

impl PlanInput {
    /// Without duplicates, in the order of claims.
    fn ports(&self) -> Vec<&ServicePort> {
        let mut ports: Vec<&ServicePort> = self.services.values().flatten().collect();
        ports.sort_by(|a, b| a.name.cmp(&b.name));
        ports.dedup_by(|later, first| later.name == first.name);
        ports
    }

    /// Service-semantics 2 and 3, computed from the service ports.
    fn expect(&self, from: (Source, IpAddr), to: To) -> Outcome {
        let ports = self.ports();
        let answers = |port: &&&ServicePort| port.name.protocol == to.protocol && port.port == to.port;
        // A cluster IP comes first, then addresses that a controller assigned, then those that a user wrote.
        let claims: [fn(&ServicePort, IpAddr) -> bool; 3] = [
            |port, ip| port.cluster_ip == ip,
            |port, ip| port.load_balancer_ips.contains(&ip),
            |port, ip| port.external_ips.contains(&ip),
        ];
        let of_address = claims.iter().enumerate().find_map(|(kind, claims)| {
            let port = ports.iter().filter(answers).find(|port| claims(port, to.ip))?;
            Some((port, kind != 0, kind == 1))
        });
        if let Some((port, external, load_balancer)) = of_address {
            if load_balancer && !self.admits(port, from.1, to.ip) {
                return Outcome::Drop;
            }
            return expect_of(port, external, from.0);
        }
        let node_port = |port: &&&ServicePort| port.name.protocol == to.protocol && port.node_port == to.port;
        if self.facts.node_port_addresses.contains(&to.ip)
            && let Some(port) = ports.iter().find(node_port)
        {
            return expect_of(port, true, from.0);
        }
        if ports.iter().any(|port| port.cluster_ip == to.ip) {
            return Outcome::Reject;
        }
        let unallocated = self.facts.service_cidrs.iter().any(|net| net.contains(&to.ip));
        if unallocated { Outcome::Drop } else { Outcome::Passes }
    }

    /// Its traffic policies, and whether `ip` is its cluster IP, which decides which of them applies.
    fn policies(&self, name: &PortName, ip: IpAddr) -> Option<(bool, bool, bool)> {
        let port = self.ports().into_iter().find(|port| port.name == *name)?;
        Some((port.internal_local, port.external_local, port.cluster_ip == ip))
    }

    fn admits(&self, port: &ServicePort, source: IpAddr, to: IpAddr) -> bool {
        let in_ranges = |ip: &IpAddr| port.source_ranges.iter().any(|range| range.contains(ip));
        let itself = source == to && self.facts.node_ips.iter().any(in_ranges);
        port.source_ranges.is_empty() || in_ranges(&source) || itself
    }
}

fn expect_of(port: &ServicePort, external: bool, source: Source) -> Outcome {
    let local = if external { port.external_local && source == Source::Outside } else { port.internal_local };
    let set: BTreeSet<Endpoint> = if local { &port.local } else { &port.cluster }.iter().copied().collect();
    if !port.has_any {
        Outcome::Reject
    } else if set.is_empty() {
        Outcome::Drop
    } else {
        let remembered = if port.affinity_seconds == 0 { BTreeSet::new() } else { set.clone() };
        Outcome::Endpoints { chosen: set, remembered, external }
    }
}

fn packets() -> Vec<((Source, IpAddr), To)> {
    let mut packets = Vec::new();
    let addresses =
        ADDRESSES.iter().copied().chain(["10.96.0.0", "10.96.0.3", "10.96.0.9", NODE, "192.168.0.2"]);
    for to in addresses.map(ip) {
        let ports = if to == ip(NODE) || to == ip("192.168.0.2") { [30_001, 30_002] } else { [80, 443] };
        for port in ports {
            for protocol in [Protocol::Tcp, Protocol::Udp] {
                let to = To { ip: to, protocol, port };
                let outside = OUTSIDE.map(|source| ((Source::Outside, ip(source)), to));
                packets.extend(outside);
                packets.push(((Source::Pod, ip("10.244.9.9")), to));
                packets.push(((Source::Host, ip(NODE)), to));
                packets.push(((Source::Host, to.ip), to));
            }
        }
    }
    packets
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(96) })]

    /// Consecutive changes give the same elements as a computation from scratch, and these give the expected results.
    #[test]
    fn applied_changes_equal_all_elements(states in states()) {
        let (mut plan, mut input) = (Plan::new(Family::V4, Existing::default()), PlanInput::default());
        plan.record(true);
        let mut table = Table::default();
        for events in &states {
            apply_events(&mut plan, &mut input, events);
            table.apply_all(plan.take_ops());
            prop_assert_eq!(&table, &Table::of(plan.elements()));
            let counts = plan.counts();
            for set in SetName::ALL {
                let found = table.0.keys().filter(|(other, _)| *other == set).count();
                prop_assert_eq!(counts.elements(set), found, "{}", set);
            }
            let chains: BTreeSet<Chain> = (table.0.values())
                .filter_map(|(_, value)| match value {
                    Value::Verdict(Verdict::Goto(chain)) if !Chain::FIXED.contains(chain) => Some(*chain),
                    _ => None,
                })
                .collect();
            prop_assert_eq!(plan.chains(), chains);
        }
        for (from, to) in packets() {
            prop_assert_eq!(send(&table, Family::V4, from, to), input.expect(from, to), "{:?} to {:?}", from, to);
        }
        let ports = input.ports();
        prop_assert_eq!(plan.counts().service_ports, ports.len());
        prop_assert_eq!(plan.counts().services, input.services.len());
    }

    /// On the first load, every new frontend has all its endpoints at once.
    #[test]
    fn the_first_load_serves_complete_frontends(states in states()) {
        let (mut plan, mut input) = (Plan::new(Family::V4, Existing::default()), PlanInput::default());
        states.iter().for_each(|events| apply_events(&mut plan, &mut input, events));
        prop_assert!(plan.elements().is_sorted_by_key(|element| element.set.is_entry()));
        let mut table = Table::default();
        for op in plan.elements().map(Op::Add) {
            table.apply(op);
            // Before an address is a frontend, its traffic is as before the first load.
            let Op::Add(Element { set: SetName::ClusterIpPorts | SetName::ExternalPorts | SetName::NodePorts, .. }) = op else { continue };
            for (from, to) in packets() {
                let now = send(&table, Family::V4, from, to);
                let served = now.served().is_some();
                prop_assert!(!matches!(now, Outcome::Miss(_)), "{op:?}: {from:?} to {to:?}: {now:?}");
                prop_assert!(!served || now == input.expect(from, to), "{op:?}: {from:?} to {to:?}: {now:?}");
            }
        }
        prop_assert_eq!(table, Table::of(plan.difference(Kernel::new()).into_iter().map(|op| match op {
            Op::Add(element) => element,
            other => panic!("{other:?}"),
        })));
    }

    /// The difference leads from any kernel state to the wanted one.
    #[test]
    fn the_difference_repairs_anything(
        states in states(),
        before in states(),
        broken in vec((any::<prop::sample::Index>(), any::<prop::sample::Index>(), any::<bool>()), 0..8),
    ) {
        let (mut plan, mut old) = (Plan::new(Family::V4, Existing::default()), Plan::new(Family::V4, Existing::default()));
        states.iter().for_each(|events| apply_events(&mut plan, &mut PlanInput::default(), events));
        before.iter().for_each(|events| apply_events(&mut old, &mut PlanInput::default(), events));
        let mut table = Table::of(old.elements());
        let mut keys: Vec<_> = table.0.keys().copied().collect();
        keys.sort();
        for (at, other, swap) in broken {
            if keys.is_empty() { break; }
            let (key, other) = (keys[at.index(keys.len())], keys[other.index(keys.len())]);
            if swap && key.0 == other.0 && !key.0.is_interval() {
                let (Some(a), Some(b)) = (table.0.get(&key).copied(), table.0.get(&other).copied()) else { continue };
                table.0.insert(key, b);
                table.0.insert(other, a);
            } else {
                table.0.remove(&key);
            }
        }
        let dynamic = (SetName::Affinity1, Key::new().ip(ip("10.0.0.1")).ip(ip("128.1.0.0")));
        table.0.insert(dynamic, (None, Value::Data(Key::new().ip(ip("128.1.0.1")))));
        let existing = Existing::new(Family::V4, table.elements());
        table.apply_all(plan.difference(table.0.clone()));
        prop_assert!(table.0.remove(&dynamic).is_some(), "what the kernel writes is left alone");
        prop_assert_eq!(&table, &Table::of(plan.elements()));

        // The same with a plan that knew the existing elements.
        let mut again = Plan::new(Family::V4, existing);
        states.iter().for_each(|events| apply_events(&mut again, &mut PlanInput::default(), events));
        table.apply_all(again.difference(table.0.clone()));
        prop_assert_eq!(&table, &Table::of(again.elements()));
    }

    #[test]
    fn a_restart_changes_nothing(states in states(), backwards in any::<bool>()) {
        let (mut plan, mut input) = (Plan::new(Family::V4, Existing::default()), PlanInput::default());
        plan.record(true);
        for events in &states {
            apply_events(&mut plan, &mut input, events);
            let _ = plan.take_ops();
        }
        // A service port that has lost all its frontends to others leaves nothing that refers to its number.
        prop_assume!(plan.conflicts().is_empty());
        let table = Table::of(plan.elements());
        let mut again = Plan::new(Family::V4, Existing::new(Family::V4, plan.elements()));
        again.facts(input.facts.clone());
        let mut services: Vec<_> = input.services.iter().collect();
        if backwards { services.reverse(); }
        for (service, ports) in services {
            again.set(&ServiceName::new("default", SERVICES[*service]), ports.clone());
        }
        prop_assert_eq!(again.difference(table.0), vec![]);
    }
}

fn owner(plan: &Plan, to: To) -> Option<PortName> {
    let To { ip, protocol, port } = to;
    let address = plan.lookup(Frontend::Address { ip, protocol, port });
    let found = address.or_else(|| {
        let here = plan.node_facts().node_port_addresses.contains(&ip);
        plan.lookup(Frontend::NodePort { protocol, port }).filter(|_| here)
    })?;
    Some(found.port.name())
}

fn all_endpoints(input: &PlanInput, name: &PortName) -> BTreeSet<Endpoint> {
    let ports = input.ports();
    let of = ports.iter().filter(|port| port.name == *name);
    of.flat_map(|port| port.cluster.iter().chain(&port.local).copied()).collect()
}

/// A packet that is served before and after a state, and the endpoints allowed in between.
struct Watched {
    from: (Source, IpAddr),
    to: To,
    allowed: BTreeSet<Endpoint>,
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(64) })]

    /// At any moment between two states, what is served in both is served by endpoints of one of them; what is filtered
    /// in both is never admitted.
    #[test]
    fn traffic_is_served_between_states(states in vec(vec(event(), 1..=4), 2..=4)) {
        serve_between(&states)?;
    }
}

/// An address that was a load balancer IP of a Service with external policy `Local` becomes its cluster IP.
#[test]
fn traffic_is_served_while_an_external_address_becomes_internal() {
    let service = ServiceName::new("default", "c");
    let port = |cluster_ip: &str, load_balancer: &[&str], cluster: u8, local: &[u8]| ServicePort {
        load_balancer_ips: load_balancer.iter().copied().map(ip).collect(),
        node_port: 30_002,
        external_local: true,
        affinity_seconds: 10,
        has_any: true,
        cluster: vec![endpoint(cluster)],
        local: local.iter().copied().map(endpoint).collect(),
        ..service_port(&service, "web", cluster_ip, 80)
    };
    let external = port("10.96.0.0", &["10.96.0.2"], 6, &[3]);
    let internal = port("10.96.0.2", &[], 5, &[]);
    serve_between(&[vec![Event::Set(2, vec![external])], vec![Event::Set(2, vec![internal])]])
        .expect("served by the old or the new endpoints");
}

/// Applies every state element by element, and checks each packet after each element.
fn serve_between(states: &[Vec<Event>]) -> Result<(), TestCaseError> {
    let (mut plan, mut input) = (Plan::new(Family::V4, Existing::default()), PlanInput::default());
    plan.record(true);
    let (mut table, packets) = (Table::default(), packets());
    for events in states {
        let before: Vec<_> = packets
            .iter()
            .map(|(from, to)| (send(&table, Family::V4, *from, *to), owner(&plan, *to)))
            .collect();
        let (old, old_told) = (table.clone(), input.clone());
        apply_events(&mut plan, &mut input, events);
        let ops = in_order(plan.take_ops());
        let mut new = table.clone();
        ops.iter().flatten().for_each(|op| new.apply(*op));
        let mut watched = Vec::new();
        let mut closed = Vec::new();
        for ((from, to), (before, owner_before)) in packets.iter().zip(before) {
            let (after, owner_after) = (send(&new, Family::V4, *from, *to), owner(&plan, *to));
            if let (Some(first), Some(second)) = (before.served(), after.served()) {
                let mut allowed = &first | &second;
                // If the owner or policy changes, the former one may briefly apply with the new endpoints.
                let policies =
                    |input: &PlanInput| owner_after.as_ref().and_then(|name| input.policies(name, to.ip));
                if owner_before != owner_after || policies(&old_told) != policies(&input) {
                    for input in [&old_told, &input] {
                        let owners = owner_before.iter().chain(&owner_after);
                        allowed.extend(owners.flat_map(|name| all_endpoints(input, name)));
                    }
                }
                watched.push(Watched { from: *from, to: *to, allowed });
            } else if (old.filters(from.1, *to) || new.filters(from.1, *to))
                && (old.filters(from.1, *to) || owner_before.is_none())
                && (new.filters(from.1, *to) || owner_after.is_none())
            {
                closed.push((*from, *to));
            }
        }
        for op in ops.into_iter().flatten() {
            table.apply(op);
            for Watched { from, to, allowed } in &watched {
                let now = send(&table, Family::V4, *from, *to);
                prop_assert!(
                    now.served().is_some_and(|by| by.is_subset(allowed)),
                    "{op:?}: {from:?} to {to:?}: {now:?}, not {allowed:?}"
                );
            }
            for (from, to) in &closed {
                let now = send(&table, Family::V4, *from, *to);
                prop_assert_eq!(now.served(), None, "{:?}: {:?} to {:?}", op, from, to);
            }
        }
        prop_assert_eq!(&table, &new);
    }
    Ok(())
}
