//! Random histories of Services, with a model of the maps.

use std::{collections::BTreeMap, time::Duration};

use proptest::prelude::*;

use super::*;

#[derive(Debug, Clone)]
enum Step {
    /// Service, its endpoints and what it has besides; without endpoints and `false`: deleted.
    Set(u8, BTreeSet<u16>, Extra),
    Delete(u8),
    /// The pods are detected or not.
    Facts(bool),
    /// Time passes.
    Pause,
    /// The process starts again.
    Restart,
    /// A sync fails: everything is compared.
    Full,
}

#[derive(Debug, Clone, Copy)]
struct Extra {
    is_udp: bool,
    has_affinity: bool,
    is_local: bool,
    has_node_port: bool,
    shares_address: bool,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let extra =
        any::<[bool; 5]>().prop_map(|[is_udp, has_affinity, is_local, has_node_port, shares_address]| {
            Extra { is_udp, has_affinity, is_local, has_node_port, shares_address }
        });
    let step = prop_oneof![
        8 => (0_u8..6, prop::collection::btree_set(0_u16..8, 0..6), extra).prop_map(|(s, e, x)| Step::Set(s, e, x)),
        2 => (0_u8..6).prop_map(Step::Delete),
        1 => any::<bool>().prop_map(Step::Facts),
        2 => Just(Step::Pause),
        1 => Just(Step::Restart),
        1 => Just(Step::Full),
    ];
    prop::collection::vec(step, 1..60)
}

fn service_port_of(service: u8, numbers: &BTreeSet<u16>, extra: Extra) -> ServicePort {
    let all: Vec<u16> = numbers.iter().copied().collect();
    let text = format!("s{service}");
    let mut port = port(&text, service, &all);
    if extra.is_udp {
        port.name.protocol = Protocol::Udp;
        port.serving = port.cluster.clone();
    }
    port.affinity_seconds = u32::from(extra.has_affinity) * 10;
    if extra.is_local {
        port.internal_local = true;
        port.external_local = true;
        port.local = endpoints(all.iter().copied().filter(|number| number % 2 == 0));
    }
    port.node_port = u16::from(extra.has_node_port) * (30_000 + u16::from(service));
    if extra.shares_address {
        port.external_ips = vec![ip("203.0.113.1")];
    }
    port
}

/// What a frontend leads to.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Leads {
    to: BTreeSet<Endpoint>,
    owner: PortName,
    set: SetKind,
}

type Wanted = BTreeMap<FrontendKey, Leads>;

/// What each frontend shall lead to, by the policies alone.
fn wanted(services: &BTreeMap<u8, ServicePort>, facts: NodeFacts) -> Wanted {
    let mut claims = Claims::default();
    for port in services.values() {
        claims.add(port, &port.clone());
    }
    let found = claims.frontends().filter_map(|frontend| {
        let (kind, owner, port) = claims.owner(frontend)?;
        let policy = Policy { port, node: facts };
        let set = policy.of(kind).ok()?;
        let to = policy.endpoints(set).iter().copied().collect();
        Some((FrontendKey::of(frontend, Family::V4), Leads { to, owner: owner.clone(), set }))
    });
    found.collect()
}

struct History {
    plan: Plan,
    services: BTreeMap<u8, ServicePort>,
    facts: NodeFacts,
    contents: Contents,
    now: Instant,
    capacity: Capacity,
}

impl History {
    fn new(capacity: Capacity) -> Self {
        let facts = NodeFacts { detects_pods: true, ..NodeFacts::default() };
        let mut history = Self {
            plan: Plan::new(capacity),
            services: BTreeMap::new(),
            facts,
            contents: Contents::default(),
            now: Instant::now(),
            capacity,
        };
        history.restart();
        history
    }

    fn restart(&mut self) {
        self.plan = Plan::new(self.capacity);
        self.plan.set_facts(Family::V4, self.facts);
        for (service, port) in &self.services {
            self.plan.set(Family::V4, &name(&format!("s{service}")), vec![port.clone()]);
        }
    }

    /// Whether the sync compares everything.
    fn step(&mut self, step: Step) -> bool {
        match step {
            Step::Set(service, numbers, extra) => {
                let port = service_port_of(service, &numbers, extra);
                self.plan.set(Family::V4, &name(&format!("s{service}")), vec![port.clone()]);
                self.services.insert(service, port);
            }
            Step::Delete(service) => {
                self.plan.set(Family::V4, &name(&format!("s{service}")), vec![]);
                self.services.remove(&service);
            }
            Step::Facts(detects_pods) => {
                self.facts.detects_pods = detects_pods;
                self.plan.set_facts(Family::V4, self.facts);
            }
            Step::Pause => self.now += Duration::from_secs(2),
            Step::Restart => {
                self.restart();
                return true;
            }
            Step::Full => return true,
        }
        false
    }

