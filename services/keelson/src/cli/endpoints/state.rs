//! The sync status of service endpoints as text.
//!
//! In: the state from the agent. Out: problems, then facts, then Services in columns; or its watchers.

use std::collections::BTreeMap;

use keelson_proto::endpoints as pb;

use super::backends;
use crate::cli::{
    format::{bytes, clean, count, one_line, since_ms, status_word},
    table::Table,
};

/// Fits one screen; JSON has all.
const FAULTS: usize = 10;

/// Why Services are missing from a list, if some may be.
pub(super) fn truncation_note(state: &pb::State, namespace: &str, max: u32) -> Option<String> {
    let listed = u64::try_from(state.list.len()).unwrap_or(u64::MAX);
    if max == 0 || listed < u64::from(max) || state.services <= listed {
        return None;
    }
    Some(match namespace {
        "" => format!("{} not listed; raise --max", count(state.services - listed, "Service")),
        _ => format!("the list is limited to {listed} Services; raise --max to list more"),
    })
}

/// Problems, sync status, and the requested Services.
pub(super) fn describe(state: &pb::State, namespace: &str, max: u32, now: i64) -> String {
    if state.state == "disabled" {
        return off(&state.reason);
    }
    let mut text = String::new();
    let wrong = problems(state, now);
    if !wrong.is_empty() {
        text.push_str(&wrong.join("\n"));
        text.push_str("\n\n");
    }
    text.push_str(&facts(state, now).join("\n"));
    text.push('\n');
    if max == 0 {
        return text;
    }
    text.push('\n');
    match (state.list.is_empty(), namespace) {
        (true, "") => text.push_str("No Services.\n"),
        (true, _) => text.push_str(&format!("No Services in namespace {}.\n", clean(namespace))),
        (false, _) => text.push_str(&services(&state.list)),
    }
    text
}

fn off(reason: &str) -> String {
    let because = if reason.is_empty() { String::new() } else { format!(": {}", one_line(reason)) };
    format!(
        "Service endpoints are disabled{because}.\n\n\
         By default they are enabled if [kube] configures an API server. Without one, put manifests of Services \
         and\n\
         EndpointSlices into a directory, set it in /etc/keelson/keelson.toml, and restart the agent:\n\n  \
         [endpoints]\n  source = \"files\"\n  manifests = \"/etc/keelson/manifests\"\n"
    )
}

/// One line per problem.
fn problems(state: &pb::State, now: i64) -> Vec<String> {
    let mut lines = Vec::new();
    if state.state == "not-watched" {
        lines.push(format!("PENDING: Services are not watched: {}", one_line(&state.reason)));
    } else if state.state != "synced" {
        lines.push(format!(
            "{}{}",
            status_word(&state.state).to_uppercase(),
            reason_suffix(state.since_unix_ms, &state.reason, now)
        ));
    }
    // One server that does not answer is one reason, even if every watch reports it.
    let mut failing: BTreeMap<(&str, bool, &str, i64), Vec<String>> = BTreeMap::new();
    let failing_sources = state.sources.iter().filter(|source| source.health != "healthy" || !source.synced);
    for source in failing_sources.filter(|_| state.state != "not-watched") {
        let key = (source.health.as_str(), source.synced, source.reason.as_str(), source.since_unix_ms);
        failing.entry(key).or_default().push(clean(&source.resource));
    }
    for ((health, synced, reason, since), resources) in failing {
        let listed = if synced { "" } else { ", not listed yet" };
        let since = if health == "healthy" { 0 } else { since };
        lines.push(format!(
            "{}: {}{listed}{}",
            resources.join(", "),
            status_word(health),
            reason_suffix(since, reason, now)
        ));
    }
    for fault in state.faults.iter().take(FAULTS) {
        let line = if fault.line == 0 { String::new() } else { format!(":{}", fault.line) };
        let instead = if fault.earlier_in_use { " (the last valid version stays in use)" } else { "" };
        lines.push(format!("{}{line}: {}{instead}", clean(&fault.file), one_line(&fault.reason)));
    }
    if let Some(more @ 1..) = state.faults.len().checked_sub(FAULTS) {
        lines.push(format!("and {more} more invalid manifests; use -o json to list all"));
    }
    if state.rev > 0 && !state.durable {
        lines.push(
            "the served state is not on disk; after a restart, clients may have to read the full state"
                .into(),
        );
    }
    lines.extend(backends::problems(&state.backends, now));
    // A folder of manifests need not contain the Node.
    if let Some(node) = state.node.as_ref().filter(|node| !node.exists && state.source != "files") {
        let effect = if node.zone.is_empty() {
            "its zone is unknown, so zone hints are ignored"
        } else {
            "its last known values stay in use"
        };
        lines.push(format!("Node {} does not exist: {effect}", clean(&node.name)));
    }
    lines
}

