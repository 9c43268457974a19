//! Keys of a packet, and what maps give for them.
//!
//! Owns: [`Values`]. In: fields, a packet whose destination may be one of several numbers. Out: keys and values.

use std::net::IpAddr;

use super::{Destination, Packet, Walk};
use crate::nft::{
    element::{Key, SetName, Value},
    ruleset::Field,
};

/// What a map gave.
#[derive(Debug)]
pub(super) struct Values {
    pub(super) found: Vec<Key>,
    /// Keys for which it has nothing.
    lacking: usize,
    /// If there was but one.
    pub(super) key: Option<Key>,
}

impl Values {
    pub(super) fn missing(&self) -> String {
        match self.lacking {
            0 => String::new(),
            lacking => {
                format!("; {} more should be there, and a packet that draws such a one is dropped", lacking)
            }
        }
    }
}

impl Walk<'_> {
    /// What a map gives for a key, which may be one of several.
    pub(super) fn values(&self, fields: &[Field], map: SetName, packet: &Packet) -> Option<Values> {
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
    pub(super) fn frontend(&self, packet: &Packet) -> Key {
        let ip = match &packet.destination {
            Destination::Address(ip) => *ip,
            Destination::Numbers(_) => self.target.address,
        };
        Key::new().ip(ip).protocol(self.target.protocol).port(packet.port)
    }

    /// The key of fields; none where one of them is not known.
    pub(super) fn key(&self, fields: &[Field], packet: &Packet) -> Option<Key> {
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
