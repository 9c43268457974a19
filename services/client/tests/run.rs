//! `Client::run` with both APIs.

#![allow(clippy::unwrap_used, clippy::expect_used)]

mod common;

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use common::{LONG, started};
use keelson_client::{
    Api, BoxError, CancellationToken, Client, Handlers, NodeInfo, Options, Position, ServiceEndpoints,
    ServiceName,
};
use keelson_proto::endpoints as pb;
use tokio::{sync::mpsc, task::JoinHandle, time::timeout};

/// Sends a summary of each state.
struct Calls {
    held: Vec<ServiceName>,
    calls: Vec<String>,
    out: mpsc::UnboundedSender<String>,
    /// How many of the next syncs fail.
    fail: Arc<Mutex<u32>>,
}

impl Handlers for Calls {
    fn held(&mut self) -> Vec<ServiceName> {
        self.held.clone()
    }

    fn node(&mut self, node: NodeInfo) {
        self.calls.push(format!("node:{}", node.name));
    }

    fn delete(&mut self, name: &ServiceName) {
        self.calls.push(format!("-{}", name.name()));
    }

    fn set(&mut self, name: &ServiceName, service: ServiceEndpoints) {
        assert_eq!(name.as_str(), format!("{}/{}", service.namespace, service.name));
        self.calls.push(format!("{}={}", service.name, service.health_check_node_port));
    }

    async fn sync(&mut self, position: &Position) -> Result<(), BoxError> {
        let stale = if position.stale { format!(" stale: {}", position.stale_reason) } else { String::new() };
        self.calls.push(format!("{}@{}{stale}", position.instance_id, position.rev));
        self.out.send(std::mem::take(&mut self.calls).join(" "))?;
        let mut fail = self.fail.lock().unwrap();
        if *fail > 0 {
            *fail -= 1;
            return Err("the kernel has no room".into());
        }
        Ok(())
    }
}

/// A running client, and what its consumer receives.
struct Running {
    events: mpsc::UnboundedReceiver<String>,
    errors: Arc<Mutex<Vec<String>>>,
    cancel: CancellationToken,
    task: JoinHandle<Position>,
}

impl Running {
    fn start(options: Options) -> Self {
        Self::with(options, &[], 0)
    }

    fn with(options: Options, held: &[&str], fail: u32) -> Self {
        Self::of(Client::new(options), held, fail)
    }

    fn of(mut client: Client, held: &[&str], fail: u32) -> Self {
        let (out, events) = mpsc::unbounded_channel();
        let held = held.iter().map(|name| ServiceName::new("ns", name)).collect();
        let mut handlers = Calls { held, calls: Vec::new(), out, fail: Arc::new(Mutex::new(fail)) };
        let errors = Arc::new(Mutex::new(Vec::new()));
        let sink = errors.clone();
        client.on_error(move |report| sink.lock().unwrap().push(report.error.to_string()));
        let cancel = client.cancellation();
        let task = tokio::spawn(async move { client.run(&mut handlers).await });
        Self { events, errors, cancel, task }
    }

    async fn next_event(&mut self) -> String {
        timeout(LONG, self.events.recv()).await.expect("a state is delivered").unwrap()
    }

    /// Cancels; fails if there are states that the test did not read.
    async fn end(mut self) -> Position {
        self.cancel.cancel();
        let position = timeout(LONG, self.task).await.expect("it ends").unwrap();
        assert_eq!(self.events.recv().await, None);
        position
    }
}

#[tokio::test]
async fn changes_are_delivered_by_state() {
    let (mut server, options) = started();
    let mut running = Running::start(options);
    let call = server.expect("Watch", 0, 0).await;
    call.reset().await;
    let node = NodeInfo { name: "n".into(), ..Default::default() };
    call.watch(pb::watch_item::Item::Node(node)).await;
    call.changes(7, 1, &[("b", 1), ("a", 1)]).await;
    assert_eq!(running.next_event().await, "node:n a=1 b=1 7@1");
    call.set("c", 1).await;
    call.delete("a").await;
    call.changes(7, 5, &[("b", 2), ("b", 3)]).await;
    assert_eq!(running.next_event().await, "-a b=3 c=1 7@5");
    let sync =
        pb::Sync { instance_id: 7, rev: 5, stale: true, stale_reason: "gone".into(), ..Default::default() };
    call.watch(pb::watch_item::Item::Sync(sync)).await;
    assert_eq!(running.next_event().await, "7@5 stale: gone");
    // Unknown items are ignored, and an incomplete state is not delivered.
    call.bytes(&[0x7a, 0]).await;
    call.set("d", 1).await;
    assert_eq!(running.end().await.rev, 5);
}

