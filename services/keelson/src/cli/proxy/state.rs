//! The sync status of a proxy as text.
//!
//! In: its state, and if known the state of the agent. Out: first problems, then facts, families, health checks and the
//! last events: one screen.

use keelson_proto::{endpoints, proxy as pb};

use crate::cli::{
    format::{clean, count, micros, one_line, since_ms},
    table::Table,
};

/// Maximum number of notes about conflicts and foreign rules; the document has all.
const NOTES: usize = 10;
/// Maximum number of events; the document has all that are kept.
const EVENTS: usize = 5;
/// Threshold in percent above which a map of session affinity is reported as nearly full.
const NEARLY_FULL: u64 = 90;
/// Threshold in milliseconds above which waiting changes are reported.
const LATE_MS: i64 = 5_000;

pub(super) fn describe(state: &pb::State, newest: Option<&endpoints::State>, now: i64) -> String {
    let mut text = String::new();
    for line in problems(state, now) {
        text.push_str(&format!("{line}\n"));
    }
    if !text.is_empty() {
        text.push('\n');
    }
    for line in facts(state, newest, now) {
        text.push_str(&format!("{line}\n"));
    }
    if !state.families.is_empty() {
        text.push_str(&format!("\n{}", families(&state.families, now)));
    }
    text.push_str(&affinity(&state.families));
    text.push_str(&notes(&state.families));
    if !state.health_checks.is_empty() {
        text.push_str(&format!("\n{}", health_checks(&state.health_checks)));
    }
    if !state.events.is_empty() {
        text.push_str("\nLast events:\n");
        for event in state.events.iter().take(EVENTS) {
            text.push_str(&format!("  {} ago: {}\n", since_ms(event.at_unix_ms, now), one_line(&event.text)));
        }
    }
    text
}

/// One line per problem; empty if there is none.
pub(super) fn problems(state: &pb::State, now: i64) -> Vec<String> {
    let mut lines = Vec::new();
    if state.link != "following" {
        let link = link_word(&state.link).to_uppercase();
        let target = clean(&state.target);
        lines.push(format!(
            "{link}: connection to the agent at {target}{}",
            reason_suffix(&state.link_reason)
        ));
    }
    if state.stale {
        let since = match state.stale_since_unix_ms {
            0 => String::new(),
            since => format!(" for {}", since_ms(since, now)),
        };
        lines.push(format!(
            "STALE: the agent's service endpoints are stale{since}{}",
            reason_suffix(&state.stale_reason)
        ));
    }
    if state.endpoints_too_stale {
        lines.push(
            "STALE: longer than proxy.max_staleness, so /healthz answers 503; the rules stay unchanged"
                .to_owned(),
        );
    }
    for family in &state.families {
        let name = clean(&family.family);
        let late =
            family.pending_since_unix_ms > 0 && now.saturating_sub(family.pending_since_unix_ms) > LATE_MS;
        let waiting = if late {
            format!("; changes pending for {}", since_ms(family.pending_since_unix_ms, now))
        } else {
            String::new()
        };
        if !matches!(family.state.as_str(), "synced" | "disabled") {
            lines.push(format!(
                "{name}: {}{}{waiting}",
                clean(&family.state).to_uppercase(),
                reason_suffix(&family.reason)
            ));
        } else if late {
            lines.push(format!("{name}: PENDING{}{waiting}", reason_suffix(&family.reason)));
        }
        if !family.not_checked.is_empty() {
            let why = reason_suffix(&family.not_checked);
            lines.push(format!("{name}: not checked for changes by other programs{why}"));
        }
    }
    for check in state.health_checks.iter().filter(|check| !check.reason.is_empty()) {
        lines.push(format!(
            "health check node port of {}/{}: not listening on port {}{}",
            clean(&check.namespace),
            clean(&check.name),
            check.port,
            reason_suffix(&check.reason)
        ));
    }
    if !state.healthy {
        lines.push("FAILING: /healthz and /livez of the proxy fail".into());
    }
    lines
}

/// The state of the connection to the agent, in the terms of the glossary.
fn link_word(link: &str) -> String {
    match link {
        "following" => "connected".into(),
        "connecting" => "pending".into(),
        link => clean(link),
    }
}

fn reason_suffix(reason: &str) -> String {
    if reason.is_empty() { String::new() } else { format!(": {}", one_line(reason)) }
}

