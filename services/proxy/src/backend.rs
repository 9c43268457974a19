//! The interface between the proxy and what makes rules of Services.
//!
//! Owns: [`Backend`], [`Driver`], [`Observer`] and the values that pass between them and the proxy. In and out: declarations.
//!
//! The proxy (this crate) follows the agent, keeps the pace, retries, serves and reports; it names no backend. A backend is a
//! crate of its own below `services/proxy/backends/`, which depends on this one; the binary chooses the [`Driver`].
//!
//! # Contract
//!
//! - **Wanted state.** [`Backend::set_service`], [`Backend::set_node`] and [`Backend::set_interfaces`] change what is wanted.
//!   They do no I/O. Rules are not touched before the first [`Backend::sync`], which comes after a full state of the agent.
//! - **Families.** Each IP family succeeds and fails by itself: an error of one must not stop the other. A backend that has
//!   one state for both families (a user-space proxy, maps that both share) may bring both up to date when it is called for
//!   one of them, and has nothing to do when it is called for the other.
//! - **What is there.** [`Driver::open`] takes over what an earlier run left, also one with another layout or of another
//!   version: what can be kept is kept (connections, session affinity, numbers of Services), and the rules stay in effect until
//!   the first sync, which compares everything. Rules of other programs are left alone.
//! - **Sync.** After an error, or where the backend is not certain what the kernel has, the next sync is a full one: it reads
//!   everything, compares and repairs ([`Outcome::full`]). Else it applies the changes since the last one, in one commit or in
//!   an order in which traffic meets the old state or the new one.
//! - **Drift.** [`Observer::read`] may take seconds and runs on a thread of its own, while syncs and other programs commit;
//!   [`Backend::check`] then compares, and has to tell drift from changes that came after the reading.
//! - **Stopping.** Dropping a backend leaves the rules in effect. Only [`Driver::remove_rules`] removes them.

use std::{collections::BTreeMap, fmt, time::Instant};

use keelson_client::ServiceName;
use keelson_proto::proxy as pb;

use crate::{
    addresses::Interface,
    conntrack::UdpFrontend,
    explain::Question,
    model::{Conflict, Family, ServicePort},
    options::{NodeConfig, Options},
};

/// Why a backend cannot do something.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct BackendError {
    message: String,
    /// Only an administrator can help: a capability or a kernel feature is missing. A retry is made nevertheless.
    pub is_fatal: bool,
}

impl BackendError {
    /// With the text of an error of the backend.
    #[must_use]
    pub fn new(error: &impl fmt::Display, is_fatal: bool) -> Self {
        Self { message: error.to_string(), is_fatal }
    }
}

/// What does not change about a backend.
#[derive(Debug, Clone, Copy)]
pub struct BackendInfo {
    /// Its value in `proxy.backend`, and its name in reports and metrics.
    pub name: &'static str,
    /// kube-proxy's name of the mode, for `/proxyMode`.
    pub proxy_mode: &'static str,
    /// Capabilities and kernel features without which it cannot be opened.
    pub requirements: &'static str,
}

/// How a backend is opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// To program. Whether the kernel can do everything that may be needed is tried out, and nothing stays of the trial.
    Program,
    /// To compare what is there with what is wanted, without changing anything.
    Compare,
    /// To print what is wanted, as on a node without rules. Needs no capability.
    Print,
}

/// Whose rules are removed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RuleOwner {
    /// Every rule that this backend makes, whatever version made it.
    Keelson,
    /// Rules of a kube-proxy of the same mode; those of Keelson stay.
    KubeProxy,
}

/// Opens a backend, and removes what it left.
pub trait Driver: Sync {
    /// What does not change.
    fn info(&self) -> BackendInfo;

    /// Opens the backend in the network namespace of the calling thread.
    ///
    /// # Errors
    /// The node supports no IP family, a capability is missing, or the kernel does not answer. A single family that the node
    /// does not support is no error: see [`Backend::disabled_reason`].
    fn open(&self, options: &Options, access: Access) -> Result<Box<dyn Backend>, BackendError>;

    /// Removes rules. `removed` is called with the name of each object that is gone.
    ///
    /// # Errors
    /// Some are left; those that were named are gone.
    fn remove_rules(&self, owner: RuleOwner, removed: &mut dyn FnMut(String)) -> Result<(), BackendError>;
}

/// Result of a sync, repair or maintenance.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Outcome {
    /// Everything was read and compared.
    pub full: bool,
    /// Something was changed back that another program had changed.
    pub repaired: bool,
    /// Commits.
    pub transactions: usize,
    /// Elements that were added: the unit that the cost of a change is proportional to.
    pub added: usize,
    /// Elements that were deleted.
    pub deleted: usize,
    /// Larger objects that were made, written again or deleted: chains and sets, programs, listeners.
    pub structure: usize,
}

impl Outcome {
    /// Number of objects that were written or deleted. An element that got another value counts twice.
    #[must_use]
    pub const fn operations(&self) -> usize {
        self.added + self.deleted + self.structure
    }

    /// Whether nothing had to be changed.
    #[must_use]
    pub const fn is_nothing(&self) -> bool {
        self.operations() == 0
    }
}

/// Result of [`Backend::check`].
#[derive(Debug)]
pub enum Check {
    /// Changes wait for a sync: call again soon. What was read is kept.
    Postponed,
    /// The kernel could not be asked; nothing was changed and nothing is in doubt.
    Unread(BackendError),
    /// Compared, and repaired where needed. After an error, the next sync compares everything.
    Done(Result<Outcome, BackendError>),
}

