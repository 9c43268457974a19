//! Memory, as the kubelet counts it.
//!
//! Owns: the parsing of `/proc/meminfo`, the root cgroup and the huge page pools. In: files. Out: bytes.
//!
//! `memory.available`, which determines MemoryPressure, is the capacity less the working set of the root
//! cgroup, and the working set is usage less inactive file pages. The source of the usage depends on the kernel:
//!
//! | the machine has | usage | inactive file pages |
//! |---|---|---|
//! | cgroup v1, or both (hybrid) | `memory.usage_in_bytes` of the memory controller's root | `total_inactive_file` of its `memory.stat` |
//! | cgroup v2 | `anon` + `file` of the root's `memory.stat`: the root has no `memory.current` | `inactive_file` there |
//! | cgroup v2, in a cgroup namespace | `memory.current` | `inactive_file` of `memory.stat` |
//! | no memory controller | `MemTotal` - `MemFree` | `Inactive(file)` |
//!
//! The first three are what cAdvisor reads for the kubelet. Without a memory controller a kubelet does not start
//! at all; the last line is the closest equivalent on such a kernel.

use std::fs;

use crate::tree::{ReadError, Tree};

const MEMINFO: &str = "proc/meminfo";
const V1_USAGE: &str = "sys/fs/cgroup/memory/memory.usage_in_bytes";
const V1_STAT: &str = "sys/fs/cgroup/memory/memory.stat";
const V2_USAGE: &str = "sys/fs/cgroup/memory.current";
const V2_STAT: &str = "sys/fs/cgroup/memory.stat";
const HUGE_PAGES: &str = "sys/kernel/mm/hugepages";

#[derive(Debug, Clone)]
pub(crate) struct MemInfo {
    tree: Tree,
    text: String,
}

impl MemInfo {
    pub(crate) fn read(tree: &Tree) -> Result<Self, ReadError> {
        Ok(Self { tree: tree.clone(), text: tree.text(MEMINFO)? })
    }

    /// Bytes of a line such as `MemTotal:  24684092 kB`.
    fn bytes(&self, name: &'static str) -> Result<u64, ReadError> {
        let line = self.text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        line.and_then(|value| value.trim().strip_suffix("kB")?.trim_end().parse::<u64>().ok())
            .and_then(|kib| kib.checked_mul(1024))
            .ok_or_else(|| self.tree.content(MEMINFO, name))
    }

    /// `MemTotal`, bytes.
    pub(crate) fn total(&self) -> Result<u64, ReadError> {
        self.bytes("MemTotal")
    }

    /// `SwapTotal`, bytes.
    pub(crate) fn swap(&self) -> Result<u64, ReadError> {
        self.bytes("SwapTotal")
    }

    /// Working set of the machine as a whole, without cgroups.
    fn working_set(&self) -> Result<u64, ReadError> {
        let used = self.total()?.saturating_sub(self.bytes("MemFree")?);
        Ok(used.saturating_sub(self.bytes("Inactive(file)")?))
    }
}

/// Capacity less working set, bytes.
pub(crate) fn available(tree: &Tree, meminfo: &MemInfo) -> Result<u64, ReadError> {
    let total = meminfo.total()?;
    let working_set = match v1_working_set(tree)? {
        Some(working_set) => working_set,
        None => match v2_working_set(tree)? {
            Some(working_set) => working_set,
            None => meminfo.working_set()?,
        },
    };
    Ok(total.saturating_sub(working_set))
}

/// `None` if the file does not exist.
fn if_there<T>(read: Result<T, ReadError>) -> Result<Option<T>, ReadError> {
    match read {
        Ok(value) => Ok(Some(value)),
        Err(error) if error.is_absent() => Ok(None),
        Err(error) => Err(error),
    }
}

fn v1_working_set(tree: &Tree) -> Result<Option<u64>, ReadError> {
    let Some(usage) = if_there(tree.number(V1_USAGE))? else { return Ok(None) };
    let stat = tree.text(V1_STAT)?;
    let inactive = stat_value(&stat, "total_inactive_file")
        .ok_or_else(|| tree.content(V1_STAT, "a number for total_inactive_file"))?;
    Ok(Some(usage.saturating_sub(inactive)))
}

fn v2_working_set(tree: &Tree) -> Result<Option<u64>, ReadError> {
    let Some(stat) = if_there(tree.text(V2_STAT))? else { return Ok(None) };
    let value = |key, expected| stat_value(&stat, key).ok_or_else(|| tree.content(V2_STAT, expected));
    let usage = match if_there(tree.number(V2_USAGE))? {
        Some(usage) => usage,
        None => value("anon", "a number for anon")?.saturating_add(value("file", "a number for file")?),
    };
    Ok(Some(usage.saturating_sub(value("inactive_file", "a number for inactive_file")?)))
}

/// Parses a line of memory.stat such as `inactive_file 123`.
fn stat_value(stat: &str, key: &str) -> Option<u64> {
    let value = stat.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(' '))?;
    value.trim().parse().ok()
}

/// Pools of huge pages by page size: bytes of a page, bytes in total. Unreadable files are named in `errors`.
pub(crate) fn huge_pages(tree: &Tree, errors: &mut Vec<String>) -> Vec<(u64, u64)> {
    let folder = tree.path(HUGE_PAGES);
    let entries = match fs::read_dir(&folder) {
        Ok(entries) => entries,
        // A kernel without huge pages.
        Err(source) if source.kind() == std::io::ErrorKind::NotFound => return Vec::new(),
        Err(source) => {
            errors.push(ReadError::Io { path: folder, source }.to_string());
            return Vec::new();
        }
    };
    let mut pools = Vec::new();
    for name in entries.flatten().filter_map(|entry| entry.file_name().into_string().ok()) {
        let Some(size) = name.strip_prefix("hugepages-") else { continue };
        match pool(tree, &name, size) {
            Ok(pool) => pools.push(pool),
            Err(error) => errors.push(error.to_string()),
        }
    }
    pools.sort_unstable();
    pools
}

fn pool(tree: &Tree, name: &str, size: &str) -> Result<(u64, u64), ReadError> {
    let folder = format!("{HUGE_PAGES}/{name}");
    let size = size
        .strip_suffix("kB")
        .and_then(|kib| kib.parse::<u64>().ok()?.checked_mul(1024))
        .ok_or_else(|| tree.content(&folder, "a page size in its name"))?;
    let file = format!("{folder}/nr_hugepages");
    let pages = tree.number(&file)?;
    let bytes = pages.checked_mul(size).ok_or_else(|| tree.content(&file, "a credible number of pages"))?;
    Ok((size, bytes))
}
