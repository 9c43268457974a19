//! Every route over HTTP, without a socket, and the server on a socket.

mod endpoints;

use std::time::Duration;

use axum::{
    body::Body,
    http::{HeaderMap, Method, Request, StatusCode, header},
    response::Response,
};
use futures_util::StreamExt as _;
use http_body_util::BodyExt as _;
use keelson_proto::node;
use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    time::Instant,
};
use tower::ServiceExt as _;

use super::*;
use crate::{
    ViewError,
    fake::{Fake, check},
};

const BOUND: &str = "127.0.0.1:9440";

fn app(fake: &Fake) -> (Router, CancellationToken) {
    let stop = CancellationToken::new();
    let names = ["node-7.example.com".to_owned()].into();
    let own = Hosts { bound: BOUND.parse().unwrap(), names, setting: "debug.http_hosts" };
    (router(fake.clone(), own, stop.clone()), stop)
}

fn request(method: Method, path: &str) -> Request<Body> {
    let request = Request::builder().method(method).uri(path).header(header::HOST, "localhost:9440");
    request.body(Body::empty()).unwrap()
}

fn request_to(host: &str, path: &str) -> Request<Body> {
    Request::get(path).header(header::HOST, host).body(Body::empty()).unwrap()
}

async fn send(fake: &Fake, request: Request<Body>) -> Response {
    app(fake).0.oneshot(request).await.unwrap()
}

async fn body(response: Response) -> String {
    String::from_utf8(response.into_body().collect().await.unwrap().to_bytes().to_vec()).unwrap()
}

async fn get(fake: &Fake, path: &str) -> (StatusCode, HeaderMap, String) {
    let response = send(fake, request(Method::GET, path)).await;
    (response.status(), response.headers().clone(), body(response).await)
}

async fn get_json(fake: &Fake, path: &str) -> (StatusCode, Value) {
    let (status, headers, text) = get(fake, path).await;
    assert_eq!(headers[header::CONTENT_TYPE], "application/json", "{path}");
    (status, serde_json::from_str(&text).unwrap())
}

/// The document of a request that succeeds.
async fn document(fake: &Fake, path: &str) -> Value {
    let (status, document) = get_json(fake, path).await;
    assert_eq!(status, StatusCode::OK, "{path}");
    document
}

/// The error of a request that is refused with this status; it says nothing else.
async fn refusal(fake: &Fake, path: &str, expected: StatusCode) -> String {
    let (status, error) = get_json(fake, path).await;
    assert_eq!(status, expected, "{path}");
    let text = error["error"].as_str().unwrap_or_default().to_owned();
    assert_eq!(error, json!({ "error": text }), "{path}");
    text
}

#[tokio::test]
async fn documents() {
    let fake = Fake::new();
    let version = document(&fake, "/version").await;
    let expected = json!({
        "version": "1.2.3", "node_name": "n1", "state_folder_id": "", "started_unix_ms": 0, "runtime_name": "",
        "runtime_version": "", "runtime_endpoint": "", "ready": true, "not_ready_reasons": []
    });
    assert_eq!(version, expected);

    let actors = document(&fake, "/debug/actors").await;
    assert_eq!(actors["actors"][0]["name"], "PullCoordinator");
    let storage = document(&fake, "/debug/storage").await;
    assert_eq!(storage["tables"], json!([{"name": "pulls", "records": 4}]));
    let config = document(&fake, "/debug/config").await;
    let setting = json!({"key": "pulls.when_full", "value": "wait", "origin": "default", "live": true});
    assert_eq!(config, json!({"settings": [setting], "feature_gates": []}));
}

