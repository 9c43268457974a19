//! The Lease as shown by the debug API and metrics.
//!
//! Owns: health, summary, figures and JSON, made from the core.

use std::time::Duration;

use keelson_actor_system::{
    clock::Now,
    cluster::{JobHealth, LEASE_NAMESPACE},
};

use super::{Contention, Core, NodeSeen, Phase, Renewed, mono_ms};

impl Core {
    #[must_use]
    pub(crate) fn health(&self) -> JobHealth {
        match &self.failure {
            Some(failure) => {
                let (reason, since_unix_ms) = (failure.reason.clone(), failure.since_unix_ms);
                JobHealth::Failing { reason, since_unix_ms, refused: false }
            }
            None if self.settled => JobHealth::Healthy,
            None => JobHealth::Pending,
        }
    }

    #[must_use]
    pub(crate) fn summary(&self) -> String {
        let interval = self.policy.interval();
        match self.health() {
            JobHealth::Pending => format!("reading Lease {}", self.policy.name),
            JobHealth::Healthy if self.contention() == Contention::Contested => {
                format!("renews Lease {} every {interval:?}, contested by another process", self.policy.name)
            }
            JobHealth::Healthy => format!("renews Lease {} every {interval:?}", self.policy.name),
            JobHealth::Failing { reason, .. } => format!("failing: {reason}"),
        }
    }

    /// The last successful renewal, possibly by an earlier process.
    #[must_use]
    pub(crate) fn renewed_at(&self) -> Option<Renewed> {
        self.renewed
    }

    #[must_use]
    pub(crate) fn failures(&self) -> u64 {
        self.failures
    }

    /// `spec.leaseTransitions` as last confirmed.
    #[must_use]
    pub(crate) fn transitions(&self) -> Option<i32> {
        self.record.as_ref().map(|record| record.transitions)
    }

    #[must_use]
    pub(crate) fn contention(&self) -> Contention {
        self.contest.contention()
    }

    fn phase_name(&self) -> &'static str {
        match self.phase {
            Phase::Waiting { .. } => "waiting",
            Phase::BackingOff { .. } => "backing off",
            Phase::Reading => "reading",
            Phase::AskingNode { .. } => "asking for the node",
            Phase::Creating(_) => "creating",
            Phase::Renewing(_) => "renewing",
        }
    }

    #[must_use]
    pub(crate) fn view(&self, server: &str, now: Now) -> serde_json::Value {
        let ms = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        let (node, node_uid, gone_since) = match &self.node {
            NodeSeen::Unknown => ("not asked for", None, None),
            NodeSeen::Known(uid) => ("there", Some(uid), None),
            NodeSeen::Gone { since_unix_ms } => ("gone", None, Some(*since_unix_ms)),
        };
        let (health, reason, since) = match self.health() {
            JobHealth::Pending => ("pending", None, None),
            JobHealth::Healthy => ("healthy", None, None),
            JobHealth::Failing { reason, since_unix_ms, .. } => {
                ("failing", Some(reason), Some(since_unix_ms))
            }
        };
        // While the Lease is being looked for, use what was last confirmed.
        let (held, record) = (self.lease.as_ref(), self.record.as_ref());
        let holder = held.and_then(|held| held.holder.as_deref());
        serde_json::json!({
            "server": server,
            "namespace": LEASE_NAMESPACE,
            "name": self.policy.name,
            "duration_seconds": self.policy.duration_seconds(),
            "phase": self.phase_name(),
            "health": health,
            "reason": reason,
            "failing_since_unix_ms": since,
            "consecutive_failures": self.failures,
            "last_error": self.last_error.as_ref().map(|(_, text)| text),
            "last_error_unix_ms": self.last_error.as_ref().map(|(at, _)| at),
            "holder": holder.or(record.map(|record| record.holder.as_str())),
            "uid": held.map(|held| &held.uid).or(record.map(|record| &record.uid)),
            "resource_version": held.map(|held| held.resource_version.as_str()),
            "transitions": held.map(|held| held.transitions).or(record.map(|record| record.transitions)),
            "managers_forgotten": record.map(|record| record.managers_forgotten),
            "contention": self.contention().name(),
            "contested_since_unix_ms": self.contest.since_unix_ms(),
            "node": self.policy.node,
            "node_state": node,
            "node_uid": node_uid,
            "node_gone_since_unix_ms": gone_since,
            "last_renewal_unix_ms": self.renewed.map(|at| at.unix_ms),
            "last_renewal_age_ms": self.renewed.map(|at| mono_ms(now).saturating_sub(at.mono_ms).max(0)),
            "next_request_unix_ms": self.next_tick().map(|at| now.unix_ms_at(at)),
            "next_request_in_ms": self.next_tick().map(|at| ms(at.saturating_sub(now.mono))),
        })
    }
}
