//! The HTTP server below the routes.
//!
//! Owns: connections, their number and their timeouts. In: a bound listener, routes, and a shutdown future.
//! Out: answers until shutdown, then a short time to finish.

use std::{future::Future, net::SocketAddr, sync::Arc, time::Duration};

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    server::graceful::{GracefulShutdown, Watcher},
    service::TowerToHyperService,
};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpListener,
    sync::Semaphore,
};
use tokio_util::sync::CancellationToken;

use crate::{
    ServeError,
    accept::{AcceptFailures, admit},
    connection::Guarded,
};

/// Maximum number of concurrent connections; a browser uses two to six.
const CONNECTIONS: usize = 256;
/// Maximum time until a request's head has arrived, and maximum idle time of a connection.
const HEAD_TIMEOUT: Duration = Duration::from_secs(20);
/// Maximum size of a request head.
const HEAD_BYTES: usize = 16 * 1024;
/// Time for answers to finish at shutdown.
const GRACE: Duration = Duration::from_secs(1);

/// Serves routes on `listener` until `shutdown`. `routes` gets the address, and a token that is cancelled at shutdown,
/// for streams that do not end by themselves; what it returns should be [`gated`](super::gated).
///
/// # Errors
/// The listener has no local address; errors of single connections are not returned.
pub async fn serve(
    listener: TcpListener,
    routes: impl FnOnce(SocketAddr, CancellationToken) -> Router,
    shutdown: impl Future<Output = ()> + Send,
) -> Result<(), ServeError> {
    let bound = listener.local_addr().map_err(ServeError::LocalAddress)?;
    let stop = CancellationToken::new();
    // If this future is dropped, streams of open connections end as well.
    let _stop_on_drop = stop.clone().drop_guard();
    let router = routes(bound, stop.clone());
    let graceful = GracefulShutdown::new();
    let slots = Arc::new(Semaphore::new(CONNECTIONS));
    let mut failures = AcceptFailures::new("HTTP");
    tokio::pin!(shutdown);
    loop {
        let (stream, slot) = tokio::select! {
            admitted = admit(&slots, &mut failures, || listener.accept()) => admitted,
            () = &mut shutdown => break,
        };
        let connection = Guarded::new(stream.0, Some(slot));
        tokio::spawn(serve_connection(connection, router.clone(), graceful.watcher()));
    }
    drop(listener);
    stop.cancel();
    if tokio::time::timeout(GRACE, graceful.shutdown()).await.is_err() {
        tracing::debug!("HTTP connections were still open at exit");
    }
    Ok(())
}

async fn serve_connection<IO>(connection: Guarded<IO>, router: Router, watcher: Watcher)
where
    IO: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(HEAD_TIMEOUT).max_buf_size(HEAD_BYTES).max_headers(64);
    let served = http.serve_connection(TokioIo::new(connection), TowerToHyperService::new(router));
    if let Err(error) = watcher.watch(served).await {
        tracing::debug!(%error, "HTTP connection closed early");
    }
}

#[cfg(test)]
mod tests {
    use axum::routing::get;
    use tokio::{
        io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream, duplex},
        time::{Instant, timeout},
    };

    use super::*;

    fn connect() -> DuplexStream {
        let (ours, theirs) = duplex(64 * 1024);
        let app = Router::new().route("/livez", get(|| async { "ok" }));
        let graceful = GracefulShutdown::new();
        let watcher = graceful.watcher();
        tokio::spawn(async move {
            // The server does not stop while the connection is open.
            let _held = graceful;
            serve_connection(Guarded::new(theirs, None), app, watcher).await;
        });
        ours
    }

    async fn read_all(client: &mut DuplexStream) -> String {
        let mut read = Vec::new();
        client.read_to_end(&mut read).await.unwrap();
        String::from_utf8(read).unwrap()
    }

    #[tokio::test(start_paused = true)]
    async fn a_head_that_never_ends_is_ended_after_a_timeout() {
        let mut client = connect();
        let start = Instant::now();
        client.write_all(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n").await.unwrap();
        let drip = async {
            loop {
                tokio::time::sleep(Duration::from_secs(1)).await;
                if client.write_all(b"X-Slow: 1\r\n").await.is_err() {
                    return;
                }
            }
        };
        timeout(HEAD_TIMEOUT * 2, drip).await.expect("the connection was kept");
        assert!(start.elapsed() >= HEAD_TIMEOUT);
    }

    #[tokio::test(start_paused = true)]
    async fn an_idle_connection_is_closed() {
        let mut client = connect();
        client.write_all(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n").await.unwrap();
        let answer = timeout(HEAD_TIMEOUT * 2, read_all(&mut client)).await.expect("the connection was kept");
        assert!(answer.starts_with("HTTP/1.1 200 OK\r\n") && answer.ends_with("\r\n\r\nok"), "{answer}");
    }

    #[tokio::test(start_paused = true)]
    async fn malformed_and_oversized_requests_get_a_status() {
        for (request, status) in [
            (b"HELLO\r\n\r\n".to_vec(), "HTTP/1.1 400"),
            (b"GET / HTTP/9.9\r\n\r\n".to_vec(), "HTTP/1.1 400"),
            (
                [b"GET /".to_vec(), vec![b'x'; 2 * HEAD_BYTES], b" HTTP/1.1\r\n\r\n".to_vec()].concat(),
                "HTTP/1.1 4",
            ),
            (
                [b"GET / HTTP/1.1\r\nA: ".to_vec(), vec![b'x'; 2 * HEAD_BYTES], b"\r\n\r\n".to_vec()]
                    .concat(),
                "HTTP/1.1 431",
            ),
            (
                [b"GET / HTTP/1.1\r\n".to_vec(), b"A: b\r\n".repeat(65), b"\r\n".to_vec()].concat(),
                "HTTP/1.1 431",
            ),
        ] {
            let mut client = connect();
            client.write_all(&request).await.unwrap();
            let answer =
                timeout(HEAD_TIMEOUT * 2, read_all(&mut client)).await.expect("the connection was kept");
            assert!(answer.starts_with(status), "{:?}: {answer:?}", &request[..request.len().min(30)]);
        }
    }
}
