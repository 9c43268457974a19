//! Evaluates the rules for a packet.
//!
//! Owns: [`Walk`]. In: the chains, a source, a target. Out: a [`pb::Way`]. First the packet traverses the nat chains before
//! routing; then every possible endpoint, or the target itself, traverses the later hooks.

use std::{collections::BTreeMap, net::IpAddr};

use ipnet::IpNet;
use keelson_proto::proxy as pb;
use keelson_proxy::{
    explain::{
        Target as Destination, list,
        source::{Origin, PacketSource},
    },
    model::{Endpoint, Frontend},
};

use super::RuleContext;
use crate::{
    names::{FILTER_OUTPUT, FORWARD, INPUT, NAT_OUTPUT, POSTROUTING, SERVICES, SetKind, Table},
    plan::Refusal,
    rule::{Match, Rule, Target},
};

/// Chains refer to chains of lower rank only, so there is no loop; the limit ends the walk if a plan violates this.
const DEPTH: usize = 32;

type Chains = BTreeMap<String, Vec<Rule>>;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Flow {
    /// Continues after the jump to this chain, or with the next hook.
    Return,
    /// Ends the hook.
    Accept,
    Drop,
    Reject,
    /// The destination becomes one of the chosen ones.
    Translated,
}

#[derive(Debug, Clone)]
struct Packet {
    destination: IpAddr,
    port: u16,
    marked: bool,
    translated: bool,
    masqueraded: bool,
    chosen: Vec<Endpoint>,
    steps: Vec<String>,
}

#[derive(Debug)]
pub(super) struct Walk<'a> {
    context: &'a RuleContext<'a>,
    chains: [&'a Chains; 2],
    source: &'a PacketSource,
    target: Destination,
}

