//! The thread of the CRI front.
//!
//! Owns: that thread and its runtime. In: a bound listener. Out: a handle that notices the end and
//! brings it about.

use std::time::Duration;

use anyhow::Context as _;
use keelson_cri::front::{self, FrontParts};
use tokio::{
    net::UnixListener,
    sync::{oneshot, watch},
};

/// A running front.
#[derive(Debug)]
pub(super) struct FrontThread {
    stop: watch::Sender<bool>,
    ended: oneshot::Receiver<()>,
}

impl FrontThread {
    pub(super) fn start(listener: UnixListener, parts: FrontParts) -> anyhow::Result<Self> {
        // A listener belongs to the runtime that polls it.
        let listener = listener.into_std().context("the CRI listener")?;
        let (stop, stopped) = watch::channel(false);
        let (ending, ended) = oneshot::channel();
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .context("the runtime of the CRI front")?;
        std::thread::Builder::new()
            .name("cri".into())
            .spawn(move || {
                runtime.block_on(async {
                    match UnixListener::from_std(listener) {
                        Ok(listener) => front::serve(listener, parts, stopped).await,
                        Err(error) => tracing::error!(%error, "the CRI listener"),
                    }
                });
                let _ = ending.send(());
            })
            .context("the thread of the CRI front")?;
        Ok(Self { stop, ended })
    }

    /// When the front has ended.
    pub(super) async fn ended(&mut self) {
        let _ = (&mut self.ended).await;
    }

    /// Takes no new calls, gives those that run `patience` to end.
    pub(super) async fn stop(mut self, patience: Duration) {
        let _ = self.stop.send(true);
        if tokio::time::timeout(patience, &mut self.ended).await.is_err() {
            tracing::info!("calls that still run on the CRI socket are cut off");
        }
    }
}
