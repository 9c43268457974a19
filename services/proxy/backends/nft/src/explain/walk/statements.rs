//! Evaluates the statements of a rule.
//!
//! Owns: the effect of a statement on a packet, and the text for it. In: a statement, a packet. Out: whether the rule
//! continues; steps.

use std::net::IpAddr;

use ipnet::IpNet;
use keelson_proxy::{
    explain::{Target, source::Origin},
    model::{Endpoint, Frontend},
};

use super::{Flow, Packet, RuleNotes, StatementResult, Walk};
use crate::{
    chain::Chain,
    element::{Key, Number, SetName, Value},
    explain::{
        elements::address,
        format,
        frontend::{why_node_port_unserved, why_refused},
    },
    ruleset::{Field, Rule, Statement},
};

impl Walk<'_> {
    pub(super) fn statement(
        &self,
        statement: &Statement,
        rule: &Rule,
        packet: &mut Packet,
        notes: &mut RuleNotes,
    ) -> StatementResult {
        match statement {
            // The packet is the first of its connection.
            Statement::New => StatementResult::Continue,
            Statement::Established => StatementResult::NoMatch,
            Statement::Protocol(protocol) => when(*protocol == self.target.protocol),
            Statement::Translated => when(packet.translated),
            Statement::Untranslated => when(!packet.translated),
            Statement::Marked(_) => when(packet.marked),
            Statement::LocalSource => self.local_source(notes),
            Statement::LocalDestination => self.local_destination(packet, notes),
            Statement::RemoteDestination => when(!self.context.is_local(packet.destination)),
            Statement::Address { field, net, inside } => {
                self.address(*field, net, *inside, rule, packet, notes)
            }
            Statement::Interface { name, prefix, is } => {
                let by = format!("on interface {name}{}", if *prefix { "*" } else { "" });
                self.pod(
                    self.source.origin == Origin::Pod,
                    *is,
                    &format!("is {by}"),
                    &format!("is not {by}"),
                    rule,
                    notes,
                )
            }
            Statement::In { fields, set, inside } => self.is_in(fields, *set, *inside, packet, notes),
            Statement::Mark(_) => {
                packet.marked = true;
                notes.matched.push("marked for masquerading".into());
                StatementResult::Continue
            }
            Statement::ToggleMark(_) | Statement::Untrack | Statement::Offload => StatementResult::Continue,
            Statement::Masquerade => {
                packet.masqueraded = true;
                StatementResult::End(Flow::Return)
            }
            Statement::SetNumber(fields, map) => self.set_number(fields, *map, packet, notes),
            // Reached only if the kernel remembers a client, which is described as a choice.
            Statement::SetNumberToService | Statement::Forget { .. } => StatementResult::Continue,
            Statement::Remember { seconds, .. } => {
                notes
                    .matched
                    .push(format!("session affinity keeps this endpoint for the client for {seconds} s"));
                StatementResult::Continue
            }
            Statement::CountsCluster => when(packet.numbers.iter().any(|number| number.counts_cluster())),
            Statement::HasNumber => when(!packet.numbers.is_empty()),
            Statement::ClearNumber => {
                packet.numbers = Vec::new();
                StatementResult::Continue
            }
            Statement::Choose(fields, map) => self.choose(fields, *map, packet, notes),
            Statement::Translate(fields, map) => self.translate(fields, *map, packet, notes),
            Statement::Reject => {
                notes.matched.push("rejected with ICMP port unreachable".into());
                StatementResult::End(Flow::Reject)
            }
            Statement::Drop => {
                notes.matched.push("dropped".into());
                StatementResult::End(Flow::Drop)
            }
            Statement::Return => StatementResult::End(Flow::Return),
            Statement::Goto(_) | Statement::Jump(_) => StatementResult::Continue,
        }
    }

    fn local_source(&self, notes: &mut RuleNotes) -> StatementResult {
        let local = match self.source.address {
            Some(address) => self.context.is_local(address),
            None => self.source.origin == Origin::Node,
        };
        if local {
            notes.matched.push("the source is an address of the node".into());
        } else {
            notes.unmatched = Some("the source is not an address of the node".into());
        }
        when(local)
    }

    fn local_destination(&self, packet: &Packet, notes: &mut RuleNotes) -> StatementResult {
        notes.unmatched = self.node_port_elsewhere(packet.destination);
        when(self.context.is_local(packet.destination))
    }

    /// Why an existing node port is not served at this address.
    fn node_port_elsewhere(&self, address: IpAddr) -> Option<String> {
        let Target { protocol, port, .. } = self.target;
        let key = Key::new().protocol(protocol).port(port);
        let map = [SetName::NodePorts, SetName::RefusedNodePorts]
            .into_iter()
            .find(|map| self.elements.get(*map, key).is_some())?;
        let why = why_node_port_unserved(self.context, address)?;
        Some(format!("{} is in {map}, but {why}", format::key(self.family, map, key)))
    }

    fn address(
        &self,
        field: Field,
        net: &IpNet,
        inside: bool,
        rule: &Rule,
        packet: &Packet,
        notes: &mut RuleNotes,
    ) -> StatementResult {
        if field != Field::Source {
            notes.unmatched = self.node_port_elsewhere(packet.destination);
            return when(net.contains(&packet.destination) == inside);
        }
        let is_in = match self.source.address {
            Some(address) => net.contains(&address),
            None => self.source.origin == Origin::Pod,
        };
        self.pod(is_in, inside, &format!("is in {net}"), &format!("is not in {net}"), rule, notes)
    }

    /// Whether the packet matches a rule for traffic from pods, or from other sources.
    fn pod(
        &self,
        is: bool,
        wanted: bool,
        yes: &str,
        no: &str,
        rule: &Rule,
        notes: &mut RuleNotes,
    ) -> StatementResult {
        let marks = rule.statements.iter().any(|statement| matches!(statement, Statement::Mark(_)));
        let found = match (is, marks) {
            (true, true) => format!("the source {yes}, so it is a pod: not marked for masquerading"),
            (true, false) => format!("the source {yes}, so it is a pod"),
            (false, _) => format!("the source {no}, so it is not a pod"),
        };
        if is == wanted {
            notes.matched.push(found)
        } else {
            notes.unmatched = Some(found)
        }
        when(is == wanted)
    }

    fn is_in(
        &self,
        fields: &[Field],
        set: SetName,
        inside: bool,
        packet: &Packet,
        notes: &mut RuleNotes,
    ) -> StatementResult {
        // Unknown fields are those of a hairpin, which is described with the endpoints.
        let Some(key) = self.key(fields, packet) else { return StatementResult::NoMatch };
        let found = self.elements.get(set, key).is_some();
        if !found && set == SetName::NodePortAddresses {
            notes.unmatched = self.node_port_elsewhere(packet.destination);
        }
        if found == inside && set != SetName::Hairpin {
            notes.matched.push(format!("{} is in {set}", format::key(self.family, set, key)));
        }
        when(found == inside)
    }

    /// Whether source ranges admit the source.
    pub(super) fn sources(&self, chain: Chain, packet: &mut Packet) -> Flow {
        let ranges = self.elements.ranges(self.target);
        let holding: Vec<IpNet> = match self.source.address {
            Some(address) => ranges.iter().copied().filter(|range| range.contains(&address)).collect(),
            None if self.source.admitted => ranges.clone(),
            None => Vec::new(),
        };
        let set = SetName::SourceRanges;
        let (flow, step) = if ranges.is_empty() {
            (Flow::Drop, format!("{set} allow no source, dropped"))
        } else if holding.is_empty() {
            let named = format::ranges(&ranges);
            (Flow::Drop, format!("{set} do not allow the source (only {named}), dropped"))
        } else {
            (Flow::Return, format!("{set} allow the source ({})", format::ranges(&holding)))
        };
        packet.steps.push(format!("{chain}: {step}"));
        flow
    }

    fn set_number(
        &self,
        fields: &[Field],
        map: SetName,
        packet: &mut Packet,
        notes: &mut RuleNotes,
    ) -> StatementResult {
        if map.is_dynamic() {
            notes.unmatched = Some(format!(
                "a client in {map} keeps its endpoint if it is still selectable; a new client gets one now"
            ));
            return StatementResult::NoMatch;
        }
        let Some(values) = self.values(fields, map, packet) else { return StatementResult::NoMatch };
        let numbers: Vec<Number> = values.found.iter().filter_map(|value| Number::of(*value)).collect();
        if numbers.is_empty() {
            return StatementResult::NoMatch;
        }
        notes.matched.push(match (&values.key, numbers.as_slice()) {
            (Some(key), [number]) => {
                format!("{} is in {map}: number {number}", format::key(self.family, map, *key))
            }
            _ => {
                format!(
                    "random selection from {} in {map}{}",
                    format::count(numbers.len(), "endpoint number"),
                    values.missing()
                )
            }
        });
        packet.numbers = numbers;
        StatementResult::Continue
    }

    fn choose(
        &self,
        fields: &[Field],
        map: SetName,
        packet: &Packet,
        notes: &mut RuleNotes,
    ) -> StatementResult {
        let Some(key) = self.key(fields, packet) else { return StatementResult::NoMatch };
        let name = format::key(self.family, map, key);
        match self.elements.get(map, key).map(|element| element.value) {
            Some(Value::Verdict(verdict)) => {
                let policy =
                    if map == SetName::ExternalPolicy { " (externalTrafficPolicy Local)" } else { "" };
                let why = self.refusal(map, packet).map(|why| format!(": {why}")).unwrap_or_default();
                notes.matched.push(format!("{name} is in {map}: {}{policy}{why}", format::verdict(verdict)));
                StatementResult::Continue
            }
            _ => {
                notes.unmatched = match map {
                    SetName::ExternalPolicy => {
                        Some(format!("{name} is not in {map} (externalTrafficPolicy Cluster)"))
                    }
                    SetName::LocalChoice => Some(format!(
                        "{name} is not in {map}: no endpoint on this node accepts traffic from outside"
                    )),
                    SetName::InternalChoice | SetName::ExternalChoice => {
                        Some(format!("{name} is not in {map}"))
                    }
                    _ => None,
                };
                StatementResult::NoMatch
            }
        }
    }

    fn refusal(&self, map: SetName, packet: &Packet) -> Option<&'static str> {
        let protocol = self.target.protocol;
        let frontend = match map {
            SetName::Refused => Frontend::Address { ip: packet.destination, protocol, port: packet.port },
            SetName::RefusedNodePorts => Frontend::NodePort { protocol, port: packet.port },
            _ => return None,
        };
        why_refused(&self.context.plan.lookup(frontend)?)
    }

    fn translate(
        &self,
        fields: &[Field],
        map: SetName,
        packet: &Packet,
        notes: &mut RuleNotes,
    ) -> StatementResult {
        let Some(values) = self.values(fields, map, packet) else { return StatementResult::NoMatch };
        let endpoints: Vec<Endpoint> =
            values.found.iter().filter_map(|value| self.endpoint(*value)).collect();
        if endpoints.is_empty() {
            return StatementResult::NoMatch;
        }
        let missing = values.missing();
        notes.matched.push(match endpoints.as_slice() {
            [only] => format!("the destination becomes {only}, the only endpoint in {map}{missing}"),
            _ if matches!(fields, [_, Field::Random(_)]) => {
                format!(
                    "the destination becomes a random one of {} in {map}{missing}",
                    format::count(endpoints.len(), "endpoint")
                )
            }
            _ => format!("the destination becomes that endpoint, by {map}{missing}"),
        });
        StatementResult::End(Flow::Translated(endpoints))
    }

    fn endpoint(&self, value: Key) -> Option<Endpoint> {
        let (ip, port) = value.as_slice().split_at_checked(self.family.address_len())?;
        Some(Endpoint { ip: address(ip)?, port: u16::from_be_bytes([*port.first()?, *port.get(1)?]) })
    }
}

fn when(matches: bool) -> StatementResult {
    if matches { StatementResult::Continue } else { StatementResult::NoMatch }
}
