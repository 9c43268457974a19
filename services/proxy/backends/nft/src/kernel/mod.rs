//! Speaks with the kernel's nf_tables over netlink.
//!
//! Owns: [`NfTables`], what may be asked of the kernel, and [`Netlink`], which asks it; [`Found`], what it has; [`KernelError`].
//! In: [`Change`]s. Out: one atomic transaction for each [`NfTables::commit`]. No `nft` process is needed. Nothing here knows
//! of Services, and nothing here decides.
//!
//! How long a transaction takes, which is how long it holds the kernel's lock (nf_tables has one a network namespace; other
//! transactions wait for it, packets and dumps do not): 0.01 ms for an element, 0.2 ms for 1,000, 10 ms for 10,000, 150 ms
//! for 100,000 (1.5 microseconds an element, half of that to delete; above some thousand, the kernel also enlarges its hash
//! tables).

mod codec;
mod compare;
mod elements;
mod encode;
mod error;
mod found;
mod netlink;
mod parse;

use keelson_proxy::model::Family;

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

/// One step of a transaction.
#[derive(Debug, Clone, PartialEq)]
#[expect(
    clippy::large_enum_variant,
    reason = "nearly all changes are of elements, and boxes of them would be slower"
)]
pub enum Change {
    /// Our table is there afterwards, whether or not it was.
    MakeTable,
    /// Our table goes, with all that is in it.
    DeleteTable,
    /// A chain that there is not, without rules.
    MakeChain(Chain),
    /// A chain goes, with its rules; nothing may lead to it.
    DeleteChain(Chain),
    /// The rules of a chain are these and no others.
    Rules(Chain, Vec<Rule>),
    /// A set that there is not, empty.
    MakeSet(SetName),
    /// A chain of our table that is not ours goes.
    DeleteChainNamed(String),
    /// A set of our table that is not ours goes, with its elements; no rule may name it.
    DeleteSetNamed(String),
    /// Our flowtable, which is not there, without devices.
    MakeFlowtable,
    /// A flowtable goes, with its flows, which are filtered and counted as others from then on; no rule may name it.
    DeleteFlowtable(String),
    /// Interfaces that our flowtable takes packets from besides those that it has.
    AddDevices(Vec<String>),
    /// Interfaces that it has and is to take no packets from any more.
    RemoveDevices(Vec<String>),
    /// One element. The order of elements that stand together is not kept, except that what is added and then deleted,
    /// or deleted and then added, is so.
    Element(Op),
}

/// The rules of the network namespace at one time, in all tables.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Generation {
    /// Counts up by one with every transaction of any program, and leaves 0 out. (The kernel also tells a process and
    /// its name, but those are of the one that asks.)
    pub id: u32,
}

/// Number of clients in each of the maps of session affinity, in the order of [`SetName::AFFINITY`].
pub type AffinityClients = [usize; AFFINITY_GROUPS as usize];

/// A connection to nf_tables, of which tests imitate some calls. Those that are not declared here are made by [`Self::netlink`].
pub trait NfTables: Send {
    /// The connection.
    fn netlink(&mut self) -> &mut Netlink;

    /// See [`Netlink::commit`].
    ///
    /// # Errors
    /// As there.
    fn commit(&mut self, family: Family, changes: &[Change]) -> Result<(), KernelError> {
        self.netlink().commit(family, changes)
    }

    /// See [`Netlink::read`].
    ///
    /// # Errors
    /// As there.
    fn read(&mut self, family: Family) -> Result<Option<Found>, KernelError> {
        self.netlink().read(family)
    }

    /// See [`Netlink::read_structure`].
    ///
    /// # Errors
    /// As there.
    fn read_structure(&mut self, family: Family) -> Result<Option<Found>, KernelError> {
        self.netlink().read_structure(family)
    }

    /// See [`Netlink::read_flowtable`].
    ///
    /// # Errors
    /// As there.
    fn read_flowtable(&mut self, family: Family) -> Result<Option<FoundFlowtable>, KernelError> {
        self.netlink().read_flowtable(family)
    }

    /// See [`Netlink::try_flowtable`].
    ///
    /// # Errors
    /// As there.
    fn try_flowtable(&mut self, family: Family) -> Result<(), KernelError> {
        self.netlink().try_flowtable(family)
    }
}

impl NfTables for Netlink {
    fn netlink(&mut self) -> &mut Netlink {
        self
    }
}
