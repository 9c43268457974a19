//! Rules as expressions of the kernel.
//!
//! Owns: the netlink form of [`Rule`]s, as nft would send it for their text. In and out: values.
//!
//! Registers: the kernel has 16 of 4 bytes each. A key is loaded from the first register on, every field padded to
//! whole registers; the value of a map lookup replaces it, again from the first register on. The numbers of attributes
//! and their values are the kernel's (`linux/netfilter/nf_tables.h`).

use ipnet::IpNet;
use keelson_proxy::model::Family;
use netlink_packet_core::DefaultNla;
use netlink_packet_netfilter::nftables::{
    Bitwise, Cmp, DataAttribute, ExpressionAttribute, Expressions, Immediate, ListAttribute, Lookup, Meta,
    MetaKey, Operator, Payload, Register, Verdict, VerdictAttribute,
};

use super::{
    FLOWTABLE,
    rule::{Field, Rule, Statement, interface_name, netmask},
};
use crate::{
    chain::Chain,
    element::{Key, Number, SetName},
};

type Expression = ListAttribute<ExpressionAttribute>;

/// The number of the first register of 4 bytes (`NFT_REG32_00`).
const FIRST_REGISTER: u32 = 8;
/// Registers of 4 bytes per register of 16: nft places the data of an element at the next of the latter after its key.
const LARGE: u32 = 4;
/// `NFT_PAYLOAD_NETWORK_HEADER`.
const NETWORK_HEADER: u32 = 1;
/// `NFT_PAYLOAD_TRANSPORT_HEADER`.
const TRANSPORT_HEADER: u32 = 2;
/// Offset of the destination port in the headers of TCP, UDP and SCTP.
const PORT_OFFSET: u32 = 2;
/// `NFT_LOOKUP_F_INV`.
const LOOKUP_INVERTED: u32 = 1;
/// `IP_CT_NEW` as a bit of the state.
const STATE_NEW: u32 = 1 << 3;
/// `IP_CT_ESTABLISHED` as a bit of the state.
const STATE_ESTABLISHED: u32 = 1 << 1;
/// `IPS_DST_NAT`.
const STATUS_DNAT: u32 = 1 << 5;
/// `NFT_CT_STATE`.
const CT_STATE: u32 = 0;
/// `NFT_CT_STATUS`.
const CT_STATUS: u32 = 2;
/// `NFTA_FIB_F_SADDR`.
const FIB_SOURCE: u32 = 1;
/// `NFTA_FIB_F_DADDR`.
const FIB_DESTINATION: u32 = 2;
/// `RTN_LOCAL`.
const LOCAL: u32 = 2;
/// `NF_NAT_RANGE_PROTO_RANDOM_FULLY`.
const FULLY_RANDOM: u32 = 1 << 4;
/// `NFT_DYNSET_OP_UPDATE`.
const UPDATE: u32 = 1;
/// `NFT_DYNSET_OP_DELETE`.
const DELETE: u32 = 2;
/// `NF_DROP`.
const DROP: u32 = 0;

impl Rule {
    /// Sets and chains are referred to by name: they have to exist, or to be created earlier in the same transaction.
    /// The message needs `NLM_F_APPEND`: without it, a rule is inserted before the existing ones of the chain.
    #[must_use]
    pub fn expressions(&self, family: Family) -> Vec<Expression> {
        let mut writer = Writer { family, out: Vec::new() };
        for statement in &self.statements {
            writer.statement(statement);
        }
        writer.out
    }
}

/// In bytes.
const fn address_offset(family: Family, source: bool) -> u32 {
    match (family, source) {
        (Family::V4, true) => 12,
        (Family::V4, false) => 16,
        (Family::V6, true) => 8,
        (Family::V6, false) => 24,
    }
}

/// A register of 4 bytes, or the first of those that a field occupies.
fn register(index: u32) -> Register {
    Register::from(FIRST_REGISTER + index)
}

fn number(kind: u16, value: u32) -> DefaultNla {
    DefaultNla::new(kind, value.to_be_bytes().to_vec())
}

fn mask(net: &IpNet) -> Vec<u8> {
    match net {
        IpNet::V4(net) => net.netmask().octets().to_vec(),
        IpNet::V6(net) => net.netmask().octets().to_vec(),
    }
}

fn octets(net: &IpNet) -> Vec<u8> {
    match net {
        IpNet::V4(net) => net.network().octets().to_vec(),
        IpNet::V6(net) => net.network().octets().to_vec(),
    }
}

