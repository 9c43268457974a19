//! Metrics of image pulls and CRI calls.
//!
//! Kubelet names if the kubelet has the metric. Labels are closed sets: no image name and no value from a caller
//! becomes a label.

use std::time::Duration;

use keelson_metrics::{FloatGauge, HistogramFamily, families};
pub use keelson_metrics::{ReasonLabel, ResultLabel};
use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family, gauge::Gauge, histogram::Histogram},
};

/// Label of the kubelet's `runtime_operations` metrics.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct Operation {
    /// A CRI method in snake case, such as `pull_image`; `other` for methods unknown to this build.
    pub operation_type: &'static str,
}

/// Label of the kubelet's `image_pull_duration_seconds`.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct SizeClass {
    /// For example `10MB-100MB`; `N/A` if the size is unknown.
    pub image_size_in_bytes: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct PullResult {
    /// `succeeded`, `failed`, `refused`, `timed_out`, `cancelled`.
    pub result: &'static str,
    /// In CamelCase, for example `Pulled`, `NotFound`, `TooManyPullingInParallel`.
    pub reason: &'static str,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct PassReason {
    pub reason: &'static str,
}

impl PassReason {
    /// The coordinator did not acknowledge the request in time.
    pub const NO_DECISION: Self = Self { reason: "no_decision" };
    /// The coordinator failed on the request repeatedly.
    pub const COORDINATOR_FAILED: Self = Self { reason: "coordinator_failed" };
    /// The coordinator does not run.
    pub const COORDINATOR_DISABLED: Self = Self { reason: "coordinator_disabled" };
    const ALL: [Self; 3] = [Self::NO_DECISION, Self::COORDINATOR_FAILED, Self::COORDINATOR_DISABLED];
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct HandoverResult {
    pub result: &'static str,
}

impl HandoverResult {
    pub const TAKEN_OVER: Self = Self { result: "taken_over" };
    /// The other agent uses another version of the protocol, so this one waited for it to stop.
    pub const OTHER_VERSION: Self = Self { result: "other_version" };
    /// The other agent did not answer, or not in time.
    pub const FAILED: Self = Self { result: "failed" };
    const ALL: [Self; 3] = [Self::TAKEN_OVER, Self::OTHER_VERSION, Self::FAILED];
}

/// A failed call on a containerd API that is not part of CRI.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct ApiFailure {
    /// `leases` or `content`.
    pub api: &'static str,
    /// The gRPC code, such as `PermissionDenied`.
    pub code: &'static str,
}

fn pull_buckets() -> Histogram {
    Histogram::new([
        1.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 180.0, 240.0, 300.0, 360.0, 480.0, 600.0, 900.0, 1200.0,
        1800.0, 2700.0, 3600.0,
    ])
}

fn operation_buckets() -> Histogram {
    // The kubelet's: 5 ms, 14 buckets, each 2.5 times the previous one.
    Histogram::new(prometheus_client::metrics::histogram::exponential_buckets(0.005, 2.5, 14))
}

/// All results are exported from the start.
fn handovers() -> Family<HandoverResult, Counter> {
    let handovers = Family::default();
    for result in HandoverResult::ALL {
        drop(handovers.get_or_create(&result));
    }
    handovers
}

/// 1 until a write fails.
fn durable() -> Gauge {
    let durable = Gauge::default();
    durable.set(1);
    durable
}

families! {
    /// Clones share their values.
    #[derive(Debug, Clone)]
    pub struct Metrics;
    pub fn register;
    "kubelet" {
        pub pull_duration: HistogramFamily<SizeClass> = Family::new_with_constructor(pull_buckets), "image_pull_duration" Seconds, "Duration of image pulls including waiting, by image size";
        pub operations: Family<Operation, Counter>, "runtime_operations", "CRI calls, by type";
        pub operation_errors: Family<Operation, Counter>, "runtime_operations_errors", "Failed CRI calls, by type";
        pub operation_duration: HistogramFamily<Operation> = Family::new_with_constructor(operation_buckets), "runtime_operations_duration" Seconds, "Duration of CRI calls, by type";
    }
    "keelson_image_pull" {
        pub queue_depth: Gauge, "queue_depth", "Queued image pulls";
        pub held: Gauge, "held", "Queue places held after a restart for callers with credentials";
        pub callers: Gauge, "callers", "Callers that wait for an image pull";
        pub limit: Gauge, "limit", "Limit on image pulls in flight (0: no limit)";
        pub retained: Gauge, "retained", "Unfinished image pulls whose content is retained";
        pub retained_bytes: Gauge, "retained" Bytes, "Size of the content retained of unfinished image pulls";
        pub released: Family<ReasonLabel, Counter>, "content_released", "Unfinished image pulls with released content, by reason";
        pub oldest_wait: FloatGauge, "oldest_wait" Seconds, "Wait time of the first pull in the queue";
        pub wait: Histogram = pull_buckets(), "wait" Seconds, "Time from the first request of a pull to its start";
        pub running_time: Histogram = pull_buckets(), "running" Seconds, "Time from the start of a pull to its end, excluding the queue";
        pub deduplicated: Family<ReasonLabel, Counter>, "deduplicated", "Requests that joined an existing pull, by its state";
        pub refused: Family<ReasonLabel, Counter>, "refused", "Requests rejected by the agent, by reason";
        pub retried: Family<ReasonLabel, Counter>, "retried", "Retries of image pulls by the agent, by reason";
        pub lost: Counter, "lost", "Image pulls interrupted by a runtime outage and retried";
    }
    "keelson" {
        pub pulls: Family<PullResult, Counter>, "image_pulls", "Finished image pulls, by result and reason";
        pub in_flight: Gauge, "image_pulls_in_flight", "Running image pulls that count towards the limit";
        pub in_flight_present: Gauge, "image_pulls_in_flight_present", "Running pulls of present images, which do not count towards the limit";
        pub passed_through: Family<PassReason, Counter>, "image_pulls_passed_through", "Image pulls passed through to the runtime without admission or limit, by reason";
        pub passing_through: Gauge, "image_pulls_passing_through", "1 while image pulls are passed through to the runtime without admission";
        pub resumed: Counter, "image_pulls_resumed", "Image pulls restored from the journal";
        pub runtime_api_errors: Family<ApiFailure, Counter>, "runtime_api_errors", "Failed calls on the lease and content APIs of the container runtime, by gRPC code";
        pub events: Family<ResultLabel, Counter>, "events", "Events on pods and on the Node, by result of the write";
        pub runtime_up: Gauge, "runtime_up", "1 while the container runtime is up";
        pub store_errors: Counter, "store_write_errors", "Failed writes of the state store";
        pub handovers: Family<HandoverResult, Counter> = handovers(), "handovers", "Takeovers from a stopping agent, by result";
        pub store_durable: Gauge = durable(), "store_durable", "1 while the journal on disk is complete";
        pub store_open: Gauge, "store_open", "1 while the state store is open";
    }
}

