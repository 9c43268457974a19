//! Owns: the place of the node: a network namespace with an address, and a mount namespace in which the folders that programs
//! of a node have always are empty. In: a process with one thread. Out: this process and all that it starts are in there. Both
//! are gone with the last of these processes.

use anyhow::{Context as _, Result};
use keelson_harness::peers;
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};
use std::fs::{self, Permissions};
use std::io::Write as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::{Command, Stdio};

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
        mount(Some("tmpfs"), folder, Some("tmpfs"), MsFlags::empty(), Some("mode=755"))
            .with_context(|| format!("cannot mount over {folder}"))?;
    }
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
