//! Feature gates: a closed list, with a stage for each.
//!
//! Alpha gates are off and beta gates on by default; GA gates are always on. `AllAlpha` and `AllBeta` set every gate
//! of their stage. A gate that is set by name takes precedence over them, whichever layer sets either.

use std::collections::BTreeMap;
use std::fmt;

use crate::error::{Fault, quote};
use crate::suggest::nearest;

pub(crate) const ALL_ALPHA: &str = "AllAlpha";
pub(crate) const ALL_BETA: &str = "AllBeta";

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Stage {
    /// May be wrong or be removed; off by default.
    Alpha,
    /// Tested and kept; on by default.
    Beta,
    /// Always on; cannot be disabled.
    Ga,
}

impl Stage {
    pub fn default_on(self) -> bool {
        self != Self::Alpha
    }
}

impl fmt::Display for Stage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Alpha => "ALPHA",
            Self::Beta => "BETA",
            Self::Ga => "GA",
        })
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GateSpec {
    /// As in `--feature-gates Name=true`.
    pub name: &'static str,
    pub stage: Stage,
    /// Version in which the gate reached this stage.
    pub since: &'static str,
    pub description: &'static str,
}

macro_rules! gates {
    ($($name:ident: $stage:ident, $since:literal, $description:literal;)+) => {
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum Gate { $(#[doc = $description] $name),+ }

        impl Gate {
            /// In the order of the reference.
            pub const ALL: [Gate; SPECS.len()] = [$(Gate::$name),+];
        }

        const SPECS: &[GateSpec] = &[$(GateSpec {
            name: stringify!($name),
            stage: Stage::$stage,
            since: $since,
            description: $description,
        }),+];
    };
}

gates! {
    PullDeduplication: Beta, "0.1", "Requests for the same image with the same credentials and runtime \
                                     handler share one pull.";
    PresentImageFastLane: Beta, "0.1", "A pull of an image that is already present does not wait for a slot.";
    KeepPullProgress: Beta, "0.1", "Retain the fetched layers when a pull is cancelled or the agent or \
                                    runtime dies.";
    ResumePulls: Beta, "0.1", "After a restart, continue the pulls that were queued or running.";
    PullOption: Beta, "0.1", "Accept the limit as a pull option in requests and pass it to runtimes that \
                              support it.";
    NodeHeartbeats: Beta, "0.1", "Report the agent's Lease, conditions and, with role node, node status to \
                                  the API server.";
    PodAwarePulls: Beta, "0.1", "Fail a queued pull when its pod is deleted; requires an API server.";
    LeanLeases: Beta, "0.1", "Remove managedFields from the agent's Lease, which would be most of its stored \
                              size.";
    ExternalNodeConditions: Beta, "0.1", "Allow other processes to report node conditions through the agent \
                                          (SetCondition).";
    ServiceEndpoints: Beta, "0.1", "Serve the Services and endpoints of this node (Endpoints API).";
    EndpointDeltas: Beta, "0.1", "Serve deltas in the Endpoints API (keelson.endpoints.v1/Watch) in addition \
                                  to full states.";
    NodeEvents: Beta, "0.1", "Write Events on the Node when a problem of the agent begins and ends, and when \
                              the limit on image pulls is set on the node; requires an API server.";
    PerRegistryPullLimit: Alpha, "0.1", "Limit the parallel pulls per registry, so that a slow registry \
                                         cannot use every slot.";
}

impl Gate {
    pub fn name(self) -> &'static str {
        SPECS[self as usize].name
    }

    pub fn spec(self) -> &'static GateSpec {
        &SPECS[self as usize]
    }
}

pub(crate) fn specs() -> &'static [GateSpec] {
    SPECS
}

