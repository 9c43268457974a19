//! The user-space backend: the tables of both families and the relay behind the interface of the proxy.
//!
//! Owns: [`UserspaceBackend`] and its observer. In: calls of the proxy. Out: listeners and connections, through
//! [`Table`] and [`Relay`].

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    net::IpAddr,
    sync::Arc,
    time::{Duration, Instant},
};

use keelson_client::ServiceName;
use keelson_proto::proxy as pb;
use keelson_proxy::{
    backend::{
        Access, AffinityClients, Backend, BackendError, BackendInfo, Check, Counts, Details, Drain, Observer,
        Outcome, RulesetPrinter, Snapshots,
    },
    conntrack::UdpFrontend,
    explain::Question,
    ip_families,
    model::{Family, Protocol, ServicePort},
    options::{DetectLocal, NodeConfig, Options, ProxyProtocol, RelayOptions},
};

use crate::{
    affinity, explain,
    print::RulesetText,
    relay::{Relay, Shared},
    routes,
    table::Table,
};

pub(crate) const INFO: BackendInfo = BackendInfo {
    name: "userspace",
    proxy_mode: "userspace",
    requirements: "none; CAP_NET_ADMIN to route the addresses of Services here, CAP_NET_BIND_SERVICE for ports below 1024",
    has_chains: false,
};

#[derive(Debug, thiserror::Error)]
pub(crate) enum OpenError {
    #[error("cannot start the threads that relay connections: {0}")]
    Threads(#[source] io::Error),
    #[error("the backend was opened to print; it cannot listen")]
    Print,
    #[error("the proxy stops; nothing is served any more")]
    Stopped,
    #[cfg(unix)]
    #[error("cannot list the addresses of this node: {0}")]
    Addresses(String),
}

impl From<OpenError> for BackendError {
    fn from(error: OpenError) -> Self {
        Self::new(&error, false)
    }
}

/// Interval of writing the file of session affinity.
const SAVE_INTERVAL: Duration = Duration::from_secs(30);

#[derive(Debug)]
pub(crate) struct UserspaceBackend {
    /// `None`: opened to compare or to print, or stopped.
    relay: Option<Relay>,
    is_stopped: bool,
    tables: [Table; 2],
    disabled: [Option<&'static str>; 2],
    options: RelayOptions,
    detect_local: DetectLocal,
    sync_period: Duration,
    /// Our routes, as read.
    snapshots: Snapshots<BTreeSet<IpAddr>>,
    /// When the file of session affinity was last written.
    last_save: Option<Instant>,
}

impl UserspaceBackend {
    pub(crate) fn open(options: &Options, access: Access) -> Result<Self, OpenError> {
        let relay = match access {
            Access::Program => Some(Relay::start(options.relay.clone()).map_err(OpenError::Threads)?),
            Access::Compare | Access::Print => None,
        };
        Ok(Self {
            relay,
            is_stopped: false,
            last_save: None,
            tables: Family::ALL.map(|family| Table::new(family, &options.relay)),
            disabled: Family::ALL.map(disabled_reason),
            options: options.relay.clone(),
            detect_local: options.detect_local.clone(),
            sync_period: options.sync_period,
            snapshots: Snapshots::default(),
        })
    }

    pub(crate) fn table(&self, family: Family) -> &Table {
        &self.tables[family as usize]
    }

    fn running(&mut self, family: Family) -> Result<(&Relay, &mut Table), OpenError> {
        let missing = if self.is_stopped { OpenError::Stopped } else { OpenError::Print };
        let relay = self.relay.as_ref().ok_or(missing)?;
        Ok((relay, &mut self.tables[family as usize]))
    }

    /// Writes the file of session affinity from time to time, so that little is lost when the process is killed.
    fn save_affinity(&mut self, now: Instant) {
        if self.last_save.is_none_or(|last| now.duration_since(last) >= SAVE_INTERVAL) {
            self.last_save = Some(now);
            if let Some(relay) = &self.relay {
                relay.save_affinity();
            }
        }
    }