/// Receives ahead while `serve` answers.
async fn received_ahead(options: Options, serve: impl AsyncFnOnce()) -> Client {
    let mut client = Client::new(options);
    let receiving = tokio::spawn(async move {
        client.receive_ahead().await;
        client
    });
    serve().await;
    timeout(LONG, receiving).await.expect("it ends").unwrap()
}

#[tokio::test]
async fn a_state_that_was_received_ahead_is_delivered_first() {
    let (mut server, options) = started();
    let client = received_ahead(options, async || {
        let call = server.expect("Watch", 0, 0).await;
        call.full(7, 1, &[("a", 1)]).await;
        // What comes before the consumer is there waits in the connection.
        call.changes(7, 2, &[("b", 1)]).await;
    });
    let mut running = Running::of(client.await, &[], 0);
    assert_eq!(running.next_event().await, "a=1 7@1");
    assert_eq!(running.next_event().await, "b=1 7@2");
    running.end().await;
}

#[tokio::test]
async fn what_fails_ahead_is_tried_again() {
    let (mut server, options) = started();
    let client = received_ahead(options, async || {
        server.expect("Watch", 0, 0).await.set("a", 1).await;
        server.restart();
    });
    let mut running = Running::of(client.await, &[], 0);
    let call = server.expect("Watch", 0, 0).await;
    call.full(7, 1, &[("a", 2)]).await;
    assert_eq!(running.next_event().await, "a=2 7@1");
    running.end().await;
}

#[tokio::test]
async fn after_a_break_it_resumes_and_drops_the_partial_state() {
    let (mut server, options) = started();
    let mut running = Running::start(options);
    let call = server.expect("Watch", 0, 0).await;
    call.full(7, 1, &[("a", 1), ("b", 1)]).await;
    assert_eq!(running.next_event().await, "a=1 b=1 7@1");
    call.set("a", 2).await;
    call.delete("b").await;
    server.restart();
    let call = server.expect("Watch", 7, 1).await;
    call.sync(7, 1).await;
    call.changes(7, 2, &[("c", 1)]).await;
    assert_eq!(running.next_event().await, "c=1 7@2");
    running.end().await;
}

#[tokio::test]
async fn a_reset_after_a_reconnect_delivers_only_differences() {
    let (mut server, options) = started();
    let mut running = Running::start(options);
    let call = server.expect("Watch", 0, 0).await;
    call.full(7, 1, &[("a", 1), ("b", 1), ("c", 1)]).await;
    assert_eq!(running.next_event().await, "a=1 b=1 c=1 7@1");
    // A server that lost its state: another instance.
    server.restart();
    let call = server.expect("Watch", 7, 1).await;
    call.set("x", 1).await;
    call.reset().await;
    call.set("a", 1).await;
    call.set("c", 2).await;
    call.set("d", 1).await;
    call.delete("d").await;
    call.sync(8, 1).await;
    assert_eq!(running.next_event().await, "-b c=2 8@1");
    // Also in the middle of a stream.
    call.full(8, 9, &[("c", 2)]).await;
    assert_eq!(running.next_event().await, "-a 8@9");
    running.end().await;
}

#[tokio::test]
async fn a_stream_that_ends_hangs_or_is_invalid_is_reopened() {
    let (mut server, options) = started();
    let mut running = Running::start(Options { stall_timeout: Duration::from_millis(300), ..options });
    let call = server.expect("Watch", 0, 0).await;
    call.changes(7, 1, &[("a", 1)]).await;
    let call = server.expect("Watch", 0, 0).await;
    call.full(7, 1, &[("a", 1)]).await;
    assert_eq!(running.next_event().await, "a=1 7@1");
    call.status(0).await;
    let call = server.expect("Watch", 7, 1).await;
    call.delete("a").await;
    call.status(0).await;
    let call = server.expect("Watch", 7, 1).await;
    call.delete("a").await;
    timeout(LONG, call.closed()).await.expect("a server that hangs is left");
    let call = server.expect("Watch", 7, 1).await;
    call.delete("a").await;
    call.bytes(b"\xff\xff").await;
    let call = server.expect("Watch", 7, 1).await;
    // A Service that cannot be decoded: nothing of the state is delivered.
    call.set("a", 2).await;
    call.bytes(&[0x12, 11, 0x0a, 2, b'n', b's', 0x12, 1, b'z', 0x3a, 2, 0x12, 0xff]).await;
    call.sync(7, 2).await;
    let call = server.expect("Watch", 7, 1).await;
    call.bytes(&[0x12, 9, 0x0a, 2, b'n', b's', 0x12, 1, b'z', 0x1a, 0]).await;
    call.sync(7, 2).await;
    assert_eq!(running.next_event().await, "z=0 7@2");
    let errors = running.errors.lock().unwrap().join("\n");
    for said in [
        "deltas without a full state before them",
        "ended the stream of deltas",
        "then nothing for",
        "cannot decode Service ns/z",
    ] {
        assert!(errors.contains(said), "{said}: {errors}");
    }
    running.end().await;
}

