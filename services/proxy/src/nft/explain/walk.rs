//! A packet on its way through the rules.
//!
//! Owns: [`Walk`]. In: the rules, the elements, a sender, a target. Out: a [`pb::Way`]. First the packet goes through the
//! hooks before routing, where it may be refused or translated; then every endpoint that it may have been translated to,
//! or the target itself, through those after it.

use std::net::IpAddr;

use keelson_proto::proxy as pb;

use super::{
    Place,
    frontend::{no_answer, why_refused},
    sender::{Origin, Sender},
    table::{Table, address},
    words,
};
use crate::{
    inspect::Target,
    model::{Endpoint, Family},
    nft::{
        chain::Chain,
        element::{Key, SetName, Value, Verdict},
        plan::Frontend,
        ruleset::{Field, Part, Rule, rules},
    },
};

/// Chains lead to others that were made before them, so there is no circle; a plan that breaks this ends here.
const DEPTH: usize = 32;

/// What a chain makes of a packet.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Flow {
    /// It goes on behind the jump to this chain, or with the next hook.
    Return,
    Drop,
    Reject,
    /// Its destination becomes one of these, and the hook is over.
    Translated(Vec<Endpoint>),
}

/// A packet, as far as rules look at it.
#[derive(Debug, Clone)]
struct Packet {
    /// Its destination address, or the numbers (one of them) that are written there.
    destination: Destination,
    port: u16,
    marked: bool,
    translated: bool,
    masqueraded: bool,
    /// Whether what is met is told.
    steps: Vec<String>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Destination {
    Address(IpAddr),
    /// Numbers in the form of addresses, any of which it may be.
    Numbers(Vec<IpAddr>),
}

/// What a part does with a rule.
enum Then {
    /// The next part.
    Next,
    /// It does not match.
    Stop,
    /// The rule is over.
    End(Flow),
}

/// One way.
#[derive(Debug)]
pub(super) struct Walk<'a> {
    place: &'a Place<'a>,
    table: &'a Table,
    sender: &'a Sender,
    target: Target,
    family: Family,
}

/// What was done and found by the parts of one rule so far.
#[derive(Debug, Default)]
struct Told {
    said: Vec<String>,
    /// Why the rule does not match, if that is worth saying.
    not: Option<String>,
}

impl<'a> Walk<'a> {
    pub(super) fn new(place: &'a Place<'a>, table: &'a Table, sender: &'a Sender, target: Target) -> Self {
        Self { place, table, sender, target, family: target.family() }
    }

    /// All of it.
    pub(super) fn way(&self) -> pb::Way {
        let mut packet = Packet {
            destination: Destination::Address(self.target.address),
            port: self.target.port,
            marked: false,
            translated: false,
            masqueraded: false,
            steps: Vec::new(),
        };
        let before = match self.sender.origin {
            Origin::Node => [Chain::FilterOutputFirst, Chain::NatOutput],
            Origin::Pod | Origin::Outside => [Chain::FilterPrerouting, Chain::NatPrerouting],
        };
        let mut way = pb::Way { from: self.sender.label.clone(), ..Default::default() };
        let flow = self.hooks(&before, &mut packet);
        match flow {
            Flow::Drop | Flow::Reject => {
                way.verdict = verdict(&flow).into();
                way.steps = packet.steps;
            }
            Flow::Return => {
                let flow = self.deliver(&mut packet, self.target.address);
                if flow == Flow::Return {
                    packet.steps.push("no rule here concerns it: other tables and routes decide".into());
                }
                way.verdict = verdict(&flow).into();
                way.masqueraded = packet.masqueraded;
                way.steps = packet.steps;
            }
            Flow::Translated(endpoints) => self.endpoints(packet, endpoints, &mut way),
        }
        way
    }

    /// What becomes of those that it may have been translated to.
    fn endpoints(&self, mut packet: Packet, endpoints: Vec<Endpoint>, way: &mut pb::Way) {
        packet.translated = true;
        let (mut masqueraded, mut plain) = (Vec::new(), Vec::new());
        let mut worst = Flow::Return;
        for endpoint in endpoints {
            let mut one = Packet { port: endpoint.port, steps: Vec::new(), ..packet.clone() };
            one.destination = Destination::Address(endpoint.ip);
            let flow = self.deliver(&mut one, endpoint.ip);
            if flow == Flow::Return {
                way.endpoints.push(endpoint.to_string());
                if one.masqueraded { masqueraded.push(endpoint) } else { plain.push(endpoint) }
            } else {
                packet.steps.extend(
                    one.steps.into_iter().map(|step| format!("{step} (where {endpoint} was chosen)")),
                );
                worst = flow;
            }
        }
        // Those to whom a mark makes no difference are told of apart.
        way.masqueraded = !masqueraded.is_empty() && (packet.marked || plain.is_empty());
        packet.steps.extend(self.source_step(packet.marked, &masqueraded, &plain));
        way.verdict = match way.endpoints.is_empty() {
            true => verdict(&worst),
            false => "forwarded",
        }
        .into();
        way.steps = packet.steps;
    }

