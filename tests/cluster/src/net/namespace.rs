//! Owns: a network namespace and everything that must be done inside it.
//! In: a name. Out: sockets made by a thread in the namespace, commands and programs run in it. The namespace is
//! removed on drop, and when the test process has exited, in any way.
//!
//! A socket belongs to the namespace of the thread that made it, so any thread may serve it.

use super::sockets::Threads;
use anyhow::{Context as _, Result, anyhow, bail};
use keelson_harness::peers;
use keelson_harness::process::Program;
use keelson_harness::scratch::mounts_below;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, unshare};
use socket2::{Domain, Protocol, SockAddr, Socket, Type};
use std::fs::{self, File};
use std::io::{self, Read as _, Write as _};
use std::net::{IpAddr, SocketAddr};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError, mpsc};
use std::time::Duration;

/// Name prefix of all namespaces of the harness.
const PREFIX: &str = "kt";
/// Folder of `ip netns`.
const FOLDER: &str = "/run/netns";

type Job = Box<dyn FnOnce() + Send>;

/// Removed on drop.
#[derive(Debug)]
pub struct Namespace {
    name: String,
    jobs: mpsc::Sender<Job>,
    threads: OnceLock<Threads>,
}

impl Namespace {
    /// Makes a new one with loopback up; its name ends with `role`.
    pub fn new(role: &str) -> Result<Self> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        watch_over()?;
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("{PREFIX}{}-{count}-{role}", std::process::id());
        prepare(&name)?;
        let (jobs, queue) = mpsc::channel::<Job>();
        let file = Path::new(FOLDER).join(&name);
        let (shown, entered) = mpsc::channel();
        std::thread::spawn(move || {
            let inside = enter_new(&file);
            let outside = inside.is_err();
            // The receiver is gone only if the caller has panicked meanwhile.
            let _ = shown.send(inside);
            if outside {
                return;
            }
            for job in queue {
                job();
            }
        });
        let namespace = Self { name, jobs, threads: OnceLock::new() };
        entered.recv().context("the thread of a network namespace is gone")??;
        Ok(namespace)
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    pub(super) fn set_cgroup(&self, cgroup: &Path) -> Threads {
        self.threads.get_or_init(|| Threads::of(cgroup)).clone()
    }

    /// What a thread of a test that enters the namespace by itself has to join.
    pub fn threads(&self) -> Threads {
        self.threads.get().cloned().unwrap_or_default()
    }

    /// Runs a job on a thread inside and returns its result. For short jobs, such as making a socket.
    pub fn run<T: Send + 'static>(&self, job: impl FnOnce() -> T + Send + 'static) -> Result<T> {
        let (answer, result) = mpsc::channel();
        let job = Box::new(move || {
            let _ = answer.send(job());
        });
        self.jobs.send(job).map_err(|_| anyhow!("the thread of {} is gone", self.name))?;
        result.recv().with_context(|| format!("a job in {} panicked", self.name))
    }

    /// Configures it: each line is the rest of `ip -n NAME`. Empty lines are allowed.
    pub fn ip(&self, lines: &str) -> Result<()> {
        let mut command = Command::new(peers::system("ip", "iproute2")?);
        command.args(["-n", &self.name, "-batch", "-"]);
        feed(command, lines).with_context(|| format!("cannot configure {}:\n{lines}", self.name))
    }

    /// Sets values below `/proc/sys/net`, such as `ipv4/ip_forward`.
    pub fn sysctl(&self, values: &[(&'static str, &'static str)]) -> Result<()> {
        let values = values.to_vec();
        self.run(move || {
            for (name, value) in values {
                let file = Path::new("/proc/sys/net").join(name);
                fs::write(&file, value).with_context(|| format!("cannot write {}", file.display()))?;
            }
            Ok(())
        })?
    }

    /// Runs a command inside to its end and returns its stdout. Fails if the command fails.
    pub fn command(&self, program: &Path, args: &[&str]) -> Result<String> {
        let mut command = Command::new(program);
        command.args(args).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        // A child is in the namespace of the thread that starts it. `ip netns exec` mounts `/sys` each time, which takes longer than most commands.
        let child = self.run(move || command.spawn())?;
        let output = child.and_then(std::process::Child::wait_with_output);
        let output = output.with_context(|| format!("cannot run {}", program.display()))?;
        if !output.status.success() {
            let message = String::from_utf8_lossy(&output.stderr);
            bail!("{} {args:?} in {} failed: {message}", program.display(), self.name);
        }
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    pub fn nft(&self, args: &[&str]) -> Result<String> {
        self.command(&peers::system("nft", "nftables")?, args)
    }

    /// Runs `conntrack` inside; its count of entries on stderr is left out.
    pub fn conntrack(&self, args: &[&str]) -> Result<String> {
        self.command(&peers::system("conntrack", "conntrack")?, args)
    }

    /// The same program, run inside. The pid is still the program's.
    pub fn in_namespace(&self, program: &Program) -> Result<Program> {
        let mut inside = program.clone();
        inside.path = peers::system("ip", "iproute2")?;
        inside.args = ["netns", "exec", &self.name].map(str::to_owned).into();
        inside.args.push(program.path.display().to_string());
        inside.args.extend(program.args.iter().cloned());
        Ok(inside)
    }

    /// A non-blocking socket inside.
    pub fn socket(&self, kind: Type, protocol: Option<Protocol>, bind: SocketAddr) -> Result<Socket> {
        let made = self.run(move || {
            let socket = Socket::new(Domain::for_address(bind), kind, protocol)?;
            socket.set_nonblocking(true)?;
            if bind.is_ipv6() && kind != Type::RAW {
                socket.set_only_v6(true)?;
            }
            if kind == Type::STREAM && bind.port() != 0 {
                socket.set_reuse_address(true)?;
            }
            socket.bind(&SockAddr::from(bind))?;
            Ok::<_, std::io::Error>(socket)
        })?;
        made.with_context(|| format!("cannot make a socket of {bind} in {}", self.name))
    }

    pub fn tcp_listener(&self, at: SocketAddr) -> Result<tokio::net::TcpListener> {
        let socket = self.socket(Type::STREAM, None, at)?;
        socket.listen(1024).with_context(|| format!("cannot listen at {at} in {}", self.name))?;
        tokio::net::TcpListener::from_std(socket.into()).context("the runtime takes no listener")
    }

    /// A TCP socket inside that can be connected, bound to an address with a free port.
    pub fn tcp_client(&self, from: IpAddr) -> Result<tokio::net::TcpSocket> {
        let socket = self.socket(Type::STREAM, None, SocketAddr::new(from, 0))?;
        Ok(tokio::net::TcpSocket::from_std_stream(socket.into()))
    }

    pub fn udp(&self, at: SocketAddr) -> Result<tokio::net::UdpSocket> {
        let socket = self.socket(Type::DGRAM, None, at)?;
        tokio::net::UdpSocket::from_std(socket.into()).context("the runtime takes no socket")
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        let file = Path::new(FOLDER).join(&self.name);
        let unmounted = umount2(&file, MntFlags::MNT_DETACH).map_err(io::Error::from);
        if let Err(error) = unmounted.and_then(|()| fs::remove_file(&file)) {
            eprintln!("cannot remove the network namespace {}: {error:#}", self.name);
        }
    }
}

