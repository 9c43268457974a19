//! Evaluates the rules for a packet.
//!
//! Owns: [`Walk`]. In: the rules, the elements, a source, a target. Out: a [`pb::Way`]. First the packet traverses the
//! hooks before routing, where it may be refused or translated; then every possible endpoint, or the target itself,
//! traverses the later hooks.

mod lookup;
mod statements;

use std::net::IpAddr;

use ipnet::IpNet;
use keelson_proto::proxy as pb;
use keelson_proxy::{
    explain::{
        Target, list,
        source::{Origin, PacketSource},
    },
    model::{Endpoint, Family, Protocol},
};

use super::{RuleContext, elements::ReachableElements, format};
use crate::{
    chain::Chain,
    element::{Key, Number, SetName, Value, Verdict},
    ruleset::{FLOWTABLE, Rule, Statement, rules},
};

/// Chains refer only to chains that were created before them, so there is no loop; the limit ends the walk if a plan
/// violates this.
const DEPTH: usize = 32;

#[derive(Debug, Clone, PartialEq, Eq)]
enum Flow {
    /// Continues after the jump to this chain, or with the next hook.
    Return,
    Drop,
    Reject,
    /// The destination becomes one of these, and the hook ends.
    Translated(Vec<Endpoint>),
}

/// The parts of a packet that rules match.
#[derive(Debug, Clone)]
struct Packet {
    destination: IpAddr,
    /// The possible numbers. Empty: none is set.
    numbers: Vec<Number>,
    port: u16,
    marked: bool,
    translated: bool,
    masqueraded: bool,
    steps: Vec<String>,
}

enum StatementResult {
    Continue,
    NoMatch,
    End(Flow),
}

#[derive(Debug)]
pub(super) struct Walk<'a> {
    context: &'a RuleContext<'a>,
    elements: &'a ReachableElements,
    source: &'a PacketSource,
    target: Target,
    family: Family,
}

#[derive(Debug, Default)]
struct RuleNotes {
    matched: Vec<String>,
    /// Why the rule does not match, if that is worth mentioning.
    unmatched: Option<String>,
}

impl<'a> Walk<'a> {
    pub(super) fn new(
        context: &'a RuleContext<'a>,
        elements: &'a ReachableElements,
        source: &'a PacketSource,
        target: Target,
    ) -> Self {
        Self { context, elements, source, target, family: target.family() }
    }

    pub(super) fn way(&self) -> pb::Way {
        let mut packet = Packet {
            destination: self.target.address,
            numbers: Vec::new(),
            port: self.target.port,
            marked: false,
            translated: false,
            masqueraded: false,
            steps: Vec::new(),
        };
        let before = match self.source.origin {
            Origin::Node => [Chain::FilterOutputFirst, Chain::NatOutput],
            Origin::Pod | Origin::Outside => [Chain::FilterPrerouting, Chain::NatPrerouting],
        };
        let mut way = pb::Way { from: self.source.label.clone(), ..Default::default() };
        let flow = self.hooks(&before, &mut packet);
        match flow {
            Flow::Drop | Flow::Reject => {
                way.verdict = verdict(&flow).into();
                way.steps = packet.steps;
            }
            Flow::Return => {
                let flow = self.deliver(&mut packet, self.target.address);
                if flow == Flow::Return {
                    packet.steps.push("no rule matches; other tables and routes decide".into());
                }
                way.verdict = verdict(&flow).into();
                way.masqueraded = packet.masqueraded;
                way.steps = packet.steps;
            }
            Flow::Translated(endpoints) => self.endpoints(packet, endpoints, &mut way),
        }
        way
    }

