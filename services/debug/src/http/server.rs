//! The HTTP server under the routes.
//!
//! Owns: connections, their number and their times; it knows of no route. In: a bound listener, routes, and the end.
//! Out: answers until the end, then a short time to finish.

use std::{convert::Infallible, future::Future, net::SocketAddr, sync::Arc, time::Duration};

use axum::{Router, extract::Request, middleware};
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

use super::gate::{self, Hosts};
use crate::{
    ServeError,
    connection::{Guarded, admit},
};

/// Connections at once; a browser uses two to six.
const CONNECTIONS: usize = 256;
/// How long a request's head may take to arrive, and how long a connection may stay idle.
pub(super) const HEAD_TIMEOUT: Duration = Duration::from_secs(20);
/// The largest request head.
pub(super) const HEAD_BYTES: usize = 16 * 1024;
/// How long answers may take to finish at the end.
const GRACE: Duration = Duration::from_secs(1);

/// Serves routes on `listener` until `shutdown`. `routes` is told the address and gets a token that is cancelled at the
/// end, for streams that would not end by themselves; what it gives should be [`gated`].
///
/// # Errors
/// The listener has no local address; a single connection's trouble is no error.
pub async fn serve_router(
    listener: TcpListener,
    routes: impl FnOnce(SocketAddr, CancellationToken) -> Router,
    shutdown: impl Future<Output = ()> + Send,
) -> Result<(), ServeError> {
    let bound = listener.local_addr().map_err(ServeError::LocalAddress)?;
    let stop = CancellationToken::new();
    // Whoever stops waiting for this function also ends the streams of connections that are left.
    let _stop_on_drop = stop.clone().drop_guard();
    let router = routes(bound, stop.clone());
    let graceful = GracefulShutdown::new();
    let slots = Arc::new(Semaphore::new(CONNECTIONS));
    tokio::pin!(shutdown);
    loop {
        let accept = admit(&slots, || async { listener.accept().await.map(|(stream, _)| stream) });
        let connection = tokio::select! {
            connection = accept => connection,
            () = &mut shutdown => break,
        };
        tokio::spawn(serve_connection(connection, router.clone(), graceful.watcher()));
    }
    drop(listener);
    stop.cancel();
    if tokio::time::timeout(GRACE, graceful.shutdown()).await.is_err() {
        tracing::debug!("HTTP connections were still open at exit");
    }
    Ok(())
}

pub(super) async fn serve_connection<IO>(connection: Guarded<IO>, router: Router, watcher: Watcher)
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

/// Routes behind the gate: only GET and HEAD, only hosts that are this server's, and headers by which a browser does no more
/// with an answer than show it.
pub fn gated(routes: Router, own: Hosts) -> Router {
    let own = Arc::new(own);
    routes.layer(middleware::from_fn(move |request: Request, next: middleware::Next| {
        let own = own.clone();
        async move { Ok::<_, Infallible>(gate::pass(&own, request, next).await) }
    }))
}