impl Metrics {
    pub fn operation(&self, operation_type: &'static str, took: Duration, failed: bool) {
        let label = Operation { operation_type };
        self.operations.get_or_create(&label).inc();
        if failed {
            self.operation_errors.get_or_create(&label).inc();
        }
        self.operation_duration.get_or_create(&label).observe(took.as_secs_f64());
    }

    #[must_use]
    pub fn passed_through_total(&self) -> u64 {
        PassReason::ALL.iter().map(|reason| self.passed_through.get_or_create(reason).get()).sum()
    }

    /// Counts one pull, as the kubelet does. `bytes`: size of the image, if known.
    pub fn pulled(&self, took: Duration, bytes: Option<u64>) {
        let label = SizeClass { image_size_in_bytes: size_class(bytes) };
        self.pull_duration.get_or_create(&label).observe(took.as_secs_f64());
    }
}

fn size_class(bytes: Option<u64>) -> &'static str {
    const MB: u64 = 1024 * 1024;
    const GB: u64 = 1024 * MB;
    const CLASSES: [(u64, &str); 11] = [
        (10 * MB, "0-10MB"),
        (100 * MB, "10MB-100MB"),
        (500 * MB, "100MB-500MB"),
        (GB, "500MB-1GB"),
        (5 * GB, "1GB-5GB"),
        (10 * GB, "5GB-10GB"),
        (20 * GB, "10GB-20GB"),
        (30 * GB, "20GB-30GB"),
        (40 * GB, "30GB-40GB"),
        (60 * GB, "40GB-60GB"),
        (100 * GB, "60GB-100GB"),
    ];
    match bytes {
        None | Some(0) => "N/A",
        Some(bytes) => CLASSES.iter().find(|(most, _)| bytes <= *most).map_or("GT100GB", |(_, name)| name),
    }
}

#[cfg(test)]
mod tests {
    use prometheus_client::registry::Registry;

    use super::*;

    #[test]
    fn sizes_fall_into_the_kubelets_classes() {
        for (bytes, class) in [
            (None, "N/A"),
            (Some(1), "0-10MB"),
            (Some(10 * 1024 * 1024 + 1), "10MB-100MB"),
            (Some(u64::MAX), "GT100GB"),
        ] {
            assert_eq!(size_class(bytes), class, "{bytes:?}");
        }
    }

    #[test]
    fn names_types_and_help_are_an_interface() {
        assert_eq!(Metrics::list(), include_str!("metrics.txt"));
    }

    #[test]
    fn names_are_the_kubelets() {
        let metrics = Metrics::default();
        metrics.operation("pull_image", Duration::from_millis(3), true);
        metrics.pulled(Duration::from_secs(2), Some(5));
        let mut registry = Registry::default();
        metrics.register(&mut registry);
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry).expect("encodes");
        for line in [
            "kubelet_runtime_operations_total{operation_type=\"pull_image\"} 1",
            "kubelet_runtime_operations_errors_total{operation_type=\"pull_image\"} 1",
            "kubelet_runtime_operations_duration_seconds_count{operation_type=\"pull_image\"} 1",
            "kubelet_image_pull_duration_seconds_count{image_size_in_bytes=\"0-10MB\"} 1",
            "keelson_image_pull_queue_depth 0",
            "keelson_image_pulls_in_flight 0",
        ] {
            assert!(text.lines().any(|have| have == line), "{line} in\n{text}");
        }
    }
}
