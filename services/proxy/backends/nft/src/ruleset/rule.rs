//! One rule, and its text.
//!
//! Owns: [`Rule`], the statements of rules and their text in nft's language. In and out: values.

use std::{
    fmt,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use ipnet::IpNet;
use keelson_proxy::model::{Family, Protocol};

use super::FLOWTABLE;
use crate::{
    chain::Chain,
    element::{Number, SetName},
};

/// Maximum length of an interface name, in bytes (`IFNAMSIZ` without the NUL).
const INTERFACE_NAME_MAX: usize = 15;

/// Statements in order.
#[derive(Debug, Clone, PartialEq)]
pub struct Rule {
    pub(crate) statements: Vec<Statement>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Field {
    Source,
    /// Destination address, or the number that was written there.
    Destination,
    Number,
    /// The service port's part of the endpoint number in the packet.
    Service,
    /// The choice and count in the packet's number ([`Number::with_count`]).
    Class,
    /// The packet's number without choice and count.
    Id,
    Protocol,
    Port,
    Random(u32),
    /// The first bits of the source address, as many as this, the others 0.
    SourceNetwork(u8),
    Constant(u32),
}

#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Statement {
    /// The first packet of a connection.
    New,
    /// The connection is answered.
    Established,
    /// The destination of the connection was translated.
    Translated,
    /// The destination of the connection was not translated.
    Untranslated,
    /// The source address is local.
    LocalSource,
    /// The destination address is local.
    LocalDestination,
    /// The destination address is not local.
    RemoteDestination,
    /// An address is in a network, or is not. The network is of the family and has no host bits.
    Address {
        field: Field,
        net: IpNet,
        inside: bool,
    },
    /// The input interface has this name (or prefix), or does not.
    Interface {
        name: String,
        prefix: bool,
        is: bool,
    },
    Protocol(Protocol),
    /// The bit is set in the mark.
    Marked(u32),
    In {
        fields: Vec<Field>,
        set: SetName,
        inside: bool,
    },
    /// Sets the bit in the mark.
    Mark(u32),
    /// Inverts the bit in the mark.
    ToggleMark(u32),
    /// Sets the packet's number to the map's value for the fields; no match without an element.
    SetNumber(Vec<Field>, SetName),
    /// Sets the packet's number to [`Field::Service`].
    SetNumberToService,
    /// The packet's number contains a count of ClusterSet ([`Number::counts_cluster`]).
    CountsCluster,
    /// The packet has a number ([`Number::is_set`]).
    HasNumber,
    ClearNumber,
    /// Records in an affinity map that the client has the endpoint of the packet's number.
    Remember {
        seconds: u32,
        map: SetName,
    },
    /// Deletes what [`Statement::Remember`] recorded.
    Forget {
        map: SetName,
    },
    /// Applies the map's verdict for the fields; no match without an element.
    Choose(Vec<Field>, SetName),
    /// Translates the destination to the address and port that the map has for the fields.
    Translate(Vec<Field>, SetName),
    /// Translates the source to the address of the output interface, with a random port.
    Masquerade,
    /// Keeps the packet out of conntrack; only at priority raw.
    Untrack,
    /// Adds the flow to the flowtable, if possible: the connection has to be established, and of TCP or UDP.
    Offload,
    Reject,
    Drop,
    /// Ends the chain; the calling chain continues.
    Return,
    Goto(Chain),
    Jump(Chain),
}

impl Rule {
    pub(crate) fn of(statements: impl IntoIterator<Item = Statement>) -> Self {
        Self { statements: statements.into_iter().collect() }
    }

    /// The rule in the language of nft, as nft lists it (except for times, which it also lists in hours). Before 1.0.7,
    /// nft can list but not read the rules of the affinity chains in IPv6: it accepts no key of more than 16 bytes in
    /// `update @map` and `delete @map`. The kernel accepts them.
    #[must_use]
    pub fn text(&self, family: Family) -> String {
        let statements: Vec<String> =
            self.statements.iter().map(|statement| PartText { statement, family }.to_string()).collect();
        statements.join(" ")
    }
}

/// `ip` or `ip6`.
pub(super) const fn keyword(family: Family) -> &'static str {
    match family {
        Family::V4 => "ip",
        Family::V6 => "ip6",
    }
}

/// The part of an interface name that the kernel would use.
pub(super) fn interface_name(name: &str) -> &str {
    let end = (0..=name.len().min(INTERFACE_NAME_MAX)).rev().find(|end| name.is_char_boundary(*end));
    &name[..end.unwrap_or(0)]
}

/// The mask of a prefix; `None` for the full length of an address.
pub(super) fn netmask(family: Family, length: u8) -> Option<IpAddr> {
    let bits = family.address_len() as u8 * 8;
    let any = match family {
        Family::V4 => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
        Family::V6 => IpAddr::V6(Ipv6Addr::UNSPECIFIED),
    };
    (length < bits).then(|| IpNet::new(any, length).ok()).flatten().map(|net| net.netmask())
}

