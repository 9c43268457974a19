//! Network namespaces for tests of programs at devices, and servers and clients in them.
//!
//! Owns: [`Net`], [`in_mounts`], [`BpfFolder`]. In: commands for `ip`. Out: namespaces that end with their value. Needs root.

use std::{
    fs::{self, File},
    io::{Read as _, Write as _},
    net::{SocketAddr, TcpListener, TcpStream, UdpSocket},
    process::Command,
    thread,
    time::Duration,
};

use nix::{
    mount::{MntFlags, MsFlags, mount, umount2},
    sched::{CloneFlags, setns, unshare},
};

use crate::testing::ip_batch;

pub(crate) const ANSWER: Duration = Duration::from_secs(10);
const PREFIXES: [u8; 2] = [24, 64];

/// A network namespace, as long as it is open.
pub(crate) struct Net(File);

impl Net {
    /// That of the calling thread.
    pub(crate) fn current() -> Self {
        Self(File::open("/proc/thread-self/ns/net").unwrap())
    }

    pub(crate) fn new() -> Self {
        let inside = || {
            unshare(CloneFlags::CLONE_NEWNET).expect("a network namespace needs root");
            let net = Self::current();
            net.ip("link set lo up");
            for family in ["ipv4/conf/all/forwarding", "ipv6/conf/all/forwarding"] {
                fs::write(format!("/proc/sys/net/{family}"), "1").unwrap();
            }
            for name in ["all", "default"] {
                fs::write(format!("/proc/sys/net/ipv4/conf/{name}/rp_filter"), "0").unwrap();
                fs::write(format!("/proc/sys/net/ipv6/conf/{name}/accept_dad"), "0").unwrap();
            }
            net
        };
        thread::scope(|scope| scope.spawn(inside).join()).unwrap()
    }

    /// Runs something in the namespace, on a thread of its own.
    pub(crate) fn run<T: Send>(&self, body: impl FnOnce() -> T + Send) -> T {
        let inside = || {
            setns(&self.0, CloneFlags::CLONE_NEWNET).unwrap();
            body()
        };
        match thread::scope(|scope| scope.spawn(inside).join()) {
            Ok(value) => value,
            Err(panic) => std::panic::resume_unwind(panic),
        }
    }

    pub(crate) fn command(&self, program: &str, arguments: &str) {
        let done = self.run(|| Command::new(program).args(arguments.split(' ')).output().unwrap());
        let error = String::from_utf8_lossy(&done.stderr);
        assert!(done.status.success(), "{program} {arguments}: {error}");
    }

    /// Lines are commands for `ip`.
    pub(crate) fn ip(&self, lines: &str) {
        let done = self.run(|| ip_batch(&[], lines));
        assert!(done.status.success(), "ip: {lines}: {}", String::from_utf8_lossy(&done.stderr));
    }

    /// A pair of devices, the other one in another namespace.
    pub(crate) fn connect(&self, own: &str, other: &Self, theirs: &str) {
        // The other namespace is named by a thread in it.
        let (told, number) = std::sync::mpsc::channel();
        let (done, ends) = std::sync::mpsc::channel::<()>();
        thread::scope(|scope| {
            scope.spawn(move || {
                setns(&other.0, CloneFlags::CLONE_NEWNET).unwrap();
                told.send(nix::unistd::gettid()).unwrap();
                let _ = ends.recv();
            });
            let thread = number.recv().unwrap();
            self.ip(&format!(
                "link add {own} type veth peer name {theirs} netns {thread}\nlink set {own} up"
            ));
            drop(done);
        });
        other.ip(&format!("link set {theirs} up"));
    }

    pub(crate) fn address(&self, device: &str, addresses: [&str; 2]) {
        let lines = addresses.into_iter().zip(PREFIXES).map(|(address, prefix)| {
            let nodad = if address.contains(':') { " nodad" } else { "" };
            format!("address add {address}/{prefix} dev {device}{nodad}\n")
        });
        self.ip(&lines.collect::<String>());
    }

    pub(crate) fn route(&self, networks: [&str; 2], via: [&str; 2]) {
        let lines = networks.into_iter().zip(via);
        self.ip(&lines.map(|(network, via)| format!("route add {network} via {via}\n")).collect::<String>());
    }
}

/// Loads programs with the rights that docs/ebpf.md asks for. `test`: an ignored one, which loads them.
pub(crate) fn check_rights(test: &str) {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    match run_with(&["bpf", "net_admin"], test) {
        Err(text) if release.starts_with("6.1.") => assert!(text.contains("CAP_PERFMON"), "{text}"),
        result => result.unwrap(),
    }
    run_with(&["bpf", "net_admin", "perfmon"], test).unwrap();
}

