//! The end of a pass, and the health of the reports.
//!
//! Owns: when the next pass is, and what is reported of failed ones. In: the result of a pass, events of the watch.
//! Out: the plan, [`JobHealth`], notes.

use std::{mem, sync::Arc};

use k8s_openapi::api::core::v1::{Node, NodeStatus};
use keelson_actor_system::{clock::Now, cluster::JobHealth};

use super::{Core, Counted, Effect, Failing, JITTER, REGISTRATIONS};
use crate::status::{
    compute::{Moment, conditions, millis, moment},
    policy::{Register, Role},
};

/// Time after the server's first answer by which its watches have caught up, in milliseconds: they reconnect 10 to 42 s
/// after that answer.
const CATCH_UP: i64 = 45_000;

pub(super) enum PassEnd {
    /// No change to report.
    Quiet,
    Sent,
    Failed {
        reason: String,
        permanent: bool,
    },
    Missing,
    /// Nothing was requested or sent, because it is not known yet whether another process reports for the node.
    Withheld,
}

impl Core {
    pub(super) fn finish(&mut self, end: PassEnd, now: Now, random: f64, effects: &mut Vec<Effect>) {
        let Some(pass) = self.pass.take() else { return };
        let at = moment(now);
        if pass.requests > 0 {
            self.credit = (self.credit_at(at).saturating_sub(self.frequency()).max(0), at);
        }
        let next = self.next(&end, at, random).max(self.not_before.unwrap_or(at));
        let soon =
            self.is_changed_during_pass && !self.must_wait(now) && self.credit_at(at) >= self.frequency();
        self.due = Some(if soon { at } else { next });
        self.is_changed_during_pass = false;
        let problem = match &end {
            // That says nothing about the reports.
            PassEnd::Withheld => return,
            PassEnd::Quiet | PassEnd::Sent => pass.not_repaired,
            PassEnd::Failed { reason, .. } => {
                effects.push(Effect::Count(Counted::Failed));
                Some(reason.clone())
            }
            PassEnd::Missing => {
                self.missing.get_or_insert(now.unix_ms);
                Some(self.missing_text())
            }
        };
        match problem {
            Some(reason) => self.set_failing(reason, now, effects),
            None => self.set_healthy(matches!(end, PassEnd::Sent), effects),
        }
    }

    #[allow(clippy::cast_possible_truncation, clippy::cast_precision_loss)]
    fn next(&mut self, end: &PassEnd, at: Moment, random: f64) -> Moment {
        let frequency = self.frequency();
        match end {
            PassEnd::Failed { permanent, .. }
                if self.policy.role == Role::Node && self.knowledge.uid.is_none() =>
            {
                self.registrations = self.registrations.saturating_add(1);
                let pause = REGISTRATIONS.pause(self.registrations);
                at + millis(if *permanent { REGISTRATIONS.longest } else { pause })
            }
            _ => at + frequency + (frequency as f64 * JITTER * random) as i64,
        }
    }

    fn missing_text(&self) -> String {
        let name = &self.policy.node_name;
        match (self.policy.role, self.policy.register) {
            (Role::Companion, _) => format!("Node {name} does not exist; its kubelet must register it"),
            (Role::Node, Register::Never) => {
                format!(
                    "Node {name} does not exist and node.register_node is \"never\"; create the Node or \
                     change the setting"
                )
            }
            (Role::Node, _) => format!(
                "Node {name} was deleted and is not recreated, because node.register_node is not \"always\"; \
                 restart the agent or create the Node"
            ),
        }
    }

    fn set_failing(&mut self, reason: String, now: Now, effects: &mut Vec<Effect>) {
        let known = self.failing.take();
        if known.as_ref().is_none_or(|known| known.reason != reason) {
            effects.push(Effect::Note { warn: true, text: format!("cannot report node status: {reason}") });
        }
        let since_unix_ms = known.as_ref().map_or(now.unix_ms, |known| known.since_unix_ms);
        let passes = known.map_or(0, |known| known.passes) + 1;
        self.failing =
            Some(Failing { reason: reason.clone(), since_unix_ms, passes, has_server_answered: false });
        self.set_health(JobHealth::Failing { reason, since_unix_ms, refused: false }, effects);
    }

    fn set_healthy(&mut self, sent: bool, effects: &mut Vec<Effect>) {
        if let Some(failing) = &self.failing {
            if !sent && !failing.has_server_answered {
                // A pass without a report says nothing about the server.
                return;
            }
            let text = format!("node status reported again after {} failed attempts", failing.passes);
            effects.push(Effect::Note { warn: false, text });
            self.failing = None;
        }
        self.set_health(JobHealth::Healthy, effects);
    }

    fn set_health(&mut self, health: JobHealth, effects: &mut Vec<Effect>) {
        if self.health != health {
            self.health = health.clone();
            effects.push(Effect::Health(health));
        }
    }

    pub(super) fn watched(&mut self, node: Option<Arc<Node>>, now: Now, effects: &mut Vec<Effect>) {
        let is_there = node.is_some();
        self.knowledge.watched(node);
        if is_there {
            self.server_answered(now);
            if self.missing.is_some() {
                self.report_early(true, now, effects);
            }
        } else if self.has_seen_node && self.missing.is_none() {
            let text = format!("Node {} was deleted", self.policy.node_name);
            effects.push(Effect::Note { warn: true, text });
        }
    }

    pub(super) fn server_answered(&mut self, now: Now) {
        if let Some(failing) = self.failing.as_mut().filter(|failing| !failing.has_server_answered) {
            failing.has_server_answered = true;
            self.answered_after_outage = Some(moment(now));
        }
    }

    /// Whether problems caused by the server's absence are not reported: while it is away, and until the watches have
    /// had time to catch up. Otherwise an outage would cost two writes per node of the cluster.
    pub(super) fn was_recently_unreachable(&self, now: Now) -> bool {
        self.failing.as_ref().is_some_and(|failing| !failing.has_server_answered)
            || self.answered_after_outage.is_some_and(|at| moment(now).saturating_sub(at) < CATCH_UP)
    }

    /// Whether to read the Node before the first report that the server does not answer the watches: it may have been
    /// away, and be back only now.
    pub(super) fn reads_node_first(&mut self, old: &NodeStatus, new: &NodeStatus, now: Now) -> bool {
        let asks = conditions::would_be_unavailable(old, new);
        let asked = mem::replace(&mut self.has_asked_server, asks);
        asks && !asked && !self.was_recently_unreachable(now)
    }
}
