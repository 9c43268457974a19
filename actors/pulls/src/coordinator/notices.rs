//! Writes Events, on pods and on the Node.
//!
//! Owns: the order and the counters of the writes. In: [`ClusterEvent`]s on a bounded channel. Out: calls on an
//! [`EventApi`], one at a time. Nothing waits for them: an Event that cannot be written is counted as failed and not
//! retried; its next update has the same content.

use keelson_actor_system::cluster::{ApiError, ApiErrorKind, ClusterEvent, EventApi, EventObject};
use tokio::sync::mpsc;

use super::core::PodNotice;
use crate::{
    metrics::{Metrics, ResultLabel},
    request::Pod,
};

/// Capacity of the channel.
pub const EVENTS_WAITING: usize = 64;

/// Runs until the channel is closed. `node` is the host that the Events name.
pub async fn write_events(
    api: impl EventApi,
    node: String,
    events: &mut mpsc::Receiver<ClusterEvent>,
    metrics: Metrics,
) {
    while let Some(event) = events.recv().await {
        let written = write(&api, &node, event).await;
        let result = if written.is_ok() { "sent" } else { "failed" };
        metrics.events.get_or_create(&ResultLabel { result }).inc();
        if let Err(error) = written {
            tracing::debug!(%error, "cannot write an event");
        }
    }
}

/// As client-go: an Event that is repeated is patched, and created again if it has expired.
async fn write(api: &impl EventApi, node: &str, event: ClusterEvent) -> Result<(), ApiError> {
    if event.count > 1 {
        match api.patch_event(event.clone()).await {
            Err(error) if error.kind == ApiErrorKind::NotFound => {}
            patched => return patched,
        }
    }
    api.create_event(node, event).await
}

impl From<PodNotice> for ClusterEvent {
    fn from(notice: PodNotice) -> Self {
        let Pod { namespace, name, uid } = notice.pod;
        Self {
            name: notice.name,
            object: EventObject::Pod { namespace, name, uid },
            is_warning: false,
            reason: notice.reason,
            message: notice.message,
            count: notice.count,
            first_unix_ms: notice.first_unix_ms,
            last_unix_ms: notice.last_unix_ms,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use futures_util::future::{BoxFuture, FutureExt as _, ready};

    use super::*;

    #[derive(Clone, Default)]
    struct Fake {
        calls: Arc<Mutex<Vec<(&'static str, u32)>>>,
        errors: Arc<Mutex<Vec<Option<ApiErrorKind>>>>,
    }

    impl Fake {
        fn called(
            &self,
            what: &'static str,
            event: &ClusterEvent,
        ) -> BoxFuture<'static, Result<(), ApiError>> {
            self.calls.lock().unwrap().push((what, event.count));
            let error = self.errors.lock().unwrap().pop().flatten();
            let error = error.map(|kind| ApiError { server: "s".into(), kind, reason: "r".into() });
            ready(error.map_or(Ok(()), Err)).boxed()
        }
    }

    impl EventApi for Fake {
        fn create_event(&self, _node: &str, event: ClusterEvent) -> BoxFuture<'static, Result<(), ApiError>> {
            self.called("create", &event)
        }

        fn patch_event(&self, event: ClusterEvent) -> BoxFuture<'static, Result<(), ApiError>> {
            self.called("patch", &event)
        }
    }

    fn notice(count: u32) -> PodNotice {
        PodNotice {
            pod: Pod { namespace: "ns".into(), name: "web".into(), uid: "u".into() },
            name: "web.1".into(),
            reason: "ImagePullQueued",
            message: "waits".into(),
            count,
            first_unix_ms: 0,
            last_unix_ms: 1,
        }
    }

    #[tokio::test]
    async fn events_are_created_patched_created_again_and_never_retried() {
        let (fake, metrics) = (Fake::default(), Metrics::default());
        // The answers, the last one first.
        *fake.errors.lock().unwrap() =
            vec![Some(ApiErrorKind::Forbidden), None, Some(ApiErrorKind::NotFound), None, None];
        let (to, mut events) = mpsc::channel(EVENTS_WAITING);
        for count in [1, 2, 3, 4] {
            to.send(notice(count).into()).await.unwrap();
        }
        drop(to);
        write_events(fake.clone(), "n1".into(), &mut events, metrics.clone()).await;
        let calls = fake.calls.lock().unwrap().clone();
        assert_eq!(calls, [("create", 1), ("patch", 2), ("patch", 3), ("create", 3), ("patch", 4)]);
        let count = |result| metrics.events.get_or_create(&ResultLabel { result }).get();
        assert_eq!((count("sent"), count("failed")), (3, 1));
    }
}
