//! A planned service port.
//!
//! Owns: [`Port`], and the elements that it shares with no other: choices, slots and affinity endpoints. In: a
//! [`ServicePort`], and its former state. Out: changes of elements.

use std::{net::IpAddr, sync::Arc};

use ipnet::IpNet;
use keelson_proxy::model::{Endpoint, Frontend, Protocol, ServicePort};

use super::{
    FrontendKind, FrontendTarget,
    existing::PortState,
    ledger::{Content, Ledger},
    slots::{Slots, arrange, number},
};
use crate::{
    chain::{Chain, Choice},
    element::{Element, Key, Number, SetName, Value, Verdict},
};

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Port {
    pub(crate) name: Arc<str>,
    pub(crate) protocol: Protocol,
    pub(crate) internal_local: bool,
    pub(crate) external_local: bool,
    /// Also true if a set has endpoints, even if the message says otherwise.
    pub(crate) has_any: bool,
    pub(crate) port: u16,
    pub(crate) node_port: u16,
    /// The endpoint number that was assigned last.
    last: u16,
    pub(crate) affinity_seconds: u32,
    /// `None`: no traffic goes to endpoints.
    pub(crate) number: Option<Number>,
    /// Number of endpoints in either set.
    pub(crate) endpoints: u32,
    pub(crate) cluster_ip: IpAddr,
    pub(crate) external_ips: Box<[IpAddr]>,
    pub(crate) load_balancer_ips: Box<[IpAddr]>,
    pub(crate) source_ranges: Option<Arc<[IpNet]>>,
    pub(super) cluster: Slots,
    pub(super) local: Slots,
    pub(crate) on_node: Box<[Endpoint]>,
    pub(crate) serving: Box<[Endpoint]>,
}

impl Port {
    /// Without number and slots, which [`Self::place`] assigns; with the endpoints of either set, ordered.
    pub(super) fn new(of: ServicePort) -> (Self, EndpointSets) {
        let (uses_cluster, uses_local) = (of.uses_cluster(), of.uses_local());
        let set = |used: bool, mut set: Vec<Endpoint>| {
            set.sort_unstable();
            set.dedup();
            if used { set } else { Vec::new() }
        };
        let endpoints = EndpointSets::new(set(uses_cluster, of.cluster), set(uses_local, of.local));
        let port = Self {
            external_local: of.external_local && uses_local,
            has_any: of.has_any || !endpoints.all.is_empty(),
            name: of.name.port,
            protocol: of.name.protocol,
            internal_local: of.internal_local,
            port: of.port,
            node_port: of.node_port,
            last: 0,
            affinity_seconds: of.affinity_seconds,
            number: None,
            endpoints: u32::try_from(endpoints.all.len()).unwrap_or(u32::MAX),
            cluster_ip: of.cluster_ip,
            external_ips: of.external_ips.into(),
            load_balancer_ips: of.load_balancer_ips.into(),
            source_ranges: (!of.source_ranges.is_empty()).then(|| of.source_ranges.into()),
            cluster: Slots::default(),
            local: Slots::default(),
            on_node: of.on_node.into(),
            serving: of.serving.into(),
        };
        (port, endpoints)
    }

    /// Assigns its number, and its endpoints' slots as in `state`, which has the same number.
    pub(super) fn place(
        &mut self,
        number: Option<Number>,
        state: Option<&PortState>,
        endpoints: &EndpointSets,
    ) {
        let none = PortState { number: Number(0), last: 0, cluster: vec![], local: vec![], numbers: vec![] };
        let state = state.unwrap_or(&none);
        self.number = number;
        self.last = state.last;
        self.cluster.endpoints = arrange(&state.cluster, &endpoints.cluster);
        self.local.endpoints = arrange(&state.local, &endpoints.local);
        if !number.is_some_and(Number::has_affinity) {
            return;
        }
        let numbers = self::number(&state.numbers, &mut self.last, &endpoints.all).unwrap_or_default();
        let find = |endpoint: &Endpoint| {
            let at = numbers.binary_search_by(|(numbered, _)| numbered.cmp(endpoint)).ok()?;
            numbers.get(at).map(|(_, number)| *number)
        };
        for slots in [&mut self.cluster, &mut self.local] {
            slots.numbers = slots.endpoints.iter().filter_map(find).collect();
        }
    }

