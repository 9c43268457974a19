//! What the StatusReporter counts.
//!
//! Owns: its metric families; the kubelet has none for this. In: what it does. Out: a [`Registry`] for whoever
//! encodes it. Labels are closed sets: conditions of other processes have no place in them.

use std::{sync::atomic::AtomicU64, time::Duration};

use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family, gauge::Gauge},
    registry::{Registry, Unit},
};

use super::{external::ConditionStatus, policy::Role};

/// How reports end.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct ReportResult {
    /// `sent`, `failed`, or `registered` (beside `sent`) for one that made the Node.
    pub result: &'static str,
}

/// A condition and a status that it can have.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct ConditionLabel {
    /// One of the agent's own types.
    pub condition: &'static str,
    /// `True`, `False`, `Unknown`.
    pub status: &'static str,
}

/// Every family. Cheap to clone: the values are shared.
#[derive(Debug, Clone, Default)]
pub struct StatusMetrics {
    /// Reports by result.
    pub reports: Family<ReportResult, Counter>,
    /// Statuses worked out.
    pub computations: Counter,
    /// Steps of the wall clock.
    pub clock_steps: Counter,
    /// Changes that another process made to conditions of this agent's.
    pub foreign_writes: Counter,
    /// Types of conditions that another process writes too.
    pub contested: Gauge,
    /// Time since the last report.
    pub last_report_age: Gauge<f64, AtomicU64>,
    /// 1 for the status that a condition has, 0 for those that it has not.
    pub conditions: Family<ConditionLabel, Gauge>,
}

impl StatusMetrics {
    /// Enters every family into `registry`. The age of a companion's last report says nothing, because it reports
    /// changes only.
    pub fn register(&self, registry: &mut Registry, role: Role) {
        let own = registry.sub_registry_with_prefix("keelson_node");
        own.register("status_reports", "Node status reports, by result", self.reports.clone());
        own.register("status_computations", "Node status computations", self.computations.clone());
        if role == Role::Node {
            own.register_with_unit(
                "status_last_report_age",
                "Time since the last node status report",
                Unit::Seconds,
                self.last_report_age.clone(),
            );
        }
        own.register(
            "condition_foreign_writes",
            "Changes by another process to conditions that the agent writes",
            self.foreign_writes.clone(),
        );
        own.register(
            "conditions_contested",
            "Conditions of the agent that another process also writes",
            self.contested.clone(),
        );
        own.register("clock_steps", "Detected steps of the wall clock", self.clock_steps.clone());
        own.register(
            "condition",
            "1 for the current status of each condition of the agent",
            self.conditions.clone(),
        );
    }

    /// How many reports the API server has taken, that with which the Node was made included.
    #[must_use]
    pub fn reported(&self) -> u64 {
        self.reports.get(&ReportResult { result: "sent" }).map_or(0, |counter| counter.get())
    }

    /// Counts a report.
    pub(super) fn report(&self, result: &'static str) {
        self.reports.get_or_create(&ReportResult { result }).inc();
    }

    /// Shows conditions.
    pub(super) fn show(&self, conditions: &[(&'static str, String)]) {
        for (condition, is) in conditions {
            for status in ConditionStatus::ALL {
                let label = ConditionLabel { condition, status: status.name() };
                self.conditions.get_or_create(&label).set((is == status.name()).into());
            }
        }
    }

    /// Shows the age of the last report, if there was one.
    pub(super) fn age(&self, age: Option<Duration>) {
        if let Some(age) = age {
            self.last_report_age.set(age.as_secs_f64());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_labels_are_the_documented_ones() {
        let metrics = StatusMetrics::default();
        metrics.report("sent");
        metrics.clock_steps.inc();
        metrics.computations.inc();
        metrics.age(Some(Duration::from_millis(1500)));
        metrics.show(&[("Ready", "False".into())]);
        let mut registry = Registry::default();
        metrics.register(&mut registry, Role::Node);
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry).expect("encodes");
        for line in [
            "keelson_node_status_reports_total{result=\"sent\"} 1",
            "keelson_node_status_computations_total 1",
            "keelson_node_status_last_report_age_seconds 1.5",
            "keelson_node_clock_steps_total 1",
            "keelson_node_condition_foreign_writes_total 0",
            "keelson_node_conditions_contested 0",
            "keelson_node_condition{condition=\"Ready\",status=\"False\"} 1",
            "keelson_node_condition{condition=\"Ready\",status=\"True\"} 0",
        ] {
            assert!(text.lines().any(|have| have == line), "{line} in\n{text}");
        }
    }
}
