//! The core's state as JSON.
//!
//! Owns: the JSON of `StatusState`. Ages and times are beside the values that need them.

use keelson_actor_system::clock::Now;
use serde_json::{Value, json};

use super::Core;
use crate::status::{
    compute::{Moment, millis, moment},
    policy::Role,
};

impl Core {
    #[must_use]
    pub(crate) fn summary(&self) -> String {
        match (&self.failing, self.last_report) {
            (Some(failing), _) => format!("failing: {}", failing.reason),
            (None, _) if self.stands_back() => {
                format!("standing back: another process reports for {}", self.policy.node_name)
            }
            (None, None) => "nothing reported yet".into(),
            (None, Some(_)) => format!("reporting the status of {}", self.policy.node_name),
        }
    }

    #[must_use]
    pub(crate) fn view(&self, now: Now) -> Value {
        let at = moment(now);
        let unix_ms = |then: Moment| now.unix_ms.saturating_add(then.saturating_sub(at));
        let node = self.knowledge.node();
        let planned = self.last_report.filter(|_| self.policy.role == Role::Node);
        let expires = planned.map(|last| last + millis(self.policy.report_frequency) + self.delay);
        let conditions: Vec<_> = self
            .shown
            .iter()
            .map(|of| {
                json!({
                    "type": of.type_,
                    "status": of.status,
                    "reason": of.reason,
                    "message": of.message,
                    "last_transition_unix_ms": of.last_transition_time.as_ref().map(|at| at.0.as_millisecond()),
                    "from_reporter": self.externals.has(&of.type_),
                    "contested": self.writers.is_contested(&of.type_),
                })
            })
            .collect();
        let external: Vec<_> = self
            .list_conditions(now)
            .into_iter()
            .map(|view| {
                json!({
                    "type": view.kind,
                    "status": view.status.name(),
                    "reason": view.reason,
                    "message": view.message,
                    "ttl_ms": view.ttl.map(millis),
                    "heard_unix_ms": view.heard_unix_ms,
                })
            })
            .collect();
        json!({
            "role": self.policy.role.name(),
            "node": self.policy.node_name,
            "uid": self.knowledge.uid,
            "resource_version": node.and_then(|node| node.metadata.resource_version.clone()),
            "missing_since_unix_ms": self.missing,
            "last_report_unix_ms": self.last_report.map(unix_ms),
            "last_report_age_ms": self.last_report.map(|last| at.saturating_sub(last)),
            "next_report_unix_ms": expires.map(unix_ms),
            "next_report_in_ms": expires.map(|at_last| at_last.saturating_sub(at).max(0)),
            "next_pass_unix_ms": self.due.map(unix_ms),
            "left_alone_until_unix_ms": self.not_before.filter(|until| *until > at).map(unix_ms),
            "in_a_pass": self.pass.is_some(),
            "failed_passes": self.failing.as_ref().map_or(0, |failing| failing.passes),
            "failing_since_unix_ms": self.failing.as_ref().map(|failing| failing.since_unix_ms),
            "error": self.failing.as_ref().map(|failing| failing.reason.clone()),
            "clock_steps": self.steps,
            "contention": self.contention.name(),
            "contested_conditions": self.contested_conditions(),
            "conditions": conditions,
            "external_conditions": external,
            "unread": self.unread,
        })
    }
}
