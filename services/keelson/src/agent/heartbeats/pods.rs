//! Pod events for image pulls.
//!
//! Owns: the translation of pod events. In: the watch of the pods. Out: `PodGone`, `PodForgotten` and `PodsSynced` for the
//! PullCoordinator.

use std::{collections::HashSet, sync::Arc};

use keelson_actor_system::{cluster::JobHealth, inspect::Mailbox};
use keelson_kube::{ApiServer, KnownPods, PodEvent, PodRef, PodSink, watch_pods};
use keelson_pulls::coordinator::{PullCoordinator, PullEvent};
use tokio::sync::watch;

use crate::agent::{cluster::shows_failure, jobs::Job};

pub(super) struct PodWatch {
    pub(super) job: Job,
    pub(super) health: watch::Receiver<JobHealth>,
}

pub(super) fn build(
    api: &ApiServer,
    node: &str,
    pulls: &Mailbox<PullCoordinator>,
    changes: watch::Sender<u64>,
    arbiter: &actix::ArbiterHandle,
) -> PodWatch {
    let (health, health_seen) = watch::channel(JobHealth::Pending);
    let (api, node, pulls, health) = (api.clone(), node.to_owned(), pulls.clone(), Arc::new(health));
    let (known, failed) = (KnownPods::default(), shows_failure(health.clone()));
    let job = Job::new("PodWatch", changes);
    job.keep_on(arbiter, 0, failed, move || {
        let (api, node, health) = (api.clone(), node.clone(), health.clone());
        let (known, pulls) = (known.clone(), pulls.clone());
        async move { watch_pods(&api, &node, &health, known, PullsPodSink { pulls }).await }
    });
    PodWatch { job, health: health_seen }
}

struct PullsPodSink {
    pulls: Mailbox<PullCoordinator>,
}

impl PodSink for PullsPodSink {
    /// At most two messages for a deleted pod, and a node has some hundreds of pods.
    fn pod(&mut self, event: PodEvent) {
        let gone = |pod: &PodRef| PullEvent::PodGone {
            uid: pod.uid.clone(),
            pod: format!("{}/{}", pod.namespace, pod.name),
        };
        match event {
            PodEvent::Present(_) => {}
            PodEvent::Terminating(pod) => self.pulls.deliver(gone(&pod)),
            PodEvent::Gone(pod) => {
                self.pulls.deliver(gone(&pod));
                self.pulls.deliver(PullEvent::PodForgotten(pod.uid));
            }
        }
    }

    fn synced(&mut self, live: HashSet<String>) {
        self.pulls.deliver(PullEvent::PodsSynced(Arc::new(live)));
    }
}
