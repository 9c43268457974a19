//! Sources of packets.
//!
//! Owns: [`PacketSource`], and the sources that a question covers. In: the question, the detector, the node's addresses. Out:
//! sources that rules treat differently; a backend splits them further by source ranges.

use std::net::IpAddr;

use super::{Question, Source, Target};
use crate::options::Detector;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Origin {
    /// By an interface, from a pod.
    Pod,
    Node,
    /// By an interface, from anywhere else.
    Outside,
}

#[derive(Debug, Clone)]
pub struct PacketSource {
    pub label: String,
    pub origin: Origin,
    /// `None`: unknown.
    pub address: Option<IpAddr>,
    /// If the address is unknown: whether it is in the source ranges of the target.
    pub admitted: bool,
}

impl PacketSource {
    /// Splits a source of unknown address in two if source ranges apply.
    #[must_use]
    pub fn by_ranges(self, is_filtered: bool) -> Vec<Self> {
        if self.address.is_some() || !is_filtered {
            return vec![self];
        }
        let with = |what: &str, admitted| Self {
            label: format!("{}, {what} the source ranges", self.label),
            admitted,
            ..self.clone()
        };
        vec![with("in", true), with("not in", false)]
    }
}

/// What the sources depend on.
#[derive(Debug, Clone, Copy)]
pub struct SourceFacts<'a> {
    pub detector: Option<&'a Detector>,
    pub node_ips: &'a [IpAddr],
    /// The addresses of the node's interfaces.
    pub local: &'a [IpAddr],
}

impl SourceFacts<'_> {
    /// The sources that a question covers, without regard to source ranges.
    #[must_use]
    pub fn sources(&self, question: &Question) -> Vec<PacketSource> {
        let target = question.target;
        match question.from {
            Source::Any => vec![self.pod(), self.node(target), outside()],
            Source::Pod => vec![self.pod()],
            Source::Node => vec![self.node(target)],
            Source::Outside => vec![outside()],
            Source::Address(address) => self.of_address(address),
        }
    }

    fn is_local(&self, address: IpAddr) -> bool {
        address.is_loopback() || self.local.contains(&address)
    }

    fn pod(&self) -> PacketSource {
        let detail = match self.detector {
            Some(Detector::Cidr(net)) => net.to_string(),
            Some(Detector::Bridge(name)) => format!("by interface {name}"),
            Some(Detector::InterfacePrefix(prefix)) => format!("by interface {prefix}*"),
            None => "no setting distinguishes pods from other sources".into(),
        };
        source(format!("a pod ({detail})"), Origin::Pod, None)
    }

    /// The kernel uses the destination as the source for an address of its own, and the node's address otherwise.
    fn node(&self, target: Target) -> PacketSource {
        let own = || self.node_ips.iter().copied().find(|ip| target.family().has(ip));
        let address = if self.is_local(target.address) { Some(target.address) } else { own() };
        let from = address.map_or_else(String::new, |address| format!(" ({address})"));
        source(format!("the node itself{from}"), Origin::Node, address)
    }

    /// The source with an address; two if only the interface distinguishes pods.
    fn of_address(&self, address: IpAddr) -> Vec<PacketSource> {
        let of = |what: String, origin| source(format!("{address}, {what}"), origin, Some(address));
        let by_interface = |name: String| {
            vec![
                of(format!("if received on {name}: a pod"), Origin::Pod),
                of(format!("if not received on {name}"), Origin::Outside),
            ]
        };
        if self.is_local(address) {
            return vec![of("the node itself".into(), Origin::Node)];
        }
        match self.detector {
            Some(Detector::Cidr(net)) if net.contains(&address) => {
                vec![of(format!("a pod ({net})"), Origin::Pod)]
            }
            Some(Detector::Bridge(name)) => by_interface(name.clone()),
            Some(Detector::InterfacePrefix(prefix)) => by_interface(format!("an interface {prefix}*")),
            Some(Detector::Cidr(_)) | None => vec![of("outside".into(), Origin::Outside)],
        }
    }
}

fn source(label: String, origin: Origin, address: Option<IpAddr>) -> PacketSource {
    PacketSource { label, origin, address, admitted: true }
}

fn outside() -> PacketSource {
    source("outside".into(), Origin::Outside, None)
}
