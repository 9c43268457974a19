//! Metrics of the Endpoints API. The only labels are the API and the kind of a batch.

use keelson_metrics::{HistogramFamily, families};
use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{
        counter::Counter,
        family::Family,
        gauge::Gauge,
        histogram::{Histogram, exponential_buckets},
    },
};

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct ApiLabel {
    /// `Next` or `Watch`.
    pub api: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct StateLabel {
    /// `Next` or `Watch`.
    pub api: &'static str,
    /// `full` or `delta`.
    pub kind: &'static str,
}

/// 0.1 ms to 26 s.
fn delay_buckets() -> Histogram {
    Histogram::new(exponential_buckets(0.0001, 4.0, 10))
}

families! {
    /// Clones share their values. Bytes include gRPC's five per message; the delay of a client is counted if it waited
    /// for the revision or was busy with an earlier one.
    #[derive(Debug, Clone)]
    pub struct ServerMetrics;
    pub fn register;
    "keelson_endpoints" {
        pub watchers: Family<ApiLabel, Gauge>, "watchers", "Connected clients, by API";
        pub items: Family<ApiLabel, Counter>, "items_sent", "Messages sent to clients, by API";
        pub bytes: Family<ApiLabel, Counter>, "bytes_sent", "Bytes of messages sent to clients, by API";
        pub states: Family<StateLabel, Counter>, "states_sent", "States sent completely, by API and kind";
        pub resets: Counter, "resets", "Clients with an earlier state that were sent the full state because the history no longer had their revision";
        pub refused: Counter, "refused", "Clients rejected because of endpoints.max_watchers";
        pub cut_off: Counter, "cut_off", "Calls closed because the client did not read";
        pub delay: HistogramFamily<ApiLabel> = Family::new_with_constructor(delay_buckets), "send_delay" Seconds, "Time from a new revision until it was sent completely to a connected client";
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_types_and_help_are_an_interface() {
        assert_eq!(ServerMetrics::list(), include_str!("metrics.txt"));
    }
}
