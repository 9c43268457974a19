//! Paths, media types and bodies of requests.
//!
//! Owns: their texts. In: the actors' types. Out: text; nothing is sent here. Bodies are as
//! small as the API allows, because every node sends a renewal every ten seconds.

use std::fmt::Write as _;

use jiff::Timestamp;
use keelson_actor_system::cluster::{
    ClusterEvent, EventObject, LEASE_NAMESPACE, LeaseCreate, LeasePatch, Owner,
};
use serde_json::{Map, Value, json};

/// Metadata only: protobuf, or JSON from a server without protobuf. The same list as in client-go's metadata client.
pub(crate) const ACCEPT_METADATA: &str = "application/vnd.kubernetes.protobuf;as=PartialObjectMetadata;g=meta.k8s.io;v=v1,\
     application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1,application/json";
/// Metadata only, as JSON, for one object or the events of a watch.
pub(crate) const ACCEPT_JSON_METADATA: &str =
    "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1,application/json";
/// Metadata only, as JSON, for a list.
pub(crate) const ACCEPT_JSON_METADATA_LIST: &str =
    "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1,application/json";
/// For a list.
pub(crate) const ACCEPT_PROTOBUF: &str = "application/vnd.kubernetes.protobuf";
/// For the events of a watch.
pub(crate) const ACCEPT_PROTOBUF_WATCH: &str = "application/vnd.kubernetes.protobuf;stream=watch";
pub(crate) const ACCEPT_JSON: &str = "application/json";
/// The reporting component of Events.
const COMPONENT: &str = "keelson";
/// RFC 7386.
pub(crate) const MERGE_PATCH: &str = "application/merge-patch+json";
/// The API's own patch, which merges lists by key.
pub(crate) const STRATEGIC_MERGE_PATCH: &str = "application/strategic-merge-patch+json";

/// The collection of all nodes' Leases, for POST.
pub(crate) fn leases_path() -> String {
    format!("/apis/coordination.k8s.io/v1/namespaces/{LEASE_NAMESPACE}/leases")
}

pub(crate) fn lease_path(name: &str) -> String {
    format!("{}/{}", leases_path(), escaped(name))
}

pub(crate) fn node_path(name: &str) -> String {
    format!("/api/v1/nodes/{}", escaped(name))
}

/// The collection of Events in a namespace, for POST.
pub(crate) fn events_path(namespace: &str) -> String {
    format!("/api/v1/namespaces/{}/events", escaped(namespace))
}

pub(crate) fn event_path(namespace: &str, name: &str) -> String {
    format!("{}/{}", events_path(namespace), escaped(name))
}

/// Escapes every byte with a meaning in URLs as `%XX`.
pub(crate) fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_' | b'~') {
            out.push(char::from(byte));
        } else {
            // Writing to a String does not fail.
            let _ = write!(out, "%{byte:02X}");
        }
    }
    out
}

/// A MicroTime as the API server writes it: six digits and `Z`. A time out of range becomes the nearest in range.
pub(crate) fn micro_time(unix_us: i64) -> String {
    let time = Timestamp::from_microsecond(unix_us).unwrap_or(if unix_us < 0 {
        Timestamp::MIN
    } else {
        Timestamp::MAX
    });
    format!("{time:.6}")
}

/// A Time as the API server writes it: whole seconds. A time out of range becomes the epoch.
fn time(unix_ms: i64) -> String {
    let time = Timestamp::from_second(unix_ms.div_euclid(1000)).unwrap_or_default();
    format!("{time:.0}")
}

/// The namespace of an Event: that of its object, or the one of Events on cluster-scoped objects.
pub(crate) fn event_namespace(event: &ClusterEvent) -> &str {
    match &event.object {
        EventObject::Pod { namespace, .. } => namespace,
        EventObject::OwnNode => "default",
    }
}

/// The body of a POST of an Event that `node` reports. core/v1, as in the kubelet, so that its permission suffices.
pub(crate) fn event_to_create(node: &str, event: &ClusterEvent) -> String {
    let object = match &event.object {
        EventObject::Pod { namespace, name, uid } => {
            json!({"apiVersion": "v1", "kind": "Pod", "namespace": namespace, "name": name, "uid": uid})
        }
        EventObject::OwnNode => json!({"apiVersion": "v1", "kind": "Node", "name": node, "uid": node}),
    };
    json!({
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": event.name, "namespace": event_namespace(event)},
        "involvedObject": object,
        "type": if event.is_warning { "Warning" } else { "Normal" },
        "reason": event.reason,
        "message": event.message,
        "count": event.count,
        "firstTimestamp": time(event.first_unix_ms),
        "lastTimestamp": time(event.last_unix_ms),
        "source": {"component": COMPONENT, "host": node},
        "reportingComponent": COMPONENT,
        "reportingInstance": node,
    })
    .to_string()
}

