//! The interface between the proxy and its backends.
//!
//! Owns: [`Backend`], [`Driver`], [`Observer`] and the values that pass between them and the proxy. In and out: declarations,
//! and [`Snapshots`].
//!
//! The proxy (this crate) follows the agent, paces and retries syncs, runs the servers and reports. A backend is a crate of
//! its own below `services/proxy/backends/`, which depends on this one; the binary chooses the [`Driver`]. This crate
//! calls a backend by these traits alone. It knows single backends only by their settings ([`crate::options`]) and by
//! rules that other programs leave ([`crate::leftovers`]).
//!
//! # Contract
//!
//! - **Wanted state.** [`Backend::set_service`], [`Backend::set_node`] and [`Backend::set_interfaces`] change the
//!   wanted state. They do no I/O. Rules are not changed before the first [`Backend::sync`], which follows a full state
//!   of the agent.
//! - **Families.** The IP families are independent: an error in one must not stop the other. A backend with one state
//!   for both families (a user-space proxy, shared maps) may update both when it is called for one, and does nothing
//!   when it is called for the other.
//! - **Existing rules.** [`Driver::open`] adopts what an earlier run left, also with another layout or of another
//!   version. It keeps what it can (connections, session affinity, numbers of Services). The rules stay in effect until
//!   the first sync, which compares everything. Rules of other programs are not touched.
//! - **Sync.** After an error, or if the backend is not certain of the kernel's state, the next sync is a full one: it
//!   reads everything, compares and repairs ([`Outcome::full`]). Otherwise it applies the changes since the last sync,
//!   in one commit or in an order in which traffic meets the old state or the new one.
//! - **Drift.** [`Observer::read`] may take seconds and runs on a thread of its own, while syncs and other programs
//!   commit. [`Backend::check`] then compares, and must distinguish drift from changes after the read.
//! - **Stopping.** Dropping a backend leaves the rules in effect. Only [`Driver::remove_rules`] removes them. A backend that
//!   serves connections itself ends them after [`Backend::stop`].
//! - **Take-over.** When another backend has synced for the first time, the proxy removes the rules that this one left
//!   ([`crate::takeover`]).

use std::{collections::BTreeMap, fmt, time::Instant};

use ipnet::IpNet;
use keelson_client::ServiceName;
use keelson_proto::proxy as pb;

pub use self::snapshots::Snapshots;

use crate::{
    addresses::Interface,
    conntrack::UdpFrontend,
    explain::Question,
    model::{Conflict, Family, ServicePort},
    options::{NodeConfig, Options},
};

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct BackendError {
    message: String,
    /// An administrator has to act: a capability or a kernel feature is missing. The sync is retried nevertheless.
    pub is_fatal: bool,
}

impl BackendError {
    #[must_use]
    pub fn new(error: &impl fmt::Display, is_fatal: bool) -> Self {
        Self { message: error.to_string(), is_fatal }
    }
}

#[derive(Debug, Clone, Copy)]
pub struct BackendInfo {
    /// The value in `proxy.backend`, and the name in reports and metrics.
    pub name: &'static str,
    /// kube-proxy's name of the mode, for `/proxyMode`.
    pub proxy_mode: &'static str,
    /// Capabilities and kernel features that [`Driver::open`] needs.
    pub requirements: &'static str,
    /// Its rules are chains and IP sets `KEELSON-*` of iptables. Its first sync replaces those of another such backend.
    pub has_chains: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// To program. Probes the kernel for every feature that may be needed, and leaves nothing behind.
    Program,
    /// To compare the kernel with the wanted state, without changes.
    Compare,
    /// To print the wanted state, as on a node without rules. Needs no capability.
    Print,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RuleOwner {
    /// Every rule of this backend, of any version.
    Keelson,
    /// Rules of a kube-proxy of the same mode; those of Keelson stay.
    KubeProxy,
}

pub trait Driver: Sync {
    fn info(&self) -> BackendInfo;

    /// The name of another backend that serves a part of the traffic for this one, with its own rules. It is claimed as well,
    /// and not taken over.
    fn includes(&self) -> Option<&'static str> {
        None
    }

    /// Opens the backend in the network namespace of the calling thread.
    ///
    /// # Errors
    /// The node supports no IP family, a capability is missing, or the kernel does not answer. One unsupported family
    /// is no error: see [`Backend::disabled_reason`].
    fn open(&self, options: &Options, access: Access) -> Result<Box<dyn Backend>, BackendError>;

    /// Why `auto` chooses another backend, although this one can be opened: a setting, or a property of the node, that does not
    /// pass by itself. Asked after [`Self::open`] has succeeded.
    fn reason_against(&self, _options: &Options) -> Option<String> {
        None
    }

    /// Describes the rules that an earlier run left, one line each. A backend whose rules end with the process has none.
    ///
    /// # Errors
    /// They cannot be listed: a capability or a program is missing, or the kernel does not answer.
    fn find_rules(&self) -> Result<Vec<String>, BackendError> {
        Ok(Vec::new())
    }

