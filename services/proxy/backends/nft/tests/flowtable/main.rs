//! Offload of established flows in the kernel, as root, in network namespaces of the tests' own: a client, a node and a
//! server.
//!
//! The kernel's support decides which half of a test runs: without flowtables, the proxy has to report that and program
//! everything else.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod measure;
#[path = "../../../../src/testing.rs"]
mod testing;

use std::{
    fs::File,
    io::{Read as _, Write as _},
    net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket},
    process::Command,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use keelson_client::{NodeInfo, ServiceName};
use keelson_proxy::{
    addresses::{InterfacePattern, LocalAddresses},
    backend::{Access, Driver as _, Observer},
    conntrack::{self, UdpFrontend},
    model::{Endpoint, Family, PortName, Protocol, ServicePort},
    options::Options,
    sync::{CHECK_INTERVAL, Checked, SyncLoop},
};
use keelson_proxy_nft::{Nft, kernel::Netlink};
use nix::sched::{CloneFlags, setns};

/// The ports of the Service and of its endpoints.
const PORT: u16 = 80;
const NODE_PORT: u16 = 30_080;
const ENDPOINT_PORT: u16 = 8080;
/// Messages with this first byte are not answered.
const NO_ANSWER: u8 = b'-';

fn run(program: &str, arguments: &str) -> String {
    let output = Command::new(program).args(arguments.split_whitespace()).output().expect(program);
    let failure = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program} {arguments} (needs root): {failure}");
    String::from_utf8(output.stdout).unwrap()
}

