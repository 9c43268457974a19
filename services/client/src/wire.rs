//! Partial decoding of messages.
//!
//! Owns: [`RawCodec`], which leaves answers encoded, and the few fields that are read of them: the kind of an item, and
//! the name of the Service in it. In: bytes of the wire. Out: [`NextItem`] and [`WatchItem`] with Services as bytes.

use std::marker::PhantomData;

use bytes::{Buf as _, Bytes};
use keelson_proto::{
    endpoints::{ServiceName as WireName, Sync},
    localnetv1::{NextFilter, NodeInfo},
};
use prost::{
    DecodeError, Message,
    encoding::{DecodeContext, WireType, decode_key, decode_varint, skip_field},
};
use tonic::{
    Status,
    codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder},
};

use crate::{Error, RawService, ServiceName, state::checked_name};

/// Encodes requests; answers stay encoded.
#[derive(Debug)]
pub(crate) struct RawCodec<T>(PhantomData<T>);

impl<T> Default for RawCodec<T> {
    fn default() -> Self {
        Self(PhantomData)
    }
}

impl<T: Message + 'static> Codec for RawCodec<T> {
    type Encode = T;
    type Decode = Bytes;
    type Encoder = Self;
    type Decoder = Self;

    fn encoder(&mut self) -> Self {
        Self::default()
    }

    fn decoder(&mut self) -> Self {
        Self::default()
    }
}

impl<T: Message + 'static> Encoder for RawCodec<T> {
    type Item = T;
    type Error = Status;

    fn encode(&mut self, item: T, buffer: &mut EncodeBuf<'_>) -> Result<(), Status> {
        item.encode(buffer).map_err(|error| Status::internal(error.to_string()))
    }
}

impl<T: Message + 'static> Decoder for RawCodec<T> {
    type Item = Bytes;
    type Error = Status;

    fn decode(&mut self, buffer: &mut DecodeBuf<'_>) -> Result<Option<Bytes>, Status> {
        Ok(Some(buffer.copy_to_bytes(buffer.remaining())))
    }
}

/// The length-delimited fields of a message (strings, bytes, messages) with their numbers; others are skipped.
struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    fn step(&mut self) -> Result<Option<(u32, &'a [u8])>, Error> {
        while !self.0.is_empty() {
            let (tag, wire_type) = decode_key(&mut self.0).map_err(undecodable)?;
            if wire_type != WireType::LengthDelimited {
                skip_field(wire_type, tag, &mut self.0, DecodeContext::default()).map_err(undecodable)?;
                continue;
            }
            let length = decode_varint(&mut self.0).map_err(undecodable)?;
            let parts = usize::try_from(length).ok().and_then(|length| self.0.split_at_checked(length));
            let (value, rest) =
                parts.ok_or_else(|| Error::malformed("a field is longer than its message"))?;
            self.0 = rest;
            return Ok(Some((tag, value)));
        }
        Ok(None)
    }
}

impl<'a> Iterator for Fields<'a> {
    type Item = Result<(u32, &'a [u8]), Error>;

    fn next(&mut self) -> Option<Self::Item> {
        self.step().transpose()
    }
}

fn undecodable(error: DecodeError) -> Error {
    Error::malformed(error.to_string())
}

fn message<M: Message + Default>(bytes: &[u8]) -> Result<M, Error> {
    M::decode(bytes).map_err(undecodable)
}

/// Two messages of the same field are merged, which protobuf defines as the concatenation of their bytes.
fn merge(slot: &mut Option<Bytes>, is_full: &Bytes, value: &[u8]) {
    *slot = Some(match slot.take() {
        None => is_full.slice_ref(value),
        Some(before) => [&before, value].concat().into(),
    });
}

fn text(bytes: &[u8]) -> Result<&str, Error> {
    std::str::from_utf8(bytes).map_err(|_| Error::malformed("a name is not valid UTF-8"))
}

/// Reads only the first two fields of an encoded `localnetv1.ServiceEndpoints`, at any position.
fn service(bytes: Bytes) -> Result<RawService, Error> {
    let (mut namespace, mut name) = ("", "");
    for field in Fields(&bytes) {
        match field? {
            (1, value) => namespace = text(value)?,
            (2, value) => name = text(value)?,
            _ => {}
        }
    }
    let name = checked_name(namespace, name)?;
    Ok(RawService { name, bytes })
}

/// A `localnetv1.NextItem`.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct NextItem {
    pub(crate) next: Option<NextFilter>,
    pub(crate) service: Option<RawService>,
    pub(crate) node: Option<NodeInfo>,
}

