//! The calls of running pulls.
//!
//! Owns: one task per attempt. Out: exactly one `PullFinished` for each attempt that was not cancelled; a
//! `PullProgress` when the pull of a present image turns out to be a download.

use std::{cell::Cell, rc::Rc, sync::Arc, time::Duration};

use actix::{AsyncContext as _, Context};
use keelson_actor_system::inspect::Mailbox;
use tokio::time::Instant;

use super::{Running, RuntimeClient};
use crate::{
    request::PullId,
    runtime::{
        core::{Event, Health},
        messages::{CallEnded, RuntimeEvent, Subscriber},
        types::{Outcome, Phase, PullReply, Runtime, RuntimePull},
    },
};

/// Interval of progress readings of a pull beside the limit, until it downloads.
const PRESENT_READING: Duration = Duration::from_millis(50);
/// Delay of the query for the size of a pulled image, for the kubelet's metric: a burst of pulls must not compete with
/// queries about finished ones.
const SIZE_AFTER: Duration = Duration::from_secs(2);

impl RuntimeClient {
    /// `None` if the runtime has no readings.
    fn download(&self, pull: PullId, lease: Option<String>) -> Option<DownloadWatch> {
        let content = matches!(self.core.health(), Health::Up { info, .. } if info.capabilities.content);
        let (runtime, subscriber) = (self.runtime.clone(), self.subscriber.clone());
        let watch = |lease| Some(DownloadWatch { runtime, subscriber: subscriber?, pull, lease });
        lease.filter(|_| content).and_then(watch)
    }

    pub(super) fn forget(&mut self, pull: PullId, attempt: u32) {
        if let Some(running) = self.running.remove(&(pull, attempt)) {
            running.wanted.set(false);
            running.task.abort();
        }
    }
}

/// Notices that the pull of a present image is a download, because its tag has moved.
struct DownloadWatch {
    runtime: Arc<dyn Runtime>,
    subscriber: Arc<dyn Subscriber>,
    pull: PullId,
    lease: String,
}

impl DownloadWatch {
    /// Reads the progress every [`PRESENT_READING`] until something is being downloaded, and reports that. Never ends:
    /// it is dropped with the pull. A present image is pulled within a few of these readings.
    async fn notice(self) -> std::convert::Infallible {
        loop {
            tokio::time::sleep(PRESENT_READING).await;
            let Ok(read) = self.runtime.progress(vec![self.lease.clone()]).await else { continue };
            let Some(progress) = read.pulls.get(&self.lease).map(|reading| reading.progress) else {
                continue;
            };
            if progress.phase == Phase::Downloading {
                self.subscriber.send(RuntimeEvent::PullProgress { pull: self.pull, progress });
                std::future::pending::<()>().await;
            }
        }
    }
}

/// Ends an attempt exactly once, even if its task is dropped.
struct EndOnce {
    subscriber: Option<Arc<dyn Subscriber>>,
    wanted: Rc<Cell<bool>>,
    pull: PullId,
    attempt: u32,
}

impl EndOnce {
    fn end(mut self, outcome: Outcome) {
        self.report(outcome);
    }

    fn report(&mut self, outcome: Outcome) {
        if let Some(subscriber) = self.subscriber.take()
            && self.wanted.get()
        {
            subscriber.send(RuntimeEvent::PullFinished { pull: self.pull, attempt: self.attempt, outcome });
        }
    }
}

impl Drop for EndOnce {
    fn drop(&mut self) {
        let reply = PullReply::status(
            keelson_proto::Code::Unavailable,
            "the runtime client restarted during the pull",
        );
        self.report(Outcome::Lost(Arc::new(reply)));
    }
}

impl RuntimeClient {
    pub(super) fn pull(
        &mut self,
        pull: PullId,
        attempt: u32,
        request: RuntimePull,
        waited: Duration,
        present: bool,
        ctx: &mut Context<Self>,
    ) {
        let lease = request.lease.clone();
        let call = request.call.clone();
        let runtime = self.runtime.clone();
        let metrics = self.metrics.clone();
        let me = Mailbox::new(ctx.address(), self.recorder().clone());
        let wanted = Rc::new(Cell::new(true));
        let end = EndOnce { subscriber: self.subscriber.clone(), wanted: wanted.clone(), pull, attempt };
        // A lease that is being deleted must be gone before it is created again.
        let dropping = lease.as_ref().and_then(|lease| self.dropping.get(lease)).cloned();
        let since = Instant::now();
        let turns = self.presence.clone();
        let download = self.download(pull, lease.clone()).filter(|_| present);
        let task = actix::spawn(async move {
            if let Some(dropping) = dropping {
                dropping.await;
            }
            let outcome = match download {
                Some(download) => tokio::select! {
                    ended = runtime.pull(request) => ended,
                    never = download.notice() => match never {},
                },
                None => runtime.pull(request).await,
            };
            let (failed, is_lost) = (outcome.reply().result.is_err(), outcome.is_lost());
            metrics.operation("pull_image", since.elapsed(), failed);
            end.end(outcome);
            me.deliver(CallEnded { pull, attempt, is_lost });
            if !failed {
                let took = waited + since.elapsed();
                tokio::time::sleep(SIZE_AFTER).await;
                let _turn = turns.acquire_owned().await;
                let size = runtime.image_size(call).await.ok().flatten();
                metrics.pulled(took, size);
            }
        });
        self.running.insert((pull, attempt), Running { task: task.abort_handle(), wanted, lease, since });
    }

    pub(super) fn call_ended(&mut self, message: CallEnded, ctx: &mut Context<Self>) {
        self.running.remove(&(message.pull, message.attempt));
        self.images.outdate();
        if message.is_lost {
            self.metrics.lost.inc();
            let effects = self.core.handle(Event::CallLost, self.clock.now());
            self.perform(effects, ctx);
        }
    }
}
