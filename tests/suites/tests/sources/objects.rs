//! Owns: the manifests of the cases. In: names. Out: JSON, for an API server and for a file.

use serde_json::{Value, json};

pub(crate) const PROXY_NAME: &str = "service.kubernetes.io/service-proxy-name";

pub(crate) fn service(namespace: &str, name: &str, cluster_ip: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Service",
        "metadata": {
            "namespace": namespace, "name": name,
            "labels": {"app": name}, "annotations": {"example.com/note": "nobody reads this"},
        },
        "spec": {"clusterIP": cluster_ip, "ports": [{"name": "http", "port": 80, "protocol": "TCP"}]},
    })
}

/// A slice of the Service `of` with these addresses.
pub(crate) fn slice(namespace: &str, name: &str, of: &str, addresses: &[&str]) -> Value {
    let endpoints: Vec<_> = addresses
        .iter()
        .map(
            |address| json!({"addresses": [address], "conditions": {"ready": true}, "nodeName": "elsewhere"}),
        )
        .collect();
    json!({
        "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
        "metadata": {
            "namespace": namespace, "name": name,
            "labels": {"kubernetes.io/service-name": of, "endpointslice.kubernetes.io/managed-by": "a-test"},
            "annotations": {"endpoints.kubernetes.io/last-change-trigger-time": "2026-01-01T00:00:00Z"},
        },
        "addressType": "IPv4", "endpoints": endpoints,
        "ports": [{"name": "http", "port": 8080, "protocol": "TCP"}],
    })
}

pub(crate) fn cidr(name: &str, cidr: &str) -> Value {
    json!({
        "apiVersion": "networking.k8s.io/v1", "kind": "ServiceCIDR",
        "metadata": {"name": name}, "spec": {"cidrs": [cidr]},
    })
}

/// A Node in a zone, optionally with a taint with this key.
pub(crate) fn node(name: &str, zone: &str, taint: Option<&str>) -> Value {
    let taints: Vec<_> = taint.iter().map(|key| json!({"key": key, "effect": "NoSchedule"})).collect();
    json!({
        "apiVersion": "v1", "kind": "Node",
        "metadata": {"name": name, "labels": {"topology.kubernetes.io/zone": zone, "other": "label"}},
        "spec": {"podCIDRs": ["10.200.0.0/24"], "podCIDR": "10.200.0.0/24", "taints": taints},
        "status": {"addresses": [
            {"type": "ExternalIP", "address": "192.0.2.9"},
            {"type": "InternalIP", "address": "10.1.2.3"},
            {"type": "Hostname", "address": name},
        ]},
    })
}

/// `object` with a field changed: `pointer` as in RFC 6901.
pub(crate) fn with(mut object: Value, pointer: &str, value: Value) -> Value {
    let (parent, field) = pointer.rsplit_once('/').unwrap_or_default();
    if let Some(Value::Object(parent)) = object.pointer_mut(parent) {
        parent.insert(field.replace("~1", "/"), value);
    }
    object
}
