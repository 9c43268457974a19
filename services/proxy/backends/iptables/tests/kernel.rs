//! The backend in the kernel, with both variants of iptables, in network namespaces. Needs root, iptables and ipset.

#![allow(clippy::unwrap_used, clippy::expect_used)]

#[path = "../../../src/testing.rs"]
mod testing;

use std::{
    io::Read as _,
    net::{IpAddr, SocketAddr, TcpListener, TcpStream},
    process::Command,
    time::{Duration, Instant},
};

use keelson_client::ServiceName;
use keelson_proxy::{
    addresses::NodePortAddresses,
    backend::{Access, Backend, Check, Driver, Outcome, RuleOwner},
    model::{Endpoint, Family, Protocol, ServicePort},
    options::{IptablesVariant, NodeConfig, Options},
};
use keelson_proxy_iptables::Iptables;
use testing::{in_namespace, options, service_port};

const VARIANTS: [IptablesVariant; 2] = [IptablesVariant::Legacy, IptablesVariant::Nft];

fn settings(variant: IptablesVariant) -> Options {
    let mut options = options(&["10.244.0.0/16", "fd00:244::/64"]);
    options.node_port_addresses = NodePortAddresses::Cidrs(Vec::new());
    options.iptables.variant = variant;
    options
}

fn open(options: &Options) -> Box<dyn Backend> {
    let mut backend = Iptables.open(options, Access::Program).unwrap();
    for family in Family::ALL {
        assert_eq!(backend.disabled_reason(family), None);
        backend.set_node(node(options, family));
    }
    backend
}

fn node(options: &Options, family: Family) -> NodeConfig {
    options.node_config(&Default::default(), &[], family).unwrap()
}

