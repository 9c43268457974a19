//! The client.
//!
//! Owns: [`Client`], which connects, reads, and retries until it is cancelled. In: [`Options`], cancellation.
//! Out: complete [`State`]s one by one, or the calls of [`Handlers`].

use std::{io, time::Duration};

use tokio_util::sync::CancellationToken;

use crate::{
    Api, DiffStore, Error, ErrorReport, Handlers, Options, Position, ServiceEndpoints, State,
    connection::{Connection, Watch},
    retry::ErrorLog,
    store::Batch,
};

/// Reads the endpoints of one server.
///
/// Either state by state with [`next`](Self::next), or with [`run`](Self::run), which reports changes to a consumer.
/// Only cancellation ends either.
#[derive(Debug)]
pub struct Client {
    options: Options,
    cancel: CancellationToken,
    errors: ErrorLog,
    link: Link,
    /// The state that was received last; the next request starts from it.
    position: Position,
    received: bool,
    ahead: Option<Batch>,
}

#[derive(Debug)]
enum Link {
    None,
    /// Connected. `watch`: whether Watch may be called.
    Idle {
        connection: Connection,
        watch: bool,
    },
    Watching {
        connection: Connection,
        watch: Box<Watch>,
    },
}

/// Completes with the first signal to stop.
#[cfg(unix)]
fn stop_signal() -> io::Result<impl Future<Output = ()>> {
    use tokio::signal::unix::{SignalKind, signal};

    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    Ok(async move {
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
        }
    })
}

#[cfg(not(unix))]
fn stop_signal() -> io::Result<impl Future<Output = ()>> {
    Ok(async {
        let _ = tokio::signal::ctrl_c().await;
    })
}

impl Client {
    /// Creates a client; it connects when it is first used.
    #[must_use]
    pub fn new(options: Options) -> Self {
        let position = Position { instance_id: options.instance_id, rev: options.rev, ..Position::default() };
        Self {
            cancel: CancellationToken::new(),
            errors: ErrorLog::new(options.error_delay),
            link: Link::None,
            position,
            received: false,
            ahead: None,
            options,
        }
    }

    /// The token that cancels this client; it can be cloned, cancelled from anywhere, and waited for.
    #[must_use]
    pub fn cancellation(&self) -> CancellationToken {
        self.cancel.clone()
    }

    /// Replaces the token that cancels this client.
    pub fn cancel_with(&mut self, token: CancellationToken) {
        self.cancel = token;
    }

    /// From now on, SIGINT and SIGTERM (on Windows Ctrl-C) cancel this client instead of ending the process.
    ///
    /// # Errors
    /// The signal handlers cannot be installed.
    ///
    /// # Panics
    /// Outside of a tokio runtime with I/O.
    pub fn cancel_on_signals(&self) -> io::Result<()> {
        let signalled = stop_signal()?;
        let cancel = self.cancel.clone();
        tokio::spawn(async move {
            tokio::select! {
                () = signalled => {}
                () = cancel.cancelled() => {}
            }
            cancel.cancel();
        });
        Ok(())
    }

