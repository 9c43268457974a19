//! Hand-over of pulls from a stopping agent to its successor.
//!
//! Owns: both sides. The stopping agent keeps the pulls that its runtime works on, with their callers, and gives
//! everything else away; from then on it starts nothing, and every other caller is sent to the successor. The successor
//! counts pulls that continue in its predecessor like its own ([`Stage::Predecessor`]) until their end is reported, or
//! until the predecessor is gone and it has to ask the runtime itself.

use std::{collections::BTreeSet, sync::Arc};

use keelson_actor_system::clock::Now;

use super::{
    CallerId, Core, Effect, Lane, Note, Pull, PullEnd, Refusal, Stage, Timer, queue::Place, restore::Source,
};
use crate::runtime::RuntimeCommand;
use crate::{
    coordinator::{
        handover::{HandedEnd, HandedOutcome, HandedPull, HandedState, RunningPull, UnreadJournal},
        record::{KeptLease, Write},
    },
    request::PullId,
    runtime::PullReply,
};

impl Core {
    /// Pulls that the runtime works on stay until they end.
    pub(crate) fn hand_over(&mut self, now: Now) -> (HandedState, Vec<Effect>) {
        let mut fx = Vec::new();
        let state = self.handed_state(now);
        self.draining = true;
        let (stay, leave): (Vec<Place>, Vec<Place>) = self
            .pulls
            .values()
            .map(|pull| (pull.place(), pull.continues_after_handover()))
            .fold((Vec::new(), Vec::new()), |(mut stay, mut leave), (place, continues_after_handover)| {
                if continues_after_handover {
                    stay.push(place)
                } else {
                    leave.push(place)
                }
                (stay, leave)
            });
        self.handed = Some(stay.into_iter().map(|(_, id)| id).collect());
        let leave: BTreeSet<Place> = leave.into_iter().collect();
        let text = format!(
            "handed over: {} pulls, {} of them continue in this process",
            state.pulls.len(),
            state.running()
        );
        for (_, id) in leave {
            self.leave_to_successor(id, &mut fx);
        }
        self.kept.clear();
        self.timers.retain(|(_, timer)| !matches!(timer, Timer::LeaseExpiry(_)));
        fx.push(Effect::Note(Note { warn: false, text }));
        (state, fx)
    }

    #[must_use]
    pub(crate) fn is_handed_over(&self) -> bool {
        self.handed.is_some()
    }

    fn handed_state(&self, now: Now) -> HandedState {
        let running = |pull: &Pull| {
            pull.continues_after_handover().then(|| RunningPull {
                credentials: pull.call.key.credentials,
                present: pull.lane == Some(Lane::Present),
            })
        };
        let pulls =
            self.pulls.values().map(|pull| HandedPull { record: pull.record(), running: running(pull) });
        let leases = self.kept_leases_at(now);
        HandedState {
            owner: self.owner.clone(),
            pulls: pulls.collect(),
            leases,
            limit: self.limit_override,
            salt: None,
            ignores_namespace: !self.namespaces_matter,
            unread: self.unread.as_ref().map(|unread| UnreadJournal { limit_changed: unread.limit_changed }),
        }
    }

    fn kept_leases_at(&self, now: Now) -> Vec<KeptLease> {
        let write = |write| match write {
            Write::PutLease(lease) => Some(lease),
            _ => None,
        };
        self.journal_writes(now).into_iter().filter_map(write).collect()
    }

    /// To be called once, on an empty core.
    pub(crate) fn take_over(&mut self, state: HandedState, now: Now) -> Vec<Effect> {
        self.namespaces_matter = !state.ignores_namespace;
        if let Some(unread) = state.unread {
            self.take_over_unread(unread, now);
        }
        let running = state.running_pulls();
        let records = state.pulls.into_iter().map(|pull| pull.record).collect();
        let fx = self.restore_from(Source::Predecessor, records, state.leases, state.limit, now);
        for (id, running) in running {
            self.follow_predecessor(id, &running, now);
        }
        fx
    }

    /// A restored pull continues in the predecessor: it holds its slot, and callers may join it.
    fn follow_predecessor(&mut self, id: PullId, running: &RunningPull, now: Now) {
        let Some(pull) = self.pulls.get_mut(&id) else { return };
        if let Stage::Held { until } = pull.stage {
            self.timers.remove(&(until, Timer::Held(id)));
        }
        pull.stage = Stage::Predecessor;
        pull.started.get_or_insert(now);
        if pull.call.key.credentials != running.credentials {
            let mut call = (*pull.call).clone();
            call.key.credentials = running.credentials;
            pull.call = Arc::new(call);
        }
        let (place, call) = (pull.place(), pull.call.clone());
        self.held.remove(&place);
        self.queue.remove(place);
        let key = self.key_of(&call);
        self.by_key.entry(key).or_insert(id);
        self.take_slot(id, if running.present { Lane::Present } else { Lane::Counted });
    }

