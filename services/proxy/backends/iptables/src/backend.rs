//! The iptables backend: the rules of both families behind the interface of the proxy.
//!
//! Owns: [`IptablesBackend`] and its observer. In: calls of the proxy. Out: calls of [`Programs`].

use std::{
    fs,
    net::IpAddr,
    time::{Duration, Instant},
};

use keelson_client::ServiceName;
use keelson_proto::proxy as pb;
use keelson_proxy::{
    addresses::{Match, NodePortAddresses},
    backend::{
        Access, AffinityClients, Backend, BackendError, BackendInfo, Check, Counts, Details, Observer,
        Outcome, RulesetPrinter, Snapshots,
    },
    conntrack::UdpFrontend,
    explain::Question,
    ip_families,
    model::{Family, ServicePort},
    options::{NodeConfig, Options},
};

use crate::{
    explain::{RuleContext, explain},
    names::{MAX_ENTRIES, PREFIX, is_affinity, set_prefix},
    plan::{NodeFacts, Plan},
    print::print,
    probe::probe,
    programs::{ProgramError, Programs},
    report,
    ruleset::{Plan as _, Ruleset, read_family},
    save::Found,
};

pub(crate) const INFO: BackendInfo = BackendInfo {
    name: "iptables",
    proxy_mode: "iptables",
    requirements: "CAP_NET_ADMIN, the programs iptables-restore, iptables-save and ipset, and the kernel's xt_set, \
                   xt_statistic, xt_addrtype, xt_conntrack, xt_mark, xt_nat, xt_MASQUERADE and ipt_REJECT",
    has_chains: true,
};

/// Accept packets to 127.0.0.0/8 that other routes lead to.
const ROUTE_LOCALNET: &str = "/proc/sys/net/ipv4/conf/all/route_localnet";

/// Finds the programs of a family.
pub(crate) type Find = dyn Fn(Family) -> Result<Box<dyn Programs>, ProgramError> + Send + Sync;

struct FamilyState {
    ruleset: Ruleset<Plan>,
    /// `None`: opened to print, or disabled.
    programs: Option<Box<dyn Programs>>,
    disabled: Option<String>,
    /// A run with the other variant may have left chains.
    may_have_other_variant: bool,
}

pub(crate) struct IptablesBackend {
    families: [FamilyState; 2],
    serves_loopback: bool,
    drops_invalid: bool,
    limitations: Vec<String>,
    features: Vec<String>,
    /// What was read, and how long that took.
    snapshots: Snapshots<(Found, Duration)>,
}

impl IptablesBackend {
    /// # Errors
    /// No family has programs that work; or they fail for a reason that may pass, which disables no family.
    pub(crate) fn open(
        find: &Find,
        options: &Options,
        access: Access,
        features: Vec<String>,
    ) -> Result<Self, BackendError> {
        let mut limitations = report::limitations(options);
        let mut serves_loopback = serves_loopback(options);
        if serves_loopback
            && access == Access::Program
            && let Err(error) = route_localnet()
        {
            limitations.push(format!(
                "IPv4: node ports are not served at 127.0.0.1: cannot write 1 to {ROUTE_LOCALNET}: {error}; set \
                 net.ipv4.conf.all.route_localnet, or proxy.iptables_localhost_node_ports to false"
            ));
            serves_loopback = false;
        }
        let drops_invalid = !options.conntrack.tcp_be_liberal;
        let mut error = None;
        let families = Family::ALL.map(|family| {
            let facts = initial_facts(family, options, serves_loopback, drops_invalid);
            let mut state = FamilyState {
                ruleset: Ruleset::new(Plan::new(family, facts)),
                programs: None,
                disabled: ip_families::disabled(family).map(ToOwned::to_owned),
                may_have_other_variant: true,
            };
            if state.disabled.is_none() && access != Access::Print {
                match open_programs(find, family, access) {
                    Ok(programs) => state.programs = Some(programs),
                    Err(failed) => {
                        state.disabled = Some(failed.to_string());
                        // One that may pass goes before one that does not.
                        if failed.is_passing() || error.is_none() {
                            error = Some(failed);
                        }
                    }
                }
            }
            state
        });
        match error {
            Some(error) if error.is_passing() || families.iter().all(|state| state.disabled.is_some()) => {
                Err(error.into())
            }
            _ => Ok(Self {
                families,
                serves_loopback,
                drops_invalid,
                limitations,
                features,
                snapshots: Snapshots::default(),
            }),
        }
    }

    fn state(&self, family: Family) -> &FamilyState {
        &self.families[family as usize]
    }

    fn open_state(
        &mut self,
        family: Family,
    ) -> Result<(&mut dyn Programs, &mut Ruleset<Plan>), BackendError> {
        let state = &mut self.families[family as usize];
        match &mut state.programs {
            Some(programs) => Ok((programs.as_mut(), &mut state.ruleset)),
            None => Err(BackendError::new(&"the backend iptables was opened to print rules", false)),
        }
    }

