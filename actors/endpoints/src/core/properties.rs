//! Random histories: sources, failures and restarts in any order; in the end the published state equals the sources.
//!
//! [`Bench`] checks its invariants for every state on the way.

use std::{collections::BTreeMap, time::Duration};

use proptest::{collection::vec, prelude::*, sample::subsequence};

use super::{
    EndpointsPolicy,
    testing::{Bench, FailingStore, Marker, gone, policy, put},
};
use crate::{
    EndpointSlice, NodeView, ObjectEvent, Service, ServiceName, SourceKind,
    view::{
        self,
        tests::{http, n1, svc},
    },
};

/// Number of names of Services, and of slices: few, so that collisions occur.
const NAMES: usize = 5;

#[derive(Debug, Clone)]
enum Step {
    Service(usize, Option<u8>),
    Slice(usize, Option<(usize, u8)>),
    Zone(Option<bool>),
    /// Starts a listing of Services with the current objects; `true`: also ends it.
    ListServices(bool),
    ListSlices(bool),
    EndListings,
    Failing(usize, bool),
    Pass(u64),
    Slow(bool),
    Write,
    Disk(bool),
    /// Whether revisions can be noted outside of the store.
    Notes(bool),
    RestartActor,
    Restart,
    Kill(i64),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        8 => (0..NAMES, prop::option::weighted(0.7, 0_u8..4)).prop_map(|(name, of)| Step::Service(name, of)),
        8 => (0..NAMES, prop::option::weighted(0.7, (0..NAMES, 0_u8..8))).prop_map(|(name, of)| Step::Slice(name, of)),
        1 => prop::option::of(any::<bool>()).prop_map(Step::Zone),
        1 => any::<bool>().prop_map(Step::ListServices),
        1 => any::<bool>().prop_map(Step::ListSlices),
        2 => Just(Step::EndListings),
        1 => (0_usize..4, any::<bool>()).prop_map(|(kind, failing)| Step::Failing(kind, failing)),
        6 => (0_u64..30).prop_map(Step::Pass),
        1 => (0_u64..20_000).prop_map(Step::Pass),
        2 => any::<bool>().prop_map(Step::Slow),
        3 => Just(Step::Write),
        1 => any::<bool>().prop_map(Step::Disk),
        1 => any::<bool>().prop_map(Step::Notes),
        1 => Just(Step::RestartActor),
        1 => Just(Step::Restart),
        1 => (0_i64..3).prop_map(Step::Kill),
    ]
}

/// The true objects, and a source that reports them in order.
struct World {
    bench: Bench,
    services: BTreeMap<usize, Service>,
    slices: BTreeMap<usize, EndpointSlice>,
    node: NodeView,
    /// Listings in progress; they receive changes like every watch.
    listing: [bool; 2],
}

fn service(name: usize, kind: u8) -> Service {
    let service = svc().named("ns", &format!("s{name}"));
    match kind {
        0 => service.build(),
        1 => service.external_local().build(),
        2 => service.node_port(30_001).build(),
        _ => service.label("service.kubernetes.io/service-proxy-name", "other").build(),
    }
}

fn slice(name: usize, owner: usize, kind: u8) -> EndpointSlice {
    let words = ["", "L1", "R1", "L1 R1", "L1@a R1@b", "R2~", "L3 R3!", "R1@a R2@b"][usize::from(kind)];
    http(&format!("e{name}"), words).of("ns", &format!("s{owner}")).build()
}

impl World {
    fn all(&mut self) {
        let services: Vec<Service> = self.services.values().cloned().collect();
        let slices: Vec<EndpointSlice> = self.slices.values().cloned().collect();
        self.listing = [false; 2];
        self.bench.node(self.node.clone());
        self.bench.list_all(&services, &slices);
    }

    fn end_listings(&mut self) {
        if std::mem::take(&mut self.listing[0]) {
            let _ = self.bench.services(vec![ObjectEvent::ListComplete]);
        }
        if std::mem::take(&mut self.listing[1]) {
            let _ = self.bench.slices(vec![ObjectEvent::ListComplete]);
        }
    }

