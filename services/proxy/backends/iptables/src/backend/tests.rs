//! Failures between the steps of a sync, with the kernel. Needs root, iptables and ipset.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Instant,
};

use keelson_client::ServiceName;
use keelson_proxy::{
    addresses::NodePortAddresses,
    backend::{Access, Backend as _},
    model::{Endpoint, Family, ServicePort},
    options::{IptablesVariant, Options},
};

use keelson_proxy_xtables::ruleset::Plan as _;

use super::IptablesBackend;
use crate::{
    names::{SetName, Table},
    programs::{ProgramError, Programs, find},
    testing::{in_namespace, options, service_port},
};

/// No call that changes the kernel fails.
const NONE: usize = usize::MAX;

/// Programs of which a call fails before it does anything: as if the proxy had been killed there.
struct Failing {
    programs: Box<dyn Programs>,
    /// Number of calls that change something until one fails.
    left: Arc<AtomicUsize>,
}

impl Failing {
    fn count(&self) -> Result<(), ProgramError> {
        let left = self.left.load(Ordering::Relaxed);
        if left == 0 {
            return Err(ProgramError::TimedOut { program: "test".into() });
        }
        if left != NONE {
            self.left.store(left - 1, Ordering::Relaxed);
        }
        Ok(())
    }
}

impl Programs for Failing {
    fn save(&mut self, table: Table) -> Result<String, ProgramError> {
        self.programs.save(table)
    }

    fn restore(&mut self, input: &str) -> Result<(), ProgramError> {
        self.count()?;
        self.programs.restore(input)
    }

    fn save_sets(&mut self) -> Result<String, ProgramError> {
        self.programs.save_sets()
    }

    fn restore_sets(&mut self, input: &str) -> Result<(), ProgramError> {
        self.count()?;
        self.programs.restore_sets(input)
    }

    fn count_sets(&mut self) -> Result<Vec<(String, usize)>, ProgramError> {
        self.programs.count_sets()
    }

    fn prefers_small_sections(&self) -> bool {
        self.programs.prefers_small_sections()
    }

    fn generation(&self) -> Option<u32> {
        self.programs.generation()
    }

    fn remove_other_variant(&mut self, removed: &mut dyn FnMut(String)) -> Result<(), ProgramError> {
        self.count()?;
        self.programs.remove_other_variant(removed)
    }

    fn duplicate(&self) -> Box<dyn Programs> {
        Box::new(Self { programs: self.programs.duplicate(), left: self.left.clone() })
    }
}

fn settings(variant: IptablesVariant) -> Options {
    let mut options = options(&["10.244.0.0/16"]);
    options.node_port_addresses = NodePortAddresses::Cidrs(Vec::new());
    options.iptables.variant = variant;
    options
}

fn open(options: &Options, left: &Arc<AtomicUsize>) -> IptablesBackend {
    let (left, variant) = (left.clone(), options.iptables.variant);
    let find = move |family| -> Result<Box<dyn Programs>, ProgramError> {
        let programs = Box::new(find(family, variant)?);
        Ok(Box::new(Failing { programs, left: left.clone() }))
    };
    let mut backend = IptablesBackend::open(&find, options, Access::Program, Vec::new()).unwrap();
    backend.set_node(options.node_config(&Default::default(), &[], Family::V4).unwrap());
    backend
}

fn service(number: u8) -> ServiceName {
    ServiceName::new("default", &format!("service-{number}"))
}

fn ports(number: u8, endpoints: u8) -> Vec<ServicePort> {
    let mut port = service_port(&service(number), "", [10, 96, 0, number].into(), 80);
    port.has_any = endpoints > 0;
    port.cluster =
        (1..=endpoints).map(|at| Endpoint { ip: [10, 244, number, at].into(), port: 80 }).collect();
    port.on_node.clone_from(&port.cluster);
    port.affinity_seconds = u32::from(number % 2) * 60;
    port.node_port = 30_000 + u16::from(number);
    vec![port]
}