/// ` for 2m04s: why`, as far as known.
fn reason_suffix(since: i64, reason: &str, now: i64) -> String {
    let mut text = String::new();
    if since > 0 {
        text.push_str(&format!(" for {}", since_ms(since, now)));
    }
    if !reason.is_empty() {
        text.push_str(&format!(": {}", one_line(reason)));
    }
    text
}

fn facts(state: &pb::State, now: i64) -> Vec<String> {
    let objects: Vec<String> = state
        .sources
        .iter()
        .map(|source| format!("{} {}", clean(&source.resource), source.objects))
        .collect();
    let revision = match state.rev {
        0 => "none yet".into(),
        rev => {
            let ago = since_ms(state.published_unix_ms, now);
            format!("{rev}, published {ago} ago, instance {}", clean(&state.instance_id))
        }
    };
    let behind = state.watchers.iter().filter(|watcher| watcher.behind > 0).count();
    let watchers = match (state.watchers.len(), behind) {
        (0, _) => "none".into(),
        (all, 0) => format!("{all}, none behind"),
        (all, behind) => format!("{all}, {behind} behind (keelson endpoints watchers)"),
    };
    let lines = [
        ("State:    ", status_word(&state.state)),
        ("Source:   ", list([&state.source, &state.source_place])),
        ("Objects:  ", objects.join(", ")),
        (
            "Served:   ",
            format!("{}, {}", count(state.services, "Service"), count(state.endpoints, "endpoint")),
        ),
        ("Revision: ", revision),
        ("Events:   ", format!("{}, published as {}", state.events, count(state.revisions, "revision"))),
        ("Node:     ", state.node.as_ref().map(node).unwrap_or_default()),
        ("Listens:  ", list(&state.listen)),
        ("Watchers: ", watchers),
    ];
    let backends =
        state.backends.iter().map(|backend| ("Backend:  ", backends::line(backend, &state.instance_id, now)));
    lines
        .into_iter()
        .chain(backends)
        .filter(|(_, value)| !value.is_empty())
        .map(|(name, value)| format!("{name}{value}"))
        .collect()
}

fn node(node: &pb::NodeState) -> String {
    let mut parts = vec![clean(&node.name)];
    if !node.exists {
        parts.push("Node not found".into());
    }
    parts.push(if node.zone.is_empty() { "no zone".into() } else { format!("zone {}", clean(&node.zone)) });
    for (name, values) in [("", &node.ips), ("pods ", &node.pod_cidrs), ("Services ", &node.service_cidrs)] {
        if !values.is_empty() {
            parts.push(format!("{name}{}", list(values)));
        }
    }
    if node.exists && !node.eligible {
        parts.push("excluded from load balancers".into());
    }
    parts.join(", ")
}

/// Joins values that are not empty with commas.
fn list<'a>(values: impl IntoIterator<Item = &'a String>) -> String {
    let shown: Vec<String> =
        values.into_iter().filter(|value| !value.is_empty()).map(|value| clean(value)).collect();
    shown.join(", ")
}

