//! Actors and jobs in the debug API.
//!
//! Owns: [`ActorHandle`]: the recorder of one actor, and the two requests that every actor answers. In: mailboxes. Out:
//! recorders, states as JSON, and whether an actor answers.

use std::{sync::Arc, time::Duration};

use actix::{Actor, Context, Handler, dev::ToEnvelope};
use futures_util::{FutureExt as _, future::BoxFuture};
use keelson_actor_system::inspect::{ActorMessage, Mailbox, MailboxError, Recorder, Status};
use keelson_debug::ViewError;

/// An actor that takes longer to answer is reported as not answering.
const TIMEOUT: Duration = Duration::from_secs(2);

type Question<T> = Box<dyn Fn() -> BoxFuture<'static, Result<T, MailboxError>> + Send + Sync>;

pub(super) struct ActorHandle {
    recorder: Arc<Recorder>,
    /// `None` while the actor is disabled.
    questions: Option<(Question<String>, Question<()>)>,
}

impl ActorHandle {
    /// A running actor: `state` requests its state as JSON, `alive` is the cheapest request it answers.
    pub(super) fn on<A, S, L>(mailbox: &Mailbox<A>, state: fn() -> S, alive: fn() -> L) -> Self
    where
        A: Actor<Context = Context<A>> + Handler<S> + Handler<L>,
        A::Context: ToEnvelope<A, S> + ToEnvelope<A, L>,
        S: ActorMessage<Result = String> + Send + 'static,
        L: ActorMessage + Send + 'static,
        L::Result: Send,
    {
        let (asked, probed) = (mailbox.clone(), mailbox.clone());
        let state: Question<String> = Box::new(move || {
            let mailbox = asked.clone();
            async move { mailbox.ask(state()).await }.boxed()
        });
        let alive: Question<()> = Box::new(move || {
            let mailbox = probed.clone();
            async move { mailbox.ask(alive()).await.map(drop) }.boxed()
        });
        Self { recorder: mailbox.recorder().clone(), questions: Some((state, alive)) }
    }

    /// An actor that was not started, and why.
    pub(super) fn off(name: &'static str, why: &str) -> Self {
        let recorder = Recorder::new(name, 0);
        recorder.status(Status::Disabled, why);
        Self { recorder, questions: None }
    }

    /// A job that is not an actor: it has no state and answers nothing.
    pub(super) fn job(recorder: &Arc<Recorder>) -> Self {
        Self { recorder: recorder.clone(), questions: None }
    }

    pub(super) fn recorder(&self) -> &Arc<Recorder> {
        &self.recorder
    }

    /// Its state as JSON; empty while it is disabled.
    pub(super) fn state(&self) -> BoxFuture<'static, Result<String, MailboxError>> {
        match &self.questions {
            Some((state, _)) => state(),
            None => async { Ok(String::new()) }.boxed(),
        }
    }

    /// Whether it answers within `patience`. A full mailbox means busy, not stuck: its messages are being processed.
    pub(super) fn answers(&self, patience: Duration) -> BoxFuture<'static, bool> {
        let Some((_, alive)) = &self.questions else { return async { true }.boxed() };
        let answer = tokio::time::timeout(patience, alive());
        async move { !matches!(answer.await, Err(_) | Ok(Err(MailboxError::Closed(_)))) }.boxed()
    }
}

/// Limits the wait for an actor's answer.
pub(super) async fn ask_with_timeout<T>(
    question: impl Future<Output = Result<T, MailboxError>>,
) -> Result<T, ViewError> {
    match tokio::time::timeout(TIMEOUT, question).await {
        Ok(Ok(answer)) => Ok(answer),
        Ok(Err(MailboxError::Full(actor))) => Err(ViewError::Busy(format!("the mailbox of {actor} is full"))),
        Ok(Err(error @ MailboxError::Closed(_))) => Err(ViewError::Unavailable(error.to_string())),
        Err(_) => Err(ViewError::Unavailable(format!("the actor did not answer within {TIMEOUT:?}"))),
    }
}
