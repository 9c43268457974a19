//! What each part of a rule makes of a packet.
//!
//! Owns: how a part is judged, and the words for it. In: a part, a packet. Out: what becomes of the rule; steps.

use std::net::IpAddr;

use ipnet::IpNet;
use keelson_proxy::{
    explain::Target,
    model::{Endpoint, Frontend},
};

use super::{Flow, Packet, Then, Told, Walk};
use crate::{
    chain::Chain,
    element::{Key, Number, SetName, Value},
    explain::{
        frontend::{no_answer, why_refused},
        sender::Origin,
        table::address,
        words,
    },
    ruleset::{Field, Part, Rule},
};

impl Walk<'_> {
    pub(super) fn part(&self, part: &Part, rule: &Rule, packet: &mut Packet, told: &mut Told) -> Then {
        match part {
            // It is the first packet of a connection.
            Part::New => Then::Next,
            Part::Established => Then::Stop,
            Part::Protocol(protocol) => when(*protocol == self.target.protocol),
            Part::Translated => when(packet.translated),
            Part::Untranslated => when(!packet.translated),
            Part::Marked(_) => when(packet.marked),
            Part::LocalSource => self.local_source(told),
            Part::LocalDestination => self.local_destination(packet, told),
            Part::Address { field, net, inside } => self.address(*field, net, *inside, rule, packet, told),
            Part::Interface { name, prefix, is } => {
                let by = format!("on interface {name}{}", if *prefix { "*" } else { "" });
                self.pod(
                    self.sender.origin == Origin::Pod,
                    *is,
                    &format!("is {by}"),
                    &format!("is not {by}"),
                    rule,
                    told,
                )
            }
            Part::In { fields, set, inside } => self.is_in(fields, *set, *inside, packet, told),
            Part::Mark(_) => {
                packet.marked = true;
                told.said.push("marked for masquerading".into());
                Then::Next
            }
            Part::ToggleMark(_) | Part::Offload => Then::Next,
            Part::Masquerade => {
                packet.masqueraded = true;
                Then::End(Flow::Return)
            }
            Part::SetNumber(fields, map) => self.set_number(fields, *map, packet, told),
            // Comes only where the kernel remembers a client, which is told as a choice.
            Part::SetNumberToService | Part::Forget { .. } => Then::Next,
            Part::Remember { seconds, .. } => {
                told.said
                    .push(format!("session affinity keeps this endpoint for the client for {seconds} s"));
                Then::Next
            }
            Part::CountsCluster => when(packet.numbers.iter().any(|number| number.counts_cluster())),
            Part::HasNumber => when(!packet.numbers.is_empty()),
            Part::ClearNumber => {
                packet.numbers = Vec::new();
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
            Part::Return => Then::End(Flow::Return),
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
            told.not = Some("the source is not an address of the node".into());
        }
        when(local)
    }

    fn local_destination(&self, packet: &Packet, told: &mut Told) -> Then {
        told.not = self.node_port_elsewhere(packet.destination);
        when(self.place.is_local(packet.destination))
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
        net: &IpNet,
        inside: bool,
        rule: &Rule,
        packet: &Packet,
        told: &mut Told,
    ) -> Then {
        if field != Field::Source {
            told.not = self.node_port_elsewhere(packet.destination);
            return when(net.contains(&packet.destination) == inside);
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
            (true, true) => format!("the source {yes}, so it is a pod: not marked for masquerading"),
            (true, false) => format!("the source {yes}, so it is a pod"),
            (false, _) => format!("the source {no}, so it is not a pod"),
        };
        if is == wanted {
            told.said.push(found)
        } else {
            told.not = Some(found)
        }
        when(is == wanted)
    }

    fn is_in(&self, fields: &[Field], set: SetName, inside: bool, packet: &Packet, told: &mut Told) -> Then {
        // Fields that are not known are those of a hairpin, which is told with the endpoints.
        let Some(key) = self.key(fields, packet) else { return Then::Stop };
        let found = self.table.get(set, key).is_some();
        if !found && set == SetName::NodePortAddresses {
            told.not = self.node_port_elsewhere(packet.destination);
        }
        if found == inside && set != SetName::Hairpin {
            told.said.push(format!("{} is in {set}", words::key(self.family, set, key)));
        }
        when(found == inside)
    }

    /// Whether source ranges let the sender in.
    pub(super) fn sources(&self, chain: Chain, packet: &mut Packet) -> Flow {
        let ranges = self.table.ranges(self.target);
        let holding: Vec<IpNet> = match self.sender.address {
            Some(address) => ranges.iter().copied().filter(|range| range.contains(&address)).collect(),
            None if self.sender.admitted => ranges.clone(),
            None => Vec::new(),
        };
        let set = SetName::SourceRanges;
        let (flow, step) = if ranges.is_empty() {
            (Flow::Drop, format!("{set} allow no source, dropped"))
        } else if holding.is_empty() {
            let named = words::ranges(&ranges);
            (Flow::Drop, format!("{set} do not allow the source (only {named}), dropped"))
        } else {
            (Flow::Return, format!("{set} allow the source ({})", words::ranges(&holding)))
        };
        packet.steps.push(format!("{chain}: {step}"));
        flow
    }

    fn set_number(&self, fields: &[Field], map: SetName, packet: &mut Packet, told: &mut Told) -> Then {
        if map.is_dynamic() {
            told.not = Some(format!(
                "a client in {map} keeps its endpoint if it is still selectable; a new client gets one now"
            ));
            return Then::Stop;
        }
        let Some(values) = self.values(fields, map, packet) else { return Then::Stop };
        let numbers: Vec<Number> = values.found.iter().filter_map(|value| Number::of(*value)).collect();
        if numbers.is_empty() {
            return Then::Stop;
        }
        told.said.push(match (&values.key, numbers.as_slice()) {
            (Some(key), [number]) => {
                format!("{} is in {map}: number {number}", words::key(self.family, map, *key))
            }
            _ => {
                format!(
                    "random selection from {} in {map}{}",
                    words::count(numbers.len(), "endpoint number"),
                    values.missing()
                )
            }
        });
        packet.numbers = numbers;
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
                        "{name} is not in {map}: no endpoint on this node accepts traffic from outside"
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
        let frontend = match map {
            SetName::Refused => Frontend::Address { ip: packet.destination, protocol, port: packet.port },
            SetName::RefusedNodePorts => Frontend::NodePort { protocol, port: packet.port },
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
                    "the destination becomes a random one of {} in {map}{missing}",
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
}

fn when(matches: bool) -> Then {
    if matches { Then::Next } else { Then::Stop }
}
