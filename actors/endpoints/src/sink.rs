//! How sources reach the EndpointPublisher.
//!
//! Owns: the way in. In: [`SourceEvent`]s. Out: messages; a full mailbox is waited for, and so is an actor that
//! starts again.

use std::time::Duration;

use futures_util::{FutureExt as _, future::BoxFuture};
use keelson_actor_system::inspect::{Mailbox, MailboxError};

use super::{
    Answer, CidrChanged, EndpointPublisher, EndpointsCount, EventSink, NodeChanged, ServiceChanged,
    SliceChanged, SourceEvent, SourceHealthChanged,
};

/// Between two looks whether the actor is back.
const LOOK_AGAIN: Duration = Duration::from_millis(100);

impl EventSink for Mailbox<EndpointPublisher> {
    fn send(&self, event: SourceEvent) -> BoxFuture<'_, Answer> {
        async move {
            match event {
                SourceEvent::Services(seen) => {
                    back(self, self.ask_waiting(ServiceChanged { seen }).await).await
                }
                SourceEvent::EndpointSlices(seen) => {
                    back(self, self.ask_waiting(SliceChanged { seen }).await).await
                }
                SourceEvent::ServiceCidrs(seen) => {
                    back(self, self.ask_waiting(CidrChanged { seen }).await).await
                }
                SourceEvent::Node(node) => loop {
                    match self.ask_waiting(NodeChanged { node: node.clone() }).await {
                        Ok(answer) => break answer,
                        Err(_) => alive(self).await,
                    }
                },
                SourceEvent::Health(kind, health) => loop {
                    match self.ask_waiting(SourceHealthChanged { kind, health: health.clone() }).await {
                        Ok(answer) => break answer,
                        Err(_) => alive(self).await,
                    }
                },
            }
        }
        .boxed()
    }
}

/// The answer. Without one the actor stopped and what was sent is lost with it: what comes after it says nothing.
async fn back(publisher: &Mailbox<EndpointPublisher>, answer: Result<Answer, MailboxError>) -> Answer {
    match answer {
        Ok(answer) => answer,
        Err(_) => {
            alive(publisher).await;
            Answer::ListAgain
        }
    }
}

/// Waits until the actor answers.
async fn alive(publisher: &Mailbox<EndpointPublisher>) {
    loop {
        tokio::time::sleep(LOOK_AGAIN).await;
        if publisher.ask_waiting(EndpointsCount {}).await.is_ok() {
            return;
        }
    }
}
