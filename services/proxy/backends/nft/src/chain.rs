//! The chains of the table.
//!
//! Owns: their names, and which of them a map may refer to. In and out: values.

use std::{fmt, ops::RangeInclusive};

use keelson_proxy::model::Protocol;

/// The set of endpoints that a chain chooses from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Choice {
    /// Maps `slots`, `affinity-slots`, `affinity-endpoints`.
    Cluster,
    /// Maps `local-slots`, `local-affinity-slots`, `local-affinity-endpoints`.
    Local,
}

/// Prefix lengths from 1 to 128, without duplicates.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PrefixLengths(u128);

impl PrefixLengths {
    /// Listing more lengths than this would make the name of a chain too long.
    const LISTED: usize = 24;

    /// Ignores 0 and lengths above 128.
    #[must_use]
    pub fn new(lengths: impl IntoIterator<Item = u8>) -> Self {
        let bit = |length: u8| 1_u128.checked_shl(u32::from(length.checked_sub(1)?));
        Self(lengths.into_iter().filter_map(bit).fold(0, |bits, bit| bits | bit))
    }

    /// In ascending order.
    pub fn iter(self) -> impl Iterator<Item = u8> {
        (1..=128).filter(move |length| self.0 >> (length - 1) & 1 == 1)
    }

    fn parse(text: &str) -> Option<Self> {
        if let Some(hex) = text.strip_prefix('x') {
            return u128::from_str_radix(hex, 16).ok().map(Self);
        }
        text.split('-').map(|length| length.parse().ok()).collect::<Option<Vec<u8>>>().map(Self::new)
    }
}

impl fmt::Display for PrefixLengths {
    /// `8-16-24`, or the bits in hexadecimal if there are too many.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !(1..=Self::LISTED).contains(&(self.0.count_ones() as usize)) {
            return write!(f, "x{:x}", self.0);
        }
        let lengths: Vec<String> = self.iter().map(|length| length.to_string()).collect();
        f.write_str(&lengths.join("-"))
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Chain {
    /// nat, prerouting, priority dstnat - 1: before a kube-proxy's.
    NatPrerouting,
    /// nat, output, priority -101.
    NatOutput,
    /// nat, postrouting, priority srcnat - 1.
    NatPostrouting,
    /// filter, prerouting, priority dstnat - 10: loadBalancerSourceRanges.
    FilterPrerouting,
    /// filter, output, priority -110: loadBalancerSourceRanges.
    FilterOutputFirst,
    /// filter, input, priority filter.
    FilterInput,
    /// filter, forward, priority filter.
    FilterForward,
    /// filter, output, priority filter.
    FilterOutput,
    /// filter, forward, priority 200, after the filters of other programs: adds established flows of Services to the
    /// flowtable. Exists only if flows are offloaded.
    FilterForwardOffload,
    /// The same for TCP only.
    FilterForwardOffloadTcp,
    /// filter, prerouting, priority raw: keeps flows between pods out of conntrack. Exists only if they are not tracked.
    RawPrerouting,
    /// Looks up the number of a frontend and continues with [`Self::Internal`] or [`Self::External`].
    Services,
    /// Traffic to a cluster IP: masquerade if needed, then `internal-choice`.
    Internal,
    /// Traffic to an external IP, a load-balancer IP or a node port: `external-policy`, otherwise masquerade and
    /// `external-choice`.
    External,
    /// The same for externalTrafficPolicy Local: the short-circuit for pods and the node itself, then `local-choice`.
    ExternalLocal,
    /// Rejects traffic to unused ports of cluster IPs, and drops traffic to unused addresses of ServiceCIDRs.
    ClusterIpsCheck,
    /// Reject, as the target of maps.
    Reject,
    /// Looks up the source of a packet in the ranges of a frontend.
    Sources { protocol: Protocol, lengths: PrefixLengths },
    /// Chooses one of `count` endpoints at random.
    LoadBalance {
        choice: Choice,
        /// At least 1.
        count: u32,
    },
    /// The same with ClientIP affinity: looks up the client's endpoint first.
    Affinity {
        choice: Choice,
        /// At least 1.
        count: u32,
        seconds: u32,
        /// Selects the map ([`SetName::affinity`](super::element::SetName::affinity)).
        group: u8,
    },
    /// An affinity was found: uses the endpoint if it is in the set, otherwise deletes the affinity.
    AffinityKept {
        choice: Choice,
        /// At least 1.
        count: u32,
        seconds: u32,
        /// Selects the map ([`SetName::affinity`](super::element::SetName::affinity)).
        group: u8,
    },
    /// No affinity was found: chooses and remembers an endpoint.
    AffinityNew {
        choice: Choice,
        /// At least 1.
        count: u32,
        seconds: u32,
        /// Selects the map ([`SetName::affinity`](super::element::SetName::affinity)).
        group: u8,
    },
}