    pub(super) fn predecessor_ended(
        &mut self,
        id: PullId,
        how: HandedOutcome,
        now: Now,
        fx: &mut Vec<Effect>,
    ) {
        let Some(pull) = self.pulls.get(&id) else { return };
        if !matches!(pull.stage, Stage::Predecessor) {
            return;
        }
        match how {
            HandedOutcome::Answered(reply) => {
                let reply: Arc<PullReply> = Arc::new(reply.into());
                self.conclude(id, &reply, now, fx);
            }
            HandedOutcome::Cancelled if pull.callers.is_empty() => self.end(id, PullEnd::Cancelled, now, fx),
            HandedOutcome::Cancelled | HandedOutcome::Returned => self.take_back(id, now, fx),
        }
    }

    /// Pulls that still ran in the predecessor are pulled here.
    pub(super) fn predecessor_gone(&mut self, now: Now, fx: &mut Vec<Effect>) {
        let lost =
            |id: &PullId| self.pulls.get(id).is_some_and(|pull| matches!(pull.stage, Stage::Predecessor));
        let lost: Vec<PullId> = self.slots.iter().map(|(_, id)| *id).filter(lost).collect();
        if !lost.is_empty() {
            let text = format!("the previous agent exited; {} of its pulls restart", lost.len());
            fx.push(Effect::Note(Note { warn: true, text }));
        }
        for id in lost {
            self.take_back(id, now, fx);
        }
    }

    /// A pull that ran in the predecessor waits for a slot here, at its place. Without a caller there are no
    /// credentials for it: then it is held.
    fn take_back(&mut self, id: PullId, now: Now, fx: &mut Vec<Effect>) {
        let Some(pull) = self.pulls.get(&id) else { return };
        let bare = pull.with_credentials && pull.callers.is_empty();
        if self.is_handed_over() || !bare {
            return self.back_to_queue(id, now, fx);
        }
        self.release_slot(id);
        let until = now.mono + self.policy.resume_window;
        let Some(pull) = self.pulls.get_mut(&id) else { return };
        pull.stage = Stage::Held { until };
        let (place, call) = (pull.place(), pull.call.clone());
        let key = self.key_of(&call);
        if self.by_key.get(&key) == Some(&id) {
            self.by_key.remove(&key);
        }
        self.arm(until, Timer::Held(id));
        self.held.insert(place);
        self.persist(id, fx);
    }

    /// Sends a pull's callers to the successor and forgets the pull: the successor has it.
    pub(super) fn leave_to_successor(&mut self, id: PullId, fx: &mut Vec<Effect>) {
        self.report_end(id, HandedOutcome::Returned, fx);
        let callers: Vec<CallerId> =
            self.pulls.get(&id).map(|pull| pull.callers.iter().copied().collect()).unwrap_or_default();
        for caller in callers {
            self.refuse(caller, Refusal::Moved, fx);
        }
        self.take_out(id);
    }

    /// Reports to the successor, once, the end of a pull that was handed over while it ran.
    pub(super) fn report_end(&mut self, id: PullId, how: HandedOutcome, fx: &mut Vec<Effect>) {
        if self.handed.as_mut().is_some_and(|handed| handed.remove(&id)) {
            fx.push(Effect::ReportToSuccessor(HandedEnd { pull: id.0, how }));
        }
    }

    /// The refusal of callers that arrive while the agent stops.
    pub(super) fn refusal_at_the_end(&self) -> Option<Refusal> {
        match (self.draining, self.is_handed_over()) {
            (_, true) => Some(Refusal::Moved),
            (true, false) => Some(Refusal::Stopping),
            (false, false) => None,
        }
    }
}

impl Pull {
    /// Continues in this process when the agent stops.
    fn continues_after_handover(&self) -> bool {
        matches!(self.stage, Stage::Running | Stage::Predecessor)
    }
}

impl Effect {
    /// Not performed after a hand-over: leases and journal belong to the successor.
    #[must_use]
    pub(crate) fn is_left_to_successor(&self) -> bool {
        matches!(
            self,
            Self::Persist(_)
                | Self::Runtime(
                    RuntimeCommand::DropLease { .. }
                        | RuntimeCommand::ReapLeases(_)
                        | RuntimeCommand::CheckPresent { .. }
                )
        )
    }
}
