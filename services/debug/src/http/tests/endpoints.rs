//! `/debug/endpoints`, single Services, and the events of the page.

use keelson_proto::endpoints as pb;

use super::*;
use crate::fake::{endpoints, without_endpoints};

fn names(document: &Value) -> Vec<&str> {
    document["list"].as_array().unwrap().iter().map(|service| service["name"].as_str().unwrap()).collect()
}

#[tokio::test]
async fn the_state_as_json() {
    let state = document(&Fake::new(), "/debug/endpoints").await;
    let watcher = json!({
        "id": 1, "peer": "pid 12", "listener": "", "api": "Next", "since_unix_ms": 0, "rev": 7, "behind": 0, "items": 0,
        "bytes": 0
    });
    let backend = json!({
        "name": "nft", "pid": 13, "version": "", "debug": "", "http": "http://127.0.0.1:9441/", "instance_id": "0",
        "rev": 5, "state": "failing", "reason": "no nft", "last_sync_unix_ms": 0, "service_ports": 0, "repaired": 0,
        "seen_unix_ms": 0, "silent": false, "behind": 2
    });
    let line = |namespace: &str, name: &str, port: &str| {
        json!({
            "namespace": namespace, "name": name, "type": "ClusterIP", "cluster_ips": ["10.96.0.10"], "ports": [port],
            "ready": 2, "local_ready": 1, "selected": 2, "rev": 7
        })
    };
    let expected = json!({
        "state": "synced", "reason": "", "since_unix_ms": 1000, "instance_id": "18446744073709551615", "rev": 7,
        "published_unix_ms": 0, "source": "files", "source_place": "/etc/keelson/manifests", "sources": [],
        "faults": [], "listen": [], "node": null, "services": 3, "endpoints": 6, "events": 0, "revisions": 0,
        "watchers": [watcher], "backends": [backend], "durable": true, "matching": 3,
        "list": [line("kube-system", "dns", "53/UDP"), line("shop", "cart", "80/TCP"),
                 line("shop", "web", "http 80:30080/TCP")],
    });
    assert_eq!(state, expected);
}

#[tokio::test]
async fn parts_of_the_list() {
    let fake = Fake::new();
    for (query, listed, matching) in [
        ("?max=1", &["dns"][..], 3),
        ("?max=0", &[], 3),
        ("?namespace=shop", &["cart", "web"], 2),
        ("?namespace=shop&max=1", &["cart"], 2),
        ("?namespace=nobody", &[], 0),
        ("?filter=SHOP/w", &["web"], 1),
        ("?filter=tcp&max=1", &["cart"], 2),
        ("?filter=cart&namespace=kube-system", &[], 0),
        ("?filter=", &["dns", "cart", "web"], 3),
    ] {
        let state = document(&fake, &format!("/debug/endpoints{query}")).await;
        assert_eq!(names(&state), listed, "{query}");
        assert_eq!((&state["matching"], &state["services"]), (&json!(matching), &json!(3)), "{query}");
    }
    // Only a search examines more Services than it shows.
    let asked: Vec<u32> = fake.script().asked_endpoints.iter().map(|(_, max)| *max).collect();
    assert_eq!(asked, [1, 0, 100_000, 100_000, 100_000, 100_000, 100_000, 100_000, 1_000]);
}

#[tokio::test]
async fn invalid_queries_are_not_passed_on() {
    let fake = Fake::new();
    let long = format!("filter={}", "x".repeat(257));
    for (wrong, part) in [
        ("max=100001", "the maximum is 100000"),
        ("filter=a&max=100001", "the maximum is 100000"),
        ("max=-1", "max"),
        ("max=x", "max"),
        ("namespace=a%2Fb", "is not a valid namespace"),
        ("namespace=%3Cb%3E", "is not a valid namespace"),
        ("namespaces=a", "namespaces"),
        (&long, "longer than 256 bytes"),
    ] {
        let error = refusal(&fake, &format!("/debug/endpoints?{wrong}"), StatusCode::BAD_REQUEST).await;
        assert!(error.contains(part), "{wrong}: {error}");
    }
    assert_eq!(fake.script().asked_endpoints, []);
}

#[tokio::test]
async fn one_service_explained() {
    let service = document(&Fake::new(), "/debug/endpoints/shop/web").await;
    assert_eq!(
        [&service["name"], &service["served"], &service["rev"]],
        [&json!("web"), &json!(true), &json!(7)]
    );
    let family = &service["ports"][0]["families"][0];
    assert_eq!((&family["family"], &family["topology"]), (&json!("IPv4"), &json!("none")));
    let endpoint = json!({
        "address": "10.1.0.1", "port": 8080, "pod": "", "node": "", "zone": "", "slice": "", "ready": true,
        "serving": false, "terminating": false, "local": false, "cluster_set": true, "local_set": false,
        "reason": "it is ready"
    });
    assert_eq!(family["endpoints"], json!([endpoint]));
}