#[tokio::test]
async fn one_actor_and_an_unknown_one() {
    let fake = Fake::new();
    let actor = document(&fake, "/debug/actors/PullCoordinator").await;
    let expected = json!({
        "name": "PullCoordinator", "status": "running", "summary": "", "mailbox_depth": 0, "mailbox_capacity": 64,
        "restarts": 0, "started_unix_ms": 0, "last_error": "", "last_error_unix_ms": 0, "messages": [],
        "events": [{"unix_ms": 5, "text": "started"}], "state": {"limit": 3}
    });
    assert_eq!(actor, expected);
    assert_eq!(
        refusal(&fake, "/debug/actors/no%20such", StatusCode::NOT_FOUND).await,
        r#"actor "no such" does not exist; the actors are: PullCoordinator, RuntimeClient"#
    );
    assert_eq!(get(&fake, "/debug/actors/%FF").await.0, StatusCode::BAD_REQUEST);
}

#[tokio::test]
async fn pulls_and_their_query() {
    let fake = Fake::new();
    let pulls = document(&fake, "/debug/pulls").await;
    let pull = json!({
        "id": 7, "image": "r.example/a:1", "registry": "r.example", "runtime_handler": "", "state": "running",
        "position": 0, "callers": 2, "attempts": 1, "with_credentials": false, "pod": "", "requested_unix_ms": 1000,
        "started_unix_ms": 2000, "finished_unix_ms": 0, "error": "", "resumed": false,
        "reason": "", "queue_wait_ms": 0, "pull_time_ms": 0,
        "progress": {"bytes_done": 1, "bytes_total": 2, "layers_done": 0, "layers_total": 0, "bytes_per_second": 0,
                     "idle_ms": 0, "phase": "downloading"}
    });
    let limit = json!({
        "max_parallel_image_pulls": 3, "configured": 3, "overridden": false, "when_full": "wait",
        "enforced_by": "agent", "enforce_note": "", "per_registry": 0
    });
    let expected = json!({
        "limit": limit, "running": 1, "queued": 0, "callers": 0, "oldest_wait_ms": 0, "pulls": [pull],
        "finished": [], "runtime_health": "up", "runtime_error": "", "passed_through": 0, "retained": 0,
        "retained_bytes": 0
    });
    assert_eq!(pulls, expected);

    assert_eq!(get(&fake, "/debug/pulls?max_queued=10000").await.0, StatusCode::OK);
    assert_eq!(fake.script().asked, [100, 10_000]);
    for wrong in ["max_queued=10001", "max_queued=-1", "max_queued=x", "max_queued=4294967296", "max_queud=5"]
    {
        let error = refusal(&fake, &format!("/debug/pulls?{wrong}"), StatusCode::BAD_REQUEST).await;
        assert!(error.contains("max_que"), "{wrong}: {error}");
    }
    assert_eq!(fake.script().asked.len(), 2, "invalid requests do not reach the agent");
}

#[tokio::test]
async fn heartbeats() {
    let fake = Fake::new();
    let node = document(&fake, "/debug/node").await;
    let lease = json!({
        "name": "n1", "holder": "", "state": "healthy", "reason": "", "failing_since_unix_ms": 0, "duration_seconds": 0,
        "transitions": 0, "renewed_unix_ms": 0, "age_ms": 4, "renewals": 0, "contention": ""
    });
    let reported = json!({
        "state": "healthy", "reason": "", "failing_since_unix_ms": 0, "reported_unix_ms": 0, "age_ms": 0,
        "next_report_in_ms": 0, "reports": 2, "computations": 0,
        "on_change_only": false
    });
    let ready = json!({
        "type": "Ready", "status": "True", "reason": "KubeletReady", "message": "healthy",
        "last_transition_unix_ms": 1000, "source": "agent", "contested": false
    });
    let certificate = json!({
        "kind": "client_certificate", "file": "/pki/client.pem", "user": "system:node:n1", "bound_node": "",
        "not_before_unix_ms": 0, "expires_unix_ms": 9000, "state": "healthy"
    });
    let expected = json!({
        "state": "healthy", "reason": "", "failing_since_unix_ms": 0, "role": "node", "node_name": "n1",
        "server": "https://192.0.2.1:6443", "lease": lease, "status": reported, "conditions": [ready],
        "credentials": [certificate], "credential_warnings": []
    });
    assert_eq!(node, expected);

    fake.script().heartbeats =
        Ok(node::Heartbeats { state: "disabled".into(), reason: "no server".into(), ..Default::default() });
    let off = document(&fake, "/debug/node").await;
    assert_eq!(
        [&off["state"], &off["lease"], &off["conditions"]],
        [&json!("disabled"), &Value::Null, &json!([])]
    );
    fake.script().heartbeats = Err(ViewError::Unavailable("restarting".into()));
    assert_eq!(refusal(&fake, "/debug/node", StatusCode::SERVICE_UNAVAILABLE).await, "restarting");
}

