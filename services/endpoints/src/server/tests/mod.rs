//! The API through real sockets, with the generated clients.

mod bad_clients;
mod deltas;
mod full;
mod limits;
mod property;
mod reports;

use std::{collections::BTreeMap, path::PathBuf, sync::Arc, time::Duration};

use bytes::Bytes;
use futures_util::FutureExt as _;
use hyper_util::rt::TokioIo;
use keelson_endpoint_publisher::{EndpointsFeed, Freshness, History, Item, Published, ServiceName};
use keelson_proto::{
    endpoints::{
        Sync, WatchItem, WatchRequest, endpoints_client::EndpointsClient as WatchClient, watch_item,
    },
    localnetv1::{
        Endpoint, EndpointConditions, NextFilter, NextItem, NodeInfo, ServiceEndpoints,
        endpoints_client::EndpointsClient as NextClient,
    },
};
use keelson_serve::unix::{Bound, SocketFile};
use prost::Message as _;
use tokio::{
    net::{TcpListener, UnixStream},
    sync::{oneshot, watch},
    task::JoinHandle,
};
use tonic::{Code, Status, Streaming, transport::Channel};

use super::{Backends, ClientHints, EndpointsServer, Listener, ServerMetrics, ServerSettings, Watchers};

/// The state of a reader: Services by `namespace/name`, and the node.
#[derive(Debug, Clone, PartialEq, Default)]
struct State {
    services: BTreeMap<String, ServiceEndpoints>,
    node: NodeInfo,
}

/// A scripted publisher.
struct Source {
    published: watch::Sender<Option<Arc<Published>>>,
    history: Arc<History>,
    newest: Published,
    model: State,
}

impl Source {
    fn new(instance_id: u64) -> Self {
        Self::with_history(instance_id, History::new(100, 10_000))
    }

    fn with_history(instance_id: u64, history: Arc<History>) -> Self {
        history.restart(instance_id, 0);
        let newest = Published {
            instance_id,
            rev: 0,
            services: Default::default(),
            node: Arc::default(),
            freshness: Freshness::Synced,
            triggered_unix_ms: None,
            bytes: 0,
            replaced: 0,
        };
        Self { published: watch::channel(None).0, history, newest, model: State::default() }
    }

    fn feed(&self) -> EndpointsFeed {
        EndpointsFeed { published: self.published.subscribe(), history: self.history.clone() }
    }

    fn publish(&self) {
        self.published.send_replace(Some(Arc::new(self.newest.clone())));
    }

    /// Publishes one revision; `None` deletes the Service.
    fn change(&mut self, services: &[(&str, Option<ServiceEndpoints>)]) {
        self.revision(services, None);
    }

    /// Publishes `s000`, `s001` and so on, each of about this size in bytes.
    fn set_large(&mut self, count: usize, bytes: usize) {
        let names: Vec<String> = (0..count).map(|number| format!("s{number:03}")).collect();
        let services: Vec<_> = names.iter().map(|name| (name.as_str(), Some(large(name, bytes)))).collect();
        self.change(&services);
    }

    fn set(&mut self, service: ServiceEndpoints) {
        let name = service.name.clone();
        self.change(&[(&name, Some(service))]);
    }

    fn revision(&mut self, services: &[(&str, Option<ServiceEndpoints>)], node: Option<NodeInfo>) {
        self.newest.rev += 1;
        self.newest.triggered_unix_ms = Some(i64::try_from(self.newest.rev).expect("small") * 1000);
        for (name, service) in services {
            let key = ServiceName::new("ns", name);
            let former = self.newest.services.get(&key).map_or(0, |item| item.message.len() as u64);
            self.newest.bytes -= former;
            self.newest.replaced += former;
            match service {
                Some(service) => {
                    let new = item(service, self.newest.rev);
                    self.newest.bytes += new.message.len() as u64;
                    self.newest.services.insert_mut(key.clone(), new);
                    self.model.services.insert(key.to_string(), service.clone());
                }
                None => {
                    self.newest.services.remove_mut(&key);
                    self.model.services.remove(key.as_str());
                }
            }
        }
        if let Some(node) = &node {
            self.newest.node = Arc::new(node.clone());
            self.model.node = node.clone();
        }
        let names = services.iter().map(|(name, _)| ServiceName::new("ns", name)).collect();
        self.history.note(self.newest.rev, names, node.is_some());
        self.publish();
    }

    fn freshness(&mut self, reason: Option<&str>) {
        self.newest.freshness = match reason {
            Some(reason) => Freshness::Stale { reason: reason.into(), since_unix_ms: 1 },
            None => Freshness::Synced,
        };
        self.publish();
    }

    /// The store was lost: the same content with another instance ID.
    fn new_instance(&mut self, instance_id: u64) {
        self.newest.instance_id = instance_id;
        self.newest.rev = 1;
        self.history.restart(instance_id, 1);
        self.publish();
    }

