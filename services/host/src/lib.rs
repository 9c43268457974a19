//! Readings of the host for node status.
//!
//! Owns: [`LinuxHost`], the readings of a Linux machine. In: calls of the trait [`Host`] that the actors declare.
//! Out: data of `/proc`, `/sys`, `/etc` and the kernel, in the kubelet's sense of each figure.
//! Nothing here fails as a whole: a file that is unreadable or invalid costs only its own figures, and is
//! named in the errors of the reading.

#[cfg(not(target_os = "linux"))]
compile_error!("keelson-host reads Linux's /proc and /sys");

mod address;
mod facts;
mod file_systems;
mod machine;
mod memory;
#[cfg(test)]
mod tests;
mod tree;

use std::{
    path::PathBuf,
    sync::{Arc, OnceLock},
    time::Duration,
};

use futures_util::{FutureExt as _, future::BoxFuture};
use keelson_actor_system::file_system::{FileSystem, FileSystemReader};
use keelson_heartbeats::host::{Host, HostFacts, HostQuery, HostReadings};
use nix::time::ClockId;

use file_systems::FileSystems;
use memory::MemInfo;
use tree::{ReadError, Tree};

/// The machine that this process runs on. Clones share state.
#[derive(Debug, Clone)]
pub struct LinuxHost {
    tree: Tree,
    file_systems: FileSystems,
    facts: Arc<OnceLock<HostFacts>>,
}

impl Default for LinuxHost {
    fn default() -> Self {
        Self::new()
    }
}

impl LinuxHost {
    /// Reads the machine's files below `/`.
    #[must_use]
    pub fn new() -> Self {
        Self::at("/")
    }

    /// Reads the machine's `proc`, `sys` and `etc` below `root`: for a container that has the host's file system
    /// mounted elsewhere, or a test. Interfaces, uname and clock are always those of this process, and the paths of a
    /// [`HostQuery`] are used unchanged.
    #[must_use]
    pub fn at(root: impl Into<PathBuf>) -> Self {
        Self { tree: Tree::new(root.into()), file_systems: FileSystems::new(), facts: Arc::default() }
    }
}

impl FileSystemReader for LinuxHost {
    fn file_system(&self, path: PathBuf) -> BoxFuture<'static, Result<FileSystem, String>> {
        let file_systems = self.file_systems.clone();
        async move { file_systems.read(path).await.map_err(|error| error.to_string()) }.boxed()
    }
}

impl Host for LinuxHost {
    fn facts(&self) -> HostFacts {
        self.facts.get_or_init(|| facts::read(&self.tree)).clone()
    }

    fn read(&self, ask: HostQuery) -> BoxFuture<'static, HostReadings> {
        let (tree, file_systems) = (self.tree.clone(), self.file_systems.clone());
        async move {
            let kernel = tokio::task::spawn_blocking(move || read_kernel(&tree));
            let same = ask.image_fs.as_ref() == Some(&ask.node_fs);
            let other = ask.image_fs.filter(|_| !same);
            let (kernel, node_fs, image_fs) =
                futures_util::future::join3(kernel, file_systems.read(ask.node_fs), async {
                    Some(file_systems.read(other?).await)
                })
                .await;
            let mut readings = kernel.unwrap_or_else(|error| HostReadings {
                errors: vec![format!("cannot read /proc and /sys: {error}")],
                ..HostReadings::default()
            });
            readings.node_fs = keep(node_fs, &mut readings.errors);
            readings.image_fs = match image_fs {
                Some(image_fs) => keep(image_fs, &mut readings.errors),
                None if same => readings.node_fs,
                None => None,
            };
            readings
        }
        .boxed()
    }

    fn since_boot(&self) -> Duration {
        // Linux has had this clock since 2.6.39.
        ClockId::CLOCK_BOOTTIME.now().map_or(Duration::ZERO, Duration::from)
    }
}

fn keep<T, E: std::fmt::Display>(read: Result<T, E>, errors: &mut Vec<String>) -> Option<T> {
    read.map_err(|error| errors.push(error.to_string())).ok()
}

/// Everything but the file systems: files that the kernel generates on read.
fn read_kernel(tree: &Tree) -> HostReadings {
    let mut errors = Vec::new();
    let cpus = keep(machine::cpus(tree), &mut errors);
    let meminfo = keep(MemInfo::read(tree), &mut errors);
    let mut of_memory = |read: fn(&Tree, &MemInfo) -> Result<u64, ReadError>| {
        meminfo.as_ref().and_then(|meminfo| keep(read(tree, meminfo), &mut errors))
    };
    let memory_capacity_bytes = of_memory(|_, meminfo| meminfo.total());
    let swap_capacity_bytes = of_memory(|_, meminfo| meminfo.swap());
    // Without a known capacity nothing is available, and the cause is in `errors` already.
    let memory_available_bytes = memory_capacity_bytes.and_then(|_| of_memory(memory::available));
    let huge_pages = memory::huge_pages(tree, &mut errors);
    let limit = machine::task_limit(tree, &mut errors);
    let tasks = keep(machine::tasks(tree), &mut errors);
    let interfaces = address::interfaces().map_err(|error| format!("cannot list the interfaces: {error}"));
    let addresses = keep(interfaces, &mut errors)
        .map(|interfaces| address::choose(tree, &interfaces, &mut errors))
        .unwrap_or_default();
    HostReadings {
        cpus,
        memory_capacity_bytes,
        memory_available_bytes,
        swap_capacity_bytes,
        huge_pages,
        node_fs: None::<FileSystem>,
        image_fs: None,
        pids: limit.zip(tasks),
        addresses,
        errors,
    }
}
