//! The chains of the table.
//!
//! Owns: their names, and which of them a map may lead to. In and out: values.

use std::fmt;

/// Which set of endpoints a chain chooses from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Choice {
    /// ClusterSet: maps `slots`, `affinity-slots`, `affinity-endpoints`.
    Cluster,
    /// LocalSet: maps `local-slots`, `local-affinity-slots`, `local-affinity-endpoints`.
    Local,
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
    /// filter, prerouting, priority dstnat - 10.
    FilterPrerouting,
    /// filter, output, priority -110.
    FilterOutputFirst,
    /// filter, input, priority filter.
    FilterInput,
    /// filter, forward, priority filter.
    FilterForward,
    /// filter, output, priority filter.
    FilterOutput,
    /// Finds the number of a frontend and goes on to [`Self::Internal`] or [`Self::External`].
    Services,
    /// To a cluster IP: masquerade where it has to be, then `internal-choice`.
    Internal,
    /// To an external address, a load-balancer address or a node port: `external-policy`, else masquerade and
    /// `external-choice`.
    External,
    /// The same where externalTrafficPolicy is Local: the short-circuit for pods and the node itself, then `local-choice`.
    ExternalLocal,
    /// loadBalancerSourceRanges.
    Firewall,
    /// Ports that no Service has of cluster IPs: reject; addresses that no Service has of ServiceCIDRs: drop.
    ClusterIpsCheck,
    /// Reject, as the target of maps.
    Reject,
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
    },
    /// Where an affinity was found: used if the endpoint is in the set, else forgotten.
    AffinityKept {
        /// From which set.
        choice: Choice,
        /// Of how many, from 1.
        count: u32,
        /// How long the kernel remembers, in seconds.
        seconds: u32,
    },
    /// Where none was found: chooses and remembers.
    AffinityNew {
        /// From which set.
        choice: Choice,
        /// Of how many, from 1.
        count: u32,
        /// How long the kernel remembers, in seconds.
        seconds: u32,
    },
}

impl Chain {
    /// Those that are always there, in the order in which they are made: a chain comes after those it leads to.
    pub const FIXED: [Self; 15] = [
        Self::Reject,
        Self::Internal,
        Self::ExternalLocal,
        Self::External,
        Self::Services,
        Self::Firewall,
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

    /// A chain by its name; none if no chain of ours is called so.
    #[must_use]
    pub fn parse(name: &str) -> Option<Self> {
        if let Some(fixed) = Self::FIXED.into_iter().find(|chain| chain.to_string() == name) {
            return Some(fixed);
        }
        let (choice, rest) = match name.strip_prefix("local-") {
            Some(rest) => (Choice::Local, rest),
            None => (Choice::Cluster, name),
        };
        let (kind, numbers) = rest.split_at(rest.find(|c: char| c.is_ascii_digit())?);
        let mut numbers = numbers.split('-').map(|number| number.parse::<u32>().ok());
        let (count, seconds) = (numbers.next()??, numbers.next());
        let chain = match (kind, seconds) {
            ("lb-", None) => Self::LoadBalance { choice, count },
            ("affinity-", Some(Some(seconds))) => Self::Affinity { choice, count, seconds },
            ("affinity-kept-", Some(Some(seconds))) => Self::AffinityKept { choice, count, seconds },
            ("affinity-new-", Some(Some(seconds))) => Self::AffinityNew { choice, count, seconds },
            _ => return None,
        };
        // What is written differently (leading zeros, more parts) is somebody else's.
        (chain.to_string() == name).then_some(chain)
    }

    /// The chains that this one needs besides, which are made before it. Those of an affinity are always together.
    #[must_use]
    pub fn companions(self) -> Vec<Self> {
        match self {
            Self::Affinity { choice, count, seconds } => vec![
                Self::AffinityNew { choice, count, seconds },
                Self::AffinityKept { choice, count, seconds },
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
            Self::Services => "services",
            Self::Internal => "internal",
            Self::External => "external",
            Self::ExternalLocal => "external-local",
            Self::Firewall => "firewall",
            Self::ClusterIpsCheck => "cluster-ips-check",
            Self::Reject => "reject-it",
            Self::LoadBalance { choice, count } => return write!(f, "{}lb-{count}", local(choice)),
            Self::Affinity { choice, count, seconds } => {
                return write!(f, "{}affinity-{count}-{seconds}", local(choice));
            }
            Self::AffinityKept { choice, count, seconds } => {
                return write!(f, "{}affinity-kept-{count}-{seconds}", local(choice));
            }
            Self::AffinityNew { choice, count, seconds } => {
                return write!(f, "{}affinity-new-{count}-{seconds}", local(choice));
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
        for choice in [Choice::Cluster, Choice::Local] {
            chains.push(Chain::LoadBalance { choice, count: 10 });
            let affinity = Chain::Affinity { choice, count: 7, seconds: 10_800 };
            chains.push(affinity);
            chains.extend(affinity.companions());
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
            "affinity-1-2-3",
            "local-",
            "local-services",
            "lb",
        ] {
            assert_eq!(Chain::parse(name), None, "{name}");
        }
    }
}
