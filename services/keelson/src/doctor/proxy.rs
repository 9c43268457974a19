//! Checks of the service proxy: kernel, kube-proxy beside it, ports, pod networks, conntrack.
//!
//! In: facts. Out: checks.

use ipnet::IpNet;
use keelson_config::{DetectLocalMode, ProxyBackend};

use super::{
    Check, Facts,
    agent::port,
    facts::{Backend, NodeAnswer, Proxy, Sysctl},
};

const KUBE_PROXY: &str = "kube-proxy";
const BACKEND: &str = "backend";
const NETWORKS: &str = "pod networks";
const CONNTRACK: &str = "conntrack";

pub(super) fn checks(facts: &Facts) -> Vec<Check> {
    let Some(proxy) = &facts.proxy else {
        let found = "keelson proxy is not on this node; to check before it is: keelson doctor proxy";
        return vec![Check::skipped(BACKEND, found)];
    };
    let mut checks = backend(facts, proxy);
    checks.extend(kube_proxy(facts, proxy));
    let settings = &facts.settings.proxy;
    checks.extend(port(facts, "proxy.healthz_bind_address", settings.healthz_bind_address));
    checks.extend(port(facts, "proxy.metrics_bind_address", settings.metrics_bind_address));
    checks.extend(port(facts, "proxy.http", settings.http));
    checks.extend(networks(facts));
    checks.extend(conntrack(proxy));
    checks
}

/// As the proxy chooses at its start: the first that can be opened, with `auto`.
fn backend(facts: &Facts, proxy: &Proxy) -> Vec<Check> {
    let configured = facts.settings.proxy.backend;
    let is_auto = configured == ProxyBackend::Auto;
    let name = configured.to_string();
    let candidates: Vec<_> = proxy
        .backends
        .iter()
        .filter(|backend| if is_auto { backend.is_automatic } else { backend.name == name })
        .collect();
    let mut checks = Vec::new();
    match candidates.iter().find(|backend| backend.opened.is_ok()) {
        Some(chosen) => {
            let rejected: Vec<String> = candidates
                .iter()
                .take_while(|backend| backend.name != chosen.name)
                .filter_map(|backend| Some(format!("{}: {}", backend.name, backend.opened.as_ref().err()?)))
                .collect();
            let found = format!("{} can be opened (proxy.backend is {name})", chosen.name);
            checks.push(match rejected.is_empty() {
                true => Check::ok(BACKEND, found),
                false => Check::warning(BACKEND, format!("{found}; not chosen: {}", rejected.join("; ")), ""),
            });
        }
        None => {
            let reasons: Vec<String> = candidates
                .iter()
                .filter_map(|backend| Some(format!("{}: {}", backend.name, backend.opened.as_ref().err()?)))
                .collect();
            checks.push(Check::failed(
                BACKEND,
                format!("none can be opened (proxy.backend is {name}): {}", reasons.join("; ")),
                "run as root; load the kernel modules, or choose another proxy.backend",
            ));
        }
    }
    for other in proxy.backends.iter().filter(|backend| !backend.rules.is_empty()) {
        let has = |backend: &&Backend| backend.name == other.name || backend.includes == Some(other.name);
        if !candidates.iter().any(has) {
            checks.push(Check::warning(
                BACKEND,
                format!("rules of the backend {} are on this node: {}", other.name, other.rules.join(", ")),
                advice(facts, other.name),
            ));
        }
    }
    checks
}

/// What to do about rules of another backend.
fn advice(facts: &Facts, backend: &str) -> String {
    let settings = &facts.settings;
    let is_beside =
        settings.proxy.service_proxy_name.is_some() || !settings.endpoints.service_proxy_names.is_empty();
    match settings.proxy.take_over && !is_beside {
        true => {
            format!(
                "the proxy removes them after its first sync; or: keelson proxy cleanup --backend {backend}"
            )
        }
        false if is_beside => format!(
            "they decide beside this proxy; if no proxy of this node uses the backend {backend}: keelson proxy cleanup \
             --backend {backend}"
        ),
        false => format!("keelson proxy cleanup --backend {backend}, after the first sync of keelson proxy"),
    }
}

/// O4: a kube-proxy beside this proxy takes its ports, and answers probes in its place.
fn kube_proxy(facts: &Facts, proxy: &Proxy) -> Vec<Check> {
    let is_beside = facts.settings.proxy.service_proxy_name.is_some();
    let running = proxy.kube_proxies.first().map(|process| process.pid);
    let mut checks = Vec::new();
    checks.push(match running {
        Some(pid) if is_beside => Check::ok(KUBE_PROXY, format!("runs (process {pid}); this proxy serves other Services")),
        Some(pid) => Check::failed(
            KUBE_PROXY,
            format!("runs on this node (process {pid}): both program the same Services, and it answers the health checks"),
            "keep it off this node first: docs/install.md, in place of kube-proxy",
        ),
        None => Check::ok(KUBE_PROXY, "does not run in this network namespace"),
    });
    if running.is_none() && !proxy.leftovers.is_empty() {
        let action = match facts.settings.proxy.take_over {
            true => "the proxy removes them after its first sync",
            false => "keelson proxy cleanup --kube-proxy, after the first sync of keelson proxy",
        };
        checks.push(Check::warning(
            KUBE_PROXY,
            format!("left on this node: {}", proxy.leftovers.join("; ")),
            action,
        ));
    }
    checks
}

