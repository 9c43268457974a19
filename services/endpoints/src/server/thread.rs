//! The thread of the Endpoints API.
//!
//! Owns: that thread and its runtime, so that no other part of the agent waits while many callers read a full state.
//! In: a server and its listeners. Out: [`EndpointsThread`], which waits for the end and causes it.

use std::{io, time::Duration};

use keelson_serve::grpc::{DetachedListener, Listener};
use tokio::sync::oneshot;
use tokio_util::sync::{CancellationToken, DropGuard};

use super::EndpointsServer;

#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// A listener cannot be moved to another runtime.
    #[error("cannot move the listener {listener} of the Endpoints API to its thread")]
    Listener { listener: String, source: io::Error },
    #[error("cannot start a {what} for the Endpoints API")]
    Thread {
        /// `runtime` or `thread`.
        what: &'static str,
        source: io::Error,
    },
}

/// A server on its own thread. Stops when dropped.
#[derive(Debug)]
pub struct EndpointsThread {
    stop: DropGuard,
    ended: oneshot::Receiver<()>,
}

impl EndpointsThread {
    pub(super) fn start(server: EndpointsServer, listeners: Vec<Listener>) -> Result<Self, StartError> {
        // A listener belongs to the runtime that polls it.
        let detach = |listener: Listener| {
            let name = listener.name().to_owned();
            listener.detach().map_err(|source| StartError::Listener { listener: name, source })
        };
        let listeners = listeners.into_iter().map(detach).collect::<Result<Vec<_>, _>>()?;
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(|source| StartError::Thread { what: "runtime", source })?;
        let stop = CancellationToken::new();
        let stopped = stop.clone();
        let (ending, ended) = oneshot::channel();
        let run = async move {
            match listeners.into_iter().map(DetachedListener::attach).collect::<io::Result<Vec<_>>>() {
                Ok(listeners) => {
                    if let Err(error) = server.serve(listeners, stopped.cancelled_owned()).await {
                        tracing::error!(%error, "Endpoints API failed");
                    }
                }
                Err(error) => tracing::error!(%error, "cannot listen for the Endpoints API"),
            }
        };
        std::thread::Builder::new()
            .name("endpoints".into())
            .spawn(move || {
                runtime.block_on(run);
                // Cuts off the remaining connections.
                drop(runtime);
                let _ = ending.send(());
            })
            .map_err(|source| StartError::Thread { what: "thread", source })?;
        Ok(Self { stop: stop.drop_guard(), ended })
    }

    /// Returns when the server has ended, by itself or because its thread panicked.
    pub async fn ended(&mut self) {
        let _ = (&mut self.ended).await;
    }

    /// Accepts no new calls, ends the running ones with UNAVAILABLE, and waits at most `patience` for the thread.
    pub async fn stop(self, patience: Duration) {
        let Self { stop, ended } = self;
        drop(stop);
        if tokio::time::timeout(patience, ended).await.is_err() {
            tracing::info!("closing connections to the Endpoints API");
        }
    }
}