    /// Its state for the next version; `None` without a number.
    pub(super) fn state(&self) -> Option<PortState> {
        let mut numbers: Vec<_> = self.cluster.numbered().chain(self.local.numbered()).collect();
        numbers.sort_unstable();
        numbers.dedup();
        Some(PortState {
            number: self.number?,
            last: self.last,
            cluster: self.cluster.indexed().collect(),
            local: self.local.indexed().collect(),
            numbers,
        })
    }

    /// Whether X, W or NP exist.
    pub(super) fn is_external(&self) -> bool {
        self.node_port != 0 || !self.external_ips.is_empty() || !self.load_balancer_ips.is_empty()
    }

    /// The set that V chooses from, and its size.
    fn internal(&self) -> (Choice, usize) {
        if self.internal_local {
            (Choice::Local, self.local.len())
        } else {
            (Choice::Cluster, self.cluster.len())
        }
    }

    fn serves_internal(&self) -> bool {
        self.internal().1 != 0
    }

    fn serves_external(&self) -> bool {
        self.is_external() && (!self.cluster.is_empty() || (self.external_local && !self.local.is_empty()))
    }

    pub(super) fn target(&self, kind: FrontendKind) -> FrontendTarget {
        let serves =
            if kind == FrontendKind::ClusterIp { self.serves_internal() } else { self.serves_external() };
        match self.number {
            Some(number) if serves => FrontendTarget::Number(match self.counted(kind) {
                Some((choice, count)) => number.with_count(choice, count),
                None => number.uncounted(),
            }),
            _ if self.has_any => FrontendTarget::Drop,
            _ => FrontendTarget::Reject,
        }
    }

    /// The set and count that the number of frontends of a kind contains, if it does.
    fn counted(&self, kind: FrontendKind) -> Option<(Choice, u32)> {
        let chain = match kind {
            FrontendKind::ClusterIp => self.internal_chain(),
            FrontendKind::LoadBalancerIp | FrontendKind::ExternalIp | FrontendKind::NodePort
                if self.external_local =>
            {
                None
            }
            FrontendKind::LoadBalancerIp | FrontendKind::ExternalIp | FrontendKind::NodePort => {
                self.external_chain()
            }
        };
        match chain? {
            Chain::LoadBalance { choice, count } if count <= Number::COUNT_MAX => Some((choice, count)),
            _ => None,
        }
    }

    /// Sets and counts that its numbers contain: of V, and of X, W and NP.
    pub(super) fn all_counted(&self) -> impl Iterator<Item = (Choice, u32)> + use<> {
        self.counted(FrontendKind::ClusterIp).into_iter().chain(self.counted(FrontendKind::NodePort))
    }

    pub(super) fn frontends(&self) -> impl Iterator<Item = (Frontend, FrontendKind)> {
        let (protocol, port) = (self.protocol, self.port);
        let address = move |kind| move |ip: &IpAddr| (Frontend::Address { ip: *ip, protocol, port }, kind);
        let node_port = Frontend::NodePort { protocol, port: self.node_port };
        std::iter::once(&self.cluster_ip)
            .map(address(FrontendKind::ClusterIp))
            .chain(self.external_ips.iter().map(address(FrontendKind::ExternalIp)))
            .chain(self.load_balancer_ips.iter().map(address(FrontendKind::LoadBalancerIp)))
            .chain((self.node_port != 0).then_some((node_port, FrontendKind::NodePort)))
    }

    fn chain(&self, choice: Choice, count: usize) -> Option<Chain> {
        let count = u32::try_from(count).ok().filter(|count| *count != 0)?;
        Some(match self.number?.has_affinity() {
            true => Chain::Affinity {
                choice,
                count,
                seconds: self.affinity_seconds,
                group: self.number?.affinity_group(),
            },
            false => Chain::LoadBalance { choice, count },
        })
    }

