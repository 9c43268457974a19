//! The programs with sockets, in network namespaces, mounts and cgroups of the test's own.
//!
//! A [`World`] is a thread with a network namespace and a mount namespace of its own, in a cgroup that ends with it. The
//! endpoints are loopback addresses of the namespace.

use std::{
    io::{Read as _, Write as _},
    net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket},
    process::Command,
    thread,
    time::{Duration, Instant},
};

use keelson_client::ServiceName;
use keelson_proxy::model::{Endpoint, Family, PortName, Protocol, ServicePort};
use nix::{
    mount::{MsFlags, mount},
    sched::{CloneFlags, unshare},
    unistd::gettid,
};

use super::*;
use crate::{
    nets::check_rights,
    plan::NodeFacts,
    sockets::{Sockets, usual_capacity},
    testing::service_port,
};

mod affinity;
mod life;
mod limits;
mod scale;
mod tcp;
mod udp;

const V: &str = "10.96.0.10";
const V6: &str = "fd00:10:96::a";
const ANSWER: Duration = Duration::from_secs(5);

/// Folders of the test. Dropped when nothing runs in them.
struct World {
    folder: tempfile::TempDir,
    cgroup: PathBuf,
}

/// Runs a test in a new world. Needs root, and cgroup v2 and BPF in the kernel.
fn in_world<T: Send>(test: impl FnOnce(&World) -> T + Send) -> T {
    let folder = tempfile::tempdir().unwrap();
    let cgroup =
        folder.path().join("cgroup").join(format!("keelson-test-{}-{}", std::process::id(), gettid()));
    let mut world = World { folder, cgroup };
    let inside = || {
        unshare(CloneFlags::CLONE_NEWNET | CloneFlags::CLONE_NEWNS).expect("namespaces need root");
        let up = Command::new("ip").args(["link", "set", "lo", "up"]).status();
        assert!(up.expect("the program ip (package iproute2)").success());
        world.mount();
        let _inside = world.enter();
        test(&world)
    };
    let done = thread::scope(|scope| scope.spawn(inside).join());
    match done {
        Ok(value) => value,
        Err(panic) => std::panic::resume_unwind(panic),
    }
}

impl World {
    fn mount(&mut self) {
        let none = None::<&str>;
        mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none).unwrap();
        // BPF file systems of the machine, and of other tests, are not for this one.
        let mounts = fs::read_to_string("/proc/thread-self/mounts").unwrap();
        for line in mounts.lines().filter(|line| line.contains(" bpf ")) {
            nix::mount::umount(line.split(' ').nth(1).unwrap()).unwrap();
        }
        for (name, kind) in [("cgroup", "cgroup2"), ("bpf", "bpf")] {
            let at = self.folder.path().join(name);
            fs::create_dir(&at).unwrap();
            mount(Some("none"), &at, Some(kind), MsFlags::empty(), none).unwrap();
        }
    }

    /// Only this thread: the cgroup is a threaded one.
    fn enter(&self) -> Inside {
        fs::create_dir(&self.cgroup).unwrap();
        fs::write(self.cgroup.join("cgroup.type"), "threaded").unwrap();
        fs::write(self.cgroup.join("cgroup.threads"), gettid().to_string()).unwrap();
        Inside(self.cgroup.clone())
    }

    fn pinned(&self) -> Pinned {
        Pinned::find(Some(&self.cgroup), usual_sizes()).unwrap()
    }

    fn sockets(&self) -> Sockets {
        Self::sockets_of(self.pinned())
    }

    fn sockets_of(pinned: Pinned) -> Sockets {
        let mut sockets = Sockets::new(Some(Box::new(pinned)), usual_capacity(), [true, true]);
        for family in Family::ALL {
            sockets.plan.set_facts(family, NodeFacts { detects_pods: true, ..NodeFacts::default() });
        }
        sockets
    }
}

/// A cgroup, until it is dropped. Servers of the test are threads in it.
struct Inside(PathBuf);

