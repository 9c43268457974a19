//! The flowtable of a table, and its interfaces.
//!
//! Owns: the choice of the chain that adds flows, and [`DeviceSync`]. In: the wanted interfaces of the flowtable. Out:
//! transactions of their own, so that no Service waits for an interface.

use std::collections::BTreeSet;

use keelson_proxy::backend::Outcome;

use super::Table;
use super::devices::{device_changes, one_by_one};
use crate::{
    chain::Chain,
    kernel::{KernelError, NfTables},
};

#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct DeviceSync {
    /// Number of interfaces that were added or removed.
    pub(crate) changed: usize,
    pub(crate) transactions: usize,
    /// Why one was rejected; the others are synced.
    pub(crate) refused: Option<KernelError>,
}

impl Table {
    /// The chains that exist whatever the Services are.
    pub(super) fn fixed(&self) -> Vec<Chain> {
        Chain::FIXED.into_iter().chain(self.offload_chain()).chain(self.untracked_chain()).collect()
    }

    /// The chain that adds flows to the flowtable, if it exists.
    pub(crate) fn offload_chain(&self) -> Option<Chain> {
        let chain = match self.tcp_only {
            false => Chain::FilterForwardOffload,
            true => Chain::FilterForwardOffloadTcp,
        };
        self.offloads().then_some(chain)
    }

    /// Whether UDP flows are kept out of the flowtable.
    pub(crate) const fn is_tcp_only(&self) -> bool {
        self.tcp_only
    }

    /// Keeps UDP flows out of the flowtable from now on, also after a restart of the proxy. The next sync creates a new
    /// flowtable, which ends the existing ones.
    pub(crate) fn set_tcp_only(&mut self) {
        self.tcp_only = true;
        self.invalidate();
    }

    pub(crate) const fn offloads(&self) -> bool {
        self.devices.is_some()
    }

    /// Sets the wanted interfaces of the flowtable, which [`Self::sync_devices`] programs; `None`: no flowtable.
    pub(crate) fn set_devices(&mut self, devices: Option<BTreeSet<String>>) {
        let is_other_structure = self.devices.is_some() != devices.is_some();
        self.devices = devices;
        if is_other_structure {
            self.invalidate();
        }
    }

    /// Syncs the interfaces of the flowtable, in transactions of their own: what the kernel rejects here delays no
    /// Service. Interfaces that disappear in the meantime are no error.
    ///
    /// # Errors
    /// The interfaces of the flowtable cannot be read.
    pub(crate) fn sync_devices(&mut self, tables: &mut dyn NfTables) -> Result<DeviceSync, KernelError> {
        let mut done = DeviceSync::default();
        let Some(wanted) = &self.devices else { return Ok(done) };
        // Checks and syncs detect a missing flowtable.
        let Some(found) = tables.read_flowtable(self.family())? else { return Ok(done) };
        let mut outcome = Outcome::default();
        for change in device_changes(&found.devices, wanted) {
            let singles = one_by_one(&change);
            if self.commit(tables, &[change], &mut outcome).is_ok() {
                done.changed += singles.len();
                continue;
            }
            for single in singles {
                match self.commit(tables, &[single], &mut outcome) {
                    Ok(()) => done.changed += 1,
                    Err(error) if error.is_not_found() => {}
                    Err(error) => done.refused = Some(error),
                }
            }
        }
        done.transactions = outcome.transactions;
        Ok(done)
    }
}
