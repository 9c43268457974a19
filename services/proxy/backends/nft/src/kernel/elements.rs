//! Elements in netlink messages.
//!
//! Owns: encoding of elements into `NEWSETELEM` and `DELSETELEM` messages, and decoding of dumps. In: [`Element`]s or
//! attributes. Out: attributes or [`Elements`].
//!
//! Intervals have two forms. A set with single-field keys stores the first key, and the key after the last one with
//! `NFT_SET_ELEM_INTERVAL_END` (omitted if the last key is the highest address). A set with concatenated keys stores
//! the first and the last key of each field in one element. An [`Element`] has the latter form in both cases.

use std::collections::HashMap;

use keelson_proxy::model::Family;

use super::codec::{Buffer, attributes, message, number, text};
use crate::{
    chain::Chain,
    element::{Element, Key, SetName, Value, Verdict},
    ruleset::TABLE,
};

/// `NFTA_SET_ELEM_LIST_*`.
pub(super) const LIST_TABLE: u16 = 1;
pub(super) const LIST_SET: u16 = 2;
pub(super) const LIST_ELEMENTS: u16 = 3;

/// `NFTA_LIST_ELEM`.
const LIST_ELEMENT: u16 = 1;

/// `NFTA_SET_ELEM_*`.
const KEY: u16 = 1;
const DATA: u16 = 2;
const FLAGS: u16 = 3;

/// `NFTA_DATA_*`.
const DATA_VALUE: u16 = 1;
const DATA_VERDICT: u16 = 2;

/// `NFTA_VERDICT_*`.
const VERDICT_CODE: u16 = 1;
const VERDICT_CHAIN: u16 = 2;

/// `NF_DROP` and `NFT_GOTO`.
const DROP: u32 = 0;
const GOTO: u32 = -4_i32 as u32;

/// `NFT_SET_ELEM_INTERVAL_END` and `NFT_SET_ELEM_CATCHALL`.
const INTERVAL_END: u32 = 1;
const CATCH_ALL: u32 = 2;

/// Elements by set and key: the last key of an interval, and the value.
///
/// An element of a map with a value that we would never write has [`Value::None`].
pub type Elements = HashMap<(SetName, Key), Content>;

/// An element without its set and key: the last key of an interval, and the value.
pub type Content = (Option<Key>, Value);

/// Requests one element of a set without intervals.
pub(super) fn write_get(buffer: &mut Buffer, family: Family, sequence: u32, set: SetName, key: &Key) {
    let message = buffer.begin(message::GET_SET_ELEMENT, family, 0, sequence);
    buffer.text(LIST_TABLE, TABLE);
    buffer.text(LIST_SET, set);
    let list = buffer.nest(LIST_ELEMENTS);
    write_one(buffer, key, None, 0);
    buffer.close(list);
    buffer.end(message);
}

/// A deletion does not need the value.
pub(super) fn write(buffer: &mut Buffer, element: &Element, with_value: bool) {
    match (element.set, element.key_end) {
        (SetName::ServiceCidrs, Some(last)) => {
            write_one(buffer, &element.key, None, 0);
            if let Some(end) = after(last) {
                write_one(buffer, &end, None, INTERVAL_END);
            }
        }
        _ => write_one(buffer, &element.key, with_value.then_some(&element.value), 0),
    }
}

fn write_one(buffer: &mut Buffer, key: &Key, value: Option<&Value>, flags: u32) {
    let open = buffer.nest(LIST_ELEMENT);
    if flags != 0 {
        buffer.attribute(FLAGS, &flags.to_be_bytes());
    }
    write_data(buffer, KEY, key);
    match value {
        None | Some(Value::None) => {}
        Some(Value::Data(data)) => write_data(buffer, DATA, data),
        Some(Value::Verdict(verdict)) => write_verdict(buffer, *verdict),
    }
    buffer.close(open);
}

fn write_data(buffer: &mut Buffer, kind: u16, key: &Key) {
    let open = buffer.nest(kind);
    buffer.attribute(DATA_VALUE, key.as_slice());
    buffer.close(open);
}

