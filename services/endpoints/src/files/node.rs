//! The Node of a manifest.
//!
//! Owns: [`NodeManifest`]. In: a manifest of kind Node. Out: a [`NodeView`]. No I/O.

use std::{collections::BTreeMap, net::IpAddr};

use keelson_endpoint_publisher::NodeView;
use serde::Deserialize;
use serde_json::Value;

/// <https://kubernetes.io/docs/reference/labels-annotations-taints/#topologykubernetesiozone>
const ZONE: &str = "topology.kubernetes.io/zone";

/// The cluster autoscaler is about to remove the node; load balancers must not send new traffic to it (KEP-3836).
const TO_BE_DELETED: &str = "ToBeDeletedByClusterAutoscaler";

/// The fields of a Node (core/v1) that are read.
#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(super) struct NodeManifest {
    pub(super) metadata: Metadata,
    spec: Spec,
    status: Status,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(super) struct Metadata {
    pub(super) name: String,
    labels: BTreeMap<String, String>,
    /// Only its presence matters.
    deletion_timestamp: Option<Value>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct Spec {
    #[serde(rename = "podCIDR")]
    pod_cidr: String,
    #[serde(rename = "podCIDRs")]
    pod_cidrs: Vec<String>,
    taints: Vec<Taint>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Taint {
    key: String,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Status {
    addresses: Vec<Address>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Address {
    #[serde(rename = "type")]
    kind: String,
    address: String,
}

impl NodeManifest {
    fn ips<'a>(&'a self, kind: &'a str) -> impl Iterator<Item = IpAddr> + 'a {
        let addresses = self.status.addresses.iter().filter(move |address| address.kind == kind);
        addresses.filter_map(|address| address.address.parse().ok())
    }

    pub(super) fn view(self) -> NodeView {
        let ips = self.ips("InternalIP").chain(self.ips("ExternalIP")).collect();
        let tainted = self.spec.taints.iter().any(|taint| taint.key == TO_BE_DELETED);
        let mut pod_cidrs = self.spec.pod_cidrs;
        // The older field is the first of the newer list.
        if pod_cidrs.is_empty() && !self.spec.pod_cidr.is_empty() {
            pod_cidrs.push(self.spec.pod_cidr);
        }
        let mut labels = self.metadata.labels;
        NodeView {
            name: self.metadata.name,
            exists: true,
            zone: labels.remove(ZONE).filter(|zone| !zone.is_empty()),
            ips,
            pod_cidrs,
            eligible: !tainted && self.metadata.deletion_timestamp.is_none(),
        }
    }
}
