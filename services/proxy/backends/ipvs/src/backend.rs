//! The ipvs backend: both families behind the interface of the proxy.
//!
//! Owns: [`IpvsBackend`] and its observer. In: calls of the proxy. Out: calls of [`Kernel`] and [`Programs`].

use std::{collections::BTreeSet, net::IpAddr, time::Instant};

use keelson_client::ServiceName;
use keelson_proto::proxy as pb;
use keelson_proxy::{
    addresses::Match,
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
use keelson_proxy_xtables::{
    names::Table,
    programs::{ProgramError, Programs},
    report,
    ruleset::Plan as _,
};

use crate::{
    explain::{RuleContext, explain},
    family::{FamilyState, Snapshot},
    kernel::{Kernel, KernelError, Timeouts},
    plan::{NodeFacts, Plan},
    print::Printed,
    probe::{OpenError, probe},
    sysctls,
};

pub(crate) const INFO: BackendInfo = BackendInfo {
    name: "ipvs",
    proxy_mode: "ipvs",
    requirements: "CAP_NET_ADMIN, the programs iptables-restore, iptables-save and ipset, and the kernel's ip_vs with the \
                   chosen scheduler, dummy, xt_set, xt_addrtype, xt_conntrack, xt_mark, xt_MASQUERADE and ipt_REJECT",
    has_chains: true,
};

/// Finds the programs of a family.
pub(crate) type FindPrograms = dyn Fn(Family) -> Result<Box<dyn Programs>, ProgramError> + Send + Sync;
/// Connects to the kernel, for one family.
pub(crate) type OpenKernel = dyn Fn() -> Result<Box<dyn Kernel>, KernelError> + Send + Sync;

struct Tools {
    kernel: Box<dyn Kernel>,
    programs: Box<dyn Programs>,
}

struct OpenFamily {
    state: FamilyState,
    /// `None`: opened to print, or disabled.
    tools: Option<Tools>,
    disabled: Option<String>,
    /// A run with the other variant of iptables may have left chains.
    may_have_other_variant: bool,
}

pub(crate) struct IpvsBackend {
    families: [OpenFamily; 2],
    scheduler: String,
    local: Vec<IpAddr>,
    limitations: Vec<String>,
    features: Vec<String>,
    snapshots: Snapshots<Snapshot>,
}

impl IpvsBackend {
    /// # Errors
    /// No family has what it needs; or it fails for a reason that may pass, which disables no family.
    pub(crate) fn open(
        find: &FindPrograms,
        connect: &OpenKernel,
        options: &Options,
        access: Access,
    ) -> Result<Self, BackendError> {
        let scheduler = options.ipvs.scheduler.clone();
        let mut error: Option<OpenError> = None;
        let mut families = Family::ALL.map(|family| {
            let plan = Plan::new(family, initial_facts(options));
            let mut opened = OpenFamily {
                state: FamilyState::new(plan),
                tools: None,
                disabled: ip_families::disabled(family).map(ToOwned::to_owned),
                may_have_other_variant: true,
            };
            if opened.disabled.is_none() && access != Access::Print {
                match open_tools(find, connect, family, &scheduler, access) {
                    Ok(tools) => opened.tools = Some(tools),
                    Err(failed) => {
                        opened.disabled = Some(failed.to_string());
                        // One that may pass goes before one that does not.
                        if failed.is_passing() || error.is_none() {
                            error = Some(failed);
                        }
                    }
                }
            }
            opened
        });
        if let Some(error) = error
            && (error.is_passing() || families.iter().all(|opened| opened.disabled.is_some()))
        {
            return Err(error.into());
        }
        let mut limitations = report::limitations(options);
        let mut features = vec![format!("ipvs scheduler: {scheduler}")];
        if access == Access::Program {
            limitations.extend(sysctls::apply(&options.ipvs));
            if let Some(tools) = families.iter_mut().find_map(|opened| opened.tools.as_mut()) {
                features.push(apply_timeouts(tools.kernel.as_mut(), options)?);
            }
        }
        Ok(Self {
            families,
            scheduler,
            local: Vec::new(),
            limitations,
            features,
            snapshots: Snapshots::default(),
        })
    }

    fn state(&self, family: Family) -> &FamilyState {
        &self.families[family as usize].state
    }

    fn plan(&self, family: Family) -> &Plan {
        self.state(family).plan()
    }

    fn open_state(&mut self, family: Family) -> Result<(&mut FamilyState, &mut Tools), BackendError> {
        let OpenFamily { state, tools, .. } = &mut self.families[family as usize];
        match tools {
            Some(tools) => Ok((state, tools)),
            None => Err(BackendError::new(&"the backend ipvs was opened to print rules", false)),
        }
    }

    /// Removes what a run with the other variant of iptables left, because connections would meet both. After the first
    /// sync, and again until it has succeeded.
    fn remove_other_variant(&mut self, family: Family) -> Result<(), BackendError> {
        let opened = &mut self.families[family as usize];
        if opened.may_have_other_variant
            && let Some(Tools { programs, .. }) = &mut opened.tools
        {
            programs.remove_other_variant(&mut |removed| {
                tracing::info!(removed, "removed rules of an earlier run");
            })?;
            opened.may_have_other_variant = false;
        }
        Ok(())
    }
}

fn open_tools(
    find: &FindPrograms,
    connect: &OpenKernel,
    family: Family,
    scheduler: &str,
    access: Access,
) -> Result<Tools, OpenError> {
    let mut tools = Tools { programs: find(family)?, kernel: connect()? };
    if access == Access::Program {
        probe(tools.kernel.as_mut(), tools.programs.as_mut(), family, scheduler)?;
    }
    Ok(tools)
}

/// Sets the timeouts that are configured, and returns a line about those in effect.
fn apply_timeouts(kernel: &mut dyn Kernel, options: &Options) -> Result<String, BackendError> {
    let seconds = |time: std::time::Duration| u32::try_from(time.as_secs()).unwrap_or(u32::MAX);
    let wanted = Timeouts {
        tcp: seconds(options.ipvs.tcp_timeout),
        tcp_fin: seconds(options.ipvs.tcp_fin_timeout),
        udp: seconds(options.ipvs.udp_timeout),
    };
    if wanted != Timeouts::default() {
        kernel.set_timeouts(wanted)?;
    }
    let Timeouts { tcp, tcp_fin, udp } = kernel.timeouts()?;
    Ok(format!("ipvs timeouts: TCP {tcp} s, TCP after FIN {tcp_fin} s, UDP {udp} s"))
}

/// Until the node is known; no rule made from it reaches the kernel.
fn initial_facts(options: &Options) -> NodeFacts {
    NodeFacts {
        mark: options.mark(),
        masquerade_all: options.masquerade_all,
        detector: None,
        node_ips: Vec::new(),
        node_ports: Match::Addresses(Vec::new()),
        local: BTreeSet::new(),
        scheduler: options.ipvs.scheduler.clone(),
    }
}

impl Backend for IpvsBackend {
    fn info(&self) -> BackendInfo {
        INFO
    }

    fn disabled_reason(&self, family: Family) -> Option<&str> {
        self.families[family as usize].disabled.as_deref()
    }

    fn limitations(&self) -> Vec<String> {
        self.limitations.clone()
    }

    fn features(&self) -> Vec<String> {
        self.features.clone()
    }

    fn scope(&self, family: Family) -> &'static str {
        match family {
            Family::V4 => "ipvs virtual servers and iptables chains KEELSON-*",
            Family::V6 => "ipvs virtual servers and ip6tables chains KEELSON-*",
        }
    }

    fn set_service(&mut self, family: Family, service: &ServiceName, ports: Vec<ServicePort>) {
        self.families[family as usize].state.ruleset.plan_mut().set(service, ports);
    }

    fn set_addresses(&mut self, local: &[IpAddr]) {
        self.local = local.to_vec();
    }

    fn set_node(&mut self, node: NodeConfig) {
        let facts = NodeFacts {
            mark: node.mark,
            masquerade_all: node.masquerade_all,
            detector: node.detector,
            node_ips: node.node_ips,
            node_ports: node.node_ports,
            local: self.local.iter().copied().filter(|ip| node.family.has(ip)).collect(),
            scheduler: self.scheduler.clone(),
        };
        self.families[node.family as usize].state.ruleset.plan_mut().set_facts(facts);
    }

    fn has_synced(&self, family: Family) -> bool {
        self.state(family).ruleset.has_synced()
    }

    fn sync(&mut self, family: Family, _now: Instant) -> Result<Outcome, BackendError> {
        let (state, Tools { kernel, programs }) = self.open_state(family)?;
        let before = programs.generation();
        let outcome = state.sync(kernel.as_mut(), programs.as_mut())?;
        let after = programs.generation();
        self.remove_other_variant(family)?;
        // The kernel counts changes of both families: ours in one must not count as another program's in the other.
        for other in Family::ALL.into_iter().filter(|other| *other != family) {
            self.families[other as usize].state.ruleset.replace_generation(before, after);
        }
        Ok(outcome)
    }

    fn maintain(&mut self, family: Family, _now: Instant) -> Result<Outcome, BackendError> {
        let (state, Tools { kernel, programs }) = self.open_state(family)?;
        state.maintain(kernel.as_mut(), programs.as_mut())
    }

    fn observer(&self) -> Result<Box<dyn Observer>, BackendError> {
        let mut tools = Vec::new();
        for opened in &self.families {
            tools.push(match &opened.tools {
                Some(Tools { kernel, programs }) => {
                    Some(Tools { kernel: kernel.duplicate()?, programs: programs.duplicate() })
                }
                None => None,
            });
        }
        let kube_proxy = Family::ALL.map(|family| self.state(family).ruleset.kube_proxy.clone());
        let clients = [None; 2];
        Ok(Box::new(IpvsObserver { tools, kube_proxy, clients, snapshots: self.snapshots.clone() }))
    }

    fn begin_check(&mut self, family: Family) -> Result<bool, BackendError> {
        let (state, tools) = self.open_state(family)?;
        Ok(state.ruleset.begin_check(tools.programs.as_ref(), Instant::now()))
    }

    fn check(&mut self, family: Family, now: Instant) -> Check {
        if !self.state(family).ruleset.can_check() {
            return Check::Postponed;
        }
        let Some(found) = self.snapshots.take(family) else { return Check::Postponed };
        match self.open_state(family) {
            Ok((state, Tools { kernel, programs })) => {
                Check::Done(state.check(&found, kernel.as_mut(), programs.as_mut(), now))
            }
            Err(error) => Check::Unread(error),
        }
    }

    fn changes(&mut self) -> Result<Vec<String>, BackendError> {
        let mut lines = Vec::new();
        for family in Family::ALL {
            if self.disabled_reason(family).is_none() {
                let (state, Tools { kernel, programs }) = self.open_state(family)?;
                lines.extend(state.lines(kernel.as_mut(), programs.as_mut())?);
            }
        }
        Ok(lines)
    }

    fn ruleset(&self) -> RulesetPrinter {
        let enabled = Family::ALL.into_iter().filter(|family| self.disabled_reason(*family).is_none());
        let all: Vec<Printed> = enabled.map(|family| Printed::of(self.plan(family))).collect();
        Box::new(move |out| all.iter().try_for_each(|printed| printed.print(out)))
    }

    fn explain(&self, question: &Question, local: &[IpAddr]) -> pb::Explanation {
        let plan = self.plan(question.target.family());
        explain(&RuleContext { plan, local }, question)
    }

    fn counts(&self, family: Family) -> Counts {
        let plan = self.plan(family);
        let counts = plan.services().counts();
        Counts {
            services: counts.services,
            service_ports: counts.service_ports,
            endpoints: counts.endpoints,
            elements: plan.elements(),
        }
    }

    fn details(&self, family: Family) -> Details {
        let plan = self.plan(family);
        let wanted = plan.wanted();
        let servers = plan.servers();
        let destinations = servers.iter().filter_map(|key| plan.server(*key));
        let destinations: usize = destinations.map(|server| server.endpoints.len()).sum();
        let mut elements = report::set_sizes(&wanted);
        elements.insert("virtual servers".into(), servers.len() as u64);
        elements.insert("real servers".into(), destinations as u64);
        Details {
            chains: Table::ALL.into_iter().map(|table| wanted.chains(table).len()).sum(),
            elements,
            conflicts: plan.services().conflicts(),
            without_affinity: 0,
        }
    }

    fn udp_frontends(&self, family: Family) -> Vec<UdpFrontend> {
        self.plan(family).services().ports().filter_map(UdpFrontend::of).collect()
    }

    /// IPVS has no limit but memory.
    fn affinity_capacity(&self) -> u64 {
        u32::MAX.into()
    }
}

