//! Command lines, output, and exit codes.

use std::process::ExitCode;

use clap::Parser;
use keelson_proto::{endpoints, proxy as pb};
use keelson_proxy::{
    explain::{Question, Source},
    inspect::{Check, Chunks, PrintSlots, ProxyView, ViewError, serve_grpc},
};
use tokio::{net::UnixListener, sync::watch};

use super::{ProxyInspectCommand, explanation, state};
use crate::{cli::testing::contains, settings::SettingsArgs};

#[derive(Debug, Parser)]
struct Line {
    #[command(subcommand)]
    look: ProxyInspectCommand,
}

fn parsed(words: &[&str]) -> Result<ProxyInspectCommand, clap::Error> {
    Line::try_parse_from(["proxy"].iter().chain(words)).map(|line| line.look)
}

#[test]
fn command_lines() {
    assert!(matches!(
        parsed(&["state", "-o", "json", "--socket", "unix:///x"]),
        Ok(ProxyInspectCommand::State(_))
    ));
    assert!(matches!(parsed(&["print"]), Ok(ProxyInspectCommand::Print(_))));
    for (target, read) in
        [("10.96.0.10:80", "10.96.0.10:80/TCP"), ("[fd00:96::a]:53/udp", "[fd00:96::a]:53/UDP")]
    {
        let Ok(ProxyInspectCommand::Explain(args)) = parsed(&["explain", target, "--from", "pod"]) else {
            panic!("{target}")
        };
        assert_eq!(args.target.to_string(), read);
        assert_eq!(args.from.map(|from| from.to_string()).as_deref(), Some("pod"));
    }
    for wrong in [
        &["explain"][..],
        &["explain", "web:80"],
        &["explain", "10.96.0.10"],
        &["explain", "10.96.0.10:0"],
        &["explain", "10.96.0.10:80/ICMP"],
        &["explain", "10.96.0.10:80", "--from", "me"],
        &["print", "-o", "json"],
        &["state", "--socket", "tcp://x"],
        &["look"],
    ] {
        assert_eq!(parsed(wrong).unwrap_err().exit_code(), 2, "{wrong:?}");
    }
    let says = parsed(&["explain", "web:80"]).unwrap_err().to_string();
    contains(&says, "names are not resolved");
}

fn family(name: &str) -> pb::FamilyState {
    pb::FamilyState {
        family: name.into(),
        state: "synced".into(),
        services: 2,
        service_ports: 3,
        endpoints: 7,
        chains: 17,
        elements: [("slots".to_owned(), 7), ("cluster-ip-ports".to_owned(), 3)].into(),
        syncs: 12,
        full_syncs: 1,
        last_sync_unix_ms: 51_000,
        last_sync_us: 1_920,
        last_added: 2,
        last_deleted: 1,
        ..Default::default()
    }
}

fn healthy() -> pb::State {
    pb::State {
        backend: "nft".into(),
        version: "1.2.3".into(),
        pid: 12,
        started_unix_ms: 1_000,
        target: "unix:///run/keelson-endpoints/endpoints.sock".into(),
        link: "following".into(),
        instance_id: "17293822569102704640".into(),
        rev: 41,
        families: vec![family("IPv4")],
        settings: vec!["nodeport-addresses: primary".into(), "masquerade-bit: 14".into()],
        events: vec![pb::Event { at_unix_ms: 51_000, text: "IPv4: the table was\nrepaired".into() }],
        node_eligible: true,
        healthy: true,
        ..Default::default()
    }
}

const FACTS: &str = "\
Backend:  nft, version 1.2.3, pid 12, up 1m00s
Agent:    connected, unix:///run/keelson-endpoints/endpoints.sock
Revision: 41, instance 17293822569102704640
Health:   healthy, node eligible for load balancers
Settings: nodeport-addresses: primary, masquerade-bit: 14
";

