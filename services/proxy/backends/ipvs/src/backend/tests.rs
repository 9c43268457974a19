//! The backend with a kernel in memory.

use std::{
    collections::BTreeMap,
    net::IpAddr,
    sync::{Arc, Mutex, MutexGuard},
    time::Instant,
};

use keelson_client::ServiceName;
use keelson_proxy::{
    addresses::NodePortAddresses,
    backend::{Access, Backend, Check, Outcome},
    model::{Endpoint, Family, Protocol, ServicePort},
    options::Options,
};
use keelson_proxy_xtables::{
    names::{NODE_PORTS, Table},
    programs::{ProgramError, Programs},
};

use super::{
    IpvsBackend,
    fake::{FakeKernel, FakePrograms, State},
};
use crate::{
    kernel::{Kernel, KernelError},
    probe::OpenError,
    servers::{FoundServer, ServerKey, Socket, Spec},
    testing::{options, service_port},
};

const NODE: [&str; 3] = ["10.0.0.7", "127.0.0.1", "fd00::7"];

fn settings() -> Options {
    let mut options = options(&["10.244.0.0/16", "fd00:244::/64"]);
    options.node_port_addresses = NodePortAddresses::Cidrs(Vec::new());
    options
}

struct Node {
    state: Arc<Mutex<State>>,
    backend: IpvsBackend,
}

impl Node {
    fn new() -> Self {
        Self::after(Arc::default())
    }

    /// A proxy that starts with this kernel.
    fn after(state: Arc<Mutex<State>>) -> Self {
        let backend = open(&state);
        Self { state, backend }
    }

    fn restart(self) -> Self {
        Self::after(self.state)
    }