    /// Sets a callback for errors, in addition to the log lines of `tracing`. Of consecutive errors it is called for
    /// the 1st, 2nd, 4th, 8th and so on, and for each kind when it occurs first.
    pub fn on_error(&mut self, callback: impl FnMut(&ErrorReport<'_>) + Send + 'static) {
        self.errors.on_error(Box::new(callback));
    }

    /// Sets a callback for the first state after errors. The state may be the same as before the errors; the consumer
    /// is then not called.
    pub fn on_recovery(&mut self, callback: impl FnMut() + Send + 'static) {
        self.errors.on_recovery(Box::new(callback));
    }

    /// The last received state; [`Options::instance_id`] and [`Options::rev`] resume from it.
    #[must_use]
    pub fn position(&self) -> &Position {
        &self.position
    }

    /// Waits for the next state and returns it in full. Reconnects as needed; `None`: the client was cancelled. Uses
    /// `Next`, whatever [`Options::api`] says. Cancel safe.
    pub async fn next(&mut self) -> Option<State> {
        let cancel = self.cancel.clone();
        loop {
            match cancel.run_until_cancelled(self.receive_state()).await? {
                Ok(state) => {
                    self.position = state.position.clone();
                    self.received = true;
                    self.errors.record_success();
                    return Some(state);
                }
                Err(error) => self.give_up(&error, &cancel).await,
            }
        }
    }

    /// Connects and receives the first state, which [`run`](Self::run) reports: for a consumer that is not ready yet. Ends
    /// early after an error, which `run` meets again.
    pub async fn receive_ahead(&mut self) {
        let cancel = self.cancel.clone();
        match cancel.run_until_cancelled(self.receive_batch()).await {
            Some(Ok(batch)) => self.ahead = Some(batch),
            Some(Err(_)) | None => self.link = Link::None,
        }
    }

    /// Reports every state to a consumer until the client is cancelled; returns the last position. A running `sync` of
    /// the consumer is waited for even when cancelled.
    ///
    /// Starts at [`Options::instance_id`] and [`Options::rev`], or where an earlier run of this client ended, if the
    /// consumer still has that state.
    pub async fn run<S>(&mut self, handlers: &mut impl Handlers<S>) -> Position
    where
        S: From<ServiceEndpoints> + Send,
    {
        let cancel = self.cancel.clone();
        let held = handlers.held();
        let resumes = self.position.instance_id != 0;
        let mut store = if resumes { DiffStore::resumed(held) } else { DiffStore::new(held) };
        loop {
            let batch = match self.ahead.take() {
                Some(batch) => Some(Ok(batch)),
                None => cancel.run_until_cancelled(self.receive_batch()).await,
            };
            let Some(batch) = batch else { break };
            let delivered = match batch {
                Ok(batch) => self.deliver(&mut store, batch, handlers).await,
                Err(error) => Err(error),
            };
            match delivered {
                Ok(()) => self.errors.record_success(),
                Err(error) => self.give_up(&error, &cancel).await,
            }
        }
        self.position.clone()
    }

    async fn deliver<S: From<ServiceEndpoints> + Send>(
        &mut self,
        store: &mut DiffStore,
        batch: Batch,
        handlers: &mut impl Handlers<S>,
    ) -> Result<(), Error> {
        let position = batch.position.clone();
        let delivered = store.deliver_batch(batch, handlers).await;
        match &delivered {
            Ok(()) => (self.position, self.received) = (position, true),
            // The state is offered again in full, so it has to be requested in full.
            Err(Error::Handler(_)) => (self.position, self.received) = (Position::default(), false),
            Err(_) => {}
        }
        delivered
    }

    /// Reports an error, closes the connection and waits.
    async fn give_up(&mut self, error: &Error, cancel: &CancellationToken) {
        self.link = Link::None;
        let pause: Duration = self.errors.record_error(error);
        cancel.run_until_cancelled(tokio::time::sleep(pause)).await;
    }

    async fn receive_batch(&mut self) -> Result<Batch, Error> {
        loop {
            self.link = match std::mem::replace(&mut self.link, Link::None) {
                Link::None => Link::Idle { connection: Connection::open(&self.options).await?, watch: true },
                Link::Watching { connection, mut watch } => {
                    let batch = watch.batch().await;
                    match batch {
                        // The server may refuse the stream only when its first item is due.
                        Err(error) if error.is_unimplemented() => fall_back(connection),
                        batch => {
                            self.link = Link::Watching { connection, watch };
                            return batch;
                        }
                    }
                }
                Link::Idle { connection, watch: true } if self.options.api == Api::Watch => {
                    match connection.watch(&self.position).await {
                        Ok(watch) => Link::Watching { connection, watch: Box::new(watch) },
                        Err(error) if error.is_unimplemented() => fall_back(connection),
                        Err(error) => return Err(error),
                    }
                }
                link @ Link::Idle { .. } => {
                    self.link = link;
                    return Ok(self.receive_state().await?.into());
                }
            }
        }
    }

    async fn receive_state(&mut self) -> Result<State, Error> {
        let connection = match &mut self.link {
            Link::Idle { connection, .. } | Link::Watching { connection, .. } => connection,
            Link::None => {
                let connection = Connection::open(&self.options).await?;
                self.link = Link::Idle { connection, watch: true };
                return Box::pin(self.receive_state()).await;
            }
        };
        let state = connection.next(&self.position).await?;
        // A server that returns the same state to each request would keep both sides busy.
        if self.received && state.position == self.position {
            return Err(Error::malformed("it sent the state that the request excluded"));
        }
        Ok(state)
    }
}

fn fall_back(connection: Connection) -> Link {
    tracing::info!("server does not support Watch; falling back to Next");
    Link::Idle { connection, watch: false }
}
