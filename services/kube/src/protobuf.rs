//! The few messages of the API's protobuf encoding that the agent reads.
//!
//! Owns: the envelope (`k8s\0` and `runtime.Unknown`) and of `meta/v1.PartialObjectMetadata` what is asked for. Field
//! numbers are those of `k8s.io/apimachinery`'s `generated.proto`, which never change. In: the bytes of an
//! answer. Out: [`ObjectMeta`].

use prost::Message;

/// With these bytes every protobuf answer begins.
const MAGIC: &[u8] = b"k8s\0";

/// `runtime.Unknown`: the envelope.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct Unknown {
    #[prost(message, optional, tag = "1")]
    pub(crate) type_meta: Option<TypeMeta>,
    #[prost(bytes = "vec", tag = "2")]
    pub(crate) raw: Vec<u8>,
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

/// `meta/v1.Status`, in part: what an error's body is when protobuf was asked for.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct Status {
    #[prost(string, tag = "3")]
    pub(crate) message: String,
    #[prost(string, tag = "4")]
    pub(crate) reason: String,
    #[prost(message, optional, tag = "5")]
    pub(crate) details: Option<StatusDetails>,
}

/// `meta/v1.StatusDetails`, in part.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct StatusDetails {
    #[prost(int32, tag = "5")]
    pub(crate) retry_after_seconds: i32,
}

/// Takes an answer out of its envelope.
pub(crate) fn open(body: &[u8]) -> Option<Unknown> {
    Unknown::decode(body.strip_prefix(MAGIC)?).ok()
}

/// The metadata in an answer, whole object or [`PartialObjectMetadata`].
pub(crate) fn metadata(body: &[u8]) -> Option<ObjectMeta> {
    PartialObjectMetadata::decode(open(body)?.raw.as_slice()).ok()?.metadata
}

/// The Status in an answer.
pub(crate) fn status(body: &[u8]) -> Option<Status> {
    let envelope = open(body)?;
    if envelope.type_meta.as_ref().is_none_or(|t| t.kind != "Status") {
        return None;
    }
    Status::decode(envelope.raw.as_slice()).ok()
}
