//! Which backend `auto` chooses.
//!
//! Owns: [`decide`]. In: the backends in the order of preference, with what is known of each: whether it can be opened,
//! and whether rules of an earlier run exist. Out: the next question, or a [`Choice`] with the reasons.
//!
//! The choice is the first backend of the order that can be opened. It must not change because a probe fails once: a
//! backend whose rules are on the node was opened since the boot of the node, so its failure is an outage, and nothing
//! is chosen instead of it. Rules do not outlive a boot, after which all backends are candidates again. (docs/decisions/0066)
//! A backend that does not suit the settings or the node is passed over, with or without rules.

use std::fmt;

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Probe {
    /// Not opened yet.
    Unknown,
    Works,
    /// It cannot be opened, for this reason.
    Fails(String),
    /// It can be opened, and another one serves this node better, for this reason.
    Unsuitable(String),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Candidate {
    pub name: &'static str,
    /// `false`: only the setting chooses it.
    pub is_automatic: bool,
    pub probe: Probe,
    /// Rules of an earlier run.
    pub has_rules: bool,
}

/// A backend that was not chosen, and why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rejected {
    pub name: &'static str,
    pub reason: String,
}

impl fmt::Display for Rejected {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.name, self.reason)
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Choice {
    pub name: &'static str,
    /// Better ones, in the order of preference.
    pub rejected: Vec<Rejected>,
}

impl Choice {
    /// One line for people.
    #[must_use]
    pub fn describe(&self) -> String {
        match self.rejected.is_empty() {
            true => format!("auto chose {}, the first choice", self.name),
            false => format!("auto chose {} ({})", self.name, list(&self.rejected)),
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ChoiceError {
    /// To choose another one would change what Services do on this node.
    #[error(
        "the backend {name} has rules on this node and cannot be opened: {reason}; fix that, or set proxy.backend to \
         change over to another backend"
    )]
    Outage { name: &'static str, reason: String },
    #[error("no backend can be opened on this node: {}", list(.0))]
    NoBackend(Vec<Rejected>),
}

fn list(rejected: &[Rejected]) -> String {
    rejected.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// Try to open the backend at this place, and decide again.
    Probe(usize),
    Chosen(Choice),
    Failed(ChoiceError),
}

/// `candidates`: in the order of preference. Probes are asked for one by one, because they may take seconds.
#[must_use]
pub fn decide(candidates: &[Candidate]) -> Step {
    let mut rejected = Vec::new();
    for (place, candidate) in candidates.iter().enumerate().filter(|(_, candidate)| candidate.is_automatic) {
        match &candidate.probe {
            Probe::Unknown => return Step::Probe(place),
            Probe::Works => return Step::Chosen(Choice { name: candidate.name, rejected }),
            Probe::Fails(reason) if candidate.has_rules => {
                return Step::Failed(ChoiceError::Outage { name: candidate.name, reason: reason.clone() });
            }
            Probe::Fails(reason) | Probe::Unsuitable(reason) => {
                rejected.push(Rejected { name: candidate.name, reason: reason.clone() });
            }
        }
    }
    Step::Failed(ChoiceError::NoBackend(rejected))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a backend is on a node: `works`, `fails`, `unsuitable`, each with or without `+rules`.
    fn node(words: [&str; 4]) -> Vec<Candidate> {
        let names = [("nft", true), ("ipvs", false), ("iptables", true), ("userspace", true)];
        let candidate = |((name, is_automatic), word): ((&'static str, bool), &str)| Candidate {
            name,
            is_automatic,
            probe: match word.split('+').next() {
                Some("works") => Probe::Works,
                Some("fails") => Probe::Fails(format!("no {name}")),
                Some("unsuitable") => Probe::Unsuitable(format!("{name} is not for it")),
                _ => Probe::Unknown,
            },
            has_rules: word.ends_with("+rules"),
        };
        names.into_iter().zip(words).map(candidate).collect()
    }

    fn outcome(words: [&str; 4]) -> String {
        match decide(&node(words)) {
            Step::Probe(place) => format!("probe {place}"),
            Step::Chosen(choice) => choice.describe(),
            Step::Failed(error) => error.to_string(),
        }
    }

    #[test]
    fn the_first_backend_that_works_is_chosen_and_an_outage_chooses_nothing() {
        for (words, expected) in [
            (["?", "?", "?", "?"], "probe 0"),
            (["works", "?", "?", "?"], "auto chose nft, the first choice"),
            // Only the setting chooses ipvs.
            (["fails", "?", "?", "?"], "probe 2"),
            (["fails", "works", "works", "?"], "auto chose iptables (nft: no nft)"),
            (["fails", "fails", "fails", "?"], "probe 3"),
            (
                ["fails", "fails", "fails", "works"],
                "auto chose userspace (nft: no nft; iptables: no iptables)",
            ),
            (
                ["fails", "fails", "fails", "fails"],
                "no backend can be opened on this node: nft: no nft; iptables: no iptables; userspace: no userspace",
            ),
            // Rules of a worse backend are taken over.
            (["works", "?", "?+rules", "?+rules"], "auto chose nft, the first choice"),
            (["fails", "?+rules", "works", "?"], "auto chose iptables (nft: no nft)"),
            // Those of the best one that could be opened are a promise.
            (
                ["fails+rules", "works", "works", "works"],
                "the backend nft has rules on this node and cannot be opened: no nft; fix that, or set proxy.backend to \
                 change over to another backend",
            ),
            (
                ["fails", "?", "fails+rules", "works"],
                "the backend iptables has rules on this node and cannot be opened: no iptables; fix that, or set \
                 proxy.backend to change over to another backend",
            ),
            (["works+rules", "?", "?", "?"], "auto chose nft, the first choice"),
            // Rules of one that does not suit any more are taken over.
            (["unsuitable+rules", "?", "works", "?"], "auto chose iptables (nft: nft is not for it)"),
            (["unsuitable", "?", "?", "?"], "probe 2"),
        ] {
            assert_eq!(outcome(words), expected, "{words:?}");
        }
    }

    /// Whatever fails at a restart, the backend that has rules stays, or nothing is chosen; a better one may come.
    #[test]
    fn a_restart_never_chooses_a_worse_backend_than_the_one_with_rules() {
        let states = ["works", "fails"];
        let all = (0..8_usize).map(|bits| [bits & 1, bits >> 1 & 1, bits >> 2 & 1].map(|bit| states[bit]));
        for [nft, iptables, userspace] in all {
            let first = decide(&node([nft, "works", iptables, userspace]));
            let Step::Chosen(before) = first else { continue };
            for [nft, iptables, userspace] in
                (0..8_usize).map(|bits| [bits & 1, bits >> 1 & 1, bits >> 2 & 1].map(|bit| states[bit]))
            {
                let mut restarted = node([nft, "works", iptables, userspace]);
                for candidate in &mut restarted {
                    candidate.has_rules = candidate.name == before.name;
                }
                if let Step::Chosen(after) = decide(&restarted) {
                    let place = |name| restarted.iter().position(|candidate| candidate.name == name);
                    assert!(place(after.name) <= place(before.name), "{before:?} {after:?}");
                }
            }
        }
    }
}
