//! Heartbeats in the debug API, and conditions that it receives.
//!
//! Owns: nothing. In: the actors' states and healths. Out: `keelson.node.v1`.

use keelson_actor_system::{cluster::JobHealth, inspect::MailboxError};
use keelson_debug::{Check, ConditionError, ViewError};
use keelson_heartbeats::{
    lease::LeaseState,
    status::{
        ClearCondition, ConditionRefused, ConditionStatus, ExternalCondition, Role, SetCondition, StatusState,
    },
};
use keelson_proto::node as pb;
use serde::Deserialize;
use tokio::sync::watch;

use super::{EnabledHeartbeats, Heartbeats, NO_LEASE};
use crate::agent::{actor_handle::ask_with_timeout, credentials};

/// The part of the LeaseRenewer's state that is shown.
#[derive(Deserialize)]
struct LeaseShown {
    name: String,
    holder: Option<String>,
    duration_seconds: i64,
    transitions: Option<i32>,
    last_renewal_unix_ms: Option<i64>,
    last_renewal_age_ms: Option<i64>,
    contention: String,
}

#[derive(Deserialize)]
struct StatusShown {
    last_report_unix_ms: Option<i64>,
    last_report_age_ms: Option<i64>,
    next_report_in_ms: Option<i64>,
    conditions: Vec<ConditionShown>,
}

#[derive(Deserialize)]
struct ConditionShown {
    #[serde(rename = "type")]
    kind: String,
    status: String,
    reason: Option<String>,
    message: Option<String>,
    last_transition_unix_ms: Option<i64>,
    from_reporter: bool,
    contested: bool,
}

fn health(seen: &watch::Receiver<JobHealth>) -> (&'static str, String, i64) {
    match &*seen.borrow() {
        JobHealth::Pending => ("pending", String::new(), 0),
        JobHealth::Healthy => ("healthy", String::new(), 0),
        JobHealth::Failing { reason, since_unix_ms, .. } => ("failing", reason.clone(), *since_unix_ms),
    }
}

fn parsed<'a, T: Deserialize<'a>>(json: &'a str) -> Result<T, ViewError> {
    serde_json::from_str(json)
        .map_err(|error| ViewError::Unavailable(format!("cannot decode the state of an actor: {error}")))
}

impl Heartbeats {
    pub(in crate::agent) async fn show(&self, node_name: String) -> Result<pb::Heartbeats, ViewError> {
        match self {
            Self::Disabled(why) => Ok(pb::Heartbeats {
                state: "disabled".into(),
                reason: (*why).into(),
                node_name,
                ..Default::default()
            }),
            Self::Enabled(on) => on.show(node_name).await,
        }
    }

    pub(in crate::agent) async fn set_condition(
        &self,
        request: pb::SetConditionRequest,
    ) -> Result<bool, ConditionError> {
        let on = self.on_for_conditions()?;
        let condition = condition(request)?;
        let taken =
            on.status.reporter.ask(SetCondition { condition }).await.map_err(|error| unavailable(&error))?;
        taken.map_err(refused)
    }

    pub(in crate::agent) async fn clear_condition(&self, kind: &str) -> Result<(), ConditionError> {
        let on = self.on_for_conditions()?;
        let kind = kind.to_owned();
        on.status
            .reporter
            .ask(ClearCondition { kind })
            .await
            .map_err(|error| unavailable(&error))?
            .map_err(refused)
    }

    fn on_for_conditions(&self) -> Result<&EnabledHeartbeats, ConditionError> {
        match self {
            Self::Disabled(why) => {
                Err(ConditionError::Unavailable(format!("heartbeats are disabled: {why}")))
            }
            Self::Enabled(on) if !on.takes_conditions => {
                Err(ConditionError::Unavailable("feature gate ExternalNodeConditions is disabled".into()))
            }
            Self::Enabled(on) => Ok(on),
        }
    }
}

fn unavailable(error: &MailboxError) -> ConditionError {
    ConditionError::Unavailable(error.to_string())
}

fn refused(why: ConditionRefused) -> ConditionError {
    let text = why.to_string();
    match why {
        ConditionRefused::Reserved { .. } => ConditionError::NotYours(text),
        ConditionRefused::TooMany => ConditionError::TooMany(text),
        ConditionRefused::Unknown { .. } => ConditionError::NotSet(text),
        _ => ConditionError::Invalid(text),
    }
}

fn condition(request: pb::SetConditionRequest) -> Result<ExternalCondition, ConditionError> {
    let status = ConditionStatus::ALL.into_iter().find(|status| status.name() == request.status);
    let status = status.ok_or_else(|| {
        ConditionError::Invalid(format!("status {:?} is not True, False or Unknown", request.status))
    })?;
    let ttl = match u64::try_from(request.ttl_ms) {
        Ok(0) => None,
        Ok(ms) => Some(std::time::Duration::from_millis(ms)),
        Err(_) => {
            return Err(ConditionError::Invalid(format!(
                "ttl_ms is {}; it must not be negative",
                request.ttl_ms
            )));
        }
    };
    Ok(ExternalCondition {
        kind: request.r#type,
        status,
        reason: request.reason,
        message: request.message,
        ttl,
    })
}

