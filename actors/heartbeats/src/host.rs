//! The host, as node status needs it.
//!
//! Owns: the trait [`Host`] that a service implements, and what passes through it. In: calls from the
//! StatusReporter. Out: readings; what cannot be read is absent and named in [`HostReadings::errors`], so that
//! one broken file costs one field.

use std::{net::IpAddr, path::PathBuf, time::Duration};

use futures_util::future::BoxFuture;
use keelson_actor_system::file_system::FileSystem;

/// What does not change while the machine runs.
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

/// What is read for each status.
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
    /// Huge pages: page size in bytes and bytes in all, by size.
    pub huge_pages: Vec<(u64, u64)>,
    /// The file system of the root of pods (`nodefs`).
    pub node_fs: Option<FileSystem>,
    /// The file system of the images (`imagefs`), where the runtime has said which that is.
    pub image_fs: Option<FileSystem>,
    /// The most processes that can be, and those that are.
    pub pids: Option<(u64, u64)>,
    /// Addresses to report, best first, by the kubelet's rule: the address of the default route's interface,
    /// IPv4 before IPv6, no loopback, no link-local one.
    pub addresses: Vec<IpAddr>,
    /// What could not be read, a sentence each.
    pub errors: Vec<String>,
}

/// What only some readings need.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct HostAsk {
    /// The directory whose file system is `nodefs`.
    pub node_fs: PathBuf,
    /// A directory of the runtime's images.
    pub image_fs: Option<PathBuf>,
}

pub trait Host: Send + Sync + 'static {
    /// What does not change.
    fn facts(&self) -> HostFacts;

    /// What changes. Never fails and never takes long: a file system that hangs is an error in the readings.
    fn read(&self, ask: HostAsk) -> BoxFuture<'static, HostReadings>;

    /// Time since boot, time asleep included (CLOCK_BOOTTIME): with [`HostFacts::boot_id`] it tells across a
    /// restart of the process how much time has passed, whatever the wall clock did.
    fn since_boot(&self) -> Duration;
}
