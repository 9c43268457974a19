//! The nftables backend: the tables of both families behind the interface of the proxy.
//!
//! Owns: [`NftBackend`] and its observer. In: calls of the proxy. Out: transactions, through [`NfTables`].

mod offload;

use std::{
    collections::BTreeSet,
    net::IpAddr,
    time::{Duration, Instant},
};

use ipnet::IpNet;
use keelson_client::ServiceName;
use keelson_proto::proxy as pb;
use keelson_proxy::{
    addresses::{Interface, InterfacePattern, Match},
    backend::{
        Access, AffinityClients, Backend, BackendError, BackendInfo, Check, Counts, Details, Observer,
        Outcome, RulesetPrinter, Snapshots,
    },
    conntrack::UdpFrontend,
    explain::Question,
    ip_families,
    model::{Family, Protocol, ServicePort},
    options::{NodeConfig, Options},
};

use self::offload::Offload;
use crate::{
    chain::{Chain, Choice},
    element::SetName,
    explain::{RuleContext, explain},
    kernel::{Change, ErrorKind, Found, KernelError, NfTables, TABLE},
    kube_proxy,
    plan::{NodeFacts, PortView},
    ruleset::{Base, NodePortMatch, definition, rules},
    table::{Ruleset, Table},
};

pub(crate) const INFO: BackendInfo = BackendInfo {
    name: "nft",
    proxy_mode: "nftables",
    requirements: "CAP_NET_ADMIN, nf_tables with NAT, sets, fib, numgen, hash, reject and masquerade",
    has_chains: false,
};

/// Opens a connection to nf_tables, in the network namespace of the calling thread.
type Connect = Box<dyn Fn() -> Result<Box<dyn NfTables>, KernelError> + Send>;

struct FamilyState {
    table: Table,
    disabled: Option<String>,
    offload: Offload,
}

pub struct NftBackend {
    connect: Connect,
    /// `None`: opened to print.
    tables: Option<Box<dyn NfTables>>,
    families: [FamilyState; 2],
    flowtable_interfaces: Vec<InterfacePattern>,
    sync_period: Duration,
    has_interfaces: bool,
    /// `None`: there was no table.
    snapshots: Snapshots<Option<Found>>,
}

impl std::fmt::Debug for NftBackend {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("NftBackend").finish_non_exhaustive()
    }
}

impl From<KernelError> for BackendError {
    fn from(error: KernelError) -> Self {
        Self::new(&error, error.kind() == ErrorKind::Fatal)
    }
}

impl NftBackend {
    /// Opens the backend. Numbers and slots are those of the tables that an earlier run left.
    ///
    /// # Errors
    /// The kernel supports no family, does not permit it, or does not answer.
    pub fn open(
        connect: impl Fn() -> Result<Box<dyn NfTables>, KernelError> + Send + 'static,
        options: &Options,
        access: Access,
    ) -> Result<Self, KernelError> {
        let mut tables = if access == Access::Print { None } else { Some(connect()?) };
        let mut refused = None;
        let mut open = |family| match open_family(tables.as_deref_mut(), options, access, family) {
            Err(error) if error.is_unsupported() => {
                let state = FamilyState::disabled(family, options, error.to_string());
                refused = Some(error);
                Ok(state)
            }
            opened => opened,
        };
        let families = [open(Family::V4)?, open(Family::V6)?];
        // IPv4 is disabled only by an error.
        if let Some(error) = refused.filter(|_| families.iter().all(|state| state.disabled.is_some())) {
            return Err(error);
        }
        Ok(Self {
            connect: Box::new(connect),
            tables,
            families,
            flowtable_interfaces: options.flowtable_interfaces.clone(),
            sync_period: options.sync_period,
            has_interfaces: false,
            snapshots: Snapshots::default(),
        })
    }

    fn state(&self, family: Family) -> &FamilyState {
        &self.families[family as usize]
    }

