//! The host's part of the node status.
//!
//! Owns: the trait [`Host`] that a service implements, and its types. In: calls from the StatusReporter. Out: readings;
//! an unreadable value is absent and named in [`HostReadings::errors`], so that one broken file costs one field.

use std::{net::IpAddr, path::PathBuf, time::Duration};

use futures_util::future::BoxFuture;
use keelson_actor_system::file_system::FileSystem;

/// Constant while the machine runs.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct HostFacts {
    /// `nodeInfo.machineID` (`/etc/machine-id`).
    pub machine_id: String,
    /// `nodeInfo.systemUUID` (DMI product UUID), else the machine id.
    pub system_uuid: String,
    /// `nodeInfo.bootID`.
    pub boot_id: String,
    /// `nodeInfo.kernelVersion` (`uname -r`).
    pub kernel_version: String,
    /// `nodeInfo.osImage` (`PRETTY_NAME` of os-release).
    pub os_image: String,
    /// `nodeInfo.operatingSystem`: `linux`.
    pub operating_system: String,
    /// `nodeInfo.architecture`, as Go names it: `amd64`, `arm64`.
    pub architecture: String,
    pub hostname: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct HostReadings {
    /// Online processors.
    pub cpus: Option<u32>,
    /// `MemTotal`, bytes.
    pub memory_capacity_bytes: Option<u64>,
    /// What the kubelet calls `memory.available`: capacity less the working set (usage without inactive
    /// file pages), bytes.
    pub memory_available_bytes: Option<u64>,
    /// `SwapTotal`, bytes.
    pub swap_capacity_bytes: Option<u64>,
    /// Page size and total size in bytes, by size.
    pub huge_pages: Vec<(u64, u64)>,
    /// The file system of the directory of pods (`nodefs`).
    pub node_fs: Option<FileSystem>,
    /// The file system of the images (`imagefs`), if the runtime has named it.
    pub image_fs: Option<FileSystem>,
    /// Maximum and current number of processes.
    pub pids: Option<(u64, u64)>,
    /// Addresses to report, best first, by the kubelet's rule: the address of the default route's interface, IPv4
    /// before IPv6, no loopback or link-local address.
    pub addresses: Vec<IpAddr>,
    /// One sentence per failed reading.
    pub errors: Vec<String>,
}

#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct HostQuery {
    /// The directory whose file system is `nodefs`.
    pub node_fs: PathBuf,
    /// A directory of the runtime's images.
    pub image_fs: Option<PathBuf>,
}

pub trait Host: Send + Sync + 'static {
    fn facts(&self) -> HostFacts;

    /// Never fails and never takes long: a file system that hangs is an error in the readings.
    fn read(&self, ask: HostQuery) -> BoxFuture<'static, HostReadings>;

    /// Time since boot, including suspend (CLOCK_BOOTTIME): with [`HostFacts::boot_id`] it measures the time across a
    /// restart of the process, independent of the wall clock.
    fn since_boot(&self) -> Duration;
}