    /// What source the endpoints see.
    fn source_step(&self, marked: bool, masqueraded: &[Endpoint], plain: &[Endpoint]) -> Vec<String> {
        let mut steps = Vec::new();
        let chain = Chain::NatPostrouting;
        if marked && !masqueraded.is_empty() {
            let mark = self.place.base.mark;
            steps.push(format!("{chain}: the mark {mark:#x} is set, so it is masqueraded: the endpoint sees an address of the node"));
        } else if !masqueraded.is_empty() {
            let to = words::endpoints(masqueraded);
            steps.push(format!(
                "{chain}: {to} would answer to itself, so it is masqueraded where that is chosen (hairpin)"
            ));
        }
        if marked && !plain.is_empty() {
            let at = words::endpoints(plain);
            steps.push(format!("{at} is at an address of this node: delivered here, with the sender's address in spite of the mark"));
        }
        let hairpin: Vec<Endpoint> =
            plain.iter().copied().filter(|endpoint| self.may_be_hairpin(*endpoint)).collect();
        if !marked
            && self.sender.address.is_none()
            && self.sender.origin != Origin::Node
            && !hairpin.is_empty()
        {
            let to = words::endpoints(&hairpin);
            steps.push(format!(
                "{chain}: where the sender itself is what was chosen of {to}, it is masqueraded (hairpin)"
            ));
        }
        steps
    }

    fn may_be_hairpin(&self, Endpoint { ip, port }: Endpoint) -> bool {
        let key = Key::new().ip(ip).ip(ip).protocol(self.target.protocol).port(port);
        self.table.get(SetName::Hairpin, key).is_some()
    }

