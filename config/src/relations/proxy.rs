//! What the settings of `keelson proxy` require of each other.

use std::net::{IpAddr, SocketAddr};

use super::{Violations, is_remote};
use crate::settings::{Proxy, Settings};
use crate::values::DetectLocalMode;

pub(super) fn check(settings: &Settings, found: &mut Violations) {
    let proxy = &settings.proxy;
    families(proxy, found);
    pod_devices(proxy, found);
    detector(proxy, found);
    let http = proxy.http.filter(is_remote).filter(|_| !proxy.http_allow_remote);
    found.add_remote(["proxy.http", "proxy.http_allow_remote"], http, "all Services");
    ports(settings, found);
}

/// A family has one node address and one pod network.
fn families(proxy: &Proxy, found: &mut Violations) {
    found.add_if(
        has_two_of_a_family(proxy.bind_address.iter().copied()),
        &["proxy.bind_address"],
        "bind_address has two addresses of one IP family; set at most one IPv4 and one IPv6 address",
    );
    found.add_if(
        has_two_of_a_family(proxy.cluster_cidr.iter().map(|network| network.addr())),
        &["proxy.cluster_cidr"],
        "cluster_cidr has two networks of one IP family, which kube-proxy does not accept either; set at most \
         one IPv4 and one IPv6 network",
    );
}

/// Packets that are handed over pass no connection tracking.
fn pod_devices(proxy: &Proxy, found: &mut Violations) {
    found.add_if(
        !proxy.ebpf_pod_devices.is_empty() && !proxy.ebpf_untracked_pods,
        &["proxy.ebpf_pod_devices", "proxy.ebpf_untracked_pods"],
        "ebpf_pod_devices requires ebpf_untracked_pods = true; set it, or leave ebpf_pod_devices empty",
    );
}

fn has_two_of_a_family(addresses: impl Iterator<Item = IpAddr>) -> bool {
    let (v4, v6): (Vec<_>, Vec<_>) = addresses.partition(IpAddr::is_ipv4);
    v4.len() > 1 || v6.len() > 1
}

fn detector(proxy: &Proxy, found: &mut Violations) {
    found.add_if(
        proxy.detect_local_mode == DetectLocalMode::BridgeInterface && proxy.bridge_interface.is_empty(),
        &["proxy.detect_local_mode", "proxy.bridge_interface"],
        "detect_local_mode = \"BridgeInterface\" requires bridge_interface; set it, or another mode",
    );
    found.add_if(
        proxy.detect_local_mode == DetectLocalMode::InterfaceNamePrefix
            && proxy.interface_name_prefix.is_empty(),
        &["proxy.detect_local_mode", "proxy.interface_name_prefix"],
        "detect_local_mode = \"InterfaceNamePrefix\" requires interface_name_prefix; set it, or another mode",
    );
}

/// The second of two listeners at one address would fail.
fn ports(settings: &Settings, found: &mut Violations) {
    let proxy = &settings.proxy;
    let listeners = [
        ("proxy.healthz_bind_address", proxy.healthz_bind_address),
        ("proxy.metrics_bind_address", proxy.metrics_bind_address),
        ("proxy.http", proxy.http),
        ("debug.http", settings.debug.http),
    ];
    for (index, (key, address)) in listeners.into_iter().enumerate() {
        for (other_key, other) in &listeners[index + 1..] {
            if let (Some(a), Some(b)) = (address, *other)
                && overlap(a, b)
            {
                let message = format!("{a} and {b} are the same address; use a different port for each");
                found.add(&[key, other_key], message);
            }
        }
    }
}

/// `0.0.0.0` includes every IPv4 address, `::` every address. Port 0 never overlaps.
fn overlap(a: SocketAddr, b: SocketAddr) -> bool {
    let covers = |a: IpAddr, b: IpAddr| a.is_unspecified() && (a.is_ipv6() || b.is_ipv4());
    a.port() != 0
        && a.port() == b.port()
        && (a.ip() == b.ip() || covers(a.ip(), b.ip()) || covers(b.ip(), a.ip()))
}
