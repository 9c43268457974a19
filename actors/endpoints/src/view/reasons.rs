//! Decisions in words.
//!
//! Owns: the sentence for each rule. In: the typed reasons of the other modules. Out: text for people; no program
//! parses it.

use std::fmt::{self, Write as _};

use super::{
    merge::{Candidate, Fault, Place, Unused},
    service::{AddressKind, Facts, Ignored, PROXY_NAME, Unserved},
    topology::{Decision, Mode},
};
use crate::NodeView;

pub(super) const NO_USABLE_ENDPOINT: &str =
    "no endpoint on any node is ready, or terminating and still serving";

impl fmt::Display for Unserved<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Missing => f.write_str("the Service does not exist, only EndpointSlices of it"),
            Self::OtherProxy(name) => {
                write!(f, "its label {PROXY_NAME} ({name:?}) assigns it to another service proxy")
            }
            Self::NoClusterIp => f.write_str("it has no cluster IP (spec.clusterIP is empty)"),
            Self::Headless => f.write_str("it is headless (spec.clusterIP is None)"),
            Self::ExternalName => f.write_str("it is of type ExternalName, which only DNS implements"),
            Self::NoFamily => f.write_str("none of its cluster IPs is valid"),
            Self::NoPort => f.write_str("it has no valid port"),
        }
    }
}

impl fmt::Display for AddressKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::External => "external IP",
            Self::LoadBalancer => "load balancer IP",
        })
    }
}

impl fmt::Display for Ignored<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::ClusterIp(family, text) => {
                let name = family.as_str();
                write!(f, "cluster IP {text:?}: ignored for {name}: invalid, or not the first of that family")
            }
            Self::FamilyWithoutIp(family) => {
                write!(f, "IP family {family:?}: not a valid IP family, or not in spec.clusterIPs")
            }
            Self::Address(kind, text) => write!(f, "{kind} {text:?}: not an IP address"),
            Self::AddressOfFamily(kind, ip) => {
                write!(f, "{kind} {ip}: the Service has no cluster IP of its family")
            }
            Self::IngressNotVip(ip, mode) => {
                write!(
                    f,
                    "load balancer IP {ip}: its ipMode is {mode:?}, so traffic to it goes through the load balancer"
                )
            }
            Self::SourceRange(text) => write!(f, "source range {text:?}: not a CIDR"),
            Self::SourceRangeOfFamily(cidr) => {
                write!(f, "source range {cidr}: the Service has no cluster IP of its family")
            }
            Self::SourceRangesOfEverything(family) => {
                write!(f, "source ranges of {}: one of them contains every address", family.as_str())
            }
            Self::PortNumber { name, number } => {
                write!(f, "port {name:?}: {number} is not a port number (1 to 65535)")
            }
            Self::Protocol { name, protocol } => {
                write!(f, "port {name:?}: protocol {protocol:?} is not TCP, UDP or SCTP")
            }
            Self::PortRepeated { name, number } => {
                write!(f, "port {name:?} ({number}): a later port has the same name and protocol")
            }
            Self::FrontendRepeated { name, number } => {
                write!(f, "port {name:?} ({number}): an earlier port has the same number and protocol")
            }
            Self::NodePort { name, number } => {
                write!(f, "node port of port {name:?}: {number} is not a port number (1 to 65535)")
            }
            Self::ExternalPolicy => f.write_str(
                "externalTrafficPolicy Local applies only to Services of type LoadBalancer or NodePort or \
                 with external IPs",
            ),
            Self::HealthCheckNodePort(port) => write!(
                f,
                "healthCheckNodePort {port}: only valid for a Service of type LoadBalancer with \
                 externalTrafficPolicy Local",
            ),
            Self::Affinity(seconds) => {
                write!(
                    f,
                    "affinity of {seconds} s: outside the range 1 to 86400; the nearest valid value or the \
                     default is used"
                )
            }
        }
    }
}

