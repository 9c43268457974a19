//! What the actors count.
//!
//! Owns: the metric families, under the kubelet's names where it has one. In: increments from actors
//! and services. Out: a [`Registry`] for whoever encodes it. Labels are closed sets or bounded: no
//! image name and nothing a caller sends becomes a label.

use std::{sync::atomic::AtomicU64, time::Duration};

use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family, gauge::Gauge, histogram::Histogram},
    registry::{Registry, Unit},
};

/// Label of the kubelet's `runtime_operations` metrics.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct Operation {
    /// A CRI method in snake case, such as `pull_image`; `other` for methods this build does not name.
    pub operation_type: &'static str,
}

/// Label of the kubelet's `image_pull_duration_seconds`.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct SizeClass {
    /// For example `10MB-100MB`; `N/A` where the size is not known.
    pub image_size_in_bytes: &'static str,
}

/// How pulls end.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct PullResult {
    /// `succeeded`, `failed`, `refused`, `timed_out`, `cancelled`.
    pub result: &'static str,
    /// In CamelCase, for example `Pulled`, `NotFound`, `TooManyPullingInParallel`.
    pub reason: &'static str,
}

/// Why something was counted, in CamelCase.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct Reason {
    /// A closed set of words.
    pub reason: &'static str,
}

/// What became of an Event on a pod.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct EventResult {
    /// `sent`, `failed`, `dropped`.
    pub result: &'static str,
}

/// Why a pull was passed to the runtime without a decision.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct PassReason {
    /// `no_decision`: the coordinator did not acknowledge the request in time; `coordinator_failed`: it failed on the
    /// request again and again; `coordinator_disabled`: it does not run any more.
    pub reason: &'static str,
}

impl PassReason {
    /// See [`PassReason::reason`].
    pub const NO_DECISION: Self = Self { reason: "no_decision" };
    /// See [`PassReason::reason`].
    pub const COORDINATOR_FAILED: Self = Self { reason: "coordinator_failed" };
    /// See [`PassReason::reason`].
    pub const COORDINATOR_DISABLED: Self = Self { reason: "coordinator_disabled" };
    const ALL: [Self; 3] = [Self::NO_DECISION, Self::COORDINATOR_FAILED, Self::COORDINATOR_DISABLED];
}

/// How taking over from a stopping agent ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct HandoverResult {
    /// `taken_over`; `other_version`: the other agent speaks another version of the protocol, so its end was waited for;
    /// `failed`: it did not answer, or not in time.
    pub result: &'static str,
}

impl HandoverResult {
    /// See [`HandoverResult::result`].
    pub const TAKEN_OVER: Self = Self { result: "taken_over" };
    /// See [`HandoverResult::result`].
    pub const OTHER_VERSION: Self = Self { result: "other_version" };
    /// See [`HandoverResult::result`].
    pub const FAILED: Self = Self { result: "failed" };
    const ALL: [Self; 3] = [Self::TAKEN_OVER, Self::OTHER_VERSION, Self::FAILED];
}

/// Why the bytes of an unfinished pull were released.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct ReleaseLabel {
    /// A closed set of words, such as `expired`.
    pub reason: &'static str,
}

/// A failed call on an API that only containerd has.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct ApiFailure {
    /// `leases` or `content`.
    pub api: &'static str,
    /// The gRPC code, such as `PermissionDenied`.
    pub code: &'static str,
}

type FloatGauge = Gauge<f64, AtomicU64>;

