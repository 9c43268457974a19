//! Rules.
//!
//! Owns: [`Rule`], and its text. In: values. Out: text as `iptables-save` prints it, in both variants, so that what the
//! kernel has can be compared with what is wanted.

use std::fmt;

use ipnet::IpNet;
use keelson_proxy::model::{Endpoint, Family, Protocol};

use crate::names::SetName;

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Match {
    Source(IpNet),
    NotSource(IpNet),
    Destination(IpNet),
    NotDestination(IpNet),
    /// An interface, or a prefix of names with `+`.
    Interface(String),
    NotInterface(String),
    Protocol(Protocol),
    /// The first and the last destination port; after [`Match::Protocol`].
    Ports(Protocol, u16, u16),
    LocalSource,
    LocalDestination,
    /// Endpoint, port and source are in the set: a connection of an endpoint to itself.
    Hairpin(SetName),
    /// Destination and port are in the set.
    DestinationIn(SetName),
    SourceIn(SetName),
    /// The destination is in a set of addresses.
    AddressIn(SetName),
    /// Destination, port and source are not in the set.
    NotAdmitted(SetName),
    State(&'static str),
    NotState(&'static str),
    Marked(u32),
    NotMarked(u32),
    /// One of this number of packets, at random. At least 2.
    OneOf(usize),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Target {
    Jump(String),
    Goto(String),
    Dnat(Endpoint),
    SetMark(u32),
    /// Of a packet that has the mark.
    ClearMark(u32),
    Masquerade,
    Reject(Family),
    Drop,
    Accept,
    Return,
    /// Adds the source for a number of seconds, or restarts its timeout.
    AddSource(SetName, u32),
    /// Gives the packet the mark that the set has for its destination and port; only in the table mangle.
    MapMark(SetName),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rule {
    /// In the order of `iptables-save`: source, destination, interface, protocol, then modules.
    pub matches: Vec<Match>,
    pub target: Target,
}

impl Rule {
    pub fn new(matches: impl Into<Vec<Match>>, target: Target) -> Self {
        Self { matches: matches.into(), target }
    }

    pub fn jump(matches: impl Into<Vec<Match>>, chain: impl Into<String>) -> Self {
        Self::new(matches, Target::Jump(chain.into()))
    }

    pub fn goto(matches: impl Into<Vec<Match>>, chain: impl Into<String>) -> Self {
        Self::new(matches, Target::Goto(chain.into()))
    }
}

/// A network of one address.
pub fn host(ip: std::net::IpAddr) -> IpNet {
    IpNet::from(ip)
}

/// The bits that the kernel keeps of a probability, as `iptables-save` prints them.
fn probability(of: usize) -> f64 {
    const ONE: u64 = 1 << 31;
    let of = u64::try_from(of).unwrap_or(u64::MAX).max(1);
    let rounded = (2 * ONE + of) / (2 * of);
    // Exact: both are less than 2^53.
    #[allow(clippy::cast_precision_loss, reason = "at most 2^31")]
    let (rounded, one) = (rounded as f64, ONE as f64);
    rounded / one
}

impl fmt::Display for Match {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Source(net) => write!(f, "-s {net}"),
            Self::NotSource(net) => write!(f, "! -s {net}"),
            Self::Destination(net) => write!(f, "-d {net}"),
            Self::NotDestination(net) => write!(f, "! -d {net}"),
            Self::Interface(name) => write!(f, "-i {name}"),
            Self::NotInterface(name) => write!(f, "! -i {name}"),
            Self::Protocol(protocol) => write!(f, "-p {}", protocol.keyword()),
            Self::Ports(protocol, first, last) if first == last => {
                write!(f, "-m {} --dport {first}", protocol.keyword())
            }
            Self::Ports(protocol, first, last) => {
                write!(f, "-m {} --dport {first}:{last}", protocol.keyword())
            }
            Self::LocalSource => f.write_str("-m addrtype --src-type LOCAL"),
            Self::LocalDestination => f.write_str("-m addrtype --dst-type LOCAL"),
            Self::Hairpin(set) => write!(f, "-m set --match-set {set} dst,dst,src"),
            Self::DestinationIn(set) => write!(f, "-m set --match-set {set} dst,dst"),
            Self::SourceIn(set) => write!(f, "-m set --match-set {set} src"),
            Self::AddressIn(set) => write!(f, "-m set --match-set {set} dst"),
            Self::NotAdmitted(set) => write!(f, "-m set ! --match-set {set} dst,dst,src"),
            Self::State(states) => write!(f, "-m conntrack --ctstate {states}"),
            Self::NotState(states) => write!(f, "-m conntrack ! --ctstate {states}"),
            Self::Marked(mark) => write!(f, "-m mark --mark {mark:#x}/{mark:#x}"),
            Self::NotMarked(mark) => write!(f, "-m mark ! --mark {mark:#x}/{mark:#x}"),
            Self::OneOf(of) => {
                write!(f, "-m statistic --mode random --probability {:.11}", probability(*of))
            }
        }
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Jump(chain) => write!(f, "-j {chain}"),
            Self::Goto(chain) => write!(f, "-g {chain}"),
            Self::Dnat(endpoint) => write!(f, "-j DNAT --to-destination {endpoint}"),
            Self::SetMark(mark) => write!(f, "-j MARK --set-xmark {mark:#x}/{mark:#x}"),
            Self::ClearMark(mark) => write!(f, "-j MARK --set-xmark {mark:#x}/0x0"),
            Self::Masquerade => f.write_str("-j MASQUERADE --random-fully"),
            Self::Reject(Family::V4) => f.write_str("-j REJECT --reject-with icmp-port-unreachable"),
            Self::Reject(Family::V6) => f.write_str("-j REJECT --reject-with icmp6-port-unreachable"),
            Self::Drop => f.write_str("-j DROP"),
            Self::Accept => f.write_str("-j ACCEPT"),
            Self::Return => f.write_str("-j RETURN"),
            Self::AddSource(set, seconds) => {
                write!(f, "-j SET --add-set {set} src --exist --timeout {seconds}")
            }
            Self::MapMark(set) => write!(f, "-j SET --map-set {set} dst,dst --map-mark"),
        }
    }
}

impl fmt::Display for Rule {
    /// Without `-A CHAIN`, as it follows it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for matched in &self.matches {
            write!(f, " {matched}")?;
        }
        write!(f, " {}", self.target)
    }
}

/// The text of a chain: a line for each rule, as in `iptables-save`.
pub fn chain_text(chain: &str, rules: &[Rule]) -> String {
    use fmt::Write as _;
    let mut text = String::with_capacity(rules.len() * 128);
    for rule in rules {
        // Writing to a String cannot fail.
        let _ = writeln!(text, "-A {chain}{rule}");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn probabilities_are_those_of_the_kernel() {
        for (of, text) in
            [(2, "0.50000000000"), (3, "0.33333333349"), (10, "0.10000000009"), (7, "0.14285714272")]
        {
            assert!(Match::OneOf(of).to_string().ends_with(text), "{}", Match::OneOf(of));
        }
    }
}
