//! Every route over HTTP, without a socket; and the server on one.

use axum::{
    body::Body,
    http::{HeaderMap, Method, Request, header},
};
use http_body_util::BodyExt as _;
use keelson_serve::{ANSWER_TIMEOUT, ViewError};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    time::Instant,
};
use tower::ServiceExt as _;

use super::*;
use crate::{
    explain::Source,
    inspect::{
        fake::{Fake, check},
        view::PRINTS,
    },
};

fn app(fake: &Fake) -> (Router, CancellationToken) {
    let stop = CancellationToken::new();
    let names = ["node-7".to_owned()].into();
    let own = Hosts { bound: "127.0.0.1:9441".parse().unwrap(), names, setting: "proxy.http_hosts" };
    (router(fake.clone(), PrintSlots::default(), own, stop.clone()), stop)
}

fn request(method: Method, path: &str, host: &str) -> Request<Body> {
    Request::builder().method(method).uri(path).header(header::HOST, host).body(Body::empty()).unwrap()
}

async fn send(fake: &Fake, request: Request<Body>) -> Response {
    app(fake).0.oneshot(request).await.unwrap()
}

async fn get(fake: &Fake, path: &str) -> (StatusCode, HeaderMap, String) {
    let response = send(fake, request(Method::GET, path, "localhost:9441")).await;
    let (status, headers) = (response.status(), response.headers().clone());
    let body = response.into_body().collect().await.unwrap().to_bytes();
    (status, headers, String::from_utf8(body.to_vec()).unwrap())
}

async fn get_json(fake: &Fake, path: &str) -> (StatusCode, Value) {
    let (status, headers, text) = get(fake, path).await;
    assert_eq!(headers[header::CONTENT_TYPE], "application/json", "{path}");
    (status, serde_json::from_str(&text).unwrap())
}

#[tokio::test]
async fn the_state_has_the_field_names_of_the_proto_file() {
    let (status, state) = get_json(&Fake::new(), "/debug/state").await;
    assert_eq!(status, StatusCode::OK);
    assert_eq!((&state["instance_id"], &state["rev"]), (&json!(u64::MAX.to_string()), &json!(7)));
    assert_eq!(state["families"][0]["elements"], json!({"slots": 7}));
    assert_eq!(state["families"][0]["last_sync_unix_ms"], json!(0));
}

#[tokio::test]
async fn explain_requests() {
    let fake = Fake::new();
    let (status, explanation) =
        get_json(&fake, "/debug/explain?to=%20%5Bfd00%3A96%3A%3Aa%5D%3A53%2Fudp&from=fd00::1").await;
    assert_eq!(status, StatusCode::OK);
    assert_eq!(explanation["ways"][0]["verdict"], "forwarded");
    get(&fake, "/debug/explain?to=10.96.0.10:80").await;
    let asked = fake.script().asked.clone();
    assert_eq!(asked[0].target.to_string(), "[fd00:96::a]:53/UDP");
    assert_eq!(asked[0].from, Source::Address("fd00::1".parse().unwrap()));
    assert_eq!((asked[1].target.to_string().as_str(), asked[1].from), ("10.96.0.10:80/TCP", Source::Any));
    for (wrong, says) in [
        ("", "missing field `to`"),
        ("to=web:80", "names are not resolved"),
        ("to=10.0.0.1:0", "ports are 1 to 65535"),
        ("to=10.0.0.1:80/GRE", "TCP, UDP or SCTP"),
        ("to=10.0.0.1:80&from=me", "pod, node or outside"),
        ("to=10.0.0.1:80&from=fd00::1", "families differ"),
        ("to=10.0.0.1:80&form=pod", "form"),
    ] {
        let (status, error) = get_json(&fake, &format!("/debug/explain?{wrong}")).await;
        assert_eq!(status, StatusCode::BAD_REQUEST, "{wrong}");
        assert!(error["error"].as_str().unwrap().contains(says), "{wrong}: {error}");
    }
    assert_eq!(fake.script().asked.len(), 2, "the proxy is not asked what makes no sense");
    fake.script().explanation = Err(ViewError::Unavailable("nothing is known yet".into()));
    let (status, error) = get_json(&fake, "/debug/explain?to=10.0.0.1:80").await;
    assert_eq!((status, error), (StatusCode::SERVICE_UNAVAILABLE, json!({"error": "nothing is known yet"})));
}