    /// The set of a service port, as it is now.
    fn set_now(&self, leads: &Leads) -> Option<BTreeSet<Endpoint>> {
        let port = self.services.values().find(|port| port.name == leads.owner)?;
        Some(Policy { port, node: self.facts }.endpoints(leads.set).iter().copied().collect())
    }

    /// Applies the changes one by one; after each, every frontend leads to the endpoints of before or of afterwards, or is
    /// left to packets. One that a service port loses may lead to the new endpoints of this service port until then.
    fn sync(&mut self, is_full: bool, before: &Wanted) {
        let changes = match is_full {
            true => self.plan.full(Family::V4, &self.contents, self.now),
            false => self.plan.changes(Family::V4, self.now),
        };
        let after = wanted(&self.services, self.facts);
        for change in &changes {
            apply(&mut self.contents, change);
            for key in self.contents.frontends.keys() {
                let Some(found) = resolve(&self.contents, key) else { continue };
                let is_known = [before, &after]
                    .into_iter()
                    .filter_map(|state| state.get(key))
                    .any(|leads| leads.to == found || self.set_now(leads).as_ref() == Some(&found));
                assert!(is_known, "{key} leads to {found:?} after {change}");
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn programs_meet_the_old_state_or_the_new_one(steps in steps()) {
        let mut history = History::new(ROOM);
        history.sync(true, &BTreeMap::new());
        for step in steps {
            let before = wanted(&history.services, history.facts);
            let is_full = history.step(step);
            history.sync(is_full, &before);
            let wanted: BTreeMap<_, _> = wanted(&history.services, history.facts)
                .into_iter()
                .map(|(key, leads)| (key, leads.to))
                .collect();
            let found: BTreeMap<_, _> = history.contents.frontends.keys()
                .map(|key| (*key, resolve(&history.contents, key).unwrap()))
                .collect();
            prop_assert_eq!(found, wanted);
            // Nothing is left behind, and the books are right.
            let mut planned = history.plan.contents(Family::V4);
            let used = (planned.sets.len(), planned.members.len());
            let slots = std::mem::take(&mut planned.slots);
            let mut kept = history.contents.clone();
            prop_assert!(slots.iter().all(|(place, slot)| kept.slots.get(place) == Some(slot)));
            kept.slots.clear();
            prop_assert_eq!(kept, planned);
            let usage = history.plan.usage(Family::V4);
            prop_assert_eq!(usage.left_out, 0);
            prop_assert_eq!((usage.sets, usage.members), used);
        }
    }

    #[test]
    fn without_room_nothing_wrong_is_there(steps in steps()) {
        stays_right_without_room(steps);
    }
}

/// With little room, what is there is right, and what is missing is missing for lack of room.
fn stays_right_without_room(steps: Vec<Step>) {
    let capacity =
        Capacity { frontends: 6, sets: 3, members: 6, node_addresses: 6, source_ranges: 3, slots: 8 };
    let mut history = History::new(capacity);
    history.sync(true, &BTreeMap::new());
    for step in steps {
        let before = wanted(&history.services, history.facts);
        let is_full = history.step(step);
        history.sync(is_full, &before);
        let Contents { frontends, sets, members, .. } = &history.contents;
        assert!(frontends.len() <= capacity.frontends && sets.len() <= capacity.sets);
        assert!(members.len() <= capacity.members);
        let wanted = wanted(&history.services, history.facts);
        for key in frontends.keys() {
            assert_eq!(resolve(&history.contents, key), wanted.get(key).map(|leads| leads.to.clone()));
        }
    }
}

/// The fourth Service shares an address with the first one, which has no room after the restart: it does not take over its number.
#[test]
fn an_address_that_is_shared_leads_to_no_other_service_after_a_restart() {
    let plain = Extra {
        is_udp: false,
        has_affinity: false,
        is_local: false,
        has_node_port: false,
        shares_address: false,
    };
    let sharing = Extra { shares_address: true, ..plain };
    stays_right_without_room(vec![
        Step::Set(4, [0, 1].into(), Extra { is_local: true, ..sharing }),
        Step::Set(0, [0].into(), plain),
        Step::Set(1, [0].into(), Extra { is_udp: true, ..plain }),
        Step::Set(5, [0].into(), sharing),
        Step::Restart,
    ]);
}