    fn kernel(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    fn set(&mut self, number: u8, change: impl FnOnce(&mut ServicePort)) {
        let mut port = web(number);
        change(&mut port);
        self.backend.set_service(Family::V4, &name(number), vec![port]);
    }

    fn sync(&mut self) -> Outcome {
        self.kernel().calls.clear();
        self.backend.sync(Family::V4, Instant::now()).unwrap()
    }

    fn check(&mut self) -> Outcome {
        let mut observer = self.backend.observer().unwrap();
        observer.read(Family::V4).unwrap();
        match self.backend.check(Family::V4, Instant::now()) {
            Check::Done(result) => result.unwrap(),
            other => panic!("{other:?}"),
        }
    }

    fn maintain(&mut self) -> Outcome {
        self.backend.maintain(Family::V4, Instant::now()).unwrap()
    }

    /// What a fresh proxy would change.
    fn difference(&self, numbers: &[u8]) -> Vec<String> {
        let mut other = open(&self.state);
        for number in numbers {
            other.set_service(Family::V4, &name(*number), vec![web(*number)]);
        }
        let mut lines = other.changes().unwrap();
        lines.retain(|line| line.starts_with("IPv4"));
        lines
    }
}

fn open(state: &Arc<Mutex<State>>) -> IpvsBackend {
    let (of_programs, of_kernel) = (state.clone(), state.clone());
    let find = move |family| -> Result<Box<dyn Programs>, ProgramError> {
        Ok(Box::new(FakePrograms { state: of_programs.clone(), family }))
    };
    let connect =
        move || -> Result<Box<dyn Kernel>, KernelError> { Ok(Box::new(FakeKernel(of_kernel.clone()))) };
    let options = settings();
    // Not to program: sysctls are the machine's.
    let mut backend = IpvsBackend::open(&find, &connect, &options, Access::Compare).unwrap();
    let local: Vec<IpAddr> = NODE.map(|ip| ip.parse().unwrap()).into();
    backend.set_addresses(&local);
    for family in Family::ALL {
        backend.set_node(options.node_config(&Default::default(), &local, family).unwrap());
    }
    backend
}

#[test]
fn chains_of_the_other_variant_are_removed_after_the_first_sync_and_after_a_failure() {
    let mut node = Node::new();
    node.set(1, |_| {});
    node.kernel().has_other_variant = [true; 2];
    node.kernel().refuses_other_variant = true;
    let has_other = |node: &Node| node.kernel().has_other_variant;
    assert!(node.backend.sync(Family::V4, Instant::now()).is_err());
    assert_eq!(has_other(&node), [true; 2]);
    node.sync();
    assert_eq!(has_other(&node), [false, true]);
    node.backend.sync(Family::V6, Instant::now()).unwrap();
    assert_eq!(has_other(&node), [false; 2]);
    // Later ones belong to a program that runs.
    node.kernel().has_other_variant = [true; 2];
    node.set(2, |_| {});
    node.sync();
    assert_eq!(has_other(&node), [true; 2]);
}

#[test]
fn only_what_the_node_lacks_disables_a_family() {
    let refused = |errno| KernelError::Refused {
        what: "add virtual server".into(),
        error: std::io::Error::from_raw_os_error(errno),
    };
    let late = || ProgramError::TimedOut { program: "ip6tables-restore".into() };
    let missing = || ProgramError::Missing { program: "ip6tables-restore".into(), package: "iptables" };
    type Fails<T> = Box<dyn Fn() -> T + Send + Sync>;
    let cases: [(Fails<OpenError>, bool); 5] = [
        (Box::new(move || late().into()), false),
        (Box::new(move || missing().into()), true),
        // ENOBUFS, EINVAL.
        (Box::new(move || refused(105).into()), false),
        (Box::new(move || refused(22).into()), true),
        (Box::new(|| KernelError::NoFamily(Family::V6).into()), true),
    ];
    for (fails, is_disabled) in cases {
        let expected = fails().to_string();
        let state: Arc<Mutex<State>> = Arc::default();
        let (of_programs, of_kernel, fails) = (state.clone(), state, Arc::new(fails));
        // Connects after it has found the programs.
        let opening = Arc::new(Mutex::new(Family::V4));
        let (found, connected) = (opening.clone(), fails.clone());
        let find = move |family| -> Result<Box<dyn Programs>, ProgramError> {
            *found.lock().unwrap() = family;
            match (family, fails()) {
                (Family::V6, OpenError::Programs(error)) => Err(error),
                _ => Ok(Box::new(FakePrograms { state: of_programs.clone(), family })),
            }
        };
        let connect = move || -> Result<Box<dyn Kernel>, KernelError> {
            match (*opening.lock().unwrap(), connected()) {
                (Family::V6, OpenError::Kernel(error)) => Err(error),
                _ => Ok(Box::new(FakeKernel(of_kernel.clone()))),
            }
        };
        match IpvsBackend::open(&find, &connect, &settings(), Access::Compare) {
            Ok(backend) => {
                assert!(is_disabled && backend.disabled_reason(Family::V4).is_none(), "{expected}");
                assert_eq!(backend.disabled_reason(Family::V6), Some(expected.as_str()));
            }
            Err(error) => {
                assert_eq!((error.to_string(), is_disabled), (expected, false));
                assert!(!error.is_fatal, "it is tried again");
            }
        }
    }
}

fn name(number: u8) -> ServiceName {
    ServiceName::new("default", &format!("service-{number}"))
}

fn endpoint(number: u8, host: u8) -> Endpoint {
    Endpoint { ip: [10, 244, number, host].into(), port: 8080 }
}

/// Two endpoints, of which the first is on the node, and every kind of frontend.
fn web(number: u8) -> ServicePort {
    let mut port = service_port(&name(number), "", [10, 96, 0, number].into(), 80);
    port.has_any = true;
    port.cluster = vec![endpoint(number, 1), endpoint(number, 2)];
    port.local = vec![endpoint(number, 1)];
    port.on_node = vec![endpoint(number, 1)];
    port.external_ips = vec![[192, 0, 2, number].into()];
    port.node_port = 30_000 + u16::from(number);
    port
}

fn key(ip: [u8; 4], port: u16) -> ServerKey {
    ServerKey::Socket(Socket { ip: ip.into(), protocol: Protocol::Tcp, port })
}

#[test]
fn case_56_one_endpoint_is_one_netlink_message() {
    let mut node = Node::new();
    (1..=5).for_each(|number| node.set(number, |_| {}));
    let first = node.sync();
    assert!(first.full);
    assert_eq!(node.kernel().servers[0].len(), 15, "cluster IP, external IP and node port of each");
    assert_eq!(node.kernel().addresses.as_ref().map(|all| all.len()), Some(10));
    assert!(node.sync().is_nothing());
    assert!(node.kernel().calls.is_empty());
    node.set(1, |port| port.external_ips.clear());
    node.sync();
    node.set(1, |port| {
        port.external_ips.clear();
        port.node_port = 0;
    });
    node.sync();
    node.set(1, |port| {
        port.external_ips.clear();
        port.node_port = 0;
        port.cluster.push(endpoint(1, 3));
    });
    let outcome = node.sync();
    assert_eq!((outcome.operations(), outcome.transactions), (1, 1));
    assert_eq!(node.kernel().calls, ["add 10.244.1.3:8080 to virtual server 10.96.0.1:80/TCP"]);
}

/// The chains of the backend iptables translate until the rules replace them.
#[test]
fn virtual_servers_are_there_before_the_chains_of_the_backend_iptables_are_replaced() {
    for (has_chains, first) in [(false, "rules "), (true, "addresses ")] {
        let mut node = Node::new();
        if has_chains {
            let chains = BTreeMap::from([(NODE_PORTS.to_owned(), Vec::new())]);
            node.kernel().chains[0].insert(Table::Nat, chains);
        }
        node.set(1, |_| {});
        assert_eq!(node.sync().replaced, has_chains.then_some("iptables"));
        let calls = node.kernel().calls.clone();
        let order = calls.iter().filter(|call| call.starts_with("rules ") || call.starts_with("addresses "));
        assert!(order.clone().next().is_some_and(|call| call.starts_with(first)), "{calls:?}");
        assert!(!node.kernel().chains[0][&Table::Nat].contains_key(NODE_PORTS), "it is replaced");
    }
}

#[test]
fn case_57_a_restart_changes_only_what_differs() {
    let mut node = Node::new();
    (1..=5).for_each(|number| node.set(number, |_| {}));
    node.sync();
    assert_eq!(node.difference(&[1, 2, 3, 4, 5]), [""; 0]);
    let mut node = node.restart();
    (1..=5).for_each(|number| node.set(number, |_| {}));
    let outcome = node.sync();
    assert!(outcome.full && outcome.is_nothing(), "{:?}", node.kernel().calls);
    let mut node = node.restart();
    (1..=4).for_each(|number| node.set(number, |_| {}));
    assert!(!node.difference(&[1, 2, 3, 4]).is_empty());
    node.sync();
    assert_eq!(node.kernel().servers[0].len(), 12);
    assert_eq!(node.kernel().addresses.as_ref().map(|all| all.len()), Some(8));
    assert_eq!(node.difference(&[1, 2, 3, 4]), [""; 0]);
}

#[test]
fn a_real_server_is_deleted_after_its_last_connection() {
    let mut node = Node::new();
    node.set(1, |_| {});
    node.sync();
    let (v, gone) = (key([10, 96, 0, 1], 80), endpoint(1, 2));
    node.kernel().destination(v, gone).connections = 1;
    node.set(1, |port| port.cluster = vec![endpoint(1, 1)]);
    node.sync();
    node.maintain();
    assert_eq!(node.kernel().destination(v, gone).weight, 0);
    assert!(node.check().is_nothing(), "a connection that ends is no drift");
    // A restart in between goes on.
    let mut node = node.restart();
    node.set(1, |port| port.cluster = vec![endpoint(1, 1)]);
    assert!(node.sync().is_nothing());
    node.kernel().destination(v, gone).connections = 0;
    assert_eq!(node.maintain().deleted, 1);
    assert_eq!(node.kernel().servers[0][&v].destinations.len(), 1);
    assert!(node.maintain().is_nothing());
}

#[test]
fn a_frontend_without_connections_is_gone_with_its_service() {
    let mut node = Node::new();
    node.set(1, |_| {});
    node.sync();
    node.backend.set_service(Family::V4, &name(1), Vec::new());
    node.sync();
    assert!(node.kernel().servers[0].is_empty());
    assert_eq!(node.kernel().addresses.as_ref().map(|all| all.len()), Some(0));
    assert!(node.maintain().is_nothing());
}

#[test]
fn the_address_of_a_removed_service_stays_for_its_connections() {
    let mut node = Node::new();
    node.set(1, |_| {});
    node.sync();
    let (v, ip) = (key([10, 96, 0, 1], 80), IpAddr::from([10, 96, 0, 1]));
    node.kernel().destination(v, endpoint(1, 1)).connections = 1;
    node.backend.set_service(Family::V4, &name(1), Vec::new());
    node.sync();
    node.maintain();
    assert_eq!(node.kernel().servers[0].keys().collect::<Vec<_>>(), [&v]);
    assert!(node.kernel().addresses.as_ref().unwrap().contains(&ip));
    assert!(node.check().is_nothing());
    node.kernel().destination(v, endpoint(1, 1)).connections = 0;
    node.maintain();
    assert!(node.kernel().servers[0].is_empty());
    assert_eq!(node.kernel().addresses.as_ref().map(|all| all.len()), Some(0));
}

#[test]
fn what_another_program_changes_is_repaired() {
    let mut node = Node::new();
    (1..=3).for_each(|number| node.set(number, |_| {}));
    node.sync();
    assert!(node.check().is_nothing());
    let other = Spec { scheduler: "wlc".into(), flags: 0, timeout: 0 };
    let (foreign, v) = (key([10, 0, 0, 7], 443), key([10, 96, 0, 2], 80));
    node.kernel().servers[0].insert(foreign, FoundServer { spec: other.clone(), destinations: Vec::new() });
    assert!(node.check().is_nothing(), "virtual servers of others are no drift");
    type Drift<'a> = &'a dyn Fn(&mut State);
    let drifts: [(&str, Drift<'_>); 7] = [
        ("a virtual server is gone", &|state| {
            state.servers[0].remove(&v);
        }),
        ("a real server is gone", &|state| {
            state.servers[0].get_mut(&v).unwrap().destinations.pop();
        }),
        ("a weight", &|state| state.destination(v, endpoint(2, 1)).weight = 7),
        ("a scheduler", &|state| state.servers[0].get_mut(&v).unwrap().spec.scheduler = "lc".into()),
        ("an address is gone", &|state| {
            state.addresses.as_mut().unwrap().pop_first();
        }),
        ("an address more", &|state| {
            state.addresses.as_mut().unwrap().insert([10, 9, 9, 9].into());
        }),
        ("an entry", &|state| state.sets.get_mut("KEELSON-4-EXTERNAL").unwrap().clear()),
    ];
    for (what, drift) in drifts {
        drift(&mut node.kernel());
        let outcome = node.check();
        assert!(outcome.repaired, "{what}");
        assert!(node.check().is_nothing(), "{what}");
        assert_eq!(node.difference(&[1, 2, 3]), [""; 0], "{what}");
    }
    node.kernel().addresses = None;
    assert!(node.check().repaired, "the interface is gone");
    assert_eq!(node.kernel().servers[0][&foreign].spec, other);
}

#[test]
fn case_59_a_sync_that_fails_anywhere_is_completed_by_the_next_one() {
    for restarts in [false, true] {
        let mut calls = 0;
        loop {
            let mut node = Node::new();
            (1..=4).for_each(|number| node.set(number, |_| {}));
            node.sync();
            let change = |node: &mut Node| {
                node.set(1, |port| {
                    port.has_any = false;
                    (port.cluster, port.local, port.on_node) = Default::default();
                });
                node.set(2, |port| port.external_local = true);
                node.set(3, |port| port.cluster.push(endpoint(3, 3)));
                node.backend.set_service(Family::V4, &name(4), Vec::new());
                node.set(5, |_| {});
            };
            change(&mut node);
            node.kernel().fails_after = Some(calls);
            let failed = node.backend.sync(Family::V4, Instant::now()).is_err();
            node.kernel().fails_after = None;
            if failed && restarts {
                node = node.restart();
                change(&mut node);
            }
            let outcome = node.sync();
            assert_eq!(outcome.full, failed, "{calls}");
            for _ in 0..3 {
                node.maintain();
            }
            let mut fresh = node.restart();
            change(&mut fresh);
            let mut lines = fresh.backend.changes().unwrap();
            lines.retain(|line| line.starts_with("IPv4"));
            assert_eq!(lines, [""; 0], "{calls}");
            if !failed {
                break;
            }
            calls += 1;
        }
        assert!(calls >= 6, "every step has failed once: {calls}");
    }
}

#[test]
fn case_33_pods_and_the_node_have_virtual_servers_of_their_own() {
    let mut node = Node::new();
    node.set(1, |port| port.external_local = true);
    node.sync();
    let kernel = node.kernel();
    let marks: Vec<u32> = kernel.servers[0]
        .iter()
        .filter_map(|(key, server)| match key {
            ServerKey::Mark(mark) => {
                assert_eq!(server.destinations.len(), 2);
                Some(*mark)
            }
            ServerKey::Socket(_) => None,
        })
        .collect();
    assert_eq!(marks.len(), 2);
    assert_eq!(marks[0] | 0x4000, marks[1], "the node's packets are marked for masquerading as well");
    assert_eq!(kernel.servers[0][&key([10, 0, 0, 7], 30_001)].destinations.len(), 1);
    let entry = format!("192.0.2.1,tcp:80 skbmark {:#x}/0x3fff", marks[0]);
    assert!(kernel.sets["KEELSON-4-LOCAL"].contains(&entry), "{:?}", kernel.sets);
    drop(kernel);
    node.set(1, |_| {});
    node.sync();
    node.maintain();
    assert!(node.kernel().servers[0].keys().all(|key| matches!(key, ServerKey::Socket(_))));
    assert_eq!(node.difference(&[1]), [""; 0]);
}

#[test]
fn an_address_that_the_node_has_is_not_bound() {
    let mut node = Node::new();
    node.set(1, |port| port.external_ips = vec![[10, 0, 0, 7].into()]);
    node.sync();
    let kernel = node.kernel();
    assert_eq!(kernel.addresses.iter().flatten().collect::<Vec<_>>(), [&IpAddr::from([10, 96, 0, 1])]);
    assert!(kernel.servers[0].contains_key(&key([10, 0, 0, 7], 80)));
    assert!(!kernel.sets["KEELSON-4-ADDRESSES"].contains("10.0.0.7"), "its other ports are the node's");
}

#[test]
fn the_printed_text_names_its_programs() {
    let mut node = Node::new();
    node.set(1, |port| port.affinity_seconds = 60);
    let mut text = String::new();
    node.backend.ruleset()(&mut text).unwrap();
    for line in [
        "# ipset restore -exist",
        "# iptables-restore --noflush",
        "# ipvsadm -R",
        "-A -t 10.96.0.1:80 -s rr -p 60",
        "-a -t 10.96.0.1:80 -r 10.244.1.2:8080 -m -w 1",
        "# ip -batch -",
        "address add 10.96.0.1/32 dev keelson-ipvs0 scope host",
    ] {
        assert!(text.lines().any(|have| have == line), "{line} in {text}");
    }
}
