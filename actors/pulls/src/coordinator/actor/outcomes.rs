//! Reports of pulls that ended, and of pods whose pulls wait.
//!
//! Owns: the log line and the counters of a pull that ended. In: finished pulls and notices of the core. Out: metrics,
//! one log line per pull, and Events for their writer, without waiting.

use super::PullCoordinator;
use crate::{
    coordinator::core::{Answer, FinishedPull, PodNotice, PullEnd, Refusal, Tally},
    metrics::{Metrics, PullResult, ReasonLabel, ResultLabel},
};

pub(super) fn report_end(metrics: &Metrics, pull: &FinishedPull) {
    let (result, reason) = (pull.why.result, pull.why.reason);
    metrics.pulls.get_or_create(&PullResult { result, reason }).inc();
    if let Some(time) = pull.pull_time {
        metrics.running_time.observe(time.as_secs_f64());
    }
    let pod = pull.pod.as_ref().map(|pod| format!("{}/{}", pod.namespace, pod.name)).unwrap_or_default();
    let error = match &pull.end {
        PullEnd::Failed(words) | PullEnd::Refused(words) => Some(&**words),
        PullEnd::Succeeded | PullEnd::Cancelled => None,
    };
    tracing::info!(
        image = &*pull.image,
        pod,
        result,
        reason,
        error,
        attempts = pull.attempts,
        queue_wait = ?pull.queue_wait,
        pull_time = ?pull.pull_time.unwrap_or_default(),
        "image pull ended"
    );
}

impl Metrics {
    /// Counts a refused caller. One that is sent to a successor is not counted.
    pub(super) fn answered(&self, answer: &Answer) {
        if let Answer::Refused(refusal) = answer
            && *refusal != Refusal::Moved
        {
            self.refused.get_or_create(&ReasonLabel { reason: refusal.reason() }).inc();
        }
    }

    pub(super) fn tally(&self, tally: Tally) {
        let (family, reason) = match tally {
            Tally::Joined(reason) => (&self.deduplicated, reason),
            Tally::Retried(reason) => (&self.retried, reason),
        };
        family.get_or_create(&ReasonLabel { reason }).inc();
    }
}

impl PullCoordinator {
    /// A notice that finds the channel full is lost: the next update has the same content.
    pub(super) fn notify(&self, notice: PodNotice) {
        let Some(events) = &self.events else { return };
        if events.try_send(notice.into()).is_err() {
            self.metrics.events.get_or_create(&ResultLabel { result: "dropped" }).inc();
        }
    }
}