/// One line per gate, for the help of `--feature-gates`.
pub fn list_gates() -> String {
    let mut lines = vec![
        format!("{ALL_ALPHA}=true|false (ALPHA - default=false): all alpha gates that are not set by name"),
        format!("{ALL_BETA}=true|false (BETA - default=true): all beta gates that are not set by name"),
    ];
    lines.extend(SPECS.iter().map(|gate| {
        let GateSpec { name, stage, since, description } = gate;
        let default = stage.default_on();
        format!("{name}=true|false ({stage} since {since} - default={default}): {description}")
    }));
    lines.join("\n")
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FeatureGates {
    on: [bool; SPECS.len()],
}

impl FeatureGates {
    /// The names in `set` must have been checked.
    pub(crate) fn resolve(set: &BTreeMap<String, bool>) -> Self {
        Self { on: std::array::from_fn(|i| resolve_one(&SPECS[i], set).0) }
    }

    pub fn enabled(&self, gate: Gate) -> bool {
        self.on[gate as usize]
    }

    #[must_use]
    pub fn with(mut self, gate: Gate, on: bool) -> Self {
        self.on[gate as usize] = on;
        self
    }
}

impl Default for FeatureGates {
    fn default() -> Self {
        Self::resolve(&BTreeMap::new())
    }
}

/// Value of a gate, and the name in `set` that decides it.
pub(crate) fn resolve_one(gate: &GateSpec, set: &BTreeMap<String, bool>) -> (bool, Option<&'static str>) {
    let group = match gate.stage {
        Stage::Alpha => Some(ALL_ALPHA),
        Stage::Beta => Some(ALL_BETA),
        Stage::Ga => None,
    };
    [Some(gate.name), group]
        .into_iter()
        .flatten()
        .find_map(|name| set.get(name).map(|on| (*on, Some(name))))
        .unwrap_or((gate.stage.default_on(), None))
}

/// Returns the canonical name.
pub(crate) fn check(specs: &[GateSpec], name: &str, on: bool) -> Result<&'static str, Fault> {
    if let Some(group) = [ALL_ALPHA, ALL_BETA].into_iter().find(|group| *group == name) {
        return Ok(group);
    }
    let Some(gate) = specs.iter().find(|gate| gate.name == name) else {
        return Err(unknown(specs, name));
    };
    if gate.stage == Stage::Ga && !on {
        return Err(Fault::LockedGate { name: gate.name, since: gate.since });
    }
    Ok(gate.name)
}

pub(crate) fn unknown(specs: &[GateSpec], name: &str) -> Fault {
    let known = || specs.iter().map(|gate| gate.name).chain([ALL_ALPHA, ALL_BETA]);
    Fault::UnknownGate {
        name: quote(name),
        nearest: nearest(name, known()).map(Into::into),
        known: known().map(Into::into).collect(),
    }
}

/// Canonical name of a gate from an environment variable, in which case and underscores are lost.
pub(crate) fn canonical_name(name: &str) -> Option<&'static str> {
    let fold = |s: &str| s.replace('_', "").to_ascii_lowercase();
    SPECS.iter().map(|gate| gate.name).chain([ALL_ALPHA, ALL_BETA]).find(|known| fold(known) == fold(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(pairs: &[(&str, bool)]) -> BTreeMap<String, bool> {
        pairs.iter().map(|(name, on)| ((*name).to_owned(), *on)).collect()
    }

    const GA: GateSpec = GateSpec { name: "OldHat", stage: Stage::Ga, since: "0.0", description: "" };
    const ALPHA: GateSpec = GateSpec { name: "NewHat", stage: Stage::Alpha, since: "0.1", description: "" };
    const BETA: GateSpec = GateSpec { name: "Hat", stage: Stage::Beta, since: "0.1", description: "" };

    #[test]
    fn the_stage_decides_unless_a_setting_does() {
        let value = |gate: &GateSpec, pairs: &[(&str, bool)]| resolve_one(gate, &set(pairs)).0;
        assert!(!value(&ALPHA, &[]) && value(&BETA, &[]) && value(&GA, &[]));
        assert!(value(&ALPHA, &[(ALL_ALPHA, true)]));
        assert!(!value(&ALPHA, &[(ALL_BETA, true)]));
        assert!(!value(&BETA, &[(ALL_BETA, false)]));
        assert!(value(&GA, &[(ALL_BETA, false), (ALL_ALPHA, false)]));
        assert!(!value(&ALPHA, &[(ALL_ALPHA, true), ("NewHat", false)]));
        assert!(value(&BETA, &[(ALL_BETA, false), ("Hat", true)]));
    }

    #[test]
    fn a_ga_gate_is_locked_on() {
        let specs = [GA, ALPHA, BETA];
        assert_eq!(check(&specs, "OldHat", true), Ok("OldHat"));
        let fault = check(&specs, "OldHat", false).unwrap_err();
        assert_eq!(fault, Fault::LockedGate { name: "OldHat", since: "0.0" });
        assert!(fault.to_string().contains("OldHat"));
        let fault = check(&specs, "OldHut", true).unwrap_err();
        assert_eq!(
            fault.to_string(),
            "unknown feature gate \"OldHut\"; did you mean OldHat? \
             known gates: OldHat, NewHat, Hat, AllAlpha, AllBeta"
        );
    }

    #[test]
    fn the_list_names_every_gate() {
        let list = list_gates();
        for gate in Gate::ALL {
            assert!(list.contains(gate.name()), "{list}");
            assert_eq!(gate.name(), gate.spec().name);
            assert_eq!(canonical_name(&gate.name().to_uppercase()), Some(gate.name()));
            assert_eq!(FeatureGates::default().enabled(gate), gate.spec().stage != Stage::Alpha);
        }
        assert_eq!(canonical_name("PULL_DEDUPLICATION"), Some("PullDeduplication"));
    }
}