impl<'a> Walk<'a> {
    pub(super) fn new(
        context: &'a RuleContext<'a>,
        chains: [&'a Chains; 2],
        source: &'a PacketSource,
        target: Destination,
    ) -> Self {
        Self { context, chains, source, target }
    }

    pub(super) fn way(&self) -> pb::Way {
        let mut packet = Packet {
            destination: self.target.address,
            port: self.target.port,
            marked: false,
            translated: false,
            masqueraded: false,
            chosen: Vec::new(),
            steps: Vec::new(),
        };
        let first = if self.source.origin == Origin::Node { NAT_OUTPUT } else { SERVICES };
        let mut way = pb::Way { from: self.source.label.clone(), ..Default::default() };
        if self.chain(Table::Nat, first, &mut packet, 0) == Flow::Translated {
            self.endpoints(packet, &mut way);
            return way;
        }
        let flow = self.deliver(&mut packet);
        if packet.steps.is_empty() {
            packet.steps.push("no rule matches; other chains and routes decide".into());
        }
        way.verdict = verdict(flow).into();
        way.masqueraded = packet.masqueraded;
        way.steps = packet.steps;
        way
    }

    /// Evaluates the hooks after translation for each possible endpoint.
    fn endpoints(&self, mut packet: Packet, way: &mut pb::Way) {
        packet.translated = true;
        let mut last = Flow::Return;
        let (mut later, mut hairpin): (Vec<String>, Vec<Endpoint>) = (Vec::new(), Vec::new());
        for endpoint in std::mem::take(&mut packet.chosen) {
            let mut one = Packet { steps: Vec::new(), ..packet.clone() };
            (one.destination, one.port) = (endpoint.ip, endpoint.port);
            let flow = self.deliver(&mut one);
            if matches!(flow, Flow::Return | Flow::Accept) {
                way.endpoints.push(endpoint.to_string());
                way.masqueraded |= one.masqueraded && packet.marked;
            } else {
                last = flow;
            }
            if !packet.marked && (one.masqueraded || self.may_be_hairpin(endpoint)) {
                hairpin.push(endpoint);
            }
            // The steps of all endpoints are the same, but for a node's own addresses.
            later.extend(one.steps.into_iter().filter(|step| !later.contains(step)).collect::<Vec<_>>());
        }
        packet.steps.extend(later);
        if !hairpin.is_empty() {
            packet.steps.push(format!(
                "{POSTROUTING}: masqueraded if the sender itself is chosen from {} (hairpin)",
                list(&hairpin)
            ));
        }
        // Only one endpoint, which is the sender.
        way.masqueraded |=
            hairpin.len() == way.endpoints.len() && self.source.address == hairpin.first().map(|it| it.ip);
        way.verdict = if way.endpoints.is_empty() { verdict(last) } else { "forwarded" }.into();
        way.steps = packet.steps;
    }

    fn may_be_hairpin(&self, endpoint: Endpoint) -> bool {
        self.source.origin == Origin::Pod
            && self.source.address.is_none_or(|address| address == endpoint.ip)
            && self.context.plan.is_hairpin(self.target.protocol, endpoint)
    }

    /// Evaluates the hooks from routing on.
    fn deliver(&self, packet: &mut Packet) -> Flow {
        let is_here = self.context.is_local(packet.destination);
        let hooks: &[(Table, &str)] = match (self.source.origin, is_here) {
            (Origin::Node, false) => &[(Table::Filter, FILTER_OUTPUT), (Table::Nat, POSTROUTING)],
            (Origin::Node, true) => {
                &[(Table::Filter, FILTER_OUTPUT), (Table::Nat, POSTROUTING), (Table::Filter, INPUT)]
            }
            (Origin::Pod | Origin::Outside, true) => &[(Table::Filter, INPUT)],
            (Origin::Pod | Origin::Outside, false) => &[(Table::Filter, FORWARD), (Table::Nat, POSTROUTING)],
        };
        for (table, chain) in hooks {
            let flow = self.chain(*table, chain, packet, 0);
            if matches!(flow, Flow::Drop | Flow::Reject) {
                return flow;
            }
        }
        Flow::Return
    }

    fn chain(&self, table: Table, name: &str, packet: &mut Packet, depth: usize) -> Flow {
        let Some(rules) = self.chains[table as usize].get(name).filter(|_| depth <= DEPTH) else {
            return Flow::Return;
        };
        for rule in rules {
            let random = rule.matches.iter().any(|matched| matches!(matched, Match::OneOf(_)));
            if !rule.matches.iter().all(|matched| self.matches(matched, name, packet)) {
                continue;
            }
            if rule.matches.iter().any(|matched| matches!(matched, Match::SourceIn(_))) {
                // Known only to the kernel: the endpoint is one of those that are chosen from below.
                if !packet.steps.iter().any(|step| step.starts_with(name)) {
                    packet.steps.push(format!("{name}: a client that is remembered gets its endpoint again"));
                }
                continue;
            }
            let flow = self.target(table, name, rule, random, packet, depth);
            match flow {
                None => {}
                Some(Flow::Translated) if random => {}
                Some(flow) => return flow,
            }
        }
        Flow::Return
    }

    /// `None`: continue with the next rule.
    fn target(
        &self,
        table: Table,
        chain: &str,
        rule: &Rule,
        random: bool,
        packet: &mut Packet,
        depth: usize,
    ) -> Option<Flow> {
        let step = |packet: &mut Packet| packet.steps.push(format!("{chain}:{rule}"));
        match &rule.target {
            Target::Jump(to) => {
                let before = packet.steps.len();
                step(packet);
                let flow = self.chain(table, to, packet, depth + 1);
                if flow == Flow::Return {
                    // Nothing in it concerns the packet.
                    if packet.steps.len() == before + 1 {
                        packet.steps.pop();
                    }
                    return None;
                }
                Some(flow)
            }
            // A choice is one step, in its last rule.
            Target::Goto(to) if random => Some(self.chain(table, to, packet, depth + 1)),
            Target::Goto(to) => {
                // The last rule of a choice is no step of its own either.
                if packet.chosen.is_empty() {
                    step(packet);
                }
                Some(self.chain(table, to, packet, depth + 1))
            }
            Target::Dnat(endpoint) => {
                packet.chosen.push(*endpoint);
                if !random && !chain.starts_with("KEELSON-E-") {
                    let chosen = list(&packet.chosen);
                    packet
                        .steps
                        .push(format!("{chain}: one of {}, at random: {chosen}", packet.chosen.len()));
                }
                Some(Flow::Translated)
            }
            Target::SetMark(_) => {
                packet.marked = true;
                step(packet);
                None
            }
            Target::Masquerade => {
                packet.masqueraded = true;
                packet.steps.push(format!("{chain}: masqueraded: the endpoint sees an address of the node"));
                Some(Flow::Accept)
            }
            Target::ClearMark(_) | Target::AddSource(..) | Target::MapMark(_) => None,
            Target::Return => Some(Flow::Return),
            end => {
                step(packet);
                Some(match end {
                    Target::Accept => Flow::Accept,
                    Target::Reject(_) => Flow::Reject,
                    _ => Flow::Drop,
                })
            }
        }
    }

    fn matches(&self, matched: &Match, chain: &str, packet: &Packet) -> bool {
        let has_state = |states: &str| {
            states.split(',').any(|state| state == "NEW" || (state == "DNAT" && packet.translated))
        };
        match matched {
            Match::Source(net) => self.is_from(net, chain),
            Match::NotSource(net) => !self.is_from(net, chain),
            Match::Destination(net) => net.contains(&packet.destination),
            Match::NotDestination(net) => !net.contains(&packet.destination),
            Match::Interface(_) => self.source.origin == Origin::Pod,
            Match::NotInterface(_) => self.source.origin != Origin::Pod,
            Match::Protocol(protocol) => *protocol == self.target.protocol,
            Match::Ports(_, first, last) => (*first..=*last).contains(&packet.port),
            Match::LocalSource => self.source.origin == Origin::Node,
            Match::LocalDestination => self.context.is_local(packet.destination),
            // Hairpin connections are described with the endpoints.
            Match::Hairpin(_) => {
                let endpoint = Endpoint { ip: packet.destination, port: packet.port };
                self.source.address == Some(endpoint.ip)
                    && self.context.plan.is_hairpin(self.target.protocol, endpoint)
            }
            Match::DestinationIn(set) => self.is_refused(set.kind, packet),
            Match::SourceIn(_) | Match::OneOf(_) => true,
            // Not in rules of this backend.
            Match::AddressIn(_) | Match::NotAdmitted(_) => false,
            Match::State(states) => has_state(states),
            Match::NotState(states) => !has_state(states),
            Match::Marked(_) => packet.marked,
            Match::NotMarked(_) => !packet.marked,
        }
    }

    fn is_from(&self, net: &IpNet, chain: &str) -> bool {
        match self.source.address {
            Some(address) => net.contains(&address),
            None if chain.starts_with("KEELSON-R-") => self.source.admitted,
            None => self.source.origin == Origin::Pod,
        }
    }

    fn is_refused(&self, kind: SetKind, packet: &Packet) -> bool {
        let (protocol, port) = (self.target.protocol, packet.port);
        let frontend = match kind {
            SetKind::Reject | SetKind::Drop => Frontend::Address { ip: packet.destination, protocol, port },
            _ => Frontend::NodePort { protocol, port },
        };
        let refusal = match kind {
            SetKind::Reject | SetKind::RejectNodePorts => Refusal::Reject,
            _ => Refusal::Drop,
        };
        self.context.plan.frontend_state(frontend).is_some_and(|state| state.refusal == Some(refusal))
    }
}

fn verdict(flow: Flow) -> &'static str {
    match flow {
        Flow::Return | Flow::Accept => "untouched",
        Flow::Drop => "dropped",
        Flow::Reject => "rejected",
        Flow::Translated => "forwarded",
    }
}
