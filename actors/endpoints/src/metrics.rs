//! Metrics of the EndpointPublisher. Labels are closed sets.

use keelson_metrics::families;
use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{
        counter::Counter,
        family::Family,
        gauge::Gauge,
        histogram::{Histogram, exponential_buckets},
    },
};

/// As returned by [`super::SourceKind::resource`].
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct Resource {
    pub resource: &'static str,
}

families! {
    /// Clones share their values.
    #[derive(Debug, Clone)]
    pub struct EndpointMetrics;
    pub fn register;
    "keelson_endpoints" {
        pub revisions: Counter, "revisions", "Revisions published";
        pub events: Family<Resource, Counter>, "source_events", "Objects and deletions received from sources";
        pub objects: Family<Resource, Gauge>, "source_objects", "Objects received from sources and held in memory";
        pub synced: Family<Resource, Gauge>, "source_synced", "1 if the resource is synced";
        pub computed: Counter, "services_computed", "Services computed, whether or not the result changed";
        pub services: Gauge, "services", "Services served to clients";
        pub endpoints: Gauge, "endpoints", "Endpoints of the Services served to clients";
        pub rev: Gauge, "rev", "Revision served to clients (0: none)";
        pub stale: Gauge, "stale", "1 while the served state is stale or there is no state";
        pub watched: Gauge, "watched", "1 while Services are watched; 0 before the first client connects (endpoints.watch)";
        pub durable: Gauge, "durable", "1 while the served state is on disk";
        pub persist_failures: Counter, "persist_failures", "Failed writes of the state";
        pub persist_duration: Histogram = Histogram::new(exponential_buckets(0.0001, 2.0, 16)), "persist_duration" Seconds, "Duration of writes of the state";
        pub publish_delay: Histogram = Histogram::new(exponential_buckets(0.001, 2.0, 18)), "publish_delay" Seconds, "Time from the oldest change in a revision, by the last-change-trigger-time of its EndpointSlice, until the revision was published";
    }
}

impl EndpointMetrics {
    /// Number of objects and deletions received from all sources.
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
    use prometheus_client::registry::Registry;

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
            "keelson_endpoints_services_computed_total 0",
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

    #[test]
    fn names_types_and_help_are_an_interface() {
        assert_eq!(EndpointMetrics::list(), include_str!("metrics.txt"));
    }
}