fn facts(state: &pb::State, newest: Option<&endpoints::State>, now: i64) -> Vec<String> {
    let up = match state.started_unix_ms {
        0 => String::new(),
        started => format!(", up {}", since_ms(started, now)),
    };
    let health = match (state.healthy, state.node_eligible) {
        (true, true) => "healthy, node eligible for load balancers",
        (true, false) => "healthy, node excluded from load balancers",
        (false, true) => "failing",
        (false, false) => "failing, node excluded from load balancers",
    };
    let lines = [
        (
            "Backend:  ",
            format!("{}, version {}, pid {}{up}", clean(&state.backend), clean(&state.version), state.pid),
        ),
        ("Agent:    ", format!("{}, {}", link_word(&state.link), clean(&state.target))),
        ("Revision: ", revision(state, newest)),
        ("Health:   ", health.into()),
        ("Take-over: ", state.take_overs.iter().map(|text| one_line(text)).collect::<Vec<_>>().join("; ")),
        ("Settings: ", state.settings.iter().map(|setting| one_line(setting)).collect::<Vec<_>>().join(", ")),
    ];
    lines
        .into_iter()
        .filter(|(_, value)| !value.is_empty())
        .map(|(name, value)| format!("{name}{value}"))
        .collect()
}

/// The applied revision, compared with the agent's.
fn revision(state: &pb::State, newest: Option<&endpoints::State>) -> String {
    if state.rev == 0 {
        return "none in the kernel yet".into();
    }
    let against = match newest {
        None => String::new(),
        Some(newest) if newest.instance_id != state.instance_id => {
            format!(
                ", from another instance ID than the agent's {} (revision {})",
                clean(&newest.instance_id),
                newest.rev
            )
        }
        Some(newest) => match newest.rev.checked_sub(state.rev) {
            Some(behind @ 1..) => format!(", {behind} behind the agent"),
            // The agent may have answered before the proxy got its latest state.
            _ => ", same as the agent".into(),
        },
    };
    format!("{}{against}, instance {}", state.rev, clean(&state.instance_id))
}

fn families(families: &[pb::FamilyState], now: i64) -> String {
    let mut table = Table::new(&[
        "FAMILY",
        "STATE",
        "SERVICES",
        "PORTS",
        "ENDPOINTS",
        "CHAINS",
        "ELEMENTS",
        "LAST SYNC",
        "TOOK",
        "CHANGED",
        "SYNCS",
        "FULL",
        "FAILED",
        "REPAIRED",
    ]);
    for family in families {
        let synced = family.last_sync_unix_ms > 0;
        let shown = |value: String| if synced { value } else { String::new() };
        table.row([
            clean(&family.family),
            clean(&family.state),
            family.services.to_string(),
            family.service_ports.to_string(),
            family.endpoints.to_string(),
            family.chains.to_string(),
            family.elements.values().sum::<u64>().to_string(),
            shown(format!("{} ago", since_ms(family.last_sync_unix_ms, now))),
            shown(micros(family.last_sync_us)),
            shown(format!("+{} -{}", family.last_added, family.last_deleted)),
            family.syncs.to_string(),
            family.full_syncs.to_string(),
            family.failures.to_string(),
            family.repaired.to_string(),
        ]);
    }
    table.text()
}

/// Number of clients in each map of session affinity that has any, and which maps are nearly full.
fn affinity(families: &[pb::FamilyState]) -> String {
    let mut text = String::new();
    for family in families.iter().filter(|family| !family.affinity_clients.is_empty()) {
        let (name, max) = (clean(&family.family), family.affinity_clients_max);
        let maps = &family.affinity_clients;
        let shown: Vec<_> = maps.iter().map(|(map, used)| format!("{} {used}/{max}", clean(map))).collect();
        text.push_str(&format!("\n{name}: clients with session affinity: {}\n", shown.join(", ")));
        for (map, used) in maps {
            if used.saturating_mul(100) > max.saturating_mul(NEARLY_FULL) {
                text.push_str(&format!(
                    "{name}: WARNING: {} is more than 90 % full; when it is full, new clients of its \
                     Services get no session affinity\n",
                    clean(map)
                ));
            }
        }
    }
    text
}

/// Other programs that program Services here, and how claims were settled: informational, no problem of the proxy.
fn notes(families: &[pb::FamilyState]) -> String {
    let all: Vec<String> = families
        .iter()
        .flat_map(|family| {
            let disabled =
                (family.state == "disabled").then(|| format!("disabled{}", reason_suffix(&family.reason)));
            let notes =
                disabled.into_iter().chain(family.other_proxies.iter().chain(&family.conflicts).cloned());
            notes.map(|note| format!("{}: {}", clean(&family.family), one_line(&note)))
        })
        .collect();
    let mut text = if all.is_empty() { String::new() } else { "\n".to_owned() };
    for note in all.iter().take(NOTES) {
        text.push_str(&format!("{note}\n"));
    }
    if let Some(more @ 1..) = all.len().checked_sub(NOTES) {
        text.push_str(&format!("and {more} more; use -o json to list all\n"));
    }
    text
}

fn health_checks(checks: &[pb::HealthCheck]) -> String {
    let mut table = Table::new(&["HEALTH CHECK", "PORT", "LOCAL", "LISTENS"]);
    for check in checks {
        table.row([
            format!("{}/{}", clean(&check.namespace), clean(&check.name)),
            check.port.to_string(),
            count(check.local_endpoints.into(), "endpoint"),
            check.listening.iter().map(|address| clean(address)).collect::<Vec<_>>().join(", "),
        ]);
    }
    table.text()
}