fn run(command: &str) -> String {
    let output = Command::new("sh").args(["-c", command]).output().unwrap();
    assert!(output.status.success(), "{command}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn program(variant: IptablesVariant) -> &'static str {
    if variant == IptablesVariant::Legacy { "iptables-legacy" } else { "iptables-nft" }
}

fn name(number: usize) -> ServiceName {
    ServiceName::new("default", &format!("service-{number}"))
}

fn ip(family: Family, net: u16, host: usize) -> IpAddr {
    let host = u16::try_from(host).unwrap();
    match family {
        Family::V4 => {
            IpAddr::from([10, u8::try_from(net).unwrap(), host.to_be_bytes()[0], host.to_be_bytes()[1]])
        }
        Family::V6 => IpAddr::from([0xfd00, net, 0, 0, 0, 0, 0, host]),
    }
}

/// A Service with everything that has rules of its own.
fn rich(family: Family, number: usize) -> Vec<ServicePort> {
    let mut port = service_port(&name(number), "http", ip(family, 96, number + 1), 80);
    port.has_any = true;
    port.cluster = (1..=3).map(|at| Endpoint { ip: ip(family, 244, number * 10 + at), port: 8080 }).collect();
    port.local = vec![port.cluster[0]];
    port.on_node = vec![port.cluster[0]];
    port.external_ips = vec![ip(family, 120, number + 1)];
    port.load_balancer_ips = vec![ip(family, 121, number + 1)];
    port.node_port = 30_000 + u16::try_from(number).unwrap();
    match number % 6 {
        1 => port.external_local = true,
        2 => port.affinity_seconds = 60,
        3 => {
            let range = if family == Family::V4 { "192.0.2.0/24" } else { "2001:db8::/64" };
            port.source_ranges = vec![range.parse().unwrap()];
        }
        4 => {
            (port.external_local, port.internal_local) = (true, true);
            port.local = Vec::new();
            port.name.protocol = Protocol::Udp;
        }
        5 => {
            port.has_any = false;
            (port.cluster, port.local, port.on_node) = Default::default();
            port.name.protocol = Protocol::Sctp;
        }
        _ => {}
    }
    vec![port]
}

fn fill(backend: &mut dyn Backend, services: usize) {
    for family in Family::ALL {
        for number in 0..services {
            backend.set_service(family, &name(number), rich(family, number));
        }
    }
}

fn sync(backend: &mut dyn Backend) -> Outcome {
    let outcomes = Family::ALL.map(|family| backend.sync(family, Instant::now()).unwrap());
    outcomes.into_iter().fold(Outcome::default(), Outcome::plus)
}

/// What a fresh proxy would change.
fn difference(options: &Options, services: usize) -> Vec<String> {
    let mut other = Iptables.open(options, Access::Compare).unwrap();
    Family::ALL.into_iter().for_each(|family| other.set_node(node(options, family)));
    fill(other.as_mut(), services);
    other.changes().unwrap()
}

#[test]
fn case_56_57_a_restart_and_a_sync_without_a_change_do_nothing() {
    for variant in VARIANTS {
        in_namespace(|| {
            let options = settings(variant);
            let mut backend = open(&options);
            fill(backend.as_mut(), 60);
            assert!(sync(backend.as_mut()).full);
            assert_eq!(difference(&options, 60), Vec::<String>::new(), "{variant:?}");
            assert!(sync(backend.as_mut()).is_nothing());
            fill(backend.as_mut(), 60);
            assert!(sync(backend.as_mut()).is_nothing(), "the same Services again");
            drop(backend);

            let mut backend = open(&options);
            fill(backend.as_mut(), 60);
            let outcome = sync(backend.as_mut());
            assert!(outcome.full && outcome.is_nothing(), "{variant:?} {outcome:?}");
            // One endpoint of one Service: one chain in each family.
            for family in Family::ALL {
                let mut ports = rich(family, 6);
                ports[0].cluster[2].port = 9090;
                backend.set_service(family, &name(6), ports);
            }
            let outcome = sync(backend.as_mut());
            assert_eq!((outcome.structure, outcome.added, outcome.deleted), (2, 0, 0), "{variant:?}");
            // A Service less: its chains, a leaf for addresses and one for node ports.
            for family in Family::ALL {
                backend.set_service(family, &name(12), Vec::new());
            }
            let outcome = sync(backend.as_mut());
            assert!(!outcome.full && outcome.structure <= 2 * 8, "{variant:?} {outcome:?}");
        });
    }
}

#[test]
fn what_another_program_changes_is_repaired() {
    for variant in VARIANTS {
        in_namespace(|| {
            let options = settings(variant);
            let iptables = program(variant);
            let mut backend = open(&options);
            fill(backend.as_mut(), 12);
            sync(backend.as_mut());
            let mut observer = backend.observer().unwrap();
            let mut check = |backend: &mut dyn Backend| {
                let _is_due = backend.begin_check(Family::V4).unwrap();
                observer.read(Family::V4).unwrap();
                match backend.check(Family::V4, Instant::now()) {
                    Check::Done(result) => result.unwrap(),
                    other => panic!("{other:?}"),
                }
            };
            assert!(check(backend.as_mut()).is_nothing());
            if variant == IptablesVariant::Nft {
                assert!(!backend.begin_check(Family::V4).unwrap(), "nothing has changed");
                std::thread::sleep(Duration::from_secs(2));
                run("iptables-nft -t filter -N OTHER");
                assert!(backend.begin_check(Family::V4).unwrap(), "another program has changed rules");
            }
            let own =
                format!("{iptables} -w 5 -t nat -N OTHER; {iptables} -w 5 -t nat -A PREROUTING -j OTHER");
            run(&own);
            assert!(check(backend.as_mut()).is_nothing(), "rules of others are no drift");
            for (drift, operations) in [
                (format!("{iptables} -w 5 -t nat -F KEELSON-SERVICES"), 1),
                (format!("{iptables} -w 5 -t nat -D PREROUTING -j KEELSON-SERVICES"), 1),
                (format!("{iptables} -w 5 -t filter -F INPUT"), 1),
                (format!("{iptables} -w 5 -t nat -N KEELSON-OLD"), 1),
                ("ipset flush KEELSON-4-REJECT".to_owned(), 6),
                ("ipset add KEELSON-4-DROP 10.1.2.3,tcp:4".to_owned(), 1),
                (format!("{iptables} -w 5 -t nat -A POSTROUTING -j KEELSON-POSTROUTING"), 1),
            ] {
                run(&drift);
                let outcome = check(backend.as_mut());
                assert!(outcome.repaired, "{variant:?} {drift}");
                assert_eq!(outcome.operations(), operations, "{variant:?} {drift}");
                assert!(check(backend.as_mut()).is_nothing(), "{variant:?} {drift}");
            }
            run(&format!("{iptables} -w 5 -t nat -F; ipset flush KEELSON-4-REJECT"));
            assert!(check(backend.as_mut()).repaired);
            assert_eq!(difference(&options, 12), Vec::<String>::new());
        });
    }
}

#[test]
fn removing_the_rules_leaves_those_of_others() {
    for variant in VARIANTS {
        in_namespace(|| {
            let iptables = program(variant);
            run(&format!(
                "{iptables} -t nat -A POSTROUTING -s 10.9.0.0/16 -j MASQUERADE; ipset create other hash:ip"
            ));
            let before = run(&format!("{iptables}-save | grep '^-A'; ipset list -name"));
            let mut backend = open(&settings(variant));
            fill(backend.as_mut(), 20);
            sync(backend.as_mut());
            let first = run(&format!("{iptables} -t nat -S POSTROUTING | grep -A1 '^-P'"));
            assert!(first.contains("KEELSON-POSTROUTING"), "our jump is the first rule: {first}");
            let mut removed = Vec::new();
            Iptables.remove_rules(RuleOwner::Keelson, &mut |object| removed.push(object)).unwrap();
            assert_eq!(removed.len(), 4, "{removed:?}");
            assert_eq!(run(&format!("{iptables}-save | grep '^-A'; ipset list -name")), before);
            let saved = run(&format!("{iptables}-save; ipset save"));
            assert!(!saved.contains("KEELSON"), "{saved}");
        });
    }
}

#[test]
fn the_other_variant_is_removed_after_the_first_sync() {
    in_namespace(|| {
        let mut backend = open(&settings(IptablesVariant::Legacy));
        fill(backend.as_mut(), 6);
        sync(backend.as_mut());
        let mut backend = open(&settings(IptablesVariant::Nft));
        assert!(run("iptables-legacy-save").contains("KEELSON"));
        fill(backend.as_mut(), 6);
        sync(backend.as_mut());
        assert!(!run("iptables-legacy-save").contains("KEELSON"));
        assert!(run("iptables-nft-save").contains("KEELSON"));
    });
}

#[test]
fn the_printed_rules_can_be_loaded() {
    for variant in VARIANTS {
        in_namespace(|| {
            let options = settings(variant);
            let mut backend = Iptables.open(&options, Access::Print).unwrap();
            Family::ALL.into_iter().for_each(|family| backend.set_node(node(&options, family)));
            fill(backend.as_mut(), 20);
            let mut text = String::new();
            backend.ruleset()(&mut text).unwrap();
            for part in text.split("\n# ") {
                let part = part.trim_start_matches("# ");
                let (command, input) = part.split_once('\n').unwrap();
                let suffix =
                    if variant == IptablesVariant::Legacy { "-legacy-restore" } else { "-nft-restore" };
                let command = command.replace("-restore", suffix);
                let file = std::env::temp_dir().join(format!("keelson-print-{}", std::process::id()));
                std::fs::write(&file, format!("{input}\n")).unwrap();
                run(&format!("{command} < {}", file.display()));
                std::fs::remove_file(file).unwrap();
            }
            assert_eq!(difference(&options, 20), Vec::<String>::new(), "{variant:?}");
        });
    }
}

/// A node with two endpoints of its own, each of which answers with a letter.
struct World {
    backend: Box<dyn Backend>,
    _servers: Vec<TcpListener>,
}

const A: &str = "10.244.0.1:8080";
const B: &str = "10.244.0.2:8080";

impl World {
    fn new(options: &Options) -> Self {
        run("ip link add net0 type veth peer name net1; ip link set net0 up; ip link set net1 up; ip addr add 10.0.0.7/24 dev net0
             ip addr add 10.244.0.1/24 dev net0; ip addr add 10.244.0.2/24 dev net0; ip route add default dev net0");
        let serve = |address: &str, letter: &'static [u8]| {
            let listener = TcpListener::bind(address).unwrap();
            let accepting = listener.try_clone().unwrap();
            std::thread::spawn(move || {
                while let Ok((mut stream, _)) = accepting.accept() {
                    use std::io::Write as _;
                    let _ = stream.write_all(letter);
                }
            });
            listener
        };
        Self { backend: open(options), _servers: vec![serve(A, b"a"), serve(B, b"b")] }
    }

    fn set(&mut self, change: impl FnOnce(&mut ServicePort)) {
        let mut port = service_port(&name(0), "http", "10.96.0.1".parse().unwrap(), 80);
        port.has_any = true;
        port.cluster = [A, B].map(endpoint).into();
        port.node_port = 30_080;
        port.load_balancer_ips = vec!["192.0.2.80".parse().unwrap()];
        change(&mut port);
        self.backend.set_service(Family::V4, &name(0), vec![port]);
        sync(self.backend.as_mut());
    }
}

fn endpoint(text: &str) -> Endpoint {
    let address: SocketAddr = text.parse().unwrap();
    Endpoint { ip: address.ip(), port: address.port() }
}

#[derive(Debug, PartialEq, Eq)]
enum Answer {
    From(char),
    Rejected,
    Nothing,
}

fn ask(address: &str) -> Answer {
    match TcpStream::connect_timeout(&address.parse().unwrap(), Duration::from_millis(400)) {
        Ok(mut stream) => {
            let mut letter = [0];
            stream.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
            stream.read_exact(&mut letter).unwrap();
            Answer::From(char::from(letter[0]))
        }
        Err(error) if error.kind() == std::io::ErrorKind::ConnectionRefused => Answer::Rejected,
        Err(_) => Answer::Nothing,
    }
}

#[test]
fn packets_reach_endpoints_and_refusals() {
    let (v, w, np, loopback) = ("10.96.0.1:80", "192.0.2.80:80", "10.0.0.7:30080", "127.0.0.1:30080");
    for variant in VARIANTS {
        in_namespace(|| {
            let mut world = World::new(&settings(variant));
            world.set(|_| {});
            for address in [v, w, np, loopback] {
                let answers: Vec<Answer> = (0..40).map(|_| ask(address)).collect();
                assert!(answers.contains(&Answer::From('a')), "{variant:?} {address} {answers:?}");
                assert!(answers.contains(&Answer::From('b')), "{variant:?} {address} {answers:?}");
                assert!(
                    answers.iter().all(|answer| matches!(answer, Answer::From(_))),
                    "{variant:?} {address}"
                );
            }
            // Case 39.
            world.set(|port| (port.has_any, port.cluster) = (false, Vec::new()));
            for address in [v, w, np, loopback] {
                assert_eq!(ask(address), Answer::Rejected, "{variant:?} {address}");
            }
            // Case 32.
            world.set(|port| port.internal_local = true);
            assert_eq!(ask(v), Answer::Nothing, "{variant:?}");
            assert!(matches!(ask(w), Answer::From(_)), "{variant:?}");
            // Case 34: the node itself reaches endpoints elsewhere.
            world.set(|port| port.external_local = true);
            assert!(matches!(ask(np), Answer::From(_)), "{variant:?}");
            // Case 40: the node is not in the ranges.
            world.set(|port| port.source_ranges = vec!["198.51.100.0/24".parse().unwrap()]);
            assert_eq!(ask(w), Answer::Nothing, "{variant:?}");
            assert!(matches!(ask(np), Answer::From(_)), "{variant:?}");
            world.set(|port| port.source_ranges = vec!["10.0.0.0/24".parse().unwrap()]);
            assert!(matches!(ask(w), Answer::From(_)), "{variant:?}");
            // Case 47: one endpoint for all frontends, also after a restart.
            world.set(|port| port.affinity_seconds = 60);
            let first = ask(v);
            for address in [v, v, w, v, w, v, v, v] {
                assert_eq!(ask(address), first, "{variant:?} {address}");
            }
            world.backend = open(&settings(variant));
            world.set(|port| port.affinity_seconds = 60);
            assert!((0..8).all(|_| ask(v) == first), "{variant:?}");
            // The target is removed: another one.
            let other = if first == Answer::From('a') { B } else { A };
            world.set(|port| (port.affinity_seconds, port.cluster) = (60, vec![endpoint(other)]));
            assert_ne!(ask(v), first, "{variant:?}");
            let unused = world.backend.maintain(Family::V4, Instant::now()).unwrap();
            assert!(unused.structure <= 1);
        });
    }
}

#[test]
fn case_46_node_ports_at_loopback_can_be_turned_off() {
    in_namespace(|| {
        let mut options = settings(IptablesVariant::Legacy);
        options.iptables.localhost_node_ports = false;
        let mut world = World::new(&options);
        world.set(|_| {});
        assert_eq!(ask("127.0.0.1:30080"), Answer::Rejected, "nothing listens");
        assert!(matches!(ask("10.0.0.7:30080"), Answer::From(_)));
        assert_eq!(run("cat /proc/sys/net/ipv4/conf/all/route_localnet").trim(), "0");
    });
}
