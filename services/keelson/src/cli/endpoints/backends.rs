//! Backends as text.
//!
//! In: backends from the agent. Out: a line for each, and one more for each with a problem.

use keelson_proto::endpoints as pb;

use crate::cli::format::{clean, count, one_line, since_ms};

/// Name, status, applied revision, and where to inspect it.
pub(super) fn line(backend: &pb::Backend, instance_id: &str, now: i64) -> String {
    let mut parts =
        vec![name_and_version(backend), state_text(backend, now), in_effect(backend, instance_id)];
    if backend.last_sync_unix_ms > 0 {
        parts.push(format!("last sync {} ago", since_ms(backend.last_sync_unix_ms, now)));
    }
    if backend.service_ports > 0 {
        parts.push(count(backend.service_ports, "service port"));
    }
    let places = [&backend.debug, &backend.http].into_iter().filter(|place| !place.is_empty());
    let places: Vec<String> = places.map(|place| clean(place)).collect();
    let mut line = parts.join(", ");
    if !places.is_empty() {
        line.push_str("; ");
        line.push_str(&places.join(", "));
    }
    line
}

/// A line for each that is failing or silent.
pub(super) fn problems(backends: &[pb::Backend], now: i64) -> impl Iterator<Item = String> {
    let failing = backends.iter().filter(|backend| backend.silent || backend.state == "failing");
    failing.map(move |backend| match backend.silent {
        true => {
            let silent = since_ms(backend.seen_unix_ms, now);
            format!("backend {} has not reported for {silent}{}", name(backend), reason_suffix(backend))
        }
        false => format!("backend {} is failing{}", name(backend), reason_suffix(backend)),
    })
}

fn name(backend: &pb::Backend) -> String {
    format!("{} (pid {})", clean(&backend.name), backend.pid)
}

fn name_and_version(backend: &pb::Backend) -> String {
    match backend.version.as_str() {
        "" => name(backend),
        version => format!("{} (pid {}, {})", clean(&backend.name), backend.pid, clean(version)),
    }
}

fn state_text(backend: &pb::Backend, now: i64) -> String {
    let state = clean(&backend.state);
    match backend.silent {
        true => {
            format!(
                "no report for {}, last state {state}{}",
                since_ms(backend.seen_unix_ms, now),
                reason_suffix(backend)
            )
        }
        false => format!("{state}{}", reason_suffix(backend)),
    }
}

fn reason_suffix(backend: &pb::Backend) -> String {
    match backend.reason.as_str() {
        "" => String::new(),
        reason => format!(": {}", one_line(reason)),
    }
}

/// Revisions of another instance cannot be compared.
fn in_effect(backend: &pb::Backend, instance_id: &str) -> String {
    match (backend.instance_id, backend.behind) {
        (0, _) => "no revision in effect yet".into(),
        (instance, _) if instance.to_string() != instance_id => {
            format!("revision {} of another instance ID", backend.rev)
        }
        (_, 0) => format!("revision {}", backend.rev),
        (_, behind) => format!("revision {}, {behind} behind", backend.rev),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nft() -> pb::Backend {
        pb::Backend {
            name: "nft".into(),
            pid: 1234,
            version: "0.1.0".into(),
            debug: "unix:///run/keelson/proxy.sock".into(),
            http: "http://127.0.0.1:9441/".into(),
            instance_id: 7,
            rev: 12,
            state: "synced".into(),
            last_sync_unix_ms: 57_000,
            service_ports: 41,
            seen_unix_ms: 60_000,
            ..Default::default()
        }
    }

    #[test]
    fn a_backend_in_a_line() {
        let places = "unix:///run/keelson/proxy.sock, http://127.0.0.1:9441/";
        let told = |backend: &pb::Backend| line(backend, "7", 61_000);
        assert_eq!(
            told(&nft()),
            format!(
                "nft (pid 1234, 0.1.0), synced, revision 12, last sync 4.0s ago, 41 service ports; {places}"
            )
        );
        let failing = pb::Backend { state: "failing".into(), reason: "no\nset".into(), behind: 3, ..nft() };
        assert_eq!(
            told(&failing),
            format!(
                "nft (pid 1234, 0.1.0), failing: no set, revision 12, 3 behind, last sync 4.0s ago, 41 service ports; \
                 {places}"
            )
        );
        let ended = pb::Backend {
            silent: true,
            reason: "its process has exited".into(),
            service_ports: 1,
            http: String::new(),
            ..nft()
        };
        assert_eq!(
            told(&ended),
            "nft (pid 1234, 0.1.0), no report for 1.0s, last state synced: its process has exited, revision \
             12, last sync 4.0s ago, 1 service port; unix:///run/keelson/proxy.sock"
        );
        assert!(
            told(&pb::Backend { instance_id: 8, behind: 12, ..nft() })
                .contains(", revision 12 of another instance ID, ")
        );
        let pending = pb::Backend { name: "x".into(), state: "pending".into(), ..Default::default() };
        assert_eq!(told(&pending), "x (pid 0), pending, no revision in effect yet");
        let odd = pb::Backend { name: "\x1b[2J".into(), debug: "unix:///\u{202e}x".into(), ..pending };
        assert!(!told(&odd).contains(['\x1b', '\u{202e}']), "{}", told(&odd));
    }

    #[test]
    fn problems_of_backends() {
        let backends = [
            nft(),
            pb::Backend { state: "pending".into(), ..nft() },
            pb::Backend { state: "failing".into(), reason: "no nft".into(), ..nft() },
            pb::Backend { silent: true, state: "failing".into(), seen_unix_ms: 1_000, ..nft() },
        ];
        assert_eq!(
            problems(&backends, 61_000).collect::<Vec<_>>(),
            [
                "backend nft (pid 1234) is failing: no nft",
                "backend nft (pid 1234) has not reported for 1m00s",
            ]
        );
    }
}
