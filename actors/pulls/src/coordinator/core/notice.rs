//! Events on pods whose pulls wait for a slot.
//!
//! Owns: which waiting callers get an Event, when, and how many there may be. In: callers that wait longer than
//! `pulls.queued_event_after`. Out: [`PodNotice`]s, written if there is an API server; nothing waits for that.
//!
//! The Event of a caller that continues to wait is updated (count, time and message), as client-go updates the Event of
//! a repeated occurrence, at each [`REPEAT`] times the first wait. A budget applies to all pods together; a notice
//! without budget is retried later, so that each of many waiting pods gets its Event in the end and the API server is
//! not flooded.

use std::time::Duration;

use keelson_actor_system::clock::Now;

use super::{CallerId, Core, Effect, Health, PodNotice, Pull, Stage, Timer};

pub(crate) const PULL_QUEUED: &str = "ImagePullQueued";
/// An Event is updated after this many times `pulls.queued_event_after`: with the default every 5 min.
const REPEAT: u32 = 10;
/// Maximum number of notices written at once.
const BURST: u32 = 20;
/// Time per additional notice.
const REFILL: Duration = Duration::from_secs(2);
/// Delay of a notice that exceeded the budget.
const POSTPONED: Duration = Duration::from_secs(10);

#[derive(Debug, Clone, Default)]
pub(super) struct NoticeState {
    pub(super) at: Option<Duration>,
    count: u32,
    first_unix_ms: i64,
}

#[derive(Debug)]
pub(super) struct Budget {
    left: u32,
    filled: Duration,
}

impl Default for Budget {
    fn default() -> Self {
        Self { left: BURST, filled: Duration::ZERO }
    }
}

impl Budget {
    fn take(&mut self, now: Duration) -> bool {
        while self.left < BURST && self.filled + REFILL <= now {
            self.left += 1;
            self.filled += REFILL;
        }
        if self.left == BURST {
            self.filled = now;
        }
        let granted = self.left > 0;
        self.left = self.left.saturating_sub(1);
        granted
    }
}

impl Core {
    pub(super) fn plan_notice(&mut self, id: CallerId) {
        let Some(after) = self.policy.queued_event_after else { return };
        let Some(caller) = self.callers.get(&id).filter(|caller| caller.pod.is_some()) else { return };
        self.notice_at(id, caller.since + after);
    }

    fn notice_at(&mut self, id: CallerId, at: Duration) {
        if let Some(caller) = self.callers.get_mut(&id) {
            caller.noticed.at = Some(at);
            self.arm(at, Timer::Notice(id));
        }
    }

    pub(super) fn notice_due(&mut self, id: CallerId, now: Now, fx: &mut Vec<Effect>) {
        let Some(caller) = self.callers.get_mut(&id) else { return };
        caller.noticed.at = None;
        let Some(after) = self.policy.queued_event_after else { return };
        let waits = |pull: &&Pull| pull.is_queued() || matches!(pull.stage, Stage::Pausing { .. });
        let (pull, up) = (caller.pull, matches!(self.health, Health::Up(_)));
        // While the runtime is unavailable, the caller does not wait for a slot.
        let Some(message) =
            self.pulls.get(&pull).filter(waits).filter(|_| up).map(|pull| self.describe_wait(pull))
        else {
            return self.notice_at(id, now.mono + after.max(POSTPONED));
        };
        if !self.notices.take(now.mono) {
            return self.notice_at(id, now.mono + POSTPONED);
        }
        let Some(caller) = self.callers.get_mut(&id) else { return };
        let Some(pod) = caller.pod.clone() else { return };
        let noticed = &mut caller.noticed;
        noticed.count = noticed.count.saturating_add(1);
        if noticed.count == 1 {
            noticed.first_unix_ms = now.unix_ms;
        }
        let notice = PodNotice {
            name: event_name(&pod.name, noticed.first_unix_ms, id),
            pod,
            reason: PULL_QUEUED,
            message,
            count: noticed.count,
            first_unix_ms: noticed.first_unix_ms,
            last_unix_ms: now.unix_ms,
        };
        fx.push(Effect::Notice(notice));
        self.notice_at(id, now.mono + after.saturating_mul(REPEAT));
    }

    fn describe_wait(&self, pull: &Pull) -> String {
        let (running, limit) = self.reached(pull);
        let ahead = self.queue.count_before(pull.place());
        format!(
            "waiting for an image pull slot: {running} of {limit} in use, {ahead} ahead (image {})",
            pull.call.image
        )
    }
}

/// As client-go: the pod's name and a number that no other Event of the pod has.
fn event_name(pod: &str, first_unix_ms: i64, caller: CallerId) -> String {
    let number = format!("{first_unix_ms:x}{:x}", caller.0);
    // Object names have at most 253 characters, and do not end in a dot or a dash.
    let room = 252_usize.saturating_sub(number.len());
    let pod: String = pod.chars().take(room).collect();
    format!("{}.{number}", pod.trim_end_matches(['.', '-']))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn event_names_are_short_and_unique() {
        let name = |pod: &str, caller| event_name(pod, 0x18f_0000_0000, CallerId(caller));
        assert_eq!(name("web-0", 10), "web-0.18f00000000a");
        assert_ne!(name("web-0", 10), name("web-0", 11));
        let long = "a.".repeat(126) + "b";
        assert!(name(&long, 1).len() <= 253 && !name(&long, 1).contains(".."));
    }

    #[test]
    fn the_budget_refills_up_to_its_maximum() {
        let mut budget = Budget::default();
        let at = Duration::from_secs;
        let granted = |budget: &mut Budget, now| (0..100).filter(|_| budget.take(now)).count();
        assert_eq!(granted(&mut budget, at(1000)), 20);
        assert_eq!(granted(&mut budget, at(1001)), 0);
        assert_eq!(granted(&mut budget, at(1004)), 2);
        assert_eq!(granted(&mut budget, at(9000)), 20);
    }
}
