//! What the settings of `keelson proxy` demand of each other.

use std::net::{IpAddr, SocketAddr};

use super::Violation;
use crate::settings::{Proxy, Settings};
use crate::values::{DetectLocalMode, ListenSpec, SocketSpec};

pub(super) fn violations(settings: &Settings) -> Vec<Violation> {
    let proxy = &settings.proxy;
    let mut found: Vec<Violation> = families(proxy).into_iter().chain(detector(proxy)).collect();
    found.extend(http(proxy));
    found.extend(ports(settings));
    found.extend(socket(settings));
    found
}

/// A family has one address of the node and one network of pods.
fn families(proxy: &Proxy) -> Vec<Violation> {
    let mut found = Vec::new();
    if twice(&proxy.bind_address) {
        found.push(Violation {
            keys: &["proxy.bind_address"],
            message:
                "bind_address has two addresses of one IP family; set at most one IPv4 and one IPv6 address"
                    .into(),
        });
    }
    let networks: Vec<IpAddr> = proxy.cluster_cidr.iter().map(|network| network.addr()).collect();
    if twice(&networks) {
        found.push(Violation {
            keys: &["proxy.cluster_cidr"],
            message:
                "cluster_cidr has two networks of one IP family, which kube-proxy does not accept either; \
                 set at most one IPv4 and one IPv6 network"
                    .into(),
        });
    }
    found
}

fn twice(addresses: &[IpAddr]) -> bool {
    let of_v4 = addresses.iter().filter(|ip| ip.is_ipv4()).count();
    of_v4 > 1 || addresses.len() - of_v4 > 1
}

/// A detector has what it detects by.
fn detector(proxy: &Proxy) -> Option<Violation> {
    let (keys, message): (&'static [&'static str], _) = match proxy.detect_local_mode {
        DetectLocalMode::BridgeInterface if proxy.bridge_interface.is_empty() => (
            &["proxy.detect_local_mode", "proxy.bridge_interface"],
            "detect_local_mode = \"BridgeInterface\" requires bridge_interface; set it, or another mode",
        ),
        DetectLocalMode::InterfaceNamePrefix if proxy.interface_name_prefix.is_empty() => (
            &["proxy.detect_local_mode", "proxy.interface_name_prefix"],
            "detect_local_mode = \"InterfaceNamePrefix\" requires interface_name_prefix; set it, or another mode",
        ),
        _ => return None,
    };
    Some(Violation { keys, message: message.into() })
}

fn http(proxy: &Proxy) -> Option<Violation> {
    let address = proxy.http?;
    let loopback = address.ip().to_canonical().is_loopback();
    (!loopback && !proxy.http_allow_remote).then(|| Violation {
        keys: &["proxy.http", "proxy.http_allow_remote"],
        message: format!(
            "{address} is not a loopback address, and any client that can reach it could read all Services; \
             use 127.0.0.1 or [::1], or set http_allow_remote = true"
        ),
    })
}

/// Of two listeners at one address the second would fail.
fn ports(settings: &Settings) -> Vec<Violation> {
    let (proxy, debug) = (&settings.proxy, settings.debug.http);
    let (healthz, metrics) = (proxy.healthz_bind_address, proxy.metrics_bind_address);
    let pairs: [(_, _, &'static [&'static str]); 6] = [
        (healthz, metrics, &["proxy.healthz_bind_address", "proxy.metrics_bind_address"]),
        (healthz, proxy.http, &["proxy.healthz_bind_address", "proxy.http"]),
        (metrics, proxy.http, &["proxy.metrics_bind_address", "proxy.http"]),
        (healthz, debug, &["proxy.healthz_bind_address", "debug.http"]),
        (metrics, debug, &["proxy.metrics_bind_address", "debug.http"]),
        (proxy.http, debug, &["proxy.http", "debug.http"]),
    ];
    let clash = |(a, b, keys): (Option<SocketAddr>, Option<SocketAddr>, _)| {
        let (a, b) = (a?, b?);
        overlap(a, b).then(|| Violation {
            keys,
            message: format!("{a} and {b} are the same address; use a different port for each"),
        })
    };
    pairs.into_iter().filter_map(clash).collect()
}

/// `0.0.0.0` is every address of IPv4, `::` every address; a free port is another each time.
fn overlap(a: SocketAddr, b: SocketAddr) -> bool {
    let covers = |a: IpAddr, b: IpAddr| a.is_unspecified() && (a.is_ipv6() || b.is_ipv4());
    a.port() != 0
        && a.port() == b.port()
        && (a.ip() == b.ip() || covers(a.ip(), b.ip()) || covers(b.ip(), a.ip()))
}

/// Two sockets at one path would replace each other.
fn socket(settings: &Settings) -> Vec<Violation> {
    let own = &settings.proxy.listen;
    let served = settings.endpoints.listen.contains(&ListenSpec::Unix(own.clone()));
    let others: [(_, &'static [&'static str]); 4] = [
        (is(own, &settings.cri.listen), &["proxy.listen", "cri.listen"]),
        (is(own, &settings.cri.runtime_endpoint), &["proxy.listen", "cri.runtime_endpoint"]),
        (is(own, &settings.debug.listen), &["proxy.listen", "debug.listen"]),
        (served, &["proxy.listen", "endpoints.listen"]),
    ];
    others
        .into_iter()
        .filter(|(same, _)| *same)
        .map(|(_, keys)| Violation {
            keys,
            message: format!("{} are both {own}; use a different socket for each", keys.join(" and ")),
        })
        .collect()
}

fn is(a: &SocketSpec, b: &SocketSpec) -> bool {
    a == b
}
