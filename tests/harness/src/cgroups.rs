//! Owns: the removal of cgroups that containers leave. In: processes that are killed, logs of runtimes. Out: cgroups that are gone.
//!
//! A kubelet looks at every cgroup of the machine, so what tests leave would slow down all later ones.

use std::collections::{BTreeSet, HashSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Processes that were killed leave their cgroups a moment later.
const PATIENCE: Duration = Duration::from_secs(2);

/// Characters of the id of a container.
const CONTAINER_ID: usize = 64;

/// A mounted hierarchy.
struct Hierarchy {
    mount: PathBuf,
    /// As in `/proc/PID/cgroup`: `memory`, `name=systemd`; empty for version 2.
    controllers: Vec<String>,
}

/// The cgroups of these processes in every hierarchy, except for those that this process is in, and the roots.
pub(crate) fn of(processes: impl IntoIterator<Item = u32>) -> BTreeSet<PathBuf> {
    let hierarchies = hierarchies();
    let own = memberships(&hierarchies, &fs::read_to_string("/proc/self/cgroup").unwrap_or_default());
    let mut found = BTreeSet::new();
    for process in processes {
        let text = fs::read_to_string(format!("/proc/{process}/cgroup")).unwrap_or_default();
        found.extend(memberships(&hierarchies, &text));
    }
    found.retain(|cgroup| !own.iter().any(|own| own.starts_with(cgroup)));
    found
}

/// The cgroups in every hierarchy that are named after a container in `text`, the log of its runtime. A pod of CRI-O has some that no process
/// is in, and a runtime that is killed leaves those of containers that have ended.
pub(crate) fn of_containers(text: &str) -> BTreeSet<PathBuf> {
    let ids = container_ids(text);
    let mut found = BTreeSet::new();
    let mut folders: Vec<PathBuf> = hierarchies().into_iter().map(|hierarchy| hierarchy.mount).collect();
    while let (Some(folder), false) = (folders.pop(), ids.is_empty()) {
        for entry in fs::read_dir(&folder).into_iter().flatten().flatten() {
            if !entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                continue;
            }
            let name = entry.file_name().into_string().unwrap_or_default();
            // `ID`, `crio-ID` and `crio-conmon-ID`.
            if ids.contains(name.rsplit('-').next().unwrap_or_default()) {
                found.insert(entry.path());
            }
            folders.push(entry.path());
        }
    }
    found
}

/// Words that may be the id of a container.
fn container_ids(text: &str) -> HashSet<&str> {
    text.split(|character: char| !character.is_ascii_alphanumeric())
        .filter(|word| word.len() == CONTAINER_ID && word.bytes().all(|byte| byte.is_ascii_hexdigit()))
        .collect()
}

/// Removes those that nothing is in any more.
pub(crate) fn remove(mut cgroups: BTreeSet<PathBuf>) {
    let until = Instant::now() + PATIENCE;
    loop {
        // Inner ones come after those that they are in.
        let left = cgroups.iter().rev().filter(|cgroup| fs::remove_dir(cgroup).is_err() && cgroup.exists());
        cgroups = left.cloned().collect();
        if cgroups.is_empty() || Instant::now() > until {
            return;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn hierarchies() -> Vec<Hierarchy> {
    let text = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    text.lines().filter_map(hierarchy).collect()
}

/// A line of `/proc/self/mounts`.
fn hierarchy(line: &str) -> Option<Hierarchy> {
    let mut fields = line.split(' ').skip(1);
    let (mount, kind, options) = (fields.next()?, fields.next()?, fields.next()?);
    let controllers = match kind {
        "cgroup" => options.split(',').map(str::to_owned).collect(),
        "cgroup2" => vec![String::new()],
        _ => return None,
    };
    Some(Hierarchy { mount: mount.into(), controllers })
}

/// `text`: of `/proc/PID/cgroup`, lines such as `4:memory:/k8s.io/1234`.
fn memberships(hierarchies: &[Hierarchy], text: &str) -> BTreeSet<PathBuf> {
    let membership = |line: &str| {
        let mut fields = line.splitn(3, ':').skip(1);
        let (controllers, path) = (fields.next()?, fields.next()?.trim_start_matches('/'));
        let first = controllers.split(',').next()?;
        let hierarchy =
            hierarchies.iter().find(|hierarchy| hierarchy.controllers.iter().any(|one| one == first))?;
        // `..`: outside of what this process sees.
        (!path.is_empty() && !path.starts_with("..")).then(|| hierarchy.mount.join(Path::new(path)))
    };
    text.lines().filter_map(membership).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cgroups_of_both_versions_are_found() {
        let mounts = [
            "cgroup /sys/fs/cgroup/cpu cgroup rw,nosuid,cpu,cpuacct 0 0",
            "cgroup /sys/fs/cgroup/systemd cgroup rw,xattr,name=systemd 0 0",
            "none /sys/fs/cgroup/unified cgroup2 rw,relatime 0 0",
            "proc /proc proc rw 0 0",
        ];
        let hierarchies: Vec<Hierarchy> = mounts.into_iter().filter_map(hierarchy).collect();
        let text = "3:cpu,cpuacct:/k8s.io/1\n2:name=systemd:/k8s.io/1\n1:memory:/k8s.io/1\n0::/k8s.io/1\n";
        let found = memberships(&hierarchies, text);
        let found: Vec<_> = found.iter().map(|path| path.display().to_string()).collect();
        let wanted = ["cpu", "systemd", "unified"].map(|name| format!("/sys/fs/cgroup/{name}/k8s.io/1"));
        assert_eq!(found, wanted);
        assert!(memberships(&hierarchies, "3:cpu,cpuacct:/\n0::/../other\n").is_empty());
    }

    #[test]
    fn ids_of_containers_are_found_in_logs() {
        let [pod, container] = ["7f".repeat(32), "0e".repeat(32)];
        let short = &pod[1..];
        let log = format!("level=info msg=\"Ran pod sandbox {pod} with\" id={container}\n{short} g{short}");
        assert_eq!(container_ids(&log), HashSet::from([&*pod, &*container]));
    }

    #[test]
    fn the_cgroups_of_this_process_are_kept() {
        assert!(of([std::process::id()]).is_empty());
    }
}