#[test]
fn a_healthy_proxy() {
    let expected = format!(
        "{FACTS}
FAMILY  STATE   SERVICES  PORTS  ENDPOINTS  CHAINS  ELEMENTS  LAST SYNC  TOOK   CHANGED  SYNCS  FULL  FAILED  REPAIRED
IPv4    synced  2         3      7          17      10        10s ago    1.9ms  +2 -1    12     1     0       0

Last events:
  10s ago: IPv4: the table was repaired
"
    );
    assert_eq!(state::describe(&healthy(), None, 61_000), expected);
    assert_eq!(state::problems(&healthy(), 61_000), Vec::<String>::new());
}

#[test]
fn p8_how_full_the_maps_of_session_affinity_are() {
    let mut state = healthy();
    let clients = |map: &str, clients: u64| (map.to_owned(), clients);
    state.families[0].affinity_clients_max = 131_072;
    state.families[0].affinity_clients = [clients("affinity-3", 7), clients("affinity-0", 117_964)].into();
    let mut v6 = family("IPv6");
    v6.affinity_clients_max = 131_072;
    state.families.push(v6);
    let shown = state::describe(&state, None, 61_000);
    let line = "\n\nIPv4: clients with session affinity: affinity-0 117964/131072, affinity-3 7/131072\n\nLast events";
    assert!(shown.contains(line) && !shown.contains("WARNING"), "{shown}");
    state.families[0].affinity_clients.insert("affinity-0".into(), 117_965);
    let shown = state::describe(&state, None, 61_000);
    contains(&shown, "affinity-3 7/131072\nIPv4: WARNING: affinity-0 is more than 90 % full; ");
    assert_eq!(state::problems(&state, 61_000), Vec::<String>::new(), "no failure");
}

#[test]
fn the_revision_against_the_agents() {
    let newest =
        |instance: &str, rev| endpoints::State { instance_id: instance.into(), rev, ..Default::default() };
    let mine = "17293822569102704640";
    for (newest, says) in [
        (newest(mine, 41), "\nRevision: 41, same as the agent, instance 1"),
        (newest(mine, 44), "\nRevision: 41, 3 behind the agent, instance 1"),
        (newest(mine, 40), "\nRevision: 41, same as the agent, instance 1"),
        (
            newest("7", 1),
            "\nRevision: 41, from another instance ID than the agent's 7 (revision 1), instance 1",
        ),
    ] {
        let text = state::describe(&healthy(), Some(&newest), 61_000);
        assert!(text.contains(says), "{text}");
    }
    let none = pb::State { rev: 0, ..healthy() };
    assert!(state::describe(&none, None, 61_000).contains("\nRevision: none in the kernel yet\n"));
}

#[test]
fn problems_come_first() {
    let failing = pb::FamilyState {
        state: "failing".into(),
        reason: "no space\nleft".into(),
        last_sync_unix_ms: 0,
        pending_since_unix_ms: 1_000,
        other_proxies: vec!["the table ip6 kube-proxy is there: keelson's rules come first".into()],
        conflicts: vec!["10.0.0.1:80/TCP is claimed by a/x and b/y; a/x has it".into()],
        not_checked: "cannot read the table\n(tried 2 times)".into(),
        ..family("IPv6")
    };
    let late = pb::FamilyState { pending_since_unix_ms: 51_000, ..family("IPv4") };
    let check = |reason: &str, listening: &[&str]| pb::HealthCheck {
        namespace: "shop".into(),
        name: "web".into(),
        port: 32_000,
        local_endpoints: 1,
        listening: listening.iter().map(ToString::to_string).collect(),
        reason: reason.into(),
    };
    let bad = pb::State {
        link: "failing".into(),
        link_reason: "connection refused".into(),
        stale: true,
        stale_reason: "services: forbidden".into(),
        stale_since_unix_ms: 1_000,
        endpoints_too_stale: true,
        families: vec![late, failing],
        health_checks: vec![check("", &["192.0.2.1:32000"]), check("address in use", &[])],
        healthy: false,
        node_eligible: false,
        events: Vec::new(),
        settings: Vec::new(),
        ..healthy()
    };
    let expected = "\
FAILING: connection to the agent at unix:///run/keelson-endpoints/endpoints.sock: connection refused
STALE: the agent's service endpoints are stale for 1m00s: services: forbidden
STALE: longer than proxy.max_staleness, so /healthz answers 503; the rules stay unchanged
IPv4: PENDING; changes pending for 10s
IPv6: FAILING: no space left; changes pending for 1m00s
IPv6: not checked for changes by other programs: cannot read the table (tried 2 times)
health check node port of shop/web: not listening on port 32000: address in use
FAILING: /healthz and /livez of the proxy fail

Backend:  nft, version 1.2.3, pid 12, up 1m00s
Agent:    failing, unix:///run/keelson-endpoints/endpoints.sock
Revision: 41, instance 17293822569102704640
Health:   failing, node excluded from load balancers

FAMILY  STATE    SERVICES  PORTS  ENDPOINTS  CHAINS  ELEMENTS  LAST SYNC  TOOK   CHANGED  SYNCS  FULL  FAILED  REPAIRED
IPv4    synced   2         3      7          17      10        10s ago    1.9ms  +2 -1    12     1     0       0
IPv6    failing  2         3      7          17      10        -          -      -        12     1     0       0

IPv6: the table ip6 kube-proxy is there: keelson's rules come first
IPv6: 10.0.0.1:80/TCP is claimed by a/x and b/y; a/x has it

HEALTH CHECK  PORT   LOCAL       LISTENS
shop/web      32000  1 endpoint  192.0.2.1:32000
shop/web      32000  1 endpoint  -
";
    assert_eq!(state::describe(&bad, None, 61_000), expected);
    let many = pb::FamilyState { conflicts: vec!["x".into(); 13], ..family("IPv4") };
    let text = state::describe(&pb::State { families: vec![many], ..healthy() }, None, 61_000);
    contains(&text, "IPv4: x\nand 3 more; use -o json to list all\n");
}

