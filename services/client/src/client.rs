//! Following.
//!
//! Owns: [`Client`], which connects, asks, waits and begins again for as long as it takes. In: [`Options`], cancellation.
//! Out: whole [`State`]s one by one, or the calls of [`Handlers`].

use std::{io, time::Duration};

use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

use crate::{
    Api, DiffStore, Error, Handlers, Options, Position, State, Trouble,
    connection::{Connection, Watch},
    retry::Troubles,
    store::Batch,
};

/// Follows the endpoints of one server.
///
/// Either state by state with [`next`](Self::next), or with [`run`](Self::run), which tells a consumer what has changed.
/// Nothing but cancellation ends either.
#[derive(Debug)]
pub struct Client {
    options: Options,
    cancel: CancellationToken,
    troubles: Troubles,
    link: Link,
    /// What was received last: where to go on from.
    position: Position,
    received: bool,
}

/// How far we are with the server.
#[derive(Debug)]
enum Link {
    None,
    /// Connected. `watch`: whether changes may be asked for.
    Idle {
        connection: Connection,
        watch: bool,
    },
    Watching {
        connection: Connection,
        watch: Box<Watch>,
    },
}

impl Client {
    /// A client that is not connected yet.
    #[must_use]
    pub fn new(options: Options) -> Self {
        let position = Position { instance_id: options.instance_id, rev: options.rev, ..Position::default() };
        Self {
            cancel: CancellationToken::new(),
            troubles: Troubles::new(options.error_delay),
            link: Link::None,
            position,
            received: false,
            options,
        }
    }

    /// What cancels it: a token that may be cloned, cancelled from anywhere, and waited for.
    #[must_use]
    pub fn cancellation(&self) -> CancellationToken {
        self.cancel.clone()
    }

    /// Is cancelled by this token from now on, and no more by the one before.
    pub fn cancel_with(&mut self, token: CancellationToken) {
        self.cancel = token;
    }

    /// Is cancelled from now on when the process gets SIGINT or SIGTERM, which then no longer end it.
    ///
    /// # Errors
    /// The signals cannot be listened to.
    ///
    /// # Panics
    /// Outside of a tokio runtime with I/O, as tokio does.
    pub fn cancel_on_signals(&self) -> io::Result<()> {
        let mut interrupt = signal(SignalKind::interrupt())?;
        let mut terminate = signal(SignalKind::terminate())?;
        let cancel = self.cancel.clone();
        tokio::spawn(async move {
            tokio::select! {
                _ = interrupt.recv() => {}
                _ = terminate.recv() => {}
                () = cancel.cancelled() => {}
            }
            cancel.cancel();
        });
        Ok(())
    }

    /// Calls this for errors, for those who want more than the lines that go to `tracing`. Of errors in a row it is
    /// called for the 1st, 2nd, 4th, 8th and so on, and for each kind when it occurs first.
    pub fn on_trouble(&mut self, callback: impl FnMut(&Trouble<'_>) + Send + 'static) {
        self.troubles.on_trouble(Box::new(callback));
    }

    /// Calls this when a state has come and was taken after errors, though it may be the state from before them, of which
    /// the consumer is told nothing.
    pub fn on_recovery(&mut self, callback: impl FnMut() + Send + 'static) {
        self.troubles.on_recovery(Box::new(callback));
    }

    /// Where it stands: what [`Options::instance_id`] and [`Options::rev`] resume from.
    #[must_use]
    pub fn position(&self) -> &Position {
        &self.position
    }

    /// Waits for the next state and returns it, whole. Connects as often as it takes; none: it was cancelled. Uses
    /// `Next`, whatever [`Options::api`] says. To drop it half way loses nothing.
    pub async fn next(&mut self) -> Option<State> {
        let cancel = self.cancel.clone();
        loop {
            match cancel.run_until_cancelled(self.receive_state()).await? {
                Ok(state) => {
                    self.position = state.position.clone();
                    self.received = true;
                    self.troubles.well();
                    return Some(state);
                }
                Err(error) => self.give_up(&error, &cancel).await,
            }
        }
    }

    /// Tells a consumer of every state until it is cancelled, and returns where it stood then. While `sync` of the consumer
    /// runs it is waited for even when cancelled.
    ///
    /// It begins at [`Options::instance_id`] and [`Options::rev`], or where an earlier run of this client ended, if the
    /// consumer has the same state still.
    pub async fn run(&mut self, handlers: &mut impl Handlers) -> Position {
        let cancel = self.cancel.clone();
        let held = handlers.held();
        let resumes = self.position.instance_id != 0;
        let mut store = if resumes { DiffStore::resumed(held) } else { DiffStore::new(held) };
        loop {
            let Some(batch) = cancel.run_until_cancelled(self.receive_batch()).await else { break };
            let delivered = match batch {
                Ok(batch) => self.deliver(&mut store, batch, handlers).await,
                Err(error) => Err(error),
            };
            match delivered {
                Ok(()) => self.troubles.well(),
                Err(error) => self.give_up(&error, &cancel).await,
            }
        }
        self.position.clone()
    }

    async fn deliver(
        &mut self,
        store: &mut DiffStore,
        batch: Batch,
        handlers: &mut impl Handlers,
    ) -> Result<(), Error> {
        let position = batch.position.clone();
        let delivered = store.deliver_batch(batch, handlers).await;
        match &delivered {
            Ok(()) => (self.position, self.received) = (position, true),
            // To be offered whole it has to be asked for whole.
            Err(Error::Handler(_)) => (self.position, self.received) = (Position::default(), false),
            Err(_) => {}
        }
        delivered
    }

    /// Reports an error, leaves the connection and waits.
    async fn give_up(&mut self, error: &Error, cancel: &CancellationToken) {
        self.link = Link::None;
        let pause: Duration = self.troubles.note(error);
        cancel.run_until_cancelled(tokio::time::sleep(pause)).await;
    }

    async fn receive_batch(&mut self) -> Result<Batch, Error> {
        loop {
            self.link = match std::mem::replace(&mut self.link, Link::None) {
                Link::None => Link::Idle { connection: Connection::open(&self.options).await?, watch: true },
                Link::Watching { connection, mut watch } => {
                    let batch = watch.batch().await;
                    match batch {
                        // The stream may be refused only when its first item is due.
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
        // Who says the same at once whenever asked would keep both sides busy for nothing.
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