impl NextItem {
    pub(crate) fn read(bytes: &Bytes) -> Result<Self, Error> {
        let (mut next, mut found, mut node) = (None, None, None);
        for field in Fields(bytes) {
            match field? {
                (1, value) => merge(&mut next, bytes, value),
                (2, value) => merge(&mut found, bytes, value),
                (16, value) => merge(&mut node, bytes, value),
                _ => {}
            }
        }
        Ok(Self {
            next: next.map(|bytes| message(&bytes)).transpose()?,
            service: found.map(service).transpose()?,
            node: node.map(|bytes| message(&bytes)).transpose()?,
        })
    }
}

/// A `keelson.endpoints.v1.WatchItem`.
#[derive(Debug, PartialEq)]
pub(crate) enum WatchItem {
    Reset,
    Set(RawService),
    Delete(ServiceName),
    Sync(Sync),
    Node(NodeInfo),
    /// A kind of item that this client does not know.
    Unknown,
}

impl WatchItem {
    pub(crate) fn read(bytes: &Bytes) -> Result<Self, Error> {
        // The last member of a oneof counts; a repeated one is merged.
        let mut found: Option<(u32, Bytes)> = None;
        for field in Fields(bytes) {
            let (tag, value) = field?;
            if (1..=5).contains(&tag) {
                let mut slot = found.take().filter(|(before, _)| *before == tag).map(|(_, bytes)| bytes);
                merge(&mut slot, bytes, value);
                found = slot.map(|bytes| (tag, bytes));
            }
        }
        Ok(match found {
            Some((1, _)) => Self::Reset,
            Some((2, bytes)) => Self::Set(service(bytes)?),
            Some((3, bytes)) => {
                let name: WireName = message(&bytes)?;
                Self::Delete(checked_name(&name.namespace, &name.name)?)
            }
            Some((4, bytes)) => Self::Sync(message(&bytes)?),
            Some((5, bytes)) => Self::Node(message(&bytes)?),
            _ => Self::Unknown,
        })
    }
}

#[cfg(test)]
mod tests {
    use keelson_proto::{endpoints as pb, localnetv1 as local};
    use proptest::prelude::*;

    use super::*;

    fn endpoints(namespace: &str, name: &str) -> local::ServiceEndpoints {
        local::ServiceEndpoints {
            namespace: namespace.into(),
            name: name.into(),
            r#type: "ClusterIP".into(),
            client_ip_affinity_seconds: 7,
            endpoints: vec![local::Endpoint { hostname: "h".into(), ..Default::default() }],
            ..Default::default()
        }
    }

    fn field(tag: u8, value: &[u8]) -> Vec<u8> {
        [&[tag << 3 | 2, value.len() as u8], value].concat()
    }

    #[test]
    fn an_item_of_next_is_taken_apart() {
        let item = local::NextItem {
            next: Some(local::NextFilter { instance_id: u64::MAX, rev: 3, ..Default::default() }),
            endpoints: Some(endpoints("ns", "web")),
            node: Some(local::NodeInfo { name: "n".into(), ..Default::default() }),
        };
        let read = NextItem::read(&item.encode_to_vec().into()).unwrap();
        assert_eq!((read.next, read.node), (item.next, item.node));
        let service = read.service.unwrap();
        assert_eq!(service.name().as_str(), "ns/web");
        assert_eq!(Some(service.decode().unwrap()), item.endpoints);
        assert_eq!(NextItem::read(&Bytes::new()).unwrap(), NextItem::default());
    }

