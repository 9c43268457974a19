//! Netlink messages of conntrack.
//!
//! Owns: encoding of requests and decoding of entries (linux/netfilter/nfnetlink_conntrack.h). In and out: [`Flow`]s
//! and messages.

use netlink_packet_core::{DefaultNla, NLA_F_NESTED, Nla as _};
use netlink_packet_netfilter::{
    NetfilterMessageInner, NetfilterSubsystem,
    conntrack::{
        ConntrackAttribute, ConntrackMessage, ConntrackMessageType, IPTuple, ProtoTuple, Protocol,
        Tuple as TupleAttribute,
    },
};

use super::{Flow, Tuple};

const CTA_ID: u16 = 12;
const CTA_ZONE: u16 = 18;
const CTA_FILTER: u16 = 25;
const CTA_TUPLE_ZONE: u16 = 3;
const CTA_FILTER_ORIG_FLAGS: u16 = 1;
/// The dump contains entries whose CTA_TUPLE_ORIG has the protocol. Not in the kernel's exported headers, but what
/// libnetfilter_conntrack sends. Since Linux 5.8; older kernels ignore it and dump everything.
const CTA_FILTER_F_CTA_PROTO_NUM: u32 = 1 << 3;

/// Requests every UDP entry of the family in the message's header.
pub(super) fn dump_udp() -> NetfilterMessageInner {
    let protocol = TupleAttribute::Proto(vec![ProtoTuple::Protocol(Protocol::Udp)]);
    let tuple = ConntrackAttribute::CtaTupleOrig(vec![protocol]);
    let mut value = vec![0; tuple.value_len()];
    tuple.emit_value(&mut value);
    let mut flags = Vec::with_capacity(8);
    flags.extend(8_u16.to_ne_bytes());
    flags.extend(CTA_FILTER_ORIG_FLAGS.to_ne_bytes());
    flags.extend(CTA_FILTER_F_CTA_PROTO_NUM.to_ne_bytes());
    // The kernel requires NLA_F_NESTED at CTA_FILTER, which ConntrackAttribute::Other would not set.
    NetfilterMessageInner::Other {
        subsys: NetfilterSubsystem::Conntrack,
        message_type: ConntrackMessageType::Get.into(),
        attributes: vec![
            DefaultNla::new(tuple.kind() | NLA_F_NESTED, value),
            DefaultNla::new(CTA_FILTER | NLA_F_NESTED, flags),
        ],
    }
}

pub(super) fn dump_all() -> NetfilterMessageInner {
    ConntrackMessage::Get(Vec::new()).into()
}

/// Deletes the entry with this original tuple, zone and ID. The tuple is always set: without one the kernel would
/// delete everything.
pub(super) fn delete(flow: &Flow) -> NetfilterMessageInner {
    let mut attributes = vec![ConntrackAttribute::CtaTupleOrig(tuple(&flow.original, flow.protocol))];
    if let Some(zone) = flow.zone {
        attributes.push(ConntrackAttribute::Other(DefaultNla::new(CTA_ZONE, zone.to_be_bytes().to_vec())));
    }
    if let Some(id) = flow.id {
        attributes.push(ConntrackAttribute::Other(DefaultNla::new(CTA_ID, id.to_be_bytes().to_vec())));
    }
    ConntrackMessage::Delete(attributes).into()
}

fn tuple(tuple: &Tuple, protocol: u8) -> Vec<TupleAttribute> {
    let mut attributes = vec![
        TupleAttribute::Ip(vec![
            IPTuple::SourceAddress(tuple.source),
            IPTuple::DestinationAddress(tuple.destination),
        ]),
        TupleAttribute::Proto(vec![
            ProtoTuple::Protocol(protocol.into()),
            ProtoTuple::SourcePort(tuple.source_port),
            ProtoTuple::DestinationPort(tuple.destination_port),
        ]),
    ];
    if let Some(zone) = tuple.zone {
        let zone = DefaultNla::new(CTA_TUPLE_ZONE, zone.to_be_bytes().to_vec());
        attributes.push(TupleAttribute::Other(zone));
    }
    attributes
}

/// Decodes an entry; `None`: it has no ports, such as ICMP.
pub(super) fn flow(attributes: &[ConntrackAttribute]) -> Option<Flow> {
    let (mut original, mut reply, mut zone, mut id) = (None, None, None, None);
    for attribute in attributes {
        match attribute {
            ConntrackAttribute::CtaTupleOrig(parts) => original = read_tuple(parts),
            ConntrackAttribute::CtaTupleReply(parts) => reply = read_tuple(parts),
            ConntrackAttribute::Other(other) if other.kind() == CTA_ZONE => {
                zone = be(other).map(u16::from_be_bytes)
            }
            ConntrackAttribute::Other(other) if other.kind() == CTA_ID => {
                id = be(other).map(u32::from_be_bytes)
            }
            _ => {}
        }
    }
    let ((original, protocol), (reply, _)) = (original?, reply?);
    Some(Flow { protocol, original, reply, zone, id })
}

fn read_tuple(parts: &[TupleAttribute]) -> Option<(Tuple, u8)> {
    let (mut source, mut destination, mut zone) = (None, None, None);
    let (mut protocol, mut source_port, mut destination_port) = (None, None, None);
    for part in parts {
        match part {
            TupleAttribute::Ip(addresses) => {
                for address in addresses {
                    match address {
                        IPTuple::SourceAddress(address) => source = Some(*address),
                        IPTuple::DestinationAddress(address) => destination = Some(*address),
                        _ => {}
                    }
                }
            }
            TupleAttribute::Proto(numbers) => {
                for number in numbers {
                    match number {
                        ProtoTuple::Protocol(number) => protocol = Some(u8::from(*number)),
                        ProtoTuple::SourcePort(port) => source_port = Some(*port),
                        ProtoTuple::DestinationPort(port) => destination_port = Some(*port),
                        _ => {}
                    }
                }
            }
            TupleAttribute::Other(other) if other.kind() == CTA_TUPLE_ZONE => {
                zone = be(other).map(u16::from_be_bytes)
            }
            _ => {}
        }
    }
    let tuple = Tuple {
        source: source?,
        destination: destination?,
        source_port: source_port?,
        destination_port: destination_port?,
        zone,
    };
    Some((tuple, protocol?))
}

/// The bytes of an attribute; `None` if the length is wrong.
fn be<const N: usize>(attribute: &DefaultNla) -> Option<[u8; N]> {
    let mut bytes = [0; N];
    (attribute.value_len() == N).then(|| attribute.emit_value(&mut bytes))?;
    Some(bytes)
}
