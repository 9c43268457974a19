//! A node with two pods, and a client outside, each in a network namespace of its own.
//!
//! Owns: [`World`], and the servers in the pods. The calling thread is in the namespace of the node.

use std::{
    fs::File,
    io::{Read as _, Write as _},
    net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket},
    process::Command,
    thread,
    time::{Duration, Instant},
};

use keelson_client::ServiceName;
use keelson_proxy::{
    addresses::{LocalAddresses, NodePortAddresses},
    backend::{Access, Backend, Check, Driver as _, Outcome},
    model::{Endpoint, Family, ServicePort},
    netlink::{Connection, NETLINK_GENERIC, Request, attributes},
    options::Options,
};
use keelson_proxy_ipvs::Ipvs;
use nix::sched::{CloneFlags, setns};

use crate::testing::{ip_batch, options, service_port};

/// The number of the pod is the third part of its address.
pub(crate) const POD_A: &str = "pod-a";
pub(crate) const POD_B: &str = "pod-b";
pub(crate) const CLIENT: &str = "client";
pub(crate) const NODE: &str = "node";

pub(crate) fn run(command: &str) -> String {
    let output = Command::new("sh").args(["-c", command]).output().unwrap();
    assert!(output.status.success(), "{command}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn configure(options: &[&str], lines: &str) {
    let done = ip_batch(options, lines);
    assert!(done.status.success(), "ip: {lines}: {}", String::from_utf8_lossy(&done.stderr));
}

pub(crate) fn settings() -> Options {
    let mut options = options(&["10.244.0.0/16", "fd00:244::/32"]);
    options.node_port_addresses = NodePortAddresses::Cidrs(Vec::new());
    options
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Answer {
    /// The letter of the pod, and the source that it saw.
    From(char, IpAddr),
    Rejected,
    Nothing,
}

impl Answer {
    pub(crate) fn pod(&self) -> Option<char> {
        match self {
            Self::From(letter, _) => Some(*letter),
            Self::Rejected | Self::Nothing => None,
        }
    }

    pub(crate) fn source(&self) -> Option<IpAddr> {
        match self {
            Self::From(_, source) => Some(*source),
            Self::Rejected | Self::Nothing => None,
        }
    }
}

pub(crate) struct World {
    pub(crate) options: Options,
    pub(crate) backend: Box<dyn Backend>,
    names: Vec<String>,
}

impl Drop for World {
    fn drop(&mut self) {
        // A test that fails in between has made fewer of them.
        let lines: String = self.names.iter().map(|name| format!("netns delete {name}\n")).collect();
        let _deleted = ip_batch(&["-force"], &lines);
    }
}

impl World {
    pub(crate) fn new(options: Options) -> Self {
        run("echo 1 > /proc/sys/net/ipv4/ip_forward; echo 1 > /proc/sys/net/ipv6/conf/all/forwarding");
        let names: Vec<String> = [POD_A, POD_B, CLIENT].map(ToOwned::to_owned).into();
        for (name, v4, v6) in [
            (POD_A, "10.244.1", "fd00:244:1:"),
            (POD_B, "10.244.2", "fd00:244:2:"),
            (CLIENT, "10.0.0", "fd00:0:0:"),
        ] {
            let (link, host) = (format!("to-{name}"), if name == CLIENT { "7" } else { "1" });
            let second = if name == CLIENT { "addr add 10.0.0.8/24 dev to-client" } else { "" };
            configure(
                &[],
                &format!(
                    "netns add {name}
                     link add {link} type veth peer name eth0 netns {name}
                     link set {link} up
                     addr add {v4}.{host}/24 dev {link}
                     addr add {v6}:{host}/64 dev {link} nodad
                     {second}"
                ),
            );
            configure(
                &["-n", name],
                &format!(
                    "link set lo up
                     link set eth0 up
                     addr add {v4}.2/24 dev eth0
                     addr add {v6}:2/64 dev eth0 nodad
                     route add default via {v4}.{host}
                     route add default via {v6}:{host}"
                ),
            );
        }
        for (name, letter) in [(POD_A, 'a'), (POD_B, 'b')] {
            within(name, move || serve(letter));
        }
        let world = Self { backend: open(&options), options, names };
        // A new network takes its time.
        for from in [NODE, POD_A, POD_B, CLIENT] {
            for (family, pod) in
                Family::ALL.into_iter().flat_map(|family| ['a', 'b'].map(|pod| (family, pod)))
            {
                let Endpoint { ip, port } = endpoint(family, pod);
                assert_eq!(ask(from, (ip, port).into()).pod(), Some(pod), "{from} {ip}, without the proxy");
            }
        }
        world
    }

    pub(crate) fn restart(&mut self) {
        self.backend = open(&self.options);
    }

    /// One Service with every kind of frontend, and both pods.
    pub(crate) fn set(&mut self, change: impl Fn(&mut ServicePort)) -> Outcome {
        for family in Family::ALL {
            let mut port = web(family);
            change(&mut port);
            self.backend.set_service(family, &name(), vec![port]);
        }
        self.sync()
    }

    pub(crate) fn delete(&mut self) -> Outcome {
        Family::ALL.into_iter().for_each(|family| self.backend.set_service(family, &name(), Vec::new()));
        self.sync()
    }

    pub(crate) fn sync(&mut self) -> Outcome {
        sync(self.backend.as_mut())
    }

    /// Reads and compares, as the proxy does.
    pub(crate) fn check(&mut self, family: Family) -> Outcome {
        let mut observer = self.backend.observer().unwrap();
        observer.read(family).unwrap();
        match self.backend.check(family, Instant::now()) {
            Check::Done(result) => result.unwrap(),
            other => panic!("{other:?}"),
        }
    }

    /// Calls `maintain` once a second until it has something to do.
    pub(crate) fn maintain(&mut self, limit: Duration) -> Outcome {
        let end = Instant::now() + limit;
        loop {
            let outcome = self.backend.maintain(Family::V4, Instant::now()).unwrap();
            if !outcome.is_nothing() || Instant::now() > end {
                return outcome;
            }
            thread::sleep(Duration::from_secs(1));
        }
    }
}

pub(crate) fn sync(backend: &mut dyn Backend) -> Outcome {
    let outcomes = Family::ALL.map(|family| backend.sync(family, Instant::now()).unwrap());
    outcomes.into_iter().fold(Outcome::default(), Outcome::plus)
}

/// What `ipvsadm --clear` does.
pub(crate) fn flush_servers() {
    /// `GENL_ID_CTRL`, and `CTRL_CMD_GETFAMILY` with the `CTRL_ATTR_FAMILY_NAME` IPVS (linux/genetlink.h).
    const CONTROL: u16 = 0x10;
    const GET_FAMILY: &[u8] = b"\x03\x01\0\0\x09\0\x02\0IPVS\0\0\0\0";
    /// `IPVS_CMD_FLUSH` (linux/ip_vs.h).
    const FLUSH: &[u8] = &[17, 1, 0, 0];
    const CTRL_ATTR_FAMILY_ID: u16 = 1;
    let mut connection = Connection::open(NETLINK_GENERIC).unwrap();
    let mut ask = |kind: u16, body: &[u8]| connection.get(&Request { kind, flags: 0, body: body.to_vec() });
    let answer = ask(CONTROL, GET_FAMILY).unwrap();
    let id = attributes(&answer[4..]).find(|(kind, _)| *kind == CTRL_ATTR_FAMILY_ID).unwrap().1;
    ask(u16::from_ne_bytes(id.try_into().unwrap()), FLUSH).expect("the kernel flushes");
}

pub(crate) fn open(options: &Options) -> Box<dyn Backend> {
    open_for(options, Access::Program)
}

pub(crate) fn open_for(options: &Options, access: Access) -> Box<dyn Backend> {
    let mut backend = Ipvs.open(options, access).unwrap();
    assert_eq!(backend.limitations(), [""; 0]);
    let local = LocalAddresses::now().unwrap();
    backend.set_addresses(local.as_slice());
    for family in Family::ALL {
        assert_eq!(backend.disabled_reason(family), None);
        let mut node = options.node_config(&Default::default(), local.as_slice(), family).unwrap();
        node.node_ips = vec![ip(family, "10.0.0.7", "fd00::7")];
        backend.set_node(node);
    }
    backend
}

fn ip(family: Family, v4: &str, v6: &str) -> IpAddr {
    if family == Family::V4 { v4 } else { v6 }.parse().unwrap()
}

fn name() -> ServiceName {
    ServiceName::new("default", "web")
}

pub(crate) fn endpoint(family: Family, pod: char) -> Endpoint {
    let ip = match pod {
        'a' => ip(family, "10.244.1.2", "fd00:244:1::2"),
        _ => ip(family, "10.244.2.2", "fd00:244:2::2"),
    };
    Endpoint { ip, port: 8080 }
}

/// Where the Service is reached.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Frontends {
    pub(crate) v: SocketAddr,
    pub(crate) x: SocketAddr,
    pub(crate) w: SocketAddr,
    pub(crate) np: SocketAddr,
}

pub(crate) fn frontends(family: Family) -> Frontends {
    let at = |v4, v6, port| SocketAddr::new(ip(family, v4, v6), port);
    Frontends {
        v: at("10.96.0.1", "fd00:96::1", 80),
        x: at("192.0.2.1", "2001:db8::1", 80),
        w: at("192.0.2.2", "2001:db8::2", 80),
        np: at("10.0.0.7", "fd00::7", 30_080),
    }
}

pub(crate) fn web(family: Family) -> ServicePort {
    let all = frontends(family);
    let mut port = service_port(&name(), "", all.v.ip(), 80);
    port.external_ips = vec![all.x.ip()];
    port.load_balancer_ips = vec![all.w.ip()];
    port.node_port = all.np.port();
    port.has_any = true;
    port.cluster = ['a', 'b'].map(|pod| endpoint(family, pod)).into();
    // The other pod stands for one elsewhere.
    port.local = vec![endpoint(family, 'a')];
    port.on_node = port.cluster.clone();
    port
}

/// Runs `work` on a thread in a namespace.
pub(crate) fn within<T: Send>(name: &str, work: impl FnOnce() -> T + Send) -> T {
    if name == NODE {
        return work();
    }
    let namespace = File::open(format!("/run/netns/{name}")).unwrap();
    let inside = || {
        setns(namespace, CloneFlags::CLONE_NEWNET).unwrap();
        work()
    };
    thread::scope(|scope| scope.spawn(inside).join()).unwrap()
}

/// Answers at port 8080 of TCP and UDP with its letter and the source. TCP connections stay open until the client closes, and
/// echo what it sends.
fn serve(letter: char) {
    let listener = TcpListener::bind("[::]:8080").unwrap();
    let socket = UdpSocket::bind("[::]:8080").unwrap();
    thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            thread::spawn(move || {
                let source = stream.peer_addr().unwrap().ip().to_canonical();
                let _sent = stream.write_all(format!("{letter} {source}\n").as_bytes());
                let mut buffer = [0; 64];
                while let Ok(count @ 1..) = stream.read(&mut buffer) {
                    let _sent = stream.write_all(&buffer[..count]);
                }
            });
        }
    });
    thread::spawn(move || {
        let mut buffer = [0; 64];
        while let Ok((_, source)) = socket.recv_from(&mut buffer) {
            let answer = format!("{letter} {}\n", source.ip().to_canonical());
            let _sent = socket.send_to(answer.as_bytes(), source);
        }
    });
}