#[tokio::test]
async fn errors_of_the_agent() {
    let fake = Fake::new();
    for (error, status) in [
        (ViewError::Busy("full".into()), StatusCode::SERVICE_UNAVAILABLE),
        (ViewError::Unavailable("restarting".into()), StatusCode::SERVICE_UNAVAILABLE),
        (ViewError::Invalid("no".into()), StatusCode::BAD_REQUEST),
    ] {
        fake.script().pulls = Err(error.clone());
        let response = send(&fake, request(Method::GET, "/debug/pulls")).await;
        assert_eq!(response.status(), status, "{error:?}");
        let retry = response.headers().contains_key(header::RETRY_AFTER);
        assert_eq!(retry, status == StatusCode::SERVICE_UNAVAILABLE);
        let document: Value = serde_json::from_str(&body(response).await).unwrap();
        assert_eq!(document["error"], error.to_string());
    }
}

#[tokio::test(start_paused = true)]
async fn a_stuck_agent_is_reported_after_a_timeout() {
    let fake = Fake::new();
    fake.script().stuck = true;
    let start = Instant::now();
    for path in [
        "/version",
        "/metrics",
        "/debug/actors",
        "/debug/actors/PullCoordinator",
        "/debug/pulls",
        "/debug/node",
        "/debug/endpoints",
        "/debug/endpoints/shop/web",
    ] {
        let (status, _, text) = get(&fake, path).await;
        assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE, "{path}");
        assert!(text.contains("did not answer within 8 s"), "{path}: {text}");
    }
    assert_eq!(start.elapsed(), crate::ANSWER_TIMEOUT * 8);
    let (status, _, text) = get(&fake, "/livez").await;
    assert_eq!(status, StatusCode::INTERNAL_SERVER_ERROR);
    assert!(text.starts_with("[-]answers failed: the agent did not answer"), "{text}");
}

#[tokio::test]
async fn probes() {
    let fake = Fake::new();
    for path in ["/livez", "/readyz", "/readyz?x=verbose"] {
        let (status, headers, text) = get(&fake, path).await;
        assert_eq!((status, text.as_str()), (StatusCode::OK, "ok"), "{path}");
        assert_eq!(headers[header::CONTENT_TYPE], "text/plain; charset=utf-8");
    }
    for path in ["/readyz?verbose", "/readyz?verbose=true", "/readyz?a=b&verbose"] {
        assert_eq!(get(&fake, path).await.2, "[+]store ok\n[+]runtime ok\nreadyz check passed\n", "{path}");
    }
    fake.script().ready[1] = check("runtime", false, "gone");
    let (status, _, text) = get(&fake, "/readyz").await;
    assert_eq!(status, StatusCode::INTERNAL_SERVER_ERROR);
    assert_eq!(text, "[+]store ok\n[-]runtime failed: gone\nreadyz check failed\n");
    assert_eq!(get(&fake, "/livez").await.0, StatusCode::OK, "not ready is no reason to be restarted");
    fake.script().live[0] = check("actors", false, "PullCoordinator keeps failing");
    assert_eq!(get(&fake, "/livez").await.0, StatusCode::INTERNAL_SERVER_ERROR);
}

#[tokio::test]
async fn metrics() {
    let (status, headers, text) = get(&Fake::new(), "/metrics").await;
    assert_eq!((status, text.as_str()), (StatusCode::OK, "# TYPE up gauge\nup 1\n# EOF\n"));
    assert_eq!(headers[header::CONTENT_TYPE], "application/openmetrics-text; version=1.0.0; charset=utf-8");
}

