//! Signals to the agent.
//!
//! Owns: the handlers of SIGTERM, SIGINT and SIGHUP, and the stand-in, which forwards signals of systemd. Out: [`Request`].

use anyhow::Context as _;
use tokio::signal::unix::{Signal, SignalKind, signal};

use super::stand_in::{self, StandIn};

/// A request by a signal or the stand-in.
pub(super) enum Request {
    Stop {
        /// Another agent may be about to start.
        replaced: bool,
    },
    Reload,
}

pub(super) struct Signals {
    terminate: Signal,
    interrupt: Signal,
    hangup: Signal,
    stand_in: Option<StandIn>,
    pub(super) has_stand_in: bool,
}

impl Signals {
    pub(super) fn new() -> anyhow::Result<Self> {
        let listen = |kind| signal(kind).context("cannot listen for signals");
        Ok(Self {
            terminate: listen(SignalKind::terminate())?,
            interrupt: listen(SignalKind::interrupt())?,
            hangup: listen(SignalKind::hangup())?,
            stand_in: None,
            has_stand_in: false,
        })
    }

    /// From now on this process receives systemd's signals.
    pub(super) fn follow(&mut self, stand_in: Option<StandIn>) {
        self.has_stand_in = stand_in.is_some();
        self.stand_in = stand_in;
    }

    /// Lets systemd start the next agent; a no-op if systemd has ended the stand-in.
    pub(super) fn end_stand_in(&mut self) {
        self.stand_in.take().into_iter().for_each(StandIn::finish);
    }

    pub(super) async fn next(&mut self) -> Request {
        tokio::select! {
            _ = self.terminate.recv() => Request::Stop { replaced: true },
            // A user at a terminal.
            _ = self.interrupt.recv() => Request::Stop { replaced: false },
            _ = self.hangup.recv() => Request::Reload,
            event = stand_in_event(&mut self.stand_in) => match event {
                stand_in::Event::Reload => Request::Reload,
                stand_in::Event::Ended => {
                    self.stand_in = None;
                    Request::Stop { replaced: true }
                }
            },
        }
    }

    pub(super) async fn stop(&mut self) {
        while matches!(self.next().await, Request::Reload) {}
    }
}

async fn stand_in_event(stand_in: &mut Option<StandIn>) -> stand_in::Event {
    match stand_in {
        Some(stand_in) => stand_in.next().await,
        None => std::future::pending().await,
    }
}
