//! A proxy in this process, with cluster IPs in 127.0.0.0/8, endpoints on loopback, and real connections. On Linux, each
//! test has a network namespace of its own, so that no other program has its addresses and ports.

#[cfg(target_os = "linux")]
mod namespace;
mod reports;
mod stop;
mod tcp;
#[cfg(target_os = "linux")]
mod transparent;
mod udp;

use std::{
    io::{Read as _, Write as _},
    net::{Ipv4Addr, SocketAddr, SocketAddrV4, TcpListener, TcpStream, UdpSocket},
    thread,
};

use keelson_proxy::{
    addresses::{Match, NodePortAddresses},
    conntrack::ConntrackOptions,
    model::{Endpoint, PortName},
    options,
};

use super::*;
use crate::{isolation::isolated, relay::OpenSocket};

/// More than any test waits for something that happens.
const PATIENCE: Duration = Duration::from_secs(60);

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

fn options() -> Options {
    Options {
        service_proxy_name: String::new(),
        bind_address: Vec::new(),
        detect_local: DetectLocal::ClusterCidr(vec!["10.244.0.0/16".parse().unwrap()]),
        masquerade_all: false,
        masquerade_bit: 14,
        allow_external_ips: true,
        conntrack: ConntrackOptions::default(),
        relay: RelayOptions { redirect: false, ..RelayOptions::default() },
        node_port_addresses: NodePortAddresses::Primary,
        flowtable_interfaces: Vec::new(),
        iptables: options::IptablesOptions::default(),
        ipvs: options::IpvsOptions::default(),
        ebpf: options::EbpfOptions::default(),
        min_sync_period: Duration::ZERO,
        sync_period: Duration::from_secs(1),
        max_staleness: None,
    }
}

/// A TCP port of the Service `default/NAME` with a cluster IP.
fn service_port(name: &str, cluster_ip: &str, port: u16, endpoints: &[SocketAddr]) -> ServicePort {
    let cluster: Vec<Endpoint> = sorted(endpoints);
    ServicePort {
        name: PortName {
            service: ServiceName::new("default", name),
            port: "".into(),
            protocol: Protocol::Tcp,
        },
        port,
        cluster_ip: ip(cluster_ip),
        external_ips: Vec::new(),
        load_balancer_ips: Vec::new(),
        node_port: 0,
        internal_local: false,
        external_local: false,
        affinity_seconds: 0,
        source_ranges: Vec::new(),
        has_any: !cluster.is_empty(),
        serving: Vec::new(),
        cluster,
        local: Vec::new(),
        on_node: Vec::new(),
    }
}

fn udp_port(name: &str, cluster_ip: &str, port: u16, endpoints: &[SocketAddr]) -> ServicePort {
    let mut port = service_port(name, cluster_ip, port, endpoints);
    port.name.protocol = Protocol::Udp;
    port.serving = port.cluster.clone();
    port
}

fn sorted(endpoints: &[SocketAddr]) -> Vec<Endpoint> {
    let mut all: Vec<Endpoint> =
        endpoints.iter().map(|at| Endpoint { ip: at.ip(), port: at.port() }).collect();
    all.sort_unstable();
    all
}

struct Proxy {
    backend: UserspaceBackend,
    options: Options,
}

impl Proxy {
    fn start(change: impl FnOnce(&mut Options)) -> Self {
        let mut options = options();
        change(&mut options);
        Self::start_with(options)
    }

    fn start_with(options: Options) -> Self {
        let mut backend = UserspaceBackend::open(&options, Access::Program).unwrap();
        for family in Family::ALL {
            backend.set_node(node(family, &options));
        }
        Self { backend, options }
    }

    /// As the next process: after the sockets of this one are closed.
    fn restart(self) -> Self {
        let Self { backend, options } = self;
        let sockets = backend.tables.iter().flat_map(Table::sockets).collect::<Vec<_>>();
        drop(backend);
        wait_for("the end of the listeners", || sockets.iter().all(OpenSocket::is_closed));
        Self::start_with(options)
    }