impl Chain {
    /// Chains that always exist, in order of creation: a chain comes after those it refers to.
    pub const FIXED: [Self; 14] = [
        Self::Reject,
        Self::Internal,
        Self::ExternalLocal,
        Self::External,
        Self::Services,
        Self::ClusterIpsCheck,
        Self::NatPrerouting,
        Self::NatOutput,
        Self::NatPostrouting,
        Self::FilterPrerouting,
        Self::FilterOutputFirst,
        Self::FilterInput,
        Self::FilterForward,
        Self::FilterOutput,
    ];

    /// Endpoint counts whose chain always exists: see [`Self::prepared`]. Each has a cost: whenever a slot is added,
    /// the kernel visits all rules that refer to `slots`, about 0.05 microseconds per chain.
    pub const PREPARED_COUNTS: RangeInclusive<u32> = 1..=16;

    /// The chains that choose from ClusterSet with one of [`Self::PREPARED_COUNTS`]. They are created with the table,
    /// while `slots` is empty, and never deleted: when the first rule of a new chain refers to a map, the kernel checks
    /// every element of the map, which takes 30 to 50 ms at 100,000 slots.
    pub fn prepared() -> impl Iterator<Item = Self> {
        Self::PREPARED_COUNTS.map(|count| Self::LoadBalance { choice: Choice::Cluster, count })
    }

    #[must_use]
    pub fn is_prepared(self) -> bool {
        matches!(self, Self::LoadBalance { choice: Choice::Cluster, count } if Self::PREPARED_COUNTS.contains(&count))
    }

    /// The chains that add flows to the flowtable. A table has at most one of them.
    pub const OFFLOAD: [Self; 2] = [Self::FilterForwardOffload, Self::FilterForwardOffloadTcp];

    /// Parses the name of a chain; `None` if it is not one of ours.
    #[must_use]
    pub fn parse(name: &str) -> Option<Self> {
        let mut named = Self::FIXED.into_iter().chain(Self::OFFLOAD).chain([Self::RawPrerouting]);
        if let Some(fixed) = named.find(|chain| chain.to_string() == name) {
            return Some(fixed);
        }
        if let Some(lengths) = name.strip_prefix("sources-") {
            let (protocol, lengths) = lengths.split_once('-')?;
            let protocol = Protocol::ALL.into_iter().find(|one| one.keyword() == protocol)?;
            let chain = Self::Sources { protocol, lengths: PrefixLengths::parse(lengths)? };
            return (chain.to_string() == name).then_some(chain);
        }
        let (choice, rest) = match name.strip_prefix("local-") {
            Some(rest) => (Choice::Local, rest),
            None => (Choice::Cluster, name),
        };
        let (kind, numbers) = rest.split_at(rest.find(|c: char| c.is_ascii_digit())?);
        let mut numbers = numbers.split('-').map(|number| number.parse::<u32>().ok());
        let (count, seconds) = (numbers.next()??, numbers.next());
        let group = numbers.next().map(|group| group.and_then(|group| u8::try_from(group).ok()));
        if numbers.next().is_some() {
            return None;
        }
        let chain = match (kind, seconds, group) {
            ("lb-", None, None) => Self::LoadBalance { choice, count },
            ("affinity-", Some(Some(seconds)), Some(Some(group))) => {
                Self::Affinity { choice, count, seconds, group }
            }
            ("affinity-kept-", Some(Some(seconds)), Some(Some(group))) => {
                Self::AffinityKept { choice, count, seconds, group }
            }
            ("affinity-new-", Some(Some(seconds)), Some(Some(group))) => {
                Self::AffinityNew { choice, count, seconds, group }
            }
            _ => return None,
        };
        // A name that is written differently (leading zeros, more parts) belongs to another program.
        (chain.to_string() == name).then_some(chain)
    }