    fn enabled(&self) -> impl Iterator<Item = &FamilyState> {
        self.families.iter().filter(|state| state.disabled.is_none())
    }

    fn open_state(&mut self, family: Family) -> Result<(&mut dyn NfTables, &mut FamilyState), KernelError> {
        match &mut self.tables {
            Some(tables) => Ok((tables.as_mut(), &mut self.families[family as usize])),
            None => Err(KernelError::NotPermitted),
        }
    }

    fn finish(
        &mut self,
        family: Family,
        result: Result<Outcome, KernelError>,
    ) -> Result<Outcome, BackendError> {
        let outcome = result?;
        if outcome.full || outcome.structure > 0 {
            self.families[family as usize].offload.invalidate();
        }
        self.count_transactions(family, outcome.transactions);
        Ok(outcome)
    }

    /// The kernel counts transactions of all tables: our transactions in one family must not count as another program's
    /// in the other.
    fn count_transactions(&mut self, of: Family, transactions: usize) {
        for family in Family::ALL.into_iter().filter(|family| *family != of) {
            self.families[family as usize].table.add_own_transactions(transactions);
        }
    }
}

impl FamilyState {
    fn new(table: Table) -> Self {
        Self { table, disabled: None, offload: Offload::default() }
    }

    fn disabled(family: Family, options: &Options, reason: String) -> Self {
        Self { disabled: Some(reason), ..Self::new(Table::unread(initial_base(family, options))) }
    }
}

