//! Small HTTP servers that cannot be held up.
//!
//! Owns: sockets to listen on, and [`serve`]: HTTP/1.1 on each connection, bounded in number and time. In: requests, of which
//! only the path is looked at. Out: what [`Pages`] says.

use std::{convert::Infallible, io, net::IpAddr, net::SocketAddr, sync::Arc, time::Duration};

use bytes::Bytes;
use http::{
    HeaderName, HeaderValue, Method, Request, Response, StatusCode,
    header::{CONTENT_TYPE, X_CONTENT_TYPE_OPTIONS},
};
use http_body_util::Full;
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use nix::sys::socket::{setsockopt, sockopt::Ipv6V6Only};
use tokio::{
    net::{TcpListener, TcpSocket, TcpStream},
    sync::Semaphore,
    time::{sleep, timeout},
};
use tokio_util::sync::CancellationToken;

/// The largest head; hyper takes no less.
const HEAD_BYTES: usize = 8 * 1024;
/// How long the answer at hand may take then.
const GRACE: Duration = Duration::from_secs(5);
/// Before the next connection is accepted after that failed.
const ACCEPT_RETRY: Duration = Duration::from_millis(100);
/// What Go's servers have.
const BACKLOG: u32 = 1024;

/// What one listener's clients may use.
#[derive(Debug, Clone, Copy)]
pub(super) struct Limits {
    /// Connections at once. More wait until one ends.
    pub(super) connections: usize,
    /// How long the head of a request may take to arrive, and a connection may stay idle.
    pub(super) head: Duration,
    /// How long a connection may last, so that none is held for good by one that reads nothing.
    pub(super) lifetime: Duration,
}

/// Probes come from a few load balancers and from this node.
pub(super) const LIMITS: Limits =
    Limits { connections: 128, head: Duration::from_secs(10), lifetime: Duration::from_secs(120) };

/// An answer.
pub(super) type Answer = Response<Full<Bytes>>;

/// What a server says.
pub(super) trait Pages: Send + Sync + 'static {
    /// The answer to a request.
    fn answer(&self, method: &Method, path: &str) -> Answer;
}

/// An answer of a status, a type and a body; browsers are told not to guess.
pub(super) fn answer(status: StatusCode, content_type: &'static str, body: impl Into<Bytes>) -> Answer {
    let mut answer = Response::new(Full::new(body.into()));
    *answer.status_mut() = status;
    answer.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
    answer.headers_mut().insert(X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    answer
}

/// The same with one header more.
pub(super) fn with_header(mut answer: Answer, name: HeaderName, value: impl Into<HeaderValue>) -> Answer {
    answer.headers_mut().insert(name, value.into());
    answer
}

/// Listens at one address of its own family alone. Call it within a runtime.
pub(super) fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    open(address, true)
}

/// Listens at an address of the settings. As in kube-proxy (and other programs in Go), `0.0.0.0` and `[::]` are every address
/// of both families, where the kernel has both.
pub(super) fn listen_widely(address: SocketAddr) -> io::Result<TcpListener> {
    if !address.ip().is_unspecified() {
        return open(address, true);
    }
    let both = SocketAddr::new(IpAddr::V6(std::net::Ipv6Addr::UNSPECIFIED), address.port());
    match open(both, false) {
        // In use is in use; anything else may be for want of IPv6.
        Err(error) if address.is_ipv4() && error.kind() != io::ErrorKind::AddrInUse => open(address, true),
        opened => opened,
    }
}

fn open(address: SocketAddr, own_family: bool) -> io::Result<TcpListener> {
    let socket = match address {
        SocketAddr::V4(_) => TcpSocket::new_v4()?,
        SocketAddr::V6(_) => {
            let socket = TcpSocket::new_v6()?;
            setsockopt(&socket, Ipv6V6Only, &own_family)?;
            socket
        }
    };
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    socket.listen(BACKLOG)
}