impl fmt::Display for Unused<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoService => f.write_str("it has no label kubernetes.io/service-name"),
            Self::OtherService(name) => {
                write!(f, "its label kubernetes.io/service-name names another Service, {name:?}")
            }
            Self::Headless => {
                f.write_str("its label service.kubernetes.io/headless excludes it from service proxies")
            }
            Self::AddressType("FQDN") => {
                f.write_str("its address type is FQDN, which service proxies do not support")
            }
            Self::AddressType(kind) => write!(f, "its address type {kind:?} is neither IPv4 nor IPv6"),
            Self::NoClusterIp(family) => write!(f, "the Service has no cluster IP of {}", family.as_str()),
            Self::ServiceUnserved => f.write_str("the Service is not served"),
        }
    }
}

impl fmt::Display for Fault<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::PortWithoutName(number) => write!(f, "a port has no name ({})", Number(*number)),
            Self::PortNumber(name, number) => {
                write!(f, "port {name:?}: {} (must be 1 to 65535)", Number(*number))
            }
            Self::PortUnmatched(name, protocol) => {
                write!(f, "port {name:?}/{protocol}: the Service has no such port")
            }
            Self::NoAddress => f.write_str("an endpoint has no address"),
            Self::Address(text) => write!(f, "endpoint address {text:?} is not an IP address"),
            Self::AddressOfOtherFamily(ip) => {
                write!(f, "endpoint address {ip} is not of the address type of the slice")
            }
        }
    }
}

struct Number(Option<i32>);

impl fmt::Display for Number {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(number) => write!(f, "number {number}"),
            None => f.write_str("no number"),
        }
    }
}

