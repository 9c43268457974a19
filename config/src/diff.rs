//! What changed between two sets of settings, and whether a running agent can take it over (SIGHUP).

use std::fmt;

use serde_json::Value as Json;

use crate::settings::Settings;

#[derive(Clone, Debug, PartialEq)]
pub struct Change {
    /// `section.key`.
    pub key: String,
    pub old: Json,
    pub new: Json,
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {} -> {}", self.key, self.old, self.new)
    }
}

/// In the order of the reference.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Changes {
    pub live: Vec<Change>,
    pub needs_restart: Vec<Change>,
}

impl Changes {
    pub fn is_empty(&self) -> bool {
        self.live.is_empty() && self.needs_restart.is_empty()
    }
}

impl Settings {
    pub fn diff(&self, new: &Settings) -> Changes {
        let mut changes = Changes::default();
        for (old, new) in self.flatten().into_iter().zip(new.flatten()) {
            if old.value == new.value {
                continue;
            }
            let list = if old.live { &mut changes.live } else { &mut changes.needs_restart };
            list.push(Change { key: old.key, old: old.value, new: new.value });
        }
        changes
    }

    /// `self` with the live settings of `new`.
    ///
    /// # Errors
    ///
    /// The result violates a relation, such as a limit that requires a gate which is not enabled before the restart.
    /// The error is a sentence that says so; apply nothing then.
    pub fn with_live_of(&self, new: &Settings) -> Result<Settings, String> {
        let merged = self.replace_live(new);
        match crate::relations::first_violation(&merged) {
            Some(sentence) => Err(sentence),
            None => Ok(merged),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gates::Gate;
    use crate::values::WhenFull;
    use std::time::Duration;

    #[test]
    fn live_settings_and_those_that_need_a_restart_are_distinguished() {
        let old = Settings::default();
        let mut new = old.clone();
        assert!(old.diff(&new).is_empty());
        new.pulls.when_full = WhenFull::Reject;
        new.cri.hold_timeout = Duration::from_secs(5);
        new.agent.log = "debug".into();
        new.agent.drain_timeout = Duration::from_secs(90);
        new.feature_gates = new.feature_gates.with(Gate::ResumePulls, false);
        let changes = old.diff(&new);
        let keys = |list: &[Change]| list.iter().map(|c| c.key.clone()).collect::<Vec<_>>();
        assert_eq!(keys(&changes.live), ["agent.log", "cri.hold_timeout", "pulls.when_full"]);
        assert_eq!(keys(&changes.needs_restart), ["agent.drain_timeout", "feature_gates.ResumePulls"]);
        assert_eq!(changes.live[2].to_string(), r#"pulls.when_full: "wait" -> "reject""#);
        assert_eq!(changes.needs_restart[0].to_string(), r#"agent.drain_timeout: "20s" -> "1m30s""#);
    }

    #[test]
    fn live_values_are_applied_and_others_kept() {
        let old = Settings::default();
        let mut new = old.clone();
        new.pulls.max_parallel_image_pulls = 3;
        new.agent.state_dir = "/elsewhere".into();
        let merged = old.with_live_of(&new).unwrap();
        assert_eq!(merged.pulls, new.pulls);
        assert_eq!(merged.agent, old.agent);
        let left = merged.diff(&new);
        assert!(left.live.is_empty());
        assert_eq!(left.needs_restart.len(), 1);
    }

    #[test]
    fn a_live_value_that_needs_a_gate_not_yet_on_is_refused() {
        let old = Settings::default();
        let mut new = old.clone();
        new.feature_gates = new.feature_gates.with(Gate::PerRegistryPullLimit, true);
        new.pulls.per_registry_max_parallel_image_pulls = 2;
        let sentence = old.with_live_of(&new).unwrap_err();
        assert!(sentence.contains("PerRegistryPullLimit"), "{sentence}");
    }
}
