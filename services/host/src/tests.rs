//! Readings of simulated machines, and of the one that runs the tests.

use std::{
    fs,
    net::IpAddr,
    path::{Path, PathBuf},
};

use nix::net::if_::InterfaceFlags;
use tempfile::TempDir;

use super::*;
use address::{Address, choose};

const KIB: u64 = 1024;
const MEMINFO: &str = "MemTotal:       16000000 kB\nMemFree:         4000000 kB\nMemAvailable:   9000000 kB\n\
    Inactive(file):  3000000 kB\nSwapTotal:       2000000 kB\nHugePages_Total:       0\n";

struct Machine {
    folder: TempDir,
}

impl Machine {
    fn empty() -> Self {
        Self { folder: tempfile::tempdir().expect("a folder") }
    }

    /// A valid machine without a memory controller.
    fn sound() -> Self {
        Self::empty()
            .with("proc/meminfo", MEMINFO)
            .with("proc/loadavg", "0.62 1.55 1.91 3/912 2481\n")
            .with("proc/sys/kernel/pid_max", "4194304\n")
            .with("proc/sys/kernel/threads-max", "192000\n")
            .with("proc/sys/kernel/random/boot_id", "39c8e2f2-c8bd-4d27-ba27-09d87f14b2db\n")
            .with("proc/net/route", "Iface\tDestination\tGateway\tFlags\n")
            .with("sys/devices/system/cpu/online", "0-3\n")
            .with("etc/machine-id", "3d1219c7c4c5404aaa1f6d2a48adfda4\n")
            .with("etc/os-release", "PRETTY_NAME=\"Debian GNU/Linux 13 (trixie)\"\n")
    }

    fn with(self, path: &str, text: &str) -> Self {
        let path = self.folder.path().join(path);
        fs::create_dir_all(path.parent().expect("a parent")).expect("makes folders");
        fs::write(path, text).expect("writes");
        self
    }

    fn without(self, path: &str) -> Self {
        fs::remove_file(self.folder.path().join(path)).expect("removes");
        self
    }

    /// Makes a file unreadable, even for root: a folder in its place.
    fn unreadable(self, path: &str) -> Self {
        let _ = fs::remove_file(self.folder.path().join(path));
        fs::create_dir_all(self.folder.path().join(path)).expect("makes a folder");
        self
    }

    fn v1(self) -> Self {
        self.with("sys/fs/cgroup/memory/memory.usage_in_bytes", "9000000000\n").with(
            "sys/fs/cgroup/memory/memory.stat",
            "inactive_file 1\nactive_file 7\ntotal_inactive_file 2000000000\ntotal_active_file 8\n",
        )
    }

    fn v2(self) -> Self {
        self.with("sys/fs/cgroup/cgroup.controllers", "cpu memory\n").with(
            "sys/fs/cgroup/memory.stat",
            "anon 5000000000\nfile 3000000000\nfile_mapped 5\ninactive_anon 9\ninactive_file 1000000000\n",
        )
    }

    fn host(&self) -> LinuxHost {
        LinuxHost::at(self.folder.path())
    }

    fn tree(&self) -> Tree {
        Tree::new(self.folder.path().to_owned())
    }

    fn read(&self) -> HostReadings {
        read_kernel(&self.tree())
    }
}

#[test]
fn memory_available_is_the_kubelets_on_every_kind_of_cgroup() {
    const TOTAL: u64 = 16_000_000 * KIB;
    let hybrid = Machine::sound().v1().with("sys/fs/cgroup/unified/cgroup.controllers", "");
    let v2_in_a_namespace = |used: &str| Machine::sound().v2().with("sys/fs/cgroup/memory.current", used);
    let table = [
        ("v1", Machine::sound().v1(), TOTAL - 7_000_000_000),
        ("v2", Machine::sound().v2(), TOTAL - 7_000_000_000),
        ("hybrid", hybrid, TOTAL - 7_000_000_000),
        ("v2 in a namespace", v2_in_a_namespace("4000000000\n"), TOTAL - 3_000_000_000),
        ("no memory controller", Machine::sound(), TOTAL - 9_000_000 * KIB),
        ("all of it inactive", v2_in_a_namespace("1000\n"), TOTAL),
        ("more used than the total", v2_in_a_namespace("99000000000\n"), 0),
    ];
    for (kind, machine, available) in table {
        let readings = machine.read();
        assert_eq!(readings.memory_available_bytes, Some(available), "{kind}");
        assert_eq!(readings.memory_capacity_bytes, Some(TOTAL), "{kind}");
        assert_eq!(readings.errors, [] as [String; 0], "{kind}");
    }
}

