//! One rule, and its text.
//!
//! Owns: [`Rule`], the statements of rules and how nft writes them. In and out: values.

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

/// The longest name of an interface, in bytes (`IFNAMSIZ` less the NUL).
const INTERFACE_NAME_MAX: usize = 15;

/// A rule: what is matched and done, in order.
#[derive(Debug, Clone, PartialEq)]
pub struct Rule {
    pub(crate) statements: Vec<Statement>,
}

/// A field of a packet that is a key, or statement of one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Field {
    /// Source address.
    Source,
    /// Destination address, or the number that was written there.
    Destination,
    /// The number that the packet has.
    Number,
    /// The number of the service port of the endpoint whose number the packet has.
    Service,
    /// The choice and count of the number that the packet has ([`Number::with_count`]).
    Class,
    /// The same number without choice and count.
    Id,
    /// Transport protocol.
    Protocol,
    /// Destination port.
    Port,
    /// A random number below this.
    Random(u32),
    /// So many bits of the source address, the others being 0.
    SourceNetwork(u8),
    /// This number, whatever the packet is.
    Constant(u32),
}

/// A match or statement.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Statement {
    /// The first packet of a connection.
    New,
    /// Of a connection that has had an answer.
    Established,
    /// Of a connection whose destination was translated.
    Translated,
    /// Of a connection whose destination was not translated.
    Untranslated,
    /// The source address is one of the node.
    LocalSource,
    /// The destination address is one of the node.
    LocalDestination,
    /// An address is in a network, or is not. The network is of the family and has no host bits.
    Address {
        field: Field,
        net: IpNet,
        inside: bool,
    },
    /// It came in by an interface of this name (or prefix of names), or did not.
    Interface {
        name: String,
        prefix: bool,
        is: bool,
    },
    /// The transport protocol.
    Protocol(Protocol),
    /// The bit is set in the mark.
    Marked(u32),
    /// Fields are in a set, or are not.
    In {
        fields: Vec<Field>,
        set: SetName,
        inside: bool,
    },
    /// Sets the bit in the mark.
    Mark(u32),
    /// Inverts the bit in the mark.
    ToggleMark(u32),
    /// Gives the packet the number that the map has for the fields; no match if it has none.
    SetNumber(Vec<Field>, SetName),
    /// Gives the packet the number [`Field::Service`].
    SetNumberToService,
    /// The number of the packet contains a count of ClusterSet ([`Number::counts_cluster`]).
    CountsCluster,
    /// The packet has a number ([`Number::is_set`]).
    HasNumber,
    /// Takes the number from the packet.
    ClearNumber,
    /// Writes into a map of affinities that the client has the endpoint whose number the packet has.
    Remember {
        seconds: u32,
        map: SetName,
    },
    /// Removes what [`Statement::Remember`] wrote.
    Forget {
        map: SetName,
    },
    /// Goes where the map says for the fields; no match if it says nothing.
    Choose(Vec<Field>, SetName),
    /// Translates the destination to the address and port that the map has for the fields.
    Translate(Vec<Field>, SetName),
    /// Translates the source to the address of the interface it leaves by, with a random port.
    Masquerade,
    /// Adds the flow to the flowtable, if the kernel can: the connection has to be established, and of TCP or UDP.
    Offload,
    /// Answers with ICMP port unreachable.
    Reject,
    Drop,
    /// The chain is over; what jumped to it goes on.
    Return,
    Goto(Chain),
    Jump(Chain),
}

impl Rule {
    pub(super) fn of(statements: impl IntoIterator<Item = Statement>) -> Self {
        Self { statements: statements.into_iter().collect() }
    }

    /// The rule in the language of nft, as it lists it (but for times, which it lists in hours too). Before 1.0.7, nft cannot read (but lists) the rules of the affinity
    /// chains in IPv6: it takes no key of more than 16 bytes in `update @map` and `delete @map`. The kernel takes them.
    #[must_use]
    pub fn text(&self, family: Family) -> String {
        let statements: Vec<String> =
            self.statements.iter().map(|statement| PartText { statement, family }.to_string()).collect();
        statements.join(" ")
    }
}

/// `ip` or `ip6`, as nft calls the families.
pub(super) const fn keyword(family: Family) -> &'static str {
    match family {
        Family::V4 => "ip",
        Family::V6 => "ip6",
    }
}

/// What the kernel would take of the name of an interface.
pub(super) fn interface_name(name: &str) -> &str {
    let end = (0..=name.len().min(INTERFACE_NAME_MAX)).rev().find(|end| name.is_char_boundary(*end));
    &name[..end.unwrap_or(0)]
}

/// The mask of a prefix; none if that is all of an address.
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
            // The language has no constants in keys: a number below 1, and this.
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
            Statement::Offload => write!(f, "flow add @{FLOWTABLE}"),
            Statement::Reject => f.write_str("reject"),
            Statement::Drop => f.write_str("drop"),
            Statement::Return => f.write_str("return"),
            Statement::Goto(chain) => write!(f, "goto {chain}"),
            Statement::Jump(chain) => write!(f, "jump {chain}"),
        }
    }
}