/// Every family. Cheap to clone: the values are shared.
#[derive(Debug, Clone)]
pub struct Metrics {
    /// The kubelet's `kubelet_image_pull_duration_seconds`: waiting included.
    pub pull_duration: Family<SizeClass, Histogram, fn() -> Histogram>,
    /// `kubelet_runtime_operations_total`.
    pub operations: Family<Operation, Counter>,
    /// `kubelet_runtime_operations_errors_total`.
    pub operation_errors: Family<Operation, Counter>,
    /// `kubelet_runtime_operations_duration_seconds`.
    pub operation_duration: Family<Operation, Histogram, fn() -> Histogram>,
    /// Pulls by result and reason.
    pub pulls: Family<PullResult, Counter>,
    /// Requests that joined a pull that was there already, by the state of that pull.
    pub deduplicated: Family<Reason, Counter>,
    /// Pulls that are tried again, by why.
    pub retried: Family<Reason, Counter>,
    /// Time between a pull's first request and its start.
    pub wait: Histogram,
    /// Time from the start of a pull to its end, excluding the queue.
    pub running_time: Histogram,
    /// Events on pods.
    pub pod_events: Family<EventResult, Counter>,
    /// Pulls under the limit.
    pub in_flight: Gauge,
    /// Pulls of present images beside it.
    pub in_flight_present: Gauge,
    /// Pulls that wait for a slot.
    pub queue_depth: Gauge,
    /// Places kept for callers with credentials after a restart.
    pub held: Gauge,
    /// Callers that wait for an answer.
    pub callers: Gauge,
    /// The limit in force; 0: none.
    pub limit: Gauge,
    /// Unfinished pulls whose bytes are retained.
    pub retained: Gauge,
    /// Those bytes, as far as they are measured.
    pub retained_bytes: Gauge,
    /// Unfinished pulls whose bytes were released, by reason.
    pub released: Family<ReleaseLabel, Counter>,
    /// Wait of the pull at the head of the queue.
    pub oldest_wait: FloatGauge,
    /// Requests that the agent answered itself, by why.
    pub refused: Family<Reason, Counter>,
    /// Pulls lost with their runtime and asked again.
    pub lost: Counter,
    /// Pulls passed to the runtime without a decision, by reason.
    pub passed_through: Family<PassReason, Counter>,
    /// Starts of this process beside a stopping agent.
    pub handovers: Family<HandoverResult, Counter>,
    /// 1 from a pull that was passed through until the coordinator answers again.
    pub passing_through: Gauge,
    /// Pulls taken over from the journal at start.
    pub resumed: Counter,
    /// 1 while the runtime serves.
    pub runtime_up: Gauge,
    /// Failed calls on the runtime's lease and content APIs.
    pub runtime_api_errors: Family<ApiFailure, Counter>,
    /// Writes to the store that failed.
    pub store_errors: Counter,
    /// 1 while the journal on disk is complete.
    pub store_durable: Gauge,
    /// 1 while the store is open.
    pub store_open: Gauge,
}

fn pull_buckets() -> Histogram {
    Histogram::new([
        1.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 180.0, 240.0, 300.0, 360.0, 480.0, 600.0, 900.0, 1200.0,
        1800.0, 2700.0, 3600.0,
    ])
}

fn operation_buckets() -> Histogram {
    // The kubelet's: 5 ms, 14 buckets, each 2.5 times the last.
    Histogram::new(prometheus_client::metrics::histogram::exponential_buckets(0.005, 2.5, 14))
}

impl Default for Metrics {
    fn default() -> Self {
        Self {
            pull_duration: Family::new_with_constructor(pull_buckets),
            operations: Family::default(),
            operation_errors: Family::default(),
            operation_duration: Family::new_with_constructor(operation_buckets),
            pulls: Family::default(),
            deduplicated: Family::default(),
            retried: Family::default(),
            wait: pull_buckets(),
            running_time: pull_buckets(),
            pod_events: Family::default(),
            in_flight: Gauge::default(),
            in_flight_present: Gauge::default(),
            queue_depth: Gauge::default(),
            held: Gauge::default(),
            callers: Gauge::default(),
            limit: Gauge::default(),
            retained: Gauge::default(),
            retained_bytes: Gauge::default(),
            released: Family::default(),
            oldest_wait: FloatGauge::default(),
            refused: Family::default(),
            lost: Counter::default(),
            passed_through: Family::default(),
            handovers: {
                let handovers = Family::<HandoverResult, Counter>::default();
                for result in HandoverResult::ALL {
                    drop(handovers.get_or_create(&result));
                }
                handovers
            },
            passing_through: Gauge::default(),
            resumed: Counter::default(),
            runtime_up: Gauge::default(),
            runtime_api_errors: Family::default(),
            store_errors: Counter::default(),
            store_durable: {
                let durable = Gauge::default();
                durable.set(1);
                durable
            },
            store_open: Gauge::default(),
        }
    }
}

