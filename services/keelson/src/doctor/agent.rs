//! Checks of the agent itself: settings, state folder, debug socket, ports.
//!
//! In: facts. Out: checks.

use std::net::SocketAddr;

use super::{
    Check, Facts,
    facts::{Answer, Listener},
};

/// Below it the journal of pulls may not be written. The state of 10,000 Services has about 30 MB.
const MIN_FREE: u64 = 100 << 20;

pub(super) fn checks(facts: &Facts) -> Vec<Check> {
    let mut checks = settings(facts);
    checks.push(state(facts));
    checks.push(debug(facts));
    checks.extend(port(facts, "debug.http", facts.settings.debug.http));
    checks
}

fn settings(facts: &Facts) -> Vec<Check> {
    let warnings = facts.settings.warnings();
    if warnings.is_empty() {
        return vec![Check::ok("settings", "valid, without warnings")];
    }
    // The message ends with what to do.
    warnings.iter().map(|warning| Check::warning("settings", warning.to_string(), "")).collect()
}

fn state(facts: &Facts) -> Check {
    const NAME: &str = "state directory";
    let (dir, state) = (facts.settings.agent.state_dir.display(), &facts.state);
    let room = match state.free {
        Some(free) => format!(", {} MiB free", free >> 20),
        None => String::new(),
    };
    if let Some(error) = &state.error {
        return Check::failed(NAME, format!("{dir}: {error}"), "set agent.state_dir to a directory");
    }
    if state.is_read_only {
        return Check::failed(
            NAME,
            format!("{dir} is on a read-only file system"),
            "mount it for writing, or set agent.state_dir",
        );
    }
    if state.free.is_some_and(|free| free < MIN_FREE) {
        let action = "make room; without it the queue is not kept over a crash";
        return Check::warning(NAME, format!("{dir}{room}"), action);
    }
    match &state.file {
        None => Check::ok(NAME, format!("{dir} does not exist yet; the agent creates it{room}")),
        Some(file) if file.owner != 0 => Check::warning(
            NAME,
            format!("{dir} belongs to user {}, and the agent runs as root", file.owner),
            format!("chown root {dir}"),
        ),
        Some(file) if file.mode & 0o077 != 0 => Check::warning(
            NAME,
            format!("{dir} has mode {:04o}; it names the images of pods", file.mode & 0o7777),
            format!("chmod 0700 {dir}"),
        ),
        Some(_) => Check::ok(NAME, format!("{dir}, root only{room}")),
    }
}

fn debug(facts: &Facts) -> Check {
    const NAME: &str = "debug socket";
    let socket = &facts.debug;
    let shown = socket.shown();
    match (&socket.file, &socket.answer) {
        (None, _) => Check::skipped(NAME, format!("{shown} does not exist: no agent runs")),
        (Some(file), _) if file.mode & 0o006 != 0 => Check::warning(
            NAME,
            format!("{shown} is open to every user (mode {:04o})", file.mode & 0o7777),
            "set debug.socket_mode, or SocketMode= of keelson-debug.socket, to 0660",
        ),
        (Some(_), Answer::Silent(reason)) => {
            Check::warning(NAME, format!("{shown}: {reason}"), "systemctl status keelson")
        }
        (Some(file), _) => Check::ok(NAME, format!("{shown} answers; open to root and group {}", file.group)),
    }
}

/// Whether another program listens on an address of the settings.
pub(super) fn port(facts: &Facts, key: &'static str, address: Option<SocketAddr>) -> Option<Check> {
    let address = address.filter(|address| address.port() != 0)?;
    Some(match facts.listeners.iter().find(|listener| is_taken_by(address, listener)) {
        None => Check::ok(key, format!("{address} is free")),
        Some(Listener { owner: Some((program, pid)), .. }) if program == "keelson" => {
            Check::ok(key, format!("{address} is served by keelson (process {pid})"))
        }
        Some(Listener { owner: Some((program, pid)), .. }) => Check::failed(
            key,
            format!(
                "{address} is taken by {program} (process {pid}), which answers the probes of Keelson there"
            ),
            format!("stop {program}, or set {key}"),
        ),
        Some(Listener { owner: None, .. }) => Check::warning(
            key,
            format!("{address} is taken; run as root to see by which program"),
            format!("stop it, or set {key}"),
        ),
    })
}

fn is_taken_by(wanted: SocketAddr, listener: &Listener) -> bool {
    let (a, b) = (wanted.ip(), listener.address.ip());
    let overlaps = a == b
        || a.is_unspecified() && (a.is_ipv6() || b.is_ipv4())
        || b.is_unspecified() && (b.is_ipv6() || a.is_ipv4());
    wanted.port() == listener.address.port() && overlaps
}

#[cfg(test)]
mod tests {
    use super::{
        super::{
            Outcome,
            facts::{FileMode, StateFolder},
            testing::facts,
        },
        *,
    };

    #[test]
    fn the_state_directory() {
        let dir = |owner, mode| Some(FileMode { owner, group: "root".into(), mode });
        let healthy = StateFolder { file: dir(0, 0o40700), free: Some(1 << 40), ..StateFolder::default() };
        for (state, outcome, part) in [
            (healthy.clone(), Outcome::Ok, "root only, 1048576 MiB free"),
            (StateFolder { file: None, ..healthy.clone() }, Outcome::Ok, "the agent creates it"),
            (StateFolder { file: dir(7, 0o40700), ..healthy.clone() }, Outcome::Warning, "belongs to user 7"),
            (StateFolder { file: dir(0, 0o40755), ..healthy.clone() }, Outcome::Warning, "mode 0755"),
            (StateFolder { free: Some(1), ..healthy.clone() }, Outcome::Warning, "0 MiB free"),
            (StateFolder { is_read_only: true, ..healthy.clone() }, Outcome::Failed, "read-only"),
            (
                StateFolder { error: Some("it is not a directory".into()), ..healthy },
                Outcome::Failed,
                "it is not a directory",
            ),
        ] {
            let check = state_check(state);
            assert_eq!(check.outcome, outcome, "{check:?}");
            assert!(check.found.contains(part), "{check:?}");
        }
    }

    fn state_check(state: StateFolder) -> Check {
        super::state(&Facts { state, ..facts() })
    }

    #[test]
    fn ports_and_who_has_them() {
        let listener = |address: &str, owner: Option<(&str, i32)>| Listener {
            address: address.parse().expect("an address"),
            owner: owner.map(|(program, pid)| (program.to_owned(), pid)),
        };
        for (listener, outcome) in [
            (listener("127.0.0.1:1", Some(("nginx", 7))), Outcome::Ok),
            (listener("127.0.0.2:9440", Some(("nginx", 7))), Outcome::Ok),
            (listener("127.0.0.1:9440", Some(("keelson", 7))), Outcome::Ok),
            (listener("127.0.0.1:9440", Some(("nginx", 7))), Outcome::Failed),
            (listener("0.0.0.0:9440", Some(("nginx", 7))), Outcome::Failed),
            (listener("[::]:9440", Some(("nginx", 7))), Outcome::Failed),
            (listener("[::1]:9440", Some(("nginx", 7))), Outcome::Ok),
            (listener("127.0.0.1:9440", None), Outcome::Warning),
        ] {
            let facts = Facts { listeners: vec![listener.clone()], ..facts() };
            let check = port(&facts, "debug.http", facts.settings.debug.http).expect("a port");
            assert_eq!(check.outcome, outcome, "{listener:?} {check:?}");
        }
        assert_eq!(port(&facts(), "debug.http", None), None);
    }
}
