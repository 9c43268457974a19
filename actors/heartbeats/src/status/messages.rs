//! Messages of the StatusReporter.

use std::sync::Arc;

use k8s_openapi::api::core::v1::Node;
use keelson_actor_system::messages;

use super::external::{ConditionRefused, ConditionView, ExternalCondition};

messages! {
    NodeChanged => () {
        /// `None`: it does not exist.
        node: Option<Arc<Node>>,
    }
    /// A condition of the agent itself may have changed: check at once.
    ConditionChanged => () {}
    /// Set by another process; reported with the next status. Answered when it is on disk, or when the store has
    /// failed: then the write is retried. The answer is whether it differs from what was set before.
    SetCondition => Result<bool, ConditionRefused> {
        condition: ExternalCondition,
    }
    /// The condition is removed from the Node with the next status.
    ClearCondition => Result<(), ConditionRefused> {
        kind: String,
    }
    /// No more reports. Answered when no request is under way, with the types of all conditions that the agent may
    /// have added to the Node: a report that arrives after their removal would restore them.
    EndReports => Vec<String> {}
    ListConditions => Vec<ConditionView> {}
    /// Report the status soon, even without a change.
    ReportNow => () {}
    /// The actor's state as JSON.
    StatusState => String {}
    /// Updates the gauges that grow with time, before they are read.
    CountNow => () {}
}