struct Writer {
    family: Family,
    out: Vec<Expression>,
}

impl Writer {
    fn statement(&mut self, statement: &Statement) {
        match statement {
            Statement::New => self.ct(CT_STATE, STATE_NEW, true),
            Statement::Established => self.ct(CT_STATE, STATE_ESTABLISHED, true),
            Statement::Translated => self.ct(CT_STATUS, STATUS_DNAT, true),
            Statement::Untranslated => self.ct(CT_STATUS, STATUS_DNAT, false),
            Statement::LocalSource => self.local(FIB_SOURCE, true),
            Statement::LocalDestination => self.local(FIB_DESTINATION, true),
            Statement::RemoteDestination => self.local(FIB_DESTINATION, false),
            Statement::Address { field, net, inside } => self.address(*field, net, *inside),
            Statement::Interface { name, prefix, is } => self.interface(name, *prefix, *is),
            Statement::Protocol(protocol) => {
                self.meta(MetaKey::L4Proto, 0);
                self.compare(true, vec![protocol.number()]);
            }
            Statement::Marked(bit) => {
                self.meta(MetaKey::Mark, 0);
                self.bitwise(0, bit.to_ne_bytes().to_vec(), vec![0; 4]);
                self.compare(true, bit.to_ne_bytes().to_vec());
            }
            Statement::In { fields, set, inside } => {
                self.load(fields);
                self.lookup(*set, None, *inside);
            }
            Statement::Mark(bit) => self.change_mark(!bit, *bit),
            Statement::ToggleMark(bit) => self.change_mark(u32::MAX, *bit),
            Statement::SetNumber(fields, map) => {
                self.load(fields);
                self.lookup(*map, Some(register(0)), true);
                self.set_number();
            }
            Statement::SetNumberToService => {
                self.load(&[Field::Service]);
                self.set_number();
            }
            Statement::CountsCluster => {
                self.load_number(0, Some(Number::CLUSTER_MASK));
                self.compare(true, Number::CLUSTER.0.to_ne_bytes().to_vec());
            }
            Statement::HasNumber => {
                self.load_number(0, Some(Number::SET_MASK));
                self.compare(false, vec![0; 4]);
            }
            Statement::ClearNumber => {
                self.push(Expressions::Immediate(vec![
                    Immediate::DestinationRegister(register(0)),
                    Immediate::Data(DataAttribute::Value(vec![0; 4])),
                ]));
                self.set_number();
            }
            Statement::Remember { seconds, map } => self.affinity(UPDATE, *map, Some(*seconds)),
            Statement::Forget { map } => self.affinity(DELETE, *map, None),
            Statement::Choose(fields, map) => {
                self.load(fields);
                self.lookup(*map, Some(Register::Verdict), true);
            }
            Statement::Translate(fields, map) => {
                self.load(fields);
                self.lookup(*map, Some(register(0)), true);
                self.translate();
            }
            Statement::Masquerade => self.other("masq", vec![number(1, FULLY_RANDOM)]),
            Statement::Untrack => self.other("notrack", Vec::new()),
            Statement::Offload => self.offload(),
            Statement::Reject => self.reject(),
            Statement::Return => self.verdict(Verdict::Return, None),
            Statement::Drop => self.verdict(Verdict::Other(DROP), None),
            Statement::Goto(chain) => self.verdict(Verdict::Goto, Some(*chain)),
            Statement::Jump(chain) => self.verdict(Verdict::Jump, Some(*chain)),
        }
    }

    fn push(&mut self, expression: Expressions) {
        self.out.push(expression.into());
    }

    fn other(&mut self, expression_type: &str, attributes: Vec<DefaultNla>) {
        self.push(Expressions::Other { expression_type: expression_type.to_owned(), attributes });
    }

    /// Loads fields into registers from the first on. Returns the next free register.
    fn load(&mut self, fields: &[Field]) -> u32 {
        fields.iter().fold(0, |index, field| index + self.load_field(*field, index))
    }

