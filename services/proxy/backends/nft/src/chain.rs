//! The chains of the table.
//!
//! Owns: their names, and which of them a map may lead to. In and out: values.

use std::{fmt, ops::RangeInclusive};

use keelson_proxy::model::Protocol;

/// Which set of endpoints a chain chooses from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Choice {
    /// ClusterSet: maps `slots`, `affinity-slots`, `affinity-endpoints`.
    Cluster,
    /// LocalSet: maps `local-slots`, `local-affinity-slots`, `local-affinity-endpoints`.
    Local,
}

/// Lengths of prefixes, from 1 to 128, each once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PrefixLengths(u128);

impl PrefixLengths {
    /// Lists of more lengths than this would make the name of a chain too long.
    const LISTED: usize = 24;

    /// Of these lengths. 0 and more than 128 are none.
    #[must_use]
    pub fn new(lengths: impl IntoIterator<Item = u8>) -> Self {
        let bit = |length: u8| 1_u128.checked_shl(u32::from(length.checked_sub(1)?));
        Self(lengths.into_iter().filter_map(bit).fold(0, |bits, bit| bits | bit))
    }

    /// From the shortest to the longest.
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
    /// `8-16-24`, or in hexadecimal the bits of very many.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !(1..=Self::LISTED).contains(&(self.0.count_ones() as usize)) {
            return write!(f, "x{:x}", self.0);
        }
        let lengths: Vec<String> = self.iter().map(|length| length.to_string()).collect();
        f.write_str(&lengths.join("-"))
    }
}

/// A chain of the table `keelson`.
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
    /// filter, output, priority -110: the same.
    FilterOutputFirst,
    /// filter, input, priority filter.
    FilterInput,
    /// filter, forward, priority filter.
    FilterForward,
    /// filter, output, priority filter.
    FilterOutput,
    /// filter, forward, priority 200, behind the filters of other programs: adds established flows of Services to the
    /// flowtable. Only there where flows are offloaded.
    FilterForwardOffload,
    /// The same for TCP alone.
    FilterForwardOffloadTcp,
    /// Finds the number of a frontend and goes on to [`Self::Internal`] or [`Self::External`].
    Services,
    /// To a cluster IP: masquerade where it has to be, then `internal-choice`.
    Internal,
    /// To an external address, a load-balancer address or a node port: `external-policy`, else masquerade and
    /// `external-choice`.
    External,
    /// The same where externalTrafficPolicy is Local: the short-circuit for pods and the node itself, then `local-choice`.
    ExternalLocal,
    /// Ports that no Service has of cluster IPs: reject; addresses that no Service has of ServiceCIDRs: drop.
    ClusterIpsCheck,
    /// Reject, as the target of maps.
    Reject,
    /// Looks for the source of a packet in the ranges of a frontend.
    Sources {
        /// The protocol of the frontend.
        protocol: Protocol,
        /// The lengths of prefixes that its ranges have.
        lengths: PrefixLengths,
    },
    /// Chooses one of `count` endpoints at random.
    LoadBalance {
        /// From which set.
        choice: Choice,
        /// Of how many, from 1.
        count: u32,
    },
    /// The same with ClientIP affinity: looks for what the client had.
    Affinity {
        /// From which set.
        choice: Choice,
        /// Of how many, from 1.
        count: u32,
        /// How long the kernel remembers, in seconds.
        seconds: u32,
        /// In which of the maps ([`SetName::affinity`](super::element::SetName::affinity)).
        group: u8,
    },
    /// Where an affinity was found: used if the endpoint is in the set, else forgotten.
    AffinityKept {
        /// From which set.
        choice: Choice,
        /// Of how many, from 1.
        count: u32,
        /// How long the kernel remembers, in seconds.
        seconds: u32,
        /// In which of the maps ([`SetName::affinity`](super::element::SetName::affinity)).
        group: u8,
    },
    /// Where none was found: chooses and remembers.
    AffinityNew {
        /// From which set.
        choice: Choice,
        /// Of how many, from 1.
        count: u32,
        /// How long the kernel remembers, in seconds.
        seconds: u32,
        /// In which of the maps ([`SetName::affinity`](super::element::SetName::affinity)).
        group: u8,
    },
}

impl Chain {
    /// Those that are always there, in the order in which they are made: a chain comes after those it leads to.
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

    /// Counts of endpoints whose chain is always there: see [`Self::prepared`]. Each costs something, too: whenever a slot is
    /// added, the kernel goes through all rules that refer to `slots`, about 0.05 microseconds for each chain.
    pub const PREPARED_COUNTS: RangeInclusive<u32> = 1..=16;

    /// The chains that choose from ClusterSet among [`Self::PREPARED_COUNTS`]. They are made with the table, while `slots` is
    /// empty, and are never deleted: when the first rule of a new chain refers to a map, the kernel checks every element of
    /// it, which takes 30 to 50 ms at 100,000 slots.
    pub fn prepared() -> impl Iterator<Item = Self> {
        Self::PREPARED_COUNTS.map(|count| Self::LoadBalance { choice: Choice::Cluster, count })
    }

    /// Whether it is one of [`Self::prepared`].
    #[must_use]
    pub fn is_prepared(self) -> bool {
        matches!(self, Self::LoadBalance { choice: Choice::Cluster, count } if Self::PREPARED_COUNTS.contains(&count))
    }

    /// Those that add flows to the flowtable. A table has one of them at most.
    pub const OFFLOAD: [Self; 2] = [Self::FilterForwardOffload, Self::FilterForwardOffloadTcp];

    /// A chain by its name; none if no chain of ours is called so.
    #[must_use]
    pub fn parse(name: &str) -> Option<Self> {
        let mut named = Self::FIXED.into_iter().chain(Self::OFFLOAD);
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
        // What is written differently (leading zeros, more parts) is somebody else's.
        (chain.to_string() == name).then_some(chain)
    }

    /// The chains that this one needs besides, which are made before it. Those of an affinity are always together.
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
    fn other_names_are_somebody_elses() {
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