/// How long an answer may take: a virtual machine among other work is slow.
const PATIENCE: Duration = Duration::from_secs(20);
/// How long nothing may come where nothing must come.
const SILENCE: Duration = Duration::from_secs(2);

pub(crate) fn connect(from: &str, to: SocketAddr) -> std::io::Result<(Answer, TcpStream)> {
    connect_for(from, to, PATIENCE)
}

fn connect_for(from: &str, to: SocketAddr, limit: Duration) -> std::io::Result<(Answer, TcpStream)> {
    within(from, || {
        let mut stream = TcpStream::connect_timeout(&to, limit)?;
        stream.set_read_timeout(Some(limit))?;
        let mut line = Vec::new();
        while line.last() != Some(&b'\n') {
            let mut byte = [0];
            stream.read_exact(&mut byte)?;
            line.push(byte[0]);
        }
        Ok((parse(&String::from_utf8_lossy(&line)), stream))
    })
}

fn parse(line: &str) -> Answer {
    let (letter, source) = line.trim().split_once(' ').unwrap();
    Answer::From(letter.chars().next().unwrap(), source.parse().unwrap())
}

fn failed(error: &std::io::Error) -> Answer {
    match error.kind() {
        std::io::ErrorKind::ConnectionRefused => Answer::Rejected,
        std::io::ErrorKind::TimedOut | std::io::ErrorKind::WouldBlock => Answer::Nothing,
        _ => panic!("{error:?}"),
    }
}

