//! The flowtable as the kernel has it.
//!
//! Owns: [`FoundFlowtable`] and the properties of our flowtable. In: nothing. Out: values.
//!
//! The kernel looks up flows when a packet comes in by one of the devices, before conntrack and all chains. Before
//! Linux 6.16, a device that disappears leaves the flowtable by itself; since then, it has to be removed.

use std::collections::BTreeSet;

/// Maximum number of devices of our flowtable: more do not fit into one answer of the kernel.
pub(crate) const DEVICES_MAX: usize = 1024;

/// `NF_NETDEV_INGRESS`, the hook of every flowtable.
pub(super) const INGRESS: u32 = 0;

/// The priority of the hook: `filter`.
pub(super) const PRIORITY: i32 = 0;

/// `NF_FLOWTABLE_COUNTER`: conntrack counts packets, if accounting is on (`nf_conntrack_acct`).
pub(super) const FLAGS: u32 = 2;

#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct FoundFlowtable {
    /// 0 is ingress.
    pub hook: u32,
    /// Lower is earlier.
    pub priority: i32,
    /// Bits of `NF_FLOWTABLE_*`: 1 is hardware offload, 2 the counter.
    pub flags: u32,
    /// Names of the input interfaces.
    pub devices: BTreeSet<String>,
}

impl FoundFlowtable {
    /// Whether it has our hook, priority and flags; devices are not compared.
    #[must_use]
    pub fn is_ours(&self) -> bool {
        (self.hook, self.priority, self.flags) == (INGRESS, PRIORITY, FLAGS)
    }
}
