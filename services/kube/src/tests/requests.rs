//! The request of each call on the wire, and the processing of each answer.

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use bytes::Bytes;
use http::Version;
use k8s_openapi::api::core::v1::Node;
use keelson_actor_system::cluster::{
    ApiErrorKind, ClusterEvent, EventApi as _, EventObject, LeaseApi, LeaseCreate, LeasePatch, NodeApi,
    Owner, Written,
};
use serde_json::json;

use super::script::{Reply, SeenRequest, Server, api};
use crate::{
    ApiServer, ApiServerParts, ClusterSource, ExplicitSource, RequestObserver, bodies, server::Call,
};

pub(super) fn renewal() -> LeasePatch {
    LeasePatch {
        name: "n1".into(),
        resource_version: "7".into(),
        renew_unix_us: 1_700_000_000_000_001,
        duration_seconds: None,
        owner: None,
        acquire: None,
        drop_managed_fields: false,
    }
}

/// Renews the lease; returns the request, which succeeds.
pub(super) async fn renew(server: &mut Server, api: &ApiServer) -> SeenRequest {
    server.reply(Reply::ok());
    api.renew_lease(renewal()).await.unwrap();
    server.seen().await
}

const LEASES: &str = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases";

#[tokio::test]
async fn a_renewal_is_one_small_patch() {
    let mut server = Server::plain().await;
    server.reply(Reply::ok());
    let written = server.api().renew_lease(renewal()).await.unwrap();
    assert_eq!(written, Written { uid: "u".into(), resource_version: "8".into() });
    let seen = server.seen().await;
    assert_eq!(seen.line, format!("PATCH {LEASES}/n1"));
    assert_eq!(
        seen.body,
        r#"{"metadata":{"resourceVersion":"7"},"spec":{"renewTime":"2023-11-14T22:13:20.000001Z"}}"#
    );
    let mut names: Vec<_> = seen.headers.keys().map(http::HeaderName::as_str).collect();
    names.sort_unstable();
    assert_eq!(names, ["accept", "content-length", "content-type", "host", "user-agent"]);
    assert_eq!(seen.header("content-type"), "application/merge-patch+json");
    assert_eq!(seen.header("user-agent"), "keelson/0.1.0");
    let accept = "application/vnd.kubernetes.protobuf;as=PartialObjectMetadata;";
    assert!(seen.header("accept").starts_with(accept));
    assert_eq!(seen.version, Version::HTTP_11);
    server.nothing_more();
}