/// Names only the first of many.
pub(super) fn faults(faults: &[Fault<'_>]) -> String {
    const NAMED: usize = 5;
    let mut text = String::new();
    for fault in faults.iter().take(NAMED) {
        let begin = if text.is_empty() { "ignored: " } else { "; " };
        let _ = write!(text, "{begin}{fault}");
    }
    if faults.len() > NAMED {
        let _ = write!(text, "; and {} more", faults.len() - NAMED);
    }
    text
}

/// "1 endpoint is", "2 endpoints are".
fn endpoints_are(count: usize) -> String {
    if count == 1 { "1 endpoint is".to_owned() } else { format!("{count} endpoints are") }
}

fn zone(node: &NodeView) -> Option<&str> {
    node.zone.as_deref().filter(|zone| !zone.is_empty())
}

/// "node", "zone" or "none", and why.
pub(super) fn topology(decision: &Decision, node: &NodeView) -> (&'static str, String) {
    let tally = &decision.tally;
    if !decision.uses_cluster {
        return ("none", "no traffic of this port can go to other nodes, so hints are not used".to_owned());
    }
    if tally.ready == 0 {
        return ("none", "no endpoint is ready, so hints are not used".to_owned());
    }
    let mode = match decision.mode {
        Mode::Node => {
            let named = tally.naming_node;
            return ("node", format!("all ready endpoints have node hints, {named} of them for this node"));
        }
        Mode::Zone => "zone",
        Mode::Anywhere => "none",
    };
    let mut reasons = Vec::new();
    if tally.with_node_hints > 0 {
        reasons.push(if tally.with_node_hints < tally.ready {
            missing_hints(tally.ready - tally.with_node_hints, tally.ready, "nodes")
        } else {
            "no node hint is for this node".to_owned()
        });
    }
    if tally.with_zone_hints > 0 {
        reasons.push(match zone(node) {
            _ if tally.with_zone_hints < tally.ready => {
                missing_hints(tally.ready - tally.with_zone_hints, tally.ready, "zones")
            }
            None => "this node has no label topology.kubernetes.io/zone".to_owned(),
            Some(zone) if tally.naming_zone > 0 => {
                let named = tally.naming_zone;
                format!("all ready endpoints have zone hints, {named} of them for zone {zone} of this node")
            }
            Some(zone) => format!("no zone hint is for zone {zone} of this node"),
        });
    }
    if reasons.is_empty() {
        reasons.push("no ready endpoint has hints".to_owned());
    }
    (mode, reasons.join("; "))
}

fn missing_hints(missing: usize, ready: usize, of: &str) -> String {
    let have = if missing == 1 { "has" } else { "have" };
    format!("{missing} of {ready} ready endpoints {have} no hints for {of}, so hints for {of} are not used")
}

pub(super) fn endpoint(it: &Candidate<'_>, decision: &Decision, node: &NodeView) -> String {
    let cluster = place(it.cluster_place, it, node, (decision.tally.ready, ""));
    let local = place(it.local_place, it, node, (decision.tally.local_ready, " on this node"));
    match (it.cluster_place, it.local_place) {
        // The cluster set alone decides, or both sets have the same reason.
        (_, Place::Unused) | (Place::Draining, Place::Draining) => cluster,
        (Place::Unused, _) => local,
        _ if cluster == local => cluster,
        _ => format!("cluster set: {cluster}; local set: {local}"),
    }
}

/// Why this copy of an endpoint is not selected, but that of `slice`.
pub(super) fn superseded(it: &Candidate<'_>, holder: &Candidate<'_>, slice: &str) -> String {
    let because = if it.terminating != holder.terminating {
        "is not terminating"
    } else if it.ready != holder.ready {
        "is ready"
    } else if it.serving != holder.serving {
        "is serving"
    } else {
        "has the same conditions and the later name"
    };
    format!("not selected: slice {slice} has the same address and port, and its endpoint {because}")
}

/// `ready`: number of ready endpoints for the set, and their location.
fn place(place: Place, it: &Candidate<'_>, node: &NodeView, (ready, here): (usize, &str)) -> String {
    let name = &node.name;
    match place {
        Place::Unused => "not used".to_owned(),
        Place::Ready if it.terminating => "selected: ready and terminating".to_owned(),
        Place::Ready => "selected: ready".to_owned(),
        Place::HintedNode => format!("selected: ready, with a hint for this node, {name}"),
        Place::HintedZone => {
            format!("selected: ready, with a hint for zone {} of this node", zone(node).unwrap_or_default())
        }
        Place::Draining => {
            format!("selected: terminating and still serving, because no endpoint is ready{here}")
        }
        Place::OtherNode => {
            let hints =
                it.source.hints.iter().flat_map(|hints| &hints.for_nodes).map(|hint| hint.name.as_str());
            other_hints("nodes", hints, &format!("this node, {name}"))
        }
        Place::OtherZone => {
            let hints =
                it.source.hints.iter().flat_map(|hints| &hints.for_zones).map(|hint| hint.name.as_str());
            other_hints("zones", hints, &format!("zone {} of this node", zone(node).unwrap_or_default()))
        }
        Place::Remote => "not selected: not on this node".to_owned(),
        Place::NotNeeded => format!("not selected: terminating, and {} ready{here}", endpoints_are(ready)),
        Place::NotEligible if it.serving => "not selected: not ready and not terminating".to_owned(),
        Place::NotEligible if it.terminating => "not selected: terminating and no longer serving".to_owned(),
        Place::NotEligible => "not selected: neither ready nor serving".to_owned(),
        Place::Superseded => "not selected: another slice has the same endpoint".to_owned(),
    }
}

fn other_hints<'a>(kind: &str, hints: impl Iterator<Item = &'a str>, this: &str) -> String {
    let hints = hints.collect::<Vec<_>>().join(", ");
    format!(
        "not selected: all ready endpoints have hints for {kind}, and its hints are [{hints}], not {this}"
    )
}

pub(super) fn internal_policy(facts: &Facts<'_>) -> &'static str {
    if facts.internal_local {
        "Local: traffic to cluster IPs stays on this node"
    } else {
        "Cluster: traffic to cluster IPs can go to any node"
    }
}

pub(super) fn external_policy(facts: &Facts<'_>) -> &'static str {
    if facts.external_local {
        "Local: traffic from outside to external IPs, load balancer IPs and node ports stays on this node; \
         traffic of pods and of this node can go to any node"
    } else {
        "Cluster: traffic to external IPs, load balancer IPs and node ports can go to any node"
    }
}
