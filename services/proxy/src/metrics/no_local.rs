//! Service ports with a Local traffic policy and no local endpoint.
//!
//! Owns: [`NoLocalEndpoints`], which keeps `kubeproxy_sync_proxy_rules_no_local_endpoints_total` right change by change. In:
//! service ports as they change. Out: increments and decrements of the gauge.

use std::collections::HashMap;

use super::{PolicyLabel, ProxyMetrics};
use crate::model::{Family, PortName, ServicePort};

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

    /// The policy is Local, there are endpoints, and LocalSet has none.
    fn is_without_local(self, port: &ServicePort) -> bool {
        let local = match self {
            Self::Internal => port.internal_local,
            Self::External => port.external_local,
        };
        local && port.has_any && port.local.is_empty()
    }
}

/// Keeps `kubeproxy_sync_proxy_rules_no_local_endpoints_total` of one family. It holds only those service ports that count, so
/// that a change costs no more than itself.
#[derive(Debug)]
pub struct NoLocalEndpoints {
    family: Family,
    metrics: ProxyMetrics,
    /// By service port: whether each of [`Policy::ALL`] counts; at least one does.
    counted: HashMap<PortName, [bool; 2]>,
}

impl NoLocalEndpoints {
    /// None yet.
    #[must_use]
    pub fn new(family: Family, metrics: ProxyMetrics) -> Self {
        Self { family, metrics, counted: HashMap::new() }
    }

    /// A service port is in the kernel now, or another than before.
    pub fn set(&mut self, port: &ServicePort) {
        self.count(&port.name, Policy::ALL.map(|policy| policy.is_without_local(port)));
    }

    /// A service port is gone.
    pub fn remove(&mut self, name: &PortName) {
        self.count(name, [false; 2]);
    }

    fn count(&mut self, name: &PortName, counts: [bool; 2]) {
        let before = match counts {
            [false, false] => self.counted.remove(name),
            counts => self.counted.insert(name.clone(), counts),
        };
        for ((policy, was), is) in Policy::ALL.into_iter().zip(before.unwrap_or_default()).zip(counts) {
            if was != is {
                let label = policy.label(self.family);
                self.metrics.no_local_endpoints.get_or_create(&label).inc_by(i64::from(is) - i64::from(was));
            }
        }
    }
}