    /// Evaluates the hooks after translation for each possible endpoint.
    fn endpoints(&self, mut packet: Packet, endpoints: Vec<Endpoint>, way: &mut pb::Way) {
        packet.translated = true;
        let (mut masqueraded, mut plain) = (Vec::new(), Vec::new());
        let mut worst = Flow::Return;
        for endpoint in endpoints {
            let mut one = Packet { port: endpoint.port, steps: Vec::new(), ..packet.clone() };
            one.destination = endpoint.ip;
            let flow = self.deliver(&mut one, endpoint.ip);
            if flow == Flow::Return {
                way.endpoints.push(endpoint.to_string());
                if one.masqueraded { masqueraded.push(endpoint) } else { plain.push(endpoint) }
            } else {
                packet
                    .steps
                    .extend(one.steps.into_iter().map(|step| format!("{step} (if {endpoint} is selected)")));
                worst = flow;
            }
        }
        // Endpoints that a mark does not affect are listed separately.
        way.masqueraded = !masqueraded.is_empty() && (packet.marked || plain.is_empty());
        packet.steps.extend(self.source_step(packet.marked, &masqueraded, &plain));
        packet.steps.extend(self.offload_step(masqueraded.iter().chain(&plain)));
        way.verdict = match way.endpoints.is_empty() {
            true => verdict(&worst),
            false => "forwarded",
        }
        .into();
        way.steps = packet.steps;
    }