#[tokio::test]
async fn the_history_is_one_line_of_json() {
    let (status, headers, text) = get(&Fake::new(), "/debug/history").await;
    assert_eq!(status, StatusCode::OK);
    assert_eq!(headers[header::CONTENT_TYPE], "application/json");
    let expected = r#"{"interval_ms":10000,"at_unix_ms":[7],"series":[{"name":"queued","title":"Queued pulls","unit":"count","values":[3.0]}]}"#;
    assert_eq!(text.trim_end(), expected);
}

#[tokio::test]
async fn the_page_loads_no_external_resource() {
    let fake = Fake::new();
    let (status, headers, html) = get(&fake, "/").await;
    assert_eq!(status, StatusCode::OK);
    assert_eq!(headers[header::CONTENT_TYPE], "text/html; charset=utf-8");
    let policy = headers[header::CONTENT_SECURITY_POLICY].to_str().unwrap();
    assert!(policy.starts_with("default-src 'none'; script-src 'self';"), "{policy}");
    assert!(!policy.contains("unsafe"), "{policy}");
    assert_eq!(headers[header::X_CONTENT_TYPE_OPTIONS], "nosniff");
    // Every file that it refers to is served by this server.
    let names = html.split(['"', '\'']).filter(|text| text.starts_with("/assets/"));
    let mut files: Vec<String> = names.map(String::from).collect();
    let mut next = 0;
    while let Some(file) = files.get(next).cloned() {
        next += 1;
        let (_, _, text) = get(&fake, &file).await;
        for name in text.split('"').filter_map(|text| text.strip_prefix("./")) {
            let name = format!("/assets/{name}");
            if !files.contains(&name) {
                files.push(name);
            }
        }
    }
    assert!(files.contains(&"/assets/explanation.js".into()) && files.len() >= 8, "{files:?}");
    for file in &files {
        let (status, headers, text) = get(&fake, file).await;
        assert_eq!(status, StatusCode::OK, "{file}");
        assert!(!text.is_empty() && headers.contains_key(header::CONTENT_TYPE), "{file}");
        let elsewhere = text.replace("http://www.w3.org/2000/svg", "");
        assert!(!elsewhere.contains("http://") && !elsewhere.contains("https://"), "{file}");
        for markup in ["innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("] {
            assert!(!text.contains(markup), "{file} uses {markup}");
        }
    }
    assert!(!html.contains("://") && !html.contains("style=") && !html.contains("onclick"), "{html}");
}

const PATHS: &[&str] = &[
    "/",
    "/livez",
    "/readyz",
    "/metrics",
    "/version",
    "/debug/actors",
    "/debug/actors/PullCoordinator",
    "/debug/pulls",
    "/debug/node",
    "/debug/endpoints",
    "/debug/endpoints/shop/web",
    "/debug/storage",
    "/debug/config",
    "/debug/history",
    "/debug/events",
    "/assets/page.css",
];

#[tokio::test]
async fn only_get_and_head() {
    let fake = Fake::new();
    for path in PATHS {
        for method in
            [Method::POST, Method::PUT, Method::DELETE, Method::PATCH, Method::OPTIONS, Method::TRACE]
        {
            let response = send(&fake, request(method.clone(), path)).await;
            assert_eq!(response.status(), StatusCode::METHOD_NOT_ALLOWED, "{method} {path}");
            assert_eq!(response.headers()[header::ALLOW], "GET, HEAD");
        }
        let response = send(&fake, request(Method::HEAD, path)).await;
        assert_eq!(response.status(), StatusCode::OK, "HEAD {path}");
        assert_eq!(body(response).await, "", "HEAD {path}");
    }
}

