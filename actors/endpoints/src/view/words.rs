//! Decisions in words.
//!
//! Owns: the sentence for each rule that may decide. In: the typed reasons of the other modules. Out: text for people; no
//! program reads it.

use std::fmt::{self, Write as _};

use super::{
    merge::{Candidate, Fault, Unused},
    service::{AddressKind, Facts, Ignored, PROXY_NAME, Unserved},
    topology::{Decision, Mode, Place},
};
use crate::NodeView;

/// Why traffic is rejected.
pub(super) const NOTHING: &str =
    "no endpoint is ready, and none is terminating but still serving, on any node";

impl fmt::Display for Unserved<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Missing => f.write_str("there is no Service of this name; only slices that name it"),
            Self::OtherProxy(name) => {
                write!(f, "its label {PROXY_NAME} ({name:?}) leaves it to another proxy")
            }
            Self::NoClusterIp => f.write_str("it has no cluster IP (spec.clusterIP is empty)"),
            Self::Headless => f.write_str("it is headless (spec.clusterIP is None)"),
            Self::ExternalName => f.write_str("it is of type ExternalName, which is for DNS alone"),
            Self::NoFamily => f.write_str("none of its cluster IPs can be used"),
            Self::NoPort => f.write_str("it has no port that can be used, and so no frontend"),
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
                let name = family.name();
                write!(f, "cluster IP {text:?}: it stands for {name}, and is none or not the first of that family")
            }
            Self::FamilyWithoutIp(family) => {
                write!(f, "IP family {family:?}: spec.clusterIPs has nothing for it, or there is no such family")
            }
            Self::Address(kind, text) => write!(f, "{kind} {text:?}: not an IP address"),
            Self::AddressOfFamily(kind, ip) => {
                write!(f, "{kind} {ip}: the Service has no cluster IP of its family")
            }
            Self::IngressNotVip(ip, mode) => {
                write!(f, "load balancer IP {ip}: its ipMode is {mode:?}, so traffic to it goes through the load balancer")
            }
            Self::SourceRange(text) => write!(f, "source range {text:?}: not a CIDR"),
            Self::SourceRangeOfFamily(cidr) => {
                write!(f, "source range {cidr}: the Service has no cluster IP of its family")
            }
            Self::SourceRangesOfEverything(family) => {
                write!(f, "source ranges of {}: one of them is every address", family.name())
            }
            Self::PortNumber { name, number } => write!(f, "port {name:?}: {number} is not a port number (1 to 65535)"),
            Self::Protocol { name, protocol } => {
                write!(f, "port {name:?}: protocol {protocol:?} is none of TCP, UDP and SCTP")
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
                "externalTrafficPolicy Local: only Services of type LoadBalancer or NodePort or with external IPs are \
                 reached from outside",
            ),
            Self::HealthCheckNodePort(port) => write!(
                f,
                "healthCheckNodePort {port}: only a port number of a Service of type LoadBalancer with \
                 externalTrafficPolicy Local counts",
            ),
            Self::Affinity(seconds) => {
                write!(f, "affinity of {seconds} s: the API allows 1 to 86400; the nearest or the default is taken")
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
                f.write_str("its label service.kubernetes.io/headless says that proxies are not to read it")
            }
            Self::AddressType("FQDN") => {
                f.write_str("its address type is FQDN: names cannot be forwarded to")
            }
            Self::AddressType(kind) => write!(f, "its address type {kind:?} is neither IPv4 nor IPv6"),
            Self::NoClusterIp(family) => write!(f, "the Service has no cluster IP of {}", family.name()),
            Self::ServiceUnserved => f.write_str("the Service is not served"),
        }
    }
}