    fn position(&self) -> (u64, u64) {
        (self.newest.instance_id, self.newest.rev)
    }
}

fn item(service: &ServiceEndpoints, rev: u64) -> Item {
    let item = NextItem { endpoints: Some(service.clone()), ..NextItem::default() };
    Item { message: Bytes::from(item.encode_to_vec()), rev, proxy_name: None }
}

/// A Service whose endpoints have these names; those that begin with `r` are ready.
fn service(name: &str, endpoints: &[&str]) -> ServiceEndpoints {
    let endpoints = endpoints
        .iter()
        .map(|hostname| Endpoint {
            hostname: (*hostname).to_owned(),
            conditions: Some(EndpointConditions { ready: hostname.starts_with('r'), ..Default::default() }),
            ..Endpoint::default()
        })
        .collect();
    ServiceEndpoints { namespace: "ns".into(), name: name.into(), endpoints, ..Default::default() }
}

/// A Service of about this size in bytes.
fn large(name: &str, bytes: usize) -> ServiceEndpoints {
    service(name, &[&format!("r{}", "x".repeat(bytes))])
}

fn node(name: &str) -> NodeInfo {
    NodeInfo { name: name.into(), exists: true, ..NodeInfo::default() }
}

const SETTINGS: ServerSettings = ServerSettings { max_watchers: 1000, deltas: true, on_demand: false };

struct Running {
    folder: tempfile::TempDir,
    tcp: std::net::SocketAddr,
    watchers: Watchers,
    backends: Backends,
    metrics: ServerMetrics,
    hints: watch::Receiver<ClientHints>,
    stop: Option<oneshot::Sender<()>>,
    serving: JoinHandle<()>,
    _file: SocketFile,
}

impl Running {
    async fn start(source: &Source) -> Self {
        Self::with(source, SETTINGS).await
    }

    async fn with_most(source: &Source, max_watchers: usize) -> Self {
        Self::with(source, ServerSettings { max_watchers, ..SETTINGS }).await
    }

    async fn with(source: &Source, settings: ServerSettings) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let (listeners, tcp, file) = listeners(&folder).await;
        let metrics = ServerMetrics::default();
        let server = EndpointsServer::new(source.feed(), settings, metrics.clone());
        let (watchers, backends) = (server.watchers().clone(), server.backends().clone());
        let hints = server.client_hints();
        let (stop, stopped) = oneshot::channel();
        let serving = tokio::spawn(async move {
            let stopped = async {
                let _ = stopped.await;
            };
            server.serve(listeners, stopped).await.expect("serves");
        });
        Self { folder, tcp, watchers, backends, metrics, hints, stop: Some(stop), serving, _file: file }
    }

    fn socket(&self) -> PathBuf {
        self.folder.path().join("endpoints.sock")
    }

    async fn raw(&self) -> UnixStream {
        UnixStream::connect(self.socket()).await.expect("connects")
    }

    async fn channel(&self) -> Channel {
        channel(self.socket(), None).await
    }

    async fn next(&self) -> NextClient<Channel> {
        NextClient::new(self.channel().await)
    }

    async fn watch(&self) -> WatchClient<Channel> {
        WatchClient::new(self.channel().await)
    }

    async fn next_over_tcp(&self) -> NextClient<Channel> {
        let endpoint = tonic::transport::Endpoint::from_shared(format!("http://{}", self.tcp));
        NextClient::new(endpoint.expect("an address").connect().await.expect("connects"))
    }

    /// A call of Watch that is taken.
    async fn open(&self, request: WatchRequest) -> Streaming<WatchItem> {
        self.watch().await.watch(request).await.expect("is taken").into_inner()
    }

    /// A call of Watch that has the newest state, and its reader.
    async fn follow(&self) -> (Streaming<WatchItem>, Reader) {
        let (mut stream, mut reader) = (self.open(from((0, 0))).await, Reader::default());
        reader.sync(&mut stream).await;
        (stream, reader)
    }

    async fn served(&self, count: usize) {
        until(async || self.watchers.count().0 == count).await;
    }

    fn stop(&mut self) {
        if let Some(stop) = self.stop.take() {
            let _ = stop.send(());
        }
    }
}

/// A source with Service `a`, which has one ready endpoint, at revision 1 of instance 7.
async fn one_service() -> (Source, Running) {
    let mut source = Source::new(7);
    source.set(service("a", &["r1"]));
    let server = Running::start(&source).await;
    (source, server)
}

/// A call of Next that is taken.
async fn ask(client: &mut NextClient<Channel>, filter: NextFilter) -> Streaming<NextItem> {
    client.next(filter).await.expect("is taken").into_inner()
}

