//! JSON form of debug API fields whose wire form is not readable.
//!
//! In: field values in wire form. Out: their `serde` form.

use serde::{Serialize, Serializer};
use serde_json::Value;

use crate::debug::PullState;

impl PullState {
    /// The state as displayed and in JSON: `queued`, `running_present`...
    #[must_use]
    pub fn name(self) -> String {
        self.as_str_name().trim_start_matches("PULL_STATE_").to_ascii_lowercase()
    }
}

/// The short name; a number for a state that this build does not know.
pub(crate) fn pull_state<S: Serializer>(state: &i32, to: S) -> Result<S::Ok, S::Error> {
    match PullState::try_from(*state) {
        Ok(state) => to.serialize_str(&state.name()),
        Err(_) => to.serialize_i32(*state),
    }
}

/// For numbers that JSON readers would round.
pub(crate) fn as_text<S: Serializer>(number: &u64, to: S) -> Result<S::Ok, S::Error> {
    to.collect_str(number)
}

/// JSON in a string, as JSON; `null` for an empty string, and the string itself if it is not JSON.
pub(crate) fn embedded<S: Serializer>(text: &str, to: S) -> Result<S::Ok, S::Error> {
    if text.is_empty() {
        return to.serialize_unit();
    }
    match serde_json::from_str::<Value>(text) {
        Ok(value) => value.serialize(to),
        Err(_) => to.serialize_str(text),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use crate::{
        debug::{Actor, Pull, PullState, Setting},
        node::{ClearConditionResponse, Condition, Heartbeats, Lease, SetConditionResponse},
    };

    fn as_json(value: &impl serde::Serialize) -> Value {
        serde_json::to_value(value).unwrap()
    }

    #[test]
    fn a_state_is_a_short_word() {
        let pull = |state: i32| as_json(&Pull { state, ..Pull::default() })["state"].clone();
        assert_eq!(pull(PullState::Running.into()), json!("running"));
        assert_eq!(pull(PullState::WaitingForRuntime.into()), json!("waiting_for_runtime"));
        assert_eq!(pull(0), json!("unspecified"));
        assert_eq!(pull(4711), json!(4711));
    }

    #[test]
    fn json_in_a_string_is_json() {
        let actor =
            |state: &str| as_json(&Actor { state_json: state.into(), ..Actor::default() })["state"].clone();
        assert_eq!(actor(r#"{"queue":[1,2]}"#), json!({"queue": [1, 2]}));
        assert_eq!(actor(""), Value::Null);
        assert_eq!(actor("{broken"), json!("{broken"));
        let setting =
            Setting { key: "pulls.max_parallel_image_pulls".into(), value: "3".into(), ..Setting::default() };
        assert_eq!(as_json(&setting)["value"], json!(3));
    }

    #[test]
    fn heartbeats_have_the_field_names_of_the_proto_file() {
        let condition = Condition { r#type: "Ready".into(), status: "True".into(), ..Condition::default() };
        let heartbeats = Heartbeats {
            state: "healthy".into(),
            lease: Some(Lease { age_ms: 4, ..Lease::default() }),
            conditions: vec![condition],
            ..Heartbeats::default()
        };
        let shown = as_json(&heartbeats);
        assert_eq!((&shown["lease"]["age_ms"], &shown["status"]), (&json!(4), &Value::Null));
        let expected = json!({
            "type": "Ready", "status": "True", "reason": "", "message": "", "last_transition_unix_ms": 0, "source": "",
            "contested": false
        });
        assert_eq!(shown["conditions"], json!([expected]));
        assert_eq!(as_json(&SetConditionResponse { changed: true }), json!({"changed": true}));
        assert_eq!(as_json(&ClearConditionResponse {}), json!({}));
    }
}