    /// Removes what a run with the other variant left, because connections would meet both. After the first sync, and
    /// again until it has succeeded.
    fn remove_other_variant(&mut self, family: Family) -> Result<(), BackendError> {
        let state = &mut self.families[family as usize];
        if state.may_have_other_variant
            && let Some(programs) = &mut state.programs
        {
            programs.remove_other_variant(&mut |removed| {
                tracing::info!(removed, "removed rules of an earlier run");
            })?;
            state.may_have_other_variant = false;
        }
        Ok(())
    }
}

fn open_programs(find: &Find, family: Family, access: Access) -> Result<Box<dyn Programs>, ProgramError> {
    let mut programs = find(family)?;
    if access == Access::Program {
        // Where there are sets of an earlier run, everything was there.
        let sets = programs.count_sets()?;
        if !sets.iter().any(|(set, _)| set.starts_with(set_prefix(family))) {
            probe(programs.as_mut(), family)?;
        }
    }
    Ok(programs)
}

/// Whether node ports are served at 127.0.0.1. Source: kube-proxy's `NodePortAddresses.ContainsIPv4Loopback`.
fn serves_loopback(options: &Options) -> bool {
    let loopback = IpAddr::from([127, 0, 0, 1]);
    options.iptables.localhost_node_ports
        && match &options.node_port_addresses {
            NodePortAddresses::Primary => false,
            NodePortAddresses::Cidrs(nets) => {
                let mut nets = nets.iter().filter(|net| net.addr().is_ipv4()).peekable();
                nets.peek().is_none() || nets.any(|net| net.contains(&loopback))
            }
        }
}

fn route_localnet() -> std::io::Result<()> {
    if fs::read_to_string(ROUTE_LOCALNET)?.trim() == "1" {
        return Ok(());
    }
    fs::write(ROUTE_LOCALNET, "1")
}

/// Until the node is known; no rule made from it reaches the kernel.
fn initial_facts(family: Family, options: &Options, serves_loopback: bool, drops_invalid: bool) -> NodeFacts {
    NodeFacts {
        mark: options.mark(),
        masquerade_all: options.masquerade_all,
        detector: None,
        node_ips: Vec::new(),
        node_ports: Match::AllLocal,
        serves_loopback: serves_loopback && family == Family::V4,
        drops_invalid,
    }
}

impl Backend for IptablesBackend {
    fn info(&self) -> BackendInfo {
        INFO
    }

    fn disabled_reason(&self, family: Family) -> Option<&str> {
        self.state(family).disabled.as_deref()
    }

    fn limitations(&self) -> Vec<String> {
        self.limitations.clone()
    }

    fn features(&self) -> Vec<String> {
        self.features.clone()
    }

