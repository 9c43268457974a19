//! Metrics of the LeaseRenewer; the kubelet has none. Labels are closed sets.

use std::sync::{
    Arc,
    atomic::{AtomicI64, Ordering},
};

use keelson_actor_system::clock::Now;
use keelson_metrics::{FloatGauge, ResultLabel, families};
use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family, gauge::Gauge},
};

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct ClockStep {
    /// `forward`, `back`.
    pub direction: &'static str,
}

families! {
    /// Clones share their values. Label `result`: `renewed`, `created`, or the kind of the error as
    /// [`keelson_actor_system::cluster::ApiErrorKind::name`] has it. `renewed_ms` is the monotonic time of the last
    /// renewal.
    #[derive(Debug, Clone)]
    pub struct LeaseMetrics;
    pub fn register;
    "keelson_lease" {
        pub renewals: Family<ResultLabel, Counter>, "renewals", "Requests for the node's Lease, by result";
        pub age: FloatGauge, "age" Seconds, "Time since the last successful renewal, or since the start before the first one";
        pub transitions: Gauge, "transitions", "leaseTransitions of the Lease";
        pub takeovers: Counter, "takeovers", "Takeovers of the Lease from another holder";
        pub foreign_renewals: Counter, "foreign_renewals", "Observed renewals of the Lease by another process";
        pub contested: Gauge, "contested", "1 while another process renews the Lease";
        pub standing_back: Gauge, "standing_back", "1 while the agent stands back and another process reports Lease and node status";
        pub failures: Gauge, "consecutive_failures", "Failed requests since the last renewal";
        pub clock_steps: Family<ClockStep, Counter>, "clock_steps", "Steps of the wall clock, by direction";
    }
    with { renewed_ms: Arc<AtomicI64>, }
}

impl LeaseMetrics {
    /// Updates the gauge that grows with time, before it is read. `now` is of the actor's clock. Sends no message to
    /// the actor, so that the age is correct even if the renewer hangs.
    pub fn now_gauges(&self, now: Now) {
        let mono_ms = i64::try_from(now.mono.as_millis()).unwrap_or(i64::MAX);
        let age = mono_ms.saturating_sub(self.renewed_ms.load(Ordering::Relaxed)).max(0);
        self.age.set(std::time::Duration::from_millis(age.unsigned_abs()).as_secs_f64());
    }

    /// Successful renewals, including the creation of the Lease.
    #[must_use]
    pub fn renewals(&self) -> u64 {
        let count = |result| self.renewals.get(&ResultLabel { result }).map_or(0, |counter| counter.get());
        count("renewed") + count("created")
    }

    /// Records a renewal at this monotonic time in milliseconds; negative: before the clock began.
    pub(super) fn renewed(&self, mono_ms: i64) {
        self.renewed_ms.store(mono_ms, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use prometheus_client::registry::Registry;

    use super::*;

    #[test]
    fn names_and_the_age_are_as_documented() {
        let metrics = LeaseMetrics::default();
        metrics.renewals.get_or_create(&ResultLabel { result: "renewed" }).inc();
        metrics.clock_steps.get_or_create(&ClockStep { direction: "back" }).inc();
        metrics.now_gauges(Now { mono: Duration::from_secs(7), unix_ms: 0 });
        assert!((metrics.age.get() - 7.0).abs() < 1e-9, "since the start");
        metrics.renewed(20_000);
        metrics.now_gauges(Now { mono: Duration::from_millis(32_500), unix_ms: 0 });
        let mut registry = Registry::default();
        metrics.register(&mut registry);
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry).expect("encodes");
        for line in [
            "keelson_lease_renewals_total{result=\"renewed\"} 1",
            "keelson_lease_age_seconds 12.5",
            "keelson_lease_transitions 0",
            "keelson_lease_takeovers_total 0",
            "keelson_lease_foreign_renewals_total 0",
            "keelson_lease_contested 0",
            "keelson_lease_standing_back 0",
            "keelson_lease_consecutive_failures 0",
            "keelson_lease_clock_steps_total{direction=\"back\"} 1",
        ] {
            assert!(text.lines().any(|have| have == line), "{line} in\n{text}");
        }
    }

    #[test]
    fn names_types_and_help_are_an_interface() {
        assert_eq!(LeaseMetrics::list(), include_str!("metrics.txt"));
    }
}