    /// The chain that chooses for traffic to V.
    pub(super) fn internal_chain(&self) -> Option<Chain> {
        let (choice, count) = self.internal();
        self.chain(choice, count)
    }

    /// The chain that chooses from ClusterSet for traffic to X, W and NP.
    pub(super) fn external_chain(&self) -> Option<Chain> {
        if self.is_external() { self.chain(Choice::Cluster, self.cluster.len()) } else { None }
    }

    /// The chain that chooses from LocalSet for traffic to X, W and NP.
    pub(super) fn local_chain(&self) -> Option<Chain> {
        if self.external_local { self.chain(Choice::Local, self.local.len()) } else { None }
    }

    fn policy(&self) -> Option<Chain> {
        (self.number.is_some() && self.external_local && self.serves_external())
            .then_some(Chain::ExternalLocal)
    }

    pub(super) fn elements(&self) -> Vec<Element> {
        let mut elements = self.slot_elements();
        elements.extend(self.choice_elements());
        elements
    }

    /// Slots and affinity endpoints.
    pub(super) fn slot_elements(&self) -> Vec<Element> {
        let mut elements = Vec::with_capacity(self.cluster.len() + self.local.len());
        if let Some(number) = self.number {
            change_all_slots(number, None, Some(self), &mut collect(&mut elements));
        }
        elements
    }

    /// Verdicts that lead to slots.
    pub(super) fn choice_elements(&self) -> Vec<Element> {
        let mut elements = Vec::new();
        if let Some(number) = self.number {
            change_choices(number, None, Some(self), &mut collect(&mut elements));
        }
        elements
    }
}

fn collect(
    elements: &mut Vec<Element>,
) -> impl FnMut(SetName, Key, Option<Content>, Option<Content>) + use<'_> {
    |set, key, _, after| {
        elements.extend(after.map(|(key_end, value)| Element { set, key, key_end, value }));
    }
}

/// The endpoints of a service port before they get slots: each set ordered, without duplicates.
#[derive(Debug)]
pub(super) struct EndpointSets {
    cluster: Vec<Endpoint>,
    local: Vec<Endpoint>,
    all: Vec<Endpoint>,
}

impl EndpointSets {
    fn new(cluster: Vec<Endpoint>, local: Vec<Endpoint>) -> Self {
        let mut all = cluster.clone();
        if !local.is_empty() {
            all.extend_from_slice(&local);
            all.sort_unstable();
            all.dedup();
        }
        Self { cluster, local, all }
    }

    /// ClusterSet and LocalSet, ordered.
    pub(super) fn sets(&self) -> [&[Endpoint]; 2] {
        [&self.cluster, &self.local]
    }

    /// Whether no set in use has an endpoint, so that the service port serves no frontend.
    pub(super) fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    /// Whether there are few enough endpoints to number them, which affinity needs.
    pub(super) fn can_be_numbered(&self) -> bool {
        self.all.len() <= usize::from(super::numbers::MAX_ENDPOINT)
    }
}

/// Records how the own elements of a service port change.
pub(super) fn change_ledger(before: Option<&Port>, after: Option<&Port>, ledger: &mut Ledger) {
    change(before, after, &mut |set, key, before, after| ledger.change(set, key, before, after));
}

type ChainOf = fn(&Port) -> Option<Chain>;

type Sink<'a> = dyn FnMut(SetName, Key, Option<Content>, Option<Content>) + 'a;

/// Passes every own element of either to `sink`, also unchanged ones.
fn change(before: Option<&Port>, after: Option<&Port>, sink: &mut Sink<'_>) {
    let number = |port: Option<&Port>| port.and_then(|port| port.number);
    let (old, new) = (number(before), number(after));
    if old == new {
        if let Some(number) = new {
            change_numbered(number, before, after, sink);
        }
        return;
    }
    if let Some(number) = old {
        change_numbered(number, before, None, sink);
    }
    if let Some(number) = new {
        change_numbered(number, None, after, sink);
    }
}

