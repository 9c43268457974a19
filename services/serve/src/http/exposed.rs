//! Small HTTP servers at ports that any client on the network may reach.
//!
//! Owns: [`serve`]: HTTP/1.1 on each connection, bounded in number and time. In: method, path and Accept header of
//! requests. Out: the answers of [`Pages`].
//!
//! A pod can open connections as well as a load balancer can, so a new connection is always accepted. If there are too
//! many, or no file descriptor is left, the oldest connection of the source with the most is closed
//! ([`OpenConnections`]). Listeners share most of their slots ([`SharedSlots`]), so that clients of one use up neither
//! the file descriptors nor the slots of another.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, HashMap},
    convert::Infallible,
    io,
    net::IpAddr,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use http::{
    HeaderName, HeaderValue, Method, Request, Response, StatusCode,
    header::{ACCEPT, CONTENT_TYPE, X_CONTENT_TYPE_OPTIONS},
};
use http_body_util::Full;
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use nix::errno::Errno;
use tokio::{
    net::{TcpListener, TcpStream},
    time::{sleep, timeout},
};
use tokio_util::sync::CancellationToken;

use crate::accept::AcceptFailures;

/// Maximum size of a request head; the minimum of hyper.
const HEAD_BYTES: usize = 8 * 1024;
/// Time for a pending answer once a connection is to be closed.
const GRACE: Duration = Duration::from_secs(5);
/// Pause after a failed accept for which a connection was closed to free a file descriptor.
const SLOT_RETRY: Duration = Duration::from_millis(1);

/// Connection slots that all listeners share.
#[derive(Debug)]
struct SharedSlots {
    free: AtomicUsize,
}

impl SharedSlots {
    const fn new(number: usize) -> Self {
        Self { free: AtomicUsize::new(number) }
    }

    fn take(&self) -> bool {
        self.free.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |free| free.checked_sub(1)).is_ok()
    }

    fn give_back(&self) {
        self.free.fetch_add(1, Ordering::Relaxed);
    }
}

/// Half of 1,024 file descriptors, in case the hard limit cannot be raised above that.
static SHARED: SharedSlots = SharedSlots::new(512);

/// The limits of one listener.
#[derive(Debug, Clone, Copy)]
struct Limits {
    /// Slots of the listener alone. A connection that finds neither one of these nor a shared one replaces another
    /// connection of the listener.
    own: usize,
    shared: &'static SharedSlots,
    /// Maximum time until the head of a request has arrived, and maximum idle time of a connection.
    head: Duration,
    /// Maximum lifetime of a connection, so that a client that reads nothing cannot hold it indefinitely.
    lifetime: Duration,
}

/// Probes come from a few load balancers and from this node. An idle connection takes some 10 kB.
static LIMITS: Limits =
    Limits { own: 16, shared: &SHARED, head: Duration::from_secs(10), lifetime: Duration::from_secs(120) };

pub type Answer = Response<Full<Bytes>>;

pub trait Pages: Send + Sync + 'static {
    fn answer(&self, method: &Method, path: &str) -> Answer;

    /// As [`Self::answer`], for pages in several formats. `accept`: the header, or empty.
    fn answer_in(&self, method: &Method, path: &str, _accept: &str) -> Answer {
        self.answer(method, path)
    }
}

/// Sets `nosniff`: browsers must not guess the type.
pub fn answer(status: StatusCode, content_type: &'static str, body: impl Into<Bytes>) -> Answer {
    let mut answer = Response::new(Full::new(body.into()));
    *answer.status_mut() = status;
    answer.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
    answer.headers_mut().insert(X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    answer
}

#[must_use]
pub fn with_header(mut answer: Answer, name: HeaderName, value: impl Into<HeaderValue>) -> Answer {
    answer.headers_mut().insert(name, value.into());
    answer
}

/// Answers requests at `listener` until `stop`. If the future is dropped, the connections and the listener are closed.
pub async fn serve(listener: TcpListener, pages: Arc<dyn Pages>, stop: CancellationToken) {
    serve_within(LIMITS, listener, pages, stop).await;
}

async fn serve_within(limits: Limits, listener: TcpListener, pages: Arc<dyn Pages>, stop: CancellationToken) {
    let open = Arc::new(OpenConnections::new(limits));
    let mut failures = AcceptFailures::new("HTTP");
    // If this future is dropped, the connections end as well.
    let connections = stop.child_token();
    let _end = connections.clone().drop_guard();
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = stop.cancelled() => return,
        };
        match accepted {
            Ok((stream, peer)) => {
                let end = connections.child_token();
                let place = open.clone().add(peer.ip(), end.clone());
                let connection = connection(stream, pages.clone(), limits, end);
                tokio::spawn(async move {
                    connection.await;
                    drop(place);
                });
            }
            Err(error) if is_out_of_descriptors(&error) && open.lock().end_one() => sleep(SLOT_RETRY).await,
            Err(error) => failures.pause(&error).await,
        }
    }
}