#[tokio::test]
async fn a_server_without_watch_is_followed_by_next() {
    let (mut server, options) = started();
    let mut running = Running::start(options);
    server.expect("Watch", 0, 0).await.status(12).await;
    server.expect("Next", 0, 0).await.state(7, 1, &[("a", 1), ("b", 1)]).await;
    assert_eq!(running.next_event().await, "node:node a=1 b=1 7@1");
    server.expect("Next", 7, 1).await.state(7, 2, &[("a", 2), ("c", 1)]).await;
    assert_eq!(running.next_event().await, "-b a=2 c=1 7@2");
    let waiting = server.expect("Next", 7, 2).await;
    assert!(running.errors.lock().unwrap().is_empty());
    drop(waiting);
    // A newer server at the same address is asked for changes again.
    server.restart();
    let call = server.expect("Watch", 7, 2).await;
    call.delete("a").await;
    call.sync(7, 3).await;
    assert_eq!(running.next_event().await, "-a 7@3");
    assert_eq!(running.end().await.rev, 3);
}

#[tokio::test]
async fn next_is_used_when_it_is_asked_for() {
    let (mut server, options) = started();
    let mut running = Running::start(Options { api: Api::Next, ..options });
    let call = server.expect("Next", 0, 0).await;
    call.partial(7, 1, &[("a", 1)]).await;
    call.status(14).await;
    server.expect("Next", 0, 0).await.state(7, 2, &[("a", 1)]).await;
    assert_eq!(running.next_event().await, "node:node a=1 7@2");
    server.expect("Next", 7, 2).await;
    running.end().await;
}

#[tokio::test]
async fn after_a_consumer_error_the_full_state_is_offered() {
    for api in [Api::Watch, Api::Next] {
        let (mut server, options) = started();
        let mut running = Running::with(Options { api, ..options }, &["old"], 2);
        let method = format!("{api:?}");
        for attempt in 0..3 {
            let call = server.expect(&method, 0, 0).await;
            if api == Api::Next {
                call.state(7, 1, &[("a", 1)]).await;
                assert_eq!(running.next_event().await, "node:node -old a=1 7@1", "{attempt}");
            } else {
                call.full(7, 1, &[("a", 1)]).await;
                assert_eq!(running.next_event().await, "-old a=1 7@1", "{attempt}");
                if attempt == 2 {
                    call.changes(7, 2, &[("b", 1)]).await;
                    assert_eq!(running.next_event().await, "b=1 7@2");
                }
            }
        }
        let errors = running.errors.lock().unwrap().clone();
        assert_eq!(errors, ["cannot apply the state; retrying: the kernel has no room"; 2]);
        running.end().await;
    }
}

#[tokio::test]
async fn a_consumer_with_a_state_resumes_with_changes() {
    let (mut server, options) = started();
    let mut running = Running::with(Options { instance_id: 7, rev: 3, ..options }, &["kept"], 0);
    let call = server.expect("Watch", 7, 3).await;
    call.delete("unnamed").await;
    call.changes(7, 4, &[("a", 1)]).await;
    assert_eq!(running.next_event().await, "-unnamed a=1 7@4");
    call.full(7, 9, &[("a", 1)]).await;
    assert_eq!(running.next_event().await, "-kept 7@9");
    running.end().await;
}

#[tokio::test]
async fn cancellation_lets_a_consumer_finish() {
    struct Slow {
        begun: mpsc::Sender<()>,
        go_on: mpsc::Receiver<()>,
        done: bool,
    }
    impl Handlers for Slow {
        fn delete(&mut self, _: &ServiceName) {}
        fn set(&mut self, _: &ServiceName, _: ServiceEndpoints) {}
        async fn sync(&mut self, _: &Position) -> Result<(), BoxError> {
            self.begun.send(()).await?;
            self.go_on.recv().await;
            self.done = true;
            Ok(())
        }
    }
    let (mut server, options) = started();
    let mut client = Client::new(options);
    let token = CancellationToken::new();
    client.cancel_with(token.clone());
    let ((begun, mut has_begun), (go, go_on)) = (mpsc::channel(1), mpsc::channel(1));
    let mut slow = Slow { begun, go_on, done: false };
    let serve = async {
        let call = server.call().await;
        call.full(7, 1, &[]).await;
        has_begun.recv().await;
        token.cancel();
        tokio::task::yield_now().await;
        go.send(()).await.unwrap();
        call
    };
    let (_call, position) = tokio::join!(serve, timeout(LONG, client.run(&mut slow)));
    assert_eq!(position.unwrap().rev, 1);
    assert!(slow.done);
}
