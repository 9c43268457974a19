//! Read access to a plan.
//!
//! Owns: [`PortView`], [`FoundFrontend`], [`Conflict`], [`Counts`]. In: the plan. Out: values to read.

use std::ops::Deref;

use keelson_client::ServiceName;
use keelson_proxy::model::{Frontend, PortName};

use super::{FrontendKind, FrontendTarget, port::Port};
use crate::element::SetName;

#[derive(Debug, Clone, Copy)]
pub(crate) struct PortView<'a> {
    pub(crate) service: &'a ServiceName,
    pub(super) inner: &'a Port,
}

impl<'a> PortView<'a> {
    pub(crate) fn name(&self) -> PortName {
        PortName { service: self.service.clone(), port: self.inner.name.clone(), protocol: self.protocol }
    }

    /// Whether affinity is requested but not available: more than 32,768 service ports request it, or more than 65,535
    /// endpoints would need a number.
    pub(crate) fn lacks_affinity(&self) -> bool {
        lacks_affinity(self.inner)
    }
}

impl Deref for PortView<'_> {
    type Target = Port;

    fn deref(&self) -> &Port {
        self.inner
    }
}

pub(super) fn lacks_affinity(port: &Port) -> bool {
    port.affinity_seconds != 0 && port.number.is_some_and(|number| !number.has_affinity())
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct FoundFrontend<'a> {
    pub(crate) frontend: Frontend,
    pub(crate) kind: FrontendKind,
    pub(crate) target: FrontendTarget,
    pub(crate) port: PortView<'a>,
}

#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Counts {
    pub(crate) services: usize,
    pub(crate) service_ports: usize,
    /// Endpoints that receive traffic, by service port: those of ClusterSet and of LocalSet, each once.
    pub(crate) endpoints: usize,
    /// Service ports that request affinity and do not get it: see [`PortView::lacks_affinity`].
    pub(crate) without_affinity: usize,
    pub(super) elements: [usize; SetName::ALL.len()],
}

impl Counts {
    /// 0 for sets that the kernel writes.
    pub(crate) fn elements(&self, set: SetName) -> usize {
        self.elements.get(set as usize).copied().unwrap_or_default()
    }

    pub(crate) fn all_elements(&self) -> usize {
        self.elements.iter().sum()
    }
}
