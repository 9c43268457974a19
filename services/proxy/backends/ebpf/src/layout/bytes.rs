//! Conversions of keys and values.
//!
//! Owns: [`Layout`] of each type. In and out: bytes. Numbers have the order of the machine, ports that of the network.

use super::{
    Address, DirectFlow, DirectKey, DirectReply, FlowKey, FlowValue, FrontendKey, Layout, MemberKey, Remote,
    SetKey, SetValue, SlotValue,
};

/// Puts parts one behind the other; what is left is zero.
struct Writer<const N: usize> {
    bytes: [u8; N],
    at: usize,
}

impl<const N: usize> Writer<N> {
    const fn new() -> Self {
        Self { bytes: [0; N], at: 0 }
    }

    fn put(mut self, part: &[u8]) -> Self {
        for (place, byte) in self.bytes.iter_mut().skip(self.at).zip(part) {
            *place = *byte;
        }
        self.at += part.len();
        self
    }

    fn number(self, number: u32) -> Self {
        self.put(&number.to_ne_bytes())
    }

    fn remote(self, remote: Remote) -> Self {
        self.put(&remote.to_bytes())
    }
}

/// A part at a place; zero beyond the end.
fn part<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let mut found = [0; N];
    for (place, byte) in found.iter_mut().zip(bytes.iter().skip(at)) {
        *place = *byte;
    }
    found
}

fn number(bytes: &[u8], at: usize) -> u32 {
    u32::from_ne_bytes(part(bytes, at))
}

fn remote(bytes: &[u8], at: usize) -> Remote {
    Remote::from_bytes(part(bytes, at))
}

impl Layout<16> for Address {
    fn to_bytes(self) -> [u8; 16] {
        self.0
    }

    fn from_bytes(bytes: [u8; 16]) -> Self {
        Self(bytes)
    }
}

/// Of a trie: without its number of bits.
pub(super) fn range(number: u32, address: Address) -> [u8; 20] {
    Writer::new().number(number).put(&address.0).bytes
}

pub(super) fn of_range(bytes: [u8; 20]) -> (u32, Address) {
    (number(&bytes, 0), Address(part(&bytes, 4)))
}

impl Layout<20> for Remote {
    fn to_bytes(self) -> [u8; 20] {
        Writer::new().put(&self.address.0).put(&self.port.to_be_bytes()).bytes
    }

    fn from_bytes(bytes: [u8; 20]) -> Self {
        Self { address: Address(part(&bytes, 0)), port: u16::from_be_bytes(part(&bytes, 16)) }
    }
}

impl Layout<20> for FrontendKey {
    fn to_bytes(self) -> [u8; 20] {
        let writer = Writer::new().put(&self.address.0).put(&self.port.to_be_bytes());
        writer.put(&[self.protocol, u8::from(self.is_node_port)]).bytes
    }

    fn from_bytes(bytes: [u8; 20]) -> Self {
        let [protocol, scope] = part(&bytes, 18);
        let Remote { address, port } = remote(&bytes, 0);
        Self { address, port, protocol, is_node_port: scope != 0 }
    }
}

impl Layout<8> for SetKey {
    fn to_bytes(self) -> [u8; 8] {
        Writer::new().number(self.number).number(self.kind).bytes
    }

    fn from_bytes(bytes: [u8; 8]) -> Self {
        Self { number: number(&bytes, 0), kind: number(&bytes, 4) }
    }
}

impl Layout<16> for SetValue {
    fn to_bytes(self) -> [u8; 16] {
        Writer::new().number(self.first).number(self.count).number(self.affinity_seconds).bytes
    }

    fn from_bytes(bytes: [u8; 16]) -> Self {
        Self { first: number(&bytes, 0), count: number(&bytes, 4), affinity_seconds: number(&bytes, 8) }
    }
}

impl Layout<24> for SlotValue {
    fn to_bytes(self) -> [u8; 24] {
        Writer::new().remote(self.remote).number(self.number).bytes
    }

    fn from_bytes(bytes: [u8; 24]) -> Self {
        Self { remote: remote(&bytes, 0), number: number(&bytes, 20) }
    }
}

impl Layout<24> for MemberKey {
    fn to_bytes(self) -> [u8; 24] {
        Writer::new().number(self.number).remote(self.remote).bytes
    }

    fn from_bytes(bytes: [u8; 24]) -> Self {
        Self { number: number(&bytes, 0), remote: remote(&bytes, 4) }
    }
}

impl Layout<32> for FlowKey {
    fn to_bytes(self) -> [u8; 32] {
        Writer::new().put(&self.socket.to_ne_bytes()).remote(self.remote).bytes
    }

    fn from_bytes(bytes: [u8; 32]) -> Self {
        Self { socket: u64::from_ne_bytes(part(&bytes, 0)), remote: remote(&bytes, 8) }
    }
}

impl Layout<24> for FlowValue {
    fn to_bytes(self) -> [u8; 24] {
        Writer::new().number(self.number).remote(self.other).bytes
    }

    fn from_bytes(bytes: [u8; 24]) -> Self {
        Self { number: number(&bytes, 0), other: remote(&bytes, 4) }
    }
}

impl Layout<44> for DirectKey {
    fn to_bytes(self) -> [u8; 44] {
        Writer::new().remote(self.client).remote(self.other).number(self.protocol).bytes
    }

    fn from_bytes(bytes: [u8; 44]) -> Self {
        Self { client: remote(&bytes, 0), other: remote(&bytes, 20), protocol: number(&bytes, 40) }
    }
}

impl Layout<32> for DirectFlow {
    fn to_bytes(self) -> [u8; 32] {
        let writer = Writer::new().number(self.number).remote(self.endpoint);
        writer.number(self.is_remote.into()).number(self.is_handed_over.into()).bytes
    }

    fn from_bytes(bytes: [u8; 32]) -> Self {
        Self {
            number: number(&bytes, 0),
            endpoint: remote(&bytes, 4),
            is_remote: number(&bytes, 24) != 0,
            is_handed_over: number(&bytes, 28) != 0,
        }
    }
}

impl Layout<32> for DirectReply {
    fn to_bytes(self) -> [u8; 32] {
        let writer = Writer::new().put(&self.used_ns.to_ne_bytes()).remote(self.service);
        let is_handed_over = u16::from(self.is_handed_over);
        writer.put(&is_handed_over.to_ne_bytes()).put(&self.state.to_ne_bytes()).bytes
    }

    fn from_bytes(bytes: [u8; 32]) -> Self {
        Self {
            used_ns: u64::from_ne_bytes(part(&bytes, 0)),
            service: remote(&bytes, 8),
            is_handed_over: u16::from_ne_bytes(part(&bytes, 28)) != 0,
            state: u16::from_ne_bytes(part(&bytes, 30)),
        }
    }
}

impl Layout<4> for u32 {
    fn to_bytes(self) -> [u8; 4] {
        self.to_ne_bytes()
    }

    fn from_bytes(bytes: [u8; 4]) -> Self {
        Self::from_ne_bytes(bytes)
    }
}