struct FieldText {
    field: Field,
    family: Family,
}

impl fmt::Display for FieldText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ip = keyword(self.family);
        match self.field {
            Field::Source => write!(f, "{ip} saddr"),
            Field::Destination => write!(f, "{ip} daddr"),
            Field::Number => f.write_str("meta priority"),
            Field::Service => write!(f, "meta priority & {}", Number::SERVICE_MASK),
            Field::Class => write!(f, "meta priority & {}", Number::CLASS_MASK),
            Field::Id => write!(f, "meta priority & {}", Number::ID_MASK),
            Field::Protocol => f.write_str("meta l4proto"),
            Field::Port => f.write_str("th dport"),
            Field::Random(below) => write!(f, "numgen random mod {below}"),
            Field::SourceNetwork(length) => match netmask(self.family, length) {
                None => write!(f, "{ip} saddr"),
                Some(mask) => write!(f, "{ip} saddr & {mask}"),
            },
            // nft has no constants in keys: a random number below 1, plus the constant.
            Field::Constant(number) => write!(f, "numgen random mod 1 offset {number}"),
        }
    }
}

struct PartText<'a> {
    statement: &'a Statement,
    family: Family,
}

impl PartText<'_> {
    fn fields(&self, fields: &[Field]) -> String {
        let fields: Vec<String> =
            fields.iter().map(|field| FieldText { field: *field, family: self.family }.to_string()).collect();
        fields.join(" . ")
    }
}

impl fmt::Display for PartText<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ip = keyword(self.family);
        let not = |is: bool| if is { "" } else { "!= " };
        match self.statement {
            Statement::New => f.write_str("ct state new"),
            Statement::Established => f.write_str("ct state established"),
            Statement::Translated => f.write_str("ct status dnat"),
            Statement::Untranslated => f.write_str("ct status ! dnat"),
            Statement::LocalSource => f.write_str("fib saddr type local"),
            Statement::LocalDestination => f.write_str("fib daddr type local"),
            Statement::RemoteDestination => f.write_str("fib daddr type != local"),
            Statement::Address { field, net, inside } => {
                let field = self.fields(&[*field]);
                if net.prefix_len() == net.max_prefix_len() {
                    write!(f, "{field} {}{}", not(*inside), net.addr())
                } else {
                    write!(f, "{field} {}{net}", not(*inside))
                }
            }
            Statement::Interface { name, prefix, is } => {
                let star = if *prefix { "*" } else { "" };
                write!(f, "iifname {}\"{}{star}\"", not(*is), interface_name(name))
            }
            Statement::Protocol(protocol) => write!(f, "meta l4proto {}", protocol.keyword()),
            Statement::Marked(bit) => write!(f, "meta mark & {bit:#010x} == {bit:#010x}"),
            Statement::In { fields, set, inside } => {
                write!(f, "{} {}@{set}", self.fields(fields), not(*inside))
            }
            Statement::Mark(bit) => write!(f, "meta mark set meta mark | {bit:#010x}"),
            Statement::ToggleMark(bit) => write!(f, "meta mark set meta mark ^ {bit:#010x}"),
            Statement::SetNumber(fields, map) => {
                write!(f, "meta priority set {} map @{map}", self.fields(fields))
            }
            Statement::SetNumberToService => {
                write!(f, "meta priority set {}", self.fields(&[Field::Service]))
            }
            Statement::CountsCluster => {
                write!(f, "meta priority & {} == {}", Number::CLUSTER_MASK, Number::CLUSTER)
            }
            Statement::HasNumber => write!(f, "meta priority & {} != none", Number::SET_MASK),
            Statement::ClearNumber => f.write_str("meta priority set none"),
            Statement::Remember { seconds, map } => {
                let key = self.fields(&[Field::Source, Field::Service]);
                write!(f, "update @{map} {{ {key} timeout {seconds}s : meta priority }}")
            }
            Statement::Forget { map } => {
                let key = self.fields(&[Field::Source, Field::Service]);
                write!(f, "delete @{map} {{ {key} : meta priority }}")
            }
            Statement::Choose(fields, map) => write!(f, "{} vmap @{map}", self.fields(fields)),
            Statement::Translate(fields, map) => write!(f, "dnat {ip} to {} map @{map}", self.fields(fields)),
            Statement::Masquerade => f.write_str("masquerade fully-random"),
            Statement::Untrack => f.write_str("notrack"),
            Statement::Offload => write!(f, "flow add @{FLOWTABLE}"),
            Statement::Reject => f.write_str("reject"),
            Statement::Drop => f.write_str("drop"),
            Statement::Return => f.write_str("return"),
            Statement::Goto(chain) => write!(f, "goto {chain}"),
            Statement::Jump(chain) => write!(f, "jump {chain}"),
        }
    }
}