    /// Returns the number of registers.
    fn load_field(&mut self, field: Field, index: u32) -> u32 {
        let len = self.family.address_len();
        let address_registers = len as u32 / 4;
        match field {
            Field::Source | Field::Destination => {
                let offset = address_offset(self.family, field == Field::Source);
                self.payload(NETWORK_HEADER, offset, len as u32, index);
                address_registers
            }
            Field::Number => self.load_number(index, None),
            Field::Service => self.load_number(index, Some(Number::SERVICE_MASK)),
            Field::Class => self.load_number(index, Some(Number::CLASS_MASK)),
            Field::Id => self.load_number(index, Some(Number::ID_MASK)),
            Field::Protocol => {
                self.meta(MetaKey::L4Proto, index);
                1
            }
            Field::Port => {
                self.payload(TRANSPORT_HEADER, PORT_OFFSET, 2, index);
                1
            }
            Field::Random(below) => self.random(index, below, None),
            Field::SourceNetwork(length) => {
                let registers = self.load_field(Field::Source, index);
                if let Some(mask) = netmask(self.family, length) {
                    let mask = Key::new().ip(mask).as_slice().to_vec();
                    let zero = vec![0; mask.len()];
                    self.bitwise(index, mask, zero);
                }
                registers
            }
            Field::Constant(offset) => self.random(index, 1, Some(offset)),
        }
    }

    /// A random number below `below`, plus `added`. Returns the number of registers.
    fn random(&mut self, index: u32, below: u32, added: Option<u32>) -> u32 {
        let (dreg, modulus, kind, offset, random) = (1, 2, 3, 4, 1);
        let to = u32::from(register(index));
        let mut attributes = vec![number(dreg, to), number(modulus, below), number(kind, random)];
        attributes.extend(added.map(|added| number(offset, added)));
        self.other("numgen", attributes);
        1
    }

    /// The number of the packet, or the bits of it in the mask. Returns the number of registers.
    fn load_number(&mut self, index: u32, mask: Option<Number>) -> u32 {
        self.meta(MetaKey::Priority, index);
        if let Some(mask) = mask {
            self.bitwise(index, mask.0.to_ne_bytes().to_vec(), vec![0; 4]);
        }
        1
    }

    /// Sets the number of the packet from the first register.
    fn set_number(&mut self) {
        self.push(Expressions::Meta(vec![Meta::Key(MetaKey::Priority), Meta::SourceRegister(register(0))]));
    }

    fn payload(&mut self, base: u32, offset: u32, len: u32, index: u32) {
        self.push(Expressions::Payload(vec![
            Payload::DestinationRegister(register(index)),
            Payload::Base(base),
            Payload::Offset(offset),
            Payload::Len(len),
        ]));
    }

    fn meta(&mut self, key: MetaKey, index: u32) {
        self.push(Expressions::Meta(vec![Meta::Key(key), Meta::DestinationRegister(register(index))]));
    }

    /// `(register & mask) ^ xor`, over as many registers as the mask occupies.
    fn bitwise(&mut self, index: u32, mask: Vec<u8>, xor: Vec<u8>) {
        self.push(Expressions::Bitwise(vec![
            Bitwise::SourceRegister(register(index)),
            Bitwise::DestinationRegister(register(index)),
            Bitwise::Length(mask.len() as u32),
            Bitwise::Mask(DataAttribute::Value(mask)),
            Bitwise::Xor(DataAttribute::Value(xor)),
        ]));
    }

    fn compare(&mut self, equal: bool, data: Vec<u8>) {
        self.push(Expressions::Cmp(vec![
            Cmp::SourceRegister(register(0)),
            Cmp::Op(if equal { Operator::Equal } else { Operator::NotEqual }),
            Cmp::Data(DataAttribute::Value(data)),
        ]));
    }

    fn lookup(&mut self, set: SetName, to: Option<Register>, inside: bool) {
        let mut attributes = vec![Lookup::Set(set.as_str().to_owned()), Lookup::SourceRegister(register(0))];
        attributes.extend(to.map(Lookup::DestinationRegister));
        if !inside {
            attributes.push(Lookup::Flags(LOOKUP_INVERTED));
        }
        self.push(Expressions::Lookup(attributes));
    }

    /// Matches a bit of the connection's state or status.
    fn ct(&mut self, key: u32, bit: u32, set: bool) {
        let (dreg, of) = (1, 2);
        self.other("ct", vec![number(of, key), number(dreg, u32::from(register(0)))]);
        self.bitwise(0, bit.to_ne_bytes().to_vec(), vec![0; 4]);
        self.compare(!set, vec![0; 4]);
    }

