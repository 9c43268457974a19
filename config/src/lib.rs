//! Keelson's settings: sources, validation and effective values.
//!
//! In: a TOML file, a map of environment variables, the flags `--set` and `--feature-gates`, and the host name
//! ([`Sources`]). Out: typed, validated [`Settings`] with the origin of every value ([`Loaded`]), or all problems at
//! once ([`Errors`]), each with its place and a correction. Nothing here reads the process environment or keeps
//! state: equal sources give equal results.
//!
//! Precedence, rising: default, file, environment, flag. Every layer is checked completely, so that a wrong value in
//! the file is reported even if a flag overrides it.
//!
//! All keys are in one table (module `settings`). The structs, the checks, [`schema`], the shipped example file and
//! the page `docs/configuration.md` are generated from it.
//!
//! **No setting holds a secret.** Registry credentials come with each pull from the caller and never pass through
//! here, so settings may be shown, logged and served by the debug endpoint. Addresses with a user name or password
//! are rejected, and not repeated in the error.

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
pub use net::{HostName, InterfacePattern, NodePortAddresses, ProxyName};
pub use origin::Origin;
pub use rendering::{Format, render_show};
pub use settings::{
    Agent, Cri, Debug, Endpoints, Key, Kube, Node, Proxy, Pulls, Section, Settings, schema, sections,
};
pub use size::ByteSize;
pub use values::{
    DetectLocalMode, DirectReturnHook, EndpointsSource, EndpointsWatch, Enforce, IptablesVariant,
    IpvsScheduler, ListenSpec, LogFormat, ProxyBackend, ProxyProtocol, Register, Role, SocketMode,
    SocketSpec, WhenContested, WhenFull,
};
pub use warnings::Warning;
