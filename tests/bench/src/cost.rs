//! Owns: processor time of processes. In: process ids. Out: [`Cpu`].

use std::fs;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use nix::unistd::{SysconfVar, sysconf};

/// User and system time of all threads of a process since it started.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Cpu(Duration);

impl Cpu {
    pub(crate) fn of(pid: u32) -> Result<Self> {
        let stat =
            fs::read_to_string(format!("/proc/{pid}/stat")).context("the processor time of a process")?;
        let Some(per_second) = sysconf(SysconfVar::CLK_TCK).context("the clock's ticks")? else {
            bail!("this system does not say how long a tick is");
        };
        Ok(Self(Duration::from_secs_f64(ticks(&stat)? as f64 / per_second as f64)))
    }

    pub(crate) fn own() -> Result<Self> {
        Self::of(std::process::id())
    }

    /// The difference to an earlier reading.
    pub(crate) fn since(self, earlier: Self) -> Duration {
        self.0.saturating_sub(earlier.0)
    }
}

/// `utime` and `stime` of `/proc/PID/stat` (proc(5)). The name before them is in brackets and may hold anything.
fn ticks(stat: &str) -> Result<u64> {
    let (_, fields) = stat.rsplit_once(')').context("no name in /proc/PID/stat")?;
    let mut fields = fields.split_ascii_whitespace().skip(11);
    let mut next = || fields.next()?.parse::<u64>().ok();
    let (user, system) = (next(), next());
    Ok(user.context("no utime")? + system.context("no stime")?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_parsed_after_any_process_name() {
        let stat = "7 (a b) c) S 1 7 7 0 -1 4194560 210 0 0 0 12 30 0 0 20 0 1 0 5 0 0";
        assert_eq!(ticks(stat).unwrap(), 42);
        assert!(ticks("7 (cut off").is_err());
    }
}
