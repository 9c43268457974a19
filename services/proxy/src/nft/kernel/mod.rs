//! Speaks with the kernel's nf_tables over netlink.
//!
//! Owns: [`Tables`], what may be asked of the kernel, and [`Netlink`], which asks it; [`Found`], what it has; [`KernelError`].
//! In: [`Change`]s. Out: one atomic transaction for each [`Tables::commit`]. No `nft` process is needed. Nothing here knows
//! of Services, and nothing here decides.
//!
//! How long a transaction takes, which is how long it holds the kernel's lock (nf_tables has one a network namespace; other
//! transactions wait for it, packets and dumps do not): 0.01 ms for an element, 0.2 ms for 1,000, 10 ms for 10,000, 150 ms
//! for 100,000 (1.5 microseconds an element, half of that to delete; above some thousand, the kernel also enlarges its hash
//! tables). See [`QUICK`] and [`SHORT`].

mod codec;
mod compare;
mod elements;
mod encode;
mod error;
mod found;
mod netlink;
mod parse;

use crate::model::Family;

use super::{
    chain::Chain,
    element::{Op, SetName},
    ruleset::Rule,
};

pub use compare::Expression;
pub use elements::Elements;
pub use error::{KernelError, Kind};
pub use found::{Found, FoundChain, FoundHook, FoundSet};
pub use netlink::Netlink;

pub use super::ruleset::TABLE;

/// A transaction of up to so many elements takes about a millisecond.
pub const QUICK: usize = 1_024;

/// A transaction of up to so many elements takes some 20 ms: what one of a larger load may take.
pub const SHORT: usize = 16_384;

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
    /// A set goes, with its elements; no rule may name it.
    DeleteSet(SetName),
    /// A chain of our table that is not ours goes.
    DeleteChainNamed(String),
    /// A set of our table that is not ours goes.
    DeleteSetNamed(String),
    /// All elements of a set go.
    FlushSet(SetName),
    /// One element. The order of elements that stand together is not kept, except that what is added and then deleted,
    /// or deleted and then added, is so.
    Element(Op),
}

/// The rules of the network namespace at one time, in all tables.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Generation {
    /// Counts up by one with every transaction, whoever makes it, and leaves 0 out. (The kernel also tells a process and
    /// its name, but those are of the one that asks.)
    pub id: u32,
}

/// What the kernel's nf_tables can be asked.
pub trait Tables: Send {
    /// Makes all changes, or none of them.
    ///
    /// # Errors
    /// The kernel refused, and has nothing of it ([`KernelError::is_undecided`] tells the one exception).
    fn commit(&mut self, family: Family, changes: &[Change]) -> Result<(), KernelError>;

    /// Our table of a family, whole and from one generation. None if there is none.
    ///
    /// # Errors
    /// It cannot be read, or changed whenever it was read.
    fn read(&mut self, family: Family) -> Result<Option<Found>, KernelError>;

    /// The last transaction.
    ///
    /// # Errors
    /// The kernel does not say.
    fn generation(&mut self) -> Result<Generation, KernelError>;

    /// Every table of both families, ours among them, by family and name.
    ///
    /// # Errors
    /// The kernel does not say.
    fn tables(&mut self) -> Result<Vec<(Family, String)>, KernelError>;

    /// Whether a table, whosever it is, has a chain of this name.
    ///
    /// # Errors
    /// The kernel does not say.
    fn has_chain(&mut self, family: Family, table: &str, chain: &str) -> Result<bool, KernelError>;

    /// Deletes a table, whosever it is.
    ///
    /// # Errors
    /// There is none of the name, or the kernel refused.
    fn delete_table(&mut self, family: Family, name: &str) -> Result<(), KernelError>;
}