/// Runs an ignored test of this program with these capabilities alone. The error is what it printed.
pub(crate) fn run_with(capabilities: &[&str], test: &str) -> Result<(), String> {
    let set: String = capabilities.iter().map(|name| format!(",+{name}")).collect();
    let mut command = Command::new("setpriv");
    command.args([format!("--bounding-set=-all{set}"), format!("--inh-caps=-all{set}")]);
    command.arg(std::env::current_exe().unwrap()).args(["--ignored", "--exact", test]);
    let done = command.output().unwrap();
    let text = String::from_utf8_lossy(&done.stdout);
    assert!(text.contains("running 1 test"), "{test}: {text}{}", String::from_utf8_lossy(&done.stderr));
    if done.status.success() { Ok(()) } else { Err(text.into_owned()) }
}

/// Runs something on a thread with mounts of its own.
pub(crate) fn in_mounts<T: Send>(test: impl FnOnce() -> T + Send) -> T {
    let inside = || {
        unshare(CloneFlags::CLONE_NEWNS).expect("namespaces need root");
        test()
    };
    match thread::scope(|scope| scope.spawn(inside).join()) {
        Ok(value) => value,
        Err(panic) => std::panic::resume_unwind(panic),
    }
}

/// A folder with a BPF file system, which hides those of the machine and of other tests.
pub(crate) struct BpfFolder(tempfile::TempDir);

impl BpfFolder {
    /// In mounts of the test.
    pub(crate) fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let none = None::<&str>;
        mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none).unwrap();
        let mounts = fs::read_to_string("/proc/thread-self/mounts").unwrap();
        for line in mounts.lines().filter(|line| line.contains(" bpf ")) {
            nix::mount::umount(line.split(' ').nth(1).unwrap()).unwrap();
        }
        mount(Some("none"), folder.path(), Some("bpf"), MsFlags::empty(), none).unwrap();
        Self(folder)
    }
}

impl Drop for BpfFolder {
    /// A folder that something is mounted on cannot be removed.
    fn drop(&mut self) {
        let unmounted = umount2(self.0.path(), MntFlags::MNT_DETACH);
        assert!(unmounted.is_ok() || thread::panicking(), "{} stays: {unmounted:?}", self.0.path().display());
    }
}

pub(crate) fn at(ip: &str, port: u16) -> SocketAddr {
    SocketAddr::new(ip.parse().unwrap(), port)
}

/// Answers connections with its name and the client's address, then sends back what it gets.
pub(crate) fn serve_tcp(net: &Net, ip: &str, port: u16, name: &'static str) {
    net.run(|| {
        let listener = TcpListener::bind(at(ip, port)).unwrap();
        thread::spawn(move || {
            for mut stream in listener.incoming().flatten() {
                let Ok(peer) = stream.peer_addr() else { continue };
                let _ = writeln!(stream, "{name} {peer}");
                thread::spawn(move || {
                    let mut input = stream.try_clone().unwrap();
                    let _ = std::io::copy(&mut input, &mut stream);
                });
            }
        });
    });
}

/// Answers datagrams with its name and the client's address; with as many more bytes as the datagram says.
pub(crate) fn serve_udp(net: &Net, ip: &str, port: u16, name: &'static str) {
    net.run(|| {
        let socket = UdpSocket::bind(at(ip, port)).unwrap();
        thread::spawn(move || {
            let mut buffer = [0; 65_536];
            while let Ok((length, from)) = socket.recv_from(&mut buffer) {
                let text = String::from_utf8_lossy(&buffer[..length]).into_owned();
                let more = text.trim_end_matches('x').parse().unwrap_or(0);
                let _ = socket.send_to(format!("{name} {from}\n{}", "y".repeat(more)).as_bytes(), from);
            }
        });
    });
}

/// The first line of an answer, and the client's own address.
pub(crate) fn read_line(stream: &mut TcpStream) -> String {
    let mut line = Vec::new();
    let mut byte = [0];
    while stream.read(&mut byte).unwrap() == 1 && byte[0] != b'\n' {
        line.push(byte[0]);
    }
    String::from_utf8(line).unwrap()
}

pub(crate) fn connect(to: SocketAddr) -> (TcpStream, String) {
    let mut stream = TcpStream::connect_timeout(&to, ANSWER).unwrap_or_else(|error| panic!("{to}: {error}"));
    stream.set_read_timeout(Some(ANSWER)).unwrap();
    let line = read_line(&mut stream);
    (stream, line)
}

/// A socket that hears from `to` alone.
pub(crate) fn udp_socket(to: SocketAddr) -> UdpSocket {
    let any = if to.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
    let socket = UdpSocket::bind(any).unwrap();
    socket.connect(to).unwrap();
    socket.set_read_timeout(Some(ANSWER)).unwrap();
    socket
}

pub(crate) fn exchange(socket: &UdpSocket, text: &str) -> String {
    let mut buffer = [0; 65_536];
    socket.send(text.as_bytes()).unwrap();
    let length = socket.recv(&mut buffer).unwrap_or_else(|error| panic!("{socket:?}: {error}"));
    String::from_utf8_lossy(&buffer[..length]).into_owned()
}
