//! What the LeaseRenewer counts.
//!
//! Owns: the metric families of the Lease; the kubelet has none. In: increments from the actor. Out: a
//! [`Registry`] for whoever encodes it. Labels are closed sets.

use std::sync::{
    Arc,
    atomic::{AtomicI64, AtomicU64, Ordering},
};

use keelson_actor_system::clock::Now;
use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family, gauge::Gauge},
    registry::{Registry, Unit},
};

/// How a request for the Lease ended.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct RenewalResult {
    /// `renewed`, `created`, or the kind of the error as [`keelson_actor_system::cluster::ApiErrorKind::name`] has it.
    pub result: &'static str,
}

/// Which way the wall clock stepped.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct ClockStep {
    /// `forward`, `back`.
    pub direction: &'static str,
}

/// Every family. Cheap to clone: the values are shared.
#[derive(Debug, Clone, Default)]
pub struct LeaseMetrics {
    /// Requests for the Lease that renewed it, made it or failed.
    pub renewals: Family<RenewalResult, Counter>,
    /// See [`LeaseMetrics::now_gauges`].
    pub age: Gauge<f64, AtomicU64>,
    /// `spec.leaseTransitions` as last confirmed.
    pub transitions: Gauge,
    /// How often the agent took the Lease over from another holder.
    pub takeovers: Counter,
    /// Renewals of the Lease by another process, as far as they were seen.
    pub foreign_renewals: Counter,
    /// 1 while another process renews the Lease too.
    pub contested: Gauge,
    /// 1 while the agent leaves the Lease to another process.
    pub standing_back: Gauge,
    /// Failed requests since the last renewal.
    pub failures: Gauge,
    /// Steps of the wall clock.
    pub clock_steps: Family<ClockStep, Counter>,
    /// Monotonic milliseconds of the last renewal.
    renewed_ms: Arc<AtomicI64>,
}

impl LeaseMetrics {
    /// Enters every family into `registry`.
    pub fn register(&self, registry: &mut Registry) {
        let own = registry.sub_registry_with_prefix("keelson_lease");
        own.register("renewals", "Requests for the node's Lease, by result", self.renewals.clone());
        own.register_with_unit(
            "age",
            "Time since the last successful renewal, or since the start before the first one",
            Unit::Seconds,
            self.age.clone(),
        );
        own.register("transitions", "leaseTransitions of the Lease", self.transitions.clone());
        own.register("takeovers", "Takeovers of the Lease from another holder", self.takeovers.clone());
        own.register(
            "foreign_renewals",
            "Observed renewals of the Lease by another process",
            self.foreign_renewals.clone(),
        );
        own.register("contested", "1 while another process renews the Lease", self.contested.clone());
        own.register(
            "standing_back",
            "1 while the agent stands back and another process reports Lease and node status",
            self.standing_back.clone(),
        );
        own.register("consecutive_failures", "Failed requests since the last renewal", self.failures.clone());
        own.register("clock_steps", "Steps of the wall clock, by direction", self.clock_steps.clone());
    }

    /// Brings the gauge that grows with time up to date, before it is read. `now` is of the actor's clock. Needs no
    /// message to the actor, so that the age of a Lease whose renewer is stuck is seen too.
    pub fn now_gauges(&self, now: Now) {
        let mono_ms = i64::try_from(now.mono.as_millis()).unwrap_or(i64::MAX);
        let age = mono_ms.saturating_sub(self.renewed_ms.load(Ordering::Relaxed)).max(0);
        self.age.set(std::time::Duration::from_millis(age.unsigned_abs()).as_secs_f64());
    }

    /// How many renewals there were, that which made the Lease included.
    #[must_use]
    pub fn renewals(&self) -> u64 {
        let count = |result| self.renewals.get(&RenewalResult { result }).map_or(0, |counter| counter.get());
        count("renewed") + count("created")
    }

    /// Notes a renewal at this monotonic time in milliseconds; negative: before the clock began.
    pub(super) fn renewed(&self, mono_ms: i64) {
        self.renewed_ms.store(mono_ms, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn names_and_the_age_are_as_documented() {
        let metrics = LeaseMetrics::default();
        metrics.renewals.get_or_create(&RenewalResult { result: "renewed" }).inc();
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
}