#[tokio::test]
async fn unknown_paths_name_the_known_ones() {
    let fake = Fake::new();
    for path in ["/debug", "/debug/", "/debug/actors/a/b", "/../etc/passwd", "/favicon.ico"] {
        let error = refusal(&fake, path, StatusCode::NOT_FOUND).await;
        assert!(error.contains("/debug/pulls /debug/node "), "{error}");
    }
}

#[tokio::test]
async fn other_hosts_are_refused_on_every_path() {
    let fake = Fake::new();
    for path in PATHS {
        let evil = send(&fake, request_to("evil.example:9440", path)).await;
        assert_eq!(evil.status(), StatusCode::MISDIRECTED_REQUEST, "{path}");
    }
    // E21: a name in the settings is served with any port, and the refusal names the setting.
    for (host, expected) in [
        ("Node-7.Example.com:9440", StatusCode::OK),
        ("node-7.example.com", StatusCode::OK),
        ("node-8.example.com", StatusCode::MISDIRECTED_REQUEST),
    ] {
        let response = send(&fake, request_to(host, "/metrics")).await;
        assert_eq!(response.status(), expected, "e21: {host}");
        let text = body(response).await;
        let names_setting = text.contains("add the host to debug.http_hosts");
        assert_eq!(names_setting, expected != StatusCode::OK, "e21: {text}");
    }
    let get = || Request::get("/livez");
    let elsewhere = Request::get("http://evil.example/livez");
    for (case, request, expected) in [
        ("HTTP/1.1 without a host", get(), StatusCode::BAD_REQUEST),
        ("HTTP/1.0", get().version(axum::http::Version::HTTP_10), StatusCode::OK),
        ("garbage", get().header(header::HOST, "a b/c"), StatusCode::BAD_REQUEST),
        (
            "two hosts",
            get().header(header::HOST, "localhost").header(header::HOST, "evil.example"),
            StatusCode::MISDIRECTED_REQUEST,
        ),
        ("absolute", elsewhere.header(header::HOST, "localhost"), StatusCode::MISDIRECTED_REQUEST),
        ("the bound address", get().header(header::HOST, BOUND), StatusCode::OK),
    ] {
        let response = send(&fake, request.body(Body::empty()).unwrap()).await;
        assert_eq!(response.status(), expected, "{case}");
    }
}

/// The events of a stream, each as its document.
struct Events(axum::body::BodyDataStream);

impl Events {
    async fn open(app: &Router) -> Self {
        let response = app.clone().oneshot(request(Method::GET, "/debug/events")).await.unwrap();
        assert_eq!(response.status(), StatusCode::OK);
        assert_eq!(response.headers()[header::CONTENT_TYPE], "text/event-stream");
        Self(response.into_body().into_data_stream())
    }

    /// The next document of the kind `state`; `None` at the end.
    async fn next(&mut self) -> Option<Value> {
        loop {
            let (kind, document) = self.any().await?;
            if kind == "state" {
                return Some(document);
            }
        }
    }

    /// The next document with its kind; `None` at the end. Comments are skipped.
    async fn any(&mut self) -> Option<(String, Value)> {
        loop {
            let chunk = self.0.next().await?.unwrap();
            let text = String::from_utf8(chunk.to_vec()).unwrap();
            if text.starts_with(':') {
                continue;
            }
            assert!(text.starts_with("event: ") && text.ends_with("\n\n"), "{text}");
            let field = |name: &str| text.lines().find_map(|line| line.strip_prefix(name)).unwrap();
            return Some((field("event: ").to_owned(), serde_json::from_str(field("data: ")).unwrap()));
        }
    }
}