    fn scope(&self, family: Family) -> &'static str {
        match family {
            Family::V4 => "iptables chains KEELSON-*",
            Family::V6 => "ip6tables chains KEELSON-*",
        }
    }

    fn set_service(&mut self, family: Family, service: &ServiceName, ports: Vec<ServicePort>) {
        self.families[family as usize].ruleset.plan_mut().set(service, ports);
    }

    fn set_node(&mut self, node: NodeConfig) {
        let facts = NodeFacts {
            mark: node.mark,
            masquerade_all: node.masquerade_all,
            detector: node.detector,
            node_ips: node.node_ips,
            node_ports: node.node_ports,
            serves_loopback: self.serves_loopback && node.family == Family::V4,
            drops_invalid: self.drops_invalid,
        };
        self.families[node.family as usize].ruleset.plan_mut().set_facts(facts);
    }

    fn has_synced(&self, family: Family) -> bool {
        self.state(family).ruleset.has_synced()
    }

    fn sync(&mut self, family: Family, _now: Instant) -> Result<Outcome, BackendError> {
        let (programs, ruleset) = self.open_state(family)?;
        let before = programs.generation();
        let outcome = ruleset.sync(programs)?;
        let after = programs.generation();
        self.remove_other_variant(family)?;
        // The kernel counts changes of both families: ours in one must not count as another program's in the other.
        for other in Family::ALL.into_iter().filter(|other| *other != family) {
            self.families[other as usize].ruleset.replace_generation(before, after);
        }
        Ok(outcome)
    }

    fn maintain(&mut self, family: Family, _now: Instant) -> Result<Outcome, BackendError> {
        let (programs, ruleset) = self.open_state(family)?;
        Ok(ruleset.maintain(programs))
    }

    fn observer(&self) -> Result<Box<dyn Observer>, BackendError> {
        let programs = Family::ALL
            .map(|family| self.state(family).programs.as_ref().map(|programs| programs.duplicate()));
        let kube_proxy = Family::ALL.map(|family| self.state(family).ruleset.kube_proxy.clone());
        Ok(Box::new(IptablesObserver { programs, kube_proxy, snapshots: self.snapshots.clone() }))
    }

    fn begin_check(&mut self, family: Family) -> Result<bool, BackendError> {
        let (programs, ruleset) = self.open_state(family)?;
        Ok(ruleset.begin_check(programs, Instant::now()))
    }

    fn check(&mut self, family: Family, now: Instant) -> Check {
        if !self.state(family).ruleset.can_check() {
            return Check::Postponed;
        }
        let Some((found, took)) = self.snapshots.take(family) else { return Check::Postponed };
        match self.open_state(family) {
            Ok((programs, ruleset)) => {
                Check::Done(ruleset.check(&found, took, programs, now).map_err(BackendError::from))
            }
            Err(error) => Check::Unread(error),
        }
    }

    fn changes(&mut self) -> Result<Vec<String>, BackendError> {
        let mut lines = Vec::new();
        for family in Family::ALL {
            if self.disabled_reason(family).is_none() {
                let (programs, ruleset) = self.open_state(family)?;
                lines.extend(ruleset.difference(programs)?.lines(family));
            }
        }
        Ok(lines)
    }

    fn ruleset(&self) -> RulesetPrinter {
        let enabled = Family::ALL.into_iter().filter(|family| self.disabled_reason(*family).is_none());
        let all: Vec<_> =
            enabled.map(|family| (family, self.state(family).ruleset.plan().wanted())).collect();
        Box::new(move |out| all.iter().try_for_each(|(family, wanted)| print(*family, wanted, out)))
    }

    fn explain(&self, question: &Question, local: &[IpAddr]) -> pb::Explanation {
        let plan = self.state(question.target.family()).ruleset.plan();
        explain(&RuleContext { plan, local }, question)
    }

    fn counts(&self, family: Family) -> Counts {
        let plan = self.state(family).ruleset.plan();
        let counts = plan.services().counts();
        Counts {
            services: counts.services,
            service_ports: counts.service_ports,
            endpoints: counts.endpoints,
            elements: plan.elements(),
        }
    }

    fn details(&self, family: Family) -> Details {
        let plan = self.state(family).ruleset.plan();
        let wanted = plan.wanted();
        let mut elements = report::set_sizes(&wanted);
        let rules =
            |table| wanted.chains(table).values().map(|text| text.lines().count() as u64).sum::<u64>();
        for &table in Plan::TABLES {
            elements.insert(format!("rules of table {table}"), rules(table));
        }
        Details {
            chains: Plan::TABLES.iter().map(|&table| wanted.chains(table).len()).sum(),
            elements,
            conflicts: plan.services().conflicts(),
            without_affinity: 0,
        }
    }

    fn udp_frontends(&self, family: Family) -> Vec<UdpFrontend> {
        self.state(family).ruleset.plan().services().ports().filter_map(UdpFrontend::of).collect()
    }

    fn affinity_capacity(&self) -> u64 {
        MAX_ENTRIES.into()
    }
}

struct IptablesObserver {
    programs: [Option<Box<dyn Programs>>; 2],
    /// As last read.
    kube_proxy: [Option<String>; 2],
    /// What was read, and how long that took.
    snapshots: Snapshots<(Found, Duration)>,
}

impl IptablesObserver {
    fn programs(&mut self, family: Family) -> Result<&mut dyn Programs, BackendError> {
        match &mut self.programs[family as usize] {
            Some(programs) => Ok(programs.as_mut()),
            None => Err(BackendError::new(&format!("{family} is disabled"), false)),
        }
    }
}

impl Observer for IptablesObserver {
    fn read(&mut self, family: Family) -> Result<(), BackendError> {
        let begun = Instant::now();
        let found = read_family(self.programs(family)?, family, Plan::TABLES)?;
        self.kube_proxy[family as usize].clone_from(&found.kube_proxy);
        self.snapshots.put(family, (found, begun.elapsed()));
        Ok(())
    }

    fn affinity_clients(&mut self, family: Family) -> Result<Option<AffinityClients>, BackendError> {
        let sets = self.programs(family)?.count_sets()?;
        if !sets.iter().any(|(set, _)| set.starts_with(PREFIX)) {
            return Ok(None);
        }
        let clients =
            sets.iter().filter(|(set, _)| is_affinity(family, set)).map(|(_, entries)| entries).sum();
        Ok(Some(vec![("affinity", clients)]))
    }

    fn other_proxies(&mut self) -> Result<Vec<(Family, String)>, BackendError> {
        Ok(report::other_proxies(&self.kube_proxy))
    }
}

#[cfg(test)]
mod tests;
