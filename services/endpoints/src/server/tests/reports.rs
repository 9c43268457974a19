//! Backends that report.

use keelson_proto::endpoints::Backend;
use keelson_serve::grpc::Peer;
use prometheus_client::registry::Registry;

use super::*;

/// The report of a backend that has applied this state.
pub(super) fn synced(name: &str, pid: u32, (instance_id, rev): (u64, u64)) -> Backend {
    Backend {
        name: name.into(),
        pid,
        version: "0.1.0".into(),
        http: "http://127.0.0.1:9441/".into(),
        instance_id,
        rev,
        state: "synced".into(),
        last_sync_unix_ms: 1_000,
        service_ports: 4,
        ..Backend::default()
    }
}

#[tokio::test]
async fn backend_reports_are_shown_with_their_lag() {
    let mut source = Source::new(7);
    let server = Running::start(&source).await;
    source.set(service("a", &["r1"]));
    source.set(service("b", &["r1"]));
    let mut client = server.watch().await;
    let own = std::process::id();
    client.report(synced("nft", own, (7, 1))).await.expect("is taken");
    // Fields that the agent sets are ignored in a report.
    let failing = Backend {
        state: "failing".into(),
        reason: "no nft_numgen in this kernel".into(),
        seen_unix_ms: 5,
        silent: true,
        behind: 99,
        ..synced("other", 12, (8, 2))
    };
    client.report(failing).await.expect("is taken");
    let shown = server.backends.list();
    let [nft, other] = shown.as_slice() else { panic!("{shown:?}") };
    assert!(nft.seen_unix_ms > 1_000_000_000_000, "{nft:?}");
    let seen_unix_ms = nft.seen_unix_ms;
    assert_eq!(*nft, Backend { behind: 1, seen_unix_ms, ..synced("nft", own, (7, 1)) });
    assert_eq!((other.behind, other.silent, other.state.as_str()), (2, false, "failing"));
    assert_eq!(other.reason, "no nft_numgen in this kernel");

    client.report(synced("nft", own, (7, 2))).await.expect("is taken");
    let shown = server.backends.list();
    assert_eq!((shown.len(), shown[0].rev, shown[0].behind), (2, 2, 0), "the newest report counts");
    source.set(service("b", &[]));
    assert_eq!(server.backends.list()[0].behind, 1, "it has not acknowledged this one");
    assert_eq!(server.watchers.count().0, 0, "a report takes no place of a watcher");
}

#[tokio::test]
async fn an_invalid_report_is_refused_and_changes_nothing() {
    let (_source, server) = one_service().await;
    let mut client = server.watch().await;
    for (said, words) in [
        (Backend::default(), "is not a valid backend name"),
        (Backend { state: "gone".into(), ..synced("nft", 1, (7, 1)) }, "one of pending, synced, failing"),
        (Backend { reason: "a\nb".into(), ..synced("nft", 1, (7, 1)) }, "control character"),
        (
            Backend { http: "javascript:alert(1)".into(), ..synced("nft", 1, (7, 1)) },
            "http is not a valid address",
        ),
    ] {
        ends_with(client.report(said).await, Code::InvalidArgument, words);
    }
    assert_eq!(server.backends.list(), []);
}

#[tokio::test]
async fn a_backend_whose_process_has_ended_is_silent_at_once() {
    let server = Running::start(&Source::new(7)).await;
    let mut process = std::process::Command::new("sleep").arg("60").spawn().expect("starts");
    let pid = process.id();
    server.backends.take(synced("here", pid, (7, 1)), Some(pid)).expect("is taken");
    // Sent by a process of another number: the pid may be of another PID namespace, about which nothing is known here.
    server.backends.take(synced("contained", pid, (7, 1)), Some(pid + 1)).expect("is taken");
    server.backends.take(synced("remote", pid, (7, 1)), None).expect("is taken");
    let silent = || server.backends.list().into_iter().map(|one| (one.name, one.silent)).collect::<Vec<_>>();
    let expected = |here| {
        [("contained", false), ("here", here), ("remote", false)].map(|(name, is)| (name.to_owned(), is))
    };
    assert_eq!(silent(), expected(false));
    process.kill().expect("ends");
    process.wait().expect("ended");
    assert_eq!(silent(), expected(true));
}

#[tokio::test]
async fn the_reporter_pid_comes_from_the_kernel() {
    let server = Running::start(&Source::new(7)).await;
    let own = std::process::id();
    let peer = Peer::of_unix(&server.raw().await, "unix://x".into());
    assert_eq!(peer.pid, Some(own));
    let stream = tokio::net::TcpStream::connect(server.tcp).await.expect("connects");
    assert_eq!(Peer::of_tcp(&stream, "tcp://x".into()).pid, None);
}

#[tokio::test]
async fn backends_are_counted_by_name_and_state() {
    let (_source, server) = one_service().await;
    let mut registry = Registry::default();
    registry.register_collector(Box::new(server.backends.clone()));
    let metrics = || {
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry).expect("encodes");
        text
    };
    assert!(!metrics().contains("{name="), "{}", metrics());
    let mut client = server.watch().await;
    for said in [
        synced("nft", 1, (7, 1)),
        synced("nft", 2, (0, 0)),
        Backend { state: "failing".into(), ..synced("nft", 3, (7, 1)) },
    ] {
        client.report(said).await.expect("is taken");
    }
    let text = metrics();
    for line in [
        "# TYPE keelson_endpoints_backends gauge",
        r#"keelson_endpoints_backends{name="nft",state="pending"} 0"#,
        r#"keelson_endpoints_backends{name="nft",state="synced"} 2"#,
        r#"keelson_endpoints_backends{name="nft",state="failing"} 1"#,
        r#"keelson_endpoints_backends{name="nft",state="silent"} 0"#,
        r#"keelson_endpoints_backends_behind{name="nft"} 1"#,
    ] {
        assert!(text.lines().any(|have| have == line), "{line} not in {text}");
    }
}

#[tokio::test]
async fn a_server_that_stops_takes_no_reports() {
    let (_source, mut server) = one_service().await;
    let mut client = server.watch().await;
    client.report(synced("nft", 1, (7, 1))).await.expect("is taken");
    server.stop();
    patiently(&mut server.serving).await.expect("ends");
    ends_with(client.report(synced("nft", 1, (7, 1))).await, Code::Unavailable, "");
}
