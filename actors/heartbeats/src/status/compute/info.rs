//! Addresses and `nodeInfo`.
//!
//! In: the host's facts and addresses, the runtime's version. Out: the fields, unchanged where nothing was read.

use k8s_openapi::api::core::v1::{NodeAddress, NodeStatus, NodeSwapStatus};

use super::{Inputs, RuntimeView};
use crate::status::policy::StatusPolicy;

/// Addresses of the policy or of the host, then the name, as a kubelet without a cloud provider.
pub(super) fn addresses(status: &mut NodeStatus, inputs: &Inputs, policy: &StatusPolicy) {
    let ips = if policy.node_ips.0.is_empty() { &inputs.readings.addresses } else { &policy.node_ips.0 };
    if ips.is_empty() {
        // A node whose network is being reconfigured keeps its last addresses.
        return;
    }
    let address = |kind: &str, address: String| NodeAddress { type_: kind.to_owned(), address };
    let mut all: Vec<_> = ips.iter().map(|ip| address("InternalIP", ip.to_string())).collect();
    all.push(address("Hostname", policy.node_name.clone()));
    status.addresses = Some(all);
}

pub(super) fn node_info(status: &mut NodeStatus, inputs: &Inputs, policy: &StatusPolicy) {
    let facts = &inputs.facts;
    let info = status.node_info.get_or_insert_default();
    for (field, value) in [
        (&mut info.machine_id, &facts.machine_id),
        (&mut info.system_uuid, &facts.system_uuid),
        (&mut info.boot_id, &facts.boot_id),
        (&mut info.kernel_version, &facts.kernel_version),
        (&mut info.os_image, &facts.os_image),
        (&mut info.operating_system, &facts.operating_system),
        (&mut info.architecture, &facts.architecture),
        (&mut info.kubelet_version, &policy.kubelet_version),
    ] {
        if !value.is_empty() {
            field.clone_from(value);
        }
    }
    if let RuntimeView::Reported(report) = &inputs.runtime {
        info.container_runtime_version.clone_from(&report.version);
    }
    // As the kubelet, which no longer reports the version of kube-proxy.
    info.kube_proxy_version.clear();
    match inputs.readings.swap_capacity_bytes {
        Some(0) => info.swap = None,
        Some(bytes) => info.swap = Some(NodeSwapStatus { capacity: i64::try_from(bytes).ok() }),
        None => {}
    }
}