/// Reads a ruleset from standard input, because the command line allows only one command.
fn nft(script: &str) {
    let mut child =
        Command::new("nft").args(["-f", "-"]).stdin(std::process::Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(script.as_bytes()).unwrap();
    assert!(child.wait().unwrap().success(), "{script}");
}

/// Network namespaces that are deleted when this is dropped.
struct Net {
    prefix: String,
    family: Family,
}

impl Net {
    fn new(name: &str, family: Family) -> Self {
        let net = Self { prefix: format!("ft{}-{name}-{}", family as u8, std::process::id()), family };
        for namespace in ["client", "node", "server"] {
            run("ip", &format!("netns add {}", net.name(namespace)));
            run("ip", &format!("-n {} link set lo up", net.name(namespace)));
        }
        net.link("client", "c0", 1, &[2]);
        net.link("server", "s0", 2, &[2, 3]);
        net.within("node", || {
            for path in ["ipv4/ip_forward", "ipv6/conf/all/forwarding"] {
                std::fs::write(format!("/proc/sys/net/{path}"), "1").unwrap();
            }
        });
        net
    }

    fn name(&self, namespace: &str) -> String {
        format!("{}-{namespace}", self.prefix)
    }

    fn ip(&self, network: u8, host: u8) -> IpAddr {
        let text = match self.family {
            Family::V4 => format!("10.{network}.0.{host}"),
            Family::V6 => format!("fd00:{network}::{host}"),
        };
        text.parse().unwrap()
    }

    fn cluster_ip(&self) -> IpAddr {
        match self.family {
            Family::V4 => "10.96.0.10".parse().unwrap(),
            Family::V6 => "fd00:96::10".parse().unwrap(),
        }
    }

    /// Links a namespace with the node by an interface `device` of the node.
    fn link(&self, namespace: &str, device: &str, network: u8, hosts: &[u8]) {
        let (node, other) = (self.name("node"), self.name(namespace));
        let (flag, length, nodad) = match self.family {
            Family::V4 => ("-4", 24, ""),
            Family::V6 => ("-6", 64, "nodad"),
        };
        run("ip", &format!("-n {node} link add {device} type veth peer name eth0 netns {other}"));
        run("ip", &format!("-n {node} address add {}/{length} dev {device} {nodad}", self.ip(network, 1)));
        for host in hosts {
            let address = self.ip(network, *host);
            run("ip", &format!("-n {other} address add {address}/{length} dev eth0 {nodad}"));
        }
        run("ip", &format!("-n {node} link set {device} up"));
        run("ip", &format!("-n {other} link set eth0 up"));
        run("ip", &format!("{flag} -n {other} route add default via {}", self.ip(network, 1)));
    }

    /// Runs a function on a thread within a namespace. Sockets and programs that it opens are in it, too.
    fn within<T: Send>(&self, namespace: &str, work: impl FnOnce() -> T + Send) -> T {
        let handle = File::open(format!("/run/netns/{}", self.name(namespace))).unwrap();
        thread::scope(|scope| {
            let inside = scope.spawn(move || {
                setns(handle, CloneFlags::CLONE_NEWNET).unwrap();
                work()
            });
            inside.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }

    /// Addresses of the Service for clients: its cluster IP and its node port.
    fn targets(&self) -> [(&'static str, SocketAddr); 2] {
        [
            ("cluster IP", SocketAddr::new(self.cluster_ip(), PORT)),
            ("node port", SocketAddr::new(self.ip(1, 1), NODE_PORT)),
        ]
    }

    /// Runs servers of both protocols at the endpoints: each answers with the last byte of its address.
    fn serve(&self, stop: &Arc<AtomicBool>) {
        for host in [2, 3] {
            let address = SocketAddr::new(self.ip(2, host), ENDPOINT_PORT);
            let (tcp, udp) = self.within("server", || {
                (TcpListener::bind(address).unwrap(), UdpSocket::bind(address).unwrap())
            });
            thread::spawn(move || {
                for stream in tcp.incoming().flatten() {
                    thread::spawn(move || echo(stream, host));
                }
            });
            udp.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
            let stop = stop.clone();
            thread::spawn(move || {
                let mut buffer = [0; 2048];
                while !stop.load(Ordering::Relaxed) {
                    if let Ok((_, from)) = udp.recv_from(&mut buffer)
                        && buffer[0] != NO_ANSWER
                    {
                        drop(udp.send_to(&[host], from));
                    }
                }
            });
        }
    }

    fn table(&self) -> &'static str {
        match self.family {
            Family::V4 => "ip keelson",
            Family::V6 => "ip6 keelson",
        }
    }

    /// Number of packets that another program's forward chain has seen.
    fn forwarded(&self) -> u64 {
        let text = self.within("node", || run("nft", "list chain inet other forward"));
        let packets = text.split("packets ").nth(1).and_then(|rest| rest.split(' ').next());
        packets.unwrap().trim().parse().unwrap()
    }

    fn count_forwarded(&self) {
        self.within("node", || {
            nft("table inet other {
                chain forward {
                    type filter hook forward priority filter; policy accept;
                    counter
                }
            }");
        });
    }

    /// The flowtables of the family, as nft lists them; empty if there are none.
    fn flowtables(&self) -> String {
        let keyword = self.table().split(' ').next().unwrap();
        let listed = self.within("node", || run("nft", &format!("list flowtables {keyword}")));
        if listed.contains("flowtable ") { listed } else { String::new() }
    }
}

impl Drop for Net {
    fn drop(&mut self) {
        for namespace in ["client", "node", "server"] {
            // A failed test has already reported its error.
            drop(Command::new("ip").args(["netns", "delete", &self.name(namespace)]).status());
        }
    }
}

fn echo(mut stream: TcpStream, host: u8) {
    let mut buffer = vec![0; 64 * 1024];
    while let Ok(1..) = stream.read(&mut buffer) {
        if buffer[0] != NO_ANSWER && stream.write_all(&[host]).is_err() {
            return;
        }
    }
}

struct Node {
    sync_loop: SyncLoop,
    observer: Box<dyn Observer>,
    now: Instant,
}

impl Node {
    fn open(net: &Net, interfaces: &[&str], endpoint: u8) -> Self {
        let options = Options {
            bind_address: vec![net.ip(1, 1)],
            flowtable_interfaces: interfaces.iter().map(|text| InterfacePattern::parse(text)).collect(),
            ..testing::options(&[])
        };
        let (sync_loop, observer) = net.within("node", || {
            let backend = Nft.open(&options, Access::Program).unwrap();
            let observer = backend.observer().unwrap();
            (SyncLoop::new(backend, options, &LocalAddresses::default()), observer)
        });
        let mut node = Self { sync_loop, observer, now: Instant::now() };
        node.sync_loop.set_node(NodeInfo::default(), node.now);
        node.endpoint(net, endpoint);
        node.sync_loop.begin(node.now);
        node.later(net, Duration::ZERO);
        node
    }

    fn endpoint(&mut self, net: &Net, host: u8) {
        let name = ServiceName::new("default", "web");
        let endpoint = Endpoint { ip: net.ip(2, host), port: ENDPOINT_PORT };
        let port = |protocol: Protocol| ServicePort {
            name: PortName { service: name.clone(), port: protocol.keyword().into(), protocol },
            node_port: NODE_PORT,
            has_any: true,
            cluster: vec![endpoint],
            serving: vec![endpoint],
            ..testing::service_port(&name, "", net.cluster_ip(), PORT)
        };
        let both = vec![port(Protocol::Tcp), port(Protocol::Udp)];
        let ports = match net.family {
            Family::V4 => [both, Vec::new()],
            Family::V6 => [Vec::new(), both],
        };
        self.sync_loop.set(&name, ports, self.now);
        for synced in self.sync_loop.sync(self.now) {
            synced.result.unwrap();
        }
    }

    /// As the proxy does after a change of a UDP Service.
    fn clean_conntrack(&self, net: &Net, host: u8) -> u64 {
        let frontend = UdpFrontend {
            addresses: vec![net.cluster_ip()],
            port: PORT,
            node_port: NODE_PORT,
            serving: vec![Endpoint { ip: net.ip(2, host), port: ENDPOINT_PORT }],
        };
        let cleaned = net.within("node", || conntrack::clean(net.family, &[frontend].into_iter().collect()));
        let cleaned = cleaned.unwrap();
        assert_eq!(cleaned.failed, 0, "{:?}", cleaned.error);
        cleaned.deleted
    }

    /// A tick with the node's current interfaces, and checks.
    fn later(&mut self, net: &Net, by: Duration) {
        self.now += by;
        let local = net.within("node", || LocalAddresses::now().unwrap());
        self.sync_loop.set_addresses(local.as_slice(), self.now);
        self.sync_loop.set_interfaces(local.interfaces());
        for synced in self.sync_loop.tick(self.now) {
            synced.result.unwrap();
        }
    }

    /// Status of the offload in the family of the test; asserts the same for the other family.
    fn offload(&self) -> Option<String> {
        let features = self.sync_loop.backend().features();
        features.first().and_then(|line| Some(line.split_once(": ")?.1.to_owned()))
    }

    /// Whether a check found something to repair.
    fn check(&mut self, net: &Net) -> bool {
        self.later(net, CHECK_INTERVAL * 2);
        let mut repaired = false;
        for family in self.sync_loop.begin_checks(self.now) {
            self.observer.read(family).unwrap();
            match self.sync_loop.check(family, self.now) {
                Checked::Postponed => panic!("nothing waits"),
                Checked::Clean => {}
                Checked::Repaired(synced) => repaired |= !synced.result.unwrap().is_nothing(),
            }
        }
        self.later(net, Duration::ZERO);
        repaired
    }
}

fn ask_tcp(stream: &mut TcpStream) -> u8 {
    let mut answer = [0];
    stream.write_all(b"x").unwrap();
    stream.read_exact(&mut answer).unwrap();
    answer[0]
}

fn connect(net: &Net, to: SocketAddr) -> TcpStream {
    let stream = net.within("client", || TcpStream::connect_timeout(&to, Duration::from_secs(10)).unwrap());
    stream.set_nodelay(true).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    stream
}

fn ask_udp(socket: &UdpSocket) -> u8 {
    let mut answer = [0];
    for _ in 0..10 {
        socket.send(b"x").unwrap();
        if socket.recv(&mut answer).is_ok() {
            return answer[0];
        }
    }
    panic!("no answer");
}

fn socket(net: &Net, to: SocketAddr) -> UdpSocket {
    let any = SocketAddr::new(net.ip(1, 2), 0);
    let socket = net.within("client", || UdpSocket::bind(any).unwrap());
    socket.connect(to).unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(1))).unwrap();
    socket
}

/// Whether the kernel has flowtables.
fn is_supported(net: &Net) -> bool {
    match net.within("node", || Netlink::open().unwrap().try_flowtable(net.family)) {
        Ok(()) => true,
        Err(error) => {
            assert!(error.is_unsupported(), "{error}");
            false
        }
    }
}

const INTERFACES: [&str; 2] = ["c0", "s*"];

#[test]
fn established_flows_bypass_foreign_chains_or_the_reason_is_reported() {
    for family in Family::ALL {
        let net = Net::new("way", family);
        let stop = Arc::new(AtomicBool::new(false));
        net.serve(&stop);
        net.count_forwarded();
        let supported = is_supported(&net);
        eprintln!("{family}: the kernel {} flowtables", if supported { "has" } else { "has no" });
        let mut node = Node::open(&net, &INTERFACES, 2);
        let words = node.offload().unwrap();
        if supported {
            assert_eq!(words, "enabled (interfaces: 2)");
            assert!(net.flowtables().contains("devices = { c0, s0 }"), "{}", net.flowtables());
        } else {
            assert!(words.starts_with("disabled: "), "{words}");
            assert_eq!(net.flowtables(), "");
        }
        const ROUNDS: u64 = 100;
        for (what, target) in net.targets() {
            let mut stream = connect(&net, target);
            let udp = socket(&net, target);
            let before = net.forwarded();
            for _ in 0..ROUNDS {
                assert_eq!(ask_tcp(&mut stream), 2, "{what}");
                assert_eq!(ask_udp(&udp), 2, "{what}");
            }
            let seen = net.forwarded() - before;
            match supported {
                true => assert!(seen < ROUNDS / 2, "{what}: {seen} packets were forwarded"),
                false => assert!(seen >= ROUNDS * 4, "{what}: {seen} packets were forwarded"),
            }
            // Conntrack and all chains see the end of a TCP connection.
            let before = net.forwarded();
            drop(stream);
            thread::sleep(Duration::from_millis(300));
            assert!(net.forwarded() > before, "{what}");
        }
        assert!(!node.check(&net), "{family}: nothing is to be repaired");
        stop.store(true, Ordering::Relaxed);
    }
}

#[test]
fn a_removed_endpoint_loses_udp_flows_and_keeps_tcp_connections() {
    for family in Family::ALL {
        let net = Net::new("gone", family);
        let stop = Arc::new(AtomicBool::new(false));
        net.serve(&stop);
        let mut node = Node::open(&net, &INTERFACES, 2);
        for (what, target) in net.targets() {
            node.endpoint(&net, 2);
            let (mut stream, udp) = (connect(&net, target), socket(&net, target));
            for _ in 0..10 {
                assert_eq!((ask_tcp(&mut stream), ask_udp(&udp)), (2, 2), "{what}");
            }
            node.endpoint(&net, 3);
            assert_eq!(node.clean_conntrack(&net, 3), 1, "{what}");
            for _ in 0..10 {
                assert_eq!((ask_tcp(&mut stream), ask_udp(&udp)), (2, 3), "{what}");
            }
        }
        stop.store(true, Ordering::Relaxed);
    }
}

#[test]
fn the_flowtable_follows_interfaces_is_repaired_and_removed_when_disabled() {
    for family in Family::ALL {
        let net = Net::new("life", family);
        let stop = Arc::new(AtomicBool::new(false));
        net.serve(&stop);
        let supported = is_supported(&net);
        let mut node = Node::open(&net, &INTERFACES, 2);
        let devices = |expected: &str| {
            let found = net.flowtables();
            let expected = format!("devices = {{ {expected} }}");
            assert!(!supported && found.is_empty() || found.contains(&expected), "{expected}: {found}");
        };
        let (_, target) = net.targets()[0];
        let mut stream = connect(&net, target);
        assert_eq!(ask_tcp(&mut stream), 2);

        // Interfaces are added, removed, and added again under the same name.
        run("ip", &format!("-n {} link add s1 type veth peer name s2", net.name("node")));
        node.later(&net, Duration::ZERO);
        devices("c0, s0, s1, s2");
        run("ip", &format!("-n {} link delete s1", net.name("node")));
        devices("c0, s0");
        run("ip", &format!("-n {} link add s1 type veth peer name t2", net.name("node")));
        node.later(&net, Duration::ZERO);
        devices("c0, s0, s1");
        run("ip", &format!("-n {} link set s1 name t1", net.name("node")));
        node.later(&net, Duration::ZERO);
        devices("c0, s0");
        assert_eq!(ask_tcp(&mut stream), 2);

        let mut node = Node::open(&net, &INTERFACES, 2);
        devices("c0, s0");
        assert!(!node.check(&net));

        if supported {
            let table = net.table();
            let damages = [
                format!("flush chain {table} filter-forward-offload\n"),
                format!(
                    "flush chain {table} filter-forward-offload\ndelete flowtable {table} service-flows\n"
                ),
                format!("add flowtable {table} other {{ hook ingress priority 5; }}\n"),
                format!("delete table {table}\n"),
            ];
            for damage in damages {
                net.within("node", || nft(&damage));
                assert!(node.check(&net), "{damage}");
                devices("c0, s0");
                assert_eq!(net.flowtables().matches("flowtable ").count(), 1, "{damage}");
            }
            // Another program removes a device; no check is due for that.
            net.within("node", || {
                nft(&format!("delete flowtable {table} service-flows {{ devices = {{ c0 }}; }}\n"))
            });
            devices("s0");
            node.later(&net, Duration::from_secs(30));
            devices("c0, s0");
            // As on kernels that do not release UDP flows: those in the flowtable end, and no more are added.
            let udp = socket(&net, target);
            assert_eq!((ask_tcp(&mut stream), ask_udp(&udp)), (2, 2));
            net.count_forwarded();
            assert!(node.sync_loop.stop_udp_offload(family, node.now));
            node.later(&net, Duration::from_secs(1));
            devices("c0, s0");
            let words = node.offload().unwrap();
            assert_eq!(words, "enabled for TCP (interfaces: 2)");
            for _ in 0..50 {
                assert_eq!((ask_tcp(&mut stream), ask_udp(&udp)), (2, 2));
            }
            let seen = net.forwarded();
            assert!((100..150).contains(&seen), "{seen} packets were forwarded, 100 of them UDP");
            assert!(!node.check(&net));
            // The printed ruleset is that of the kernel.
            let mut text = String::new();
            node.sync_loop.backend().ruleset()(&mut text).unwrap();
            if family == Family::V4 {
                net.within("node", || nft(&text));
                node.later(&net, Duration::ZERO);
                assert!(!node.check(&net), "the text makes the same table");
            }
        }

        let mut stream = connect(&net, target);
        assert_eq!(ask_tcp(&mut stream), 2);
        let node = Node::open(&net, &[], 2);
        assert_eq!(net.flowtables(), "");
        assert_eq!(node.offload(), None);
        assert!(!net.within("node", || run("nft", "list ruleset")).contains("offload"));
        assert_eq!(ask_tcp(&mut stream), 2, "the connection continues without the flowtable");
        stop.store(true, Ordering::Relaxed);
    }
}