    fn enabled(&self) -> impl Iterator<Item = Family> {
        Family::ALL.into_iter().filter(|family| self.disabled[*family as usize].is_none())
    }
}

/// The reasons are those of Linux, which other systems do not tell.
fn disabled_reason(family: Family) -> Option<&'static str> {
    if cfg!(target_os = "linux") { ip_families::disabled(family) } else { None }
}

/// The addresses of the node's interfaces.
#[cfg(unix)]
fn local_addresses(family: Family) -> Result<BTreeSet<IpAddr>, OpenError> {
    let all = keelson_proxy::addresses::LocalAddresses::now();
    let all = all.map_err(|error| OpenError::Addresses(error.to_string()))?;
    Ok(all.of(family).collect())
}

/// Node ports are served at listed addresses only, and every source but the destination itself counts as outside.
#[cfg(not(unix))]
fn local_addresses(_: Family) -> Result<BTreeSet<IpAddr>, OpenError> {
    Ok(BTreeSet::new())
}

impl Backend for UserspaceBackend {
    fn info(&self) -> BackendInfo {
        INFO
    }

    fn disabled_reason(&self, family: Family) -> Option<&str> {
        self.disabled[family as usize]
    }

    fn limitations(&self) -> Vec<String> {
        let mut limitations =
            vec!["SCTP ports of Services are not served in user space; TCP and UDP ports are".to_owned()];
        if matches!(self.detect_local, DetectLocal::BridgeInterface(_) | DetectLocal::InterfaceNamePrefix(_))
        {
            limitations.push(
                "pods are not detected by interface in user space and count as outside; set \
                 proxy.detect_local_mode to ClusterCIDR or NodeCIDR"
                    .to_owned(),
            );
        }
        limitations
    }

    fn features(&self) -> Vec<String> {
        let mut lines = Vec::new();
        for family in self.enabled() {
            let counts = self.table(family).counts();
            lines.push(format!(
                "listeners {family}: {} at their address, {} at a mapped port, {} failing",
                counts.listening, counts.mapped, counts.failing
            ));
            lines.push(match self.table(family).routes().disabled_reason() {
                None => format!("routes {family}: enabled, {}", self.table(family).routes().len()),
                Some(reason) => format!("routes {family}: disabled: {reason}"),
            });
        }
        lines.push(match self.options.proxy_protocol {
            None => "proxy-protocol: disabled".to_owned(),
            Some(ProxyProtocol::V1) => "proxy-protocol: v1".to_owned(),
            Some(ProxyProtocol::V2) => "proxy-protocol: v2".to_owned(),
        });
        if let Some(relay) = &self.relay {
            lines.push(match relay.shared().affinity_file() {
                None => "affinity-file: disabled".to_owned(),
                Some(file) => format!("affinity-file: {}", file.status()),
            });
        }
        if self.options.transparent {
            lines.push("source of connections to endpoints: the client's address".to_owned());
        }
        lines
    }

    fn scope(&self, family: Family) -> &'static str {
        match family {
            Family::V4 => "IPv4 listeners",
            Family::V6 => "IPv6 listeners",
        }
    }

    fn set_service(&mut self, family: Family, service: &ServiceName, ports: Vec<ServicePort>) {
        self.tables[family as usize].plan_mut().set(service, ports);
    }

    fn set_node(&mut self, node: NodeConfig) {
        self.tables[node.family as usize].set_node(node);
    }

    fn has_synced(&self, family: Family) -> bool {
        self.table(family).has_synced()
    }

    fn sync(&mut self, family: Family, _: Instant) -> Result<Outcome, BackendError> {
        let local = local_addresses(family)?;
        let (relay, table) = self.running(family)?;
        Ok(table.sync(relay, local))
    }

    /// Binds again what could not be bound, and forgets clients with session affinity.
    fn maintain(&mut self, family: Family, now: Instant) -> Result<Outcome, BackendError> {
        self.save_affinity(now);
        let period = self.sync_period;
        let (relay, table) = self.running(family)?;
        Ok(table.maintain(relay, now, period))
    }

    fn stop(&mut self) -> Option<Drain> {
        let relay = self.relay.take()?;
        self.is_stopped = true;
        relay.stop_listening();
        Some(Box::new(move || relay.drain()))
    }

    fn observer(&self) -> Result<Box<dyn Observer>, BackendError> {
        let shared = self.relay.as_ref().map(|relay| relay.shared().clone());
        Ok(Box::new(UserspaceObserver { shared, snapshots: self.snapshots.clone() }))
    }

    /// Routes are what other programs can change.
    fn begin_check(&mut self, family: Family) -> Result<bool, BackendError> {
        let table = self.table(family);
        Ok(table.has_dead_listener() || table.routes().len() > 0)
    }

