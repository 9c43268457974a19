//! The parts of a bundle.
//!
//! Owns: the list of what is collected, and under which name. In: settings. Out: [`Part`]s; nothing is read yet.

use std::{ffi::OsString, path::PathBuf, time::Duration};

use keelson_config::Settings;

use super::{
    collect::{Part, Source},
    host,
};
use crate::{kubelet, settings::SettingsArgs};

const UNITS: [&str; 8] = [
    "keelson.service",
    "keelson-cri.socket",
    "keelson-debug.socket",
    "keelson-proxy.service",
    "kubelet.service",
    "containerd.service",
    "crio.service",
    "kube-proxy.service",
];
/// Actors whose detail is collected.
const ACTORS: [&str; 5] =
    ["PullCoordinator", "RuntimeClient", "LeaseRenewer", "StatusReporter", "EndpointPublisher"];
const LOG_LINES: &str = "20000";
/// Without environments and command lines, which may have secrets.
const PROPERTIES: &str = "--property=Id,LoadState,ActiveState,SubState,Result,UnitFileState,FragmentPath,DropInPaths,MainPID,\
                          NRestarts,ExecMainStatus,ActiveEnterTimestamp,MemoryCurrent,TasksCurrent,LimitNOFILE";
/// Time for a part.
const TIMEOUT: Duration = Duration::from_secs(15);
/// `keelson doctor` waits for sockets and for the API server.
const DOCTOR_TIMEOUT: Duration = Duration::from_secs(60);

/// Everything. `args`: the flags that select the settings, which are passed on.
pub(super) fn parts(settings: &Settings, args: &SettingsArgs) -> Vec<Part> {
    let mut list = List { parts: Vec::new() };
    versions_and_settings(&mut list, args);
    agent(&mut list, settings);
    proxy(&mut list, settings, args);
    units_and_logs(&mut list);
    kernel(&mut list);
    machine(&mut list, settings);
    list.parts
}

struct List {
    parts: Vec<Part>,
}

impl List {
    fn add(&mut self, file: impl Into<String>, source: Source) {
        self.add_kept(file, source, str::to_owned);
    }

    fn add_kept(&mut self, file: impl Into<String>, source: Source, keep: fn(&str) -> String) {
        self.parts.push(Part { file: file.into(), source, timeout: TIMEOUT, keep });
    }

    /// A subcommand of this program, with flags behind it.
    fn own(&mut self, file: impl Into<String>, words: &[&str], flags: &[OsString]) {
        let words = words.iter().map(OsString::from).chain(flags.iter().cloned());
        self.add(file, Source::Own(words.collect()));
    }

    fn program(&mut self, file: &str, program: &'static str, args: &[&str]) {
        self.program_kept(file, program, args, str::to_owned);
    }

    fn program_kept(&mut self, file: &str, program: &'static str, args: &[&str], keep: fn(&str) -> String) {
        let args = args.iter().map(ToString::to_string).collect();
        self.add_kept(file, Source::Program(program, args), keep);
    }

    fn file(&mut self, file: &str, path: &str) {
        self.add(file, Source::File(path.into()));
    }
}

fn versions_and_settings(list: &mut List, args: &SettingsArgs) {
    let mut flags: Vec<OsString> = Vec::new();
    if let Some(config) = &args.config {
        flags.extend(["--config".into(), config.clone().into()]);
    }
    for set in &args.sets {
        flags.extend(["--set".into(), set.into()]);
    }
    for gates in &args.feature_gates {
        flags.extend(["--feature-gates".into(), gates.into()]);
    }
    list.own("version.txt", &["--version"], &[]);
    list.own("settings/check.txt", &["config", "check"], &flags);
    list.own("settings/effective.toml", &["config", "show", "-o", "toml"], &flags);
    let doctor = Source::Own([vec!["doctor".into()], flags].concat());
    list.parts.push(Part {
        timeout: DOCTOR_TIMEOUT,
        file: "doctor.txt".into(),
        source: doctor,
        keep: str::to_owned,
    });
}

fn agent(list: &mut List, settings: &Settings) {
    let socket = [OsString::from("--socket"), settings.debug.listen.to_string().into()];
    for name in ["pulls", "actors", "node", "endpoints", "limit", "state"] {
        list.own(format!("agent/{name}.txt"), &[name], &socket);
        list.own(format!("agent/{name}.json"), &[name, "-o", "json"], &socket);
    }
    for name in ACTORS {
        list.own(format!("agent/actors/{name}.json"), &["actors", name, "-o", "json"], &socket);
    }
    let Some(http) = settings.debug.http else { return };
    for (file, path) in [
        ("agent/version.json", "/version"),
        ("agent/readyz.txt", "/readyz?verbose"),
        ("agent/livez.txt", "/livez?verbose"),
        ("agent/metrics.txt", "/metrics"),
        ("agent/history.json", "/debug/history"),
    ] {
        list.add(file, Source::Http(http, path));
    }
}

