//! Metrics of requests to the API server.
//!
//! Owns: client-go's metrics `rest_client_requests_total` and `rest_client_request_duration_seconds`, so that the
//! monitoring of kubelets also works for the agent. In: each request. Out: two families.

use keelson_kube::{RequestObserver, RequestSeen};
use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family, histogram::Histogram},
    registry::{Registry, Unit},
};

/// Hosts come from the settings and codes from the server, so both are bounded.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Request {
    code: String,
    method: &'static str,
    host: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Verb {
    verb: &'static str,
    host: String,
}

/// Cheap to clone: the values are shared.
#[derive(Debug, Clone)]
pub(super) struct RestClientMetrics {
    requests: Family<Request, Counter>,
    duration: Family<Verb, Histogram, fn() -> Histogram>,
}

fn buckets() -> Histogram {
    Histogram::new([0.005, 0.025, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0])
}

impl Default for RestClientMetrics {
    fn default() -> Self {
        Self { requests: Family::default(), duration: Family::new_with_constructor(buckets) }
    }
}

impl RestClientMetrics {
    pub(super) fn register(&self, registry: &mut Registry) {
        let client = registry.sub_registry_with_prefix("rest_client");
        client.register(
            "requests",
            "Requests to the API server, by code, method and host",
            self.requests.clone(),
        );
        client.register_with_unit(
            "request_duration",
            "Duration of requests to the API server, by method and host",
            Unit::Seconds,
            self.duration.clone(),
        );
    }

    pub(super) fn observer(&self) -> RequestObserver {
        let metrics = self.clone();
        RequestObserver::new(move |seen| metrics.count(seen))
    }

    fn count(&self, seen: &RequestSeen) {
        let request = Request { code: seen.code(), method: seen.method, host: seen.host.clone() };
        self.requests.get_or_create(&request).inc();
        let verb = Verb { verb: seen.method, host: seen.host.clone() };
        self.duration.get_or_create(&verb).observe(seen.duration.as_secs_f64());
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn names_are_those_of_client_go() {
        let metrics = RestClientMetrics::default();
        let seen = RequestSeen {
            method: "PATCH",
            resource: "leases",
            status: Some(200),
            error: None,
            duration: Duration::from_millis(3),
            host: "10.0.0.1:6443".into(),
        };
        metrics.count(&seen);
        metrics.count(&RequestSeen { status: None, ..seen });
        let mut registry = Registry::default();
        metrics.register(&mut registry);
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry).expect("encodes");
        for line in [
            "rest_client_requests_total{code=\"200\",method=\"PATCH\",host=\"10.0.0.1:6443\"} 1",
            "rest_client_requests_total{code=\"<error>\",method=\"PATCH\",host=\"10.0.0.1:6443\"} 1",
            "rest_client_request_duration_seconds_count{verb=\"PATCH\",host=\"10.0.0.1:6443\"} 2",
        ] {
            assert!(text.lines().any(|have| have == line), "{line} in\n{text}");
        }
    }
}