    /// The hooks from routing on, to an address.
    fn deliver(&self, packet: &mut Packet, to: IpAddr) -> Flow {
        let here = self.place.is_local(to);
        let hooks: &[Chain] = match (self.sender.origin, here) {
            (Origin::Node, false) => &[Chain::FilterOutput, Chain::NatPostrouting],
            // It leaves by the loopback interface and comes in again; the nat hooks see a connection once.
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
        let seen = packet.steps.len();
        for rule in rules(self.place.base, chain) {
            if let Some(flow) = self.rule(chain, &rule, packet, depth) {
                return flow;
            }
        }
        if chain == Chain::Services && packet.steps.len() == seen {
            let key = words::key(self.family, SetName::ClusterIpPorts, self.frontend(packet));
            packet.steps.push(format!(
                "{chain}: {key} is neither in {} nor in {}, and as a node port not in {}",
                SetName::ClusterIpPorts,
                SetName::ExternalPorts,
                SetName::NodePorts
            ));
        }
        Flow::Return
    }

    /// None: the next rule.
    fn rule(&self, chain: Chain, rule: &Rule, packet: &mut Packet, depth: usize) -> Option<Flow> {
        let mut told = Told::default();
        let mut matched = packet.clone();
        for part in &rule.parts {
            // What a rule leads to comes after what it says itself.
            if let Part::Goto(to) | Part::Jump(to) = part {
                self.tell(chain, &told, &mut matched);
                let flow = self.chain(*to, &mut matched, depth + 1);
                *packet = matched;
                return (matches!(part, Part::Goto(_)) || flow != Flow::Return).then_some(flow);
            }
            match self.part(part, rule, &mut matched, &mut told) {
                Then::Next => {}
                Then::Stop => {
                    let not = told.not.take();
                    packet.steps.extend(not.map(|not| format!("{chain}: {not}")));
                    return None;
                }
                Then::End(flow) => {
                    self.tell(chain, &told, &mut matched);
                    *packet = matched;
                    return Some(flow);
                }
            }
            if let Part::Choose(fields, map) = part {
                self.tell(chain, &told, &mut matched);
                let flow = self.goto(*map, self.key(fields, &matched), &mut matched, depth);
                *packet = matched;
                return Some(flow);
            }
        }
        self.tell(chain, &told, &mut matched);
        *packet = matched;
        None
    }

    fn tell(&self, chain: Chain, told: &Told, packet: &mut Packet) {
        if !told.said.is_empty() {
            packet.steps.push(format!("{chain}: {}", told.said.join(", ")));
        }
    }

    /// Where a map of verdicts leads.
    fn goto(&self, map: SetName, key: Option<Key>, packet: &mut Packet, depth: usize) -> Flow {
        match key.and_then(|key| self.table.get(map, key)).map(|element| element.value) {
            Some(Value::Verdict(Verdict::Goto(to))) => self.chain(to, packet, depth + 1),
            Some(Value::Verdict(Verdict::Drop)) => Flow::Drop,
            _ => Flow::Return,
        }
    }

    fn part(&self, part: &Part, rule: &Rule, packet: &mut Packet, told: &mut Told) -> Then {
        match part {
            // It is the first packet of a connection.
            Part::New => Then::Next,
            Part::Protocol(protocol) => when(*protocol == self.target.protocol),
            Part::Translated => when(packet.translated),
            Part::Marked(_) => when(packet.marked),
            Part::LocalSource => self.local_source(told),
            Part::LocalDestination => self.local_destination(packet, told),
            Part::Address { field, net, inside } => self.address(*field, net, *inside, rule, packet, told),
            Part::Interface { name, prefix, is } => {
                let by = format!("by {name}{}", if *prefix { "*" } else { "" });
                self.pod(
                    self.sender.origin == Origin::Pod,
                    *is,
                    &format!("comes in {by}"),
                    &format!("does not come in {by}"),
                    rule,
                    told,
                )
            }
            Part::In { fields, set, inside } => self.is_in(fields, *set, *inside, packet, told),
            Part::Mark(_) => {
                packet.marked = true;
                told.said.push("marked to be masqueraded".into());
                Then::Next
            }
            Part::ToggleMark(_) => Then::Next,
            Part::Masquerade => {
                packet.masqueraded = true;
                Then::End(Flow::Return)
            }
            Part::SetDestination(fields, map) => self.set_destination(fields, *map, packet, told),
            // Comes only where the kernel remembers a client, which is told as a choice.
            Part::SetDestinationToService | Part::Forget => Then::Next,
            Part::Remember { seconds } => {
                told.said.push(format!("the kernel remembers the client's endpoint for {seconds} s"));
                Then::Next
            }
            Part::Choose(fields, map) => self.choose(fields, *map, packet, told),
            Part::Translate(fields, map) => self.translate(fields, *map, packet, told),
            Part::Reject => {
                told.said.push("rejected with ICMP port unreachable".into());
                Then::End(Flow::Reject)
            }
            Part::Drop => {
                told.said.push("dropped".into());
                Then::End(Flow::Drop)
            }
            Part::Goto(_) | Part::Jump(_) => Then::Next,
        }
    }

    fn local_source(&self, told: &mut Told) -> Then {
        let local = match self.sender.address {
            Some(address) => self.place.is_local(address),
            None => self.sender.origin == Origin::Node,
        };
        if local {
            told.said.push("the source is an address of the node".into());
        } else {
            told.not = Some("the source is no address of the node".into());
        }
        when(local)
    }

    fn local_destination(&self, packet: &Packet, told: &mut Told) -> Then {
        let Destination::Address(address) = packet.destination else { return Then::Stop };
        told.not = self.node_port_elsewhere(address);
        when(self.place.is_local(address))
    }

    /// Why a node port that there is does not answer here.
    fn node_port_elsewhere(&self, address: IpAddr) -> Option<String> {
        let Target { protocol, port, .. } = self.target;
        let key = Key::new().protocol(protocol).port(port);
        let map = [SetName::NodePorts, SetName::RefusedNodePorts]
            .into_iter()
            .find(|map| self.table.get(*map, key).is_some())?;
        let why = no_answer(self.place, address)?;
        Some(format!("{} is in {map}, but {why}", words::key(self.family, map, key)))
    }

    fn address(
        &self,
        field: Field,
        net: &ipnet::IpNet,
        inside: bool,
        rule: &Rule,
        packet: &Packet,
        told: &mut Told,
    ) -> Then {
        if field != Field::Source {
            let Destination::Address(address) = packet.destination else { return Then::Stop };
            told.not = self.node_port_elsewhere(address);
            return when(net.contains(&address) == inside);
        }
        let is_in = match self.sender.address {
            Some(address) => net.contains(&address),
            None => self.sender.origin == Origin::Pod,
        };
        self.pod(is_in, inside, &format!("is in {net}"), &format!("is not in {net}"), rule, told)
    }

    /// Whether it comes from a pod, where the rule wants that to be so or not so.
    fn pod(&self, is: bool, wanted: bool, yes: &str, no: &str, rule: &Rule, told: &mut Told) -> Then {
        let marks = rule.parts.iter().any(|part| matches!(part, Part::Mark(_)));
        let found = match (is, marks) {
            (true, true) => format!("the source {yes}, as pods do: not marked to be masqueraded"),
            (true, false) => format!("the source {yes}, as pods do"),
            (false, _) => format!("the source {no}, so it is no pod"),
        };
        if is == wanted {
            told.said.push(found)
        } else {
            told.not = Some(found)
        }
        when(is == wanted)
    }

    fn is_in(&self, fields: &[Field], set: SetName, inside: bool, packet: &Packet, told: &mut Told) -> Then {
        if set == SetName::SourceRanges {
            return self.admitted(fields, inside, packet, told);
        }
        // Fields that are not known are those of a hairpin, which is told with the endpoints.
        let Some(key) = self.key(fields, packet) else { return Then::Stop };
        let found = self.table.get(set, key).is_some();
        if let (false, SetName::NodePortAddresses, Destination::Address(address)) =
            (found, set, &packet.destination)
        {
            told.not = self.node_port_elsewhere(*address);
        }
        if found == inside && set != SetName::Hairpin {
            told.said.push(format!("{} is in {set}", words::key(self.family, set, key)));
        }
        when(found == inside)
    }

    /// Whether source ranges let the sender in.
    fn admitted(&self, fields: &[Field], inside: bool, packet: &Packet, told: &mut Told) -> Then {
        let ranges = self.table.ranges(SetName::SourceRanges, self.frontend(packet));
        let found = match self.sender.address {
            Some(_) => self
                .key(fields, packet)
                .is_some_and(|key| self.table.get(SetName::SourceRanges, key).is_some()),
            None => self.sender.admitted,
        };
        let set = SetName::SourceRanges;
        let said = std::mem::take(&mut told.said).join(", ");
        let named = match (found, self.sender.address) {
            (true, Some(address)) => {
                let holding = ranges.iter().find(|(low, high)| *low <= address && address <= *high);
                words::ranges(holding.map_or(&[][..], std::slice::from_ref))
            }
            _ => words::ranges(&ranges),
        };
        match found {
            true => told.not = Some(format!("{said}, and {set} let the source in ({named})")),
            false if named.is_empty() => told.said.push(format!("{said}, and {set} let nobody in")),
            false => told.said.push(format!("{said}, and {set} do not let the source in (only {named})")),
        }
        when(found == inside)
    }

    fn set_destination(&self, fields: &[Field], map: SetName, packet: &mut Packet, told: &mut Told) -> Then {
        if map.is_dynamic() {
            told.not = Some(format!(
                "a client that {map} remembers keeps its endpoint, if that is among those here; others get one now"
            ));
            return Then::Stop;
        }
        let Some(values) = self.values(fields, map, packet) else { return Then::Stop };
        let numbers: Vec<IpAddr> =
            values.found.iter().filter_map(|value| address(value.as_slice())).collect();
        if numbers.is_empty() {
            return Then::Stop;
        }
        told.said.push(match (&values.key, numbers.as_slice()) {
            (Some(key), [number]) => {
                format!("{} is in {map}: number {number}", words::key(self.family, map, *key))
            }
            _ => {
                format!(
                    "one of the {} in {map} at random{}",
                    words::count(numbers.len(), "endpoint number"),
                    values.missing()
                )
            }
        });
        packet.destination = Destination::Numbers(numbers);
        Then::Next
    }

    fn choose(&self, fields: &[Field], map: SetName, packet: &Packet, told: &mut Told) -> Then {
        let Some(key) = self.key(fields, packet) else { return Then::Stop };
        let name = words::key(self.family, map, key);
        match self.table.get(map, key).map(|element| element.value) {
            Some(Value::Verdict(verdict)) => {
                let policy =
                    if map == SetName::ExternalPolicy { " (externalTrafficPolicy Local)" } else { "" };
                let why = self.refusal(map, packet).map(|why| format!(": {why}")).unwrap_or_default();
                told.said.push(format!("{name} is in {map}: {}{policy}{why}", words::verdict(verdict)));
                Then::Next
            }
            _ => {
                told.not = match map {
                    SetName::ExternalPolicy => {
                        Some(format!("{name} is not in {map} (externalTrafficPolicy Cluster)"))
                    }
                    SetName::LocalChoice => Some(format!(
                        "{name} is not in {map}: no endpoint on this node takes traffic from outside"
                    )),
                    SetName::InternalChoice | SetName::ExternalChoice => {
                        Some(format!("{name} is not in {map}"))
                    }
                    _ => None,
                };
                Then::Stop
            }
        }
    }

    /// Why a frontend is refused.
    fn refusal(&self, map: SetName, packet: &Packet) -> Option<&'static str> {
        let protocol = self.target.protocol;
        let frontend = match (map, &packet.destination) {
            (SetName::Refused, Destination::Address(ip)) => {
                Frontend::Address { ip: *ip, protocol, port: packet.port }
            }
            (SetName::RefusedNodePorts, _) => Frontend::NodePort { protocol, port: packet.port },
            _ => return None,
        };
        why_refused(&self.place.plan.lookup(frontend)?)
    }

