//! Messages of the StatusReporter.

use std::sync::Arc;

use k8s_openapi::api::core::v1::Node;
use keelson_actor_system::messages;

use super::external::{ConditionRefused, ConditionView, ExternalCondition};

messages! {
    NodeChanged => () {
        /// `None`: there is none.
        node: Option<Arc<Node>>,
    }
    /// A condition of the agent's own may have changed: looks at once.
    ConditionChanged => () {}
    /// Another process reports a condition; the next status tells it. Answered when it is on disk, or when the
    /// store has failed: then it is tried again. The answer is whether it differs from what was set before.
    SetCondition => Result<bool, ConditionRefused> {
        condition: ExternalCondition,
    }
    /// Takes a condition back; it goes from the Node with the next status.
    ClearCondition => Result<(), ConditionRefused> {
        kind: String,
    }
    /// The types of all conditions that the agent may have added to the Node: what goes from it when the agent does.
    RemovableConditions => Vec<String> {}
    ListConditions => Vec<ConditionView> {}
    /// Reports the status soon, whether or not there is something new.
    ReportNow => () {}
    /// The actor's state as JSON, for people.
    StatusState => String {}
    /// Brings the gauges that grow with time up to date, before they are read.
    CountNow => () {}
}
