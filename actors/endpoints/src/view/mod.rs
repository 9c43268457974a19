//! The view of one Service on this node.
//!
//! Owns: which Services count, which endpoints take which traffic, and why. In: a Service, its EndpointSlices and the
//! node. Out: the Service in the form of the Endpoints API, and the same decisions in words. All functions are pure:
//! equal arguments give equal bytes, regardless of the order of the slices.
//!
//! ```text
//!  Service ──facts──┐
//!  slices ──merge───┴──► candidates ──topology──► Evaluation ──┬──build──► ServiceEndpoints
//!                                                              └─explain─► Explanation
//! ```
//!
//! The rules are kube-proxy's (1.36): `pkg/proxy/topology.go`, `endpointslicecache.go`, `serviceport.go`.

mod build;
mod explain;
mod inputs;
mod merge;
mod parse;
mod reasons;
mod service;
mod topology;

#[cfg(test)]
pub(crate) mod tests;

use keelson_proto::{endpoints as pb, localnetv1::ServiceEndpoints};

pub(super) use self::inputs::node_view;
pub use self::{
    inputs::{node_info, reduce, triggered_unix_ms, trim_service, trim_slice},
    merge::owner,
};

use self::{
    merge::{Candidate, Merged, SliceUse},
    parse::PerFamily,
    service::{Facts, Unserved},
    topology::Decision,
};
use super::{EndpointSlice, NodeView, Service};

/// `None` if the Service has no frontend, or belongs to another service proxy.
#[must_use]
pub fn view(service: &Service, slices: &[EndpointSlice], node: &NodeView) -> Option<ServiceEndpoints> {
    view_for(&[], service, slices, node)
}

/// The same, also of Services that belong to one of these service proxies.
#[must_use]
pub fn view_for(
    proxy_names: &[String],
    service: &Service,
    slices: &[EndpointSlice],
    node: &NodeView,
) -> Option<ServiceEndpoints> {
    build::service_endpoints(&Evaluation::of(proxy_names, service, slices, node))
}

/// The decisions in words; `rev` stays 0. Without a Service, only slices are explained.
#[must_use]
pub fn explain(service: Option<&Service>, slices: &[EndpointSlice], node: &NodeView) -> pb::Explanation {
    explain_for(&[], service, slices, node)
}

/// The same, where Services of these service proxies are published.
#[must_use]
pub fn explain_for(
    proxy_names: &[String],
    service: Option<&Service>,
    slices: &[EndpointSlice],
    node: &NodeView,
) -> pb::Explanation {
    let evaluation = match service {
        Some(service) => Evaluation::of(proxy_names, service, slices, node),
        None => Evaluation::without_service(slices, node),
    };
    explain::explanation(&evaluation, node)
}

#[derive(Debug, Clone)]
struct Evaluation<'a> {
    namespace: &'a str,
    name: &'a str,
    facts: Facts<'a>,
    slices: Vec<SliceUse<'a>>,
    candidates: Vec<Candidate<'a>>,
    /// One per port of [`Facts::ports`].
    decisions: Vec<PerFamily<Decision>>,
}

impl<'a> Evaluation<'a> {
    fn of(
        proxy_names: &[String],
        service: &'a Service,
        slices: &'a [EndpointSlice],
        node: &NodeView,
    ) -> Self {
        let metadata = service.metadata.as_ref();
        let (namespace, name) = metadata.map_or(("", ""), |metadata| (&metadata.namespace, &metadata.name));
        Self::with((namespace, name), Facts::of(service, proxy_names), slices, node)
    }

    /// For slices without a Service; its name is that in the first slice that names one.
    fn without_service(slices: &'a [EndpointSlice], node: &NodeView) -> Self {
        let name = slices.iter().find_map(merge::service_of).unwrap_or_default();
        Self::with(name, Facts::unserved(Unserved::Missing), slices, node)
    }

    fn with(
        (namespace, name): (&'a str, &'a str),
        facts: Facts<'a>,
        slices: &'a [EndpointSlice],
        node: &NodeView,
    ) -> Self {
        let Merged { slices, mut candidates } = merge::merge((namespace, name), &facts, slices, node);
        let decisions = topology::decide(&facts, &mut candidates);
        Self { namespace, name, facts, slices, candidates, decisions }
    }
}