    /// Matches a local address, or another one, by the routing table.
    fn local(&mut self, address: u32, is: bool) {
        let (dreg, result, flags, address_type) = (1, 2, 3, 3);
        self.other(
            "fib",
            vec![number(dreg, u32::from(register(0))), number(result, address_type), number(flags, address)],
        );
        self.compare(is, LOCAL.to_ne_bytes().to_vec());
    }

    /// Compares only the network's bytes if the prefix ends at a byte, otherwise the address without its host bits.
    fn address(&mut self, field: Field, net: &IpNet, inside: bool) {
        let whole = usize::from(net.prefix_len() / 8);
        let mut data = octets(net);
        if net.prefix_len().is_multiple_of(8) {
            self.payload(
                NETWORK_HEADER,
                address_offset(self.family, field == Field::Source),
                whole as u32,
                0,
            );
            data.truncate(whole);
        } else {
            let len = data.len();
            self.load_field(field, 0);
            self.bitwise(0, mask(net), vec![0; len]);
        }
        self.compare(inside, data);
    }

    /// A full name is compared with the NULs that fill the kernel's 16 bytes.
    fn interface(&mut self, name: &str, prefix: bool, is: bool) {
        let mut name = interface_name(name).as_bytes().to_vec();
        if !prefix {
            name.resize(16, 0);
        }
        self.meta(MetaKey::Iifname, 0);
        self.compare(is, name);
    }

    /// Sets the mark to `(mark & mask) ^ xor`.
    fn change_mark(&mut self, mask: u32, xor: u32) {
        self.meta(MetaKey::Mark, 0);
        self.bitwise(0, mask.to_ne_bytes().to_vec(), xor.to_ne_bytes().to_vec());
        self.push(Expressions::Meta(vec![Meta::Key(MetaKey::Mark), Meta::SourceRegister(register(0))]));
    }

    /// client . service port : endpoint. `seconds`: the timeout.
    fn affinity(&mut self, operation: u32, map: SetName, seconds: Option<u32>) {
        let (set, op, key, data, timeout) = (1, 3, 4, 5, 6);
        let after = self.load(&[Field::Source, Field::Service]);
        let value = after.next_multiple_of(LARGE);
        self.load_field(Field::Number, value);
        let mut name = map.as_str().as_bytes().to_vec();
        name.push(0);
        let mut attributes = vec![
            DefaultNla::new(set, name),
            number(op, operation),
            number(key, u32::from(register(0))),
            number(data, u32::from(register(value))),
        ];
        if let Some(seconds) = seconds {
            let milliseconds = u64::from(seconds) * 1000;
            attributes.push(DefaultNla::new(timeout, milliseconds.to_be_bytes().to_vec()));
        }
        self.other("dynset", attributes);
    }

    /// Translates to the address and port in the first registers.
    fn translate(&mut self) {
        let (kind, family, address, port) = (1, 2, 3, 5);
        let destination = 1;
        // NFPROTO_IPV4, NFPROTO_IPV6.
        let family_number = match self.family {
            Family::V4 => 2,
            Family::V6 => 10,
        };
        let port_register = register(self.family.address_len() as u32 / 4);
        self.other(
            "nat",
            vec![
                number(kind, destination),
                number(family, family_number),
                number(address, u32::from(register(0))),
                number(port, u32::from(port_register)),
            ],
        );
    }

    /// `NFTA_FLOW_TABLE_NAME`.
    fn offload(&mut self) {
        let name = 1;
        self.other("flow_offload", vec![DefaultNla::new(name, format!("{FLOWTABLE}\0").into_bytes())]);
    }

    /// ICMP port unreachable for any protocol: code 3 in ICMP, 4 in ICMPv6.
    fn reject(&mut self) {
        let (kind, code) = (1, 2);
        let icmp_unreachable = 0;
        let port_unreachable = match self.family {
            Family::V4 => 3,
            Family::V6 => 4,
        };
        self.other(
            "reject",
            vec![number(kind, icmp_unreachable), DefaultNla::new(code, vec![port_unreachable])],
        );
    }

    fn verdict(&mut self, verdict: Verdict, chain: Option<Chain>) {
        let mut attributes = vec![VerdictAttribute::Code(verdict)];
        attributes.extend(chain.map(|chain| VerdictAttribute::Chain(chain.to_string())));
        self.push(Expressions::Immediate(vec![
            Immediate::DestinationRegister(Register::Verdict),
            Immediate::Data(DataAttribute::Verdict(attributes)),
        ]));
    }
}