fn proxy(list: &mut List, settings: &Settings, args: &SettingsArgs) {
    let proxy = &settings.proxy;
    let socket = [OsString::from("--socket"), proxy.listen.to_string().into()];
    // The agent's revision, for the text, is asked at the socket of the settings.
    let config = args.config.iter().flat_map(|file| ["--config".into(), file.clone().into()]);
    let flags: Vec<OsString> = config.chain(socket.iter().cloned()).collect();
    list.own("proxy/state.txt", &["proxy", "state"], &flags);
    list.own("proxy/state.json", &["proxy", "state", "-o", "json"], &socket);
    list.own("proxy/ruleset.txt", &["proxy", "print"], &socket);
    if let Some(http) = proxy.http {
        for (file, path) in [
            ("proxy/readyz.txt", "/readyz?verbose"),
            ("proxy/livez.txt", "/livez?verbose"),
            ("proxy/metrics.txt", "/metrics"),
            ("proxy/history.json", "/debug/history"),
        ] {
            list.add(file, Source::Http(http, path));
        }
    }
    if let Some(mut healthz) = proxy.healthz_bind_address {
        if healthz.ip().is_unspecified() {
            healthz.set_ip(match healthz.is_ipv4() {
                true => std::net::Ipv4Addr::LOCALHOST.into(),
                false => std::net::Ipv6Addr::LOCALHOST.into(),
            });
        }
        list.add("proxy/healthz.json", Source::Http(healthz, "/healthz"));
    }
}

