//! New connections through the rules.
//!
//! Owns: the measurement, with its own servers and clients. In: worlds with all rules, and one without any. Out: a row
//! for each. Clients are threads in a pod, on the node or outside, servers threads in other pods of the same node; each
//! connection is a new socket. TCP: connected, and reset, so that no port stays in TIME_WAIT; UDP: one request, one
//! response. First packets: UDP packets that are dropped after the last hook of the node, so that conntrack forgets the
//! flow and each is the first one of a flow; what remains of the cost of a connection is the evaluation of the rules. Established connections
//! are in [`established`].

use std::fs::File;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow, bail};
use keelson_cluster::net::{Namespace, NetClient, World, plan};
use nix::sched::{CloneFlags, setns};
use nix::time::{ClockId, clock_gettime};
use socket2::{Domain, SockAddr, Socket, Type};

use super::established;
use super::maps::Flows;
use super::options::Options;
use super::report::{Failed, Report, Way};
use super::subject::Subject;
use super::test_env::{LOAD_PORT, Load, TestEnv};

/// Concurrent clients for the maximum rate of connections.
const CLIENTS: usize = 8;
/// Duration of each measurement of a round. Many short rounds in turn: the speed of a shared machine changes.
const LONG: Duration = Duration::from_secs(1);
/// Timeout of a connection or a response.
const ANSWER: Duration = Duration::from_secs(1);
/// Interval at which a server checks whether to end.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

const DROP: &str =
    "table inet dropped { chain postrouting { type filter hook postrouting priority 300; drop; }; }";

#[derive(Clone, Copy, Debug)]
enum Protocol {
    Tcp,
    Udp,
}

struct Route<'a> {
    way: Way,
    world: &'a World,
    from: NetClient,
    targets: Vec<SocketAddr>,
    servers: Arc<Vec<Servers>>,
    flows: Option<Flows>,
}

pub(super) async fn connections(
    env: &TestEnv,
    subjects: &[Subject],
    options: &Options,
    report: &mut Report,
) -> Result<()> {
    let plain = World::new()?;
    let servers = Arc::new(serve(&plain)?);
    let way = |name: &'static str, kind| Way { size: env.size, kind, name, ..Way::default() };
    let mut routes = vec![Route {
        way: way(NO_RULES, None),
        world: &plain,
        from: plain.pod(),
        targets: env.load_endpoints(),
        servers,
        flows: None,
    }];
    let served: Vec<_> =
        subjects.iter().map(|subject| Ok(Arc::new(serve(&subject.world)?))).collect::<Result<_>>()?;
    for (name, from, targets) in ways(env).into_iter().filter(|(name, ..)| name.contains(&options.way)) {
        for (subject, servers) in subjects.iter().zip(&served) {
            subject.check_complete(env)?;
            routes.push(Route {
                way: way(name, Some(subject.kind)),
                world: &subject.world,
                from: from(&subject.world),
                targets: targets.clone(),
                servers: servers.clone(),
                flows: subject.flows()?,
            });
        }
    }
    if routes.len() == 1 {
        bail!("no connection has {:?} in its name", options.way);
    }
    // Client threads block, which the runtime's own threads must not.
    let measured = tokio::task::block_in_place(|| {
        for _ in 0..options.turns {
            for route in &mut routes {
                route.round()?;
            }
            // Another one is first in the next round.
            routes.rotate_left(1);
        }
        let turned = options.turns % routes.len();
        routes.rotate_right(turned);
        anyhow::Ok(())
    });
    report.ways.extend(routes.into_iter().map(|route| route.way));
    measured
}

/// Name of the way that the repository keeps figures of.
pub(super) const TO_CLUSTER_IP: &str = "from a pod to a cluster IP";
const NO_RULES: &str = "from a pod to an endpoint, no rules at all";