fn write_verdict(buffer: &mut Buffer, verdict: Verdict) {
    let data = buffer.nest(DATA);
    let open = buffer.nest(DATA_VERDICT);
    match verdict {
        Verdict::Drop => buffer.attribute(VERDICT_CODE, &DROP.to_be_bytes()),
        Verdict::Goto(chain) => {
            buffer.attribute(VERDICT_CODE, &GOTO.to_be_bytes());
            buffer.text(VERDICT_CHAIN, chain);
        }
    }
    buffer.close(open);
    buffer.close(data);
}

/// `None` after the highest key.
fn after(key: Key) -> Option<Key> {
    step(key, 0xff, |byte| byte.wrapping_add(1))
}

/// `None` before the lowest key.
fn before(key: Key) -> Option<Key> {
    step(key, 0, |byte| byte.wrapping_sub(1))
}

/// Increments or decrements: trailing bytes equal to `full` carry over.
fn step(key: Key, full: u8, next: fn(u8) -> u8) -> Option<Key> {
    let mut bytes = key.as_slice().to_vec();
    let place = bytes.iter().rposition(|&byte| byte != full)?;
    for byte in bytes.get_mut(place..)? {
        *byte = next(*byte);
    }
    Key::from_slice(&bytes)
}

/// Decodes the elements of one set after the other.
#[derive(Debug, Default)]
pub(super) struct Reader {
    pub(super) elements: Elements,
    /// Chains by the names in verdicts, which are few.
    chains: HashMap<Box<str>, Option<Chain>>,
    /// First keys and ends of the intervals of the current set, in the order of the dump.
    starts: Vec<Key>,
    ends: Vec<Key>,
    /// The current set has an element that no [`Element`] can represent.
    foreign: bool,
    count: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Finished {
    pub(super) count: usize,
    pub(super) foreign: bool,
}

#[derive(Debug, Default)]
struct Parts<'a> {
    key: Option<&'a [u8]>,
    data: Option<&'a [u8]>,
    flags: u32,
}

impl Reader {
    /// Decodes the attributes of one `NEWSETELEM` message.
    pub(super) fn read(&mut self, set: SetName, message: &[u8]) -> Result<(), String> {
        for attribute in attributes(message) {
            let (LIST_ELEMENTS, list) = attribute? else { continue };
            for element in attributes(list) {
                let (_, element) = element?;
                self.read_one(set, element)?;
            }
        }
        Ok(())
    }

    fn read_one(&mut self, set: SetName, element: &[u8]) -> Result<(), String> {
        let mut parts = Parts::default();
        for attribute in attributes(element) {
            match attribute? {
                (KEY, value) => parts.key = Some(value),
                (DATA, value) => parts.data = Some(value),
                (FLAGS, value) => parts.flags = number(value)?,
                // Comments, and attributes of other kinds of sets.
                _ => {}
            }
        }
        let Some(key) = parts.key.filter(|_| parts.flags & CATCH_ALL == 0) else {
            self.foreign = true;
            return Ok(());
        };
        let key = data_key(key)?;
        if set == SetName::ServiceCidrs {
            let kept = if parts.flags & INTERVAL_END == 0 { &mut self.starts } else { &mut self.ends };
            kept.push(key);
            return Ok(());
        }
        let value = parts.data.map_or(Ok(Value::None), |data| self.value(data))?;
        self.insert(set, key, None, value);
        Ok(())
    }

    fn insert(&mut self, set: SetName, key: Key, key_end: Option<Key>, value: Value) {
        // A hash table that is being resized may list an element twice.
        if self.elements.insert((set, key), (key_end, value)).is_none() {
            self.count += 1;
        } else if set.is_interval() {
            // Two ranges with the same first key, from another program.
            self.foreign = true;
        }
    }

    fn value(&mut self, data: &[u8]) -> Result<Value, String> {
        let Some(attribute) = attributes(data).next() else {
            return Err("a value without data".to_owned());
        };
        match attribute? {
            (DATA_VALUE, value) => Key::from_slice(value).map(Value::Data).ok_or_else(|| too_long(value)),
            (DATA_VERDICT, verdict) => self.verdict(verdict),
            (kind, _) => Err(format!("a value of kind {kind}")),
        }
    }

