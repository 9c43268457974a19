//! Keelson's settings: where they may come from, what each of them may be, and what is in force.
//!
//! In come a TOML file, a map of environment variables, the flags `--set` and `--feature-gates`, and the
//! host's name ([`Sources`]). Out go typed, validated [`Settings`] with the origin of every value
//! ([`Loaded`]), or every problem there is at once ([`Errors`]), each with its place and what would be right.
//! Nothing here reads the process environment or keeps state: the same sources give the same answer.
//!
//! Precedence, rising: default, file, environment, flag. Every layer is checked whole, so that a wrong value
//! in the file is reported even where a flag overrides it.
//!
//! All keys stand in one table (module `settings`): the structs, the checks, [`schema`], the shipped example file and
//! the page `docs/configuration.md` are generated from it, so that they cannot drift apart.
//!
//! **No setting holds a secret.** Registry credentials come with each pull from the caller and never pass
//! through here, which is why settings may be shown, logged and served by the debug endpoint as they are.
//! Addresses with a user name or password in them are refused, and not repeated in the error.

mod diff;
mod error;
mod gates;
mod layers;
mod load;
mod net;
mod origin;
mod primitives;
mod relations;
mod rendering;
mod setting_type;
mod settings;
pub mod shipped;
mod size;
mod suggest;
mod values;
mod warnings;

pub use diff::{Change, Changes};
pub use error::{Errors, Fault, Problem};
pub use gates::{FeatureGates, Gate, GateSpec, Stage, list_gates};
pub use load::{DEFAULT_FILE, Entry, Loaded, Sources, load};
pub use net::{HostName, InterfacePattern, NodePortAddresses};
pub use origin::Origin;
pub use rendering::{Format, render_show};
pub use settings::{
    Agent, Cri, Debug, Endpoints, Key, Kube, Node, Proxy, Pulls, Section, Settings, schema, sections,
};
pub use size::ByteSize;
pub use values::{
    DetectLocalMode, EndpointsSource, EndpointsWatch, Enforce, ListenSpec, LogFormat, ProxyBackend, Register,
    Role, SocketMode, SocketSpec, WhenContested, WhenFull,
};
pub use warnings::Warning;
