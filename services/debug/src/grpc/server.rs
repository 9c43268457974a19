//! The gRPC server under the services.
//!
//! Owns: connections, reflection (v1 and v1alpha) and health. In: a bound listener, services, and the end.
//! Out: answers until the end, then a short time to finish.

use std::{future::Future, io, sync::Arc, time::Duration};

use futures_util::{Stream, stream};
use keelson_proto::FILE_DESCRIPTOR_SET;
use tokio::{
    net::{UnixListener, UnixStream},
    sync::Semaphore,
};
use tokio_util::sync::CancellationToken;
use tonic::{service::Routes, transport::Server};

use super::health;
use crate::{
    ServeError,
    connection::{Guarded, admit},
};

/// Connections at once; each costs a file descriptor and a few kilobytes.
const CONNECTIONS: usize = 512;
/// Calls at once on one connection.
const STREAMS: u32 = 128;
/// A peer that does not answer a ping is gone, though its socket may be open (a stopped process).
const PING_EVERY: Duration = Duration::from_secs(30);
const PING_TIMEOUT: Duration = Duration::from_secs(20);
/// How long calls may take to finish at the end.
const GRACE: Duration = Duration::from_secs(1);

/// Serves `routes` on `listener` until `shutdown`, with reflection, and with health for the server as a whole and for each
/// of `services`, the full names of what is in `routes`: SERVING while `ready` says so, which is asked once a second.
/// `routes` gets a token that is cancelled at the end, for streams that would not end by themselves; calls that do not
/// finish within a second are cut off.
///
/// # Errors
/// The transport failed; a single connection's trouble is none.
pub async fn serve_services<R, F>(
    listener: UnixListener,
    services: &[&'static str],
    ready: R,
    routes: impl FnOnce(CancellationToken) -> Routes,
    shutdown: impl Future<Output = ()> + Send,
) -> Result<(), ServeError>
where
    R: Fn() -> F,
    F: Future<Output = bool>,
{
    let stop = CancellationToken::new();
    // Whoever stops waiting for this function also ends the watchers of connections that are left.
    let _stop_on_drop = stop.clone().drop_guard();
    let (reporter, health_service) = tonic_health::server::health_reporter();
    let reflection = || {
        let all = tonic_reflection::server::Builder::configure()
            .register_encoded_file_descriptor_set(FILE_DESCRIPTOR_SET)
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
            .with_service_name("grpc.health.v1.Health");
        // The descriptors also hold APIs that are not served here.
        services.iter().fold(all, |some, service| some.with_service_name(*service))
    };
    health::report(&reporter, services, &ready).await;
    let serving = Server::builder()
        .max_concurrent_streams(STREAMS)
        .http2_max_header_list_size(16 * 1024)
        .http2_keepalive_interval(Some(PING_EVERY))
        .http2_keepalive_timeout(Some(PING_TIMEOUT))
        .add_routes(routes(stop.clone()))
        .add_service(health_service)
        .add_service(reflection().build_v1().map_err(ServeError::Reflection)?)
        .add_service(reflection().build_v1alpha().map_err(ServeError::Reflection)?)
        .serve_with_incoming_shutdown(incoming(listener), stop.clone().cancelled_owned());
    tokio::pin!(serving);
    tokio::select! {
        result = &mut serving => return result.map_err(ServeError::Grpc),
        () = shutdown => {}
        never = health::follow(&reporter, services, &ready) => match never {},
    }
    health::stopping(&reporter, services).await;
    stop.cancel();
    match tokio::time::timeout(GRACE, serving).await {
        Ok(result) => result.map_err(ServeError::Grpc),
        Err(_) => {
            tracing::debug!("debug API calls were still open at exit");
            Ok(())
        }
    }
}

fn incoming(listener: UnixListener) -> impl Stream<Item = io::Result<Guarded<UnixStream>>> + Send {
    let slots = Arc::new(Semaphore::new(CONNECTIONS));
    stream::unfold((listener, slots), |(listener, slots)| async move {
        let connection = admit(&slots, || async { listener.accept().await.map(|(stream, _)| stream) }).await;
        Some((Ok(connection), (listener, slots)))
    })
}