#[test]
fn all_facts_of_a_complete_machine_are_read() {
    let machine = Machine::sound()
        .v2()
        .with("sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages", "10\n")
        .with("sys/kernel/mm/hugepages/hugepages-1048576kB/nr_hugepages", "0\n");
    let readings = machine.read();
    assert_eq!((readings.cpus, readings.pids), (Some(4), Some((192_000, 912))));
    assert_eq!(readings.swap_capacity_bytes, Some(2_000_000 * KIB));
    assert_eq!(readings.huge_pages, [(2 << 20, 20 << 20), (1 << 30, 0)]);
    assert_eq!(readings.errors, [] as [String; 0]);
}

#[test]
fn processors_are_counted_in_cpuinfo_where_sysfs_has_no_list() {
    let intel = "processor\t: 0\nmodel name\t: a processor\n\nprocessor\t: 1\n";
    for (cpuinfo, count) in [(intel, 2), ("vendor_id: IBM/S390\nprocessor 0: version = 00\n", 1)] {
        let machine = Machine::sound().without("sys/devices/system/cpu/online").with("proc/cpuinfo", cpuinfo);
        let readings = machine.read();
        assert_eq!((readings.cpus, readings.errors.len()), (Some(count), 0));
    }
}

/// What is wrong with a machine, the file that the error names, and the only fields that are lost.
#[test]
fn a_broken_file_costs_its_field_and_is_named() {
    type Lost = fn(&HostReadings) -> bool;
    let cpus: Lost = |readings| readings.cpus.is_none();
    let pids: Lost = |readings| readings.pids.is_none();
    let available: Lost = |readings| readings.memory_available_bytes.is_none();
    let memory: Lost =
        |readings| readings.memory_capacity_bytes.is_none() && readings.memory_available_bytes.is_none();
    let swap: Lost = |readings| readings.swap_capacity_bytes.is_none();
    let nothing: Lost = |readings| readings.pids.is_some();
    let huge: Lost = |readings| readings.huge_pages.is_empty();
    let m = || Machine::sound().v1();
    let v2 = || Machine::sound().v2();
    let meminfo = |text: &str| m().with("proc/meminfo", text);
    let stat = "sys/fs/cgroup/memory.stat";
    let pool = "sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages";
    let table: Vec<(Machine, &str, Lost)> = vec![
        (m().with("sys/devices/system/cpu/online", "many\n"), "online", cpus),
        (m().unreadable("sys/devices/system/cpu/online"), "online", cpus),
        (m().without("sys/devices/system/cpu/online"), "cpuinfo", cpus),
        (m().without("sys/devices/system/cpu/online").with("proc/cpuinfo", "none"), "cpuinfo", cpus),
        (m().without("proc/loadavg"), "loadavg", pids),
        (m().with("proc/loadavg", "0.1 0.2 0.3 many 7\n"), "loadavg", pids),
        (m().with("proc/loadavg", ""), "loadavg", pids),
        (m().with("proc/sys/kernel/pid_max", "-1\n"), "pid_max", nothing),
        (m().without("proc/meminfo"), "meminfo", memory),
        (meminfo("\0\u{fffd}garbage"), "meminfo", memory),
        (meminfo("MemTotal: 99999999999999999999999 kB\nSwapTotal: 0 kB"), "meminfo", memory),
        (meminfo("MemTotal: 18446744073709551615 kB\nSwapTotal: 0 kB"), "meminfo", memory),
        (meminfo("MemTotal: 1 kB\nSwapTotal: a lot\n"), "meminfo", swap),
        (m().with("sys/fs/cgroup/memory/memory.usage_in_bytes", "\n"), "usage_in_bytes", available),
        (m().without("sys/fs/cgroup/memory/memory.stat"), "memory.stat", available),
        (m().with("sys/fs/cgroup/memory/memory.stat", "total_inactive_file x\n"), "memory.stat", available),
        (m().with("sys/fs/cgroup/memory/memory.stat", "inactive_file 5\n"), "memory.stat", available),
        (v2().with(stat, "file 5\ninactive_file 1\n"), "anon", available),
        (v2().with(stat, "anon 5\ninactive_file 1\n"), "file", available),
        (v2().with(stat, "anon 5\nfile 5\n"), "inactive_file", available),
        (v2().with("sys/fs/cgroup/memory.current", "max\n"), "memory.current", available),
        (v2().unreadable(stat), "memory.stat", available),
        (m().with(pool, "ten\n"), "nr_hugepages", huge),
        (m().with(pool, "18446744073709551615\n"), "nr_hugepages", huge),
        (m().with("sys/kernel/mm/hugepages/hugepages-big/nr_hugepages", "1\n"), "hugepages-big", huge),
        (m().with("sys/kernel/mm/hugepages", "no folder"), "hugepages", huge),
        (m().with("proc/net/route", "Iface\neth0\tno-number\n"), "route", nothing),
        (m().with("proc/net/ipv6_route", "0000 00\n"), "ipv6_route", nothing),
    ];
    for (machine, named, lost) in table {
        let readings = machine.read();
        assert!(lost(&readings), "{named}: {readings:?}");
        assert!(!readings.errors.is_empty(), "{named}");
        let root = machine.folder.path().display().to_string();
        for error in &readings.errors {
            assert!(error.contains(named) && error.contains(&root), "{named}: {error}");
        }
        let known =
            [readings.cpus.is_some(), readings.pids.is_some(), readings.memory_capacity_bytes.is_some()];
        assert!(known.iter().filter(|known| **known).count() >= 2, "{named} costs no more: {readings:?}");
    }
}