#[tokio::test]
async fn a_lease_is_read_made_and_owned() {
    let mut server = Server::plain().await;
    let api = server.api();
    server.reply(Reply::json(200, r#"{"kind":"Lease","apiVersion":"coordination.k8s.io/v1","metadata":{"uid":"u","resourceVersion":"3"},"spec":{"holderIdentity":"n1"}}"#));
    let lease = api.get_lease("n1").await.unwrap();
    assert_eq!(lease.holder.as_deref(), Some("n1"));
    let seen = server.seen().await;
    assert_eq!(seen.line, format!("GET {LEASES}/n1"));
    assert_eq!((seen.header("accept"), &*seen.body), ("application/json", ""));

    server.reply(Reply::json(201, r#"{"metadata":{"uid":"u","resourceVersion":"4"}}"#));
    let create = LeaseCreate {
        name: "n1".into(),
        owner: Some(Owner { name: "n1".into(), uid: "nu".into() }),
        holder: "n1".into(),
        duration_seconds: 40,
        now_unix_us: 0,
        transitions: 0,
    };
    assert_eq!(api.create_lease(create).await.unwrap().resource_version, "4");
    let seen = server.seen().await;
    assert_eq!(seen.line, format!("POST {LEASES}"));
    assert_eq!(seen.header("content-type"), "application/json");
    assert_eq!(seen.header("accept"), bodies::ACCEPT_METADATA);
    assert_eq!(
        seen.json(),
        json!({
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {
                "name": "n1",
                "ownerReferences": [{"apiVersion": "v1", "kind": "Node", "name": "n1", "uid": "nu"}],
            },
            "spec": {
                "holderIdentity": "n1",
                "leaseDurationSeconds": 40,
                "acquireTime": "1970-01-01T00:00:00.000000Z",
                "renewTime": "1970-01-01T00:00:00.000000Z",
                "leaseTransitions": 0,
            },
        })
    );

    server.reply(Reply::ok());
    assert_eq!(api.node_uid("n1").await.unwrap(), "u");
    let seen = server.seen().await;
    assert_eq!((&*seen.line, seen.header("accept")), ("GET /api/v1/nodes/n1", bodies::ACCEPT_METADATA));
    assert_eq!(server.connections(), 1, "one connection carries them all");
}

#[tokio::test]
async fn a_node_is_read_made_and_patched() {
    let mut server = Server::plain().await;
    let api = server.api();
    let body =
        r#"{"kind":"Node","apiVersion":"v1","metadata":{"name":"n1","uid":"u","resourceVersion":"3"}}"#;
    server.reply(Reply::json(200, body));
    let node = api.get_node("n1").await.unwrap();
    assert_eq!(server.seen().await.line, "GET /api/v1/nodes/n1");

    server.reply(Reply::json(201, body));
    assert_eq!(api.create_node(node.clone()).await.unwrap(), node);
    let seen = server.seen().await;
    assert_eq!((seen.line.as_str(), seen.header("content-type")), ("POST /api/v1/nodes", "application/json"));
    assert_eq!(serde_json::from_str::<Node>(&seen.body).unwrap(), *node);

    for (path, status) in [("PATCH /api/v1/nodes/n1", false), ("PATCH /api/v1/nodes/n1/status", true)] {
        server.reply(Reply::ok());
        let patch = json!({"status": {"conditions": [{"type": "Ready"}]}});
        let written = if status { api.patch_status("n1", patch) } else { api.patch_node("n1", patch) };
        assert_eq!(written.await.unwrap().resource_version, "8");
        let seen = server.seen().await;
        assert_eq!(seen.line, path);
        assert_eq!(seen.header("content-type"), "application/strategic-merge-patch+json");
        assert_eq!(seen.header("accept"), bodies::ACCEPT_METADATA);
        assert_eq!(seen.body, r#"{"status":{"conditions":[{"type":"Ready"}]}}"#);
    }
    server.nothing_more();
}

#[tokio::test]
async fn a_server_below_a_path_is_asked_below_it() {
    let mut server = Server::plain().await;
    let source = ExplicitSource {
        server: format!("http://who:hush@{}/k8s/clusters/c1/", server.address),
        ..ExplicitSource::default()
    };
    let api = api(source);
    server.reply(Reply::ok());
    api.node_uid("n1").await.unwrap();
    let seen = server.seen().await;
    assert_eq!(seen.line, "GET /k8s/clusters/c1/api/v1/nodes/n1");
    assert_eq!(seen.header("host"), server.address.to_string());
    assert_eq!(LeaseApi::server(&api), format!("http://{}/k8s/clusters/c1", server.address));
    assert!(!format!("{api:?}").contains("hush"));
}

#[tokio::test]
async fn an_error_is_one_request_with_a_kind_and_a_message() {
    let mut server = Server::plain().await;
    let api = server.api();
    let after = |seconds| Some(Duration::from_secs(seconds));
    for (status, body, header, kind) in [
        (409, r#"{"kind":"Status","reason":"Conflict"}"#, None, ApiErrorKind::Conflict),
        (409, r#"{"kind":"Status","reason":"AlreadyExists"}"#, None, ApiErrorKind::AlreadyExists),
        (404, "", None, ApiErrorKind::NotFound),
        (401, "", None, ApiErrorKind::Unauthorized),
        (403, "", None, ApiErrorKind::Forbidden),
        (429, "", Some(("retry-after", "3")), ApiErrorKind::TooManyRequests { retry_after: after(3) }),
        (500, "", None, ApiErrorKind::Server { retry_after: None }),
        (503, "<html>", Some(("retry-after", "1")), ApiErrorKind::Server { retry_after: after(1) }),
        (504, "", None, ApiErrorKind::Server { retry_after: None }),
        (302, "", Some(("location", "http://elsewhere.example/")), ApiErrorKind::Unreachable),
    ] {
        let headers = header.into_iter().map(|(name, value)| (name, value.to_owned())).collect();
        server.reply(Reply::Answer(status, headers, Bytes::from(body)));
        let err = api.renew_lease(renewal()).await.unwrap_err();
        assert_eq!(err.kind, kind, "{err}");
        assert!(err.reason.starts_with(&format!("HTTP {status}")), "{err}");
        assert_eq!(err.server, format!("http://{}", server.address));
        server.seen().await;
        server.nothing_more();
    }
}

#[tokio::test]
async fn invalid_answers_are_errors() {
    let server = Server::plain().await;
    let api = server.api();
    for body in [b"".to_vec(), b"<html>hello</html>".to_vec(), vec![0xff; 64], vec![b' '; 9 << 20]] {
        server.reply(Reply::Answer(200, vec![], Bytes::from(body)));
        let err = api.renew_lease(renewal()).await.unwrap_err();
        assert_eq!(err.kind, ApiErrorKind::Unreachable);
        assert!(err.reason.contains("invalid response"), "{err}");
    }
    let feed = server.begin();
    feed.line(r#"{"metadata":"#);
    feed.cut();
    let err = api.renew_lease(renewal()).await.unwrap_err();
    assert_eq!(err.kind, ApiErrorKind::Unreachable, "{err}");
    server.reply(Reply::ok());
    api.renew_lease(renewal()).await.unwrap();
}

#[tokio::test]
async fn a_refused_connection_names_the_server_and_the_reason() {
    let server = Server::plain().await;
    let source = server.source();
    drop(server);
    let err = api(source.clone()).node_uid("n1").await.unwrap_err();
    assert_eq!(err.kind, ApiErrorKind::Unreachable);
    assert_eq!(err.server, source.server);
    assert!(err.reason.contains("refused"), "{err}");
}

#[tokio::test]
async fn an_unresolvable_name_is_named_in_the_error() {
    // A label of this length is not valid, so that no name server is asked.
    let server = format!("http://{}.invalid:6443", "x".repeat(70));
    let err = api(ExplicitSource { server, ..ExplicitSource::default() }).node_uid("n1").await.unwrap_err();
    assert_eq!(err.kind, ApiErrorKind::Unreachable);
    assert!(err.reason.contains("cannot resolve"), "{err}");
}

#[tokio::test]
async fn requests_are_seen_by_the_observer() {
    let mut server = Server::plain().await;
    let seen = Arc::new(Mutex::new(Vec::new()));
    let all = Arc::clone(&seen);
    let api = ApiServer::new(ApiServerParts {
        timeout: Duration::from_secs(3),
        observer: RequestObserver::new(move |request| all.lock().unwrap().push(request.clone())),
        ..ApiServerParts::new(ClusterSource::Explicit(server.source()))
    });
    server.reply(Reply::ok());
    api.renew_lease(renewal()).await.unwrap();
    server.reply(Reply::json(404, "{}"));
    api.patch_status("n1", json!({})).await.unwrap_err();
    server.reply(Reply::Silence);
    api.node_uid("n1").await.unwrap_err();
    server.skip(3).await;
    let seen = seen.lock().unwrap();
    assert!(seen.iter().all(|request| request.host == server.address.to_string()), "{seen:?}");
    let seen: Vec<_> = seen.iter().map(|r| (r.method, r.resource, r.code(), r.error)).collect();
    assert_eq!(
        seen,
        [
            ("PATCH", "leases", "200".to_owned(), None),
            ("PATCH", "nodes/status", "404".to_owned(), Some(ApiErrorKind::NotFound)),
            ("GET", "nodes", "<error>".to_owned(), Some(ApiErrorKind::Timeout)),
        ]
    );
}

#[tokio::test]
async fn a_cancelled_call_does_not_affect_the_next_one() {
    let mut server = Server::plain().await;
    let api = server.api();
    server.reply(Reply::Silence);
    let call = tokio::spawn(api.renew_lease(renewal()));
    server.seen().await;
    call.abort();
    assert!(call.await.unwrap_err().is_cancelled());
    assert_eq!(renew(&mut server, &api).await.connection, 1);
}

#[tokio::test]
async fn events_are_created_and_patched() {
    let mut server = Server::plain().await;
    let api = server.api();
    let event = ClusterEvent {
        name: "web.1".into(),
        object: EventObject::Pod { namespace: "shop/../x".into(), name: "web".into(), uid: "u".into() },
        is_warning: false,
        reason: "ImagePullQueued",
        message: "waiting".into(),
        count: 1,
        first_unix_ms: 1_999,
        last_unix_ms: 61_000,
    };
    server.reply(Reply::json(201, "{}"));
    api.create_event("n1", event.clone()).await.unwrap();
    let seen = server.seen().await;
    assert_eq!(seen.line, "POST /api/v1/namespaces/shop%2F..%2Fx/events", "the name is one part of the path");
    let body = seen.json();
    assert_eq!(
        (&body["involvedObject"]["uid"], &body["firstTimestamp"], &body["lastTimestamp"], &body["count"]),
        (&json!("u"), &json!("1970-01-01T00:00:01Z"), &json!("1970-01-01T00:01:01Z"), &json!(1))
    );
    server.reply(Reply::ok());
    api.patch_event(ClusterEvent { count: 2, ..event.clone() }).await.unwrap();
    let seen = server.seen().await;
    assert_eq!(seen.line, "PATCH /api/v1/namespaces/shop%2F..%2Fx/events/web.1");
    assert_eq!(
        seen.json(),
        json!({"count": 2, "lastTimestamp": "1970-01-01T00:01:01Z", "message": "waiting"})
    );
    server.reply(Reply::json(201, "{}"));
    api.create_event("n1", ClusterEvent { object: EventObject::OwnNode, is_warning: true, ..event })
        .await
        .unwrap();
    let seen = server.seen().await;
    assert_eq!(seen.line, "POST /api/v1/namespaces/default/events");
    let body = seen.json();
    assert_eq!(
        body["involvedObject"],
        json!({"apiVersion": "v1", "kind": "Node", "name": "n1", "uid": "n1"})
    );
    assert_eq!((&body["type"], &body["source"]["host"]), (&json!("Warning"), &json!("n1")));
}

/// E14: API Priority and Fairness may queue a list or a watch for longer than a request of the heartbeats may take.
#[tokio::test]
async fn e14_the_head_of_a_watch_may_come_after_the_limit_of_a_request() {
    let timeout = Duration::from_millis(200);
    let server = Server::plain().await;
    let parts = ApiServerParts::new(ClusterSource::Explicit(server.source()));
    assert_eq!((parts.timeout, parts.head_timeout), (Duration::from_secs(10), Duration::from_secs(60)));
    let api = ApiServer::new(ApiServerParts { timeout, ..parts });
    let call = || Call::get("services", "/api/v1/services?watch=true".into(), bodies::ACCEPT_JSON);
    let late = async {
        tokio::time::sleep(3 * timeout).await;
        server.reply(Reply::ok());
    };
    let (opened, ()) = tokio::join!(api.open(call()), late);
    assert!(opened.is_ok(), "it waits for the head: {opened:?}");
    // This one gets no answer.
    assert_eq!(api.call(call()).await.unwrap_err().kind, ApiErrorKind::Timeout);
}