/// Endpoints come and go: every kind of change has its step.
fn before(backend: &mut IptablesBackend) {
    (0..12).for_each(|number| backend.set_service(Family::V4, &service(number), ports(number, 2)));
}

fn after(backend: &mut IptablesBackend) {
    before(backend);
    for (number, endpoints) in [(1, 0), (2, 0), (3, 4), (4, 1)] {
        backend.set_service(Family::V4, &service(number), ports(number, endpoints));
    }
    backend.set_service(Family::V4, &service(20), ports(20, 0));
    backend.set_service(Family::V4, &service(5), Vec::new());
}

#[test]
fn case_59_a_sync_that_fails_anywhere_is_completed_by_the_next_one() {
    for variant in [IptablesVariant::Legacy, IptablesVariant::Nft] {
        for restarted in [false, true] {
            for calls in 0..4 {
                in_namespace(|| {
                    let (options, left) = (settings(variant), Arc::new(AtomicUsize::new(NONE)));
                    let mut backend = open(&options, &left);
                    before(&mut backend);
                    backend.sync(Family::V4, Instant::now()).unwrap();
                    after(&mut backend);
                    left.store(calls, Ordering::Relaxed);
                    let result = backend.sync(Family::V4, Instant::now());
                    // Sets, rules, sets.
                    assert_eq!(result.is_err(), calls < 3, "{variant:?} {calls}: {result:?}");
                    left.store(NONE, Ordering::Relaxed);
                    if restarted {
                        backend = open(&options, &left);
                        after(&mut backend);
                    }
                    let outcome = backend.sync(Family::V4, Instant::now()).unwrap();
                    assert_eq!(outcome.full, calls < 3 || restarted);
                    // The kernel may use a set for a moment after its rules are gone.
                    let mut changes = Vec::new();
                    for _ in 0..50 {
                        backend.maintain(Family::V4, Instant::now()).unwrap();
                        let mut fresh = open(&options, &left);
                        after(&mut fresh);
                        changes = fresh.changes().unwrap();
                        changes.retain(|line| line.starts_with("IPv4"));
                        if changes.is_empty() {
                            break;
                        }
                        std::thread::sleep(std::time::Duration::from_millis(20));
                    }
                    assert_eq!(changes, Vec::<String>::new(), "{variant:?} {calls}");
                });
            }
        }
    }
}

#[test]
fn case_47_an_endpoint_that_comes_back_has_no_clients() {
    for variant in [IptablesVariant::Legacy, IptablesVariant::Nft] {
        for is_full in [false, true] {
            in_namespace(|| {
                let mut backend = open(&settings(variant), &Arc::new(AtomicUsize::new(NONE)));
                let sync = |endpoints, backend: &mut IptablesBackend| {
                    backend.set_service(Family::V4, &service(1), ports(1, endpoints));
                    backend.sync(Family::V4, Instant::now()).unwrap();
                };
                sync(2, &mut backend);
                let set = SetName::affinity(
                    Family::V4,
                    &ports(1, 0)[0].name,
                    Endpoint { ip: [10, 244, 1, 2].into(), port: 80 },
                );
                let clients = |backend: &mut IptablesBackend| {
                    let all = backend.open_state(Family::V4).unwrap().0.count_sets().unwrap();
                    all.into_iter().find(|(name, _)| name == set.as_str()).map(|(_, clients)| clients)
                };
                let add = format!("add {set} 192.0.2.1\n");
                backend.open_state(Family::V4).unwrap().0.restore_sets(&add).unwrap();
                assert_eq!(clients(&mut backend), Some(1));
                sync(1, &mut backend);
                if is_full {
                    backend.open_state(Family::V4).unwrap().1.plan_mut().invalidate();
                }
                sync(2, &mut backend);
                backend.maintain(Family::V4, Instant::now()).unwrap();
                assert_eq!(clients(&mut backend), Some(0), "{variant:?}: the set is in use again");
            });
        }
    }
}