/// O15: a guess masquerades the wrong packets.
fn networks(facts: &Facts) -> Vec<Check> {
    let settings = &facts.settings.proxy;
    let of_node = facts.cluster.as_ref().and_then(|cluster| match &cluster.node {
        NodeAnswer::Found { pod_cidrs } => Some(parsed(pod_cidrs.iter().map(String::as_str))),
        _ => None,
    });
    match settings.detect_local_mode {
        DetectLocalMode::ClusterCidr => {}
        DetectLocalMode::NodeCidr => return vec![node_cidr(of_node.as_deref())],
        mode => return vec![Check::skipped(NETWORKS, format!("not used with detect_local_mode {mode}"))],
    }
    let own = &settings.cluster_cidr;
    if own.is_empty() {
        return vec![Check::warning(
            NETWORKS,
            "proxy.cluster_cidr is not set: traffic of pods is not recognized",
            "set proxy.cluster_cidr to the networks of the cluster's pods",
        )];
    }
    let mut checks = Vec::new();
    if let Some(networks) = &of_node {
        let outside: Vec<IpNet> = networks
            .iter()
            .filter(|network| !own.iter().any(|own| own.contains(*network)))
            .copied()
            .collect();
        checks.push(match (outside.is_empty(), networks.is_empty()) {
            (_, true) => Check::skipped(NETWORKS, "the Node has no spec.podCIDRs: the CNI plugin assigns addresses"),
            (true, false) => Check::ok(NETWORKS, format!("proxy.cluster_cidr {} contains the Node's {}", list(own), list(networks))),
            (false, false) => Check::failed(
                NETWORKS,
                format!("proxy.cluster_cidr {} does not contain the Node's {}: traffic of its pods would be masqueraded", list(own), list(&outside)),
                "set proxy.cluster_cidr to the networks of the cluster's pods",
            ),
        });
    }
    let subnet = facts.cluster.as_ref().and_then(|cluster| cluster.kubeadm.pod_subnet.as_ref());
    if let Some(subnet) = subnet {
        let expected = parsed(subnet.split(','));
        let is_same = expected.iter().all(|network| own.contains(network));
        checks.push(match is_same {
            true => Check::ok(NETWORKS, format!("proxy.cluster_cidr is kubeadm's podSubnet, {subnet}")),
            false => Check::failed(
                NETWORKS,
                format!("proxy.cluster_cidr is {}, and kubeadm's podSubnet {subnet}", list(own)),
                "set proxy.cluster_cidr to podSubnet",
            ),
        });
    }
    if checks.is_empty() {
        checks.push(Check::skipped(
            NETWORKS,
            format!(
                "proxy.cluster_cidr {} cannot be compared: no Node and no kubeadm-config was read",
                list(own)
            ),
        ));
    }
    checks
}

fn node_cidr(of_node: Option<&[IpNet]>) -> Check {
    match of_node {
        Some([]) => Check::failed(
            NETWORKS,
            "detect_local_mode is NodeCIDR, and the Node has no spec.podCIDRs",
            "set proxy.detect_local_mode to ClusterCIDR and proxy.cluster_cidr",
        ),
        Some(networks) => Check::ok(NETWORKS, format!("spec.podCIDRs of the Node: {}", list(networks))),
        None => Check::skipped(NETWORKS, "the Node cannot be read"),
    }
}

fn parsed<'a>(networks: impl Iterator<Item = &'a str>) -> Vec<IpNet> {
    networks
        .filter_map(|network| network.trim().parse::<IpNet>().ok())
        .map(|network| network.trunc())
        .collect()
}

fn list(networks: &[IpNet]) -> String {
    networks.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

/// O14: the values that kube-proxy would have set.
fn conntrack(proxy: &Proxy) -> Option<Check> {
    let is_met = |sysctl: &&Sysctl| {
        sysctl.now.is_some_and(|now| now == sysctl.wanted || sysctl.at_least && now > sysctl.wanted)
    };
    if proxy.sysctls.is_empty() {
        return None;
    }
    if proxy.sysctls.iter().all(|sysctl| sysctl.now.is_none()) {
        return Some(Check::warning(
            CONNTRACK,
            "no setting of conntrack can be read: the module nf_conntrack is not loaded",
            "modprobe nf_conntrack, or let the first rule of the proxy load it",
        ));
    }
    let shown = |sysctl: &Sysctl| match sysctl.now {
        Some(now) => format!("{} {now} -> {}", sysctl.name, sysctl.wanted),
        None => format!("{} unknown -> {}", sysctl.name, sysctl.wanted),
    };
    let (met, differ): (Vec<&Sysctl>, Vec<&Sysctl>) = proxy.sysctls.iter().partition(is_met);
    Some(match differ.is_empty() {
        true => Check::ok(CONNTRACK, format!("{} settings have the wanted values", met.len())),
        false => Check::ok(
            CONNTRACK,
            format!(
                "the proxy will set {}; `keelson proxy state` shows what was refused",
                differ.into_iter().map(shown).collect::<Vec<_>>().join(", ")
            ),
        ),
    })
}

#[cfg(test)]
#[path = "proxy_tests.rs"]
mod tests;
