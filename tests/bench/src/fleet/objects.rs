//! Owns: Node objects as large as those of real nodes, and the status write that Leases replaced. In: a name. Out:
//! objects and patches.

use anyhow::{Context as _, Result};
use k8s_openapi::api::core::v1::Node;
use serde_json::{Value, json};

const CONDITIONS: [(&str, &str, &str); 4] = [
    ("MemoryPressure", "False", "KubeletHasSufficientMemory"),
    ("DiskPressure", "False", "KubeletHasNoDiskPressure"),
    ("PIDPressure", "False", "KubeletHasSufficientPID"),
    ("Ready", "True", "KubeletReady"),
];
/// As many as a kubelet lists (`nodeStatusMaxImages`).
const IMAGES: usize = 50;

pub(super) fn name(node: usize) -> String {
    format!("fleet-{node:05}")
}

/// A Node with the labels, images and conditions of a node with workloads.
pub(super) fn node(number: usize) -> Result<Node> {
    let name = name(number);
    let resources = json!({
        "cpu": "8", "memory": "32829340Ki", "ephemeral-storage": "101430960Ki", "hugepages-1Gi": "0",
        "hugepages-2Mi": "0", "pods": "110",
    });
    let object = json!({
        "metadata": {
            "name": name,
            "labels": {
                "kubernetes.io/hostname": name, "kubernetes.io/os": "linux", "kubernetes.io/arch": "amd64",
                "beta.kubernetes.io/os": "linux", "beta.kubernetes.io/arch": "amd64",
                "node.kubernetes.io/instance-type": "general-8", "topology.kubernetes.io/region": "north",
                "topology.kubernetes.io/zone": format!("north-{}", number % 3), "example.org/pool": "default",
            },
            "annotations": {
                "node.alpha.kubernetes.io/ttl": "0",
                "volumes.kubernetes.io/controller-managed-attach-detach": "true",
            },
        },
        "spec": {"providerID": format!("example://north/{name}")},
        "status": {
            "addresses": [
                {"type": "InternalIP", "address": format!("10.{}.{}.7", number / 250, number % 250)},
                {"type": "Hostname", "address": name},
            ],
            "capacity": resources,
            "allocatable": resources,
            "conditions": CONDITIONS.map(|(kind, status, reason)| json!({
                "type": kind, "status": status, "reason": reason, "message": "kubelet has nothing to complain of",
                "lastHeartbeatTime": now(), "lastTransitionTime": now(),
            })),
            "daemonEndpoints": {"kubeletEndpoint": {"Port": 10250}},
            "images": (0..IMAGES).map(image).collect::<Vec<_>>(),
            "nodeInfo": {
                "architecture": "amd64", "operatingSystem": "linux", "kernelVersion": "6.1.0-28-amd64",
                "osImage": "Debian GNU/Linux 12 (bookworm)", "containerRuntimeVersion": "containerd://2.4.2",
                "kubeletVersion": "v1.36.3", "kubeProxyVersion": "", "bootID": id(number, 1),
                "machineID": id(number, 2), "systemUUID": id(number, 3),
            },
        },
    });
    serde_json::from_value(object).context("this is no Node")
}

fn image(number: usize) -> Value {
    let repository = format!("registry.example.org/team-{}/service-{number}", number % 7);
    let digest = format!("{:064x}", number as u128 * 0x9e37_79b9_7f4a_7c15);
    json!({
        "names": [format!("{repository}@sha256:{digest}"), format!("{repository}:v1.{number}.0")],
        "sizeBytes": 200_000_000 - number * 1_000_000,
    })
}

fn id(node: usize, what: usize) -> String {
    format!("{node:08x}-0000-4000-8000-{what:012x}")
}

fn now() -> String {
    format!("{:.0}", jiff::Timestamp::now())
}

/// The strategic merge patch of a status in which only timestamps have changed, as the kubelet sends it.
pub(super) fn heartbeat() -> Value {
    let now = now();
    json!({"status": {
        "$setElementOrder/conditions": CONDITIONS.map(|(kind, ..)| json!({"type": kind})),
        "conditions": CONDITIONS.map(|(kind, ..)| json!({"lastHeartbeatTime": now, "type": kind})),
    }})
}