    fn perform(&mut self, step: Step) {
        match step {
            Step::Service(name, Some(kind)) => {
                let service = service(name, kind);
                let _ = self.bench.services(vec![put(&service)]);
                self.services.insert(name, service);
            }
            Step::Service(name, None) => {
                self.services.remove(&name);
                let _ = self.bench.services(vec![gone(&format!("ns/s{name}"))]);
            }
            Step::Slice(name, Some((owner, kind))) => {
                let slice = slice(name, owner, kind);
                let _ = self.bench.slices(vec![put(&slice)]);
                self.slices.insert(name, slice);
            }
            Step::Slice(name, None) => {
                self.slices.remove(&name);
                let _ = self.bench.slices(vec![gone(&format!("ns/e{name}"))]);
            }
            Step::Zone(zone) => {
                self.node.zone = zone.map(|first| if first { "a".into() } else { "b".into() });
                self.bench.node(self.node.clone());
            }
            Step::ListServices(ends) => {
                let services = self.services.values().map(put);
                let _ = self.bench.services(std::iter::once(ObjectEvent::Listing).chain(services).collect());
                self.listing[0] = true;
                if ends {
                    self.end_listings();
                }
            }
            Step::ListSlices(ends) => {
                let slices = self.slices.values().map(put);
                let _ = self.bench.slices(std::iter::once(ObjectEvent::Listing).chain(slices).collect());
                self.listing[1] = true;
                if ends {
                    self.end_listings();
                }
            }
            Step::EndListings => self.end_listings(),
            Step::Failing(kind, failing) => {
                self.bench.health(SourceKind::ALL[kind], failing.then_some("down"))
            }
            Step::Pass(millis) => self.bench.pass(millis),
            Step::Slow(slow) => {
                self.bench.slow = slow;
                self.bench.write();
            }
            Step::Write => self.bench.write(),
            Step::Disk(is_healthy) => {
                if is_healthy {
                    self.bench.store.repair();
                } else {
                    self.bench.store.fail_after(0);
                }
            }
            Step::Notes(works) => self.bench.marker.fail(!works),
            Step::RestartActor => {
                // A pending write ends first, even if nothing waits for it.
                if let Some((_, write)) = self.bench.writes.pop() {
                    let _ = crate::record::write(&*self.bench.store, &write);
                }
                self.bench.restart_actor();
                self.listing = [false; 2];
            }
            Step::Restart => {
                self.bench.writes.clear();
                self.bench.restart();
                self.listing = [false; 2];
            }
            Step::Kill(batches) => {
                self.bench.kill_in_write(batches);
                self.listing = [false; 2];
            }
        }
    }

    fn expected(&self) -> BTreeMap<ServiceName, keelson_proto::localnetv1::ServiceEndpoints> {
        let of = |service: &Service| {
            let metadata = service.metadata.as_ref().expect("named");
            let name = ServiceName::new(&metadata.namespace, &metadata.name);
            let slices: Vec<EndpointSlice> = self
                .slices
                .values()
                .filter(|slice| view::owner(slice).as_ref() == Some(&name))
                .cloned()
                .collect();
            Some((name, view::view(service, &slices, &self.node)?))
        };
        self.services.values().filter_map(of).collect()
    }

    fn check_the_end(&mut self) {
        self.bench.store.repair();
        self.bench.marker.fail(false);
        self.bench.slow = false;
        self.bench.write();
        for kind in SourceKind::ALL {
            self.bench.health(kind, None);
        }
        self.all();
        self.bench.pass(120_000);
        let truth = self.expected();
        let names: Vec<String> = truth.keys().map(ToString::to_string).collect();
        assert_eq!(self.bench.names(), names);
        for (name, service) in truth {
            assert_eq!(self.bench.service(name.as_str()), service);
        }
        assert_eq!((self.bench.stale(), self.bench.core.durable()), (String::new(), true));
        let (id, content) = (self.bench.id(), self.bench.content());
        let state = self.bench.core.state("", 0);
        let endpoints: usize = self.expected().values().map(|service| service.endpoints.len()).sum();
        assert_eq!(state.endpoints, endpoints as u64);
        self.bench.restart();
        assert_eq!((self.bench.id(), self.bench.content()), (id, content));
        self.all();
        assert_eq!((self.bench.id(), self.bench.stale()), (id, String::new()));
    }
}

fn world(policy: EndpointsPolicy, services: &[usize], slices: &[usize], marker: Marker) -> World {
    let mut bench = Bench::with(policy, FailingStore::new());
    bench.marker = marker;
    let mut world = World {
        bench,
        services: services.iter().map(|name| (*name, service(*name, 0))).collect(),
        slices: slices.iter().map(|name| (*name, slice(*name, *name, 3))).collect(),
        node: n1(),
        listing: [false; 2],
    };
    world.all();
    world
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn readers_converge_to_the_state_of_the_sources(
        services in subsequence((0..NAMES).collect::<Vec<_>>(), 0..=NAMES),
        slices in subsequence((0..NAMES).collect::<Vec<_>>(), 0..=NAMES),
        marker in prop_oneof![Just(Marker::Missing), Just(Marker::Works(None))],
        steps in vec(step(), 1..60),
    ) {
        let mut world = world(policy(), &services, &slices, marker);
        for step in steps {
            world.perform(step);
        }
        world.check_the_end();
    }

    #[test]
    fn without_failures_every_reader_can_resume(
        steps in vec(step().prop_filter("quiet", |step| {
            !matches!(step, Step::Disk(false) | Step::Kill(_) | Step::Restart | Step::RestartActor)
        }), 1..60),
        restart_at in 0_usize..60,
        marker in prop_oneof![Just(Marker::Missing), Just(Marker::Works(None))],
    ) {
        // Do not give up a slow disk.
        let patient = EndpointsPolicy { write_timeout: Duration::MAX, ..policy() };
        let mut world = world(patient, &[0, 1, 2], &[0, 1], marker);
        for (number, step) in steps.into_iter().enumerate() {
            if number == restart_at {
                world.bench.write();
                world.bench.slow = false;
                world.bench.write();
                world.bench.restart();
                world.all();
            }
            world.perform(step);
        }
        world.check_the_end();
        let (known, of) = world.bench.resumable();
        prop_assert_eq!(known, of, "revisions to resume from");
        prop_assert_eq!(world.bench.identities(), 1);
    }
}
