//! Kernel settings of conntrack, with the values that kube-proxy (1.36) gives them.
//!
//! Owns: the wanted values ([`ConntrackOptions::wanted`]) and the result of each write ([`Setting`]). In: options, the number
//! of CPUs, the kernel's values behind [`Sysctls`]. Out: writes of values that differ, lower ones too. A refused write is
//! reported and changes nothing.
//!
//! kube-proxy enlarges the hash table by a parameter of the kernel module, which only root may write. The sysctl
//! `nf_conntrack_buckets` is the same value and asks for CAP_NET_ADMIN only. Limit and hash table belong to the machine: they
//! are read-only in every network namespace but the first.

use std::{fmt, fs, io, path::PathBuf, time::Duration};

/// Maximum of the limit derived from the number of CPUs, as in kube-proxy: about 400 MB of kernel memory.
const MAX_SCALED: u64 = 1 << 20;
/// Entries per bucket of the hash table when the limit is reached. Source: kube-proxy.
const ENTRIES_PER_BUCKET: u64 = 4;

const MAX: &str = "nf_conntrack_max";
const BUCKETS: &str = "nf_conntrack_buckets";
const TCP_ESTABLISHED: &str = "nf_conntrack_tcp_timeout_established";
const TCP_CLOSE_WAIT: &str = "nf_conntrack_tcp_timeout_close_wait";
const TCP_BE_LIBERAL: &str = "nf_conntrack_tcp_be_liberal";
const UDP: &str = "nf_conntrack_udp_timeout";
const UDP_STREAM: &str = "nf_conntrack_udp_timeout_stream";

/// Settings of conntrack. Zero and `false` keep the kernel's value. Source: `KubeProxyConfiguration.conntrack`.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ConntrackOptions {
    /// Maximum number of entries per CPU. Zero keeps the kernel's limit and hash table, whatever `min` is.
    pub max_per_core: u32,
    /// Minimum of the limit.
    pub min: u32,
    /// Idle timeout of established TCP connections. Fractions of a second are dropped, here and below.
    pub tcp_established_timeout: Duration,
    pub tcp_close_wait_timeout: Duration,
    /// Accept TCP segments outside the window.
    pub tcp_be_liberal: bool,
    /// Timeout of UDP entries without a reply.
    pub udp_timeout: Duration,
    /// Timeout of UDP entries with replies.
    pub udp_stream_timeout: Duration,
    /// `/proc/sys/net/netfilter`, or the directory where that is mounted.
    pub sysctl_dir: PathBuf,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WantedSysctl {
    /// Name of the sysctl below `net.netfilter`.
    pub name: &'static str,
    /// Entries, buckets, seconds, or 1 for true.
    pub value: u64,
    /// A larger value is accepted.
    pub at_least: bool,
}

impl WantedSysctl {
    fn is_met_by(&self, now: u64) -> bool {
        now == self.value || self.at_least && now > self.value
    }
}

impl ConntrackOptions {
    /// Values for a machine with this number of CPUs, in write order: the hash table grows before the limit.
    #[must_use]
    pub fn wanted(&self, cpus: usize) -> Vec<WantedSysctl> {
        let seconds = |time: Duration| Some(time.as_secs()).filter(|seconds| *seconds > 0);
        let max = self.max(u64::try_from(cpus).unwrap_or(u64::MAX));
        let exactly = [
            (MAX, max),
            (TCP_ESTABLISHED, seconds(self.tcp_established_timeout)),
            (TCP_CLOSE_WAIT, seconds(self.tcp_close_wait_timeout)),
            (TCP_BE_LIBERAL, self.tcp_be_liberal.then_some(1)),
            (UDP, seconds(self.udp_timeout)),
            (UDP_STREAM, seconds(self.udp_stream_timeout)),
        ];
        let buckets =
            max.map(|max| WantedSysctl { name: BUCKETS, value: max / ENTRIES_PER_BUCKET, at_least: true });
        let exactly = exactly
            .into_iter()
            .filter_map(|(name, value)| Some(WantedSysctl { name, value: value?, at_least: false }));
        buckets.into_iter().chain(exactly).collect()
    }

    fn max(&self, cpus: u64) -> Option<u64> {
        let scaled = u64::from(self.max_per_core).saturating_mul(cpus);
        match scaled {
            0 => None,
            scaled if scaled > MAX_SCALED => Some(MAX_SCALED),
            _ => Some(scaled.max(u64::from(self.min))).filter(|max| *max > 0),
        }
    }
}

pub trait Sysctls {
    /// # Errors
    /// The sysctl does not exist (module `nf_conntrack` not loaded) or cannot be read.
    fn read(&self, name: &str) -> io::Result<u64>;

    /// # Errors
    /// The sysctl cannot be written, or the kernel rejects the value.
    fn write(&self, name: &str, value: u64) -> io::Result<()>;
}

#[derive(Debug, Clone)]
pub struct ProcSys(pub PathBuf);

impl Sysctls for ProcSys {
    fn read(&self, name: &str) -> io::Result<u64> {
        let text = fs::read_to_string(self.0.join(name))?;
        text.trim()
            .parse()
            .map_err(|_| io::Error::new(io::ErrorKind::InvalidData, format!("{text:?} is not a number")))
    }

    fn write(&self, name: &str, value: u64) -> io::Result<()> {
        // Never create: a missing file is a setting that this kernel does not have.
        let mut file = fs::OpenOptions::new().write(true).open(self.0.join(name))?;
        io::Write::write_all(&mut file, value.to_string().as_bytes())
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Setting {
    pub name: &'static str,
    pub wanted: u64,
    /// `None` if it cannot be read.
    pub now: Option<u64>,
    /// Why the current value is not the wanted one.
    pub refused: Option<String>,
}

impl fmt::Display for Setting {
    /// As shown by `keelson proxy state`: `nf_conntrack_max: 131072`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, wanted, now, refused } = self;
        match (refused, now) {
            (None, _) => write!(f, "{name}: {wanted}"),
            (Some(reason), Some(now)) => write!(f, "{name}: {now} instead of {wanted} ({reason})"),
            (Some(reason), None) => write!(f, "{name}: unknown instead of {wanted} ({reason})"),
        }
    }
}

/// Writes every value that differs. A value that cannot be read is written, too.
pub fn apply(wanted: &[WantedSysctl], sysctls: &dyn Sysctls) -> Vec<Setting> {
    wanted.iter().map(|wanted| set(wanted, sysctls)).collect()
}

fn set(wanted: &WantedSysctl, sysctls: &dyn Sysctls) -> Setting {
    let WantedSysctl { name, value, .. } = *wanted;
    let before = sysctls.read(name).ok();
    let setting = |now, refused| Setting { name, wanted: value, now, refused };
    if before.is_some_and(|now| wanted.is_met_by(now)) {
        return setting(before, None);
    }
    let written = sysctls.write(name, value);
    let now = sysctls.read(name).ok();
    match written {
        Ok(()) if now.is_some_and(|now| wanted.is_met_by(now)) => setting(now, None),
        Ok(()) => setting(now, Some("the kernel stored another value".to_owned())),
        Err(error) => setting(now, Some(error.to_string())),
    }
}

#[cfg(test)]
mod tests;
