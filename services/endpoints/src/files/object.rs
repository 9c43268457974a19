//! One object of a manifest.
//!
//! Owns: [`Object`] and which kinds are read ([`Role`]). In: the fields of an object, as JSON. Out: the object,
//! packed; or an [`ObjectError`] with the path of the invalid field. No I/O.

use std::fmt;

use bytes::Bytes;
use keelson_endpoint_publisher::{
    EndpointSlice, NodeView, ObjectEvent, Service, ServiceCidr, ServiceName, SourceEvent, SourceKind,
};
use keelson_proto::kubernetes::ObjectMeta;
use prost::Message;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};
use serde_path_to_error::Segment;

use super::node::NodeManifest;

/// The namespace of an object without one, as in kubectl.
const DEFAULT_NAMESPACE: &str = "default";

/// Dropped: as large as the object itself, and not read here.
const LAST_APPLIED: &str = "kubectl.kubernetes.io/last-applied-configuration";

pub(super) type Key = (SourceKind, ServiceName);

/// The content of an object, packed because a folder may hold ten thousand of them.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Body {
    /// A message of `keelson.kubernetes`.
    Packed(Bytes),
    Node(Box<NodeView>),
}

/// An object and the line on which it begins.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Object {
    pub(super) key: Key,
    pub(super) line: u32,
    pub(super) body: Body,
}

/// How an object of a kind is processed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Role {
    Read(SourceKind),
    /// Its items are read; items without a kind are of this one.
    List(Option<SourceKind>),
    /// It is ignored.
    Ignored,
}

/// A fault of an object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ObjectError {
    /// The field: names, and indexes of items.
    pub(super) path: Vec<Step>,
    /// Without the path.
    pub(super) reason: String,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Step {
    Field(String),
    /// From 0.
    Item(usize),
}

impl ObjectError {
    fn at(path: &[&str], reason: impl Into<String>) -> Self {
        Self {
            path: path.iter().map(|field| Step::Field((*field).to_owned())).collect(),
            reason: reason.into(),
        }
    }
}

impl fmt::Display for ObjectError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, step) in self.path.iter().enumerate() {
            match step {
                Step::Field(name) if index == 0 => f.write_str(name)?,
                Step::Field(name) => write!(f, ".{name}")?,
                Step::Item(number) => write!(f, "[{number}]")?,
            }
        }
        if !self.path.is_empty() {
            f.write_str(": ")?;
        }
        f.write_str(&self.reason)
    }
}

/// Kind, API group, version of what is read.
const KINDS: [(&str, &str, &str, SourceKind); 4] = [
    ("Service", "", "v1", SourceKind::Services),
    ("EndpointSlice", "discovery.k8s.io", "v1", SourceKind::EndpointSlices),
    ("ServiceCIDR", "networking.k8s.io", "v1", SourceKind::ServiceCidrs),
    ("Node", "", "v1", SourceKind::Node),
];

/// The name of a kind in manifests.
pub(super) fn kind_name(kind: SourceKind) -> &'static str {
    KINDS.iter().find(|entry| entry.3 == kind).map_or("object", |entry| entry.0)
}

/// The role of an object of this kind and version. `implied` is the kind of items in a list of one kind, in which the
/// API server leaves it out.
///
/// # Errors
/// Kind or version is missing, or the version of a known kind is not supported.
pub(super) fn role(
    api_version: Option<&Value>,
    kind: Option<&Value>,
    implied: Option<SourceKind>,
) -> Result<Role, ObjectError> {
    let present = |value: Option<&Value>| value.is_some_and(|value| !value.is_null() && *value != "");
    if let (false, false, Some(implied)) = (present(api_version), present(kind), implied) {
        return Ok(Role::Read(implied));
    }
    let text = |value: Option<&Value>, field: &'static str| match value {
        Some(Value::String(text)) if !text.is_empty() => Ok(text.clone()),
        Some(Value::Null) | None => Err(ObjectError::at(&[], format!("{field} is missing"))),
        Some(Value::String(_)) => Err(ObjectError::at(&[field], "is empty")),
        Some(_) => Err(ObjectError::at(&[field], "is not a string")),
    };
    let kind = text(kind, "kind")?;
    let api_version = text(api_version, "apiVersion")?;
    let (group, version) = api_version.split_once('/').unwrap_or(("", &api_version));
    if kind == "List" && group.is_empty() {
        return Ok(Role::List(None));
    }
    let (single, list) = kind.strip_suffix("List").map_or((kind.as_str(), false), |single| (single, true));
    // A kind of the same name in another group is another kind, such as the Services of Knative.
    let Some(entry) = KINDS.iter().find(|entry| entry.0 == single && entry.1 == group) else {
        return Ok(Role::Ignored);
    };
    if version != entry.2 {
        let known = if group.is_empty() { entry.2.to_owned() } else { format!("{group}/{}", entry.2) };
        let reason = format!("{api_version} of {kind} is not supported; use {known}");
        return Err(ObjectError::at(&["apiVersion"], reason));
    }
    Ok(if list { Role::List(Some(entry.3)) } else { Role::Read(entry.3) })
}

/// A label without a value exists with an empty value, as Go reads it.
fn empty_labels(fields: &mut Map<String, Value>) {
    let Some(metadata) = fields.get_mut("metadata").and_then(Value::as_object_mut) else { return };
    for field in ["labels", "annotations"] {
        let Some(labels) = metadata.get_mut(field).and_then(Value::as_object_mut) else { continue };
        labels.values_mut().filter(|value| value.is_null()).for_each(|value| *value = "".into());
    }
}