impl Metrics {
    /// Enters every family into `registry`.
    pub fn register(&self, registry: &mut Registry) {
        self.register_kubelet(registry.sub_registry_with_prefix("kubelet"));
        self.register_pulls(registry.sub_registry_with_prefix("keelson_image_pull"));
        let own = registry.sub_registry_with_prefix("keelson");
        own.register("image_pulls", "Finished image pulls, by result and reason", self.pulls.clone());
        own.register(
            "image_pulls_in_flight",
            "Running image pulls that count towards the limit",
            self.in_flight.clone(),
        );
        own.register(
            "image_pulls_in_flight_present",
            "Running pulls of present images, which do not count towards the limit",
            self.in_flight_present.clone(),
        );
        own.register(
            "image_pulls_passed_through",
            "Image pulls passed through to the runtime without admission or limit, by reason",
            self.passed_through.clone(),
        );
        own.register(
            "image_pulls_passing_through",
            "1 while image pulls are passed through to the runtime without admission",
            self.passing_through.clone(),
        );
        own.register("image_pulls_resumed", "Image pulls restored from the journal", self.resumed.clone());
        own.register(
            "runtime_api_errors",
            "Failed calls on the lease and content APIs of the container runtime, by gRPC code",
            self.runtime_api_errors.clone(),
        );
        own.register("runtime_up", "1 while the container runtime is up", self.runtime_up.clone());
        own.register("store_write_errors", "Failed writes of the state store", self.store_errors.clone());
        own.register("handovers", "Takeovers from a stopping agent, by result", self.handovers.clone());
        own.register("store_durable", "1 while the journal on disk is complete", self.store_durable.clone());
        own.register("store_open", "1 while the state store is open", self.store_open.clone());
    }

    fn register_kubelet(&self, kubelet: &mut Registry) {
        kubelet.register_with_unit(
            "image_pull_duration",
            "Duration of image pulls including waiting, by image size",
            Unit::Seconds,
            self.pull_duration.clone(),
        );
        kubelet.register("runtime_operations", "CRI calls, by type", self.operations.clone());
        kubelet.register(
            "runtime_operations_errors",
            "Failed CRI calls, by type",
            self.operation_errors.clone(),
        );
        kubelet.register_with_unit(
            "runtime_operations_duration",
            "Duration of CRI calls, by type",
            Unit::Seconds,
            self.operation_duration.clone(),
        );
    }

    fn register_pulls(&self, pull: &mut Registry) {
        pull.register("queue_depth", "Queued image pulls", self.queue_depth.clone());
        pull.register(
            "held",
            "Queue places held after a restart for callers with credentials",
            self.held.clone(),
        );
        pull.register("callers", "Callers that wait for an image pull", self.callers.clone());
        pull.register("limit", "Limit on image pulls in flight (0: no limit)", self.limit.clone());
        pull.register("retained", "Unfinished image pulls whose content is retained", self.retained.clone());
        pull.register_with_unit(
            "retained",
            "Size of the content retained of unfinished image pulls",
            Unit::Bytes,
            self.retained_bytes.clone(),
        );
        pull.register(
            "content_released",
            "Unfinished image pulls with released content, by reason",
            self.released.clone(),
        );
        pull.register_with_unit(
            "oldest_wait",
            "Wait time of the first pull in the queue",
            Unit::Seconds,
            self.oldest_wait.clone(),
        );
        pull.register_with_unit(
            "wait",
            "Time from the first request of a pull to its start",
            Unit::Seconds,
            self.wait.clone(),
        );
        pull.register_with_unit(
            "running",
            "Time from the start of a pull to its end, excluding the queue",
            Unit::Seconds,
            self.running_time.clone(),
        );
        pull.register(
            "deduplicated",
            "Requests that joined an existing pull, by its state",
            self.deduplicated.clone(),
        );
        pull.register("refused", "Requests rejected by the agent, by reason", self.refused.clone());
        pull.register("retried", "Retries of image pulls by the agent, by reason", self.retried.clone());
        pull.register(
            "pod_events",
            "Events created for pods that wait for an image pull",
            self.pod_events.clone(),
        );
        pull.register("lost", "Image pulls interrupted by a runtime outage and retried", self.lost.clone());
    }

    /// Counts one CRI call.
    pub fn operation(&self, operation_type: &'static str, took: Duration, failed: bool) {
        let label = Operation { operation_type };
        self.operations.get_or_create(&label).inc();
        if failed {
            self.operation_errors.get_or_create(&label).inc();
        }
        self.operation_duration.get_or_create(&label).observe(took.as_secs_f64());
    }

    /// Image pulls that were passed to the runtime without a decision, for any reason.
    #[must_use]
    pub fn passed_through_total(&self) -> u64 {
        PassReason::ALL.iter().map(|reason| self.passed_through.get_or_create(reason).get()).sum()
    }

    /// Counts one pull, as the kubelet does: `bytes` is the image's size, if known.
    pub fn pulled(&self, took: Duration, bytes: Option<u64>) {
        let label = SizeClass { image_size_in_bytes: size_class(bytes) };
        self.pull_duration.get_or_create(&label).observe(took.as_secs_f64());
    }
}

/// The kubelet's size classes.
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
