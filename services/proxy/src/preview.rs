//! What a proxy would program for one state: the ruleset as text, and the differences.
//!
//! Owns: [`Preview`]. In: a full state of the agent, a backend that was opened to compare or to print. Out: text.
//! Nothing is changed.

use std::{fmt, time::Instant};

use keelson_client::State;

use crate::{
    addresses::{AddressError, LocalAddresses},
    backend::{Backend, BackendError},
    model::{Family, service_ports},
    options::Options,
    sync::SyncLoop,
};

#[derive(Debug, thiserror::Error)]
pub enum PreviewError {
    #[error(transparent)]
    Backend(#[from] BackendError),
    #[error(transparent)]
    Addresses(#[from] AddressError),
    #[error(transparent)]
    State(#[from] keelson_client::Error),
    #[error("the Node has no spec.podCIDRs, which detect_local_mode NodeCIDR requires")]
    NoPodCidrs,
}

#[derive(Debug)]
pub struct Preview(SyncLoop);

impl Preview {
    /// `state`: a full state.
    pub fn new(backend: Box<dyn Backend>, options: Options, state: &State) -> Result<Self, PreviewError> {
        let mut sync = SyncLoop::new(backend, options, &LocalAddresses::now()?);
        let now = Instant::now();
        for raw in state.services() {
            let service = raw.decode()?;
            sync.set(raw.name(), Family::ALL.map(|family| service_ports(&service, family)), now);
        }
        sync.set_node(state.node().cloned().unwrap_or_default(), now);
        sync.begin(now);
        if sync.waits_for_pod_cidrs() {
            return Err(PreviewError::NoPodCidrs);
        }
        Ok(Self(sync))
    }

    /// Prints the rulesets of all families, as text that the backend's tools read.
    pub fn print(&self, out: &mut dyn fmt::Write) -> fmt::Result {
        (self.0.backend().ruleset())(out)
    }

    /// What a proxy would change, one line each.
    pub fn changes(&mut self) -> Result<Vec<String>, BackendError> {
        self.0.changes()
    }
}