/// Name, client, destinations.
type Exchange = (&'static str, fn(&World) -> NetClient, Vec<SocketAddr>);

/// The paths that are measured with the rules of each subject.
fn ways(env: &TestEnv) -> [Exchange; 7] {
    [
        ("from a pod to an endpoint", World::pod, env.load_endpoints()),
        (TO_CLUSTER_IP, World::pod, env.loaded(Load::Plain)),
        ("from a pod to a cluster IP with affinity", World::pod, env.loaded(Load::Sticky)),
        ("from the node to a cluster IP", World::host, env.loaded(Load::Plain)),
        ("from outside to a load balancer", World::client, TestEnv::ingresses(Load::Exposed)),
        ("from outside to one with source ranges", World::client, TestEnv::ingresses(Load::Ranged)),
        ("from outside to a node port", World::client, TestEnv::node_ports()),
    ]
}

fn serve(world: &World) -> Result<Vec<Servers>> {
    let mut servers = Vec::new();
    for number in 1..=plan::LOCALS {
        let at = SocketAddr::new(plan::local(number).v4.into(), LOAD_PORT);
        servers.push(Servers::start(world.local(number)?.namespace(), at)?);
    }
    Ok(servers)
}

impl Route<'_> {
    fn round(&mut self) -> Result<()> {
        for protocol in [Protocol::Tcp, Protocol::Udp] {
            let many = self.measure(protocol, CLIENTS)?;
            let one = self.measure(protocol, 1)?;
            let (rates, costs, times) = match protocol {
                Protocol::Tcp => (&mut self.way.tcp_rate, &mut self.way.tcp_cost, &mut self.way.tcp),
                Protocol::Udp => (&mut self.way.udp_rate, &mut self.way.udp_cost, &mut self.way.udp),
            };
            rates.push(many.times.len() as f64 / LONG.as_secs_f64());
            costs.push(one.processor / one.times.len() as f64);
            times.extend(one.times);
            add(&mut self.way.failed, many.failed);
            add(&mut self.way.failed, one.failed);
        }
        let first = self.first_packets()?;
        self.way.first_cost.push(first);
        self.way.requests.push(self.established(established::requests)?);
        self.way.stream.push(self.established(established::stream)?);
        Ok(())
    }

    /// A measurement of one connection.
    fn established(&self, measure: fn(SocketAddr, Duration) -> Result<f64>) -> Result<f64> {
        let to = *self.targets.first().context("nothing to connect to")?;
        self.servers.iter().for_each(|servers| servers.keeps.store(true, Ordering::Relaxed));
        let rate = in_namespace(self.from.namespace(), move || measure(to, LONG))
            .and_then(|thread| thread.join().map_err(|_| anyhow!("a client panicked"))?);
        self.servers.iter().for_each(|servers| servers.keeps.store(false, Ordering::Relaxed));
        rate
    }

    /// Microseconds of processor time of the first packet of a flow.
    fn first_packets(&mut self) -> Result<f64> {
        self.forget_flows()?;
        self.world.node().nft(&[DROP])?;
        let targets = self.targets.clone();
        let cost = in_namespace(self.from.namespace(), move || send(&targets))
            .and_then(|thread| thread.join().map_err(|_| anyhow!("a client panicked"))?);
        self.world.node().nft(&["delete", "table", "inet", "dropped"])?;
        cost
    }

    /// Otherwise new flows collide with earlier ones: the number of ports is limited.
    fn forget_flows(&mut self) -> Result<()> {
        self.world.node().conntrack(&["-F"])?;
        self.flows.as_mut().map_or(Ok(()), Flows::forget)
    }

    /// Runs `clients` clients for [`LONG`].
    fn measure(&mut self, protocol: Protocol, clients: usize) -> Result<Done> {
        self.forget_flows()?;
        let begin = Instant::now() + Duration::from_millis(50);
        let threads: Vec<_> = (0..clients)
            .map(|number| {
                let targets: Vec<_> =
                    self.targets.iter().copied().cycle().skip(number).take(self.targets.len()).collect();
                in_namespace(self.from.namespace(), move || client(protocol, &targets, begin))
            })
            .collect();
        let mut all = Done::default();
        for thread in threads {
            let done = thread?.join().map_err(|_| anyhow!("a client panicked"))??;
            all.times.extend(done.times);
            add(&mut all.failed, done.failed);
            all.processor += done.processor;
        }
        if all.times.is_empty() {
            bail!("{}: {protocol:?}: not one connection came about: {:?}", self.way.name, all.failed);
        }
        Ok(all)
    }
}

#[derive(Default)]
struct Done {
    /// Microseconds until each connection was established, or answered.
    times: Vec<f64>,
    failed: Failed,
    /// Microseconds of processor time: includes the path to the endpoint and back, which the kernel runs in the
    /// sender's context.
    processor: f64,
}

fn add(all: &mut Failed, more: Failed) {
    for (error, times) in more {
        *all.entry(error).or_default() += times;
    }
}

/// Processor time of this thread in microseconds.
fn processor() -> Result<f64> {
    let time = clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).context("no clock of the thread")?;
    Ok(Duration::from(time).as_secs_f64() * 1e6)
}

fn in_namespace<T: Send + 'static>(
    namespace: &Namespace,
    job: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<JoinHandle<Result<T>>> {
    let file = Path::new("/run/netns").join(namespace.name());
    let file = File::open(&file).with_context(|| format!("no {}", file.display()))?;
    let threads = namespace.threads();
    Ok(thread::spawn(move || {
        setns(file, CloneFlags::CLONE_NEWNET).context("cannot enter a network namespace")?;
        threads.join()?;
        job()
    }))
}

