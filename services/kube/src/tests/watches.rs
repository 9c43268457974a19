//! The watches with a scripted server.

use std::{
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use k8s_openapi::api::core::v1::Node;
use keelson_actor_system::cluster::JobHealth;
use tokio::{
    sync::{mpsc, watch},
    task::JoinSet,
};

use super::script::{Feed, Reply, Server, counting, pass};
use crate::{ApiServer, KnownPods, PodEvent, PodRef, watch_node, watch_pods};

struct Pods {
    events: mpsc::UnboundedReceiver<PodEvent>,
    health: watch::Receiver<JobHealth>,
    /// Aborted on drop.
    _task: JoinSet<()>,
}

impl Pods {
    fn of(server: &Server) -> Self {
        Self::with(server.api(), KnownPods::default())
    }

    fn with(api: ApiServer, known: KnownPods) -> Self {
        let (tell, events) = mpsc::unbounded_channel();
        let (sender, health) = watch::channel(JobHealth::Pending);
        let task = JoinSet::from_iter([async move {
            watch_pods(&api, "n1", &sender, known, move |event| drop(tell.send(event))).await;
        }]);
        Self { events, health, _task: task }
    }

    async fn expects(&mut self, expected: &[PodEvent]) {
        for event in expected {
            assert_eq!(self.events.recv().await.as_ref(), Some(event));
        }
    }

    async fn well(&mut self) {
        self.health.wait_for(|health| *health == JobHealth::Healthy).await.unwrap();
    }

    async fn failing(&mut self, of: &str) {
        let failing =
            |health: &JobHealth| matches!(health, JobHealth::Failing { reason, .. } if reason.contains(of));
        self.health.wait_for(failing).await.unwrap();
    }
}

fn pod(uid: &str, version: u32, terminating: bool) -> String {
    let deleted = if terminating { r#","deletionTimestamp":"2026-01-01T00:00:00Z""# } else { "" };
    format!(
        r#"{{"kind":"PartialObjectMetadata","metadata":{{"uid":"{uid}","namespace":"ns","name":"p-{uid}","resourceVersion":"{version}"{deleted}}}}}"#
    )
}

fn named(uid: &str) -> PodRef {
    PodRef { uid: uid.into(), namespace: "ns".into(), name: format!("p-{uid}") }
}

fn list(version: &str, pod: &str) -> Reply {
    Reply::json(200, format!(r#"{{"metadata":{{"resourceVersion":"{version}"}},"items":[{pod}]}}"#))
}

fn all_listed(feed: &Feed, version: u32) {
    let annotations = r#"{"k8s.io/initial-events-end":"true"}"#;
    feed.event(
        "BOOKMARK",
        &format!(r#"{{"metadata":{{"resourceVersion":"{version}","annotations":{annotations}}}}}"#),
    );
}

fn present(uid: &str) -> PodEvent {
    PodEvent::Present(named(uid))
}

fn terminating(uid: &str) -> PodEvent {
    PodEvent::Terminating(named(uid))
}

fn gone(uid: &str) -> PodEvent {
    PodEvent::Gone(named(uid))
}

/// A server, the stream of its first answer, and a watch.
async fn watched() -> (Server, Feed, Pods) {
    let server = Server::plain().await;
    let (feed, pods) = (server.begin(), Pods::of(&server));
    (server, feed, pods)
}

/// The pods of the node that have not ended.
const OF_NODE: &str = "spec.nodeName%3Dn1%2Cstatus.phase%21%3DSucceeded%2Cstatus.phase%21%3DFailed";

#[tokio::test]
async fn pods_are_listed_and_watched_in_one_request() {
    let (mut server, feed, mut pods) = watched().await;
    feed.event("ADDED", &pod("a", 3, false));
    feed.event("ADDED", &pod("b", 2, true));
    all_listed(&feed, 4);
    pods.expects(&[present("a"), terminating("b")]).await;
    pods.well().await;
    feed.event("MODIFIED", &pod("a", 5, false));
    feed.event("MODIFIED", &pod("a", 6, true));
    feed.event("DELETED", &pod("b", 7, true));
    pods.expects(&[terminating("a"), gone("b")]).await;
    let seen = server.seen().await;
    assert!(seen.line.starts_with("GET /api/v1/pods?watch=true&"), "{}", seen.line);
    assert_eq!(seen.query("fieldSelector"), Some(OF_NODE));
    assert_eq!(seen.query("sendInitialEvents"), Some("true"));
    assert_eq!(seen.query("resourceVersionMatch"), Some("NotOlderThan"));
    assert_eq!(seen.query("allowWatchBookmarks"), Some("true"));
    let seconds: u64 = seen.query("timeoutSeconds").unwrap().parse().unwrap();
    assert!((300..600).contains(&seconds), "{seconds}");
    assert!(seen.header("accept").starts_with("application/json;as=PartialObjectMetadata;"));
    server.nothing_more();
}

/// I9: a watch that is restarted, as after a panic, reports what happened to the pods in between.
#[tokio::test]
async fn i9_a_restarted_watch_reports_pods_deleted_meanwhile() {
    let server = Server::plain().await;
    let (feed, known) = (server.begin(), KnownPods::default());
    let mut pods = Pods::with(server.api(), known.clone());
    feed.event("ADDED", &pod("a", 1, false));
    feed.event("ADDED", &pod("b", 2, false));
    all_listed(&feed, 3);
    pods.expects(&[present("a"), present("b")]).await;
    drop(pods);
    let feed = server.begin();
    let mut pods = Pods::with(server.api(), known);
    feed.event("ADDED", &pod("b", 5, true));
    all_listed(&feed, 6);
    pods.expects(&[gone("a"), terminating("b")]).await;
}

#[tokio::test]
async fn without_streaming_lists_a_list_is_requested() {
    let refused = r#"{"kind":"Status","reason":"Invalid","message":"sendInitialEvents is forbidden"}"#;
    fall_back(async |server| server.reply(Reply::json(422, refused))).await;
}

/// The behaviour of kube-apiserver if its etcd does not report the progress of a watch.
#[tokio::test]
async fn without_streaming_lists_in_etcd_a_list_is_requested() {
    fall_back(async |server| {
        let feed = server.begin();
        feed.event(
            "ERROR",
            r#"{"kind":"Status","reason":"InternalError","code":500,"message":"feature disabled"}"#,
        );
    })
    .await;
}

async fn fall_back(refuse: impl AsyncFnOnce(&Server)) {
    let mut server = Server::plain().await;
    refuse(&server).await;
    server.reply(list("9", &pod("a", 3, false)));
    let feed = server.begin();
    let mut pods = Pods::of(&server);
    pods.expects(&[present("a")]).await;
    pods.well().await;
    feed.event("ADDED", &pod("b", 10, false));
    pods.expects(&[present("b")]).await;
    assert!(server.seen().await.query("sendInitialEvents").is_some());
    let list = server.seen().await;
    assert_eq!(list.line, format!("GET /api/v1/pods?fieldSelector={OF_NODE}&limit=500&resourceVersion=0"));
    assert!(list.header("accept").starts_with("application/json;as=PartialObjectMetadataList;"));
    let watch = server.seen().await;
    assert_eq!((watch.query("resourceVersion"), watch.query("sendInitialEvents")), (Some("9"), None));
    server.nothing_more();
}

#[tokio::test]
async fn a_watch_that_ends_resumes_from_the_last_bookmark_without_events() {
    let (mut server, feed, mut pods) = watched().await;
    feed.event("ADDED", &pod("a", 3, false));
    all_listed(&feed, 4);
    feed.event("BOOKMARK", r#"{"kind":"Pod","metadata":{"resourceVersion":"50"}}"#);
    pods.expects(&[present("a")]).await;
    server.seen().await;
    // The server ends the watch normally, as it does every few minutes.
    drop(feed);
    let feed = server.begin();
    assert_eq!(server.seen().await.query("resourceVersion"), Some("50"));
    feed.event("ADDED", &pod("b", 51, false));
    pods.expects(&[present("b")]).await;
    // Then it breaks.
    feed.cut();
    let feed = server.begin();
    assert_eq!(server.seen().await.query("resourceVersion"), Some("51"));
    feed.event("MODIFIED", &pod("a", 52, true));
    pods.expects(&[terminating("a")]).await;
    server.nothing_more();
}

#[tokio::test]
async fn after_a_410_vanished_pods_are_reported() {
    let (mut server, feed, mut pods) = watched().await;
    feed.event("ADDED", &pod("a", 3, false));
    feed.event("ADDED", &pod("b", 4, false));
    all_listed(&feed, 4);
    pods.expects(&[present("a"), present("b")]).await;
    server.seen().await;
    // In the stream.
    feed.event(
        "ERROR",
        r#"{"kind":"Status","code":410,"reason":"Expired","message":"too old resource version"}"#,
    );
    let feed = server.begin();
    let relist = server.seen().await;
    assert_eq!((relist.query("resourceVersion"), relist.query("sendInitialEvents")), (None, Some("true")));
    feed.event("ADDED", &pod("b", 4, false));
    all_listed(&feed, 60);
    pods.expects(&[gone("a")]).await;
    pods.well().await;
    drop(feed);
    // As the answer.
    server.reply(Reply::json(410, r#"{"kind":"Status","reason":"Gone","message":"too old"}"#));
    assert_eq!(server.seen().await.query("resourceVersion"), Some("60"));
    let feed = server.begin();
    assert_eq!(server.seen().await.query("resourceVersion"), None);
    all_listed(&feed, 70);
    pods.expects(&[gone("b")]).await;
}

#[tokio::test]
async fn an_incomplete_list_reports_nothing() {
    let (mut server, feed, mut pods) = watched().await;
    feed.event("ADDED", &pod("a", 3, false));
    all_listed(&feed, 4);
    pods.expects(&[present("a")]).await;
    server.seen().await;
    feed.event("ERROR", r#"{"code":410}"#);
    let feed = server.begin();
    server.seen().await;
    feed.event("ADDED", &pod("c", 9, false));
    drop(feed);
    // A streaming list that broke is replaced by a list.
    server.reply(list("10", &pod("a", 3, false)));
    let feed = server.begin();
    assert!(server.seen().await.query("watch").is_none());
    feed.event("ADDED", &pod("d", 11, false));
    pods.expects(&[present("d")]).await;
}

#[tokio::test]
async fn an_empty_list_with_null_items_is_read() {
    let mut server = Server::plain().await;
    server.reply(Reply::json(400, "{}"));
    server.reply(Reply::json(200, r#"{"kind":"List","metadata":{"resourceVersion":"9"},"items":null}"#));
    let feed = server.begin();
    let mut pods = Pods::of(&server);
    feed.event("ADDED", &pod("b", 10, false));
    pods.expects(&[present("b")]).await;
    pods.well().await;
    server.skip(3).await;
    server.nothing_more();
}

#[tokio::test]
async fn a_stuck_watch_is_left_after_the_longest_time_it_may_last() {
    let (mut server, feed, mut pods) = watched().await;
    all_listed(&feed, 4);
    pods.well().await;
    server.seen().await;
    pass(crate::watch::MAX_WATCH).await;
    assert_eq!(server.seen().await.query("resourceVersion"), Some("4"));
    feed.closed().await;
}

#[tokio::test]
async fn health_has_a_reason_and_a_time() {
    let mut server = Server::plain().await;
    server.reply(Reply::json(403, r#"{"kind":"Status","reason":"Forbidden","message":"pods is forbidden"}"#));
    let mut pods = Pods::of(&server);
    pods.failing("pods is forbidden (Forbidden)").await;
    let JobHealth::Failing { since_unix_ms: since, .. } = pods.health.borrow().clone() else { panic!() };
    server.reply(Reply::json(401, "{}"));
    pods.failing("HTTP 401").await;
    let JobHealth::Failing { since_unix_ms, .. } = pods.health.borrow().clone() else { panic!() };
    assert_eq!(since_unix_ms, since);
    let feed = server.begin();
    all_listed(&feed, 4);
    pods.well().await;
    server.skip(3).await;
    server.nothing_more();
}

#[tokio::test]
async fn e2_an_interrupted_wait_lasts_until_the_turn_of_the_agent() {
    let mut server = Server::plain().await;
    let api = server.api();
    let mut pods = Pods::with(api.clone(), KnownPods::default());
    for n in 0..7 {
        if n > 0 {
            pass(Duration::from_secs(61)).await;
        }
        let refusal = format!(r#"{{"kind":"Status","reason":"Forbidden","message":"refusal {n}"}}"#);
        server.reply(Reply::json(403, refusal));
        server.seen().await;
        pods.failing(&format!("refusal {n}")).await;
    }
    // By now it waits for 30 s at least.
    pass(Duration::from_secs(5)).await;
    server.nothing_more();
    api.wake_watches();
    tokio::task::yield_now().await;
    // Its own wait may last for 55 s more.
    pass(Duration::from_secs(42)).await;
    let feed = server.begin();
    all_listed(&feed, 5);
    pods.well().await;
}

#[tokio::test]
async fn invalid_watch_data_is_a_failure_that_is_retried() {
    let mut server = Server::plain().await;
    for garbage in ["<html>", r#"{"type":"ADDED","object":{}}"#] {
        let feed = server.begin();
        let mut pods = Pods::of(&server);
        feed.line(garbage);
        pods.failing("invalid response").await;
        feed.closed().await;
        let feed = server.begin();
        all_listed(&feed, 4);
        pods.well().await;
        server.seen().await;
        server.seen().await;
        drop(pods);
    }
}

#[tokio::test]
async fn a_watch_closed_at_once_with_nothing_seen_is_a_failure() {
    let (mut server, feed, mut pods) = watched().await;
    all_listed(&feed, 4);
    pods.well().await;
    drop(feed);
    drop(server.begin());
    pods.failing("closed within a second").await;
    let feed = server.begin();
    feed.event("ADDED", &pod("a", 5, false));
    pods.expects(&[present("a")]).await;
    pods.well().await;
    server.skip(3).await;
    server.nothing_more();
}

fn node(name: &str, version: u32) -> String {
    format!(
        r#"{{"kind":"Node","apiVersion":"v1","metadata":{{"name":"{name}","uid":"u","resourceVersion":"{version}",
        "annotations":{{"kubectl.kubernetes.io/last-applied-configuration":"x","mine":"y"}},
        "managedFields":[{{"manager":"m"}}]}},"spec":{{"podCIDR":"10.0.0.0/24"}}}}"#
    )
    .replace('\n', "")
}

type Nodes = mpsc::UnboundedReceiver<Option<Arc<Node>>>;

/// The watch of Node n1, which ends when the task is dropped.
fn nodes(api: ApiServer) -> (Nodes, watch::Receiver<JobHealth>, JoinSet<()>) {
    let (tell, nodes) = mpsc::unbounded_channel();
    let (sender, health) = watch::channel(JobHealth::Pending);
    let task = JoinSet::from_iter([async move {
        watch_node(&api, "n1", &sender, move |node| drop(tell.send(node))).await;
    }]);
    (nodes, health, task)
}

#[tokio::test]
async fn the_node_is_delivered_without_unused_fields() {
    let mut server = Server::plain().await;
    let feed = server.begin();
    let (mut nodes, mut health, _task) = nodes(server.api());
    all_listed(&feed, 4);
    assert_eq!(nodes.recv().await.unwrap(), None, "none yet");
    health.wait_for(|health| *health == JobHealth::Healthy).await.unwrap();
    feed.event("ADDED", &node("n1", 5));
    let delivered = nodes.recv().await.unwrap().unwrap();
    assert_eq!(delivered.spec.as_ref().unwrap().pod_cidr.as_deref(), Some("10.0.0.0/24"));
    assert_eq!(delivered.metadata.managed_fields, None);
    let annotations: Vec<_> = delivered.metadata.annotations.as_ref().unwrap().keys().collect();
    assert_eq!(annotations, ["mine"]);
    feed.event("MODIFIED", &node("n1", 5));
    feed.event("MODIFIED", &node("other", 6));
    feed.event("DELETED", &node("n1", 7));
    assert_eq!(nodes.recv().await.unwrap(), None, "neither the same again nor another");
    let seen = server.seen().await;
    assert!(seen.line.starts_with("GET /api/v1/nodes?watch=true&"), "{}", seen.line);
    assert_eq!(seen.query("fieldSelector"), Some("metadata.name%3Dn1"));
}

/// One object costs no more to list than to watch, and reveals a restored etcd at once.
#[tokio::test]
async fn e11_the_node_is_listed_again_after_an_interruption() {
    let (signals, count) = counting();
    let mut server = Server::plain().await;
    let (mut nodes, _health, _task) = nodes(server.api_with(&signals));
    let listed = async |server: &mut Server, feed: &Feed, node_version, version| {
        let seen = server.seen().await;
        assert_eq!((seen.query("resourceVersion"), seen.query("sendInitialEvents")), (None, Some("true")));
        feed.event("ADDED", &node("n1", node_version));
        all_listed(feed, version);
    };
    let feed = server.begin();
    listed(&mut server, &feed, 90, 100).await;
    assert!(nodes.recv().await.unwrap().is_some());
    drop(feed);
    let feed = server.begin();
    listed(&mut server, &feed, 90, 110).await;
    feed.event("MODIFIED", &node("n1", 111));
    assert!(nodes.recv().await.unwrap().is_some());
    assert_eq!(count.load(Ordering::SeqCst), 0);
    // The store has more revisions by now, but the Node is that of a backup.
    drop(feed);
    let feed = server.begin();
    listed(&mut server, &feed, 90, 200).await;
    let restored = nodes.recv().await.unwrap().unwrap();
    assert_eq!(restored.metadata.resource_version.as_deref(), Some("90"));
    assert_eq!(count.load(Ordering::SeqCst), 1);
    feed.closed().await;
    // Node and list are both older: that counts once.
    pass(Duration::from_secs(5)).await;
    let feed = server.begin();
    listed(&mut server, &feed, 90, 201).await;
    drop(feed);
    let feed = server.begin();
    listed(&mut server, &feed, 50, 60).await;
    assert!(nodes.recv().await.unwrap().is_some());
    feed.event("MODIFIED", &node("n1", 61));
    assert!(nodes.recv().await.unwrap().is_some());
    assert_eq!(count.load(Ordering::SeqCst), 2);
    server.nothing_more();
}
