//! Settings that are valid but probably not intended.
//!
//! Owns: the list of combinations that cause a warning. In: checked [`Settings`]. Out: one [`Warning`] for each. A
//! warning rejects nothing; the agent logs them at its start and after a reload, and `keelson config check` prints
//! them.

use std::fmt;

use crate::gates::Gate;
use crate::settings::Settings;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Warning {
    pub key: &'static str,
    /// The consequence of the setting, and what to do.
    pub message: String,
}

impl fmt::Display for Warning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.key, self.message)
    }
}

impl Settings {
    pub fn warnings(&self) -> Vec<Warning> {
        no_limit(self).into_iter().chain(no_present_lane(self)).collect()
    }
}

/// The installation procedure turns off the kubelet's own limit (`serializeImagePulls: false`), so without one here the
/// node has none.
fn no_limit(settings: &Settings) -> Option<Warning> {
    let pulls = &settings.pulls;
    if pulls.serialize_image_pulls || pulls.max_parallel_image_pulls > 0 {
        return None;
    }
    let per_registry = pulls.per_registry_max_parallel_image_pulls;
    let message = match per_registry {
        0 => "no limit on parallel image pulls: max_parallel_image_pulls is 0 and serialize_image_pulls is false; with \
              serializeImagePulls: false in the kubelet's configuration the node has no limit at all; set \
              max_parallel_image_pulls, for example to 3"
            .to_owned(),
        limit => format!(
            "no limit on parallel image pulls of the node: only pulls per registry are limited, to {limit}; \
             also set max_parallel_image_pulls"
        ),
    };
    Some(Warning { key: "pulls.max_parallel_image_pulls", message })
}

fn no_present_lane(settings: &Settings) -> Option<Warning> {
    (!settings.feature_gates.enabled(Gate::PresentImageFastLane)).then(|| Warning {
        key: "feature_gates.PresentImageFastLane",
        message:
            "pulls of present images wait in the queue, so pods with imagePullPolicy: Always start later; \
             set the gate to true"
                .to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// I11: the defaults have no limit and cause a warning; each way to set one does not.
    #[test]
    fn settings_that_remove_every_limit_are_warned_of() {
        let keys = |settings: &Settings| -> Vec<&'static str> {
            settings.warnings().iter().map(|warning| warning.key).collect()
        };
        let mut settings = Settings::default();
        assert_eq!(keys(&settings), ["pulls.max_parallel_image_pulls"]);
        settings.pulls.max_parallel_image_pulls = 3;
        assert!(keys(&settings).is_empty());
        settings.pulls.max_parallel_image_pulls = 0;
        settings.pulls.serialize_image_pulls = true;
        assert!(keys(&settings).is_empty());
        settings.pulls.serialize_image_pulls = false;
        settings.pulls.per_registry_max_parallel_image_pulls = 2;
        assert_eq!(keys(&settings), ["pulls.max_parallel_image_pulls"]);
        let text = settings.warnings()[0].to_string();
        assert!(text.contains("only pulls per registry are limited, to 2"), "{text}");
    }
}