fn change_numbered(number: Number, before: Option<&Port>, after: Option<&Port>, sink: &mut Sink<'_>) {
    change_choices(number, before, after, sink);
    change_all_slots(number, before, after, sink);
}

fn change_choices(number: Number, before: Option<&Port>, after: Option<&Port>, sink: &mut Sink<'_>) {
    let key = Key::new().number(number.uncounted());
    let choices: [(SetName, ChainOf); 4] = [
        (SetName::InternalChoice, |port| {
            port.internal_chain().filter(|_| port.counted(FrontendKind::ClusterIp).is_none())
        }),
        (SetName::ExternalChoice, |port| {
            port.external_chain().filter(|_| port.counted(FrontendKind::NodePort).is_none())
        }),
        (SetName::ExternalPolicy, Port::policy),
        (SetName::LocalChoice, Port::local_chain),
    ];
    for (set, chain) in choices {
        let content = |port: Option<&Port>| {
            port.and_then(chain).map(|chain| (None, Value::Verdict(Verdict::Goto(chain))))
        };
        sink(set, key, content(before), content(after));
    }
}

fn change_all_slots(number: Number, before: Option<&Port>, after: Option<&Port>, sink: &mut Sink<'_>) {
    let empty = Slots::default();
    let (old, new) =
        (before.map_or(&empty, |port| &port.cluster), after.map_or(&empty, |port| &port.cluster));
    let sets = [SetName::Slots, SetName::AffinitySlots, SetName::AffinityEndpoints];
    change_slots(number, sets, old, new, sink);
    let (old, new) = (before.map_or(&empty, |port| &port.local), after.map_or(&empty, |port| &port.local));
    let sets = [SetName::LocalSlots, SetName::LocalAffinitySlots, SetName::LocalAffinityEndpoints];
    change_slots(number, sets, old, new, sink);
}

/// `sets`: slots without affinity, slots with affinity, endpoints with affinity.
fn change_slots(number: Number, sets: [SetName; 3], before: &Slots, after: &Slots, sink: &mut Sink<'_>) {
    let [slots, affinity_slots, affinity_endpoints] = sets;
    let key = Key::new().number(number);
    let address = |endpoint: Endpoint| (None, Value::Data(Key::new().endpoint(endpoint)));
    let of_endpoint = |which: u16| Number(number.0 + u32::from(which));
    let indexes = (0..).take(before.len().max(after.len()));
    if !number.has_affinity() {
        let content = |slots: &Slots, index| slots.endpoints.get(index).map(|endpoint| address(*endpoint));
        for (at, index) in indexes.enumerate() {
            sink(slots, key.index(index), content(before, at), content(after, at));
        }
        return;
    }
    let content = |slots: &Slots, index| {
        let which = *slots.numbers.get(index)?;
        Some((None, Value::Data(Key::new().number(of_endpoint(which)))))
    };
    for (at, index) in indexes.enumerate() {
        sink(affinity_slots, key.index(index), content(before, at), content(after, at));
    }
    let numbered = |slots: &Slots| {
        let mut numbered: Vec<_> = slots.numbered().map(|(endpoint, which)| (which, endpoint)).collect();
        numbered.sort_unstable();
        numbered
    };
    let (before, after) = (numbered(before), numbered(after));
    let (mut before, mut after) = (before.into_iter().peekable(), after.into_iter().peekable());
    while let Some(which) = before.peek().into_iter().chain(after.peek()).map(|(which, _)| *which).min() {
        let old = before.next_if(|(other, _)| *other == which).map(|(_, endpoint)| address(endpoint));
        let new = after.next_if(|(other, _)| *other == which).map(|(_, endpoint)| address(endpoint));
        sink(affinity_endpoints, Key::new().number(of_endpoint(which)), old, new);
    }
}