    /// Whether established connections stay translated by the kernel while only this backend has rules. False for
    /// backends without NAT chains: with the last NAT chain the kernel stops translating.
    fn keeps_translation(&self) -> bool {
        true
    }

    /// Makes what the kernel needs to translate established connections of a family without the rules that began to, if
    /// this backend can. Called before rules of others are removed for a backend that does not [keep
    /// translation](Self::keeps_translation).
    fn preserve_translation(&self, _family: Family) -> Result<(), BackendError> {
        Ok(())
    }

    /// Number of connections that end with the rules, because the kernel translates them by the rules themselves.
    fn virtual_connections(&self) -> usize {
        0
    }

    /// Lets `next`, which has taken over, decide about new connections: removes rules that would come before it, and no rule
    /// that established connections need. Called repeatedly while [`Self::virtual_connections`] are waited for.
    fn release_new_connections(
        &self,
        _next: &dyn Driver,
        _removed: &mut dyn FnMut(String),
    ) -> Result<(), BackendError> {
        Ok(())
    }

    /// As [`Self::remove_rules`], for a take-over by `next`. What `next` has replaced stays, and, if it does not [keep
    /// translation](Self::keeps_translation), what the kernel needs to translate established connections.
    fn retire_rules(
        &self,
        _next: &dyn Driver,
        owner: RuleOwner,
        removed: &mut dyn FnMut(String),
    ) -> Result<(), BackendError> {
        self.remove_rules(owner, removed)
    }

    /// Removes rules. `removed` is called with the name of each removed object, also if others cannot be removed.
    fn remove_rules(&self, owner: RuleOwner, removed: &mut dyn FnMut(String)) -> Result<(), BackendError>;
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Outcome {
    /// Everything was read and compared.
    pub full: bool,
    /// Drift was repaired.
    pub repaired: bool,
    pub transactions: usize,
    /// Elements added: the unit that the cost of a change is proportional to.
    pub added: usize,
    pub deleted: usize,
    /// Larger objects that were created, rewritten or deleted: chains, sets, programs, listeners.
    pub structure: usize,
    /// Name of another backend of Keelson whose rules were replaced in place, so that nothing of them is left to remove.
    pub replaced: Option<&'static str>,
}

impl Outcome {
    /// The sum over two syncs, such as those of both families.
    #[must_use]
    pub fn plus(self, other: Self) -> Self {
        Self {
            full: self.full || other.full,
            repaired: self.repaired || other.repaired,
            transactions: self.transactions + other.transactions,
            added: self.added + other.added,
            deleted: self.deleted + other.deleted,
            structure: self.structure + other.structure,
            replaced: self.replaced.or(other.replaced),
        }
    }

    /// Number of objects that were written or deleted. An element with a new value counts twice.
    #[must_use]
    pub const fn operations(&self) -> usize {
        self.added + self.deleted + self.structure
    }

    #[must_use]
    pub const fn is_nothing(&self) -> bool {
        self.operations() == 0
    }
}

#[derive(Debug)]
pub enum Check {
    /// Changes wait for a sync: call again soon. What was read is kept.
    Postponed,
    /// The kernel cannot be read. Nothing was changed, and the known state stays trusted.
    Unread(BackendError),
    /// Compared, and repaired where needed. After an error, the next sync compares everything.
    Done(Result<Outcome, BackendError>),
}

/// Totals of the wanted state of a family. Cheap: read after every sync.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Counts {
    pub services: usize,
    pub service_ports: usize,
    /// Endpoints that receive traffic, each once per service port.
    pub endpoints: usize,
    /// See [`Outcome::added`].
    pub elements: usize,
}

#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Details {
    /// Number of chains or programs.
    pub chains: usize,
    /// Number of elements by set or map, without empty ones.
    pub elements: BTreeMap<String, u64>,
    pub conflicts: Vec<Conflict>,
    /// Service ports that request session affinity and do not get it.
    pub without_affinity: usize,
}

/// How full a bounded map is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MapFill {
    pub map: &'static str,
    pub elements: usize,
    pub max: usize,
}