/// The merge patch of an Event that occurred again.
pub(crate) fn event_to_patch(event: &ClusterEvent) -> String {
    json!({
        "count": event.count,
        "lastTimestamp": time(event.last_unix_ms),
        "message": event.message,
    })
    .to_string()
}

fn owner_references(owner: &Owner) -> Value {
    json!([{"apiVersion": "v1", "kind": "Node", "name": owner.name, "uid": owner.uid}])
}

pub(crate) fn lease_to_create(lease: &LeaseCreate) -> String {
    let mut metadata = Map::new();
    metadata.insert("name".into(), json!(lease.name));
    if let Some(owner) = &lease.owner {
        metadata.insert("ownerReferences".into(), owner_references(owner));
    }
    let now = micro_time(lease.now_unix_us);
    json!({
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": metadata,
        "spec": {
            "holderIdentity": lease.holder,
            "leaseDurationSeconds": lease.duration_seconds,
            "acquireTime": now,
            "renewTime": now,
            "leaseTransitions": lease.transitions,
        },
    })
    .to_string()
}

/// The merge patch of a renewal. With the resourceVersion the server answers 409 unless it is the latest.
pub(crate) fn lease_to_patch(patch: &LeasePatch) -> String {
    let mut metadata = Map::new();
    metadata.insert("resourceVersion".into(), json!(patch.resource_version));
    if let Some(owner) = &patch.owner {
        metadata.insert("ownerReferences".into(), owner_references(owner));
    }
    if patch.drop_managed_fields {
        // One empty entry is the documented way to clear the list; an empty list means "unchanged".
        metadata.insert("managedFields".into(), json!([{}]));
    }
    let mut spec = Map::new();
    spec.insert("renewTime".into(), json!(micro_time(patch.renew_unix_us)));
    if let Some(seconds) = patch.duration_seconds {
        spec.insert("leaseDurationSeconds".into(), json!(seconds));
    }
    if let Some(acquire) = &patch.acquire {
        spec.insert("holderIdentity".into(), json!(acquire.holder));
        spec.insert("acquireTime".into(), json!(micro_time(acquire.acquire_unix_us)));
        spec.insert("leaseTransitions".into(), json!(acquire.transitions));
    }
    json!({"metadata": metadata, "spec": spec}).to_string()
}

#[cfg(test)]
mod tests {
    use keelson_actor_system::cluster::LeaseHolder;

    use super::*;

    #[test]
    fn a_micro_time_has_six_digits_and_z() {
        for (us, text) in [
            (0, "1970-01-01T00:00:00.000000Z"),
            (1_700_000_000_000_001, "2023-11-14T22:13:20.000001Z"),
            (-1, "1969-12-31T23:59:59.999999Z"),
        ] {
            assert_eq!(micro_time(us), text);
        }
        for us in [i64::MIN, i64::MAX] {
            assert!(micro_time(us).ends_with('Z'));
        }
    }

    #[test]
    fn a_renewal_is_as_small_as_it_can_be() {
        let patch = LeasePatch {
            name: "n".into(),
            resource_version: "17".into(),
            renew_unix_us: 1_700_000_000_000_001,
            duration_seconds: None,
            owner: None,
            acquire: None,
            drop_managed_fields: false,
        };
        assert_eq!(
            lease_to_patch(&patch),
            r#"{"metadata":{"resourceVersion":"17"},"spec":{"renewTime":"2023-11-14T22:13:20.000001Z"}}"#
        );
        let patch = LeasePatch {
            duration_seconds: Some(40),
            owner: Some(Owner { name: "n".into(), uid: "u".into() }),
            acquire: Some(LeaseHolder { holder: "h".into(), acquire_unix_us: 0, transitions: 3 }),
            drop_managed_fields: true,
            ..patch
        };
        let body: Value = serde_json::from_str(&lease_to_patch(&patch)).unwrap();
        assert_eq!(
            body,
            json!({
                "metadata": {
                    "resourceVersion": "17",
                    "ownerReferences": [{"apiVersion": "v1", "kind": "Node", "name": "n", "uid": "u"}],
                    "managedFields": [{}],
                },
                "spec": {
                    "renewTime": "2023-11-14T22:13:20.000001Z",
                    "leaseDurationSeconds": 40,
                    "holderIdentity": "h",
                    "acquireTime": "1970-01-01T00:00:00.000000Z",
                    "leaseTransitions": 3,
                },
            })
        );
    }

    #[test]
    fn names_cannot_leave_their_place_in_a_path() {
        assert_eq!(node_path("worker-1.example.org"), "/api/v1/nodes/worker-1.example.org");
        assert_eq!(node_path("../a?b=c#d é"), "/api/v1/nodes/..%2Fa%3Fb%3Dc%23d%20%C3%A9");
    }
}