struct IpvsObserver {
    tools: Vec<Option<Tools>>,
    /// As last read.
    kube_proxy: [Option<String>; 2],
    /// Clients with session affinity, as last read.
    clients: [Option<usize>; 2],
    snapshots: Snapshots<Snapshot>,
}

impl Observer for IpvsObserver {
    fn read(&mut self, family: Family) -> Result<(), BackendError> {
        let Some(Some(Tools { kernel, programs })) = self.tools.get_mut(family as usize) else {
            return Err(BackendError::new(&format!("{family} is disabled"), false));
        };
        let found = Snapshot::read(kernel.as_mut(), programs.as_mut(), family)?;
        self.kube_proxy[family as usize].clone_from(&found.rules.kube_proxy);
        self.clients[family as usize] = Some(found.clients());
        self.snapshots.put(family, found);
        Ok(())
    }

    /// Counted with the last [`Self::read`]: counting reads all real servers.
    fn affinity_clients(&mut self, family: Family) -> Result<Option<AffinityClients>, BackendError> {
        Ok(self.clients[family as usize].map(|clients| vec![("affinity", clients)]))
    }

    fn other_proxies(&mut self) -> Result<Vec<(Family, String)>, BackendError> {
        Ok(report::other_proxies(&self.kube_proxy))
    }
}

#[cfg(test)]
mod fake;
#[cfg(test)]
mod tests;
