//! What the EndpointPublisher counts.
//!
//! Owns: the metric families of the endpoints chore. In: increments from the actor. Out: a [`Registry`] for whoever
//! encodes it. Labels are closed sets.

use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{
        counter::Counter,
        family::Family,
        gauge::Gauge,
        histogram::{Histogram, exponential_buckets},
    },
    registry::{Registry, Unit},
};

/// Which kind of objects.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct Resource {
    /// As [`super::SourceKind::resource`] has it.
    pub resource: &'static str,
}

/// Every family. Cheap to clone: the values are shared.
#[derive(Debug, Clone)]
pub struct EndpointMetrics {
    /// Revisions published.
    pub revisions: Counter,
    /// What sources told, objects and deletions one by one.
    pub events: Family<Resource, Counter>,
    /// Objects kept.
    pub objects: Family<Resource, Gauge>,
    /// 1 if the resource is synced.
    pub synced: Family<Resource, Gauge>,
    /// Services worked out, whether or not something came of it.
    pub worked_out: Counter,
    /// Services served to clients.
    pub services: Gauge,
    /// Endpoints of those Services.
    pub endpoints: Gauge,
    /// Revision served to clients (0: none).
    pub rev: Gauge,
    /// Whether what readers see may be old, or is nothing.
    pub stale: Gauge,
    /// Whether the sources are asked: somebody follows, or they are always asked.
    pub watched: Gauge,
    /// Whether what readers see is on disk.
    pub durable: Gauge,
    /// Writes that failed.
    pub persist_failures: Counter,
    /// How long a write took.
    pub persist_duration: Histogram,
    /// How long after the oldest change that led to it a revision was published.
    pub publish_delay: Histogram,
}

impl Default for EndpointMetrics {
    fn default() -> Self {
        Self {
            revisions: Counter::default(),
            events: Family::default(),
            objects: Family::default(),
            synced: Family::default(),
            worked_out: Counter::default(),
            services: Gauge::default(),
            endpoints: Gauge::default(),
            rev: Gauge::default(),
            stale: Gauge::default(),
            watched: Gauge::default(),
            durable: Gauge::default(),
            persist_failures: Counter::default(),
            persist_duration: Histogram::new(exponential_buckets(0.0001, 2.0, 16)),
            publish_delay: Histogram::new(exponential_buckets(0.001, 2.0, 18)),
        }
    }
}

impl EndpointMetrics {
    /// Enters every family into `registry`.
    pub fn register(&self, registry: &mut Registry) {
        let own = registry.sub_registry_with_prefix("keelson_endpoints");
        own.register("revisions", "Revisions published", self.revisions.clone());
        own.register("source_events", "Objects and deletions received from sources", self.events.clone());
        own.register(
            "source_objects",
            "Objects received from sources and held in memory",
            self.objects.clone(),
        );
        own.register("source_synced", "1 if the resource is synced", self.synced.clone());
        own.register(
            "services_worked_out",
            "Services computed, whether or not the result changed",
            self.worked_out.clone(),
        );
        own.register("services", "Services served to clients", self.services.clone());
        own.register("endpoints", "Endpoints of the Services served to clients", self.endpoints.clone());
        own.register("rev", "Revision served to clients (0: none)", self.rev.clone());
        own.register("stale", "1 while the served state is stale or there is no state", self.stale.clone());
        own.register(
            "watched",
            "1 while Services are watched; 0 before the first client connects (endpoints.watch)",
            self.watched.clone(),
        );
        own.register("durable", "1 while the served state is on disk", self.durable.clone());
        own.register("persist_failures", "Failed writes of the state", self.persist_failures.clone());
        own.register_with_unit(
            "persist_duration",
            "Duration of writes of the state",
            Unit::Seconds,
            self.persist_duration.clone(),
        );
        own.register_with_unit(
            "publish_delay",
            "Time from the oldest change in a revision, by the last-change-trigger-time of its \
             EndpointSlice, until the revision was published",
            Unit::Seconds,
            self.publish_delay.clone(),
        );
    }

    /// What sources told since the start.
    #[must_use]
    pub fn events(&self) -> u64 {
        let of = |kind: super::SourceKind| {
            let label = Resource { resource: kind.resource() };
            self.events.get(&label).map_or(0, |counter| counter.get())
        };
        super::SourceKind::ALL.into_iter().map(of).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_as_documented() {
        let metrics = EndpointMetrics::default();
        for resource in ["services", "nodes"] {
            metrics.events.get_or_create(&Resource { resource }).inc_by(2);
        }
        metrics.objects.get_or_create(&Resource { resource: "services" }).set(3);
        metrics.synced.get_or_create(&Resource { resource: "services" }).set(1);
        metrics.persist_duration.observe(0.001);
        metrics.publish_delay.observe(0.1);
        assert_eq!(metrics.events(), 4);
        let mut registry = Registry::default();
        metrics.register(&mut registry);
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry).expect("encodes");
        for line in [
            "keelson_endpoints_revisions_total 0",
            "keelson_endpoints_source_events_total{resource=\"services\"} 2",
            "keelson_endpoints_source_objects{resource=\"services\"} 3",
            "keelson_endpoints_source_synced{resource=\"services\"} 1",
            "keelson_endpoints_services_worked_out_total 0",
            "keelson_endpoints_services 0",
            "keelson_endpoints_endpoints 0",
            "keelson_endpoints_rev 0",
            "keelson_endpoints_stale 0",
            "keelson_endpoints_watched 0",
            "keelson_endpoints_durable 0",
            "keelson_endpoints_persist_failures_total 0",
            "keelson_endpoints_persist_duration_seconds_count 1",
            "keelson_endpoints_publish_delay_seconds_count 1",
        ] {
            assert!(text.lines().any(|have| have == line), "{line} in\n{text}");
        }
    }
}
