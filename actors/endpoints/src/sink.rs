//! Sends events of sources to the mailbox of the EndpointPublisher, and waits while it is full.

use futures_util::{FutureExt as _, future::BoxFuture};
use keelson_actor_system::inspect::Mailbox;

use super::{Ack, EndpointPublisher, EndpointsCount, EventSink, SourceEvent};

impl EventSink for Mailbox<EndpointPublisher> {
    fn send(&self, event: SourceEvent) -> BoxFuture<'_, Ack> {
        async move {
            // Changes that follow a list are lost with the actor that had the list. Other events are complete by
            // themselves.
            let is_complete = matches!(event, SourceEvent::Node(_) | SourceEvent::Health(..));
            let again = is_complete.then(|| event.clone());
            let mut next = Some(event);
            while let Some(event) = next {
                if let Ok(answer) = self.ask_waiting(event).await {
                    return answer;
                }
                restarted(self).await;
                next = again.clone();
            }
            Ack::Relist
        }
        .boxed()
    }
}

/// Returns when the actor answers again; never if it was given up.
async fn restarted(publisher: &Mailbox<EndpointPublisher>) {
    while publisher.ask_waiting(EndpointsCount {}).await.is_err() {
        if publisher.is_closed() {
            std::future::pending::<()>().await;
        }
    }
}
