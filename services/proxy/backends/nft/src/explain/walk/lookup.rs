//! Keys of a packet, and their values in maps.
//!
//! Owns: [`Values`]. In: fields, a packet that may have one of several numbers. Out: keys and values.

use super::{Packet, Walk};
use crate::{
    element::{Key, Number, SetName, Value},
    ruleset::Field,
};

#[derive(Debug)]
pub(super) struct Values {
    pub(super) found: Vec<Key>,
    /// Number of keys without an element.
    lacking: usize,
    /// The key, if there was only one.
    pub(super) key: Option<Key>,
}

impl Values {
    pub(super) fn missing(&self) -> String {
        match self.lacking {
            0 => String::new(),
            lacking => {
                format!("; {} more are missing, and a packet that selects a missing one is dropped", lacking)
            }
        }
    }
}

impl Walk<'_> {
    /// Looks up a key, which may be one of several.
    pub(super) fn values(&self, fields: &[Field], map: SetName, packet: &Packet) -> Option<Values> {
        let keys: Vec<Key> = match fields {
            [field @ (Field::Number | Field::Id), Field::Random(below)] => {
                let slots = |number: &Number| {
                    let number = if *field == Field::Id { number.id() } else { *number };
                    (0..*below).map(move |index| Key::new().number(number).index(index))
                };
                packet.numbers.iter().flat_map(slots).collect()
            }
            [Field::Number] => packet.numbers.iter().map(|number| Key::new().number(*number)).collect(),
            other => vec![self.key(other, packet)?],
        };
        let value = |key: &Key| match self.elements.get(map, *key)?.value {
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
        Key::new().ip(packet.destination).protocol(self.target.protocol).port(packet.port)
    }

    /// `None` if a field is unknown.
    pub(super) fn key(&self, fields: &[Field], packet: &Packet) -> Option<Key> {
        let number = || match packet.numbers.as_slice() {
            [number] => Some(*number),
            _ => None,
        };
        fields.iter().try_fold(Key::new(), |key, field| {
            Some(match field {
                Field::Source => key.ip(self.source.address?),
                Field::Destination => key.ip(packet.destination),
                Field::Protocol => key.protocol(self.target.protocol),
                Field::Port => key.port(packet.port),
                Field::Number => key.number(number()?),
                Field::Class => key.number(number()?.class()),
                Field::Id => key.number(number()?.id()),
                Field::Service | Field::Random(_) | Field::SourceNetwork(_) | Field::Constant(_) => {
                    return None;
                }
            })
        })
    }
}