    /// Notes that later packets bypass the chains, if an endpoint is not on the node itself.
    fn offload_step<'e>(&self, mut endpoints: impl Iterator<Item = &'e Endpoint>) -> Option<String> {
        let chain = self.context.offload?;
        let protocol = Statement::Protocol(self.target.protocol);
        let is_added = rules(self.context.base, chain).iter().any(|rule| rule.statements.contains(&protocol));
        let is_forwarded = self.source.origin != Origin::Node
            && endpoints.any(|endpoint| !self.context.is_local(endpoint.ip));
        (is_added && is_forwarded).then(|| {
            format!(
                "{chain}: when the connection is established and both interfaces are in flowtable \
                 {FLOWTABLE}, its packets bypass all chains"
            )
        })
    }

    /// Notes the source address that the endpoints see.
    fn source_step(&self, marked: bool, masqueraded: &[Endpoint], plain: &[Endpoint]) -> Vec<String> {
        let mut steps = Vec::new();
        let chain = Chain::NatPostrouting;
        if marked && !masqueraded.is_empty() {
            let mark = self.context.base.mark;
            steps.push(format!(
                "{chain}: the mark {mark:#x} is set, masqueraded: the endpoint sees an address of the node"
            ));
        } else if !masqueraded.is_empty() && self.is_told_apart() {
            let to = list(masqueraded);
            steps.push(format!(
                "{chain}: masqueraded to {to}, because flows between pods are not tracked: the endpoint sees an address of the node"
            ));
        } else if !masqueraded.is_empty() {
            let to = list(masqueraded);
            steps.push(format!("{chain}: {to} is also the source, masqueraded if it is selected (hairpin)"));
        }
        if marked && !plain.is_empty() {
            let at = list(plain);
            steps.push(format!(
                "{at} is at an address of this node: delivered locally and not masqueraded, although marked"
            ));
        }
        let hairpin: Vec<Endpoint> =
            plain.iter().copied().filter(|endpoint| self.may_be_hairpin(*endpoint)).collect();
        if !marked
            && self.source.address.is_none()
            && self.source.origin == Origin::Pod
            && !hairpin.is_empty()
        {
            let to = list(&hairpin);
            steps.push(format!("{chain}: masqueraded if the sender itself is selected from {to} (hairpin)"));
        }
        steps
    }

    /// Whether the source is a pod whose translated flows to pods are masqueraded, so that others need not be tracked.
    fn is_told_apart(&self) -> bool {
        let is_pod = |net: IpNet| match self.source.address {
            Some(address) => net.contains(&address),
            None => self.source.origin == Origin::Pod,
        };
        self.target.protocol != Protocol::Sctp && self.context.base.untracked().is_some_and(is_pod)
    }

    fn may_be_hairpin(&self, Endpoint { ip, port }: Endpoint) -> bool {
        let key = Key::new().ip(ip).ip(ip).protocol(self.target.protocol).port(port);
        self.elements.get(SetName::Hairpin, key).is_some()
    }

    /// Evaluates the hooks from routing on.
    fn deliver(&self, packet: &mut Packet, to: IpAddr) -> Flow {
        let here = self.context.is_local(to);
        let hooks: &[Chain] = match (self.source.origin, here) {
            (Origin::Node, false) => &[Chain::FilterOutput, Chain::NatPostrouting],
            // The packet leaves by the loopback interface and comes in again; the nat hooks see a connection once.
            (Origin::Node, true) => {
                &[Chain::FilterOutput, Chain::NatPostrouting, Chain::FilterPrerouting, Chain::FilterInput]
            }
            (Origin::Pod | Origin::Outside, true) => &[Chain::FilterInput],
            (Origin::Pod | Origin::Outside, false) => &[Chain::FilterForward, Chain::NatPostrouting],
        };
        self.hooks(hooks, packet)
    }

    fn hooks(&self, chains: &[Chain], packet: &mut Packet) -> Flow {
        for chain in chains {
            let flow = self.chain(*chain, packet, 0);
            if flow != Flow::Return {
                return flow;
            }
        }
        Flow::Return
    }

    fn chain(&self, chain: Chain, packet: &mut Packet, depth: usize) -> Flow {
        if depth > DEPTH {
            return Flow::Return;
        }
        if matches!(chain, Chain::Sources { .. }) {
            return self.sources(chain, packet);
        }
        let seen = packet.steps.len();
        for rule in rules(self.context.base, chain) {
            if let Some(flow) = self.rule(chain, &rule, packet, depth) {
                return flow;
            }
        }
        if chain == Chain::Services && packet.steps.len() == seen {
            let key = format::key(self.family, SetName::ClusterIpPorts, self.frontend(packet));
            packet.steps.push(format!(
                "{chain}: {key} is not in {} and not in {}, and its port is not in {}",
                SetName::ClusterIpPorts,
                SetName::ExternalPorts,
                SetName::NodePorts
            ));
        }
        Flow::Return
    }

    /// `None`: continue with the next rule.
    fn rule(&self, chain: Chain, rule: &Rule, packet: &mut Packet, depth: usize) -> Option<Flow> {
        let mut notes = RuleNotes::default();
        let mut matched = packet.clone();
        for statement in &rule.statements {
            // The steps of the target chain come after those of the rule.
            if let Statement::Goto(to) | Statement::Jump(to) = statement {
                self.add_step(chain, &notes, &mut matched);
                let flow = self.chain(*to, &mut matched, depth + 1);
                *packet = matched;
                return (matches!(statement, Statement::Goto(_)) || flow != Flow::Return).then_some(flow);
            }
            match self.statement(statement, rule, &mut matched, &mut notes) {
                StatementResult::Continue => {}
                StatementResult::NoMatch => {
                    let not = notes.unmatched.take();
                    packet.steps.extend(not.map(|not| format!("{chain}: {not}")));
                    return None;
                }
                StatementResult::End(flow) => {
                    self.add_step(chain, &notes, &mut matched);
                    *packet = matched;
                    return Some(flow);
                }
            }
            if let Statement::Choose(fields, map) = statement {
                self.add_step(chain, &notes, &mut matched);
                let flow = self.goto(*map, self.key(fields, &matched), &mut matched, depth);
                *packet = matched;
                return Some(flow);
            }
        }
        self.add_step(chain, &notes, &mut matched);
        *packet = matched;
        None
    }

    fn add_step(&self, chain: Chain, notes: &RuleNotes, packet: &mut Packet) {
        if !notes.matched.is_empty() {
            packet.steps.push(format!("{chain}: {}", notes.matched.join(", ")));
        }
    }

    /// Continues with the chain that a verdict map selects.
    fn goto(&self, map: SetName, key: Option<Key>, packet: &mut Packet, depth: usize) -> Flow {
        match key.and_then(|key| self.elements.get(map, key)).map(|element| element.value) {
            Some(Value::Verdict(Verdict::Goto(to))) => self.chain(to, packet, depth + 1),
            Some(Value::Verdict(Verdict::Drop)) => Flow::Drop,
            _ => Flow::Return,
        }
    }
}

fn verdict(flow: &Flow) -> &'static str {
    match flow {
        Flow::Return => "untouched",
        Flow::Drop => "dropped",
        Flow::Reject => "rejected",
        Flow::Translated(_) => "forwarded",
    }
}
