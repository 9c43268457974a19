//! When a watcher is due its next message.
//!
//! Owns: [`Follower`], the rule behind `WatchPulls` and `/debug/events`: the first message at once,
//! then one per change, never two within the interval, and always made from the state at the time it is
//! sent. A watcher that reads slowly gets fewer messages and no backlog.
//! In: the view's change counter and the server's shutdown. Out: when the next message is due.

use std::time::Duration;

use tokio::{
    sync::watch,
    time::{Instant, sleep_until},
};
use tokio_util::sync::CancellationToken;

/// Why the next message is due, or why there is none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Due {
    /// Something changed, or it is the first message.
    Changed,
    /// No change for the refresh interval.
    Refresh,
    Stopping,
    /// The view no longer exists.
    Gone,
}

/// Limits the rate of messages to one watcher.
#[derive(Debug)]
pub struct Follower {
    changes: watch::Receiver<u64>,
    stop: CancellationToken,
    interval: Duration,
    refresh: Option<Duration>,
    sent: Option<Instant>,
}

impl Follower {
    /// At most one message per `interval`, and one per `refresh` even without a change.
    pub fn new(
        changes: watch::Receiver<u64>,
        stop: CancellationToken,
        interval: Duration,
        refresh: Option<Duration>,
    ) -> Self {
        Self { changes, stop, interval, refresh, sent: None }
    }

    /// Waits until a message is due. The caller makes it after this returned, from the state at that time.
    pub async fn due(&mut self) -> Due {
        if self.stop.is_cancelled() {
            return Due::Stopping;
        }
        let due = match self.sent {
            None => Due::Changed,
            Some(sent) => self.next(sent).await,
        };
        // Before the state is read: a change during the read makes another message due.
        self.changes.mark_unchanged();
        self.sent = Some(Instant::now());
        due
    }

    /// Makes another message due after the interval without a change, because the last one failed.
    pub fn retry(&mut self) {
        self.changes.mark_changed();
    }

    async fn next(&mut self, sent: Instant) -> Due {
        let earliest = sent + self.interval;
        tokio::select! {
            biased;
            () = self.stop.cancelled() => return Due::Stopping,
            () = sleep_until(earliest) => {}
        }
        let refresh = self.refresh.map(|refresh| sent + refresh);
        tokio::select! {
            biased;
            () = self.stop.cancelled() => Due::Stopping,
            changed = self.changes.changed() => changed.map_or(Due::Gone, |()| Due::Changed),
            () = async { sleep_until(refresh.unwrap_or(earliest)).await }, if refresh.is_some() => Due::Refresh,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const INTERVAL: Duration = Duration::from_millis(500);

    fn follower(refresh: Option<Duration>) -> (watch::Sender<u64>, CancellationToken, Follower) {
        let (bump, changes) = watch::channel(0);
        let stop = CancellationToken::new();
        (bump, stop.clone(), Follower::new(changes, stop, INTERVAL, refresh))
    }

    #[tokio::test(start_paused = true)]
    async fn a_thousand_changes_in_an_interval_are_one_message() {
        let (bump, _stop, mut follower) = follower(None);
        let start = Instant::now();
        assert_eq!(follower.due().await, Due::Changed);
        assert_eq!(start.elapsed(), Duration::ZERO, "the first message comes at once");
        for _ in 0..1000 {
            bump.send_modify(|n| *n += 1);
        }
        assert_eq!(follower.due().await, Due::Changed);
        assert_eq!(start.elapsed(), INTERVAL);
        let quiet = tokio::time::timeout(Duration::from_secs(3600), follower.due()).await;
        assert!(quiet.is_err(), "nothing changed, and yet {quiet:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_change_after_a_quiet_time_is_sent_at_once() {
        let (bump, _stop, mut follower) = follower(None);
        follower.due().await;
        tokio::time::advance(Duration::from_secs(60)).await;
        let start = Instant::now();
        bump.send_modify(|n| *n += 1);
        assert_eq!(follower.due().await, Due::Changed);
        assert_eq!(start.elapsed(), Duration::ZERO);
    }

    #[tokio::test(start_paused = true)]
    async fn without_changes_the_refresh_comes() {
        let (_bump, _stop, mut follower) = follower(Some(Duration::from_secs(5)));
        follower.due().await;
        let start = Instant::now();
        assert_eq!(follower.due().await, Due::Refresh);
        assert_eq!(start.elapsed(), Duration::from_secs(5));
    }

    #[tokio::test(start_paused = true)]
    async fn a_failed_message_is_tried_again_after_the_interval() {
        let (_bump, _stop, mut follower) = follower(None);
        follower.due().await;
        let start = Instant::now();
        follower.retry();
        assert_eq!(follower.due().await, Due::Changed);
        assert_eq!(start.elapsed(), INTERVAL);
    }

    #[tokio::test(start_paused = true)]
    async fn stopping_or_a_closed_client_ends_a_wait() {
        let (bump, stop, mut waiting) = follower(None);
        waiting.due().await;
        let end = tokio::spawn(async move { waiting.due().await });
        tokio::task::yield_now().await;
        stop.cancel();
        assert_eq!(end.await.unwrap(), Due::Stopping);
        drop(bump);

        let (bump, _stop, mut waiting) = follower(None);
        waiting.due().await;
        drop(bump);
        assert_eq!(waiting.due().await, Due::Gone);
    }
}
