//! Definitions of the sets and maps.
//!
//! Owns: [`SetDefinition`], the fields of keys and values, and their description for nft. In and out: values.

use keelson_proxy::model::Family;
use netlink_packet_netfilter::nftables::{SetAttribute, SetDescription, SetFlags};

use crate::element::SetName;

/// Maximum number of clients in each affinity map. Together they hold 1,048,576: about 100 MB. Further new clients get
/// an endpoint, but possibly another one next time. kube-proxy has a set of 65,535 for each endpoint.
const AFFINITY_SIZE: u32 = 131_072;

/// A set or map as sent to the kernel.
///
/// An element of a set of intervals (`service-cidrs`) is sent as two elements in one message: one whose key is the
/// first address, and one with the flag `NFT_SET_ELEM_INTERVAL_END` whose key is the address *after* the last. The
/// second is omitted if the last address is the highest. The kernel lists intervals in the same form; if nft wrote
/// them, there may be an end at the lowest address, which ends nothing. Intervals must not overlap, and two adjacent
/// ones share a key: the end of one is the start of the other.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SetDefinition {
    pub flags: SetFlags,
    /// nft's type of keys (`NFTA_SET_KEY_TYPE`).
    pub key_type: u32,
    /// In bytes, every field padded to 4.
    pub key_len: u32,
    /// `None` for sets.
    pub data: Option<SetData>,
    /// Maximum number of elements; `None`: no limit.
    pub size: Option<u32>,
    /// Further information for nft to display the elements.
    pub userdata: Vec<u8>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SetData {
    Verdict,
    Data {
        /// nft's type of values (`NFTA_SET_DATA_TYPE`).
        data_type: u32,
        /// In bytes, every field padded to 4.
        len: u32,
    },
}

impl SetDefinition {
    /// As attributes of `NFT_MSG_NEWSET`, except table, name and id.
    #[must_use]
    pub fn attributes(&self) -> Vec<SetAttribute> {
        /// `NFT_DATA_VERDICT`.
        const VERDICT: u32 = 0xffff_ff00;
        let mut attributes = vec![
            SetAttribute::Flags(self.flags),
            SetAttribute::KeyType(self.key_type),
            SetAttribute::KeyLen(self.key_len),
        ];
        match self.data {
            None => {}
            Some(SetData::Verdict) => {
                attributes.extend([SetAttribute::DataType(VERDICT), SetAttribute::DataLen(0)])
            }
            Some(SetData::Data { data_type, len }) => {
                attributes.extend([SetAttribute::DataType(data_type), SetAttribute::DataLen(len)]);
            }
        }
        attributes.extend(self.size.map(|size| SetAttribute::Description(vec![SetDescription::Size(size)])));
        attributes.push(SetAttribute::UserData(self.userdata.clone()));
        attributes
    }
}

