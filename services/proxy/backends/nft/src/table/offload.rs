//! The flowtable of a table, and its interfaces.
//!
//! Owns: which of the chains that add flows there is, and [`DeviceSync`]. In: the interfaces that the flowtable shall have. Out:
//! transactions of their own, so that no Service waits for an interface.

use std::collections::BTreeSet;

use keelson_proxy::backend::Outcome;

use super::Table;
use crate::{
    chain::Chain,
    flowtable::{device_changes, one_by_one},
    kernel::{KernelError, NfTables},
};

/// What became of the interfaces of the flowtable.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct DeviceSync {
    /// Interfaces that were added or removed.
    pub(crate) changed: usize,
    /// Number of transactions that were committed.
    pub(crate) transactions: usize,
    /// Why one could not be; the others are as they shall be.
    pub(crate) refused: Option<KernelError>,
}

impl Table {
    /// The chains that are there whatever the Services are.
    pub(super) fn fixed(&self) -> Vec<Chain> {
        Chain::FIXED.into_iter().chain(self.offload_chain()).collect()
    }

    /// The chain that adds flows to the flowtable, if there is one.
    pub(crate) fn offload_chain(&self) -> Option<Chain> {
        let chain = match self.tcp_only {
            false => Chain::FilterForwardOffload,
            true => Chain::FilterForwardOffloadTcp,
        };
        self.offloads().then_some(chain)
    }

    /// Whether flows of UDP are kept out of the flowtable.
    pub(crate) const fn is_tcp_only(&self) -> bool {
        self.tcp_only
    }

    /// Keeps flows of UDP out of the flowtable from now on, also after a restart of the proxy. The next sync ends those that
    /// are in it, with a new flowtable.
    pub(crate) fn set_tcp_only(&mut self) {
        self.tcp_only = true;
        self.distrust();
    }

    /// Whether established flows are added to a flowtable.
    pub(crate) const fn offloads(&self) -> bool {
        self.devices.is_some()
    }

    /// The interfaces of the flowtable are to be these ([`Self::sync_devices`] brings them to the kernel), or there is to be no
    /// flowtable.
    pub(crate) fn set_devices(&mut self, devices: Option<BTreeSet<String>>) {
        let is_other_structure = self.devices.is_some() != devices.is_some();
        self.devices = devices;
        if is_other_structure {
            self.distrust();
        }
    }

    /// Makes the interfaces of the flowtable those that were set, in transactions of their own: what the kernel refuses here
    /// delays no Service. Interfaces that disappear meanwhile are no error.
    ///
    /// # Errors
    /// The kernel does not say which interfaces the flowtable has.
    pub(crate) fn sync_devices(&mut self, tables: &mut dyn NfTables) -> Result<DeviceSync, KernelError> {
        let mut done = DeviceSync::default();
        let Some(wanted) = &self.devices else { return Ok(done) };
        // Without a flowtable, the table is not as it was left, which checks and syncs find out.
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
