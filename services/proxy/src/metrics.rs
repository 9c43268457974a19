//! Metrics of the proxy.
//!
//! kube-proxy's names if it has the metric in its nftables mode, and `keelson_proxy_*` otherwise. [`NoLocalEndpoints`]
//! updates one of them with each change. Labels are families, policies and statuses: no name of an object becomes a
//! label.

mod no_local;

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use keelson_metrics::{FloatGauge, HistogramFamily, ProcessMetrics, families};
use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{
        counter::Counter,
        family::Family as Metric,
        gauge::Gauge,
        histogram::{Histogram, exponential_buckets, linear_buckets},
        info::Info,
    },
    registry::Registry,
};

pub(crate) use no_local::NoLocalEndpoints;

use crate::{backend::MapFill, model::Family};
use no_local::Policy;

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct FamilyLabel {
    /// `IPv4` or `IPv6`.
    pub(crate) ip_family: &'static str,
}

impl From<Family> for FamilyLabel {
    fn from(family: Family) -> Self {
        Self { ip_family: family.as_str() }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct PolicyLabel {
    /// `internal` or `external`.
    pub(crate) traffic_policy: &'static str,
    /// `IPv4` or `IPv6`.
    pub(crate) ip_family: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct CodeLabel {
    /// `200` or `503`.
    pub(crate) code: u16,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct TakeOverLabel {
    /// The name of a backend, or `kube-proxy`.
    from: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct AffinityLabel {
    ip_family: &'static str,
    map: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct MapLabel {
    map: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct DecisionLabel {
    decision: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct BuildLabel {
    version: &'static str,
    backend: &'static str,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SyncKind {
    /// Compares everything with the kernel.
    Full,
    /// Only what had changed.
    Partial,
}

/// kube-proxy's: 1 ms, 15 buckets, each twice the last.
fn sync_buckets() -> Histogram {
    Histogram::new(exponential_buckets(0.001, 2.0, 15))
}

/// kube-proxy's: 0, then 0.25 s to 5 min, finer near its service level objective.
fn programming_buckets() -> Histogram {
    let parts = [(0.25, 0.25, 2), (1.0, 1.0, 59), (60.0, 5.0, 12), (120.0, 30.0, 7)];
    let rest = parts.into_iter().flat_map(|(start, width, length)| linear_buckets(start, width, length));
    Histogram::new(std::iter::once(0.0).chain(rest))
}

/// 0 from the start, because alerts watch it.
fn zero_by_family() -> Metric<FamilyLabel, Counter> {
    let counters = Metric::default();
    for family in Family::ALL {
        drop(counters.get_or_create(&family.into()));
    }
    counters
}

/// 0 from the start, because alerts watch it.
fn zero_by_policy() -> Metric<PolicyLabel, Gauge> {
    let gauges = Metric::default();
    for family in Family::ALL {
        for policy in Policy::ALL {
            drop(gauges.get_or_create(&policy.label(family)));
        }
    }
    gauges
}

/// What histograms do not give back.
#[derive(Debug, Default)]
struct SyncActivity {
    syncs: AtomicU64,
    /// Since it was taken last; 0: there was no sync.
    longest_us: AtomicU64,
}

/// What the programs of eBPF had counted when they were asked last, by level and decision.
#[derive(Debug, Default)]
struct Totals(Mutex<HashMap<(&'static str, &'static str), u64>>);

impl Totals {
    /// The number since the last call: all of them if the maps were made again meanwhile, which shows if there are fewer.
    fn new_ones(&self, level: &'static str, decision: &'static str, total: u64) -> u64 {
        let mut totals = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let before = totals.insert((level, decision), total).unwrap_or(0);
        total.checked_sub(before).unwrap_or(total)
    }
}

/// For a sample of the history.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Activity {
    /// Syncs since the start, of both families.
    pub(crate) syncs: f64,
    /// The longest sync since the last call; `None`: there was none.
    pub(crate) longest_sync_us: Option<f64>,
    /// Changes of Services and endpoints received since the start.
    pub(crate) changes: f64,
}

families! {
    /// Clones share their values.
    #[derive(Debug, Clone)]
    pub(crate) struct ProxyMetrics;
    fn register_families;
    "kubeproxy" {
        sync_duration: HistogramFamily<FamilyLabel> = Metric::new_with_constructor(sync_buckets), "sync_proxy_rules_duration" Seconds, "Duration of syncs of the rules";
        full_sync_duration: HistogramFamily<FamilyLabel> = Metric::new_with_constructor(sync_buckets), "sync_full_proxy_rules_duration" Seconds, "Duration of full syncs, which compare the ruleset with the kernel";
        partial_sync_duration: HistogramFamily<FamilyLabel> = Metric::new_with_constructor(sync_buckets), "sync_partial_proxy_rules_duration" Seconds, "Duration of incremental syncs";
        network_programming: HistogramFamily<FamilyLabel> = Metric::new_with_constructor(programming_buckets), "network_programming_duration" Seconds, "Time from the change of a pod or Service, by the trigger time in its EndpointSlice, until it is programmed";
        last_synced: Metric<FamilyLabel, FloatGauge>, "sync_proxy_rules_last_timestamp" Seconds, "Unix time of the last successful sync of the rules";
        last_queued: Metric<FamilyLabel, FloatGauge>, "sync_proxy_rules_last_queued_timestamp" Seconds, "Unix time at which a sync of the rules was last queued";
        sync_failures: Metric<FamilyLabel, Counter> = zero_by_family(), "sync_proxy_rules_nftables_sync_failures", "Failed syncs of the rules";
        cleanup_failures: Metric<FamilyLabel, Counter> = zero_by_family(), "sync_proxy_rules_nftables_cleanup_failures", "Failed deletions of unused chains, sets and elements";
        no_local_endpoints: Metric<PolicyLabel, Gauge> = zero_by_policy(), "sync_proxy_rules_no_local_endpoints_total", "Service ports with traffic policy Local that have endpoints, but none on this node";
        endpoint_changes: Counter, "sync_proxy_rules_endpoint_changes", "Endpoint changes received";
        endpoint_changes_pending: Gauge, "sync_proxy_rules_endpoint_changes_pending", "Endpoint changes received and not programmed yet";
        service_changes: Counter, "sync_proxy_rules_service_changes", "Service changes received";
        service_changes_pending: Gauge, "sync_proxy_rules_service_changes_pending", "Service changes received and not programmed yet";
        healthz: Metric<CodeLabel, Counter>, "proxy_healthz", "Responses of /healthz, by status code";
        livez: Metric<CodeLabel, Counter>, "proxy_livez", "Responses of /livez, by status code";
        conntrack_duration: HistogramFamily<FamilyLabel> = Metric::new_with_constructor(sync_buckets), "conntrack_reconciler_sync_duration" Seconds, "Duration of searches for stale UDP flows";
        conntrack_deleted: Metric<FamilyLabel, Counter> = zero_by_family(), "conntrack_reconciler_deleted_entries", "Stale UDP flows deleted";
    }
    "keelson_proxy" {
        elements: Metric<FamilyLabel, Gauge>, "elements", "Elements in the kernel, by IP family";
        operations: Metric<FamilyLabel, Counter>, "operations", "Elements, chains and sets added or deleted";
        transactions: Metric<FamilyLabel, Counter>, "transactions", "Transactions committed to the kernel";
        family_enabled: Metric<FamilyLabel, Gauge>, "family_enabled", "1 if the IP family is programmed, 0 if it is disabled on this node";
        repaired: Metric<FamilyLabel, Counter> = zero_by_family(), "repaired", "Elements, chains and sets repaired after another program modified them";
        conntrack_failures: Metric<FamilyLabel, Counter> = zero_by_family(), "conntrack_failures", "Failed searches for and deletions of stale UDP flows";
        affinity_clients: Metric<AffinityLabel, Gauge>, "affinity_clients", "Clients with session affinity, by map, counted every 30 s";
        affinity_clients_max: Gauge, "affinity_clients_max", "Capacity of each session affinity map, in clients";
        map_elements: Metric<MapLabel, Gauge>, "map_elements", "Elements of bounded maps of eBPF, counted every 30 s";
        map_elements_max: Metric<MapLabel, Gauge>, "map_elements_max", "Capacity of these maps, in elements";
        map_left_out: Gauge, "map_left_out_service_ports", "Service ports for which a map of eBPF has no room, and which nftables decides, counted every 30 s";
        socket_decisions: Metric<DecisionLabel, Counter>, "socket_decisions", "Connections and UDP flows by what the socket level decided, counted every 30 s";
        direct_return: Metric<DecisionLabel, Counter>, "direct_return", "Flows and packets by what the programs of direct return did, counted every 30 s";
        pod_packets: Metric<DecisionLabel, Counter>, "pod_packets", "Packets of pods by what the program at their devices did, counted every 30 s";
        applied_rev: Gauge, "applied_rev", "Revision that is programmed in the kernel";
        take_overs: Metric<TakeOverLabel, Counter>, "take_overs", "Rules of another backend or service proxy that were removed after the first sync, by their owner";
        services: Gauge, "services", "Services that are programmed in the kernel";
        connected: Gauge, "agent_connected", "1 while the proxy is connected to the agent";
    }
    with {
        activity: Arc<SyncActivity>,
        totals: Arc<Totals>,
    }
}

impl ProxyMetrics {
    /// `backend`: kube-proxy's name of it, such as `nftables`, for the build info.
    pub(crate) fn register(&self, registry: &mut Registry, backend: &'static str) {
        self.register_families(registry);
        let build = Info::new(BuildLabel { version: env!("CARGO_PKG_VERSION"), backend });
        let own = registry.sub_registry_with_prefix("keelson_proxy");
        own.register("build", "Version and backend of this proxy", build);
        registry.register_collector(Box::new(ProcessMetrics::new()));
    }
}

impl ProxyMetrics {
    pub(crate) fn queued(&self, family: Family) {
        self.last_queued.get_or_create(&family.into()).set(unix_seconds());
    }

    pub(crate) fn synced(&self, family: Family, kind: SyncKind, took: Duration) {
        self.took(family, kind, took);
        self.last_synced.get_or_create(&family.into()).set(unix_seconds());
    }

    pub(crate) fn sync_failed(&self, family: Family, kind: SyncKind, took: Duration) {
        self.took(family, kind, took);
        self.sync_failures.get_or_create(&family.into()).inc();
    }

    fn took(&self, family: Family, kind: SyncKind, took: Duration) {
        let by_kind = match kind {
            SyncKind::Full => &self.full_sync_duration,
            SyncKind::Partial => &self.partial_sync_duration,
        };
        for metric in [&self.sync_duration, by_kind] {
            metric.get_or_create(&family.into()).observe(took.as_secs_f64());
        }
        let us = u64::try_from(took.as_micros()).unwrap_or(u64::MAX).max(1);
        self.activity.syncs.fetch_add(1, Ordering::Relaxed);
        self.activity.longest_us.fetch_max(us, Ordering::Relaxed);
    }

    pub(crate) fn take_activity(&self) -> Activity {
        let longest = self.activity.longest_us.swap(0, Ordering::Relaxed);
        Activity {
            syncs: self.activity.syncs.load(Ordering::Relaxed) as f64,
            longest_sync_us: (longest > 0).then_some(longest as f64),
            changes: (self.endpoint_changes.get() + self.service_changes.get()) as f64,
        }
    }

    /// A change is programmed. `took`: since the time in its EndpointSlice
    /// (`endpoints.kubernetes.io/last-change-trigger-time`), if that is not before the start of this process.
    pub(crate) fn programmed(&self, family: Family, took: Duration) {
        self.network_programming.get_or_create(&family.into()).observe(took.as_secs_f64());
    }

    /// Received changes of Services and of endpoints. They are pending until [`Self::nothing_pending`].
    pub(crate) fn changes_received(&self, services: u64, endpoints: u64) {
        for (number, total, pending) in [
            (services, &self.service_changes, &self.service_changes_pending),
            (endpoints, &self.endpoint_changes, &self.endpoint_changes_pending),
        ] {
            total.inc_by(number);
            pending.inc_by(i64::try_from(number).unwrap_or(i64::MAX));
        }
    }

    /// Every received change is programmed.
    pub(crate) fn nothing_pending(&self) {
        self.service_changes_pending.set(0);
        self.endpoint_changes_pending.set(0);
    }

    pub(crate) fn conntrack_cleaned(&self, family: Family, took: Duration, deleted: u64) {
        self.conntrack_duration.get_or_create(&family.into()).observe(took.as_secs_f64());
        self.conntrack_deleted.get_or_create(&family.into()).inc_by(deleted);
    }

    pub(crate) fn conntrack_failed(&self, family: Family, failures: u64) {
        self.conntrack_failures.get_or_create(&family.into()).inc_by(failures);
    }

    pub(crate) fn affinity_clients(&self, family: Family, map: &'static str, clients: usize) {
        let label = AffinityLabel { ip_family: family.as_str(), map };
        self.affinity_clients.get_or_create(&label).set(i64::try_from(clients).unwrap_or(i64::MAX));
    }

    pub(crate) fn affinity_clients_max(&self, clients: u64) {
        self.affinity_clients_max.set(i64::try_from(clients).unwrap_or(i64::MAX));
    }

    pub(crate) fn map_fill(&self, MapFill { map, elements, max }: MapFill) {
        let gauge = |number: usize| i64::try_from(number).unwrap_or(i64::MAX);
        self.map_elements.get_or_create(&MapLabel { map }).set(gauge(elements));
        self.map_elements_max.get_or_create(&MapLabel { map }).set(gauge(max));
    }

    pub(crate) fn left_out(&self, service_ports: usize) {
        self.map_left_out.set(i64::try_from(service_ports).unwrap_or(i64::MAX));
    }

    /// `total`: since the maps were made. Maps that are made again begin at zero.
    pub(crate) fn decided(&self, decision: &'static str, total: u64) {
        let counter = self.socket_decisions.get_or_create(&DecisionLabel { decision });
        counter.inc_by(self.totals.new_ones("socket", decision, total));
    }

    /// `total`: as above.
    pub(crate) fn direct_return(&self, decision: &'static str, total: u64) {
        let counter = self.direct_return.get_or_create(&DecisionLabel { decision });
        counter.inc_by(self.totals.new_ones("direct return", decision, total));
    }

    /// `total`: as above.
    pub(crate) fn pod_packets(&self, decision: &'static str, total: u64) {
        let counter = self.pod_packets.get_or_create(&DecisionLabel { decision });
        counter.inc_by(self.totals.new_ones("pod packets", decision, total));
    }

    pub(crate) fn elements(&self, family: Family, number: usize) {
        self.elements.get_or_create(&family.into()).set(i64::try_from(number).unwrap_or(i64::MAX));
    }

    pub(crate) fn transactions(&self, family: Family, transactions: usize, operations: usize) {
        self.transactions.get_or_create(&family.into()).inc_by(transactions as u64);
        self.operations.get_or_create(&family.into()).inc_by(operations as u64);
    }

    pub(crate) fn family_enabled(&self, family: Family, is_enabled: bool) {
        self.family_enabled.get_or_create(&family.into()).set(i64::from(is_enabled));
    }

    /// `number`: elements, chains and sets that another program had modified.
    pub(crate) fn repaired(&self, family: Family, number: usize) {
        self.repaired.get_or_create(&family.into()).inc_by(number as u64);
    }

    /// The agent's state of this revision is programmed.
    pub(crate) fn applied(&self, rev: u64, services: usize) {
        self.applied_rev.set(i64::try_from(rev).unwrap_or(i64::MAX));
        self.services.set(i64::try_from(services).unwrap_or(i64::MAX));
    }

    /// `from`: the name of a backend, or `kube-proxy`.
    pub(crate) fn took_over(&self, from: &'static str) {
        self.take_overs.get_or_create(&TakeOverLabel { from }).inc();
    }

    pub(crate) fn connected(&self, connected: bool) {
        self.connected.set(i64::from(connected));
    }

    pub(crate) fn healthz(&self, code: u16) {
        self.healthz.get_or_create(&CodeLabel { code }).inc();
    }

    pub(crate) fn livez(&self, code: u16) {
        self.livez.get_or_create(&CodeLabel { code }).inc();
    }
}

fn unix_seconds() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO).as_secs_f64()
}

#[cfg(test)]
mod tests {
    use keelson_client::ServiceName;

    use super::*;
    use crate::{
        model::{Endpoint, ServicePort},
        testing::service_port,
    };

    fn text(metrics: &ProxyMetrics) -> String {
        let mut registry = Registry::default();
        metrics.register(&mut registry, "nftables");
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry).expect("encodes");
        text
    }

    fn has(text: &str, line: &str) -> bool {
        text.lines().any(|have| have == line)
    }

    #[test]
    fn names_types_and_labels_are_kube_proxys() {
        let metrics = ProxyMetrics::default();
        let took = Duration::from_millis(3);
        metrics.synced(Family::V4, SyncKind::Full, took);
        metrics.synced(Family::V6, SyncKind::Partial, took);
        metrics.sync_failed(Family::V6, SyncKind::Full, took);
        metrics.queued(Family::V4);
        metrics.programmed(Family::V4, Duration::from_millis(300));
        metrics.changes_received(3, 5);
        metrics.conntrack_cleaned(Family::V4, took, 7);
        metrics.healthz(503);
        metrics.livez(200);
        metrics.affinity_clients(Family::V4, "affinity-7", 5);
        metrics.affinity_clients_max(131_072);
        metrics.map_fill(MapFill { map: "slots", elements: 7, max: 100 });
        metrics.left_out(4);
        metrics.decided("tcp", 3);
        metrics.decided("tcp", 8);
        metrics.decided("tcp", 1);
        metrics.direct_return("reply", 9);
        metrics.pod_packets("handed_over", 5);
        let text = text(&metrics);
        for line in [
            "# TYPE kubeproxy_sync_proxy_rules_duration_seconds histogram",
            "kubeproxy_sync_proxy_rules_duration_seconds_count{ip_family=\"IPv6\"} 2",
            "kubeproxy_sync_proxy_rules_duration_seconds_bucket{le=\"0.004\",ip_family=\"IPv4\"} 1",
            "kubeproxy_sync_full_proxy_rules_duration_seconds_count{ip_family=\"IPv4\"} 1",
            "kubeproxy_sync_partial_proxy_rules_duration_seconds_count{ip_family=\"IPv6\"} 1",
            "kubeproxy_network_programming_duration_seconds_bucket{le=\"0.5\",ip_family=\"IPv4\"} 1",
            "kubeproxy_network_programming_duration_seconds_bucket{le=\"300.0\",ip_family=\"IPv4\"} 1",
            "# TYPE kubeproxy_sync_proxy_rules_last_timestamp_seconds gauge",
            "# TYPE kubeproxy_sync_proxy_rules_last_queued_timestamp_seconds gauge",
            "# TYPE kubeproxy_sync_proxy_rules_no_local_endpoints_total gauge",
            "kubeproxy_sync_proxy_rules_no_local_endpoints_total{traffic_policy=\"internal\",ip_family=\"IPv4\"} 0",
            "kubeproxy_conntrack_reconciler_sync_duration_seconds_count{ip_family=\"IPv4\"} 1",
            "kubeproxy_conntrack_reconciler_deleted_entries_total{ip_family=\"IPv4\"} 7",
            "kubeproxy_sync_proxy_rules_nftables_sync_failures_total{ip_family=\"IPv6\"} 1",
            "kubeproxy_sync_proxy_rules_nftables_cleanup_failures_total{ip_family=\"IPv4\"} 0",
            "# TYPE kubeproxy_sync_proxy_rules_endpoint_changes_pending gauge",
            "kubeproxy_sync_proxy_rules_endpoint_changes_pending 5",
            "kubeproxy_sync_proxy_rules_endpoint_changes_total 5",
            "kubeproxy_sync_proxy_rules_service_changes_pending 3",
            "kubeproxy_sync_proxy_rules_service_changes_total 3",
            "kubeproxy_proxy_healthz_total{code=\"503\"} 1",
            "kubeproxy_proxy_livez_total{code=\"200\"} 1",
            "keelson_proxy_affinity_clients{ip_family=\"IPv4\",map=\"affinity-7\"} 5",
            "keelson_proxy_affinity_clients_max 131072",
            "keelson_proxy_map_elements{map=\"slots\"} 7",
            "keelson_proxy_map_elements_max{map=\"slots\"} 100",
            "keelson_proxy_map_left_out_service_ports 4",
            "keelson_proxy_socket_decisions_total{decision=\"tcp\"} 9",
            "keelson_proxy_direct_return_total{decision=\"reply\"} 9",
            "keelson_proxy_pod_packets_total{decision=\"handed_over\"} 5",
        ] {
            assert!(has(&text, line), "{line} in\n{text}");
        }
        let build = format!(
            "keelson_proxy_build_info{{version=\"{}\",backend=\"nftables\"}} 1",
            env!("CARGO_PKG_VERSION")
        );
        assert!(has(&text, &build), "{text}");
        metrics.nothing_pending();
        assert!(has(&self::text(&metrics), "kubeproxy_sync_proxy_rules_service_changes_pending 0"));
    }

    fn port(name: &str) -> ServicePort {
        let service = ServiceName::new("default", name);
        let remote = Endpoint { ip: "10.244.9.9".parse().unwrap(), port: 80 };
        ServicePort {
            node_port: 30_080,
            has_any: true,
            cluster: vec![remote],
            ..service_port(&service, "p", "10.96.0.1".parse().unwrap(), 80)
        }
    }

    #[test]
    fn case_60_service_ports_without_local_endpoints_are_counted_as_they_change() {
        let metrics = ProxyMetrics::default();
        let mut counted = NoLocalEndpoints::new(Family::V4, metrics.clone());
        let counts = || {
            Policy::ALL
                .map(|policy| metrics.no_local_endpoints.get_or_create(&policy.label(Family::V4)).get())
        };
        let mut set = |name: &str, ports: &[ServicePort]| counted.set(&ServiceName::new("ns", name), ports);
        // Case 32: iTP Local, remote endpoints only. Case 34: eTP Local. Case 39: no endpoints at all.
        let case_32 = ServicePort { internal_local: true, ..port("case-32") };
        set("a", std::slice::from_ref(&case_32));
        assert_eq!(counts(), [1, 0]);
        let case_34 = ServicePort { external_local: true, ..port("case-34") };
        set("b", &[case_34]);
        assert_eq!(counts(), [1, 1]);
        let case_39 =
            ServicePort { internal_local: true, external_local: true, has_any: false, ..port("case-39") };
        set("c", &[case_39, port("cluster")]);
        assert_eq!(counts(), [1, 1]);
        // The same again, both policies at once, a second port, one of them with local endpoints, and deleted.
        set("a", std::slice::from_ref(&case_32));
        assert_eq!(counts(), [1, 1]);
        let both = ServicePort { external_local: true, ..case_32.clone() };
        set("a", std::slice::from_ref(&both));
        assert_eq!(counts(), [1, 2]);
        set("a", &[both.clone(), both]);
        assert_eq!(counts(), [2, 3]);
        set("a", &[ServicePort { local: case_32.cluster.clone(), ..case_32.clone() }]);
        assert_eq!(counts(), [0, 1]);
        set("a", &[case_32]);
        set("a", &[]);
        set("a", &[]);
        assert_eq!(counts(), [0, 1]);
        let other = metrics.no_local_endpoints.get_or_create(&Policy::External.label(Family::V6)).get();
        assert_eq!(other, 0, "the other family is another proxy");
    }

    #[test]
    fn the_longest_sync_is_taken_once() {
        let metrics = ProxyMetrics::default();
        assert_eq!(metrics.take_activity().longest_sync_us, None);
        for ms in [3, 9, 4] {
            metrics.synced(Family::V4, SyncKind::Partial, Duration::from_millis(ms));
        }
        metrics.changes_received(2, 5);
        let activity = metrics.take_activity();
        assert_eq!(activity, Activity { syncs: 3.0, longest_sync_us: Some(9_000.0), changes: 7.0 });
        assert_eq!(metrics.take_activity(), Activity { longest_sync_us: None, ..activity });
    }

    #[test]
    fn names_types_and_help_are_an_interface() {
        assert_eq!(ProxyMetrics::list(), include_str!("metrics/metrics.txt"));
    }
}