#[tokio::test]
async fn an_unknown_service() {
    let fake = Fake::new();
    assert_eq!(
        refusal(&fake, "/debug/endpoints/shop/nothing", StatusCode::NOT_FOUND).await,
        "neither a Service shop/nothing nor an EndpointSlice of it exists; 3 are known"
    );
    for wrong in ["a%20b/web", "shop/%3Cscript%3E", "shop/a%2Fb", "shop/%FF", "%FF/web"] {
        let error = refusal(&fake, &format!("/debug/endpoints/{wrong}"), StatusCode::BAD_REQUEST).await;
        assert!(!error.is_empty(), "{wrong}");
    }
    for path in ["/debug/endpoints/", "/debug/endpoints/shop", "/debug/endpoints/shop/web/x"] {
        let error = refusal(&fake, path, StatusCode::NOT_FOUND).await;
        assert!(error.contains("/debug/endpoints/NAMESPACE/NAME"), "{path}: {error}");
    }
}

#[tokio::test]
async fn endpoints_disabled_or_not_ready() {
    let fake = Fake::new();
    fake.script().endpoints = Ok(without_endpoints("disabled", "endpoints.source is off"));
    let state = document(&fake, "/debug/endpoints").await;
    assert_eq!((&state["state"], &state["list"]), (&json!("disabled"), &json!([])));
    let error = refusal(&fake, "/debug/endpoints/a/b", StatusCode::NOT_FOUND).await;
    assert_eq!(error, "service endpoints are disabled: endpoints.source is off");

    fake.script().endpoints = Ok(without_endpoints("pending", "no list yet"));
    let response = send(&fake, request(Method::GET, "/debug/endpoints/a/b")).await;
    assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert!(response.headers().contains_key(header::RETRY_AFTER));
}

#[tokio::test(start_paused = true)]
async fn endpoints_have_an_event_of_their_own_when_they_changed() {
    let fake = Fake::new();
    let (app, _stop) = app(&fake);
    let mut events = Events::open(&app).await;
    let (kind, _) = events.any().await.unwrap();
    assert_eq!(kind, "state");
    let (kind, first) = events.any().await.unwrap();
    assert_eq!(kind, "endpoints");
    assert_eq!((&first["endpoints"]["rev"], &first["endpoints_error"]), (&json!(7), &json!("")));
    assert_eq!(first["endpoints"]["list"], json!([]), "the event has the status only");
    // Other parts change: no event `endpoints` is sent.
    fake.run(2);
    assert_eq!(events.any().await.unwrap().0, "state");
    // Refreshed without a change.
    assert_eq!(events.any().await.unwrap().0, "state");

    let mut stale = endpoints();
    (stale.state, stale.reason) = ("stale".into(), "the server is away".into());
    stale.watchers = (0..250).map(|id| pb::Watcher { id, ..Default::default() }).collect();
    stale.faults = vec![pb::FileFault::default(); 101];
    fake.script().endpoints = Ok(stale);
    fake.bump();
    assert_eq!(events.any().await.unwrap().0, "state");
    let (kind, changed) = events.any().await.unwrap();
    assert_eq!((kind.as_str(), &changed["endpoints"]["state"]), ("endpoints", &json!("stale")));
    assert_eq!((&changed["watchers"], &changed["faults"]), (&json!(250), &json!(101)));
    let length = |name: &str| changed["endpoints"][name].as_array().unwrap().len();
    assert_eq!((length("watchers"), length("faults")), (100, 100), "a page shows no more");
}

#[tokio::test(start_paused = true)]
async fn events_go_on_while_the_endpoints_cannot_be_had() {
    let fake = Fake::new();
    fake.script().endpoints = Err(ViewError::Unavailable("EndpointPublisher is restarting".into()));
    let (app, _stop) = app(&fake);
    let mut events = Events::open(&app).await;
    assert_eq!(events.any().await.unwrap().1["pulls"]["running"], 1);
    let (_, without) = events.any().await.unwrap();
    assert_eq!(without["endpoints"], Value::Null);
    assert_eq!(without["endpoints_error"], "EndpointPublisher is restarting");
    fake.script().endpoints = Ok(endpoints());
    assert_eq!(events.any().await.unwrap().0, "state", "repeated without a change");
    let (kind, with) = events.any().await.unwrap();
    assert_eq!((kind.as_str(), &with["endpoints"]["state"]), ("endpoints", &json!("synced")));
}
