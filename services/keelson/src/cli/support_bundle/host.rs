//! Facts about the machine, without other programs.
//!
//! In: `/proc`, files of the kubelet. Out: text for the bundle.

use std::{
    fmt::Write as _,
    fs,
    os::unix::fs::{FileTypeExt as _, MetadataExt as _},
    path::{Path, PathBuf},
};

use crate::kubelet::{self, Key, Kubelet, Process};

/// What agent and proxy read or write of the kernel.
const SYSCTLS: [&str; 20] = [
    "kernel/osrelease",
    "net/ipv4/ip_forward",
    "net/ipv6/conf/all/forwarding",
    "net/ipv4/conf/all/route_localnet",
    "net/ipv4/conf/all/rp_filter",
    "net/ipv4/conf/all/arp_ignore",
    "net/ipv4/conf/all/arp_announce",
    "net/ipv4/ip_local_port_range",
    "net/ipv4/ip_local_reserved_ports",
    "net/ipv4/vs/conntrack",
    "net/ipv4/vs/conn_reuse_mode",
    "net/ipv4/vs/expire_nodest_conn",
    "net/bridge/bridge-nf-call-iptables",
    "net/netfilter/nf_conntrack_count",
    "net/netfilter/nf_conntrack_max",
    "net/netfilter/nf_conntrack_buckets",
    "net/netfilter/nf_conntrack_tcp_timeout_established",
    "net/netfilter/nf_conntrack_tcp_timeout_close_wait",
    "net/netfilter/nf_conntrack_tcp_be_liberal",
    "fs/file-nr",
];

pub(super) fn sysctls() -> String {
    let mut text = String::new();
    for name in SYSCTLS {
        let value = match fs::read_to_string(Path::new("/proc/sys").join(name)) {
            Ok(value) => value.trim().to_owned(),
            Err(error) => format!("({error})"),
        };
        let _ = writeln!(text, "{} = {value}", name.replace('/', "."));
    }
    text
}

/// Memory, descriptors, threads, limits and control group of every other process of this program.
pub(super) fn processes() -> Result<String, String> {
    let mut text = String::new();
    for Process { pid, arguments } in kubelet::processes(Path::new("/proc"), "keelson") {
        if pid.unsigned_abs() == std::process::id() {
            continue;
        }
        let of = |name: &str| fs::read_to_string(format!("/proc/{pid}/{name}"));
        let _ = writeln!(text, "==== process {pid}: {}", arguments.join(" "));
        let descriptors = match fs::read_dir(format!("/proc/{pid}/fd")) {
            Ok(entries) => entries.count().to_string(),
            Err(error) => error.to_string(),
        };
        let _ = writeln!(text, "open descriptors: {descriptors}");
        for name in ["status", "smaps_rollup", "limits", "cgroup", "io", "oom_score_adj"] {
            let _ = writeln!(text, "---- {name}");
            text.push_str(&of(name).unwrap_or_else(|error| format!("({error})\n")));
        }
    }
    if text.is_empty() { Err("no other process of keelson runs".into()) } else { Ok(text) }
}

/// Kind, mode, owner and size of what is at the paths, and of what is in folders, one level deep.
pub(super) fn listing(paths: &[PathBuf]) -> String {
    let mut text = String::new();
    for path in paths {
        describe(&mut text, path);
        let Ok(entries) = fs::read_dir(path) else { continue };
        let mut inside: Vec<PathBuf> = entries.filter_map(|entry| Some(entry.ok()?.path())).collect();
        inside.sort_unstable();
        inside.iter().for_each(|path| describe(&mut text, path));
    }
    text
}

fn describe(text: &mut String, path: &Path) {
    let _ = match fs::symlink_metadata(path) {
        Ok(found) => {
            let kind = match found.file_type() {
                kind if kind.is_socket() => "socket",
                kind if kind.is_dir() => "dir",
                kind if kind.is_symlink() => "link",
                _ => "file",
            };
            let (mode, uid, gid) = (found.mode() & 0o7777, found.uid(), found.gid());
            writeln!(text, "{kind:6} {mode:04o} uid {uid} gid {gid} {:>12} {}", found.len(), path.display())
        }
        Err(error) => writeln!(text, "{} ({error})", path.display()),
    };
}

/// The settings of the kubelet that concern images, of each place that has them, in rising precedence; nothing else of it.
pub(super) fn image_keys(kubelet: &Kubelet) -> String {
    let mut text = String::new();
    for source in &kubelet.sources {
        let copy = if source.saved.is_some() { " (with a copy of keelson attach)" } else { "" };
        let _ = writeln!(text, "==== {}{copy}", source.path.display());
        for key in Key::ALL {
            if let Some(value) = source.value(key) {
                let _ = writeln!(text, "{}: {value}", key.name());
            }
        }
    }
    if let Some(process) = &kubelet.process {
        let _ = writeln!(text, "==== flags of process {}", process.pid);
        for flag in Key::ALL.into_iter().filter_map(Key::flag).chain(["config", "config-dir"]) {
            if let Some(value) = process.flag(flag) {
                let _ = writeln!(text, "--{flag}={value}");
            }
        }
    }
    text.extend(kubelet.errors.iter().map(|error| format!("{error}\n")));
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kubelet::{
        Kind,
        testing::{kubelet, source},
    };

    #[test]
    fn only_the_image_keys_of_the_kubelet_are_taken() {
        let yaml = "kind: KubeletConfiguration\nserializeImagePulls: false\n\
                    staticPodURLHeader: {Authorization: [x]}\nimageServiceEndpoint: unix:///run/keelson/cri.sock\n";
        let drop_in = source(Kind::DropIn, "/etc/conf.d/20-keelson.conf", "registryPullQPS: 0\n");
        let flags = source(Kind::Flags, "/etc/default/kubelet", "A=\"--registry-qps=5 --node-labels=a=b\"\n");
        let arguments = ["kubelet", "--config", "/x", "--node-labels=a=b"].map(str::to_owned).into();
        let kubelet = Kubelet {
            process: Some(Process { pid: 7, arguments }),
            ..kubelet(vec![source(Kind::Config, "/config.yaml", yaml), drop_in, flags])
        };
        assert_eq!(
            image_keys(&kubelet),
            "==== /config.yaml\nimageServiceEndpoint: unix:///run/keelson/cri.sock\nserializeImagePulls: false\n\
             ==== /etc/conf.d/20-keelson.conf\nregistryPullQPS: 0\n\
             ==== /etc/default/kubelet\nregistryPullQPS: 5\n\
             ==== flags of process 7\n--config=/x\n"
        );
    }

    #[test]
    fn files_are_listed_with_mode_and_owner() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("a"), "abc").unwrap();
        let text = listing(&[folder.path().into(), "/no/such".into()]);
        assert!(text.starts_with("dir    "), "{text}");
        assert!(text.contains("3 ") && text.contains("/no/such (No such file"), "{text}");
    }
}