/// Totals of the wanted state of a family. Cheap: read after every sync.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Counts {
    /// Services that have a service port of the family.
    pub services: usize,
    /// Service ports.
    pub service_ports: usize,
    /// Endpoints that traffic goes to, by service port, each once.
    pub endpoints: usize,
    /// Elements (see [`Outcome::added`]).
    pub elements: usize,
}

/// The wanted state of a family, for `keelson proxy state`.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Details {
    /// Number of chains or programs.
    pub chains: usize,
    /// Number of elements by set or map, without empty ones.
    pub elements: BTreeMap<String, u64>,
    /// Frontends that more than one service port claims.
    pub conflicts: Vec<Conflict>,
    /// Service ports that request session affinity and do not get it.
    pub without_affinity: usize,
}

/// Clients with session affinity, by map. All maps of a family are listed.
pub type AffinityClients = Vec<(&'static str, usize)>;

/// Writes a ruleset as it was when it was copied. May take seconds, and needs no lock.
pub type RulesetPrinter = Box<dyn FnOnce(&mut dyn fmt::Write) -> fmt::Result + Send>;

/// Programs Services. See the [contract](self).
pub trait Backend: Send {
    /// What does not change.
    fn info(&self) -> BackendInfo;

    /// Why this node does not support a family; `None`: it does. Does not change while the backend is open. Of a disabled
    /// family, nothing is wanted and nothing is synced.
    fn disabled_reason(&self, family: Family) -> Option<&str>;

    /// Settings that have no effect here, with the reason. Reported once as events.
    fn limitations(&self) -> Vec<String> {
        Vec::new()
    }

    /// Status of optional features, one line each, shown with the settings.
    fn features(&self) -> Vec<String> {
        Vec::new()
    }

    /// What error messages and events name as the place of a family's rules: `table ip keelson`.
    fn scope(&self, family: Family) -> &'static str;

    /// A Service has these ports of a family, and no others; none: it is gone.
    fn set_service(&mut self, family: Family, service: &ServiceName, ports: Vec<ServicePort>);

    /// What rules of a family depend on besides Services. Comes before the first sync, and after every change.
    fn set_node(&mut self, node: NodeConfig);

    /// The interfaces of the node.
    fn set_interfaces(&mut self, _interfaces: &[Interface]) {}

    /// Whether all of a family's rules have been in effect at least once since opening.
    fn has_synced(&self, family: Family) -> bool;

    /// Brings a family to the wanted state, incrementally if possible, else in full.
    ///
    /// # Errors
    /// The kernel may have an older state in parts. The next call is a full sync.
    fn sync(&mut self, family: Family, now: Instant) -> Result<Outcome, BackendError>;

    /// Work that no Service waits for, such as deleting objects that have been unused for long. Called about once a second for
    /// each synced family of which nothing is pending.
    ///
    /// # Errors
    /// As of [`Self::sync`].
    fn maintain(&mut self, _family: Family, _now: Instant) -> Result<Outcome, BackendError> {
        Ok(Outcome::default())
    }

    /// Stops offloading UDP flows, because their conntrack entries cannot be deleted. Whether that changed anything; the next
    /// sync brings it to the kernel.
    fn stop_udp_offload(&mut self, _family: Family) -> bool {
        false
    }

    /// A way to read the kernel beside this backend, in the network namespace of the calling thread.
    ///
    /// # Errors
    /// The kernel does not allow it.
    fn observer(&self) -> Result<Box<dyn Observer>, BackendError>;

    /// Whether another program may have changed a family's rules since they were compared last. Cheap. If so, they are read
    /// with [`Observer::read`] and then passed to [`Self::check`].
    ///
    /// # Errors
    /// The kernel does not answer.
    fn begin_check(&mut self, family: Family) -> Result<bool, BackendError>;

    /// Compares what an observer of this backend read last of a family, and repairs drift.
    fn check(&mut self, family: Family, now: Instant) -> Check;

    /// What a full sync of all families would change, one line each.
    ///
    /// # Errors
    /// The kernel cannot be read.
    fn changes(&mut self) -> Result<Vec<String>, BackendError>;

    /// Copies the wanted state of all families, to be printed without this backend.
    fn ruleset(&self) -> RulesetPrinter;

    /// How the rules treat the first packet of a connection. `local`: the addresses of the node. Called for synced families
    /// only. Text, JSON and page are rendered from the result.
    fn explain(&self, question: &Question, local: &[std::net::IpAddr]) -> pb::Explanation;

    /// Totals of a family.
    fn counts(&self, family: Family) -> Counts;

    /// What `keelson proxy state` shows of a family.
    fn details(&self, family: Family) -> Details;

    /// The UDP service ports of a family that have a serving endpoint.
    fn udp_frontends(&self, family: Family) -> Vec<UdpFrontend>;

    /// Maximum number of clients with session affinity in each map.
    fn affinity_capacity(&self) -> u64;
}

/// Reads the kernel beside a [`Backend`], without its lock.
pub trait Observer: Send {
    /// Reads a family's rules, and keeps them for [`Backend::check`].
    ///
    /// # Errors
    /// They cannot be read.
    fn read(&mut self, family: Family) -> Result<(), BackendError>;

    /// Counts the clients with session affinity; `None`: there are no rules.
    ///
    /// # Errors
    /// The kernel does not answer.
    fn affinity_clients(&mut self, family: Family) -> Result<Option<AffinityClients>, BackendError>;

    /// Rules of other service proxies in the part of the kernel that the backend uses, each described in words.
    ///
    /// # Errors
    /// The kernel does not answer.
    fn other_proxies(&mut self) -> Result<Vec<(Family, String)>, BackendError>;
}

#[cfg(test)]
pub(crate) mod fake;