#[test]
fn a_proxy_that_has_just_started_is_not_healthy() {
    let starting = pb::State {
        link: "connecting".into(),
        rev: 0,
        families: vec![pb::FamilyState {
            family: "IPv4".into(),
            state: "pending".into(),
            ..Default::default()
        }],
        ..healthy()
    };
    assert_eq!(
        state::problems(&starting, 61_000),
        ["PENDING: connection to the agent at unix:///run/keelson-endpoints/endpoints.sock", "IPv4: PENDING"]
    );
}

#[test]
fn the_path_of_a_packet() {
    let way = |from: &str, verdict: &str, masqueraded, endpoints: usize| pb::Way {
        from: from.into(),
        verdict: verdict.into(),
        masqueraded,
        endpoints: (0..endpoints).map(|n| format!("10.244.0.{n}:8080")).collect(),
        steps: vec!["services: a\x1b[2J".into(), "internal:\nb".into()],
    };
    let explained = pb::Explanation {
        frontend: "10.96.0.10:80/TCP is the cluster IP of default/web".into(),
        service_port: "default/web".into(),
        ways: vec![
            way("a pod", "forwarded", false, 2),
            way("outside", "forwarded", true, 12),
            way("x", "dropped", false, 0),
        ],
    };
    let expected = "\
10.96.0.10:80/TCP is the cluster IP of default/web

From a pod: FORWARDED
  to 10.244.0.0:8080, 10.244.0.1:8080
   1. services: a\u{fffd}[2J
   2. internal: b

From outside: FORWARDED, masqueraded
  to 10.244.0.0:8080, 10.244.0.1:8080, 10.244.0.2:8080, 10.244.0.3:8080, 10.244.0.4:8080, 10.244.0.5:8080, 10.244.0.6:8080, \
10.244.0.7:8080, 10.244.0.8:8080, 10.244.0.9:8080 and 2 more
   1. services: a\u{fffd}[2J
   2. internal: b

From x: DROPPED
   1. services: a\u{fffd}[2J
   2. internal: b
";
    assert_eq!(explanation::describe(&explained), expected);
}

/// A scripted proxy.
#[derive(Debug, Clone)]
struct Fake {
    state: pb::State,
    pieces: Vec<Result<String, ViewError>>,
    bump: watch::Sender<u64>,
}

impl ProxyView for Fake {
    async fn state(&self) -> Result<pb::State, ViewError> {
        Ok(self.state.clone())
    }

    async fn explain(&self, question: Question) -> Result<pb::Explanation, ViewError> {
        match question.from {
            Source::Node => Err(ViewError::Unavailable("nothing is known yet".into())),
            _ => Ok(pb::Explanation { frontend: question.target.to_string(), ..Default::default() }),
        }
    }

    async fn print(&self) -> Result<Chunks, ViewError> {
        Ok(Box::pin(futures_util::stream::iter(self.pieces.clone())))
    }

    fn changes(&self) -> watch::Receiver<u64> {
        self.bump.subscribe()
    }

    fn history(&self) -> keelson_serve::history::History {
        keelson_serve::history::History::new(&[])
    }

    async fn livez(&self) -> Vec<Check> {
        Vec::new()
    }

    async fn readyz(&self) -> Vec<Check> {
        Vec::new()
    }

    async fn metrics(&self) -> String {
        String::new()
    }
}

fn missing_settings() -> SettingsArgs {
    SettingsArgs { config: Some("/nonexistent".into()), sets: Vec::new(), feature_gates: Vec::new() }
}

/// The result of the command with this proxy.
async fn run(fake: &Fake, words: &[&str]) -> Result<String, String> {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("proxy.sock");
    let listener = UnixListener::bind(&socket).unwrap();
    let server =
        tokio::spawn(serve_grpc(listener, fake.clone(), PrintSlots::default(), std::future::pending()));
    let named = format!("unix://{}", socket.display());
    let look = parsed(&[words, &["--socket", &named]].concat()).unwrap();
    let outcome = super::run_proxy_inspect(look, &missing_settings()).await;
    server.abort();
    outcome.map(|code| format!("{code:?}")).map_err(|error| format!("{error:#}"))
}

#[tokio::test]
async fn exit_codes_of_commands_that_reach_a_proxy() {
    let (success, failure) = (format!("{:?}", ExitCode::SUCCESS), format!("{:?}", ExitCode::FAILURE));
    let pieces = vec![Ok("table ip keelson {\n".into()), Ok("}\n".into())];
    let good = Fake { state: healthy(), pieces, bump: watch::Sender::new(0) };
    for words in [&["state"][..], &["state", "-o", "json"], &["explain", "10.96.0.10:80"], &["print"]] {
        assert_eq!(run(&good, words).await, Ok(success.clone()), "{words:?}");
    }
    let bad = Fake { state: pb::State { link: "failing".into(), ..healthy() }, ..good.clone() };
    for words in [&["state"][..], &["state", "-o", "json"]] {
        assert_eq!(run(&bad, words).await, Ok(failure.clone()), "{words:?}");
    }
    let crossed = run(&good, &["explain", "10.96.0.10:80", "--from", "fd00::1"]).await;
    assert_eq!(crossed, Ok(format!("{:?}", ExitCode::from(2))));
    let unknown = run(&good, &["explain", "10.96.0.10:80", "--from", "node"]).await;
    assert_eq!(unknown, Err("the proxy cannot answer yet: nothing is known yet".into()));
    let cut = vec![Ok("table ip keel".into()), Err(ViewError::Unavailable("gone".into()))];
    let cut = run(&Fake { pieces: cut, ..good }, &["print"]).await;
    assert_eq!(cut, Err("the ruleset is incomplete: the proxy cannot answer yet: gone".into()));
}

#[tokio::test]
async fn without_a_socket_the_settings_decide() {
    let look = parsed(&["state"]).unwrap();
    let outcome = super::run_proxy_inspect(look, &missing_settings()).await.unwrap();
    assert_eq!(format!("{outcome:?}"), format!("{:?}", ExitCode::from(2)), "wrong settings are wrong usage");
    let folder = tempfile::tempdir().unwrap();
    let sets = vec![format!("proxy.listen=unix://{}/none.sock", folder.path().display())];
    let settings = SettingsArgs { config: None, sets, ..missing_settings() };
    let error = super::run_proxy_inspect(parsed(&["print"]).unwrap(), &settings).await.unwrap_err();
    assert!(error.to_string().contains("/none.sock: the socket does not exist"), "{error:#}");
}