    fn verdict(&mut self, verdict: &[u8]) -> Result<Value, String> {
        let (mut code, mut chain) = (None, None);
        for attribute in attributes(verdict) {
            match attribute? {
                (VERDICT_CODE, value) => code = Some(number(value)?),
                (VERDICT_CHAIN, value) => chain = Some(text(value)?),
                _ => {}
            }
        }
        let verdict = match (code, chain) {
            (Some(DROP), _) => Some(Verdict::Drop),
            (Some(GOTO), Some(name)) => self.chain(name).map(Verdict::Goto),
            _ => None,
        };
        Ok(verdict.map_or(Value::None, Value::Verdict))
    }

    fn chain(&mut self, name: &str) -> Option<Chain> {
        if let Some(chain) = self.chains.get(name) {
            return *chain;
        }
        let chain = Chain::parse(name);
        self.chains.insert(name.into(), chain);
        chain
    }

    pub(super) fn finish(&mut self, set: SetName) -> Finished {
        self.join(set);
        let finished = Finished { count: self.count, foreign: self.foreign };
        (self.count, self.foreign) = (0, false);
        finished
    }

    /// Joins first keys and ends into intervals.
    fn join(&mut self, set: SetName) {
        let (mut starts, mut ends) = (std::mem::take(&mut self.starts), std::mem::take(&mut self.ends));
        for keys in [&mut starts, &mut ends] {
            keys.sort_unstable();
            keys.dedup();
        }
        for (place, &start) in starts.iter().enumerate() {
            let end = ends.iter().copied().find(|&end| end > start);
            let next = starts.get(place + 1).copied();
            let last = match (end, next) {
                // We never write an interval that overlaps the next, or without its end because the next begins there.
                (Some(end), Some(next)) if next < end => {
                    self.foreign = true;
                    before(next)
                }
                (None, Some(next)) => {
                    self.foreign = true;
                    before(next)
                }
                (Some(end), _) => before(end),
                (None, None) => Key::from_slice(&vec![0xff; start.as_slice().len()]),
            };
            self.insert(set, start, last, Value::None);
        }
    }
}

fn data_key(data: &[u8]) -> Result<Key, String> {
    match attributes(data).next() {
        Some(Ok((DATA_VALUE, value))) => Key::from_slice(value).ok_or_else(|| too_long(value)),
        Some(Ok((kind, _))) => Err(format!("a key of kind {kind}")),
        Some(Err(error)) => Err(error),
        None => Err("a key without data".to_owned()),
    }
}