/// Number of clients with session affinity, by map. All maps of a family are listed.
pub type AffinityClients = Vec<(&'static str, usize)>;

/// Prints a copy of a ruleset. May take seconds, and needs no lock.
pub type RulesetPrinter = Box<dyn FnOnce(&mut dyn fmt::Write) -> fmt::Result + Send>;

/// Waits until connections that end with the process have ended, or had their time. Needs no lock.
pub type Drain = Box<dyn FnOnce() + Send>;

/// Programs Services. See the [contract](self).
pub trait Backend: Send {
    fn info(&self) -> BackendInfo;

    /// Why this node does not support a family; `None` if it does. Constant while the backend is open. A disabled
    /// family has no wanted state and is not synced.
    fn disabled_reason(&self, family: Family) -> Option<&str>;

    /// Settings that have no effect here, with the reason. Reported once as events.
    fn limitations(&self) -> Vec<String> {
        Vec::new()
    }

    /// Status of optional features, one line each, shown with the settings.
    fn features(&self) -> Vec<String> {
        Vec::new()
    }

    /// Name of a family's rules in error messages and events, such as `table ip keelson`.
    fn scope(&self, family: Family) -> &'static str;

    /// Sets all ports of a Service in a family; empty: the Service is deleted.
    fn set_service(&mut self, family: Family, service: &ServiceName, ports: Vec<ServicePort>);

    /// Called before the first sync, and after every change.
    fn set_node(&mut self, node: NodeConfig);

    fn set_interfaces(&mut self, _interfaces: &[Interface]) {}

    /// The addresses of the node's interfaces, of both families, without those of [`addresses::SERVICE_INTERFACES`].
    /// Called before [`Self::set_node`].
    ///
    /// [`addresses::SERVICE_INTERFACES`]: crate::addresses::SERVICE_INTERFACES
    fn set_addresses(&mut self, _local: &[std::net::IpAddr]) {}

    /// Whether all rules of a family have been in effect at least once since opening.
    fn has_synced(&self, family: Family) -> bool;

    /// Brings a family to the wanted state, incrementally if possible, otherwise in full.
    ///
    /// # Errors
    /// The kernel may keep parts of an older state. The next call is a full sync.
    fn sync(&mut self, family: Family, now: Instant) -> Result<Outcome, BackendError>;

    /// Work that no Service waits for, such as deleting objects that have long been unused. Called about once a second
    /// for each synced family without pending changes.
    ///
    /// # Errors
    /// As for [`Self::sync`].
    fn maintain(&mut self, _family: Family, _now: Instant) -> Result<Outcome, BackendError> {
        Ok(Outcome::default())
    }

    /// Stops offloading UDP flows, because their conntrack entries cannot be deleted. The next sync programs it.
    /// Returns whether UDP flows were offloaded before.
    fn stop_udp_offload(&mut self, _family: Family) -> bool {
        false
    }

    /// Accepts no more connections, because the process stops. Nothing but [`Drop`] follows, or calls that may fail.
    /// `None`: connections do not depend on the process.
    fn stop(&mut self) -> Option<Drain> {
        None
    }

    /// Opens a second connection to read the kernel, in the network namespace of the calling thread.
    fn observer(&self) -> Result<Box<dyn Observer>, BackendError>;

    /// Whether another program may have changed a family's rules since the last comparison. Cheap. If so, they are read
    /// with [`Observer::read`] and then passed to [`Self::check`].
    fn begin_check(&mut self, family: Family) -> Result<bool, BackendError>;

    /// Compares what an observer of this backend read last of a family, and repairs drift.
    fn check(&mut self, family: Family, now: Instant) -> Check;

    /// What a full sync of all families would change, one line each.
    fn changes(&mut self) -> Result<Vec<String>, BackendError>;

    /// Copies the wanted state of all families, to be printed without this backend.
    fn ruleset(&self) -> RulesetPrinter;

    /// How the rules treat the first packet of a connection. `local`: the addresses of the node. Called for synced
    /// families only. Text, JSON and page are rendered from the result.
    fn explain(&self, question: &Question, local: &[std::net::IpAddr]) -> pb::Explanation;

    fn counts(&self, family: Family) -> Counts;

    /// What `keelson proxy state` shows of a family.
    fn details(&self, family: Family) -> Details;

    /// Bounded maps besides those of session affinity, for both families. Cheap.
    fn map_fills(&self) -> Vec<MapFill> {
        Vec::new()
    }

    /// Service ports for which a bounded map has no room. Cheap.
    fn left_out(&self) -> usize {
        0
    }

    /// The network between whose pods no packet of TCP and UDP needs the rules any more, as far as they are in the kernel:
    /// what is translated there goes by an address of the node.
    fn untracked_pods(&self, _family: Family) -> Option<IpNet> {
        None
    }

    /// What programs in the kernel have decided and how often, by names for metrics. Cheap.
    fn decisions(&self) -> Vec<(&'static str, u64)> {
        Vec::new()
    }

    /// The same of the programs of direct return.
    fn direct_return(&self) -> Vec<(&'static str, u64)> {
        Vec::new()
    }

    /// The same of the program of pod devices.
    fn pod_packets(&self) -> Vec<(&'static str, u64)> {
        Vec::new()
    }

    /// The UDP service ports of a family that have a serving endpoint.
    fn udp_frontends(&self, family: Family) -> Vec<UdpFrontend>;

    /// Maximum number of clients with session affinity in each map.
    fn affinity_capacity(&self) -> u64;
}

/// Reads the kernel without the lock of the [`Backend`].
pub trait Observer: Send {
    /// Reads a family's rules, and keeps them for [`Backend::check`].
    fn read(&mut self, family: Family) -> Result<(), BackendError>;

    /// Counts the clients with session affinity; `None` if there are no rules.
    fn affinity_clients(&mut self, family: Family) -> Result<Option<AffinityClients>, BackendError>;

    /// Describes the rules of other service proxies in the part of the kernel that the backend uses.
    fn other_proxies(&mut self) -> Result<Vec<(Family, String)>, BackendError>;
}

#[cfg(test)]
pub(crate) mod fake;
mod snapshots;
