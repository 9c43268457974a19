//! The few messages of the API's protobuf encoding that the agent reads.
//!
//! Owns: the envelope (`k8s\0` and `runtime.Unknown`), the requested part of `meta/v1.PartialObjectMetadata`, and the
//! event of a watch. Field numbers are those of `k8s.io/apimachinery`'s `generated.proto`, which never change. In: the
//! bytes of an answer. Out: [`ObjectMeta`], [`Status`], and the content of an envelope.

use bytes::Bytes;
use prost::Message;

/// Every protobuf answer begins with these bytes.
pub(crate) const MAGIC: &[u8] = b"k8s\0";

/// `runtime.Unknown`: the envelope.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct Unknown {
    #[prost(message, optional, tag = "1")]
    pub(crate) type_meta: Option<TypeMeta>,
    #[prost(bytes = "bytes", tag = "2")]
    pub(crate) raw: Bytes,
}

/// `runtime.TypeMeta`.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct TypeMeta {
    #[prost(string, tag = "1")]
    pub(crate) api_version: String,
    #[prost(string, tag = "2")]
    pub(crate) kind: String,
}

/// `meta/v1.PartialObjectMetadata`; also the beginning of every object of the API.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct PartialObjectMetadata {
    #[prost(message, optional, tag = "1")]
    pub(crate) metadata: Option<ObjectMeta>,
}

/// `meta/v1.ObjectMeta`, in part.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct ObjectMeta {
    #[prost(string, tag = "1")]
    pub(crate) name: String,
    #[prost(string, tag = "5")]
    pub(crate) uid: String,
    #[prost(string, tag = "6")]
    pub(crate) resource_version: String,
}

/// `meta/v1.Status`, in part: the body of an error when protobuf was requested.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct Status {
    #[prost(string, tag = "3")]
    pub(crate) message: String,
    #[prost(string, tag = "4")]
    pub(crate) reason: String,
    #[prost(message, optional, tag = "5")]
    pub(crate) details: Option<StatusDetails>,
    #[prost(int32, tag = "6")]
    pub(crate) code: i32,
}

/// `meta/v1.StatusDetails`, in part.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct StatusDetails {
    #[prost(message, repeated, tag = "4")]
    pub(crate) causes: Vec<StatusCause>,
    #[prost(int32, tag = "5")]
    pub(crate) retry_after_seconds: i32,
}

/// `meta/v1.StatusCause`, in part.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct StatusCause {
    #[prost(string, tag = "1")]
    pub(crate) reason: String,
}

/// `meta/v1.ListMeta`, in part.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct ListMeta {
    #[prost(string, tag = "2")]
    pub(crate) resource_version: String,
    /// `continue`, a keyword in Rust.
    #[prost(string, tag = "3")]
    pub(crate) continuation: String,
}

/// `meta/v1.WatchEvent`, which has no envelope on the wire; its object has one.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct WatchEvent {
    #[prost(string, tag = "1")]
    pub(crate) kind: String,
    #[prost(message, optional, tag = "2")]
    pub(crate) object: Option<RawExtension>,
}

/// `runtime.RawExtension`.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct RawExtension {
    #[prost(bytes = "bytes", tag = "1")]
    pub(crate) raw: Bytes,
}

/// Decodes the envelope of an answer.
pub(crate) fn open(body: &[u8]) -> Option<Unknown> {
    Unknown::decode(body.strip_prefix(MAGIC)?).ok()
}

/// As [`open`], without copying the content.
pub(crate) fn open_shared(body: &Bytes) -> Option<Unknown> {
    body.starts_with(MAGIC).then(|| Unknown::decode(body.slice(MAGIC.len()..)).ok())?
}

/// The metadata in an answer, a full object or [`PartialObjectMetadata`].
pub(crate) fn metadata(body: &[u8]) -> Option<ObjectMeta> {
    PartialObjectMetadata::decode(open(body)?.raw).ok()?.metadata
}

pub(crate) fn status(body: &[u8]) -> Option<Status> {
    let envelope = open(body)?;
    if envelope.type_meta.as_ref().is_none_or(|t| t.kind != "Status") {
        return None;
    }
    Status::decode(envelope.raw).ok()
}