#[tokio::test(start_paused = true)]
async fn events_are_coalesced_and_end_with_the_agent() {
    let fake = Fake::new();
    let (app, stop) = app(&fake);
    let mut events = Events::open(&app).await;
    let start = Instant::now();
    let first = events.next().await.unwrap();
    assert_eq!(start.elapsed(), Duration::ZERO, "the first comes at once");
    assert_eq!(first["pulls"]["running"], 1);
    assert_eq!(first["version"]["node_name"], "n1");
    assert_eq!(first["actors"][0]["name"], "PullCoordinator");
    assert_eq!(first["heartbeats"]["lease"]["age_ms"], 4);
    assert_eq!(first["heartbeats_error"], "");
    assert!(first["now_unix_ms"].as_i64().unwrap() > 0);
    for running in 2..=1000 {
        fake.run(running);
    }
    assert_eq!(events.next().await.unwrap()["pulls"]["running"], 1000, "the newest state");
    assert_eq!(start.elapsed(), Duration::from_millis(500));
    assert_eq!(fake.script().asked, [100, 100], "a thousand changes are one question");
    events.next().await.unwrap();
    assert_eq!(start.elapsed(), Duration::from_millis(5500), "a quiet agent still sends refreshes");
    stop.cancel();
    assert_eq!(events.next().await, None);
}

#[tokio::test(start_paused = true)]
async fn events_go_on_while_the_pulls_cannot_be_had() {
    let fake = Fake::new();
    fake.script().pulls = Err(ViewError::Unavailable("PullCoordinator is restarting".into()));
    let (app, _stop) = app(&fake);
    let mut events = Events::open(&app).await;
    let without = events.next().await.unwrap();
    assert_eq!(without["pulls"], Value::Null);
    assert_eq!(without["pulls_error"], "PullCoordinator is restarting");
    assert_eq!(without["actors"][0]["status"], "running");
    fake.script().pulls = Ok(crate::fake::pulls());
    assert_eq!(events.next().await.unwrap()["pulls"]["running"], 1, "repeated without a change");
}

#[tokio::test(start_paused = true)]
async fn events_go_on_while_the_heartbeats_cannot_be_had() {
    let fake = Fake::new();
    fake.script().heartbeats = Err(ViewError::Unavailable("StatusReporter is restarting".into()));
    let (app, _stop) = app(&fake);
    let mut events = Events::open(&app).await;
    let without = events.next().await.unwrap();
    assert_eq!(without["heartbeats"], Value::Null);
    assert_eq!(without["heartbeats_error"], "StatusReporter is restarting");
    assert_eq!(without["pulls"]["running"], 1);
    fake.script().heartbeats = Ok(crate::fake::heartbeats());
    assert_eq!(events.next().await.unwrap()["heartbeats"]["state"], "healthy", "repeated without a change");
}

#[tokio::test(start_paused = true)]
async fn event_streams_are_bounded_and_give_their_place_back() {
    let fake = Fake::new();
    let (app, _stop) = app(&fake);
    let mut streams = Vec::new();
    for _ in 0..64 {
        streams.push(Events::open(&app).await);
    }
    let refused = app.clone().oneshot(request(Method::GET, "/debug/events")).await.unwrap();
    assert_eq!(refused.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(app.clone().oneshot(request(Method::GET, "/livez")).await.unwrap().status(), StatusCode::OK);
    streams.pop();
    streams.push(Events::open(&app).await);
    drop(streams);
    assert_eq!(fake.watchers(), 0);
}

#[tokio::test]
async fn the_server_serves_and_stops() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let server = tokio::spawn(serve_http(listener, Fake::new(), [].into(), async {
        stopped.await.unwrap_or_default()
    }));
    let mut events = tokio::net::TcpStream::connect(address).await.unwrap();
    let request = format!("GET /debug/events HTTP/1.1\r\nHost: {address}\r\n\r\n");
    events.write_all(request.as_bytes()).await.unwrap();
    let mut first = [0; 15];
    events.read_exact(&mut first).await.unwrap();
    assert_eq!(&first, b"HTTP/1.1 200 OK");
    stop.send(()).unwrap();
    let mut rest = Vec::new();
    events.read_to_end(&mut rest).await.unwrap();
    assert!(rest.ends_with(b"0\r\n\r\n"), "the stream ends between events");
    server.await.unwrap().unwrap();
    assert!(tokio::net::TcpStream::connect(address).await.is_err(), "the listener is closed");
}