impl EnabledHeartbeats {
    async fn show(&self, node_name: String) -> Result<pb::Heartbeats, ViewError> {
        let (lease, status) =
            tokio::join!(self.show_lease(), ask_with_timeout(self.status.reporter.ask(StatusState {})));
        let (lease, status) = (lease?, parsed::<StatusShown>(&status?)?);
        let status_health = health(&self.status.health);
        let wrong: Vec<_> = self.checks().into_iter().filter(|check| !check.ok).collect();
        let reasons = causes(&wrong);
        let since = wrong.iter().map(|check| check.since_unix_ms).filter(|since| *since > 0).min();
        let state = match (wrong.is_empty(), &*lease.state, status_health.0) {
            (false, ..) => "failing",
            (true, "healthy" | "disabled", "healthy") => "healthy",
            _ => "pending",
        };
        let conditions = status.conditions.iter().map(show_condition).collect();
        let (credentials, credential_warnings) = self.credentials.show();
        Ok(pb::Heartbeats {
            state: state.into(),
            reason: reasons.join("; "),
            failing_since_unix_ms: since.unwrap_or_default(),
            role: self.role.name().into(),
            node_name,
            server: self.rest.url(),
            lease: Some(lease),
            status: Some(self.show_status(&status, status_health)),
            conditions,
            credentials,
            credential_warnings,
        })
    }

    async fn show_lease(&self) -> Result<pb::Lease, ViewError> {
        let Some(part) = &self.lease else {
            let (state, reason) = ("disabled".into(), NO_LEASE.into());
            return Ok(pb::Lease { state, reason, ..pb::Lease::default() });
        };
        let lease: LeaseShown = parsed(&ask_with_timeout(part.renewer.ask(LeaseState {})).await?)?;
        let (state, reason, failing_since_unix_ms) = health(&part.health);
        Ok(pb::Lease {
            name: lease.name,
            holder: lease.holder.unwrap_or_default(),
            state: state.into(),
            reason,
            failing_since_unix_ms,
            duration_seconds: lease.duration_seconds,
            transitions: lease.transitions.unwrap_or_default(),
            renewed_unix_ms: lease.last_renewal_unix_ms.unwrap_or_default(),
            age_ms: lease.last_renewal_age_ms.unwrap_or_default(),
            renewals: part.metrics.renewals(),
            contention: lease.contention,
        })
    }

    fn show_status(&self, status: &StatusShown, health: (&str, String, i64)) -> pb::Status {
        let (state, reason, failing_since_unix_ms) = health;
        pb::Status {
            state: state.into(),
            reason,
            failing_since_unix_ms,
            reported_unix_ms: status.last_report_unix_ms.unwrap_or_default(),
            age_ms: status.last_report_age_ms.unwrap_or_default(),
            next_report_in_ms: status.next_report_in_ms.unwrap_or_default().max(0),
            reports: self.status.metrics.reported(),
            computations: self.status.metrics.computations.get(),
            on_change_only: self.role == Role::Companion,
        }
    }
}

fn show_condition(condition: &ConditionShown) -> pb::Condition {
    pb::Condition {
        r#type: condition.kind.clone(),
        status: condition.status.clone(),
        reason: condition.reason.clone().unwrap_or_default(),
        message: condition.message.clone().unwrap_or_default(),
        last_transition_unix_ms: condition.last_transition_unix_ms.unwrap_or_default(),
        contested: condition.contested,
        source: if condition.from_reporter { "reporter" } else { "agent" }.into(),
    }
}

/// The reasons of failed checks, once each. While the credentials fail, every request fails because of them.
fn causes(failed: &[Check]) -> Vec<&str> {
    if let Some(check) = failed.iter().find(|check| check.name == credentials::CHECK) {
        return vec![&check.message];
    }
    let mut reasons: Vec<&str> = Vec::new();
    for check in failed {
        if !reasons.contains(&&*check.message) {
            reasons.push(&check.message);
        }
    }
    reasons
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invalid_conditions_are_refused_with_the_reason() {
        let request = |status: &str, ttl_ms| pb::SetConditionRequest {
            r#type: "KernelDeadlock".into(),
            status: status.into(),
            reason: "NoDeadlock".into(),
            message: String::new(),
            ttl_ms,
        };
        let text = |request| condition(request).expect_err("refused").to_string();
        assert!(text(request("true", 0)).contains("True, False or Unknown"));
        assert!(text(request("True", -1)).contains("negative"));
        assert_eq!(condition(request("True", 0)).expect("taken").ttl, None);
        let ttl = condition(request("True", 90_000)).expect("taken").ttl;
        assert_eq!(ttl, Some(std::time::Duration::from_secs(90)));
    }

    #[test]
    fn a_cause_is_shown_once() {
        let failed = |name: &str, message: &str| Check {
            name: name.into(),
            ok: false,
            message: message.into(),
            since_unix_ms: 0,
        };
        let mut checks = vec![failed("lease", "a"), failed("node-watch", "b"), failed("pod-watch", "a")];
        assert_eq!(causes(&checks), ["a", "b"]);
        checks.push(failed("credentials", "no certificate"));
        assert_eq!(causes(&checks), ["no certificate"], "every other check fails because of it");
    }
}