/// Answers whoever connects to `listener`, until `stop`; connections end with it. The listener is closed when this returns or
/// is dropped.
pub(super) async fn serve(
    listener: TcpListener,
    pages: Arc<dyn Pages>,
    limits: Limits,
    stop: CancellationToken,
) {
    let slots = Arc::new(Semaphore::new(limits.connections));
    // Whoever drops this future ends the connections as well.
    let connections = stop.child_token();
    let _end = connections.clone().drop_guard();
    loop {
        let accepted = async {
            // It is never closed.
            let slot = slots.clone().acquire_owned().await.ok();
            (listener.accept().await, slot)
        };
        let (accepted, slot) = tokio::select! {
            accepted = accepted => accepted,
            () = stop.cancelled() => return,
        };
        match accepted {
            Ok((stream, _)) => {
                let connection = connection(stream, pages.clone(), limits, connections.clone());
                tokio::spawn(async move {
                    connection.await;
                    drop(slot);
                });
            }
            // Too many open files, or a peer that left again.
            Err(error) => {
                tracing::debug!(%error, "a connection was not accepted");
                sleep(ACCEPT_RETRY).await;
            }
        }
    }
}

async fn connection(stream: TcpStream, pages: Arc<dyn Pages>, limits: Limits, stop: CancellationToken) {
    let service = service_fn(move |request: Request<Incoming>| {
        let answer = pages.answer(request.method(), request.uri().path());
        async move { Ok::<_, Infallible>(answer) }
    });
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(limits.head).max_buf_size(HEAD_BYTES).max_headers(64);
    let served = http.serve_connection(TokioIo::new(stream), service);
    tokio::pin!(served);
    tokio::select! {
        ended = served.as_mut() => {
            if let Err(error) = ended {
                tracing::trace!(%error, "an HTTP connection ended early");
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
    use tokio::io::AsyncReadExt as _;

    use super::{super::tests::get, *};

    struct Hello;

    impl Pages for Hello {
        fn answer(&self, method: &Method, path: &str) -> Answer {
            answer(StatusCode::OK, "text/plain", format!("{method} {path}"))
        }
    }

    #[tokio::test]
    async fn clients_that_say_nothing_hold_nobody_up_for_long() {
        let listener = listen("127.0.0.1:0".parse().unwrap()).unwrap();
        let at = listener.local_addr().unwrap();
        let limits =
            Limits { connections: 2, head: Duration::from_millis(50), lifetime: Duration::from_secs(60) };
        let server = tokio::spawn(serve(listener, Arc::new(Hello), limits, CancellationToken::new()));
        let mut silent = Vec::new();
        for _ in 0..5 {
            silent.push(TcpStream::connect(at).await.unwrap());
        }
        assert_eq!(get(at, "/path").await.body, "GET /path");
        for mut client in silent {
            let mut bytes = Vec::new();
            client.read_to_end(&mut bytes).await.unwrap();
        }
        server.abort();
    }

    #[tokio::test]
    async fn the_end_closes_the_socket_and_every_connection() {
        let listener = listen("127.0.0.1:0".parse().unwrap()).unwrap();
        let at = listener.local_addr().unwrap();
        let stop = CancellationToken::new();
        let server = tokio::spawn(serve(listener, Arc::new(Hello), LIMITS, stop.clone()));
        assert_eq!(get(at, "/").await.status, 200);
        let mut idle = TcpStream::connect(at).await.unwrap();
        stop.cancel();
        server.await.unwrap();
        assert_eq!(idle.read(&mut [0]).await.map_err(|error| error.kind()).unwrap_or(0), 0);
        // A program that another test starts holds a copy of the socket until it runs.
        let refused = loop {
            if let Err(error) = TcpStream::connect(at).await {
                break error;
            }
        };
        assert_eq!(refused.kind(), io::ErrorKind::ConnectionRefused);
    }
}
