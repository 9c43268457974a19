//! What the server counts.
//!
//! Owns: the metric families of the Endpoints API. In: increments. Out: a [`Registry`] for the exporter. The only
//! labels are the API and the kind of a batch.

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

/// Label by API.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct ApiLabel {
    /// `Next` or `Watch`.
    pub api: &'static str,
}

/// Label by API and kind.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct StateLabel {
    /// `Next` or `Watch`.
    pub api: &'static str,
    /// `full` or `delta`.
    pub kind: &'static str,
}

/// Every family. Cheap to clone: the values are shared.
#[derive(Debug, Clone)]
pub struct ServerMetrics {
    /// `keelson_endpoints_watchers`: calls that are served now, waiting ones included.
    pub watchers: Family<ApiLabel, Gauge>,
    /// `keelson_endpoints_items_sent_total`: messages handed to connections.
    pub items: Family<ApiLabel, Counter>,
    /// `keelson_endpoints_bytes_sent_total`: the same in bytes, with gRPC's five a message.
    pub bytes: Family<ApiLabel, Counter>,
    /// `keelson_endpoints_states_sent_total`: states that were handed over whole.
    pub states: Family<StateLabel, Counter>,
    /// `keelson_endpoints_resets_total`: callers that had a state and were sent everything, because what had changed
    /// since was not known.
    pub resets: Counter,
    /// `keelson_endpoints_refused_total`: calls refused because there were `max_watchers`.
    pub refused: Counter,
    /// `keelson_endpoints_cut_off_total`: calls whose connection was closed because their caller did not read.
    pub cut_off: Counter,
    /// `keelson_endpoints_send_delay_seconds`: from the moment the server met a revision until a caller that was waiting
    /// for it, or busy with an earlier one, had been handed all of it.
    pub delay: Family<ApiLabel, Histogram, fn() -> Histogram>,
}

fn delay_buckets() -> Histogram {
    // 0.1 ms to 26 s.
    Histogram::new(exponential_buckets(0.0001, 4.0, 10))
}

impl Default for ServerMetrics {
    fn default() -> Self {
        Self {
            watchers: Family::default(),
            items: Family::default(),
            bytes: Family::default(),
            states: Family::default(),
            resets: Counter::default(),
            refused: Counter::default(),
            cut_off: Counter::default(),
            delay: Family::new_with_constructor(delay_buckets),
        }
    }
}

impl ServerMetrics {
    /// Enters every family into `registry`.
    pub fn register(&self, registry: &mut Registry) {
        let own = registry.sub_registry_with_prefix("keelson_endpoints");
        own.register("watchers", "Connected clients, by API", self.watchers.clone());
        own.register("items_sent", "Messages sent to clients, by API", self.items.clone());
        own.register("bytes_sent", "Bytes of messages sent to clients, by API", self.bytes.clone());
        own.register("states_sent", "States sent completely, by API and kind", self.states.clone());
        own.register(
            "resets",
            "Clients with an earlier state that were sent the full state because the history no longer had \
             their revision",
            self.resets.clone(),
        );
        own.register("refused", "Clients rejected because of endpoints.max_watchers", self.refused.clone());
        own.register("cut_off", "Calls closed because the client did not read", self.cut_off.clone());
        own.register_with_unit(
            "send_delay",
            "Time from a new revision until it was sent completely to a connected client",
            Unit::Seconds,
            self.delay.clone(),
        );
    }
}