pub(crate) fn ask(from: &str, to: SocketAddr) -> Answer {
    ask_for(from, to, PATIENCE)
}

fn ask_for(from: &str, to: SocketAddr, limit: Duration) -> Answer {
    connect_for(from, to, limit).map_or_else(|error| failed(&error), |(answer, _)| answer)
}

/// Neither a connection nor a rejection, or a process that accepts and says nothing.
pub(crate) fn assert_silent(from: &str, to: SocketAddr) {
    assert_eq!(ask_for(from, to, SILENCE), Answer::Nothing, "{from} {to}");
}

/// Answers of several connections, one after the other.
pub(crate) fn ask_often(from: &str, to: SocketAddr) -> Vec<Answer> {
    (0..6).map(|_| ask(from, to)).collect()
}

/// The pods that answer, in order; every connection is answered.
pub(crate) fn pods(answers: &[Answer]) -> String {
    let mut pods: Vec<char> =
        answers.iter().map(|answer| answer.pod().unwrap_or_else(|| panic!("{answers:?}"))).collect();
    pods.sort_unstable();
    pods.dedup();
    pods.into_iter().collect()
}

/// Asks by UDP, from one socket, until there is an answer. IPVS drops the first packet to a pod that is gone, and with it
/// forgets the flow.
pub(crate) fn ask_udp(socket: &UdpSocket, to: SocketAddr) -> Option<char> {
    let mut buffer = [0; 64];
    // Answers that came late belong to questions before this one.
    socket.set_nonblocking(true).unwrap();
    while socket.recv_from(&mut buffer).is_ok() {}
    socket.set_nonblocking(false).unwrap();
    socket.set_read_timeout(Some(SILENCE)).unwrap();
    let end = Instant::now() + PATIENCE;
    while Instant::now() < end {
        let asked = socket.send_to(b"?", to).and_then(|_| socket.recv_from(&mut buffer));
        let answer = asked.map_or_else(
            |error| failed(&error),
            |(count, _)| parse(&String::from_utf8_lossy(&buffer[..count])),
        );
        if answer != Answer::Nothing {
            return answer.pod();
        }
    }
    None
}