fn units_and_logs(list: &mut List) {
    let all = |first: &[&'static str]| [first, &UNITS].concat();
    list.program("units/status.txt", "systemctl", &all(&["status", "--no-pager", "--full", "--lines=0"]));
    list.program("units/show.txt", "systemctl", &all(&["show", "--no-pager", PROPERTIES]));
    // Those of other programs may have secrets in forms that are not known here.
    let ours = [&["cat", "--no-pager"], &UNITS[..4]].concat();
    list.program("units/files.txt", "systemctl", &ours);
    // More than a part may have is cut off at the end, so the newest lines come first.
    for unit in ["keelson.service", "keelson-proxy.service"] {
        let args = ["--no-pager", "--output=short-iso", "--reverse", "--lines", LOG_LINES, "--unit", unit];
        list.program(&format!("logs/{}.log", unit.trim_end_matches(".service")), "journalctl", &args);
    }
    let args = ["--no-pager", "--output=short-iso", "--reverse", "--dmesg", "--lines", "500"];
    list.program("logs/kernel.log", "journalctl", &args);
}

fn kernel(list: &mut List) {
    list.program("kernel/uname.txt", "uname", &["-a"]);
    list.file("kernel/os-release.txt", "/etc/os-release");
    list.add("kernel/sysctls.txt", Source::Facts("files in /proc/sys", Box::new(|| Ok(host::sysctls()))));
    list.add_kept("kernel/modules.txt", Source::File("/proc/modules".into()), network_modules);
    for family in ["ip", "ip6"] {
        list.program(&format!("kernel/nft-{family}.txt"), "nft", &["list", "table", family, "keelson"]);
    }
    list.program("kernel/nft-tables.txt", "nft", &["list", "tables"]);
    for (file, program) in [
        ("kernel/iptables.txt", "iptables-save"),
        ("kernel/ip6tables.txt", "ip6tables-save"),
        ("kernel/iptables-legacy.txt", "iptables-legacy-save"),
        ("kernel/ip6tables-legacy.txt", "ip6tables-legacy-save"),
    ] {
        list.program_kept(file, program, &[], own_chains);
    }
    list.program_kept("kernel/ipset.txt", "ipset", &["list", "-terse"], own_sets);
    list.file("kernel/ipvs.txt", "/proc/net/ip_vs");
    list.program("kernel/conntrack.txt", "conntrack", &["-S"]);
    list.program("kernel/addresses.txt", "ip", &["-brief", "address"]);
    list.program("kernel/routes.txt", "ip", &["route", "show", "table", "all"]);
    list.program("kernel/rules.txt", "ip", &["rule"]);
}

fn machine(list: &mut List, settings: &Settings) {
    list.program("sockets/network.txt", "ss", &["--listening", "--tcp", "--udp", "--numeric", "--processes"]);
    list.program_kept("sockets/unix.txt", "ss", &["--unix", "--listening", "--processes"], node_sockets);
    let parent = |path: &std::path::Path| path.parent().map(PathBuf::from);
    let sockets = [settings.debug.listen.path(), settings.proxy.listen.path(), settings.cri.listen.path()];
    let mut folders: Vec<PathBuf> = sockets.into_iter().filter_map(parent).collect();
    folders.extend(["/run/keelson-endpoints".into(), settings.cri.runtime_endpoint.path().to_owned()]);
    folders.extend([settings.agent.state_dir.clone(), settings.agent.state_dir.join("state")]);
    folders.sort_unstable();
    folders.dedup();
    let listing = move || Ok(host::listing(&folders));
    list.add("files.txt", Source::Facts("sockets and state folders", Box::new(listing)));
    list.add("processes.txt", Source::Facts("processes of keelson in /proc", Box::new(host::processes)));
    list.program("disk/bytes.txt", "df", &["--print-type"]);
    list.program("disk/inodes.txt", "df", &["--inodes"]);
    for (file, path) in [
        ("memory/meminfo.txt", "/proc/meminfo"),
        ("memory/loadavg.txt", "/proc/loadavg"),
        ("memory/pressure-cpu.txt", "/proc/pressure/cpu"),
        ("memory/pressure-io.txt", "/proc/pressure/io"),
        ("memory/pressure-memory.txt", "/proc/pressure/memory"),
    ] {
        list.file(file, path);
    }
    let options =
        kubelet::Options { root_dir: Some(settings.node.root_dir.clone()), ..kubelet::Options::default() };
    let keys = move || Ok(host::image_keys(&kubelet::find(&options)));
    list.add("kubelet/image-keys.txt", Source::Facts("image keys of the kubelet", Box::new(keys)));
}

fn lines(text: &str, is_kept: impl Fn(&str) -> bool) -> String {
    text.lines().filter(|line| is_kept(line)).flat_map(|line| [line, "\n"]).collect()
}

fn network_modules(text: &str) -> String {
    const PREFIXES: [&str; 9] =
        ["nf_", "nft_", "nfnetlink", "xt_", "x_tables", "ip_vs", "ip_set", "ip_tables", "ip6_tables"];
    lines(text, |line| PREFIXES.iter().any(|prefix| line.starts_with(prefix)))
}

fn own_chains(text: &str) -> String {
    lines(text, |line| line.starts_with('*') || line.contains("KEELSON"))
}

/// Sets are separated by empty lines.
fn own_sets(text: &str) -> String {
    text.split("\n\n").filter(|set| set.contains("Name: KEELSON")).flat_map(|set| [set, "\n\n"]).collect()
}

fn node_sockets(text: &str) -> String {
    const NAMES: [&str; 5] = ["keelson", "containerd", "crio", "kubelet", "Netid"];
    lines(text, |line| NAMES.iter().any(|name| line.contains(name)))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn every_part_has_a_file_of_its_own_and_flags_are_passed_on() {
        let args = SettingsArgs {
            config: Some("/x.toml".into()),
            sets: vec!["pulls.stall_timeout=1m".into()],
            feature_gates: Vec::new(),
        };
        let parts = parts(&Settings::default(), &args);
        let files: BTreeSet<&str> = parts.iter().map(|part| part.file.as_str()).collect();
        assert_eq!(files.len(), parts.len());
        let source = |file: &str| parts.iter().find(|part| part.file == file).unwrap().source.to_string();
        assert_eq!(
            source("agent/pulls.json"),
            "keelson pulls -o json --socket unix:///run/keelson/debug.sock"
        );
        assert_eq!(
            source("settings/check.txt"),
            "keelson config check --config /x.toml --set pulls.stall_timeout=1m"
        );
        assert_eq!(source("proxy/healthz.json"), "GET http://127.0.0.1:10256/healthz");
        assert!(source("units/show.txt").starts_with("systemctl show --no-pager --property=Id,LoadState,"));
        assert!(source("logs/keelson.log").contains(" --reverse "));
        let slow = parts.iter().filter(|part| part.timeout > TIMEOUT).map(|part| part.file.as_str());
        assert_eq!(slow.collect::<Vec<_>>(), ["doctor.txt"]);
    }

    #[test]
    fn only_own_rules_and_sets_are_kept() {
        let rules = "*nat\n:KEELSON-X - [0:0]\n:CILIUM - [0:0]\n-A CILIUM -j ACCEPT\n";
        assert_eq!(own_chains(rules), "*nat\n:KEELSON-X - [0:0]\n");
        let sets = "Name: a\nType: x\n\nName: KEELSON-4\nType: y\n";
        assert_eq!(own_sets(sets), "Name: KEELSON-4\nType: y\n\n\n");
    }
}