#[must_use]
pub fn definition(family: Family, set: SetName) -> SetDefinition {
    let (key, data) = (key_fields(set), data_fields(set));
    let mut flags = SetFlags::empty();
    flags.set(SetFlags::Map, data.is_some());
    flags.set(SetFlags::Timeout | SetFlags::Eval, set.is_dynamic());
    flags.set(SetFlags::Interval, set.is_interval());
    SetDefinition {
        flags,
        key_type: type_of(family, key),
        key_len: len_of(family, key),
        data: data.map(|data| match data {
            DataFields::Verdict => SetData::Verdict,
            DataFields::Data(fields) => {
                SetData::Data { data_type: type_of(family, fields), len: len_of(family, fields) }
            }
        }),
        size: set.is_dynamic().then_some(AFFINITY_SIZE),
        userdata: userdata(family, key, data),
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum FieldType {
    Address,
    Number,
    Protocol,
    Port,
    Index,
}

impl FieldType {
    /// In bytes, without padding.
    pub(super) const fn len(self, family: Family) -> u32 {
        match self {
            Self::Address => family.address_len() as u32,
            Self::Protocol => 1,
            Self::Port => 2,
            Self::Index | Self::Number => 4,
        }
    }

    /// In bytes, with padding in keys.
    pub(super) const fn padded_len(self, family: Family) -> u32 {
        self.len(family).next_multiple_of(4)
    }

    /// nft's number of the type (6 bits): integer, ipv4_addr, ipv6_addr, inet_proto, inet_service, classid.
    const fn number(self, family: Family) -> u32 {
        match (self, family) {
            (Self::Index, _) => 4,
            (Self::Address, Family::V4) => 7,
            (Self::Address, Family::V6) => 8,
            (Self::Protocol, _) => 12,
            (Self::Port, _) => 13,
            (Self::Number, _) => 23,
        }
    }

    const fn name(self, family: Family) -> &'static str {
        match (self, family) {
            (Self::Index, _) => "integer",
            (Self::Address, Family::V4) => "ipv4_addr",
            (Self::Address, Family::V6) => "ipv6_addr",
            (Self::Protocol, _) => "inet_proto",
            (Self::Port, _) => "inet_service",
            (Self::Number, _) => "classid",
        }
    }

    /// An expression of the type, for nft's `typeof`. The modulus does not matter.
    const fn example(self, family: Family) -> &'static str {
        match (self, family) {
            (Self::Index, _) => "numgen random mod 2",
            (Self::Address, Family::V4) => "ip daddr",
            (Self::Address, Family::V6) => "ip6 daddr",
            (Self::Protocol, _) => "meta l4proto",
            (Self::Port, _) => "th dport",
            (Self::Number, _) => "meta priority",
        }
    }

    /// The same in the form that nft stores with a set: the kind of expression, then its parameters.
    fn example_userdata(self, family: Family) -> Vec<u8> {
        const PAYLOAD: u32 = 7;
        const META: u32 = 9;
        const PRIORITY: u32 = 2;
        const NUMGEN: u32 = 23;
        // Header, and field of it.
        let payload = |header: u32, field: u32| {
            [tlv_number(0, PAYLOAD), tlv(1, &[tlv_number(0, header), tlv_number(1, field)].concat())]
        };
        match (self, family) {
            (Self::Address, Family::V4) => payload(12, 12),
            (Self::Address, Family::V6) => payload(13, 9),
            (Self::Port, _) => payload(11, 2),
            (Self::Number, _) => [tlv_number(0, META), tlv(1, &tlv_number(0, PRIORITY))],
            // Not used in maps that are described by examples.
            (Self::Protocol, _) => [Vec::new(), Vec::new()],
            (Self::Index, _) => {
                let random = [tlv_number(0, 1), tlv_number(1, 2), tlv_number(2, 0)].concat();
                [tlv_number(0, NUMGEN), tlv(1, &random)]
            }
        }
        .concat()
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum DataFields {
    Verdict,
    Data(&'static [FieldType]),
}

pub(super) const fn key_fields(set: SetName) -> &'static [FieldType] {
    use FieldType::{Address, Index, Number, Port, Protocol};
    match set {
        SetName::ClusterIpPorts | SetName::ExternalPorts | SetName::Refused | SetName::Filtered => {
            &[Address, Protocol, Port]
        }
        SetName::NodePorts | SetName::RefusedNodePorts => &[Protocol, Port],
        SetName::NodePortAddresses | SetName::ClusterIps | SetName::ServiceCidrs => &[Address],
        SetName::Counts
        | SetName::InternalChoice
        | SetName::ExternalPolicy
        | SetName::ExternalChoice
        | SetName::LocalChoice
        | SetName::AffinityEndpoints
        | SetName::LocalAffinityEndpoints => &[Number],
        SetName::Slots | SetName::LocalSlots | SetName::AffinitySlots | SetName::LocalAffinitySlots => {
            &[Number, Index]
        }
        SetName::Affinity0
        | SetName::Affinity1
        | SetName::Affinity2
        | SetName::Affinity3
        | SetName::Affinity4
        | SetName::Affinity5
        | SetName::Affinity6
        | SetName::Affinity7 => &[Address, Number],
        SetName::Hairpin => &[Address, Address, Protocol, Port],
        SetName::SourceRanges => &[Address, Port, Address, Index],
    }
}

/// `None` for sets.
pub(super) const fn data_fields(set: SetName) -> Option<DataFields> {
    use FieldType::{Address, Number, Port};
    match set {
        SetName::ClusterIpPorts
        | SetName::ExternalPorts
        | SetName::NodePorts
        | SetName::AffinitySlots
        | SetName::LocalAffinitySlots
        | SetName::Affinity0
        | SetName::Affinity1
        | SetName::Affinity2
        | SetName::Affinity3
        | SetName::Affinity4
        | SetName::Affinity5
        | SetName::Affinity6
        | SetName::Affinity7 => Some(DataFields::Data(&[Number])),
        SetName::Slots
        | SetName::LocalSlots
        | SetName::AffinityEndpoints
        | SetName::LocalAffinityEndpoints => Some(DataFields::Data(&[Address, Port])),
        SetName::Counts
        | SetName::InternalChoice
        | SetName::ExternalPolicy
        | SetName::ExternalChoice
        | SetName::LocalChoice
        | SetName::Refused
        | SetName::RefusedNodePorts
        | SetName::Filtered => Some(DataFields::Verdict),
        SetName::NodePortAddresses
        | SetName::Hairpin
        | SetName::ClusterIps
        | SetName::ServiceCidrs
        | SetName::SourceRanges => None,
    }
}

/// `type …` or `typeof …` of a set, in nft's language. Integers have no name for `type`.
pub(super) fn type_text(family: Family, set: SetName) -> String {
    let key = key_fields(set);
    let by_example = key.contains(&FieldType::Index);
    let names = |fields: &[FieldType]| {
        let name = |field: &FieldType| if by_example { field.example(family) } else { field.name(family) };
        fields.iter().map(name).collect::<Vec<_>>().join(" . ")
    };
    let word = if by_example { "typeof" } else { "type" };
    match data_fields(set) {
        None => format!("{word} {}", names(key)),
        Some(DataFields::Verdict) => format!("{word} {} : verdict", names(key)),
        Some(DataFields::Data(data)) => format!("{word} {} : {}", names(key), names(data)),
    }
}

/// The type of a concatenation: 6 bits for each field.
fn type_of(family: Family, fields: &[FieldType]) -> u32 {
    fields.iter().fold(0, |number, field| number << 6 | field.number(family))
}

fn len_of(family: Family, fields: &[FieldType]) -> u32 {
    fields.iter().map(|field| field.padded_len(family)).sum()
}

fn tlv(kind: u8, value: &[u8]) -> Vec<u8> {
    let mut bytes = vec![kind, value.len() as u8];
    bytes.extend(value);
    bytes
}

fn tlv_number(kind: u8, value: u32) -> Vec<u8> {
    tlv(kind, &value.to_ne_bytes())
}

/// nft's userdata of a set (`NFTNL_UDATA_SET_*`): byte order of keys and values, and examples of their types.
fn userdata(family: Family, key: &[FieldType], data: Option<DataFields>) -> Vec<u8> {
    const KEY_BYTE_ORDER: u8 = 0;
    const DATA_BYTE_ORDER: u8 = 1;
    const KEY_TYPE_OF: u8 = 3;
    const DATA_TYPE_OF: u8 = 4;
    const DATA_INTERVAL: u8 = 6;
    const CONCATENATION: u32 = 13;
    // Concatenations and verdicts have none, the others host or network byte order.
    let byte_order = |fields: &[FieldType]| match fields {
        [FieldType::Number | FieldType::Index] => 1,
        [_] => 2,
        _ => 0,
    };
    let by_example = key.contains(&FieldType::Index);
    let examples = |kind: u8, fields: &[FieldType]| match fields {
        [field] if by_example => tlv(kind, &field.example_userdata(family)),
        [_] => Vec::new(),
        fields if by_example => {
            let fields = (0..).zip(fields);
            let fields: Vec<u8> =
                fields.flat_map(|(number, field)| tlv(number, &field.example_userdata(family))).collect();
            tlv(kind, &[tlv_number(0, CONCATENATION), tlv(1, &fields)].concat())
        }
        _ => tlv(kind, &[tlv_number(0, CONCATENATION), tlv(1, &[])].concat()),
    };
    let mut bytes = tlv_number(KEY_BYTE_ORDER, byte_order(key));
    let data_fields: Option<&[FieldType]> = data.map(|data| match data {
        DataFields::Verdict => &[][..],
        DataFields::Data(fields) => fields,
    });
    if let Some(fields) = data_fields {
        bytes.extend(tlv_number(DATA_BYTE_ORDER, byte_order(fields)));
    }
    bytes.extend(examples(KEY_TYPE_OF, key));
    if let Some(fields) = data_fields {
        if !fields.is_empty() {
            bytes.extend(examples(DATA_TYPE_OF, fields));
        }
        bytes.extend(tlv_number(DATA_INTERVAL, 0));
    }
    bytes
}