impl Drop for Inside {
    fn drop(&mut self) {
        let outside = self.0.parent().unwrap().join("cgroup.threads");
        let threads = fs::read_to_string(self.0.join("cgroup.threads")).unwrap_or_default();
        for thread in threads.lines() {
            let _ = fs::write(&outside, thread);
        }
        let removed = fs::remove_dir(&self.0);
        assert!(removed.is_ok() || thread::panicking(), "{} stays: {removed:?}", self.0.display());
    }
}

fn sync(sockets: &mut Sockets) {
    for family in Family::ALL {
        sockets.sync(family, Instant::now()).unwrap();
    }
}

fn family_of_ip(ip: &str) -> Family {
    Family::of(ip.parse::<IpAddr>().unwrap())
}

fn endpoint(at: SocketAddr) -> Endpoint {
    Endpoint { ip: at.ip(), port: at.port() }
}

/// A service port at `ip`:80, which programs translate.
fn port(protocol: Protocol, ip: &str, endpoints: &[SocketAddr]) -> ServicePort {
    let service = ServiceName::new("default", "web");
    let mut cluster: Vec<Endpoint> = endpoints.iter().map(|at| endpoint(*at)).collect();
    cluster.sort_unstable();
    let serving = if protocol == Protocol::Udp { cluster.clone() } else { Vec::new() };
    let name = PortName { service: service.clone(), port: protocol.keyword().into(), protocol };
    ServicePort {
        name,
        has_any: !cluster.is_empty(),
        cluster,
        serving,
        ..service_port(&service, "", ip.parse().unwrap(), 80)
    }
}

fn serve(sockets: &mut Sockets, family: Family, ports: Vec<ServicePort>) {
    sockets.plan.set(family, &ServiceName::new("default", "web"), ports);
    sync(sockets);
}

/// Answers every connection with its own address until the test ends.
fn tcp_server(ip: &str) -> SocketAddr {
    let listener = TcpListener::bind((ip.parse::<IpAddr>().unwrap(), 0)).unwrap();
    let at = listener.local_addr().unwrap();
    thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            let _ = stream.write_all(at.to_string().as_bytes());
        }
    });
    at
}

/// Who answers at an address.
fn ask_tcp(to: SocketAddr) -> SocketAddr {
    let stream = TcpStream::connect_timeout(&to, ANSWER).unwrap();
    assert_eq!(stream.peer_addr().unwrap(), to, "the peer is the Service");
    read_answer(stream)
}

fn read_answer(mut stream: TcpStream) -> SocketAddr {
    let mut text = String::new();
    stream.set_read_timeout(Some(ANSWER)).unwrap();
    stream.read_to_string(&mut text).unwrap();
    text.parse().unwrap()
}

/// Answers every datagram with its own address until the test ends.
fn udp_server(ip: &str) -> SocketAddr {
    let socket = UdpSocket::bind((ip.parse::<IpAddr>().unwrap(), 0)).unwrap();
    let at = socket.local_addr().unwrap();
    thread::spawn(move || {
        let mut buffer = [0; 64];
        while let Ok((_, from)) = socket.recv_from(&mut buffer) {
            let _ = socket.send_to(at.to_string().as_bytes(), from);
        }
    });
    at
}

fn at(ip: &str, port: u16) -> SocketAddr {
    SocketAddr::new(ip.parse().unwrap(), port)
}

/// The same on the oldest kernel of the documentation, without JIT: the verifier of Linux 6.1 checks the programs.
#[test]
fn in_the_vm() {
    let runner = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../../tests/vm/run.sh");
    let program = std::env::current_exe().unwrap();
    let ended = Command::new(runner)
        .env("KEELSON_VM_TIMEOUT", "1800")
        .arg(program)
        .args([
            "--test-threads=1",
            "--skip",
            "in_the_vm",
            "kernel::tests",
            "stale::diag",
            "direct::tests",
            "pods::tests",
            "kernel::filters",
        ])
        .status();
    assert!(ended.expect("tests/vm/run.sh").success(), "the tests in the VM failed");
}

#[test]
#[ignore = "another test runs it with few rights"]
fn the_programs_load() {
    programs::load(&mut Loader::default(), None, &usual_sizes()).unwrap();
}

#[test]
fn the_rights_of_the_documentation_are_enough() {
    check_rights("kernel::tests::the_programs_load");
}