fn is_out_of_descriptors(error: &io::Error) -> bool {
    error.raw_os_error().is_some_and(|errno| matches!(Errno::from_raw(errno), Errno::EMFILE | Errno::ENFILE))
}

/// Connections of one listener by source address, each with its cancellation token, numbered in the order of arrival.
#[derive(Debug)]
struct OpenConnections(Mutex<Sources>);

#[derive(Debug)]
struct Sources {
    own: usize,
    shared: &'static SharedSlots,
    by_address: HashMap<IpAddr, BTreeMap<u64, CancellationToken>>,
    count: usize,
    next: u64,
}

/// The slot of a connection, freed when this is dropped.
#[derive(Debug)]
struct ConnectionSlot {
    open: Arc<OpenConnections>,
    source: IpAddr,
    number: u64,
}

impl OpenConnections {
    fn new(limits: Limits) -> Self {
        let own = limits.own.max(1);
        Self(Mutex::new(Sources {
            own,
            shared: limits.shared,
            by_address: HashMap::new(),
            count: 0,
            next: 0,
        }))
    }

    /// Adds a connection. If there is no slot for it, the oldest of the source with the most is ended; of several such
    /// sources, the one whose oldest connection is the oldest.
    fn add(self: Arc<Self>, source: IpAddr, end: CancellationToken) -> ConnectionSlot {
        // On a dual-stack socket IPv4 addresses arrive as mapped ones.
        let source = source.to_canonical();
        let mut sources = self.lock();
        while !sources.take_slot() && sources.end_one() {}
        let number = sources.next;
        sources.next += 1;
        sources.by_address.entry(source).or_default().insert(number, end);
        drop(sources);
        ConnectionSlot { open: self, source, number }
    }

    fn lock(&self) -> MutexGuard<'_, Sources> {
        // No update leaves it inconsistent.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Sources {
    /// Counts one more connection. `false`: there is no slot for it.
    fn take_slot(&mut self) -> bool {
        let is_free = self.count < self.own || self.shared.take();
        self.count += usize::from(is_free);
        is_free
    }

    /// Ends a connection. `false`: there is none.
    fn end_one(&mut self) -> bool {
        let oldest = |all: &BTreeMap<u64, CancellationToken>| all.keys().next().copied();
        let busiest = self.by_address.iter().max_by_key(|(_, all)| (all.len(), Reverse(oldest(all))));
        let Some((source, number)) = busiest.and_then(|(source, all)| Some((*source, oldest(all)?))) else {
            return false;
        };
        if let Some(end) = self.remove(source, number) {
            end.cancel();
        }
        true
    }

    fn remove(&mut self, source: IpAddr, number: u64) -> Option<CancellationToken> {
        let all = self.by_address.get_mut(&source)?;
        let end = all.remove(&number)?;
        if all.is_empty() {
            self.by_address.remove(&source);
        }
        if self.count > self.own {
            self.shared.give_back();
        }
        self.count -= 1;
        Some(end)
    }
}

impl Drop for ConnectionSlot {
    fn drop(&mut self) {
        // A connection that was ended to make room has no slot any more.
        self.open.lock().remove(self.source, self.number);
    }
}