fn services(services: &[pb::ServiceSummary]) -> String {
    let mut table = Table::new(&[
        "NAMESPACE",
        "NAME",
        "TYPE",
        "CLUSTER-IP",
        "PORTS",
        "READY",
        "LOCAL",
        "SELECTED",
        "REV",
    ]);
    for service in services {
        table.row([
            clean(&service.namespace),
            clean(&service.name),
            clean(&service.r#type),
            list(&service.cluster_ips),
            list(&service.ports),
            service.ready.to_string(),
            service.local_ready.to_string(),
            service.selected.to_string(),
            service.rev.to_string(),
        ]);
    }
    table.text()
}

pub(super) fn watchers(state: &pb::State, now: i64) -> String {
    if state.state == "disabled" {
        return off(&state.reason);
    }
    if state.watchers.is_empty() {
        return format!("No client is connected to the Endpoints API ({}).\n", list(&state.listen));
    }
    let mut watchers: Vec<&pb::Watcher> = state.watchers.iter().collect();
    watchers.sort_by_key(|watcher| (std::cmp::Reverse(watcher.behind), watcher.id));
    let mut table = Table::new(&["ID", "PEER", "API", "FOR", "REV", "BEHIND", "ITEMS", "SENT", "LISTENER"]);
    for watcher in watchers {
        table.row([
            watcher.id.to_string(),
            clean(&watcher.peer),
            clean(&watcher.api),
            since_ms(watcher.since_unix_ms, now),
            watcher.rev.to_string(),
            watcher.behind.to_string(),
            watcher.items.to_string(),
            bytes(watcher.bytes),
            clean(&watcher.listener),
        ]);
    }
    table.text()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::testing::contains;

    fn source(resource: &str, objects: u64) -> pb::SourceState {
        pb::SourceState {
            resource: resource.into(),
            synced: true,
            objects,
            health: "healthy".into(),
            since_unix_ms: 1_000,
            ..Default::default()
        }
    }

    fn watcher(id: u64, behind: u64) -> pb::Watcher {
        pb::Watcher {
            id,
            peer: format!("pid {id}"),
            listener: "unix:///run/keelson-endpoints/endpoints.sock".into(),
            api: "Watch".into(),
            since_unix_ms: 1_000,
            rev: 12 - behind,
            behind,
            items: 40,
            bytes: 2_048,
        }
    }

    fn current() -> pb::State {
        let web = pb::ServiceSummary {
            namespace: "shop".into(),
            name: "web".into(),
            r#type: "NodePort".into(),
            cluster_ips: vec!["10.96.0.10".into(), "fd00:96::a".into()],
            ports: vec!["http 80:30080/TCP".into(), "9090/TCP".into()],
            ready: 3,
            local_ready: 1,
            selected: 2,
            rev: 12,
        };
        let bare =
            pb::ServiceSummary { namespace: "shop".into(), name: "x\x1b[2J".into(), ..Default::default() };
        pb::State {
            state: "synced".into(),
            since_unix_ms: 1_000,
            instance_id: "17293822569102704640".into(),
            rev: 12,
            published_unix_ms: 51_000,
            source: "kube".into(),
            source_place: "https://192.0.2.1:6443".into(),
            sources: vec![source("services", 2), source("endpointslices", 3)],
            listen: vec![
                "unix:///run/keelson-endpoints/endpoints.sock".into(),
                "tcp://127.0.0.1:12345".into(),
            ],
            node: Some(pb::NodeState {
                name: "worker-7".into(),
                exists: true,
                zone: "a".into(),
                ips: vec!["192.0.2.17".into()],
                pod_cidrs: vec!["10.180.7.0/24".into()],
                eligible: true,
                ..Default::default()
            }),
            services: 2,
            endpoints: 3,
            events: 40,
            revisions: 12,
            watchers: vec![watcher(1, 0), watcher(2, 5)],
            list: vec![web, bare],
            durable: true,
            ..Default::default()
        }
    }

    const FACTS: &str = "\
Source:   kube, https://192.0.2.1:6443
Objects:  services 2, endpointslices 3
Served:   2 Services, 3 endpoints
Revision: 12, published 10s ago, instance 17293822569102704640
Events:   40, published as 12 revisions
Node:     worker-7, zone a, 192.0.2.17, pods 10.180.7.0/24
Listens:  unix:///run/keelson-endpoints/endpoints.sock, tcp://127.0.0.1:12345
Watchers: 2, 1 behind (keelson endpoints watchers)
";

    #[test]
    fn a_state_that_is_current() {
        let expected = format!(
            "State:    synced\n{FACTS}\n\
NAMESPACE  NAME   TYPE      CLUSTER-IP              PORTS                        READY  LOCAL  SELECTED  REV
shop       web    NodePort  10.96.0.10, fd00:96::a  http 80:30080/TCP, 9090/TCP  3      1      2         12
shop       x\u{fffd}[2J  -         -                       -                            0      0      0         0
"
        );
        assert_eq!(describe(&current(), "", 10, 61_000), expected);
        assert_eq!(describe(&current(), "", 0, 61_000), format!("State:    synced\n{FACTS}"));
    }

    #[test]
    fn problems_come_first() {
        let mut state = current();
        let refused = "the server\ncannot be reached";
        (state.state, state.reason, state.since_unix_ms) = ("stale".into(), refused.into(), 49_000);
        for source in &mut state.sources {
            (source.health, source.reason, source.since_unix_ms) = ("failing".into(), refused.into(), 49_000);
        }
        state.sources.push(pb::SourceState { synced: false, ..source("nodes", 0) });
        let fault = |line, earlier_in_use| pb::FileFault {
            file: "web.yaml".into(),
            line,
            reason: "no mapping".into(),
            earlier_in_use,
        };
        state.faults = vec![fault(12, true), fault(0, false)];
        state.durable = false;
        state.node = Some(pb::NodeState { name: "worker-7".into(), ..Default::default() });
        state.list.clear();
        let text = describe(&state, "shop", 10, 61_000);
        let expected = "\
STALE for 12s: the server cannot be reached
services, endpointslices: failing for 12s: the server cannot be reached
nodes: healthy, not listed yet
web.yaml:12: no mapping (the last valid version stays in use)
web.yaml: no mapping
the served state is not on disk; after a restart, clients may have to read the full state
Node worker-7 does not exist: its zone is unknown, so zone hints are ignored

State:    stale
";
        assert!(text.starts_with(expected), "{text}");
        contains(&text, "\nNode:     worker-7, Node not found, no zone\n");
        assert!(text.ends_with("\n\nNo Services in namespace shop.\n"), "{text}");
        // P4: a Node that was deleted keeps its zone.
        state.node = Some(pb::NodeState { name: "worker-7".into(), zone: "a".into(), ..Default::default() });
        let text = describe(&state, "", 0, 61_000);
        contains(&text, "\nNode worker-7 does not exist: its last known values stay in use\n");
        state.source = "files".into();
        assert!(!describe(&state, "", 0, 61_000).contains("does not exist"), "manifests need not hold it");
        state.faults = vec![fault(1, false); 13];
        let text = describe(&state, "", 10, 61_000);
        contains(&text, "and 3 more invalid manifests; use -o json to list all\n");
        assert!(text.ends_with("\n\nNo Services.\n"), "{text}");
    }

    #[test]
    fn endpoints_pending_or_disabled() {
        let waiting = pb::State {
            state: "pending".into(),
            reason: "services are not listed yet".into(),
            since_unix_ms: 60_000,
            source: "files".into(),
            source_place: "/srv/m".into(),
            ..Default::default()
        };
        let expected = "\
PENDING for 1.0s: services are not listed yet

State:    pending
Source:   files, /srv/m
Served:   0 Services, 0 endpoints
Revision: none yet
Events:   0, published as 0 revisions
Watchers: none
";
        assert_eq!(describe(&waiting, "", 0, 61_000), expected);
        let source =
            pb::SourceState { resource: "services".into(), health: "pending".into(), ..Default::default() };
        let not_watched = pb::State {
            state: "not-watched".into(),
            reason: "no client is connected".into(),
            sources: vec![source],
            ..waiting.clone()
        };
        let text = describe(&not_watched, "", 0, 61_000);
        let pending = "PENDING: Services are not watched: no client is connected\n\nState:    pending\n";
        assert!(text.starts_with(pending), "{text}");
        let nft = pb::Backend { name: "nft".into(), pid: 12, state: "failing".into(), ..Default::default() };
        let with = pb::State { backends: vec![nft], ..waiting };
        let text = describe(&with, "", 0, 61_000);
        contains(&text, "not listed yet\nbackend nft (pid 12) is failing\n\nState:    pending\n");
        let backend = "Watchers: none\nBackend:  nft (pid 12), failing, no revision in effect yet\n";
        assert!(text.ends_with(backend), "{text}");
        let off =
            pb::State { state: "disabled".into(), reason: "no API server".into(), ..Default::default() };
        let text = describe(&off, "", 10, 61_000);
        let lead = "Service endpoints are disabled: no API server.\n\nBy default they are enabled if [kube]";
        assert!(text.starts_with(lead), "{text}");
        contains(&text, "\n  source = \"files\"\n");
        assert_eq!(watchers(&off, 61_000), text);
    }

    #[test]
    fn watchers_by_how_far_they_are_behind() {
        let expected = "\
ID  PEER   API    FOR    REV  BEHIND  ITEMS  SENT     LISTENER
2   pid 2  Watch  1m00s  7    5       40     2.0 KiB  unix:///run/keelson-endpoints/endpoints.sock
1   pid 1  Watch  1m00s  12   0       40     2.0 KiB  unix:///run/keelson-endpoints/endpoints.sock
";
        assert_eq!(watchers(&current(), 61_000), expected);
        let nobody = pb::State { watchers: Vec::new(), ..current() };
        let expected = "No client is connected to the Endpoints API \
                        (unix:///run/keelson-endpoints/endpoints.sock, tcp://127.0.0.1:12345).\n";
        assert_eq!(watchers(&nobody, 61_000), expected);
    }

    #[test]
    fn a_truncated_list_is_marked() {
        let state = pb::State { services: 10_000, ..current() };
        assert_eq!(truncation_note(&state, "", 2).unwrap(), "9998 Services not listed; raise --max");
        assert_eq!(
            truncation_note(&state, "shop", 2).unwrap(),
            "the list is limited to 2 Services; raise --max to list more"
        );
        for (namespace, max) in [("", 0), ("shop", 3), ("shop", 0)] {
            assert_eq!(truncation_note(&state, namespace, max), None, "{namespace:?} {max}");
        }
        assert_eq!(truncation_note(&current(), "", 2), None);
    }
}
