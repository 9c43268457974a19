//! The servers of the Endpoints API, one for each address.

use std::time::Duration;

use anyhow::Context as _;
use keelson_config::{ListenSpec, Settings};
use keelson_endpoints::server::EndpointsServer;
use keelson_serve::grpc::Listener;
use keelson_serve::unix::Bound;
use tokio::{net::TcpListener, sync::watch, task::JoinHandle};

use crate::agent::jobs::{Attempt, Job, Jobs};

/// Time for calls to end once the server stops.
const STOP_TIMEOUT: Duration = Duration::from_millis(300);

/// Serves the API at one address until the attempt stops. The file of a socket is removed with the attempt.
async fn serve(
    spec: ListenSpec,
    mode: u32,
    server: EndpointsServer,
    mut attempt: Attempt,
) -> anyhow::Result<()> {
    let label = spec.to_string();
    let (listener, _file) = match spec {
        ListenSpec::Unix(socket) => {
            let (listener, file) = Bound::bind(socket.path(), mode).await?.into_parts();
            (Listener::Unix(listener, label.clone()), Some(file))
        }
        ListenSpec::Tcp(address) => {
            let listener = TcpListener::bind(address).await;
            let listener =
                listener.with_context(|| format!("cannot listen on {label} (endpoints.listen)"))?;
            // With port 0, the assigned port.
            let label = listener.local_addr().map_or(label, |address| format!("tcp://{address}"));
            if !address.ip().to_canonical().is_loopback() {
                tracing::warn!(
                    address = label,
                    "the Endpoints API is reachable from other machines without authentication \
                     (endpoints.allow_remote)"
                );
            }
            (Listener::Tcp(listener, label), None)
        }
    };
    let label = listener.name().to_owned();
    let mut thread = server.start(vec![listener])?;
    attempt.serves(label);
    tokio::select! {
        () = thread.ended() => {}
        () = attempt.stopped() => thread.stop(STOP_TIMEOUT).await,
    }
    Ok(())
}

pub(in crate::agent) struct EndpointsServing {
    stop: watch::Sender<bool>,
    tasks: Vec<JoinHandle<()>>,
}

impl EndpointsServing {
    /// Accepts no new calls, ends the running ones, and waits at most `timeout` for that.
    pub(in crate::agent) async fn stop(self, timeout: Duration) {
        self.stop.send_replace(true);
        if tokio::time::timeout(timeout, futures_util::future::join_all(self.tasks)).await.is_err() {
            tracing::info!("closing connections to the Endpoints API");
        }
    }
}

pub(super) async fn serve_all(server: &EndpointsServer, job: &Job, settings: &Settings) -> EndpointsServing {
    let (stop, stopped) = watch::channel(false);
    let mut serving = Jobs::new(stopped);
    let mode = settings.endpoints.socket_mode.bits();
    for (index, spec) in settings.endpoints.listen.iter().enumerate() {
        let (spec, server) = (spec.clone(), server.clone());
        serving.keep(job, index, move |attempt| serve(spec.clone(), mode, server.clone(), attempt));
    }
    EndpointsServing { stop, tasks: serving.wait_for_first_tries().await }
}
