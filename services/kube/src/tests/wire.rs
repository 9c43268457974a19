//! The API's protobuf, encoded as kube-apiserver does.

use bytes::{BufMut as _, Bytes, BytesMut};
use keelson_proto::kubernetes::{Endpoint, EndpointSlice, ObjectMeta};
use prost::Message;

use crate::protobuf::{ListMeta, MAGIC, RawExtension, Status, TypeMeta, Unknown, WatchEvent};

pub(crate) fn enveloped(kind: &str, object: &impl Message) -> Bytes {
    let type_meta = Some(TypeMeta { api_version: "any/v1".into(), kind: kind.into() });
    let envelope = Unknown { type_meta, raw: object.encode_to_vec().into() };
    [MAGIC, &envelope.encode_to_vec()].concat().into()
}

/// An event after its length.
pub(crate) fn event(of: &str, kind: &str, object: &impl Message) -> Bytes {
    let object = Some(RawExtension { raw: enveloped(kind, object) });
    framed(&WatchEvent { kind: of.into(), object }.encode_to_vec())
}

pub(crate) fn framed(event: &[u8]) -> Bytes {
    let mut out = BytesMut::new();
    out.put_u32(event.len().try_into().unwrap());
    out.extend_from_slice(event);
    out.freeze()
}

#[derive(Clone, PartialEq, Message)]
struct ListOf {
    #[prost(message, optional, tag = "1")]
    metadata: Option<ListMeta>,
    #[prost(bytes = "bytes", repeated, tag = "2")]
    items: Vec<Bytes>,
}

pub(crate) fn list<T: Message>(kind: &str, version: &str, items: &[T]) -> Bytes {
    page(kind, version, items, "")
}

/// A page of such a list; `continuation` requests the next.
pub(crate) fn page<T: Message>(kind: &str, version: &str, items: &[T], continuation: &str) -> Bytes {
    let metadata = Some(ListMeta { resource_version: version.into(), continuation: continuation.into() });
    let items = items.iter().map(|item| item.encode_to_vec().into()).collect();
    enveloped(&format!("{kind}List"), &ListOf { metadata, items })
}

/// The metadata of an object as the server sends it.
pub(crate) fn meta(name: &str, version: u64) -> ObjectMeta {
    let pairs = |all: &[(&str, &str)]| all.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
    ObjectMeta {
        name: name.into(),
        namespace: "ns".into(),
        resource_version: version.to_string(),
        labels: pairs(&[("kubernetes.io/service-name", "web"), ("app", "what nobody reads")]),
        annotations: pairs(&[
            ("endpoints.kubernetes.io/last-change-trigger-time", "2026-01-01T00:00:00Z"),
            ("kubectl.kubernetes.io/last-applied-configuration", "what nobody reads"),
        ]),
    }
}

/// A slice with one endpoint, whose address is `10.0.0.VERSION`.
pub(crate) fn slice(name: &str, version: u64) -> EndpointSlice {
    EndpointSlice {
        metadata: Some(meta(name, version)),
        endpoints: vec![Endpoint { addresses: vec![format!("10.0.0.{version}")], ..Endpoint::default() }],
        address_type: "IPv4".into(),
        ..EndpointSlice::default()
    }
}

pub(crate) fn bookmark(version: u64, initial_end: bool) -> EndpointSlice {
    let mut meta = ObjectMeta { resource_version: version.to_string(), ..ObjectMeta::default() };
    if initial_end {
        meta.annotations.insert("k8s.io/initial-events-end".into(), "true".into());
    }
    EndpointSlice { metadata: Some(meta), ..EndpointSlice::default() }
}

pub(crate) fn status(code: i32, reason: &str) -> Status {
    Status { code, reason: reason.into(), message: format!("{reason} is what it said"), details: None }
}