    fn translate(&self, fields: &[Field], map: SetName, packet: &Packet, told: &mut Told) -> Then {
        let Some(values) = self.values(fields, map, packet) else { return Then::Stop };
        let endpoints: Vec<Endpoint> =
            values.found.iter().filter_map(|value| self.endpoint(*value)).collect();
        if endpoints.is_empty() {
            return Then::Stop;
        }
        let missing = values.missing();
        told.said.push(match endpoints.as_slice() {
            [only] => format!("the destination becomes {only}, the only endpoint in {map}{missing}"),
            _ if matches!(fields, [_, Field::Random(_)]) => {
                format!(
                    "the destination becomes one of {} in {map} at random{missing}",
                    words::count(endpoints.len(), "endpoint")
                )
            }
            _ => format!("the destination becomes that endpoint, by {map}{missing}"),
        });
        Then::End(Flow::Translated(endpoints))
    }

    fn endpoint(&self, value: Key) -> Option<Endpoint> {
        let (ip, port) = value.as_slice().split_at_checked(self.family.address_len())?;
        Some(Endpoint { ip: address(ip)?, port: u16::from_be_bytes([*port.first()?, *port.get(1)?]) })
    }

    /// What a map gives for a key, which may be one of several.
    fn values(&self, fields: &[Field], map: SetName, packet: &Packet) -> Option<Values> {
        let bases: Vec<IpAddr> = match &packet.destination {
            Destination::Address(ip) => vec![*ip],
            Destination::Numbers(numbers) => numbers.clone(),
        };
        let keys: Vec<Key> = match fields {
            [Field::Destination, Field::Random(below)] => {
                bases.iter().flat_map(|ip| (0..*below).map(|index| Key::new().ip(*ip).index(index))).collect()
            }
            [Field::Destination] => bases.iter().map(|ip| Key::new().ip(*ip)).collect(),
            other => vec![self.key(other, packet)?],
        };
        let value = |key: &Key| match self.table.get(map, *key)?.value {
            Value::Data(value) => Some(value),
            Value::None | Value::Verdict(_) => None,
        };
        let found: Vec<Key> = keys.iter().filter_map(value).collect();
        let lacking = keys.len() - found.len();
        let key = match keys.as_slice() {
            [only] => Some(*only),
            _ => None,
        };
        Some(Values { found, lacking, key })
    }