#[test]
fn a_machine_of_nothing_is_read_without_a_panic() {
    let machine = Machine::empty();
    let readings = machine.read();
    let addresses = readings.addresses.clone();
    let errors = readings.errors.clone();
    assert_eq!(readings, HostReadings { addresses, errors, ..HostReadings::default() });
    for named in ["cpuinfo", "meminfo", "pid_max", "threads-max", "loadavg"] {
        assert!(readings.errors.iter().any(|error| error.contains(named)), "{named}: {:?}", readings.errors);
    }
    let facts = machine.host().facts();
    assert_eq!((facts.machine_id, facts.boot_id, facts.os_image), Default::default());
    assert_eq!(facts.operating_system, "linux");
}

#[test]
fn facts_come_from_the_first_file_that_is_there() {
    let facts = Machine::sound().host().facts();
    assert_eq!(facts.machine_id, "3d1219c7c4c5404aaa1f6d2a48adfda4");
    assert_eq!(facts.system_uuid, facts.machine_id, "without DMI");
    assert_eq!(facts.boot_id, "39c8e2f2-c8bd-4d27-ba27-09d87f14b2db");
    assert_eq!(facts.os_image, "Debian GNU/Linux 13 (trixie)");
    let machine = Machine::sound()
        .without("etc/machine-id")
        .with("var/lib/dbus/machine-id", "0123\n")
        .without("etc/os-release")
        .with("usr/lib/os-release", "PRETTY_NAME='Stateless'\n")
        .with("sys/class/dmi/id/product_uuid", "4c4c4544-0042-3010-8046-b8c04f4e4d32\n");
    let facts = machine.host().facts();
    assert_eq!((&*facts.machine_id, &*facts.os_image), ("0123", "Stateless"));
    assert_eq!(facts.system_uuid, "4c4c4544-0042-3010-8046-b8c04f4e4d32");
    let power = Machine::sound().with("proc/device-tree/system-id", "IBM,0212345\0");
    assert_eq!(power.host().facts().system_uuid, "IBM,0212345");
}