/// Lets `ip netns` set its folder up, in which each mount is seen in all mount namespaces: once for each boot of the machine.
fn prepare(name: &str) -> Result<()> {
    if mounts_below(Path::new(FOLDER)).iter().any(|mount| mount == Path::new(FOLDER)) {
        return Ok(());
    }
    ip(&["netns", "add", name])?;
    ip(&["netns", "del", name])
}

/// Moves the calling thread into a new network namespace with loopback up, and mounts that at `file`: what `ip netns add` does,
/// without a program for each.
fn enter_new(file: &Path) -> Result<()> {
    unshare(CloneFlags::CLONE_NEWNET).context("a network namespace needs root")?;
    set_loopback_up().context("loopback does not get up")?;
    File::create_new(file).with_context(|| format!("cannot make {}", file.display()))?;
    let own = Some("/proc/thread-self/ns/net");
    mount(own, file, None::<&str>, MsFlags::MS_BIND, None::<&str>)
        .with_context(|| format!("cannot mount a namespace at {}", file.display()))
}

/// RTM_NEWLINK (rtnetlink(7)) for the first device of a namespace.
fn set_loopback_up() -> io::Result<()> {
    const LENGTH: u32 = 32;
    const NEWLINK: u16 = 16;
    const REQUEST_AND_ACK: u16 = 1 | 4;
    const LOOPBACK: u32 = 1;
    const UP: u32 = 1;
    let mut message = Vec::new();
    message.extend(LENGTH.to_ne_bytes());
    message.extend([NEWLINK, REQUEST_AND_ACK].map(u16::to_ne_bytes).concat());
    // Sequence and sender, family and type.
    message.extend([0; 12]);
    message.extend([LOOPBACK, UP, UP].map(u32::to_ne_bytes).concat());
    let mut socket = Socket::new(Domain::from(nix::libc::AF_NETLINK), Type::RAW, None)?;
    socket.write_all(&message)?;
    // The error is behind the header; the rest of the datagram is not needed.
    let mut answer = [0; 20];
    socket.read_exact(&mut answer)?;
    match answer.last_chunk().map(|error| i32::from_ne_bytes(*error)) {
        Some(error) if error < 0 => Err(io::Error::from_raw_os_error(-error)),
        _ => Ok(()),
    }
}

/// A raw socket as a datagram socket, which it is for reading and writing: tokio has no raw sockets.
pub(super) fn as_datagrams(socket: Socket) -> Result<tokio::net::UdpSocket> {
    tokio::net::UdpSocket::from_std(socket.into()).context("the runtime takes no raw socket")
}

fn ip(args: &[&str]) -> Result<()> {
    let output =
        Command::new(peers::system("ip", "iproute2")?).args(args).output().context("cannot run ip")?;
    if !output.status.success() {
        bail!("ip {args:?} failed: {}", String::from_utf8_lossy(&output.stderr));
    }
    Ok(())
}

