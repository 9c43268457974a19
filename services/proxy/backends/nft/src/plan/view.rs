//! Looking into a plan.
//!
//! Owns: [`PortView`], [`FoundFrontend`], [`Conflict`], [`Counts`]. In: the plan. Out: values to read.

use std::ops::Deref;

use keelson_client::ServiceName;
use keelson_proxy::model::{Frontend, PortName};

use super::{FrontendKind, FrontendTarget, port::Port};
use crate::element::SetName;

/// A service port as it is planned.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PortView<'a> {
    pub(crate) service: &'a ServiceName,
    pub(super) inner: &'a Port,
}

impl<'a> PortView<'a> {
    /// Which one.
    pub(crate) fn name(&self) -> PortName {
        PortName { service: self.service.clone(), port: self.inner.name.clone(), protocol: self.protocol }
    }

    /// Whether affinity is requested and not given: more than 32,768 service ports have it, or more than 65,535 endpoints would
    /// need a number.
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

/// What a frontend is.
#[derive(Debug, Clone, Copy)]
pub(crate) struct FoundFrontend<'a> {
    /// Which.
    pub(crate) frontend: Frontend,
    /// What it is to its service port.
    pub(crate) kind: FrontendKind,
    /// Where it leads.
    pub(crate) target: FrontendTarget,
    /// Whose it is.
    pub(crate) port: PortView<'a>,
}

/// How much there is in a plan.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Counts {
    /// Services that have a service port of the family.
    pub(crate) services: usize,
    /// Service ports.
    pub(crate) service_ports: usize,
    /// Endpoints that traffic goes to, by service port: those of ClusterSet and of LocalSet, each once.
    pub(crate) endpoints: usize,
    /// Service ports that ask for affinity and do not get it: see [`PortView::lacks_affinity`].
    pub(crate) without_affinity: usize,
    pub(super) elements: [usize; SetName::ALL.len()],
}

impl Counts {
    /// How many elements a set has; 0 for the one that the kernel writes.
    pub(crate) fn elements(&self, set: SetName) -> usize {
        self.elements.get(set as usize).copied().unwrap_or_default()
    }

    /// The elements of all sets.
    pub(crate) fn all_elements(&self) -> usize {
        self.elements.iter().sum()
    }
}