#[test]
fn facts_are_read_once() {
    let machine = Machine::sound();
    let host = machine.host();
    let before = host.facts();
    let _machine = machine.with("etc/machine-id", "another\n");
    assert_eq!(host.facts(), before);
}

const UP: InterfaceFlags = InterfaceFlags::IFF_UP;

/// `INTERFACE=ADDRESS`, separated by spaces; the name of the interface decides whether it is up, and of which kind.
fn addresses(listed: &str) -> Vec<Address> {
    let address = |text: &str| {
        let (interface, ip) = text.split_once('=').expect("INTERFACE=ADDRESS");
        let flags = match interface {
            "lo" => UP | InterfaceFlags::IFF_LOOPBACK,
            "tun0" => UP | InterfaceFlags::IFF_POINTOPOINT,
            "down0" => InterfaceFlags::empty(),
            _ => UP,
        };
        Address { interface: interface.into(), flags, ip: ip.parse().expect("an address") }
    };
    listed.split_whitespace().map(address).collect()
}

/// The IPv4 routing table with a default route through each of these interfaces.
fn v4_routes(interfaces: &str) -> String {
    let lines = |name: &str| format!("{name}\t00000000\t010200C0\t0003\n{name}\t000200C0\t00000000\t0001\n");
    let lines: String = interfaces.split_whitespace().map(lines).collect();
    format!("Iface\tDestination\tGateway\tFlags\n{lines}")
}

/// The IPv6 routing table with a default route through this interface.
fn v6_routes(interface: &str) -> String {
    let zero = "0".repeat(32);
    let line = |gateway: &str, name: &str| {
        format!("{zero} 00 {zero} 00 {gateway} 00000400 00000003 00000000 00000003 {name}\n")
    };
    line("fe800000000000000000000000000001", interface) + &line(&zero, "lo")
}

/// Interfaces of the default routes (`None`: no routing table), addresses besides those of the loopback interface, and
/// the addresses that are chosen.
#[test]
fn addresses_are_chosen_by_the_kubelets_rule() {
    let table = [
        ("one", Some("eth0"), None, "eth0=192.0.2.7", "192.0.2.7"),
        (
            "both families, IPv4 first",
            Some("eth0"),
            Some("eth0"),
            "eth0=fe80::1 eth0=fd00::7 eth0=10.0.0.7",
            "10.0.0.7 fd00::7",
        ),
        ("the first address only", Some("eth0"), None, "eth0=10.0.0.7 eth0=10.0.0.8", "10.0.0.7"),
        ("not that of another interface", Some("eth1"), None, "eth0=10.0.0.7 eth1=10.1.0.7", "10.1.0.7"),
        (
            "the second route where the first has link-local addresses only",
            Some("eth0 eth1"),
            None,
            "eth0=169.254.1.1 eth1=10.1.0.7",
            "10.1.0.7",
        ),
        ("an interface that is down has none", Some("down0"), None, "down0=10.0.0.7", ""),
        (
            "a global address of the loopback interface",
            Some("eth0"),
            None,
            "eth0=169.254.1.1 lo=10.9.9.9",
            "10.9.9.9",
        ),
        ("IPv6 only", Some(""), Some("eth0"), "eth0=2001:db8::7", "2001:db8::7"),
        ("no default route", Some(""), None, "eth0=10.0.0.7", ""),
        ("no interface", Some("eth0"), Some("eth0"), "", ""),
        ("no routing table", None, None, "tun0=10.8.0.1 eth0=fd00::7 eth0=10.0.0.7", "10.0.0.7 fd00::7"),
    ];
    for (what, v4, v6, listed, chosen) in table {
        let mut machine = Machine::sound().without("proc/net/route");
        if let Some(interfaces) = v4 {
            machine = machine.with("proc/net/route", &v4_routes(interfaces));
        }
        if let Some(interface) = v6 {
            machine = machine.with("proc/net/ipv6_route", &v6_routes(interface));
        }
        let addresses = addresses(&format!("lo=127.0.0.1 lo=::1 {listed}"));
        let chosen: Vec<IpAddr> =
            chosen.split_whitespace().map(|ip| ip.parse().expect("an address")).collect();
        let mut errors = Vec::new();
        assert_eq!(choose(&machine.tree(), &addresses, &mut errors), chosen, "{what}");
        assert_eq!(errors, [] as [String; 0], "{what}");
    }
}

