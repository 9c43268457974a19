//! Access to the kernel's nf_tables over netlink.
//!
//! Owns: [`NfTables`], the operations on the kernel, and [`Netlink`], which implements them; [`Found`], the kernel's
//! state; [`KernelError`]. In: [`Change`]s. Out: one atomic transaction per [`NfTables::commit`]. No `nft` process is
//! needed. Nothing here knows Services, and nothing here decides.
//!
//! Duration of a transaction, during which it holds the kernel's lock (nf_tables has one per network namespace; other
//! transactions wait for it, packets and dumps do not): 0.01 ms for an element, 0.2 ms for 1,000, 10 ms for 10,000, 150
//! ms for 100,000 (1.5 microseconds per element, half of that to delete; above some thousand, the kernel also enlarges
//! its hash tables).

mod codec;
mod compare;
mod elements;
mod encode;
mod error;
mod found;
mod netlink;
mod parse;

use ipnet::IpNet;
use keelson_proxy::{
    conntrack::{ConntrackError, translated_between},
    model::Family,
};

use super::{
    chain::Chain,
    element::{AFFINITY_GROUPS, Op, SetName},
    flowtable::FoundFlowtable,
    ruleset::Rule,
};

pub use compare::Expression;
pub use elements::{Content, Elements};
pub use error::{ErrorKind, KernelError};
pub use found::{Found, FoundChain, FoundHook, FoundSet};
pub use netlink::Netlink;

pub use super::ruleset::TABLE;

#[derive(Debug, Clone, PartialEq)]
#[expect(
    clippy::large_enum_variant,
    reason = "nearly all changes are of elements, and boxes of them would be slower"
)]
pub enum Change {
    /// Creates our table if it does not exist.
    MakeTable,
    /// Deletes our table, with everything in it.
    DeleteTable,
    /// Creates a chain without rules; it must not exist.
    MakeChain(Chain),
    /// Deletes a chain, with its rules; nothing may refer to it.
    DeleteChain(Chain),
    Rules(Chain, Vec<Rule>),
    /// Creates an empty set; it must not exist.
    MakeSet(SetName),
    /// Deletes a chain of our table that is not ours.
    DeleteChainNamed(String),
    /// Deletes a set of our table that is not ours, with its elements; no rule may refer to it.
    DeleteSetNamed(String),
    /// Creates our flowtable without devices; it must not exist.
    MakeFlowtable,
    /// Deletes a flowtable. Its flows are filtered and counted like others from then on. No rule may refer to it.
    DeleteFlowtable(String),
    AddDevices(Vec<String>),
    RemoveDevices(Vec<String>),
    /// The order of consecutive elements is not kept, except between an addition and a deletion of the same key.
    Element(Op),
}

/// The version of the rules of the network namespace, of all tables.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Generation {
    /// Incremented by every transaction of any program; never 0. (The kernel also returns a process and its name, but
    /// those are of the process that asks.)
    pub id: u32,
}

/// Number of clients in each session affinity map, in the order of [`SetName::AFFINITY`].
pub type AffinityClients = [usize; AFFINITY_GROUPS as usize];

/// A connection to nf_tables. Tests replace some operations; those that are not declared here are always those of
/// [`Self::netlink`].
pub trait NfTables: Send {
    fn netlink(&mut self) -> &mut Netlink;

    /// See [`Netlink::commit`].
    fn commit(&mut self, family: Family, changes: &[Change]) -> Result<(), KernelError> {
        self.netlink().commit(family, changes)
    }

    /// See [`Netlink::read`].
    fn read(&mut self, family: Family) -> Result<Option<Found>, KernelError> {
        self.netlink().read(family)
    }

    /// See [`Netlink::read_structure`].
    fn read_structure(&mut self, family: Family) -> Result<Option<Found>, KernelError> {
        self.netlink().read_structure(family)
    }

    /// See [`Netlink::read_flowtable`].
    fn read_flowtable(&mut self, family: Family) -> Result<Option<FoundFlowtable>, KernelError> {
        self.netlink().read_flowtable(family)
    }

    /// See [`translated_between`].
    fn translated_flows(&mut self, family: Family, pods: IpNet) -> Result<usize, ConntrackError> {
        translated_between(family, pods)
    }

    /// See [`Netlink::try_flowtable`].
    fn try_flowtable(&mut self, family: Family) -> Result<(), KernelError> {
        self.netlink().try_flowtable(family)
    }
}

impl NfTables for Netlink {
    fn netlink(&mut self) -> &mut Netlink {
        self
    }
}
