//! The thread of the CRI front.
//!
//! Owns: that thread and its runtime. In: a bound listener. Out: a handle that waits for the end of the thread and
//! causes it.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use anyhow::Context as _;
use keelson_cri::front::{self, FrontParts, Phase};
use tokio::{
    net::UnixListener,
    sync::{oneshot, watch},
};

/// Time for the connections to close.
const CLOSING: Duration = Duration::from_secs(1);

/// Dropping it closes the connections, with the calls on them.
#[derive(Debug)]
pub(super) struct FrontThread {
    phases: watch::Sender<Phase>,
    alive: Option<oneshot::Sender<()>>,
    clients: Arc<AtomicUsize>,
    ended: oneshot::Receiver<()>,
}

impl FrontThread {
    pub(super) fn start(listener: UnixListener, parts: FrontParts) -> anyhow::Result<Self> {
        // A listener belongs to the runtime that polls it.
        let listener = listener.into_std().context("cannot use the CRI listener")?;
        let (phases, phase) = watch::channel(Phase::Serving);
        let clients = parts.clients.clone();
        let (ending, ended) = oneshot::channel();
        let (alive, dropped) = oneshot::channel::<()>();
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .context("cannot start the runtime of the CRI front")?;
        std::thread::Builder::new()
            .name("cri".into())
            .spawn(move || {
                runtime.block_on(async {
                    match UnixListener::from_std(listener) {
                        Ok(listener) => tokio::select! {
                            () = front::serve(listener, parts, phase) => {}
                            _ = dropped => {}
                        },
                        Err(error) => tracing::error!(%error, "cannot use the CRI listener"),
                    }
                });
                // Drops the tasks of all connections.
                runtime.shutdown_background();
                let _ = ending.send(());
            })
            .context("cannot start the thread of the CRI front")?;
        Ok(Self { phases, alive: Some(alive), clients, ended })
    }

    pub(super) async fn ended(&mut self) {
        let _ = (&mut self.ended).await;
    }

    pub(super) fn was_used(&self) -> bool {
        self.clients.load(Ordering::Relaxed) > 0
    }

    /// Accepts no new connections; running calls continue.
    pub(super) fn leave(&self) {
        self.phases.send_replace(Phase::Leaving);
    }

    /// Cuts off calls that pass through ([`Phase::Cut`]).
    pub(super) fn cutter(&self) -> watch::Sender<Phase> {
        self.phases.clone()
    }

    /// Accepts no new calls, gives the running ones `patience` to end, and then closes their connections. The end of
    /// the process would do so too, but not while one of its threads waits for a disk that hangs.
    pub(super) async fn stop(mut self, patience: Duration) {
        self.leave();
        if tokio::time::timeout(patience, &mut self.ended).await.is_err() {
            tracing::info!("closing connections with running calls on the CRI socket");
            drop(self.alive.take());
            let _ = tokio::time::timeout(CLOSING, &mut self.ended).await;
        }
    }
}