    fn check(&mut self, family: Family, now: Instant) -> Check {
        if self.table(family).has_changes() {
            return Check::Postponed;
        }
        let Some(seen) = self.snapshots.take(family) else { return Check::Postponed };
        let period = self.sync_period;
        let (relay, table) = match self.running(family) {
            Ok(running) => running,
            Err(error) => return Check::Unread(error.into()),
        };
        let repaired = table.routes_mut().repair(&seen);
        let mut outcome = match table.has_dead_listener() {
            true => table.maintain(relay, now, period),
            false => Outcome::default(),
        };
        outcome.structure += repaired;
        outcome.repaired = !outcome.is_nothing();
        Check::Done(Ok(outcome))
    }

    fn changes(&mut self) -> Result<Vec<String>, BackendError> {
        let mut lines = Vec::new();
        for family in self.enabled().collect::<Vec<_>>() {
            lines.extend(self.table(family).changes(&local_addresses(family)?));
        }
        Ok(lines)
    }

    fn ruleset(&self) -> RulesetPrinter {
        let texts: Vec<RulesetText> = self
            .enabled()
            .map(|family| {
                let local = local_addresses(family).unwrap_or_default();
                RulesetText::of(family, self.table(family), &local)
            })
            .collect();
        Box::new(move |out| texts.iter().try_for_each(|text| text.print(out)))
    }

    fn explain(&self, question: &Question, local: &[IpAddr]) -> pb::Explanation {
        explain::explain(self.table(question.target.family()), question, local, self.options.transparent)
    }

    fn counts(&self, family: Family) -> Counts {
        let counts = self.table(family).plan().counts();
        Counts {
            services: counts.services,
            service_ports: counts.service_ports,
            endpoints: counts.endpoints,
            elements: counts.frontends,
        }
    }

    fn details(&self, family: Family) -> Details {
        let (table, places) = (self.table(family), self.table(family).counts());
        let mut elements = BTreeMap::new();
        let mut count = |name: &str, number: usize| {
            if number > 0 {
                elements.insert(name.to_owned(), number as u64);
            }
        };
        count("listeners", places.listening);
        count("mapped-ports", places.mapped);
        count("rejecting", places.rejecting);
        count("failing", places.failing);
        count("routes", table.routes().len());
        if let (Some(relay), Family::V4) = (&self.relay, family) {
            // Of both families.
            let sessions = relay.shared().sessions();
            count("tcp-connections", sessions.tcp_connections);
            count("udp-sessions", sessions.udp_sessions);
        }
        let lacks_affinity =
            |port: &&Arc<ServicePort>| port.affinity_seconds != 0 && port.name.protocol == Protocol::Sctp;
        Details {
            chains: 0,
            elements,
            conflicts: table.plan().conflicts(),
            without_affinity: table.plan().service_ports().filter(lacks_affinity).count(),
        }
    }

    /// Sessions to endpoints that are gone end with the sync. Conntrack still translates flows of a backend that served before;
    /// those to the sockets of this one are not stale. Without CAP_NET_ADMIN, which routes need as well, there is no deleting.
    fn udp_frontends(&self, family: Family) -> Vec<UdpFrontend> {
        let table = self.table(family);
        if table.routes().disabled_reason().is_some() { Vec::new() } else { table.udp_frontends() }
    }

    fn affinity_capacity(&self) -> u64 {
        affinity::CAPACITY as u64
    }
}

struct UserspaceObserver {
    shared: Option<Arc<Shared>>,
    /// Our routes, as read.
    snapshots: Snapshots<BTreeSet<IpAddr>>,
}

impl Observer for UserspaceObserver {
    fn read(&mut self, family: Family) -> Result<(), BackendError> {
        // Without routes of its own, a system has none to lose.
        let seen = match cfg!(target_os = "linux") {
            true => routes::list(family).map_err(|error| BackendError::new(&error, false))?,
            false => BTreeSet::new(),
        };
        self.snapshots.put(family, seen);
        Ok(())
    }

    fn affinity_clients(&mut self, family: Family) -> Result<Option<AffinityClients>, BackendError> {
        let clients = self.shared.as_ref().map(|shared| shared.affinity(family).clients());
        Ok(clients.map(|clients| vec![("clients", clients)]))
    }

    fn other_proxies(&mut self) -> Result<Vec<(Family, String)>, BackendError> {
        Ok(Vec::new())
    }
}

#[cfg(test)]
mod tests;
