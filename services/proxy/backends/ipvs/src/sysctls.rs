//! Kernel settings of IPVS.
//!
//! Owns: which settings are needed ([`wanted`]), and writing them ([`apply`]). In: options, the kernel's values. Out: values in
//! the kernel of the network namespace of the calling thread; what was refused.

use std::{fs, path::Path};

use keelson_proxy::options::IpvsOptions;

const ROOT: &str = "/proc/sys/net/ipv4";

/// A sysctl below `net.ipv4`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Sysctl {
    pub(crate) name: &'static str,
    pub(crate) value: u8,
    /// What does not work without it.
    pub(crate) purpose: &'static str,
}

/// Linux before 5.9 delays a connection from a port that was used a moment before by a second (with `conn_reuse_mode` 1).
const REUSE_FIXED: (u32, u32) = (5, 9);

/// `release`: the kernel's, such as `6.1.0-18-amd64`.
pub(crate) fn wanted(options: &IpvsOptions, release: &str) -> Vec<Sysctl> {
    let mut all = vec![
        Sysctl { name: "vs/conntrack", value: 1, purpose: "connections are not masqueraded" },
        Sysctl {
            name: "vs/expire_nodest_conn",
            value: 1,
            purpose: "UDP flows to endpoints that are gone are dropped until they time out",
        },
        Sysctl {
            name: "vs/expire_quiescent_template",
            value: 1,
            purpose: "clients with session affinity keep endpoints that no longer serve",
        },
    ];
    if kernel_version(release).is_some_and(|version| version < REUSE_FIXED) {
        all.push(Sysctl {
            name: "vs/conn_reuse_mode",
            value: 0,
            purpose: "a connection from a port that was used a moment before takes a second",
        });
    }
    if options.strict_arp {
        for (name, value) in [("conf/all/arp_ignore", 1), ("conf/all/arp_announce", 2)] {
            all.push(Sysctl { name, value, purpose: "the node answers ARP for addresses of Services" });
        }
    }
    all
}

fn kernel_version(release: &str) -> Option<(u32, u32)> {
    let mut numbers = release.trim().split(|c: char| !c.is_ascii_digit());
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

/// Writes those that differ, and returns a line for each that the kernel refused.
pub(crate) fn apply(options: &IpvsOptions) -> Vec<String> {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    wanted(options, &release).into_iter().filter_map(write).collect()
}

fn write(Sysctl { name, value, purpose }: Sysctl) -> Option<String> {
    let path = Path::new(ROOT).join(name);
    let write = || {
        if fs::read_to_string(&path)?.trim() == value.to_string() {
            return Ok(());
        }
        fs::write(&path, value.to_string())
    };
    let error: std::io::Error = write().err()?;
    let path = path.display();
    Some(format!("{purpose}: cannot write {value} to {path}: {error}; set the sysctl on the node"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_follow_kernel_and_options() {
        let names = |strict_arp, release| -> Vec<&str> {
            let options = IpvsOptions { strict_arp, ..IpvsOptions::default() };
            wanted(&options, release).iter().map(|sysctl| sysctl.name).collect()
        };
        assert_eq!(names(false, "6.1.0-18-amd64\n").len(), 3);
        assert_eq!(names(false, "").len(), 3);
        assert_eq!(names(false, "5.8.0\n").last(), Some(&"vs/conn_reuse_mode"));
        assert_eq!(names(false, "4.19.0-27-cloud-amd64").len(), 4);
        assert_eq!(names(true, "5.10.0")[3..], ["conf/all/arp_ignore", "conf/all/arp_announce"]);
    }
}