fn ask(node_fs: &Path, image_fs: Option<PathBuf>) -> HostQuery {
    HostQuery { node_fs: node_fs.to_owned(), image_fs }
}

#[tokio::test]
async fn file_systems_are_read_where_they_are_asked_for() {
    let machine = Machine::sound().v2();
    let (host, folder) = (machine.host(), machine.folder.path());
    let readings = host.read(ask(folder, None)).await;
    assert!(readings.node_fs.is_some_and(|node| node.capacity_bytes >= node.available_bytes));
    assert_eq!(readings.image_fs, None);
    assert_eq!((readings.cpus, readings.errors.len()), (Some(4), 0), "{:?}", readings.errors);
    let readings = host.read(ask(folder, Some(folder.to_owned()))).await;
    assert_eq!(readings.node_fs, readings.image_fs, "one question for one file system");
    assert!(readings.image_fs.is_some());
    let readings = host.read(ask(&folder.join("gone"), Some("/".into()))).await;
    assert!(readings.node_fs.is_none() && readings.image_fs.is_some());
    assert!(readings.errors.len() == 1 && readings.errors[0].contains("gone"), "{:?}", readings.errors);
}

/// This machine, compared with other sources of the standard library and the kernel.
#[tokio::test]
async fn this_machine_has_plausible_values() {
    let host = LinuxHost::new();
    let booted = host.since_boot();
    let readings = host.read(ask(Path::new("/"), Some("/".into()))).await;
    let cpus = readings.cpus.expect("processors");
    let usable = std::thread::available_parallelism().expect("a count").get();
    assert!(cpus as usize >= usable, "{cpus} online, {usable} usable");
    let info = sysconf(nix::unistd::SysconfVar::_NPROCESSORS_ONLN);
    assert_eq!(u64::from(cpus), info);
    let total = readings.memory_capacity_bytes.expect("memory");
    let pages = sysconf(nix::unistd::SysconfVar::_PHYS_PAGES) * sysconf(nix::unistd::SysconfVar::PAGE_SIZE);
    assert_eq!(total, pages);
    let available = readings.memory_available_bytes.expect("available memory");
    assert!(0 < available && available < total, "{available} of {total}");
    let (most, tasks) = readings.pids.expect("tasks");
    assert!(0 < tasks && tasks <= most, "{tasks} of {most}");
    let root = readings.node_fs.expect("a root file system");
    assert!(root.capacity_bytes >= root.available_bytes && root.capacity_bytes > 0, "{root:?}");
    assert_eq!(readings.image_fs, readings.node_fs);
    assert!(readings.swap_capacity_bytes.is_some());
    assert!(readings.addresses.iter().all(|ip| !ip.is_loopback() && !ip.is_unspecified()));
    assert_eq!(readings.errors, [] as [String; 0]);
    assert!(!booted.is_zero() && host.since_boot() >= booted);
    let facts = host.facts();
    let id = fs::read_to_string("/proc/sys/kernel/random/boot_id").expect("a boot id");
    assert_eq!(facts.boot_id, id.trim());
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").expect("a release");
    assert_eq!(facts.kernel_version, release.trim());
    assert_eq!(Some(&*facts.hostname), nix::unistd::gethostname().expect("a name").to_str());
    assert!(!facts.architecture.is_empty());
}

fn sysconf(what: nix::unistd::SysconfVar) -> u64 {
    let value = nix::unistd::sysconf(what).expect("the kernel reports it").expect("a value");
    value.try_into().expect("not negative")
}
