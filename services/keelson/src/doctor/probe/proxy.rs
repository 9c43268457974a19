//! The kernel, and a kube-proxy of this node.
//!
//! In: settings, files below /proc. Out: [`Proxy`]. Backends are opened to compare, as `keelson proxy --dry-run` does.

use std::{fs, os::unix::fs::MetadataExt as _, path::Path, thread};

use keelson_config::Settings;
use keelson_proxy::{
    conntrack::{ProcSys, Sysctls as _},
    leftovers::{self, Places},
};

use super::super::facts::{Backend, Proxy, Sysctl};
use crate::{
    kubelet::{Process, processes},
    proxy as runner,
};

pub(super) fn look(settings: &Settings) -> Proxy {
    let places = Places::default();
    let left = leftovers::found(&places).into_iter().map(|(family, what)| format!("{family}: {what}"));
    let cannot = leftovers::unlistable(&places)
        .into_iter()
        .map(|(family, why)| format!("{family}: chains of iptables-legacy cannot be listed ({why})"));
    Proxy {
        backends: backends(settings),
        kube_proxies: kube_proxies(Path::new("/proc")),
        leftovers: left.chain(cannot).collect(),
        sysctls: sysctls(settings),
    }
}

fn backends(settings: &Settings) -> Vec<Backend> {
    runner::probe_backends(settings)
        .into_iter()
        .map(|found| Backend {
            name: found.name,
            is_automatic: found.is_automatic,
            opened: found.opened,
            rules: found.rules,
            includes: found.includes,
        })
        .collect()
}

/// Those in this network namespace, in whatever container, and those whose namespace cannot be read without root.
fn kube_proxies(proc: &Path) -> Vec<Process> {
    let network = |pid: &str| fs::metadata(proc.join(pid).join("ns/net")).ok().map(|found| found.ino());
    let own = network("self");
    let mut found = processes(proc, "kube-proxy");
    found.retain(|process| network(&process.pid.to_string()).is_none_or(|network| Some(network) == own));
    found
}

fn sysctls(settings: &Settings) -> Vec<Sysctl> {
    let options = runner::conntrack_options(settings);
    let kernel = ProcSys(options.sysctl_dir.clone());
    let cpus = thread::available_parallelism().map_or(1, usize::from);
    options
        .wanted(cpus)
        .into_iter()
        .map(|wanted| Sysctl {
            name: wanted.name,
            wanted: wanted.value,
            at_least: wanted.at_least,
            now: kernel.read(wanted.name).ok(),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kube_proxy_of_another_network_namespace_is_left_out() {
        let proc = tempfile::tempdir().expect("a folder");
        let at = |path: &str| proc.path().join(path);
        for pid in ["self", "7", "8", "9"] {
            fs::create_dir_all(at(pid).join("ns")).expect("makes");
            fs::write(at(pid).join("cmdline"), "/usr/local/bin/kube-proxy\0").expect("writes");
        }
        fs::write(at("self/ns/net"), "").expect("writes");
        fs::hard_link(at("self/ns/net"), at("7/ns/net")).expect("links");
        fs::write(at("8/ns/net"), "").expect("writes");
        // Without root, that of process 9 cannot be read.
        let found: Vec<i32> = kube_proxies(proc.path()).iter().map(|process| process.pid).collect();
        assert_eq!(found, [7, 9]);
    }
}