/// Runs a command to its end with this on its stdin.
fn feed(mut command: Command, stdin: &str) -> Result<()> {
    command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut child = command.spawn().context("cannot start it")?;
    child.stdin.take().context("a piped stdin is there")?.write_all(stdin.as_bytes())?;
    let output = child.wait_with_output().context("cannot wait for it")?;
    if !output.status.success() {
        bail!("{}", String::from_utf8_lossy(&output.stderr));
    }
    Ok(())
}

/// Waits for the end of this process, and then removes its namespaces and those of all processes that are gone.
const WATCHER: &str = r#"
own=$PPID
while read -r folder; do set -- "$@" "$folder"; done
sleep 0.3
for path in /run/netns/kt*; do
    [ -e "$path" ] || continue
    name=${path##*/}; pid=${name#kt}; pid=${pid%%-*}
    case $pid in ''|*[!0-9]*) continue ;; esac
    [ "$pid" != "$own" ] && [ -e "/proc/$pid" ] || ip netns del "$name"
done
for path in /run/kt-ebpf-*; do
    [ -e "$path" ] || continue
    pid=${path##*-}
    [ "$pid" != "$own" ] && [ -e "/proc/$pid" ] && continue
    umount "$path/bpf"
    for group in "$path/cgroup/kt$pid"-*; do rmdir "$group"; done
    umount "$path/cgroup" && rmdir "$path/bpf" "$path/cgroup" "$path"
done
for folder; do
    case $folder in */keelson-test-*) rm -rf "$folder" ;; esac
done
"#;

/// The watcher process; its stdin ends with this process.
static WATCHER_PROCESS: OnceLock<Result<Mutex<Child>, String>> = OnceLock::new();

/// Ensures that the namespaces of this process, and those that others left, are removed when it exits, even if it is
/// killed.
pub(super) fn watch_over() -> Result<&'static Mutex<Child>> {
    let started = WATCHER_PROCESS.get_or_init(|| {
        let mut command = Command::new("sh");
        command.args(["-c", WATCHER, "sh"]).stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
        // A signal to the group of this process must not end the watcher.
        command.process_group(0);
        let child = command.spawn().map_err(|error| format!("cannot start sh: {error}"))?;
        sweep();
        Ok(Mutex::new(child))
    });
    started.as_ref().map_err(|error| anyhow!("{error}"))
}

/// Removes a folder of tests when this process has exited, in any way: for values in a static, which are never dropped.
pub fn remove_at_exit(folder: &Path) -> Result<()> {
    let mut child = watch_over()?.lock().unwrap_or_else(PoisonError::into_inner);
    let stdin = child.stdin.as_mut().context("the watcher has a stdin")?;
    writeln!(stdin, "{}", folder.display()).context("the watcher is gone")
}

/// Removes the namespaces of processes that have exited.
fn sweep() {
    let Ok(entries) = fs::read_dir(FOLDER) else { return };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let Some(name) = name.to_str() else { continue };
        let pid = name.strip_prefix(PREFIX).and_then(|rest| rest.split('-').next());
        if let Some(pid) = pid.and_then(|pid| pid.parse::<u32>().ok())
            && !PathBuf::from(format!("/proc/{pid}")).exists()
            && let Err(error) = ip(&["netns", "del", name])
        {
            eprintln!("cannot remove the network namespace {name} that was left: {error:#}");
        }
    }
}

/// Forwards connections from a namespace to an address outside: a listener inside, whose connections continue from
/// here. Stopped on drop.
#[derive(Debug)]
pub struct Forward(tokio::task::JoinHandle<()>);

impl Forward {
    /// From `listen` inside to `upstream` (`127.0.0.1:PORT`).
    pub fn start(namespace: &Namespace, listen: SocketAddr, upstream: &str) -> Result<Self> {
        Ok(Self::of(namespace.tcp_listener(listen)?, upstream))
    }

    /// From a listener, wherever it is.
    pub(crate) fn of(listener: tokio::net::TcpListener, upstream: &str) -> Self {
        let upstream = upstream.to_owned();
        Self(tokio::spawn(async move {
            let mut carried = tokio::task::JoinSet::new();
            loop {
                while carried.try_join_next().is_some() {}
                let Ok((mut inside, _)) = listener.accept().await else {
                    tokio::time::sleep(Duration::from_millis(50)).await;
                    continue;
                };
                let upstream = upstream.clone();
                carried.spawn(async move {
                    // If upstream cannot be reached, the connection ends at once.
                    if let Ok(mut outside) = tokio::net::TcpStream::connect(&upstream).await {
                        let _ = inside.set_nodelay(true);
                        let _ = outside.set_nodelay(true);
                        let _ = tokio::io::copy_bidirectional(&mut inside, &mut outside).await;
                    }
                });
            }
        }))
    }
}

impl Drop for Forward {
    fn drop(&mut self) {
        self.0.abort();
    }
}
