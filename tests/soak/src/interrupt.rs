//! The request to stop early.
//!
//! Owns: [`Interrupt`]. In: SIGINT and SIGTERM. Out: a run that ends its phase, checks everything once more, writes
//! its report and removes what it made.

use anyhow::{Context as _, Result};
use tokio::signal::unix::{Signal, SignalKind, signal};

/// One that comes between two waits is not lost.
#[derive(Debug)]
pub(crate) struct Interrupt {
    interrupt: Signal,
    terminate: Signal,
}

impl Interrupt {
    pub(crate) fn watch() -> Result<Self> {
        let watch = |kind| signal(kind).context("cannot wait for signals");
        Ok(Self { interrupt: watch(SignalKind::interrupt())?, terminate: watch(SignalKind::terminate())? })
    }

    pub(crate) async fn wait(&mut self) {
        tokio::select! {
            _ = self.interrupt.recv() => {}
            _ = self.terminate.recv() => {}
        }
        println!("ending; the report follows");
    }
}
