//! The meaning of one Service on this node.
//!
//! Owns: which Services count, which endpoints take which traffic, and why. In: a Service, its EndpointSlices and the
//! node. Out: the Service as the Endpoints API has it, and the same decisions in words. Everything here is a function of
//! its arguments: equal arguments give equal bytes, in whatever order the slices come.
//!
//! The rules are kube-proxy's (1.36): `pkg/proxy/topology.go`, `endpointslicecache.go`, `serviceport.go`.

use keelson_proto::{
    endpoints as pb,
    localnetv1::{NodeInfo, ServiceEndpoints},
};

use super::{EndpointSlice, NodeView, Service, ServiceCidr, ServiceName};

/// Reduces a Service to what is read of it.
#[must_use]
pub fn trim_service(service: Service) -> Service {
    service
}

/// Reduces a slice to what is read of it.
#[must_use]
pub fn trim_slice(slice: EndpointSlice) -> EndpointSlice {
    slice
}

/// The Service that a slice belongs to; none when it does not say so.
#[must_use]
pub fn owner(_slice: &EndpointSlice) -> Option<ServiceName> {
    None
}

/// When the change that led to this slice was made, in Unix milliseconds: the annotation
/// `endpoints.kubernetes.io/last-change-trigger-time`. Read it before [`trim_slice`], which drops it.
#[must_use]
pub fn triggered_unix_ms(_slice: &EndpointSlice) -> Option<i64> {
    None
}

/// The Service as the Endpoints API has it; none when it has no frontend.
#[must_use]
pub fn view(_service: &Service, _slices: &[EndpointSlice], _node: &NodeView) -> Option<ServiceEndpoints> {
    None
}

/// The same decisions in words; `rev` is left 0. A Service that is not there has slices only.
#[must_use]
pub fn explain(_service: Option<&Service>, _slices: &[EndpointSlice], _node: &NodeView) -> pb::Explanation {
    pb::Explanation::default()
}

/// The node as the Endpoints API has it.
pub fn node_info<'a>(_node: &NodeView, _cidrs: impl IntoIterator<Item = &'a ServiceCidr>) -> NodeInfo {
    NodeInfo::default()
}
