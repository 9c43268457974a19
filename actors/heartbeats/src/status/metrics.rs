//! Metrics of the StatusReporter; the kubelet has none for this. Labels are closed sets and exclude conditions of other
//! processes.

use std::time::Duration;

use keelson_metrics::{FloatGauge, ResultLabel, families};
use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family, gauge::Gauge},
    registry::{Registry, Unit},
};

use super::{kinds::ConditionStatus, policy::Role};

/// `status` is `True`, `False` or `Unknown`.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct ConditionLabel {
    pub condition: &'static str,
    pub status: &'static str,
}

families! {
    /// Clones share their values. Label `result`: `sent`, `failed`, or `registered` (beside `sent`) for a report that
    /// created the Node.
    #[derive(Debug, Clone)]
    pub struct StatusMetrics;
    fn register_families;
    "keelson_node" {
        pub reports: Family<ResultLabel, Counter>, "status_reports", "Node status reports, by result";
        pub computations: Counter, "status_computations", "Node status computations";
        pub foreign_writes: Counter, "condition_foreign_writes", "Changes by another process to conditions that the agent writes";
        pub contested: Gauge, "conditions_contested", "Conditions of the agent that another process also writes";
        pub clock_steps: Counter, "clock_steps", "Detected steps of the wall clock";
        pub conditions: Family<ConditionLabel, Gauge>, "condition", "1 for the current status of each condition of the agent";
    }
    with { pub last_report_age: FloatGauge, }
}

impl StatusMetrics {
    /// Enters every family into `registry`. The age of a companion's last report is not exposed, because a companion
    /// reports changes only.
    pub fn register(&self, registry: &mut Registry, role: Role) {
        self.register_families(registry);
        if role == Role::Node {
            let (name, help) = ("status_last_report_age", "Time since the last node status report");
            let own = registry.sub_registry_with_prefix("keelson_node");
            own.register_with_unit(name, help, Unit::Seconds, self.last_report_age.clone());
        }
    }

    /// Reports accepted by the API server, including the registration.
    #[must_use]
    pub fn reported(&self) -> u64 {
        self.reports.get(&ResultLabel { result: "sent" }).map_or(0, |counter| counter.get())
    }

    pub(super) fn report(&self, result: &'static str) {
        self.reports.get_or_create(&ResultLabel { result }).inc();
    }

    /// 1 for the status of each condition, 0 for the others.
    pub(super) fn show(&self, conditions: &[(&'static str, String)]) {
        for (condition, is) in conditions {
            for status in ConditionStatus::ALL {
                let label = ConditionLabel { condition, status: status.name() };
                self.conditions.get_or_create(&label).set((is == status.name()).into());
            }
        }
    }

    /// `None`: nothing was reported yet.
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
    fn names_types_and_help_are_an_interface() {
        assert_eq!(StatusMetrics::list(), include_str!("metrics.txt"));
    }

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
