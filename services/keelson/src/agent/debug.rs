//! The servers of the debug API: gRPC on the debug socket, HTTP on `debug.http`.
//!
//! Owns: their jobs, and the samples of the last hour. In: the bound debug socket, and the view of the agent. Out: servers; listening is retried after
//! failures.

use std::{net::SocketAddr, os::unix::net::UnixListener, rc::Rc, sync::Arc};

use anyhow::Context as _;
use keelson_actor_system::inspect::Status;
use keelson_config::Settings;
use keelson_debug::{AgentView as _, serve_grpc, serve_http};
use keelson_serve::unix::Bound;
use tokio::{net::TcpListener, sync::watch};

use super::{
    actor_handle::ActorHandle,
    history,
    jobs::{Attempt, Job, Jobs},
    view::View,
};

pub(super) struct DebugServers {
    socket: Job,
    page: Job,
}

impl DebugServers {
    pub(super) fn new(changes: &watch::Sender<u64>) -> Self {
        let [socket, page] = ["DebugSocket", "DebugHttp"].map(|name| Job::new(name, changes.clone()));
        Self { socket, page }
    }

    pub(super) fn handles(&self) -> [ActorHandle; 2] {
        [&self.socket, &self.page].map(|job| ActorHandle::job(job.recorder()))
    }

    /// Serves until the returned sender sends true or is dropped.
    pub(super) async fn serve(
        &self,
        settings: &Arc<Settings>,
        listener: Option<Rc<UnixListener>>,
        view: &View,
    ) -> watch::Sender<bool> {
        let (stop, stopped) = watch::channel(false);
        let mut serving = Jobs::new(stopped);
        let (own, shown) = (settings.clone(), view.clone());
        serving.keep(&self.socket, 0, move |attempt| {
            debug_socket(listener.clone(), own.clone(), shown.clone(), attempt)
        });
        match settings.debug.http {
            Some(address) => {
                let (view, names) = (view.clone(), host_names(&settings.debug.http_hosts));
                serving.keep(&self.page, 0, move |attempt| {
                    debug_http(address, view.clone(), names.clone(), attempt)
                });
            }
            None => self.page.recorder().status(Status::Disabled, "debug.http is off"),
        }
        let (sampled, history) = (view.clone(), view.history());
        tokio::spawn(async move { history.sample(|| history::read(sampled.clone())).await });
        // The servers end by the watch.
        drop(serving.wait_for_first_tries().await);
        stop
    }
}

/// Serves the debug API on the existing socket, or on a new one.
async fn debug_socket(
    given: Option<Rc<UnixListener>>,
    settings: Arc<Settings>,
    view: View,
    mut attempt: Attempt,
) -> anyhow::Result<()> {
    let spec = &settings.debug.listen;
    let (listener, _file) = match given {
        Some(given) => (tokio::net::UnixListener::from_std(given.try_clone()?)?, None),
        None => {
            let bound = Bound::bind(spec.path(), settings.debug.socket_mode.bits()).await?;
            let (listener, file) = bound.into_parts();
            (listener, Some(file))
        }
    };
    attempt.serves(spec.to_string());
    let stop = stopped(attempt.stop.clone());
    serve_grpc(listener, view, stop).await.context("cannot serve the debug socket")
}

async fn debug_http(
    address: SocketAddr,
    view: View,
    names: Arc<[String]>,
    mut attempt: Attempt,
) -> anyhow::Result<()> {
    let listener = TcpListener::bind(address).await;
    let listener = listener.with_context(|| format!("cannot listen on {address} (debug.http)"))?;
    attempt.serves(listener.local_addr().unwrap_or(address).to_string());
    let stop = stopped(attempt.stop.clone());
    serve_http(listener, view, names, stop).await.context("cannot serve the debug page")
}

pub(crate) fn host_names(names: &[keelson_config::HostName]) -> Arc<[String]> {
    names.iter().map(|name| name.0.clone()).collect()
}

/// Returns when the watch is true, or its sender is dropped.
async fn stopped(mut stop: watch::Receiver<bool>) {
    let _ = stop.wait_for(|stop| *stop).await;
}
