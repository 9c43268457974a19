//! Owns: the place of the node: a network namespace with an address, a cgroup, and a mount namespace in which the folders that
//! programs of a node have always are empty. In: a process with one thread. Out: this process and all that it starts are in there. Both
//! are gone with the last of these processes, except for the cgroup, which the next run removes.

use anyhow::{Context as _, Result};
use keelson_harness::peers;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, unshare};
use std::fs::{self, Permissions};
use std::io::Write as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{self, Command, Stdio};

/// The node's address. Documentation range (RFC 5737): it is no machine's.
pub const ADDRESS: &str = "192.0.2.10";

/// Where the agent's package has the Endpoints API, and the chart looks for it.
pub const ENDPOINTS_SOCKET: &str = "/run/keelson-endpoints/endpoints.sock";

/// Folders whose contents belong to the machine: sockets, state and logs of its own programs.
const EMPTY: [&str; 3] = ["/run", "/var/lib", "/var/log"];

/// A dummy device would do, but not every kernel has one. The default route leads nowhere: a packet to a Service needs a route
/// before it is rewritten.
const NETWORK: &str = "link set lo up\n\
    link add node0 type veth peer name node0-peer\n\
    link set node0 up\n\
    link set node0-peer up\n\
    address add 192.0.2.10/24 dev node0\n\
    route add default via 192.0.2.1 dev node0\n";

/// Moves this process into a new place. Call it before the process has a second thread, which would stay outside.
pub fn enter() -> Result<()> {
    let ip = peers::system("ip", "iproute2")?;
    unshare(CloneFlags::CLONE_NEWNET | CloneFlags::CLONE_NEWNS)
        .context("cannot make the namespaces of the node; this needs root")?;
    mount(None::<&str>, "/", None::<&str>, MsFlags::MS_REC | MsFlags::MS_PRIVATE, None::<&str>)
        .context("cannot make mounts private")?;
    for folder in EMPTY {
        // What is mounted below would be hidden and still be listed, which container runtimes take for theirs.
        for below in
            mounts()?.into_iter().rev().filter(|at| at.starts_with(folder) && at != Path::new(folder))
        {
            umount2(&below, MntFlags::MNT_DETACH)
                .with_context(|| format!("cannot detach {}", below.display()))?;
        }
        mount(Some("tmpfs"), folder, Some("tmpfs"), MsFlags::empty(), Some("mode=755"))
            .with_context(|| format!("cannot mount over {folder}"))?;
    }
    // As systemd makes it: containers with mountPropagation HostToContainer need it.
    mount(None::<&str>, "/run", None::<&str>, MsFlags::MS_SHARED, None::<&str>)
        .context("cannot make /run shared")?;
    mount(Some("bpf"), "/sys/fs/bpf", Some("bpf"), MsFlags::empty(), Some("mode=700"))
        .context("cannot mount a BPF file system")?;
    enter_cgroup()?;
    let endpoints = Path::new(ENDPOINTS_SOCKET).parent().context("a socket is in a folder")?;
    fs::create_dir(endpoints)
        .and_then(|()| fs::set_permissions(endpoints, Permissions::from_mode(0o755)))
        .with_context(|| format!("cannot make {}", endpoints.display()))?;
    let mut configured =
        Command::new(ip).args(["-batch", "-"]).stdin(Stdio::piped()).spawn().context("cannot run ip")?;
    configured.stdin.take().context("a piped stdin is there")?.write_all(NETWORK.as_bytes())?;
    anyhow::ensure!(configured.wait()?.success(), "cannot configure the network of the node");
    fs::write("/proc/sys/net/ipv4/ip_forward", "1").context("cannot turn on forwarding")
}

/// Name prefix of the cgroups of nodes.
const CGROUPS: &str = "keelson-cluster-";

/// The cgroup of version 2 of this process and what it starts. Programs at the socket level are attached to it, and never to
/// one of the machine's.
pub fn cgroup() -> Result<PathBuf> {
    Ok(cgroups()?.join(format!("{CGROUPS}{}", process::id())))
}

/// Where something is mounted, in the order of the mounts.
fn mounts() -> Result<Vec<PathBuf>> {
    let text = fs::read_to_string("/proc/self/mounts").context("cannot read the mounts")?;
    Ok(text.lines().filter_map(|line| line.split(' ').nth(1)).map(PathBuf::from).collect())
}

/// Where cgroup v2 is mounted.
fn cgroups() -> Result<PathBuf> {
    let mounts = fs::read_to_string("/proc/self/mounts").context("cannot read the mounts")?;
    let found = mounts.lines().find_map(|line| {
        let mut fields = line.split(' ').skip(1);
        let (path, kind) = (fields.next()?, fields.next()?);
        (kind == "cgroup2").then(|| PathBuf::from(path))
    });
    found.context("cgroup v2 is not mounted")
}

fn enter_cgroup() -> Result<()> {
    // Those of earlier runs are empty; the others cannot be removed.
    for entry in fs::read_dir(cgroups()?)?.flatten() {
        if entry.file_name().to_string_lossy().starts_with(CGROUPS) {
            let _ = fs::remove_dir(entry.path());
        }
    }
    let own = cgroup()?;
    fs::create_dir(&own).with_context(|| format!("cannot make the cgroup {}", own.display()))?;
    fs::write(own.join("cgroup.procs"), process::id().to_string())
        .with_context(|| format!("cannot enter the cgroup {}", own.display()))
}