    /// Sets the only port of its Service, and syncs.
    fn set(&mut self, port: ServicePort) -> Outcome {
        let family = Family::of(port.cluster_ip);
        self.backend.set_service(family, &port.name.service.clone(), vec![port]);
        self.sync(family)
    }

    fn delete(&mut self, name: &str) -> Outcome {
        self.backend.set_service(Family::V4, &ServiceName::new("default", name), Vec::new());
        self.sync(Family::V4)
    }

    fn sync(&mut self, family: Family) -> Outcome {
        self.backend.sync(family, Instant::now()).unwrap()
    }

    /// Accepts nothing more, and returns what waits for the end of connections.
    fn stop(&mut self) -> Drain {
        self.backend.stop().unwrap()
    }

    fn sessions(&self) -> crate::relay::Sessions {
        self.backend.relay.as_ref().unwrap().shared().sessions()
    }
}

fn node(family: Family, options: &Options) -> NodeConfig {
    NodeConfig {
        family,
        masquerade_all: false,
        mark: 0,
        detector: match (&options.detect_local, family) {
            (DetectLocal::ClusterCidr(nets), Family::V4) => {
                nets.first().copied().map(keelson_proxy::options::Detector::Cidr)
            }
            _ => None,
        },
        service_cidrs: Vec::new(),
        node_ips: Vec::new(),
        node_ports: Match::Addresses(Vec::new()),
        untracked_pods: false,
    }
}

/// A TCP endpoint that sends its name, and then what it receives. Its thread ends with the test process.
fn endpoint(name: &'static str) -> SocketAddr {
    endpoint_at("127.0.0.1:0", move |mut stream| {
        let _ = stream.write_all(name.as_bytes());
        let mut copy = stream.try_clone().unwrap();
        let _ = std::io::copy(&mut stream, &mut copy);
        let _ = copy.shutdown(std::net::Shutdown::Write);
    })
}

fn endpoint_at(address: &str, serve: impl Fn(TcpStream) + Clone + Send + 'static) -> SocketAddr {
    let listener = TcpListener::bind(address).unwrap();
    let address = listener.local_addr().unwrap();
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let serve = serve.clone();
            thread::spawn(move || serve(stream));
        }
    });
    address
}

/// Addresses at which nothing listens, and which no connection gets as its own.
const CLOSED: [SocketAddr; 2] = [
    SocketAddr::V4(SocketAddrV4::new(Ipv4Addr::LOCALHOST, 1)),
    SocketAddr::V4(SocketAddrV4::new(Ipv4Addr::LOCALHOST, 2)),
];

/// A UDP endpoint that prefixes its name to what it receives.
fn udp_endpoint(name: &'static str) -> SocketAddr {
    let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    let address = socket.local_addr().unwrap();
    thread::spawn(move || {
        let mut buffer = [0; 2048];
        while let Ok((length, from)) = socket.recv_from(&mut buffer) {
            let answer = [name.as_bytes(), &buffer[..length]].concat();
            let _ = socket.send_to(&answer, from);
        }
    });
    address
}

fn connect(address: &str) -> TcpStream {
    let stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream
}

/// The first byte that an endpoint sends: its name.
fn name_of(stream: &mut TcpStream) -> std::io::Result<char> {
    let mut name = [0];
    stream.read_exact(&mut name)?;
    Ok(name[0].into())
}

/// Who answers a new connection.
fn ask(address: &str) -> char {
    name_of(&mut connect(address)).unwrap()
}

fn echo(stream: &mut TcpStream, text: &str) -> String {
    stream.write_all(text.as_bytes()).unwrap();
    let mut answer = vec![0; text.len()];
    stream.read_exact(&mut answer).unwrap();
    String::from_utf8(answer).unwrap()
}

fn is_refused(address: &str) -> bool {
    TcpStream::connect(address).is_err_and(|error| error.kind() == std::io::ErrorKind::ConnectionRefused)
}

fn wait_for(what: &str, mut happened: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !happened() {
        assert!(begun.elapsed() < PATIENCE, "{what} does not happen");
        thread::sleep(Duration::from_millis(5));
    }
}
