//! Deleted pods, and the refusal of their waiting callers.
//!
//! Owns: [`DeletedPods`], the uids of pods that are deleted or terminating, and the refusal of their waiting callers.
//! In: changes of pods. Out: refusals; pulls without callers leave the queue. Running pulls continue: the download is
//! under way, and the kubelet waits for the answer anyway.
//!
//! The kubelet does not cancel the pull of a deleted pod, and the pod stays `Terminating` until the call returns, so a
//! place in the queue would hold it until its turn. Static pods never match: the sandbox config has the uid of their
//! manifest, and their mirror pods at the API server have another.

use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    time::Duration,
};

use keelson_actor_system::clock::Now;

use super::{CallerId, Core, Effect, Note, Pull, PullEnd, Refusal, Stage};
use crate::request::PullId;

/// Maximum number of pods remembered; above it the oldest is forgotten.
const MAX_PODS: usize = 10_000;
/// How long a pod is remembered after its object was deleted: the kubelet may still retry.
const REMEMBER: Duration = Duration::from_secs(600);

#[derive(Debug)]
struct DeletedPod {
    /// `namespace/name`.
    pod: String,
    age: u64,
}

#[derive(Debug, Default)]
pub(in crate::coordinator) struct DeletedPods {
    pods: HashMap<String, DeletedPod>,
    by_age: BTreeMap<u64, String>,
    next_age: u64,
    /// A list of all pods of the node has been received.
    synced: bool,
    /// Pods whose objects are deleted, and until when they are remembered. An entry may outlive its pod.
    leaving: VecDeque<(Duration, u64)>,
}

impl DeletedPods {
    fn insert(&mut self, uid: String, pod: String, now: Duration) {
        self.expire(now);
        if self.pods.contains_key(&uid) {
            return;
        }
        let age = self.next_age;
        self.next_age += 1;
        self.by_age.insert(age, uid.clone());
        self.pods.insert(uid, DeletedPod { pod, age });
        if self.pods.len() > MAX_PODS
            && let Some((_, first)) = self.by_age.pop_first()
        {
            self.pods.remove(&first);
        }
    }

    /// The pod's object is deleted: no more events of it will arrive.
    fn forget(&mut self, uid: &str, now: Duration) {
        self.expire(now);
        if let Some(gone) = self.pods.get(uid) {
            self.leaving.push_back((now + REMEMBER, gone.age));
            // The list must not grow if the same pods are reported repeatedly.
            if self.leaving.len() > MAX_PODS {
                self.leaving.pop_front();
            }
        }
    }

    pub(super) fn expire(&mut self, now: Duration) {
        while let Some((until, age)) = self.leaving.front().copied()
            && until <= now
        {
            self.leaving.pop_front();
            if let Some(uid) = self.by_age.remove(&age) {
                self.pods.remove(&uid);
            }
        }
    }

    pub(super) fn is_synced(&self) -> bool {
        self.synced
    }

    pub(super) fn set_synced(&mut self) {
        self.synced = true;
    }

    /// As `namespace/name`.
    pub(super) fn pod(&self, uid: &str) -> Option<&str> {
        self.pods.get(uid).map(|gone| gone.pod.as_str())
    }
}

impl Core {
    pub(super) fn pod_gone(&mut self, uid: String, pod: String, now: Now, fx: &mut Vec<Effect>) {
        if uid.is_empty() {
            return;
        }
        self.deleted_pods.insert(uid.clone(), pod, now.mono);
        let waits = |caller: &super::Caller| {
            caller.pod.as_ref().is_some_and(|pod| pod.uid == uid)
                && self.pulls.get(&caller.pull).is_some_and(Pull::has_not_begun)
        };
        let mut waiting: Vec<CallerId> =
            self.callers.iter().filter(|(_, caller)| waits(caller)).map(|(id, _)| *id).collect();
        waiting.sort_unstable();
        for caller in waiting {
            if let Some(refusal) = self.refusal_for_gone(caller) {
                fx.push(Effect::Note(Note { warn: false, text: refusal.to_string() }));
                self.refuse_and_leave(caller, refusal, now, fx);
            }
        }
        self.drop_places_of(&uid, now, fx);
    }