/// Some tools print an unset field as `null`.
fn without_nulls(value: &mut Value) {
    match value {
        Value::Object(fields) => {
            fields.retain(|_, value| !value.is_null());
            fields.values_mut().for_each(without_nulls);
        }
        Value::Array(items) => {
            items.retain(|item| !item.is_null());
            items.iter_mut().for_each(without_nulls);
        }
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}

fn typed<T: DeserializeOwned>(value: Value) -> Result<T, ObjectError> {
    serde_path_to_error::deserialize(value).map_err(|error| {
        let path = error.path().iter().filter_map(|segment| match segment {
            Segment::Seq { index } => Some(Step::Item(*index)),
            Segment::Map { key } => Some(Step::Field(key.clone())),
            Segment::Enum { variant } => Some(Step::Field(variant.clone())),
            Segment::Unknown => None,
        });
        ObjectError { path: path.collect(), reason: error.inner().to_string() }
    })
}

fn name_of(metadata: &str) -> Result<(), ObjectError> {
    if metadata.is_empty() {
        return Err(ObjectError::at(&["metadata"], "name is missing"));
    }
    named(metadata, "name")
}

/// Rejects a name that could be confused with another one.
fn named(name: &str, field: &'static str) -> Result<(), ObjectError> {
    if name.contains(|character: char| character == '/' || character.is_whitespace()) {
        return Err(ObjectError::at(&["metadata", field], format!("{name:?} is not a valid name")));
    }
    Ok(())
}

fn metadata(metadata: &mut Option<ObjectMeta>, namespaced: bool) -> Result<ServiceName, ObjectError> {
    let metadata = metadata.get_or_insert_default();
    name_of(&metadata.name)?;
    named(&metadata.namespace, "namespace")?;
    if !namespaced {
        metadata.namespace.clear();
    } else if metadata.namespace.is_empty() {
        DEFAULT_NAMESPACE.clone_into(&mut metadata.namespace);
    }
    metadata.annotations.remove(LAST_APPLIED);
    Ok(ServiceName::new(&metadata.namespace, &metadata.name))
}

/// Reads one object.
///
/// # Errors
/// A field has another type than in the API, or a required one is missing.
pub(super) fn object(kind: SourceKind, mut fields: Map<String, Value>) -> Result<Object, ObjectError> {
    empty_labels(&mut fields);
    let mut value = Value::Object(fields);
    without_nulls(&mut value);
    let (name, body) = match kind {
        SourceKind::Services => {
            let mut service: Service = typed(value)?;
            let name = metadata(&mut service.metadata, true)?;
            if service.spec.is_none() {
                return Err(ObjectError::at(&[], "spec is missing"));
            }
            (name, Body::Packed(service.encode_to_vec().into()))
        }
        SourceKind::EndpointSlices => {
            let mut slice: EndpointSlice = typed(value)?;
            let name = metadata(&mut slice.metadata, true)?;
            if slice.address_type.is_empty() {
                return Err(ObjectError::at(&[], "addressType is missing"));
            }
            for port in &mut slice.ports {
                // The API server's default; a port without a name matches no port of a Service.
                port.name.get_or_insert_default();
            }
            (name, Body::Packed(slice.encode_to_vec().into()))
        }
        SourceKind::ServiceCidrs => {
            let mut cidr: ServiceCidr = typed(value)?;
            (metadata(&mut cidr.metadata, false)?, Body::Packed(cidr.encode_to_vec().into()))
        }
        SourceKind::Node => {
            let node: NodeManifest = typed(value)?;
            name_of(&node.metadata.name)?;
            (ServiceName::new("", &node.metadata.name), Body::Node(Box::new(node.view())))
        }
    };
    Ok(Object { key: (kind, name), line: 0, body })
}

fn to_event<T: Message + Default>(name: ServiceName, body: Option<Body>) -> Option<ObjectEvent<T>> {
    match body {
        None => Some(ObjectEvent::Deleted(name)),
        // Packed in this process, so it can be unpacked.
        Some(Body::Packed(bytes)) => {
            T::decode(bytes).ok().map(|object| ObjectEvent::Upsert(Box::new(object)))
        }
        Some(Body::Node(_)) => None,
    }
}

#[derive(Debug, Clone, PartialEq)]
pub(super) enum Change {
    Listing,
    /// An object; `None`: deleted.
    Object(ServiceName, Option<Body>),
    /// The listing is complete.
    Listed,
}

fn all<T: Message + Default>(changes: Vec<Change>) -> Vec<ObjectEvent<T>> {
    let seen = changes.into_iter().filter_map(|change| match change {
        Change::Listing => Some(ObjectEvent::Listing),
        Change::Object(name, body) => to_event(name, body),
        Change::Listed => Some(ObjectEvent::ListComplete),
    });
    seen.collect()
}

/// The event with these changes; for the Node, the last one counts.
pub(super) fn event(kind: SourceKind, node_name: &str, changes: Vec<Change>) -> SourceEvent {
    match kind {
        SourceKind::Services => SourceEvent::Services(all(changes)),
        SourceKind::EndpointSlices => SourceEvent::EndpointSlices(all(changes)),
        SourceKind::ServiceCidrs => SourceEvent::ServiceCidrs(all(changes)),
        SourceKind::Node => {
            let view = changes.into_iter().rev().find_map(|change| match change {
                Change::Object(_, Some(Body::Node(view))) => Some(*view),
                _ => None,
            });
            let none = || NodeView { name: node_name.to_owned(), ..NodeView::default() };
            SourceEvent::Node(view.unwrap_or_else(none))
        }
    }
}
