//! What image pulls learn from the pods of the node.
//!
//! Owns: the translation of pod events. In: the watch of the pods. Out: `PodGone`, `PodForgotten` and `PodsSynced` for the
//! PullCoordinator.

use std::{collections::HashSet, sync::Arc};

use keelson_actor_system::{cluster::ChoreHealth, inspect::Mailbox};
use keelson_kube::{ApiServer, KnownPods, PodEvent, PodRef, PodSink, watch_pods};
use keelson_pulls::coordinator::{PullCoordinator, PullEvent};
use tokio::sync::watch;

/// Tells the PullCoordinator which pods there are, and which go.
pub(super) async fn follow(
    api: &ApiServer,
    node: &str,
    health: &watch::Sender<ChoreHealth>,
    known: KnownPods,
    pulls: Mailbox<PullCoordinator>,
) {
    watch_pods(api, node, health, known, ToPulls { pulls }).await;
}

struct ToPulls {
    pulls: Mailbox<PullCoordinator>,
}

impl PodSink for ToPulls {
    /// At most two messages for a pod that goes, of which a node has some hundreds.
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
