//! `/livez` and `/readyz`, as in Kubernetes components.
//!
//! Owns: the format of checks: `ok`, or with `?verbose` and on failure one line per check. Out: 200 or 500.

use axum::{
    http::{StatusCode, header::CONTENT_TYPE},
    response::{IntoResponse as _, Response},
};
use keelson_proto::unix_ms;

use crate::{Check, ViewError, text::one_line};

/// The check that is shown if there is no answer.
fn silent(reason: &str) -> Vec<Check> {
    vec![Check { name: "answers".into(), ok: false, message: reason.into(), since_unix_ms: 0 }]
}

pub fn probe(endpoint: &str, checks: Result<Vec<Check>, ViewError>, query: Option<&str>) -> Response {
    let checks = checks.unwrap_or_else(|error| silent(&error.to_string()));
    let passed = checks.iter().all(|check| check.ok);
    let mut parameters = query.unwrap_or_default().split('&').map(|parameter| parameter.split('=').next());
    let verbose = parameters.any(|name| name == Some("verbose"));
    let text = if passed && !verbose { "ok".into() } else { report(endpoint, &checks, passed, unix_ms()) };
    let status = if passed { StatusCode::OK } else { StatusCode::INTERNAL_SERVER_ERROR };
    (status, [(CONTENT_TYPE, super::TEXT)], text).into_response()
}

fn report(endpoint: &str, checks: &[Check], passed: bool, now_unix_ms: i64) -> String {
    let mut text = String::new();
    for check in checks {
        let line = match (check.ok, since(check, now_unix_ms)) {
            (true, _) if matches!(check.message.as_str(), "" | "ok") => format!("[+]{} ok\n", check.name),
            // A check that passes with a warning.
            (true, _) => format!("[+]{} ok: {}\n", check.name, one_line(&check.message)),
            (false, since) => format!("[-]{} failed: {}{since}\n", check.name, one_line(&check.message)),
        };
        text.push_str(&line);
    }
    text.push_str(&format!("{endpoint} check {}\n", if passed { "passed" } else { "failed" }));
    text
}

fn since(check: &Check, now_unix_ms: i64) -> String {
    match check.since_unix_ms {
        0 => String::new(),
        since => format!(" (for {} s)", now_unix_ms.saturating_sub(since).max(0) / 1000),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_has_one_line_per_check() {
        let check = |name: &str, ok, message: &str, since_unix_ms| Check {
            name: name.into(),
            ok,
            message: message.into(),
            since_unix_ms,
        };
        let checks = [
            check("store", true, "", 0),
            check("runtime", false, "no answer on\n/run/containerd/containerd.sock", 1_000),
            check("clock", false, "unset", 0),
            check("credentials", true, "the token expires\nsoon", 0),
        ];
        let expected = "[+]store ok\n\
                        [-]runtime failed: no answer on /run/containerd/containerd.sock (for 12 s)\n\
                        [-]clock failed: unset\n\
                        [+]credentials ok: the token expires soon\n\
                        readyz check failed\n";
        assert_eq!(report("readyz", &checks, false, 13_999), expected);
        assert_eq!(report("livez", &checks[..1], true, 0), "[+]store ok\nlivez check passed\n");
    }
}
