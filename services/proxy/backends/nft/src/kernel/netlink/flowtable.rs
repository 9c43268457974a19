//! Reads flowtables, and probes the kernel's support.
//!
//! In: a family. Out: [`FoundFlowtable`]s of our table.

use std::collections::BTreeMap;

use keelson_proxy::model::Family;
use netlink_packet_core::NLM_F_DUMP;
use netlink_packet_netfilter::nftables::NfTablesMessage;

use super::{Batch, FoundFlowtable, KernelError, Netlink, RequestError, TABLE, message, parse, protocol};
use crate::ruleset::FLOWTABLE;

impl Netlink {
    pub(super) fn flowtables(
        &mut self,
        family: Family,
    ) -> Result<BTreeMap<String, FoundFlowtable>, RequestError> {
        let mut flowtables = BTreeMap::new();
        // The dump has flowtables of all tables of the family.
        let all = NfTablesMessage::GetFlowTable(Vec::new());
        self.request("flowtables", protocol(family), NLM_F_DUMP, all, |kind, _, message| {
            if kind == message::NEW_FLOWTABLE {
                let (table, name, flowtable) = parse::flowtable(message)?;
                if table == TABLE {
                    flowtables.insert(name, flowtable);
                }
            }
            Ok(())
        })?;
        Ok(flowtables)
    }

    /// Reads our flowtable. `None`: it does not exist.
    pub fn read_flowtable(&mut self, family: Family) -> Result<Option<FoundFlowtable>, KernelError> {
        const WHAT: &str = "the flowtables of the table";
        self.retry(WHAT, |netlink| Ok(netlink.flowtables(family)?.remove(FLOWTABLE)))
    }

    /// Probes whether the kernel has flowtables, and leaves nothing behind.
    ///
    /// # Errors
    /// It has none ([`KernelError::is_unsupported`]), or does not answer.
    pub fn try_flowtable(&mut self, family: Family) -> Result<(), KernelError> {
        self.drain();
        let batch = Batch::try_flowtable(family, self.sequence);
        self.sequence = self.sequence.wrapping_add(batch.messages());
        self.send(batch.as_slice())?;
        self.outcome(family, &Batch::TRY_FLOWTABLE, &batch)
    }
}