    #[test]
    fn every_kind_of_item_of_watch_is_known() {
        use pb::watch_item::Item;
        let read = |item| WatchItem::read(&pb::WatchItem { item }.encode_to_vec().into()).unwrap();
        assert_eq!(read(Some(Item::Reset(pb::Reset {}))), WatchItem::Reset);
        let name = pb::ServiceName { namespace: "ns".into(), name: "web".into() };
        assert_eq!(read(Some(Item::Delete(name))), WatchItem::Delete(ServiceName::new("ns", "web")));
        let sync = pb::Sync { rev: 4, ..Default::default() };
        assert_eq!(read(Some(Item::Sync(sync.clone()))), WatchItem::Sync(sync));
        let node = local::NodeInfo { zone: "z".into(), ..Default::default() };
        assert_eq!(read(Some(Item::Node(node.clone()))), WatchItem::Node(node));
        let WatchItem::Set(set) = read(Some(Item::Set(endpoints("ns", "web")))) else { panic!() };
        assert_eq!(set.decode().unwrap(), endpoints("ns", "web"));
        assert_eq!(read(None), WatchItem::Unknown);
        assert_eq!(WatchItem::read(&field(15, b"newer").into()).unwrap(), WatchItem::Unknown);
    }

    #[test]
    fn names_are_found_in_any_order_and_the_last_counts() {
        let name = |parts: &[Vec<u8>]| service(parts.concat().into()).map(|raw| raw.name.to_string());
        assert_eq!(name(&[field(2, b"web"), field(7, b""), field(1, b"ns")]).unwrap(), "ns/web");
        assert_eq!(name(&[field(1, b"a"), field(2, b"b"), vec![136, 1, 9], field(2, b"c")]).unwrap(), "a/c");
        assert!(name(&[field(1, b"ns")]).is_err());
        assert!(name(&[field(2, &[0xff])]).is_err());
        assert!(name(&[field(1, b"n/s"), field(2, b"a")]).is_err());
        assert!(name(&[field(2, b"web"), vec![10, 200]]).is_err(), "a length beyond the end");
        assert!(name(&[field(2, b"web"), vec![10, 255, 255, 255, 255, 255, 255, 255, 255, 255, 1]]).is_err());
    }

    #[test]
    fn a_message_that_comes_in_two_parts_is_one() {
        let parts = [field(2, &field(1, b"ns")), field(2, &field(2, b"web"))].concat();
        for name in [
            NextItem::read(&parts.clone().into()).unwrap().service.unwrap().name,
            match WatchItem::read(&parts.clone().into()).unwrap() {
                WatchItem::Set(raw) => raw.name,
                other => panic!("{other:?}"),
            },
        ] {
            assert_eq!(name.as_str(), "ns/web");
        }
        let replaced = [parts, field(1, b"")].concat();
        assert_eq!(WatchItem::read(&replaced.into()).unwrap(), WatchItem::Reset);
    }

    proptest! {
        #[test]
        fn decoding_agrees_with_prost_and_does_not_panic(bytes: Vec<u8>) {
            let bytes = Bytes::from(bytes);
            if let (Ok(ours), Ok(item)) = (NextItem::read(&bytes), local::NextItem::decode(bytes.clone())) {
                prop_assert_eq!(ours.next, item.next);
                prop_assert_eq!(ours.node, item.node);
                prop_assert_eq!(ours.service.map(|raw| raw.decode().unwrap()), item.endpoints);
            }
            let _ = WatchItem::read(&bytes);
        }

        #[test]
        fn a_byte_that_was_changed_does_no_harm(at: prop::sample::Index, to: u8) {
            let item = local::NextItem { endpoints: Some(endpoints("ns", "web")), ..Default::default() };
            let mut bytes = item.encode_to_vec();
            let at = at.index(bytes.len());
            bytes[at] = to;
            if let Ok(item) = NextItem::read(&bytes.into()) {
                let _ = item.service.map(|raw| raw.decode());
            }
        }
    }
}