    /// Further chains that this one needs and that are created before it. The chains of an affinity always exist
    /// together.
    #[must_use]
    pub fn companions(self) -> Vec<Self> {
        match self {
            Self::Affinity { choice, count, seconds, group } => vec![
                Self::AffinityNew { choice, count, seconds, group },
                Self::AffinityKept { choice, count, seconds, group },
            ],
            _ => Vec::new(),
        }
    }
}

impl fmt::Display for Chain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let local = |choice: &Choice| match choice {
            Choice::Cluster => "",
            Choice::Local => "local-",
        };
        f.write_str(match self {
            Self::NatPrerouting => "nat-prerouting",
            Self::NatOutput => "nat-output",
            Self::NatPostrouting => "nat-postrouting",
            Self::FilterPrerouting => "filter-prerouting",
            Self::FilterOutputFirst => "filter-output-first",
            Self::FilterInput => "filter-input",
            Self::FilterForward => "filter-forward",
            Self::FilterOutput => "filter-output",
            Self::FilterForwardOffload => "filter-forward-offload",
            Self::FilterForwardOffloadTcp => "filter-forward-offload-tcp",
            Self::RawPrerouting => "raw-prerouting",
            Self::Services => "services",
            Self::Internal => "internal",
            Self::External => "external",
            Self::ExternalLocal => "external-local",
            Self::ClusterIpsCheck => "cluster-ips-check",
            Self::Reject => "reject-it",
            Self::Sources { protocol, lengths } => {
                return write!(f, "sources-{}-{lengths}", protocol.keyword());
            }
            Self::LoadBalance { choice, count } => return write!(f, "{}lb-{count}", local(choice)),
            Self::Affinity { choice, count, seconds, group } => {
                return write!(f, "{}affinity-{count}-{seconds}-{group}", local(choice));
            }
            Self::AffinityKept { choice, count, seconds, group } => {
                return write!(f, "{}affinity-kept-{count}-{seconds}-{group}", local(choice));
            }
            Self::AffinityNew { choice, count, seconds, group } => {
                return write!(f, "{}affinity-new-{count}-{seconds}-{group}", local(choice));
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_chain_is_found_by_its_name() {
        let mut chains = Chain::FIXED.to_vec();
        chains.extend(Chain::OFFLOAD);
        chains.push(Chain::RawPrerouting);
        for choice in [Choice::Cluster, Choice::Local] {
            chains.push(Chain::LoadBalance { choice, count: 10 });
            let affinity = Chain::Affinity { choice, count: 7, seconds: 10_800, group: 7 };
            chains.push(affinity);
            chains.extend(affinity.companions());
        }
        for lengths in [vec![], vec![8], vec![1, 24, 128], (1..=24).collect(), (1..=128).collect()] {
            let lengths = PrefixLengths::new(lengths.iter().copied());
            let chain = Chain::Sources { protocol: Protocol::Sctp, lengths };
            assert!(chain.to_string().len() < 128, "NFT_CHAIN_MAXNAMELEN: {chain}");
            chains.push(chain);
        }
        for chain in chains {
            assert_eq!(Chain::parse(&chain.to_string()), Some(chain));
        }
    }

    #[test]
    fn other_names_are_not_parsed() {
        for name in [
            "",
            "lb-",
            "lb-01",
            "lb-1-2",
            "lb-x",
            "affinity-1",
            "affinity-1-2",
            "affinity-1-2-3-4",
            "affinity-1-2-256",
            "local-",
            "local-services",
            "lb",
            "sources-8",
            "sources-tcp",
            "sources-tcp-",
            "sources-tcp-24-8",
            "sources-tcp-0-8",
            "sources-tcp-x18",
            "sources-icmp-8",
        ] {
            assert_eq!(Chain::parse(name), None, "{name}");
        }
    }
}
