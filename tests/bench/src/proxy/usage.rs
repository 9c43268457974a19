//! Resources of a process and of the programs that it runs.
//!
//! Owns: [`Usage`], processor time; [`Memory`], resident memory; [`Children`], the memory of short-lived programs. In:
//! process ids. Out: seconds and megabytes (of 2^20 bytes).

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow, bail};
use keelson_harness::process::is_program;
use nix::unistd::{SysconfVar, sysconf};

/// Poll interval for short-lived programs.
const BETWEEN: Duration = Duration::from_millis(20);

/// Processor time since a process started, in seconds. The kernel handles a transaction of rules within the system call
/// that sends it, so it is system time of that process.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Usage {
    pub(super) user: f64,
    pub(super) system: f64,
    /// User and system time of exited children, such as every `nft` that it ran.
    pub(super) children: f64,
}

impl Usage {
    pub(super) fn of(pid: u32) -> Result<Self> {
        let stat =
            fs::read_to_string(format!("/proc/{pid}/stat")).context("the processor time of a process")?;
        let Some(per_second) = sysconf(SysconfVar::CLK_TCK).context("the clock's ticks")? else {
            bail!("this system does not say how long a tick is");
        };
        let [user, system, of_children, of_children_system] =
            times(&stat)?.map(|ticks| ticks as f64 / per_second as f64);
        Ok(Self { user, system, children: of_children + of_children_system })
    }

    /// The difference to an earlier reading.
    pub(super) fn since(self, earlier: Self) -> Self {
        Self {
            user: self.user - earlier.user,
            system: self.system - earlier.system,
            children: self.children - earlier.children,
        }
    }

    pub(super) fn all(self) -> f64 {
        self.user + self.system + self.children
    }
}

/// `utime`, `stime`, `cutime` and `cstime` of `/proc/PID/stat` (proc(5)), in ticks. The name before them is in brackets
/// and may hold anything.
fn times(stat: &str) -> Result<[u64; 4]> {
    let (_, fields) = stat.rsplit_once(')').context("no name in /proc/PID/stat")?;
    let fields: Vec<u64> =
        fields.split_ascii_whitespace().skip(11).map_while(|field| field.parse().ok()).take(4).collect();
    fields.try_into().map_err(|_| anyhow!("/proc/PID/stat is cut off"))
}

/// Resident memory, in MB.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Memory {
    pub(super) now: f64,
    /// VmHWM: the maximum so far.
    pub(super) most: f64,
    /// Pss: a proportional share of pages shared with other processes.
    pub(super) share: f64,
}

impl Memory {
    pub(super) fn of(pid: u32) -> Result<Self> {
        let status = fs::read_to_string(format!("/proc/{pid}/status"))
            .with_context(|| format!("the memory of process {pid}"))?;
        let value = |name| megabytes(&status, name).with_context(|| format!("no {name} of process {pid}"));
        // A process that is exiting has no maps any more.
        let rollup = fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).unwrap_or_default();
        let share = megabytes(&rollup, "Pss:").unwrap_or_default();
        Ok(Self { now: value("VmRSS:")?, most: value("VmHWM:")?, share })
    }
}

/// The value of a line, which is in kB; returned in MB.
fn megabytes(status: &str, name: &str) -> Option<f64> {
    let line = status.lines().find_map(|line| line.strip_prefix(name))?;
    let kilobytes: f64 = line.trim().trim_end_matches(" kB").parse().ok()?;
    Some(kilobytes / 1024.0)
}

/// A thread that finds the largest run of a program by a process. Stopped on drop.
#[derive(Debug)]
pub(super) struct Children {
    most: Arc<AtomicU64>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Children {
    /// A child that has not yet executed the program shares the memory of its parent, and is left out.
    pub(super) fn watch(pid: u32, program: &'static str) -> Self {
        let (most, stop) = (Arc::<AtomicU64>::default(), Arc::<AtomicBool>::default());
        let (noted, stopped) = (most.clone(), stop.clone());
        let thread = thread::spawn(move || {
            while !stopped.load(Ordering::Relaxed) {
                for child in children(pid).into_iter().filter(|child| is_program(*child, program)) {
                    // One that has exited meanwhile was seen before.
                    let kilobytes = Memory::of(child).map_or(0.0, |memory| memory.most * 1024.0);
                    noted.fetch_max(kilobytes as u64, Ordering::Relaxed);
                }
                thread::sleep(BETWEEN);
            }
        });
        Self { most, stop, thread: Some(thread) }
    }

    /// Maximum memory of one of them, in MB, as far as it was seen.
    pub(super) fn max(&self) -> f64 {
        self.most.load(Ordering::Relaxed) as f64 / 1024.0
    }
}

impl Drop for Children {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // The thread returns nothing.
            let _ = thread.join();
        }
    }
}

/// Running children of all threads of a process.
pub(super) fn children(pid: u32) -> Vec<u32> {
    let Ok(threads) = fs::read_dir(format!("/proc/{pid}/task")) else { return Vec::new() };
    let of_thread = |thread: &Path| fs::read_to_string(thread.join("children")).unwrap_or_default();
    threads
        .flatten()
        .flat_map(|thread| {
            let all = of_thread(&thread.path());
            all.split_ascii_whitespace().filter_map(|pid| pid.parse().ok()).collect::<Vec<_>>()
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_parsed_after_any_process_name() {
        let stat = "7 (a b) c) S 1 7 7 0 -1 4194560 210 0 0 0 12 30 5 6 20 0 1 0 5 0 0";
        assert_eq!(times(stat).unwrap(), [12, 30, 5, 6]);
        assert!(times("7 (cut off) S 1").is_err());
    }

    #[test]
    fn memory_is_read_in_megabytes() {
        assert_eq!(megabytes("VmHWM:\t   10240 kB\nVmRSS:\t    2048 kB\n", "VmRSS:"), Some(2.0));
        assert_eq!(megabytes("VmHWM:\t   10240 kB\n", "VmRSS:"), None);
    }
}