fn open_family(
    mut tables: Option<&mut (dyn NfTables + 'static)>,
    options: &Options,
    access: Access,
    family: Family,
) -> Result<FamilyState, KernelError> {
    if let Some(reason) = ip_families::disabled(family) {
        return Ok(FamilyState::disabled(family, options, reason.to_owned()));
    }
    let base = initial_base(family, options);
    if let (Some(tables), Access::Program) = (tables.as_deref_mut(), access)
        && !tables.netlink().tables()?.contains(&(family, TABLE.to_owned()))
    {
        probe_features(tables, &base)?;
    }
    let mut state = FamilyState::new(match tables.as_deref_mut() {
        Some(tables) => Table::open(base, tables)?,
        None => Table::unread(base),
    });
    if !options.flowtable_interfaces.is_empty() {
        let tried = match (tables, access) {
            (Some(tables), Access::Program) => tables.try_flowtable(family),
            _ => Ok(()),
        };
        state.offload = Offload::of_try(family, tried);
        if let Offload::Enabled(devices) = &mut state.offload {
            devices.tcp_only = state.table.is_tcp_only();
            state.table.set_devices(Some(BTreeSet::new()));
        }
    }
    Ok(state)
}

/// Base of the fixed rules until the node is known; no rule made from it stays in the kernel.
fn initial_base(family: Family, options: &Options) -> Base {
    Base {
        family,
        masquerade_all: options.masquerade_all,
        mark: options.mark(),
        detector: None,
        node_ports: NodePortMatch::AllLocal,
        untracked_pods: false,
    }
}

/// Creates everything that may ever be needed and deletes it again, in one transaction: the kernel checks every part,
/// and nothing is left afterwards.
fn probe_features(tables: &mut dyn NfTables, base: &Base) -> Result<(), KernelError> {
    let counted = |choice| {
        let affinity = Chain::Affinity { choice, count: 1, seconds: 1, group: 0 };
        affinity.companions().into_iter().chain([affinity, Chain::LoadBalance { choice, count: 1 }])
    };
    let chains: Vec<Chain> =
        Chain::FIXED.into_iter().chain(counted(Choice::Cluster)).chain(counted(Choice::Local)).collect();
    let mut changes = vec![Change::MakeTable];
    changes.extend(SetName::ALL.map(Change::MakeSet));
    changes.extend(chains.iter().copied().map(Change::MakeChain));
    changes.extend(chains.iter().map(|&chain| Change::Rules(chain, rules(base, chain))));
    changes.push(Change::DeleteTable);
    tables.commit(base.family, &changes)
}

impl Backend for NftBackend {
    fn info(&self) -> BackendInfo {
        INFO
    }

    fn disabled_reason(&self, family: Family) -> Option<&str> {
        self.state(family).disabled.as_deref()
    }

    fn limitations(&self) -> Vec<String> {
        let limitation = |state: &FamilyState| match &state.offload {
            Offload::Unsupported(reason) => {
                Some(format!("{}: established flows are not offloaded: {reason}", state.table.family()))
            }
            Offload::Disabled | Offload::Enabled(_) => None,
        };
        self.families.iter().filter_map(limitation).collect()
    }

    fn features(&self) -> Vec<String> {
        let status = |state: &FamilyState| {
            Some(format!("flowtable {}: {}", state.table.family(), state.offload.status_text()?))
        };
        let untracked = |state: &FamilyState| {
            Some(format!("conntrack {}: {}", state.table.family(), state.table.untracked_text()?))
        };
        let families = self.families.iter();
        families.clone().filter_map(status).chain(families.filter_map(untracked)).collect()
    }

    fn scope(&self, family: Family) -> &'static str {
        match family {
            Family::V4 => "table ip keelson",
            Family::V6 => "table ip6 keelson",
        }
    }

    fn untracked_pods(&self, family: Family) -> Option<IpNet> {
        self.state(family).table.untracked_net()
    }

    fn set_service(&mut self, family: Family, service: &ServiceName, ports: Vec<ServicePort>) {
        self.families[family as usize].table.plan_mut().set(service, ports);
    }

    fn set_node(&mut self, node: NodeConfig) {
        let (node_ports, node_port_addresses) = match node.node_ports {
            Match::AllLocal => (NodePortMatch::AllLocal, Vec::new()),
            Match::Addresses(addresses) => (NodePortMatch::Addresses, addresses),
        };
        let table = &mut self.families[node.family as usize].table;
        table.set_base(Base {
            family: node.family,
            masquerade_all: node.masquerade_all,
            mark: node.mark,
            detector: node.detector,
            node_ports,
            untracked_pods: node.untracked_pods,
        });
        table.plan_mut().facts(NodeFacts {
            service_cidrs: node.service_cidrs,
            node_ips: node.node_ips,
            node_port_addresses,
        });
    }

    fn set_interfaces(&mut self, interfaces: &[Interface]) {
        self.set_flowtable_interfaces(interfaces);
    }

    fn has_synced(&self, family: Family) -> bool {
        self.state(family).table.has_synced()
    }

    fn sync(&mut self, family: Family, now: Instant) -> Result<Outcome, BackendError> {
        let (tables, state) = self.open_state(family)?;
        let result = state.table.sync(tables, now);
        self.finish(family, result)
    }

    /// Deletes and prepares chains, and syncs the interfaces of the flowtable.
    fn maintain(&mut self, family: Family, now: Instant) -> Result<Outcome, BackendError> {
        let (tables, state) = self.open_state(family)?;
        let result = state.table.maintain_chains(tables, now);
        let outcome = self.finish(family, result)?;
        let (tables, state) = self.open_state(family)?;
        let result = state.table.maintain_untracked(tables, now);
        let outcome = outcome.plus(self.finish(family, result)?);
        self.sync_devices(family, now)?;
        Ok(outcome)
    }

    fn stop_udp_offload(&mut self, family: Family) -> bool {
        self.offload_tcp_only(family)
    }

    fn observer(&self) -> Result<Box<dyn Observer>, BackendError> {
        Ok(Box::new(NftObserver { tables: (self.connect)()?, snapshots: self.snapshots.clone() }))
    }

    fn begin_check(&mut self, family: Family) -> Result<bool, BackendError> {
        let (tables, state) = self.open_state(family)?;
        Ok(state.table.begin_check(tables)?)
    }

    fn check(&mut self, family: Family, now: Instant) -> Check {
        if !self.state(family).table.can_check() {
            return Check::Postponed;
        }
        let Some(seen) = self.snapshots.take(family) else { return Check::Postponed };
        let (tables, state) = match self.open_state(family) {
            Ok(open) => open,
            Err(error) => return Check::Unread(error.into()),
        };
        match state.table.check(seen, tables, now) {
            // The read failed, not a sync.
            Err(error) if state.table.is_trusted() => Check::Unread(error.into()),
            result => Check::Done(self.finish(family, result)),
        }
    }

    fn changes(&mut self) -> Result<Vec<String>, BackendError> {
        let mut lines = Vec::new();
        for family in Family::ALL {
            let (tables, state) = self.open_state(family)?;
            if state.disabled.is_none() {
                lines.extend(state.table.difference(tables)?.lines(family));
            }
        }
        Ok(lines)
    }

    fn ruleset(&self) -> RulesetPrinter {
        let rulesets: Vec<Ruleset> = self.enabled().map(|state| state.table.ruleset()).collect();
        Box::new(move |out| rulesets.iter().try_for_each(|ruleset| ruleset.print(out)))
    }

    fn explain(&self, question: &Question, local: &[IpAddr]) -> pb::Explanation {
        let table = &self.state(question.target.family()).table;
        let context =
            RuleContext { base: table.base(), plan: table.plan(), local, offload: table.offload_chain() };
        explain(&context, question)
    }

    fn counts(&self, family: Family) -> Counts {
        let counts = self.state(family).table.plan().counts();
        Counts {
            services: counts.services,
            service_ports: counts.service_ports,
            endpoints: counts.endpoints,
            elements: counts.all_elements(),
        }
    }

    fn details(&self, family: Family) -> Details {
        let table = &self.state(family).table;
        let counts = table.plan().counts();
        let elements = SetName::ALL.into_iter().map(|set| (set.to_string(), counts.elements(set) as u64));
        Details {
            chains: table.chains(),
            elements: elements.filter(|(_, number)| *number > 0).collect(),
            conflicts: table.plan().conflicts(),
            without_affinity: counts.without_affinity,
        }
    }

    fn udp_frontends(&self, family: Family) -> Vec<UdpFrontend> {
        let ports = self.state(family).table.plan().service_ports();
        let udp = ports.filter(|port| port.protocol == Protocol::Udp && !port.serving.is_empty());
        let frontend = |port: PortView<'_>| {
            let others = port.external_ips.iter().chain(&port.load_balancer_ips).copied();
            UdpFrontend {
                addresses: std::iter::once(port.cluster_ip).chain(others).collect(),
                port: port.port,
                node_port: port.node_port,
                serving: port.serving.to_vec(),
            }
        };
        udp.map(frontend).collect()
    }

    fn affinity_capacity(&self) -> u64 {
        definition(Family::V4, SetName::Affinity0).size.unwrap_or(u32::MAX).into()
    }
}

struct NftObserver {
    tables: Box<dyn NfTables>,
    /// `None`: there was no table.
    snapshots: Snapshots<Option<Found>>,
}

impl Observer for NftObserver {
    fn read(&mut self, family: Family) -> Result<(), BackendError> {
        self.snapshots.put(family, self.tables.read(family)?);
        Ok(())
    }

    fn affinity_clients(&mut self, family: Family) -> Result<Option<AffinityClients>, BackendError> {
        let clients = self.tables.netlink().affinity_clients(family)?;
        Ok(clients.map(|clients| SetName::AFFINITY.map(SetName::as_str).into_iter().zip(clients).collect()))
    }

    fn other_proxies(&mut self) -> Result<Vec<(Family, String)>, BackendError> {
        Ok(kube_proxy::found(self.tables.netlink())?)
    }
}

#[cfg(test)]
mod tests;