    /// Address, protocol and port.
    fn frontend(&self, packet: &Packet) -> Key {
        let ip = match &packet.destination {
            Destination::Address(ip) => *ip,
            Destination::Numbers(_) => self.target.address,
        };
        Key::new().ip(ip).protocol(self.target.protocol).port(packet.port)
    }

    /// The key of fields; none where one of them is not known.
    fn key(&self, fields: &[Field], packet: &Packet) -> Option<Key> {
        fields.iter().try_fold(Key::new(), |key, field| {
            Some(match field {
                Field::Source => key.ip(self.sender.address?),
                Field::Destination => match (&packet.destination, fields) {
                    (Destination::Address(ip), _) => key.ip(*ip),
                    (Destination::Numbers(numbers), _) => match numbers.as_slice() {
                        [number] => key.ip(*number),
                        _ => return None,
                    },
                },
                Field::Protocol => key.protocol(self.target.protocol),
                Field::Port => key.port(packet.port),
                Field::Service | Field::Random(_) => return None,
            })
        })
    }
}

/// What a map gave.
#[derive(Debug)]
struct Values {
    found: Vec<Key>,
    /// Keys for which it has nothing.
    lacking: usize,
    /// If there was but one.
    key: Option<Key>,
}

impl Values {
    fn missing(&self) -> String {
        match self.lacking {
            0 => String::new(),
            lacking => {
                format!("; {} more should be there, and a packet that draws such a one is dropped", lacking)
            }
        }
    }
}

fn when(matches: bool) -> Then {
    if matches { Then::Next } else { Then::Stop }
}

fn verdict(flow: &Flow) -> &'static str {
    match flow {
        Flow::Return => "untouched",
        Flow::Drop => "dropped",
        Flow::Reject => "rejected",
        Flow::Translated(_) => "forwarded",
    }
}