#[test]
fn chains_of_the_other_variant_are_removed_after_a_failure() {
    let saved = |command: &str| {
        let output = std::process::Command::new(command).output().unwrap();
        String::from_utf8(output.stdout).unwrap()
    };
    for (from, to, save) in [
        (IptablesVariant::Legacy, IptablesVariant::Nft, "iptables-legacy-save"),
        (IptablesVariant::Nft, IptablesVariant::Legacy, "iptables-nft-save"),
    ] {
        // The calls of a first sync, of which the last one removes the chains.
        let mut failed_last = 0;
        for calls in 0..4 {
            in_namespace(|| {
                let left = Arc::new(AtomicUsize::new(NONE));
                let mut backend = open(&settings(from), &left);
                before(&mut backend);
                backend.sync(Family::V4, Instant::now()).unwrap();
                let mut backend = open(&settings(to), &left);
                before(&mut backend);
                assert!(saved(save).contains("KEELSON-"));
                left.store(calls, Ordering::Relaxed);
                if backend.sync(Family::V4, Instant::now()).is_err() && backend.has_synced(Family::V4) {
                    failed_last += 1;
                    assert!(saved(save).contains("KEELSON-"));
                }
                left.store(NONE, Ordering::Relaxed);
                backend.sync(Family::V4, Instant::now()).unwrap();
                assert!(!saved(save).contains("KEELSON-"), "{from:?} to {to:?}, {calls} calls");
            });
        }
        assert_eq!(failed_last, 1, "{from:?} to {to:?}");
    }
}

#[test]
fn only_what_the_node_lacks_disables_a_family() {
    let missing = ProgramError::Missing { program: "ip6tables-restore".into(), package: "iptables" };
    let lock = ProgramError::Failed {
        program: "ip6tables-legacy-restore".into(),
        status: "exit status: 4".into(),
        message: "Another app is currently holding the xtables lock. Stopped waiting after 5s.".into(),
    };
    let late = ProgramError::TimedOut { program: "ip6tables-restore".into() };
    in_namespace(|| {
        for (at, error, is_disabled) in [
            (Family::V6, &missing, true),
            (Family::V4, &missing, true),
            (Family::V6, &lock, false),
            (Family::V4, &lock, false),
            (Family::V6, &late, false),
        ] {
            let failing = error.clone();
            let find = move |family| -> Result<Box<dyn Programs>, ProgramError> {
                if family == at {
                    return Err(failing.clone());
                }
                Ok(Box::new(find(family, IptablesVariant::Nft)?))
            };
            let options = settings(IptablesVariant::Nft);
            match IptablesBackend::open(&find, &options, Access::Program, Vec::new()) {
                Ok(backend) => {
                    assert!(is_disabled && backend.disabled_reason(at).is_some(), "{at} {error}");
                }
                Err(opened) => {
                    assert_eq!((opened.to_string(), is_disabled), (error.to_string(), false));
                    assert!(!opened.is_fatal, "it is tried again");
                }
            }
        }
    });
}

#[test]
fn a_failed_first_sync_of_one_family_does_not_stop_the_other() {
    in_namespace(|| {
        let (options, left) = (settings(IptablesVariant::Legacy), Arc::new(AtomicUsize::new(NONE)));
        let mut backend = open(&options, &left);
        backend.set_node(options.node_config(&Default::default(), &[], Family::V6).unwrap());
        left.store(1, Ordering::Relaxed);
        assert!(backend.sync(Family::V4, Instant::now()).is_err());
        left.store(NONE, Ordering::Relaxed);
        assert!(backend.sync(Family::V6, Instant::now()).is_ok());
        assert!(!backend.has_synced(Family::V4) && backend.has_synced(Family::V6));
    });
}
