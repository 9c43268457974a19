//! Processors and processes.
//!
//! Owns: the parsing of the processors' and the scheduler's files. In: files. Out: counts.

use crate::tree::{ReadError, Tree};

const ONLINE: &str = "sys/devices/system/cpu/online";
const CPUINFO: &str = "proc/cpuinfo";
const LOADAVG: &str = "proc/loadavg";
/// The kernel enforces the smaller of the two.
const TASK_LIMITS: [&str; 2] = ["proc/sys/kernel/pid_max", "proc/sys/kernel/threads-max"];

pub(crate) fn cpus(tree: &Tree) -> Result<u32, ReadError> {
    let online = match tree.text(ONLINE) {
        Ok(online) => online,
        Err(error) if error.is_absent() => return cpus_of_cpuinfo(tree),
        Err(error) => return Err(error),
    };
    count_list(online.trim()).ok_or_else(|| tree.content(ONLINE, "a list of processors such as 0-3,6"))
}

fn cpus_of_cpuinfo(tree: &Tree) -> Result<u32, ReadError> {
    let text = tree.text(CPUINFO)?;
    // Most architectures write "processor : 0"; s390 writes "processor 0: ...".
    let is_processor =
        |line: &&str| line.strip_prefix("processor").is_some_and(|rest| rest.starts_with([' ', '\t', ':']));
    match u32::try_from(text.lines().filter(is_processor).count()) {
        Ok(count) if count > 0 => Ok(count),
        _ => Err(tree.content(CPUINFO, "a line for each processor")),
    }
}

/// The number of elements of a list such as `0-3,6`; `None` if it is empty.
fn count_list(list: &str) -> Option<u32> {
    let mut count = 0_u32;
    for part in list.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last) = (first.parse::<u32>().ok()?, last.parse::<u32>().ok()?);
        count = count.checked_add(last.checked_sub(first)?.checked_add(1)?)?;
    }
    Some(count)
}

/// The maximum number of tasks by the readable limits; the others are named in `errors`.
pub(crate) fn task_limit(tree: &Tree, errors: &mut Vec<String>) -> Option<u64> {
    let mut limits = Vec::new();
    for file in TASK_LIMITS {
        match tree.number(file) {
            Ok(limit) => limits.push(limit),
            Err(error) => errors.push(error.to_string()),
        }
    }
    limits.into_iter().min()
}

/// Current number of tasks; `/proc/loadavg` counts them without the 16-bit limit of sysinfo(2).
pub(crate) fn tasks(tree: &Tree) -> Result<u64, ReadError> {
    let text = tree.text(LOADAVG)?;
    let tasks = text.split_whitespace().nth(3).and_then(|field| field.split_once('/')?.1.parse().ok());
    tasks.ok_or_else(|| tree.content(LOADAVG, "runnable/all tasks as its fourth field"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_processors_are_counted() {
        for (list, count) in [
            ("0", Some(1)),
            ("0-1", Some(2)),
            ("0-3,6,8-9", Some(7)),
            ("", None),
            ("0-", None),
            ("3-1", None),
            ("zero", None),
            ("0,,1", None),
            ("0-4294967295", None),
            ("99999999999", None),
        ] {
            assert_eq!(count_list(list), count, "{list:?}");
        }
    }
}
