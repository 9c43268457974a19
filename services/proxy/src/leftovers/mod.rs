//! Rules that a kube-proxy left on the node in its modes iptables and ipvs.
//!
//! Owns: how they are found ([`found`]), and removed ([`remove`]). In: files below /proc, the programs of iptables.
//! Out: descriptions; removed rules, virtual servers, sets and an interface. Tables of the mode nftables belong to the
//! nftables backend.
//!
//! Finding needs no program, and no right but to read /proc. Removing needs the programs of the iptables that made the
//! rules: iptables-legacy has tables of its own, which only its programs can change.

mod iptables;
mod ipvs;
mod netlink;
#[cfg(test)]
mod tests;

use std::{
    fs,
    io::{self, Write as _},
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

pub use iptables::IptablesRemoval;

use crate::model::Family;

/// The byte of a virtual server's flags that marks those of the backend ipvs: IPVS keeps it and does not use it.
pub const OUR_SERVERS: u32 = 0x4b00_0000;
pub const OUR_SERVERS_MASK: u32 = 0xff00_0000;

/// The dummy interface of the mode ipvs, which has the addresses of Services.
pub(crate) const INTERFACE: &str = "kube-ipvs0";

/// How long iptables-legacy waits for its lock, as in kube-proxy. iptables-nft has no lock and ignores it.
const LOCK_SECONDS: &str = "5";

/// Where to look for leftovers; tests use other folders.
#[derive(Debug, Clone)]
pub struct Places {
    /// Files of the network namespace of the calling thread: `/proc/thread-self/net`.
    proc_net: PathBuf,
    programs: Vec<PathBuf>,
}

impl Default for Places {
    fn default() -> Self {
        Self {
            proc_net: "/proc/thread-self/net".into(),
            programs: ["/usr/sbin", "/sbin", "/usr/bin", "/usr/local/sbin"].map(PathBuf::from).into(),
        }
    }
}

/// Leftovers of the mode ipvs, by family. nft tables and chains are not checked here.
#[must_use]
pub fn found(places: &Places) -> Vec<(Family, String)> {
    ipvs::IpvsState::now(places).describe()
}

/// The families in which iptables-legacy may have chains of kube-proxy that cannot be listed, and why.
#[must_use]
pub fn unlistable(places: &Places) -> Vec<(Family, &'static str)> {
    let files = [(Family::V4, "ip_tables_names"), (Family::V6, "ip6_tables_names")];
    let reason = |file| iptables::unlistable(&fs::read_to_string(places.proc_net.join(file)));
    files.into_iter().filter_map(|(family, file)| Some((family, reason(file)?))).collect()
}

/// Who made a virtual server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ServerOwner {
    /// The backend ipvs: see [`OUR_SERVERS`].
    Keelson,
    Other,
}

/// Lets the sockets of this node that listen at the addresses and ports of an owner's virtual servers serve new connections.
/// Established ones stay with their real servers. May be called again.
///
/// # Errors
/// CAP_NET_ADMIN is missing, or the kernel refuses a change.
pub fn serve_by_sockets(owner: ServerOwner) -> io::Result<()> {
    netlink::serve_by_sockets(owner)
}

/// Number of connections through virtual servers of an owner, which end with the servers. `interface` has the addresses of
/// the servers; if it does not exist, they belong to another program. If the servers cannot be listed, the connections of
/// both owners.
#[must_use]
pub fn virtual_connections(places: &Places, interface: &str, owner: ServerOwner) -> usize {
    let read = |file: &str| fs::read_to_string(places.proc_net.join(file)).unwrap_or_default();
    if !ipvs::exists(&read("dev"), interface) {
        return 0;
    }
    let others = netlink::sockets_of_others().unwrap_or_else(|error| {
        tracing::debug!(%error, "cannot list virtual servers");
        None
    });
    ipvs::connections(&read("ip_vs_conn"), others.as_ref(), owner)
}

#[derive(Debug, Default, PartialEq, Eq)]
pub struct Removal {
    pub removed: Vec<String>,
    /// What could not be removed, and why.
    pub failed: Vec<String>,
    /// What could not be checked, or belongs to others.
    pub notes: Vec<String>,
}

/// Removes chains and rules of iptables, both kinds and both families, then virtual servers, interface and sets of the
/// mode ipvs. Source: kube-proxy's `CleanupLeftovers`. Chains of the kubelet stay.
#[must_use]
pub fn remove(places: &Places) -> Removal {
    remove_after(places, &|_| {})
}

/// The same. `prepare` is called before chains of a family are removed.
#[must_use]
pub fn remove_after(places: &Places, prepare: &dyn Fn(Family)) -> Removal {
    let mut removal = remove_chains(places, prepare);
    ipvs::remove(places, &mut removal);
    removal
}

/// Removes chains and rules of iptables only. `prepare` is called before chains of a family are removed.
#[must_use]
pub fn remove_chains(places: &Places, prepare: &dyn Fn(Family)) -> Removal {
    let mut removal = Removal::default();
    let mut seen_legacy = [false; 2];
    for tool in iptables::tools(&places.programs) {
        if tool.is_legacy {
            seen_legacy[tool.family as usize] = true;
        }
        remove_chains_of(&tool, prepare, &mut removal);
    }
    for (family, reason) in unlistable(places) {
        if !seen_legacy[family as usize] {
            removal.notes.push(format!(
                "{family}: cannot check whether iptables-legacy has chains of kube-proxy ({reason}); install \
                 iptables-legacy-save and iptables-legacy-restore and run the command again"
            ));
        }
    }
    removal
}

fn remove_chains_of(tool: &iptables::Tool, prepare: &dyn Fn(Family), removal: &mut Removal) {
    let plan = match run(&tool.save, &[], None) {
        Ok(saved) => IptablesRemoval::of(&saved),
        Err(error) => {
            return removal.notes.push(format!("cannot list the chains of {}: {error}", tool.name));
        }
    };
    removal.notes.extend(plan.kept.iter().map(|(chain, by)| {
        format!("{}: chain {chain} kept: chain {by} of another program uses it", tool.name)
    }));
    if plan.is_empty() {
        return;
    }
    prepare(tool.family);
    match run(&tool.restore, &["--noflush", "-w", LOCK_SECONDS], Some(&plan.input)) {
        Ok(_) => removal.removed.push(format!("{} chains of {}", plan.chains, tool.name)),
        Err(error) => removal.failed.push(format!("{} chains of {}: {error}", plan.chains, tool.name)),
    }
}

/// Runs a program to its end and returns its output.
fn run(program: &Path, arguments: &[&str], input: Option<&str>) -> io::Result<String> {
    let mut command = Command::new(program);
    command.args(arguments).stdout(Stdio::piped()).stderr(Stdio::piped());
    command.stdin(if input.is_some() { Stdio::piped() } else { Stdio::null() });
    let mut child = command.spawn()?;
    // The program reads all input before it writes, so neither side can block the other.
    if let (Some(mut pipe), Some(input)) = (child.stdin.take(), input) {
        match pipe.write_all(input.as_bytes()) {
            // The program exited early, and reports why.
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => {}
            written => written?,
        }
    }
    let output = child.wait_with_output()?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let message = String::from_utf8_lossy(&output.stderr).lines().collect::<Vec<_>>().join("; ");
    Err(io::Error::other(format!("{} failed ({}): {message}", program.display(), output.status)))
}
