//! Durable state of the Keelson agent.
//!
//! Owns everything below the agent's state folder (`/var/lib/keelson` by default). In: [`Batch`]es of records. Out:
//! the confirmation that a batch is durable or a typed error, and at start the acknowledged records. The actors
//! define what records mean: to this crate a value is bytes.
//!
//! * [`StateStore`] is the interface for actors, [`SledStore`] is the store on disk, [`MemoryStore`] is for tests and
//!   for an agent without persistent state. Both pass one contract suite.
//! * [`DeferredStore`] opens a store in the background and never makes a caller wait for a disk that hangs. The agent
//!   uses it.
//! * [`open`] takes the folder's lock, sets a store of a newer schema aside untouched, migrates an older
//!   one, and moves a damaged one aside. It says which of these happened in [`Outcome`].
//!
//! Every call blocks: run it on a thread that may wait for a disk.
//!
//! # Folder layout
//!
//! ```text
//! <state_dir>/lock                    held while a store is open; contains the pid of its holder
//! <state_dir>/state/manifest          schema version and the generation that counts (plain text)
//! <state_dir>/state/g<N>/             one generation: a sled database
//! <state_dir>/state/g<N>/acked        number of the last batch that was acknowledged
//! <state_dir>/state.schema-<N>/       a store of a newer agent, untouched: move it back to run that agent on it
//! <state_dir>/state.damaged-<UTC>/    a store that could not be read, as sled left it when it tried to read it
//! ```
//!
//! # Panics inside sled
//!
//! sled 0.34 panics on some damaged files, at times on threads of its own. This crate runs every call into sled
//! on a thread that catches panics and turns them into errors. A process-wide panic hook that ends the process
//! has to leave those alone: ask [`panic_is_guarded`] first.

mod batch;
mod deferred;
mod engine;
mod error;
mod generation;
mod guard;
mod manifest;
mod memory;
mod migrate;
mod open;
mod seal;
mod sled_store;
mod state;
mod store;
mod table;

pub use batch::{Batch, MAX_KEY_LEN, MAX_VALUE_LEN, Op};
pub use deferred::{CALL_LIMIT, DeferredStore, Opener};
pub use error::{OpenError, StoreError};
pub use guard::panic_is_guarded;
pub use manifest::{Manifest, ManifestError};
pub use memory::MemoryStore;
pub use migrate::SCHEMA_VERSION;
pub use open::{LOCK_FILE, Opened, Outcome, folder_id, open};
pub use sled_store::SledStore;
pub use state::StoreState;
pub use store::{Keyed, StateStore, StateStoreExt, StoreStats};
pub use table::{BadRecord, Table};