#[tokio::test]
async fn the_ruleset_as_text() {
    let fake = Fake::new();
    let (status, headers, text) = get(&fake, "/debug/print").await;
    assert_eq!((status, text.as_str()), (StatusCode::OK, "table ip keelson {\n}\n"));
    assert_eq!(headers[header::CONTENT_TYPE], "text/plain; charset=utf-8");
    fake.script().text = Ok(vec![Ok("table".into()), Err(ViewError::Unavailable("gone".into()))]);
    let response = send(&fake, request(Method::GET, "/debug/print", "localhost")).await;
    assert!(
        response.into_body().collect().await.is_err(),
        "a truncated ruleset does not end like a complete one"
    );
    fake.script().text = Err(ViewError::Busy("later".into()));
    assert_eq!(get(&fake, "/debug/print").await.0, StatusCode::SERVICE_UNAVAILABLE);
}

/// The limit applies to simultaneous prints, which use copies; the sync loop waits for none of them.
#[tokio::test]
async fn p16_concurrent_prints_are_bounded() {
    let fake = Fake::new();
    fake.script().endless = true;
    let (app, _stop) = app(&fake);
    let print = || app.clone().oneshot(request(Method::GET, "/debug/print", "localhost"));
    let mut held = Vec::new();
    for _ in 0..PRINTS {
        held.push(print().await.unwrap());
        assert_eq!(held.last().unwrap().status(), StatusCode::OK);
    }
    assert_eq!(print().await.unwrap().status(), StatusCode::SERVICE_UNAVAILABLE);
    held.pop();
    assert_eq!(print().await.unwrap().status(), StatusCode::OK);
}

#[tokio::test]
async fn probes_and_metrics() {
    let fake = Fake::new();
    for path in ["/livez", "/readyz", "/healthz"] {
        assert_eq!(get(&fake, path).await.2, "ok", "{path}");
    }
    assert_eq!(
        get(&fake, "/healthz?verbose").await.2,
        "[+]alive ok\n[+]link ok\n[+]kernel ok\nhealthz check passed\n"
    );
    fake.script().ready[1] = check("kernel", false, "no space left");
    for (path, status) in [("/livez", 200), ("/readyz", 500), ("/healthz", 500)] {
        assert_eq!(get(&fake, path).await.0.as_u16(), status, "{path}");
    }
    assert!(get(&fake, "/readyz").await.2.contains("[-]kernel failed: no space left\n"));
    let (status, headers, text) = get(&fake, "/metrics").await;
    assert_eq!((status, text.as_str()), (StatusCode::OK, "# TYPE up gauge\nup 1\n# EOF\n"));
    assert_eq!(headers[header::CONTENT_TYPE], OPEN_METRICS);
}

#[tokio::test(start_paused = true)]
async fn a_stuck_proxy_is_reported_without_delay() {
    let fake = Fake::new();
    fake.script().stuck = true;
    let start = Instant::now();
    for path in ["/debug/state", "/debug/explain?to=10.0.0.1:80", "/debug/print", "/metrics"] {
        let (status, _, text) = get(&fake, path).await;
        assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE, "{path}");
        assert!(text.contains("the proxy did not answer within 8 s"), "{path}: {text}");
    }
    assert_eq!(start.elapsed(), ANSWER_TIMEOUT * 4);
    let (status, _, text) = get(&fake, "/healthz").await;
    assert_eq!(status, StatusCode::INTERNAL_SERVER_ERROR);
    assert!(text.starts_with("[-]answers failed: the proxy did not answer"), "{text}");
}

const PATHS: &[&str] = &[
    "/",
    "/livez",
    "/readyz",
    "/healthz",
    "/metrics",
    "/debug/state",
    "/debug/explain?to=10.0.0.1:80",
    "/debug/print",
    "/debug/history",
    "/debug/events",
    "/assets/page.css",
];

#[tokio::test]
async fn every_path_checks_the_host() {
    let fake = Fake::new();
    for path in PATHS {
        let status = async |method, host| send(&fake, request(method, path, host)).await.status();
        assert_eq!(status(Method::HEAD, "localhost").await, StatusCode::OK, "{path}");
        assert_eq!(status(Method::POST, "localhost").await, StatusCode::METHOD_NOT_ALLOWED, "{path}");
        assert_eq!(status(Method::GET, "evil.example").await, StatusCode::MISDIRECTED_REQUEST, "{path}");
        assert_eq!(status(Method::GET, "NODE-7.:9441").await, StatusCode::OK, "e21: {path}");
    }
    let (status, error) = get_json(&fake, "/debug").await;
    assert_eq!(status, StatusCode::NOT_FOUND);
    assert!(error["error"].as_str().unwrap().contains("/debug/state "), "{error}");
}