fn client(protocol: Protocol, targets: &[SocketAddr], begin: Instant) -> Result<Done> {
    let mut done = Done::default();
    thread::sleep(begin.saturating_duration_since(Instant::now()));
    let before = processor()?;
    for target in targets.iter().cycle() {
        let started = Instant::now();
        if started.duration_since(begin) >= LONG {
            break;
        }
        let outcome = match protocol {
            Protocol::Tcp => connect(*target),
            Protocol::Udp => exchange(*target),
        };
        match outcome {
            Ok(took) => done.times.push(took.as_secs_f64() * 1e6),
            Err(error) => *done.failed.entry(format!("{protocol:?}: {error}")).or_default() += 1,
        }
    }
    done.processor = processor()? - before;
    Ok(done)
}

/// Sends packets to each in turn; returns the microseconds of processor time per packet.
fn send(targets: &[SocketAddr]) -> Result<f64> {
    let open = |to: &SocketAddr| {
        let socket = std::net::UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
        socket.connect(to)?;
        io::Result::Ok(socket)
    };
    let sockets: Vec<_> = targets.iter().map(open).collect::<Result<_, _>>()?;
    let (begin, before, mut sent) = (Instant::now(), processor()?, 0_u32);
    while begin.elapsed() < LONG {
        for socket in &sockets {
            // On the node itself the sender gets an error for the drop.
            let _ = socket.send(b"?");
            sent += 1;
        }
    }
    Ok((processor()? - before) / f64::from(sent))
}

/// Connects and resets the connection; returns the latency of the connect.
fn connect(to: SocketAddr) -> io::Result<Duration> {
    let socket = Socket::new(Domain::for_address(to), Type::STREAM, None)?;
    // Limits connecting too.
    socket.set_write_timeout(Some(ANSWER))?;
    let started = Instant::now();
    socket.connect(&SockAddr::from(to))?;
    let took = started.elapsed();
    socket.set_linger(Some(Duration::ZERO))?;
    Ok(took)
}

/// Sends a request and returns the latency of the response.
fn exchange(to: SocketAddr) -> io::Result<Duration> {
    let socket = std::net::UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
    socket.set_read_timeout(Some(ANSWER))?;
    let started = Instant::now();
    socket.connect(to)?;
    socket.send(b"?")?;
    socket.recv(&mut [0; 16])?;
    Ok(started.elapsed())
}

/// TCP and UDP servers of an endpoint. Stopped on drop.
struct Servers {
    stop: Arc<AtomicBool>,
    /// Whether a connection of TCP is kept and served, or closed.
    keeps: Arc<AtomicBool>,
    threads: Vec<JoinHandle<Result<()>>>,
}

impl Servers {
    fn start(namespace: &Namespace, at: SocketAddr) -> Result<Self> {
        let stop = Arc::<AtomicBool>::default();
        let listener = namespace.socket(Type::STREAM, None, at)?;
        listener.listen(4096).context("cannot listen")?;
        let socket = namespace.socket(Type::DGRAM, None, at)?;
        for socket in [&listener, &socket] {
            socket.set_nonblocking(false)?;
            // Limits accepting too.
            socket.set_read_timeout(Some(POLL_INTERVAL))?;
        }
        let keeps = Arc::<AtomicBool>::default();
        let (tcp_stop, udp_stop, tcp_keeps) = (stop.clone(), stop.clone(), keeps.clone());
        let tcp = thread::spawn(move || {
            while !tcp_stop.load(Ordering::Relaxed) {
                // Nothing is read or written. A connection that is closed already, or none, is not an error.
                if let Ok((connection, _)) = listener.accept()
                    && tcp_keeps.load(Ordering::Relaxed)
                {
                    // It ends with the connection.
                    thread::spawn(move || established::serve(connection.into()));
                }
            }
            Ok(())
        });
        let socket = std::net::UdpSocket::from(socket);
        let udp = thread::spawn(move || {
            let mut buffer = [0; 16];
            while !udp_stop.load(Ordering::Relaxed) {
                if let Ok((length, from)) = socket.recv_from(&mut buffer) {
                    let _ = socket.send_to(&buffer[..length], from);
                }
            }
            Ok(())
        });
        Ok(Self { stop, keeps, threads: vec![tcp, udp] })
    }
}

impl Drop for Servers {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            // The threads return nothing.
            let _ = thread.join();
        }
    }
}