async fn listeners(folder: &tempfile::TempDir) -> (Vec<Listener>, std::net::SocketAddr, SocketFile) {
    let path = folder.path().join("endpoints.sock");
    let (unix, file) = Bound::bind(&path, 0o600).await.expect("binds").into_parts();
    let tcp = TcpListener::bind("127.0.0.1:0").await.expect("binds");
    let address = tcp.local_addr().expect("an address");
    let listeners = vec![
        Listener::Unix(unix, "unix://endpoints.sock".into()),
        Listener::Tcp(tcp, format!("tcp://{address}")),
    ];
    (listeners, address, file)
}

async fn channel(socket: PathBuf, window: Option<u32>) -> Channel {
    let mut endpoint = tonic::transport::Endpoint::from_static("http://localhost");
    if let Some(window) = window {
        endpoint = endpoint.initial_stream_window_size(window).initial_connection_window_size(window);
    }
    let connect = tower::service_fn(move |_| {
        let socket = socket.clone();
        async move { UnixStream::connect(socket).await.map(TokioIo::new) }
    });
    endpoint.connect_with_connector(connect).await.expect("connects")
}

async fn until(mut so: impl AsyncFnMut() -> bool) {
    for _ in 0..20_000 {
        if so().await {
            return;
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    panic!("it never came to be so");
}

/// Fails if a call that should wait has answered.
async fn still_waits<T: std::fmt::Debug>(stream: &mut Streaming<T>) {
    for _ in 0..200 {
        tokio::task::yield_now().await;
        if let Some(came) = stream.message().now_or_never() {
            panic!("it should wait, and yet {came:?}");
        }
    }
}

fn has((instance_id, rev): (u64, u64)) -> NextFilter {
    NextFilter { instance_id, rev, ..NextFilter::default() }
}

fn from((instance_id, rev): (u64, u64)) -> WatchRequest {
    WatchRequest { instance_id, rev, ..WatchRequest::default() }
}

fn only_ready() -> Option<EndpointConditions> {
    Some(EndpointConditions { ready: true, ..EndpointConditions::default() })
}

/// Ends a test that hangs; nothing here depends on timing.
const TEST_TIMEOUT: Duration = Duration::from_secs(120);

async fn patiently<T>(coming: impl Future<Output = T>) -> T {
    tokio::time::timeout(TEST_TIMEOUT, coming).await.expect("what is waited for never comes")
}

async fn read_state(stream: &mut Streaming<NextItem>) -> (NextFilter, State) {
    patiently(read_whole(stream)).await.expect("a state")
}

async fn read_whole(stream: &mut Streaming<NextItem>) -> Result<(NextFilter, State), Status> {
    let first = stream.message().await?.expect("a first item");
    assert_eq!(first.endpoints, None);
    let mut state = State { node: first.node.expect("the node"), ..State::default() };
    while let Some(item) = stream.message().await? {
        assert!(item.next.is_none() && item.node.is_none(), "{item:?}");
        let service = item.endpoints.expect("a Service");
        let name = format!("{}/{}", service.namespace, service.name);
        assert!(state.services.keys().next_back().is_none_or(|last| *last < name), "{name} out of order");
        state.services.insert(name, service);
    }
    Ok((first.next.expect("Next"), state))
}

async fn next(client: &mut NextClient<Channel>, filter: NextFilter) -> (NextFilter, State) {
    read_state(&mut ask(client, filter).await).await
}

/// A reader of Watch: it has a complete state after each Sync.
#[derive(Debug, Default)]
struct Reader {
    draft: State,
    /// Set, deleted, node, reset: since the last Sync.
    seen: Vec<String>,
}

impl Reader {
    fn take(&mut self, item: WatchItem) -> Option<Sync> {
        match item.item.expect("an item this client knows") {
            watch_item::Item::Reset(_) => {
                self.draft = State::default();
                self.seen.push("reset".into());
            }
            watch_item::Item::Set(service) => {
                let name = format!("{}/{}", service.namespace, service.name);
                self.seen.push(format!("+{name}"));
                self.draft.services.insert(name, service);
            }
            watch_item::Item::Delete(name) => {
                let name = format!("{}/{}", name.namespace, name.name);
                self.seen.push(format!("-{name}"));
                self.draft.services.remove(&name);
            }
            watch_item::Item::Node(node) => {
                self.seen.push("node".into());
                self.draft.node = node;
            }
            watch_item::Item::Sync(sync) => return Some(sync),
        }
        None
    }

    /// Reads until the state is complete; returns what arrived.
    async fn sync(&mut self, stream: &mut Streaming<WatchItem>) -> (Sync, Vec<String>) {
        loop {
            let item = patiently(stream.message()).await.expect("syncs");
            if let Some(sync) = self.take(item.expect("a Watch does not end by itself")) {
                return (sync, std::mem::take(&mut self.seen));
            }
        }
    }
}

fn ends_with<T: std::fmt::Debug>(result: Result<T, Status>, code: Code, says: &str) {
    let status = result.expect_err("an error");
    assert_eq!(status.code(), code, "{status:?}");
    assert!(status.message().contains(says), "{status:?}");
}