    pub(super) fn pod_forgotten(&mut self, uid: &str, now: Now) {
        self.deleted_pods.forget(uid, now.mono);
    }

    /// Drops places from the journal, held or queued, without callers, that the pod requested. Another caller that had
    /// joined that pull before the restart asks again.
    fn drop_places_of(&mut self, uid: &str, now: Now, fx: &mut Vec<Effect>) {
        let places = self.held.iter().copied().chain(self.queue.places());
        let is_its_own = |id: &PullId| {
            self.pulls.get(id).is_some_and(|pull| {
                pull.callers.is_empty() && pull.call.pod.as_ref().is_some_and(|pod| pod.uid == uid)
            })
        };
        let dropped: Vec<PullId> = places.map(|(_, id)| id).filter(is_its_own).collect();
        for id in dropped {
            if let Some(pull) = self.pulls.get(&id) {
                let text = format!("the place of {} is released: its pod was deleted", pull.call.name.full());
                fx.push(Effect::Note(Note { warn: false, text }));
            }
            self.set_end_reason(id, "PodDeleted");
            self.end(id, PullEnd::Cancelled, now, fx);
        }
    }

    pub(super) fn refusal_for_gone(&self, id: CallerId) -> Option<Refusal> {
        let caller = self.callers.get(&id)?;
        let pod = self.deleted_pods.pod(&caller.pod.as_ref()?.uid)?;
        let image = &self.pulls.get(&caller.pull)?.call.image;
        Some(Refusal::PodGone { pod: pod.to_owned(), image: image.to_string() })
    }

    #[must_use]
    pub(crate) fn pods_gone(&self) -> usize {
        self.deleted_pods.pods.len()
    }

    /// For the next life of the coordinator.
    pub(in crate::coordinator) fn take_deleted_pods(&mut self) -> DeletedPods {
        std::mem::take(&mut self.deleted_pods)
    }

    /// To be called before [`Core::restore`].
    pub(in crate::coordinator) fn set_deleted_pods(&mut self, gone: DeletedPods) {
        self.deleted_pods = gone;
    }
}

impl Pull {
    /// The runtime does not work on it, and did not lose it.
    pub(super) fn has_not_begun(&self) -> bool {
        matches!(self.stage, Stage::Queued { .. } | Stage::Pausing { .. } | Stage::Held { .. })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn at(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn a_pod_is_remembered_until_ten_minutes_after_its_deletion() {
        let mut gone = DeletedPods::default();
        gone.insert("u".into(), "ns/web".into(), at(0));
        gone.expire(at(100_000));
        assert_eq!(gone.pod("u"), Some("ns/web"), "it may be terminating for a long time");
        gone.forget("u", at(100_000));
        gone.forget("other", at(100_000));
        gone.expire(at(100_599));
        assert_eq!(gone.pod("u"), Some("ns/web"));
        gone.expire(at(100_600));
        assert_eq!((gone.pod("u"), gone.by_age.len(), gone.leaving.len()), (None, 0, 0));
    }

    #[test]
    fn the_number_of_remembered_pods_is_bounded() {
        let mut gone = DeletedPods::default();
        for n in 0..3 * MAX_PODS {
            gone.insert(n.to_string(), "ns/p".into(), at(0));
            gone.insert(n.to_string(), "ns/p".into(), at(0));
            gone.forget(&n.to_string(), at(0));
            gone.forget(&n.to_string(), at(0));
        }
        assert_eq!((gone.pods.len(), gone.by_age.len(), gone.leaving.len()), (MAX_PODS, MAX_PODS, MAX_PODS));
        assert_eq!((gone.pod("0"), gone.pod(&(3 * MAX_PODS - 1).to_string())), (None, Some("ns/p")));
        gone.expire(at(600));
        assert!(gone.leaving.is_empty());
    }
}