async fn connection(stream: TcpStream, pages: Arc<dyn Pages>, limits: Limits, stop: CancellationToken) {
    let service = service_fn(move |request: Request<Incoming>| {
        let accept = request.headers().get(ACCEPT).and_then(|value| value.to_str().ok()).unwrap_or_default();
        let answer = pages.answer_in(request.method(), request.uri().path(), accept);
        async move { Ok::<_, Infallible>(answer) }
    });
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(limits.head).max_buf_size(HEAD_BYTES).max_headers(64);
    let served = http.serve_connection(TokioIo::new(stream), service);
    tokio::pin!(served);
    tokio::select! {
        ended = served.as_mut() => {
            if let Err(error) = ended {
                tracing::trace!(%error, "HTTP connection closed early");
            }
        }
        () = stop.cancelled() => {}
        () = sleep(limits.lifetime) => {
            served.as_mut().graceful_shutdown();
            timeout(GRACE, served).await.ok();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use tokio::{
        io::{AsyncReadExt as _, AsyncWriteExt as _},
        net::TcpSocket,
    };

    use super::*;
    use crate::tcp::listen;

    struct Hello;

    impl Pages for Hello {
        fn answer(&self, method: &Method, path: &str) -> Answer {
            answer(StatusCode::OK, "text/plain", format!("{method} {path}"))
        }
    }

    async fn get(at: SocketAddr, path: &str) -> String {
        let mut stream = TcpStream::connect(at).await.unwrap();
        let request = format!("GET {path} HTTP/1.1\r\nHost: {at}\r\nConnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
        body.to_owned()
    }

    /// A server of [`Hello`] on a free port.
    fn start(limits: Limits) -> (SocketAddr, tokio::task::JoinHandle<()>) {
        let listener = listen("127.0.0.1:0".parse().unwrap()).unwrap();
        let at = listener.local_addr().unwrap();
        (at, tokio::spawn(serve_within(limits, listener, Arc::new(Hello), CancellationToken::new())))
    }

    /// Connects from a loopback address and sends nothing.
    async fn silent(from: [u8; 4], to: SocketAddr) -> TcpStream {
        let socket = TcpSocket::new_v4().unwrap();
        socket.set_reuseaddr(true).unwrap();
        socket.bind(SocketAddr::from((from, 0))).unwrap();
        socket.connect(to).await.unwrap()
    }

    async fn is_closed(mut client: TcpStream) {
        let mut bytes = Vec::new();
        // A reset is an end as well.
        client.read_to_end(&mut bytes).await.ok();
    }

    /// P3: idle connections of one source or of many do not keep others out, and are closed when others need their
    /// slot.
    #[tokio::test]
    async fn p3_idle_connections_do_not_keep_others_out() {
        // No connection ends by its timeout.
        let hour = Duration::from_secs(3600);
        static SLOTS: SharedSlots = SharedSlots::new(12);
        let limits = Limits { own: 4, shared: &SLOTS, head: hour, lifetime: hour };
        let (at, server) = start(limits);
        let prober = silent([127, 0, 0, 2], at).await;
        let mut idle = Vec::new();
        for number in 0..200_u8 {
            // First all from one source, then each from a different one.
            let source = if number < 100 { 9 } else { number };
            idle.push(silent([127, 0, 0, source], at).await);
            if number.is_multiple_of(10) {
                assert_eq!(get(at, "/path").await, "GET /path");
            }
            if number == 99 {
                // The source with many lost its own; that of the other one is open.
                let mut byte = [0];
                assert!(timeout(Duration::from_millis(50), prober.peek(&mut byte)).await.is_err());
                idle.drain(..80).collect::<Vec<_>>().into_iter().for_each(drop);
            }
        }
        for closed in idle.drain(..20 + 84) {
            is_closed(closed).await;
        }
        server.abort();
    }

    #[tokio::test]
    async fn clients_that_send_nothing_are_closed_in_time() {
        let limits = Limits { own: 2, head: Duration::from_millis(50), ..LIMITS };
        let (at, server) = start(limits);
        is_closed(silent([127, 0, 0, 1], at).await).await;
        server.abort();
    }

    #[test]
    fn p3_the_busiest_source_gives_up_a_slot() {
        static SLOTS: SharedSlots = SharedSlots::new(1);
        let open = Arc::new(OpenConnections::new(Limits { own: 2, shared: &SLOTS, ..LIMITS }));
        let token = CancellationToken::new;
        let mapped = "::ffff:10.0.0.1".parse().unwrap();
        let (busy, other) = ("10.0.0.1".parse().unwrap(), "10.0.0.2".parse().unwrap());
        let tokens: Vec<_> = (0..5).map(|_| token()).collect();
        let mut places = vec![open.clone().add(other, tokens[0].clone())];
        for (source, end) in [mapped, busy, other, other].into_iter().zip(&tokens[1..]) {
            places.push(open.clone().add(source, end.clone()));
        }
        let ended: Vec<bool> = tokens.iter().map(CancellationToken::is_cancelled).collect();
        // If two sources have the same number, the one with the older first connection loses: 1 for 3, then 0 for 4.
        assert_eq!(ended, [true, true, false, false, false]);
        assert_eq!(open.lock().count, 3);
        drop(places);
        let sources = open.lock();
        assert_eq!((sources.count, sources.by_address.len()), (0, 0));
        assert_eq!(SLOTS.free.load(Ordering::Relaxed), 1);
    }

    #[test]
    fn p3_clients_of_one_listener_leave_the_slots_of_another() {
        static SLOTS: SharedSlots = SharedSlots::new(3);
        let limits = Limits { own: 2, shared: &SLOTS, ..LIMITS };
        let listeners = [(); 2].map(|()| Arc::new(OpenConnections::new(limits)));
        let add = |listener: usize, number: usize| -> Vec<_> {
            let source = IpAddr::from([10, 0, 0, 1]);
            (0..number).map(|_| listeners[listener].clone().add(source, CancellationToken::new())).collect()
        };
        let counts = || [0, 1].map(|listener: usize| listeners[listener].lock().count);
        let first = add(0, 9);
        assert_eq!(counts(), [5, 0]);
        let second = add(1, 9);
        assert_eq!(counts(), [5, 2]);
        drop(first);
        let third = add(1, 9);
        assert_eq!(counts(), [0, 5]);
        drop((second, third));
        assert_eq!((counts(), SLOTS.free.load(Ordering::Relaxed)), ([0, 0], 3));
    }

    /// P3: runs itself in a process of its own, because the limit of file descriptors applies to a process.
    #[test]
    fn p3_a_listener_without_file_descriptors_answers() {
        const NAME: &str = "http::exposed::tests::p3_a_listener_without_file_descriptors_answers";
        const CHILD: &str = "KEELSON_TEST_FEW_DESCRIPTORS";
        if std::env::var_os(CHILD).is_some() {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            return runtime.block_on(answers_without_file_descriptors());
        }
        let mut child = std::process::Command::new(std::env::current_exe().unwrap());
        let status = child.args(["--exact", NAME]).env(CHILD, "1").status().unwrap();
        assert!(status.success(), "{status}");
    }

    async fn answers_without_file_descriptors() {
        let hour = Duration::from_secs(3600);
        let limits = Limits { head: hour, lifetime: hour, ..LIMITS };
        let (at, server) = start(limits);
        let mut idle = Vec::new();
        for _ in 0..40 {
            idle.push(silent([127, 0, 0, 9], at).await);
        }
        // Connections are accepted in order, so all of them are when one more is answered.
        assert_eq!(get(at, "/path").await, "GET /path");
        // One descriptor below the limit is free: the client's.
        let next = std::fs::File::open("/dev/null").unwrap();
        let limit = u64::try_from(std::os::fd::AsRawFd::as_raw_fd(&next)).unwrap() + 1;
        drop(next);
        nix::sys::resource::setrlimit(nix::sys::resource::Resource::RLIMIT_NOFILE, limit, limit).unwrap();
        for _ in 0..5 {
            let got = timeout(Duration::from_secs(5), get(at, "/path")).await;
            assert_eq!(got.expect("an answer in time"), "GET /path");
        }
        server.abort();
    }

    #[tokio::test]
    async fn the_end_closes_the_socket_and_every_connection() {
        let listener = listen("127.0.0.1:0".parse().unwrap()).unwrap();
        let at = listener.local_addr().unwrap();
        let stop = CancellationToken::new();
        let server = tokio::spawn(serve(listener, Arc::new(Hello), stop.clone()));
        assert_eq!(get(at, "/").await, "GET /");
        let mut idle = TcpStream::connect(at).await.unwrap();
        stop.cancel();
        server.await.unwrap();
        assert_eq!(idle.read(&mut [0]).await.map_err(|error| error.kind()).unwrap_or(0), 0);
        // A program that another test starts holds a copy of the socket until exec.
        let refused = loop {
            if let Err(error) = TcpStream::connect(at).await {
                break error;
            }
        };
        assert_eq!(refused.kind(), io::ErrorKind::ConnectionRefused);
    }
}
