//! Service ports with a Local traffic policy and no local endpoint.
//!
//! Owns: [`NoLocalEndpoints`], which keeps `kubeproxy_sync_proxy_rules_no_local_endpoints_total` up to date. In:
//! service ports as they change. Out: increments and decrements of the gauge.

use std::collections::HashMap;

use keelson_client::ServiceName;

use super::{PolicyLabel, ProxyMetrics};
use crate::model::{Family, ServicePort};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Policy {
    Internal,
    External,
}

impl Policy {
    pub(super) const ALL: [Self; 2] = [Self::Internal, Self::External];

    pub(super) fn label(self, family: Family) -> PolicyLabel {
        let traffic_policy = match self {
            Self::Internal => "internal",
            Self::External => "external",
        };
        PolicyLabel { traffic_policy, ip_family: family.as_str() }
    }

    /// The policy is Local, there are endpoints, and LocalSet is empty.
    fn is_without_local(self, port: &ServicePort) -> bool {
        let local = match self {
            Self::Internal => port.internal_local,
            Self::External => port.external_local,
        };
        local && port.has_any && port.local.is_empty()
    }
}

/// Keeps the gauge of one family up to date. It contains only the Services that count, so the cost of a change is
/// proportional to the change.
#[derive(Debug)]
pub(crate) struct NoLocalEndpoints {
    family: Family,
    metrics: ProxyMetrics,
    /// By Service: number of service ports for each of [`Policy::ALL`]; at least one is not 0.
    counted: HashMap<ServiceName, [i64; 2]>,
}

impl NoLocalEndpoints {
    pub(crate) fn new(family: Family, metrics: ProxyMetrics) -> Self {
        Self { family, metrics, counted: HashMap::new() }
    }

    /// Sets all ports of a Service.
    pub(crate) fn set(&mut self, service: &ServiceName, ports: &[ServicePort]) {
        let counts = Policy::ALL.map(|policy| {
            let count = ports.iter().filter(|port| policy.is_without_local(port)).count();
            i64::try_from(count).unwrap_or(i64::MAX)
        });
        let before = match counts {
            [0, 0] => self.counted.remove(service),
            counts => self.counted.insert(service.clone(), counts),
        };
        for ((policy, was), is) in Policy::ALL.into_iter().zip(before.unwrap_or_default()).zip(counts) {
            if was != is {
                self.metrics.no_local_endpoints.get_or_create(&policy.label(self.family)).inc_by(is - was);
            }
        }
    }
}