fn too_long(value: &[u8]) -> String {
    format!("data of {} bytes, more than any set of this table has", value.len())
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use super::*;
    use crate::{
        chain::Choice,
        element::Number,
        kernel::codec::{self, Body},
    };
    use keelson_proxy::model::{Family, Protocol};

    fn key(text: &str) -> Key {
        Key::new().ip(text.parse::<IpAddr>().unwrap())
    }

    /// Encodes elements, and decodes them like a dump.
    fn keys_survive_a_round_trip(set: SetName, elements: &[Element]) -> (Elements, Finished) {
        let mut buffer = Buffer::default();
        let open = buffer.begin(codec::message::NEW_SET_ELEMENT, Family::V4, 0, 1);
        buffer.text(LIST_TABLE, "keelson");
        let list = buffer.nest(LIST_ELEMENTS);
        elements.iter().for_each(|element| write(&mut buffer, element, true));
        buffer.close(list);
        buffer.end(open);
        let mut reader = Reader::default();
        for message in codec::incoming(buffer.as_slice()) {
            let Body::Message { attributes, .. } = message.unwrap().body else { panic!("not a message") };
            reader.read(set, attributes).unwrap();
        }
        let finished = reader.finish(set);
        (reader.elements, finished)
    }

    fn cidr(first: &str, last: &str) -> Element {
        Element { set: SetName::ServiceCidrs, key: key(first), key_end: Some(key(last)), value: Value::None }
    }

    #[test]
    fn elements_of_every_form_are_read_as_they_were_written() {
        let number = Key::new().number(Number(7));
        let port = key("10.0.0.1").protocol(Protocol::Tcp).port(80);
        let chain = Chain::Affinity { choice: Choice::Local, count: 3, seconds: 10_800, group: 0 };
        let of = |set, key, key_end, value| Element { set, key, key_end, value };
        for element in [
            of(SetName::ClusterIps, key("fd00::1"), None, Value::None),
            of(SetName::ClusterIpPorts, port, None, Value::Data(number)),
            of(SetName::InternalChoice, number, None, Value::Verdict(Verdict::Goto(chain))),
            of(SetName::Refused, port, None, Value::Verdict(Verdict::Drop)),
            of(
                SetName::SourceRanges,
                key("10.0.0.1").port(80).ip("10.1.0.0".parse().unwrap()).index(0x610),
                None,
                Value::None,
            ),
        ] {
            let (elements, finished) = keys_survive_a_round_trip(element.set, &[element]);
            let expected = ((element.set, element.key), (element.key_end, element.value));
            assert_eq!(elements.into_iter().collect::<Vec<_>>(), [expected]);
            assert_eq!(finished, Finished { count: 1, foreign: false });
        }
    }

    #[test]
    fn intervals_of_one_field_have_inclusive_ends_here() {
        let cidrs = [
            cidr("0.0.0.0", "0.255.255.255"),
            cidr("10.0.0.0", "10.0.0.255"),
            cidr("10.0.1.0", "10.0.1.255"),
            cidr("255.0.0.0", "255.255.255.255"),
        ];
        let (elements, finished) = keys_survive_a_round_trip(SetName::ServiceCidrs, &cidrs);
        assert_eq!(finished, Finished { count: 4, foreign: false });
        for cidr in cidrs {
            assert_eq!(elements.get(&(cidr.set, cidr.key)), Some(&(cidr.key_end, Value::None)), "{cidr:?}");
        }
    }

    #[test]
    fn an_interval_without_end_is_foreign() {
        let mut reader = Reader { starts: vec![key("10.0.1.0"), key("10.0.0.0")], ..Reader::default() };
        assert_eq!(reader.finish(SetName::ServiceCidrs), Finished { count: 2, foreign: true });
        let ends: Vec<_> = ["10.0.0.0", "10.0.1.0"]
            .map(|first| reader.elements[&(SetName::ServiceCidrs, key(first))].0)
            .into();
        assert_eq!(ends, [Some(key("10.0.0.255")), Some(key("255.255.255.255"))]);
        // The next set starts without the flag.
        assert_eq!(reader.finish(SetName::ClusterIps), Finished { count: 0, foreign: false });
    }

    #[test]
    fn keys_count_across_bytes() {
        assert_eq!(after(key("10.0.0.255")), Some(key("10.0.1.0")));
        assert_eq!(before(key("10.0.1.0")), Some(key("10.0.0.255")));
        assert_eq!(after(key("ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff")), None);
        assert_eq!(before(key("::")), None);
    }

    #[test]
    fn truncated_input_is_an_error() {
        let mut buffer = Buffer::default();
        write(&mut buffer, &cidr("10.0.0.0", "10.0.0.255"), true);
        let list = buffer.into_bytes();
        for end in 1..list.len() {
            let cut =
                [&((end + 4) as u16).to_ne_bytes()[..], &LIST_ELEMENTS.to_ne_bytes(), &list[..end]].concat();
            let mut reader = Reader::default();
            // Never a panic: an error, or the elements before the cut.
            let _ = reader.read(SetName::ServiceCidrs, &cut);
            let _ = reader.finish(SetName::ServiceCidrs);
            assert!(reader.elements.len() <= 1);
        }
        let mut reader = Reader::default();
        let cut = [&28u16.to_ne_bytes()[..], &LIST_ELEMENTS.to_ne_bytes(), &list[..16]].concat();
        assert!(reader.read(SetName::ServiceCidrs, &cut).is_err());
    }
}
