//! Connections: HTTP/2 over TLS, broken networks, closing on request.

use std::{path::PathBuf, time::Duration};

use http::Version;
use keelson_actor_system::cluster::{ApiErrorKind, JobHealth, LeaseApi};
use tempfile::TempDir;

use super::{
    requests::{renew, renewal},
    script::{Authority, Reply, Server, Wire, api, put, with_short_timeouts},
};
use crate::{ExplicitSource, KnownPods, watch_pods};

const H2: &[&str] = &["h2", "http/1.1"];

/// An authority, and its certificate in a file.
fn authority() -> (Authority, PathBuf, TempDir) {
    let (authority, directory) = (Authority::new(), tempfile::tempdir().unwrap());
    let ca = put(directory.path(), "ca.crt", &authority.pem());
    (authority, ca, directory)
}

fn source(address: std::net::SocketAddr, ca: &std::path::Path) -> ExplicitSource {
    ExplicitSource {
        server: format!("https://{address}"),
        ca_file: Some(ca.to_owned()),
        ..ExplicitSource::default()
    }
}

#[tokio::test]
async fn http2_is_spoken_where_the_server_offers_it() {
    let (authority, ca, _directory) = authority();
    for (protocols, version) in
        [(H2, Version::HTTP_2), (&["http/1.1"], Version::HTTP_11), (&[], Version::HTTP_11)]
    {
        let mut server = Server::tls(authority.server(protocols)).await;
        let api = api(source(server.address, &ca));
        for _ in 0..3 {
            let seen = renew(&mut server, &api).await;
            assert_eq!((seen.version, seen.connection), (version, 0));
        }
    }
}

#[tokio::test]
async fn tls_errors_have_a_remedy() {
    let (ours, ca, _directory) = authority();
    // Another cluster's authority has another name, or the same name with another key.
    for theirs in [Authority::named("another"), Authority::new()] {
        let server = Server::tls(theirs.server(H2)).await;
        let err = api(source(server.address, &ca)).renew_lease(renewal()).await.unwrap_err();
        assert_eq!(err.kind, ApiErrorKind::Unreachable);
        assert!(err.reason.contains("not signed by the configured certificate authority"), "{err}");
    }

    let server = Server::tls(ours.server(H2)).await;
    let named = ExplicitSource {
        server: format!("https://localhost:{}", server.address.port()),
        ..source(server.address, &ca)
    };
    let err = api(named).renew_lease(renewal()).await.unwrap_err();
    assert!(err.reason.contains("for another name"), "{err}");

    let plain = Server::plain().await;
    let err = api(source(plain.address, &ca)).renew_lease(renewal()).await.unwrap_err();
    assert!(err.reason.contains("does not use TLS"), "{err}");
}

/// Case 25: requests into a black hole time out, and the next one is on a new connection.
#[tokio::test]
async fn case_25_a_dead_connection_is_left_after_one_timeout() {
    let (authority, ca, _directory) = authority();
    for protocols in [H2, &["http/1.1"]] {
        let mut server = Server::tls(authority.server(protocols)).await;
        let wire = Wire::to(server.address).await;
        let api = with_short_timeouts(source(wire.address, &ca));
        // Enough for a machine on which a successful request takes longer than the limit.
        for _ in 0..50 {
            server.reply(Reply::ok());
        }
        while api.renew_lease(renewal()).await.is_err() {}
        let before = wire.opened();
        wire.cut();
        let err = api.renew_lease(renewal()).await.unwrap_err();
        assert_eq!(err.kind, ApiErrorKind::Timeout, "{err}");
        while api.renew_lease(renewal()).await.is_err() {}
        assert!(wire.opened() > before);
        let _ = server.seen().await;
    }
}

#[tokio::test]
async fn closing_connections_makes_the_next_request_dial() {
    let (authority, ca, _directory) = authority();
    let mut server = Server::tls(authority.server(H2)).await;
    let api = api(source(server.address, &ca));
    for connection in 0..3 {
        for _ in 0..2 {
            assert_eq!(renew(&mut server, &api).await.connection, connection);
        }
        LeaseApi::close_connections(&api);
    }
}

#[tokio::test]
async fn a_server_that_closed_the_connection_costs_no_error() {
    let (authority, ca, _directory) = authority();
    for tls in [true, false] {
        let mut server = if tls { Server::tls(authority.server(H2)).await } else { Server::plain().await };
        let from = if tls { source(server.address, &ca) } else { server.source() };
        let api = api(from);
        for connection in 0..2 {
            let close = vec![("connection", "close".to_owned())];
            let body = r#"{"metadata":{"uid":"u","resourceVersion":"8"}}"#;
            // HTTP/2 has no such header; there the connection stays open.
            server.reply(Reply::Answer(200, if tls { vec![] } else { close }, body.into()));
            api.renew_lease(renewal()).await.unwrap();
            assert_eq!(server.seen().await.connection, if tls { 0 } else { connection });
        }
    }
}

/// A watch on a dead network ends by the keep-alive, and restarts on a new connection.
#[tokio::test]
async fn a_watch_on_a_dead_network_begins_again() {
    let (authority, ca, _directory) = authority();
    let mut server = Server::tls(authority.server(H2)).await;
    let wire = Wire::to(server.address).await;
    let mut parts = crate::ApiServerParts::new(crate::ClusterSource::Explicit(source(wire.address, &ca)));
    parts.keep_alive =
        crate::KeepAlive { idle: Duration::from_millis(200), timeout: Duration::from_millis(200) };
    let api = crate::ApiServer::new(parts);
    let feed = server.begin();
    feed.event(
        "BOOKMARK",
        r#"{"metadata":{"resourceVersion":"5","annotations":{"k8s.io/initial-events-end":"true"}}}"#,
    );
    let (health, mut watched) = tokio::sync::watch::channel(JobHealth::Pending);
    let watching =
        tokio::spawn(async move { watch_pods(&api, "n1", &health, KnownPods::default(), |_| {}).await });
    watched.wait_for(|health| *health == JobHealth::Healthy).await.unwrap();
    assert_eq!(server.seen().await.connection, 0);
    wire.cut();
    let again = server.seen().await;
    assert_eq!((again.connection, again.query("resourceVersion")), (1, Some("5")));
    watching.abort();
}