impl fmt::Display for Fault<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::PortWithoutName(number) => write!(f, "a port without a name ({})", Number(*number)),
            Self::PortNumber(name, number) => {
                write!(f, "port {name:?}: {} (1 to 65535 can be)", Number(*number))
            }
            Self::PortUnmatched(name, protocol) => {
                write!(f, "port {name:?}/{protocol}: the Service has no such port")
            }
            Self::NoAddress => f.write_str("an endpoint without an address"),
            Self::Address(text) => write!(f, "an endpoint at {text:?}, which is not an IP address"),
            Self::AddressOfOtherFamily(ip) => {
                write!(f, "an endpoint at {ip}, which is of another family than the slice")
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

/// Of many only the first are named.
pub(super) fn faults(faults: &[Fault<'_>]) -> String {
    const NAMED: usize = 5;
    let mut text = String::new();
    for fault in faults.iter().take(NAMED) {
        let begin = if text.is_empty() { "left out: " } else { "; " };
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
        return ("none", "no traffic of this port may go to other nodes, so no hint is looked at".to_owned());
    }
    if tally.ready == 0 {
        return ("none", "no endpoint is ready, so no hint is looked at".to_owned());
    }
    let mode = match decision.mode {
        Mode::Node => {
            let named = tally.naming_node;
            return (
                "node",
                format!("every ready endpoint has hints for nodes, and {named} of them name this node"),
            );
        }
        Mode::Zone => "zone",
        Mode::Anywhere => "none",
    };
    let mut reasons = Vec::new();
    if tally.with_node_hints > 0 {
        reasons.push(if tally.with_node_hints < tally.ready {
            missing_hints(tally.ready - tally.with_node_hints, tally.ready, "nodes")
        } else {
            "no hint for nodes names this node".to_owned()
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
                format!("every ready endpoint has hints for zones, and {named} of them name zone {zone} of this node")
            }
            Some(zone) => format!("no hint for zones names zone {zone} of this node"),
        });
    }
    if reasons.is_empty() {
        reasons.push("no ready endpoint has hints".to_owned());
    }
    (mode, reasons.join("; "))
}

fn missing_hints(missing: usize, ready: usize, of: &str) -> String {
    let have = if missing == 1 { "has" } else { "have" };
    format!("{missing} of {ready} ready endpoints {have} no hints for {of}, so none of those count")
}

/// The rule that decided about an endpoint.
pub(super) fn endpoint(it: &Candidate<'_>, decision: &Decision, node: &NodeView) -> String {
    let cluster = place(it.cluster_place, it, node, (decision.tally.ready, ""));
    let local = place(it.local_place, it, node, (decision.tally.local_ready, " on this node"));
    match (it.cluster_place, it.local_place) {
        // What goes for every node goes for this one.
        (_, Place::Unused) | (Place::Draining, Place::Draining) => cluster,
        (Place::Unused, _) => local,
        _ if cluster == local => cluster,
        _ => format!("to any node: {cluster}; to this node only: {local}"),
    }
}

/// Why the copy of an endpoint does not hold that another, of this slice, holds against.
pub(super) fn superseded(it: &Candidate<'_>, holder: &Candidate<'_>, slice: &str) -> String {
    let because = if it.terminating != holder.terminating {
        "is not terminating"
    } else if it.ready != holder.ready {
        "is ready"
    } else if it.serving != holder.serving {
        "is serving"
    } else {
        "is as good and comes later by its name"
    };
    format!("left out: slice {slice} has the same address and port, and that one {because}")
}

/// `ready`: how many are ready that could be in the set, and where those are.
fn place(place: Place, it: &Candidate<'_>, node: &NodeView, (ready, here): (usize, &str)) -> String {
    let name = &node.name;
    match place {
        Place::Unused => "not asked for".to_owned(),
        Place::Ready if it.terminating => "chosen: it is ready, although terminating".to_owned(),
        Place::Ready => "chosen: it is ready".to_owned(),
        Place::HintedNode => format!("chosen: it is ready, and its hints name this node, {name}"),
        Place::HintedZone => {
            format!(
                "chosen: it is ready, and its hints name zone {} of this node",
                zone(node).unwrap_or_default()
            )
        }
        Place::Draining => format!("chosen: it is terminating but still serving, and nothing is ready{here}"),
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
        Place::Remote => "left out: it is not on this node".to_owned(),
        Place::NotNeeded => format!("left out: it is terminating, and {} ready{here}", endpoints_are(ready)),
        Place::NotEligible if it.serving => {
            "left out: it is not ready, and not terminating either".to_owned()
        }
        Place::NotEligible if it.terminating => {
            "left out: it is terminating and does not serve any more".to_owned()
        }
        Place::NotEligible => "left out: it is neither ready nor serving".to_owned(),
        Place::Superseded => "left out: another slice has it too".to_owned(),
    }
}

fn other_hints<'a>(kind: &str, hints: impl Iterator<Item = &'a str>, this: &str) -> String {
    let hints = hints.collect::<Vec<_>>().join(", ");
    format!(
        "left out: the hints of every ready endpoint name {kind}, and this one's are [{hints}], not {this}"
    )
}

/// What internalTrafficPolicy does.
pub(super) fn internal_policy(facts: &Facts<'_>) -> &'static str {
    if facts.internal_local {
        "Local: traffic to cluster IPs stays on this node, from wherever it comes"
    } else {
        "Cluster: traffic to cluster IPs may go to any node"
    }
}

/// What externalTrafficPolicy does.
pub(super) fn external_policy(facts: &Facts<'_>) -> &'static str {
    if facts.external_local {
        "Local: traffic from outside to external IPs, load balancer IPs and node ports stays on this node; that of pods \
         and of this node itself may go to any node"
    } else {
        "Cluster: traffic to external IPs, load balancer IPs and node ports may go to any node"
    }
}
