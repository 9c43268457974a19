//! Owns: what runs in the cluster beside Keelson: CoreDNS, kube-proxy as kubeadm deploys it, and the pods of the checks. In: the
//! registry of their images. Out: manifests.

/// Address of the DNS Service.
pub(super) const DNS: &str = "10.96.0.10";

pub(super) fn coredns(registry: &str) -> String {
    include_str!("coredns.yaml").replace("REGISTRY", registry).replace("CLUSTER_IP", DNS)
}

pub(super) fn workload(registry: &str) -> String {
    include_str!("workload.yaml").replace("REGISTRY", registry)
}

/// kube-proxy of this node without a rule about nodes, as `kubeadm upgrade` leaves it.
pub(super) fn kube_proxy(registry: &str, server: &str) -> String {
    include_str!("kube-proxy.yaml").replace("REGISTRY", registry).replace("SERVER", server)
}