#[tokio::test]
async fn the_page_loads_no_external_resources() {
    let fake = Fake::new();
    let (_, headers, html) = get(&fake, "/").await;
    let policy = headers[header::CONTENT_SECURITY_POLICY].to_str().unwrap();
    assert!(
        policy.starts_with("default-src 'none'; script-src 'self';") && !policy.contains("unsafe"),
        "{policy}"
    );
    let mut files: Vec<String> =
        html.split('"').filter(|text| text.starts_with("/assets/")).map(String::from).collect();
    let mut next = 0;
    while let Some(file) = files.get(next).cloned() {
        next += 1;
        let (status, headers, text) = get(&fake, &file).await;
        assert_eq!(status, StatusCode::OK, "{file}");
        assert!(!text.is_empty() && headers.contains_key(header::CONTENT_TYPE), "{file}");
        let elsewhere = text.replace("http://www.w3.org/2000/svg", "");
        assert!(!elsewhere.contains("http://") && !elsewhere.contains("https://"), "{file}");
        for markup in ["innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("] {
            assert!(!text.contains(markup), "{file} uses {markup}");
        }
        for name in text.split('"').filter_map(|text| text.strip_prefix("./")) {
            let name = format!("/assets/{name}");
            if !files.contains(&name) {
                files.push(name);
            }
        }
    }
    assert!(files.contains(&"/assets/explanation.js".into()), "{files:?}");
    assert!(!html.contains("://") && !html.contains("style=") && !html.contains("onclick"), "{html}");
    let (_, _, css) = get(&fake, "/assets/page.css").await;
    assert!(css.contains("--accent:") && css.contains(".way "), "the agent's look, and what is added");
}

/// The next event, without comments.
async fn event(body: &mut Body) -> Value {
    loop {
        let frame = body.frame().await.expect("an event").unwrap().into_data().unwrap();
        let text = String::from_utf8(frame.to_vec()).unwrap();
        if let Some(data) = text.lines().find_map(|line| line.strip_prefix("data: ")) {
            assert!(text.contains("event: state\n"), "{text}");
            return serde_json::from_str(data).unwrap();
        }
    }
}

#[tokio::test(start_paused = true)]
async fn events_are_sent_at_once_and_with_every_change() {
    let fake = Fake::new();
    let (app, stop) = app(&fake);
    let response = app.oneshot(request(Method::GET, "/debug/events", "localhost")).await.unwrap();
    assert_eq!(response.headers()[header::CONTENT_TYPE], "text/event-stream");
    let mut body = response.into_body();
    let start = Instant::now();
    assert_eq!(event(&mut body).await["state"]["rev"], 7);
    assert_eq!(start.elapsed().as_millis(), 0, "the first comes at once");
    for rev in 8..=50 {
        fake.advance(rev);
    }
    assert_eq!(event(&mut body).await["state"]["rev"], 50, "the newest and no backlog");
    fake.script().state = Err(ViewError::Unavailable("the kernel is asked".into()));
    fake.advance(51);
    let lost = event(&mut body).await;
    assert_eq!((&lost["state"], &lost["state_error"]), (&Value::Null, &json!("the kernel is asked")));
    stop.cancel();
    assert!(body.frame().await.is_none());
}

#[tokio::test]
async fn a_server_on_a_socket_stops_on_request() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let stop = CancellationToken::new();
    let shutdown = stop.clone().cancelled_owned();
    let server = tokio::spawn(serve_http(listener, Fake::new(), PrintSlots::default(), [].into(), shutdown));
    let mut stream = TcpStream::connect(address).await.unwrap();
    let head = format!("GET /debug/state HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n");
    stream.write_all(head.as_bytes()).await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    assert!(
        answer.starts_with("HTTP/1.1 200 OK\r\n") && answer.contains("\"link\": \"following\""),
        "{answer}"
    );
    // A client that reads events does not delay the shutdown.
    let mut reader = TcpStream::connect(address).await.unwrap();
    reader
        .write_all(format!("GET /debug/events HTTP/1.1\r\nHost: {address}\r\n\r\n").as_bytes())
        .await
        .unwrap();
    assert!(reader.read_u8().await.is_ok());
    stop.cancel();
    server.await.unwrap().unwrap();
    let mut rest = Vec::new();
    let _ = reader.read_to_end(&mut rest).await;
    assert!(TcpStream::connect(address).await.is_err());
}
