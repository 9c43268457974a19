//! Handling of the server's answers.
//!
//! Owns: the step from each answer to the next request or wait, and the error texts.

use std::time::Duration;

use keelson_actor_system::{
    clock::Now,
    cluster::{ApiError, ApiErrorKind, LEASE_NAMESPACE, LeaseCreate, LeasePatch, ObservedLease, Written},
};

use super::{
    Answer, Core, Counted, Effect, EventContext, Held, MAX_TRIES, NodeSeen, Phase, Renewed,
    contest::{Contention, Verdict},
    is_final, mono_ms, unix_us,
};

/// Number of timed-out reads in a sync after which the connections are closed; the same for renewals.
const HOOK_FROM: u32 = 2;

impl Core {
    pub(super) fn answered(&mut self, answer: Answer, cx: &mut EventContext) {
        match (self.phase.clone(), answer) {
            (Phase::Reading, Answer::Read(Ok(seen))) => self.handle_lease(seen, cx),
            (Phase::Reading, Answer::Read(Err(error))) => self.read_failed(&error, cx),
            (Phase::AskingNode { to_create }, Answer::Node(Ok(uid))) => self.node_seen(uid, to_create, cx),
            (Phase::AskingNode { to_create }, Answer::Node(Err(error))) => {
                self.node_failed(&error, to_create, cx);
            }
            (Phase::Creating(lease), Answer::Created(Ok(written))) => self.created(lease, written, cx),
            (Phase::Creating(_), Answer::Created(Err(error))) => self.create_failed(&error, cx),
            (Phase::Renewing(patch), Answer::Renewed(Ok(written))) => self.patched(patch, written, cx),
            (Phase::Renewing(patch), Answer::Renewed(Err(error))) => self.renew_failed(&patch, &error, cx),
            // An answer to another request is ignored.
            _ => {}
        }
    }

    fn handle_lease(&mut self, seen: ObservedLease, cx: &mut EventContext) {
        if seen.written.resource_version.is_empty() {
            // A patch without it would be unconditional.
            let reason = self.sentence("read", "the response has no resourceVersion");
            self.failures += 1;
            self.fail(("read", "no resourceVersion"), reason, cx);
            return self.back_off(Duration::ZERO, cx);
        }
        self.missing = false;
        self.sync.pauses = 0;
        self.sync.read_timeouts = 0;
        if let Some(pause) = self.left_to_another(&seen, cx) {
            return self.wait_for(pause, cx);
        }
        let known = self.record.as_ref().filter(|record| record.uid == seen.written.uid);
        if let Some(record) = &self.record
            && known.is_none()
            && self.reported_uid != seen.written.uid
        {
            self.reported_uid.clone_from(&seen.written.uid);
            let (name, before, now) = (&self.policy.name, &record.uid, &seen.written.uid);
            let text = format!("Lease {name} was recreated by another client: uid {now}, before {before}");
            cx.note(true, text);
        }
        let managers_forgotten = known.is_some_and(|record| record.managers_forgotten);
        let ours = seen.holder.as_ref() == Some(&self.policy.holder);
        let renew_unix_us = seen.renew_unix_us;
        self.lease = Some(Held {
            uid: seen.written.uid,
            resource_version: seen.written.resource_version,
            owner_uid: seen.owner_uid,
            holder: seen.holder,
            duration_seconds: seen.duration_seconds,
            transitions: seen.transitions.unwrap_or(0).max(0),
            acquired_unix_us: seen.acquire_unix_us,
            managers_forgotten,
        });
        let first = std::mem::take(&mut self.first);
        let age = renew_unix_us.and_then(|renewed| self.age_of(renewed, cx.now));
        match age {
            Some(age) if first && ours => self.take_over(age, cx),
            _ => self.renew(cx),
        }
    }

    /// Whether another process has the Lease, or may have it: then returns the wait before the next read.
    fn left_to_another(&mut self, seen: &ObservedLease, cx: &mut EventContext) -> Option<Duration> {
        let before = self.contest.contention();
        let (verdict, is_foreign) = self.contest.read(seen, self.record.as_ref(), cx.now);
        if is_foreign {
            cx.fx.push(Effect::Count(Counted::ForeignRenewal));
        }
        self.note_contention(before, cx);
        let pause = match verdict {
            Verdict::Renew => return None,
            Verdict::Observe(pause) => pause,
            Verdict::StandBack => {
                self.stand_back(cx);
                self.jittered(cx)
            }
        };
        // The known Lease is not patched: it is read again.
        self.lease = None;
        self.first = false;
        Some(pause)
    }

    /// Reports that the agent stands back, and records it for the next process.
    fn stand_back(&mut self, cx: &mut EventContext) {
        let (name, node) = (&self.policy.name, &self.policy.node);
        let reason = format!(
            "another process renews Lease {LEASE_NAMESPACE}/{name}, for example a kubelet or an agent with \
             the same node name; this agent stands back and does not report Node {node} \
             (node.when_contested); stop one of them"
        );
        self.fail(("contest", "StandingBack"), reason, cx);
        if let Some(record) = self.record.as_mut().filter(|record| !record.stood_back) {
            record.stood_back = true;
            cx.fx.push(Effect::Persist(record.clone()));
        }
    }

    /// Reports the start and the end of a contest; standing back is reported as a failure.
    fn note_contention(&self, before: Contention, cx: &mut EventContext) {
        let (name, now) = (&self.policy.name, self.contest.contention());
        match (before, now) {
            (Contention::Contested, Contention::Uncontested) => {
                cx.note(false, format!("no other process renews Lease {LEASE_NAMESPACE}/{name} any longer"));
            }
            (Contention::StandingBack, Contention::Uncontested) => cx.note(
                true,
                format!(
                    "the other process stopped renewing Lease {LEASE_NAMESPACE}/{name}; this agent renews it"
                ),
            ),
            (Contention::Uncontested, Contention::Contested) => cx.note(
                true,
                format!(
                    "another process also renews Lease {LEASE_NAMESPACE}/{name}, for example a kubelet or an \
                     agent with the same node name; this agent continues; stop one of them"
                ),
            ),
            _ => {}
        }
    }

    /// The age of a renewal by the wall clock; `None`: in the future, or an interval and more.
    fn age_of(&self, renewed_unix_us: i64, now: Now) -> Option<Duration> {
        let age = u64::try_from(unix_us(now).checked_sub(renewed_unix_us)?).ok()?;
        Some(Duration::from_micros(age)).filter(|age| *age < self.policy.interval())
    }

    /// An earlier process renewed the Lease: the next renewal is made when that one would have made it.
    fn take_over(&mut self, age: Duration, cx: &mut EventContext) {
        let (now, ms) = (cx.now, i64::try_from(age.as_millis()).unwrap_or(i64::MAX));
        let unix_ms = now.unix_ms.saturating_sub(ms);
        self.renewed = Some(Renewed { mono_ms: mono_ms(now).saturating_sub(ms), unix_ms });
        self.set_healthy(cx);
        let pause = self.jittered(cx).saturating_sub(age);
        cx.note(
            false,
            format!(
                "Lease {} was renewed {age:?} ago by an earlier process; continuing from there",
                self.policy.name
            ),
        );
        self.wait_for(pause, cx);
    }

    fn read_failed(&mut self, error: &ApiError, cx: &mut EventContext) {
        if error.kind == ApiErrorKind::NotFound {
            let before = self.contest.contention();
            let may_make = self.contest.may_create(cx.now);
            self.note_contention(before, cx);
            if !may_make {
                return self.end_sync(cx);
            }
            self.missing = true;
            self.first = false;
            return self.ask_node(true, cx);
        }
        self.contest.unread(cx.now);
        self.failed("read", error, cx);
        if error.kind == ApiErrorKind::Timeout {
            self.sync.read_timeouts += 1;
            if self.sync.read_timeouts >= HOOK_FROM {
                cx.fx.push(Effect::CloseConnections);
            }
        }
        self.handle_failure("read", error, cx);
        match self.wanted_pause(error, cx) {
            Some(pause) => self.hold_off(pause, cx),
            None if is_final(error.kind) => self.end_sync(cx),
            None => self.back_off(Duration::ZERO, cx),
        }
    }

    fn node_seen(&mut self, uid: String, to_create: bool, cx: &mut EventContext) {
        if uid.is_empty() {
            let reason = self.sentence("node", "the response has no uid");
            self.failures += 1;
            if !to_create {
                return self.renew(cx);
            }
            self.fail(("node", "no uid"), reason, cx);
            return self.end_sync(cx);
        }
        self.node = NodeSeen::Known(uid.clone());
        if to_create {
            self.create(uid, cx);
        } else {
            self.renew(cx);
        }
    }

    fn node_failed(&mut self, error: &ApiError, to_create: bool, cx: &mut EventContext) {
        if error.kind == ApiErrorKind::NotFound && !matches!(self.node, NodeSeen::Gone { .. }) {
            self.node = NodeSeen::Gone { since_unix_ms: cx.now.unix_ms };
        }
        if to_create {
            // As the kubelet: no Lease without an owner; the Node is read again at the next interval.
            self.failed("node", error, cx);
            self.handle_failure("node", error, cx);
            if let Some(pause) = self.wanted_pause(error, cx) {
                self.not_before = cx.now.mono.saturating_add(pause);
            }
            return self.end_sync(cx);
        }
        match self.wanted_pause(error, cx) {
            Some(pause) => {
                self.failed("node", error, cx);
                self.handle_failure("node", error, cx);
                self.hold_off(pause, cx);
            }
            // The Lease is renewed without an owner.
            None => self.renew(cx),
        }
    }

    fn created(&mut self, lease: LeaseCreate, written: Written, cx: &mut EventContext) {
        cx.count("created");
        let (name, uid) = (&lease.name, &written.uid);
        cx.note(false, format!("Lease {LEASE_NAMESPACE}/{name} created, uid {uid}"));
        self.missing = false;
        self.contest.made(lease.now_unix_us);
        self.lease = Some(Held {
            uid: written.uid,
            resource_version: written.resource_version,
            owner_uid: lease.owner.map(|owner| owner.uid),
            holder: Some(lease.holder),
            duration_seconds: Some(lease.duration_seconds),
            transitions: lease.transitions,
            acquired_unix_us: Some(lease.now_unix_us),
            managers_forgotten: false,
        });
        self.renewed(cx);
    }

    fn create_failed(&mut self, error: &ApiError, cx: &mut EventContext) {
        self.failed("create", error, cx);
        self.handle_failure("create", error, cx);
        match (self.wanted_pause(error, cx), error.kind) {
            (Some(pause), _) => self.hold_off(pause, cx),
            // The namespace is missing, which is not repaired within seconds.
            (None, ApiErrorKind::NotFound) => self.end_sync(cx),
            (None, kind) if is_final(kind) => self.end_sync(cx),
            (None, _) => {
                // The Lease may exist all the same: another process was faster, or the answer was lost.
                self.missing = false;
                self.back_off(Duration::ZERO, cx);
            }
        }
    }

    fn patched(&mut self, patch: LeasePatch, written: Written, cx: &mut EventContext) {
        cx.count("renewed");
        let before = self.contest.contention();
        self.contest.renewed(patch.renew_unix_us, cx.now);
        self.note_contention(before, cx);
        let Some(held) = &mut self.lease else { return self.renewed(cx) };
        held.resource_version = written.resource_version;
        if let Some(seconds) = patch.duration_seconds {
            held.duration_seconds = Some(seconds);
        }
        if let Some(owner) = patch.owner {
            cx.note(
                false,
                format!("Lease {} now has owner Node {}, uid {}", patch.name, owner.name, owner.uid),
            );
            held.owner_uid = Some(owner.uid);
        }
        if let Some(acquire) = patch.acquire {
            let is_takeover = held.holder.as_ref() != Some(&acquire.holder);
            let before = held.holder.replace(acquire.holder);
            held.transitions = acquire.transitions;
            held.acquired_unix_us = Some(acquire.acquire_unix_us);
            if is_takeover {
                let before = before.filter(|holder| !holder.is_empty()).unwrap_or_else(|| "no holder".into());
                let text = format!(
                    "Lease {} taken over from {before}, transition {}",
                    patch.name, acquire.transitions
                );
                cx.fx.push(Effect::Count(Counted::Takeover));
                cx.note(true, text);
            }
        }
        held.managers_forgotten |= patch.drop_managed_fields;
        self.renewed(cx);
    }

    fn renewed(&mut self, cx: &mut EventContext) {
        self.renewed = Some(Renewed { mono_ms: mono_ms(cx.now), unix_ms: cx.now.unix_ms });
        self.first = false;
        self.set_healthy(cx);
        if self.lease.as_ref().is_some_and(|held| held.resource_version.is_empty()) {
            // Not in the answer: read it before the next renewal.
            self.lease = None;
        }
        self.end_sync(cx);
    }

    fn renew_failed(&mut self, patch: &LeasePatch, error: &ApiError, cx: &mut EventContext) {
        self.failed("renew", error, cx);
        if let Some(pause) = self.wanted_pause(error, cx) {
            self.handle_failure("renew", error, cx);
            return self.hold_off(pause, cx);
        }
        let tries_left = self.sync.tries < MAX_TRIES;
        let over = self.sync.is_after_read && !tries_left;
        match error.kind {
            ApiErrorKind::NotFound => {
                cx.note(true, format!("Lease {} was deleted by another client", patch.name));
                self.lease = None;
                self.missing = true;
            }
            // The known Lease is outdated.
            ApiErrorKind::Conflict | ApiErrorKind::Gone => self.lease = None,
            kind if is_final(kind) => {
                if kind == ApiErrorKind::Invalid {
                    // The patch itself may be the cause: the next one is smaller, and follows a new read.
                    self.forget_refused |= patch.drop_managed_fields;
                    self.lease = None;
                }
                self.handle_failure("renew", error, cx);
                return self.end_sync(cx);
            }
            _ if self.sync.tries >= HOOK_FROM => cx.fx.push(Effect::CloseConnections),
            _ => {}
        }
        if over {
            self.handle_failure("renew", error, cx);
            return self.end_sync(cx);
        }
        if tries_left {
            return self.continue_sync(cx);
        }
        if error.kind == ApiErrorKind::Unreachable {
            // A read would fail as well, and is one more request when the server is back. If the Lease was written
            // meanwhile, the patch of an old version is refused, and then it is read.
            self.handle_failure("renew", error, cx);
            self.sync.tries -= 1;
            return self.back_off(Duration::ZERO, cx);
        }
        // The known Lease led to nothing: the second half begins with a read.
        self.lease = None;
        self.sync.is_after_read = true;
        self.sync.tries = 0;
        self.continue_sync(cx);
    }

    fn failed(&mut self, doing: &'static str, error: &ApiError, cx: &mut EventContext) {
        self.failures += 1;
        cx.count(error.kind.name());
        self.last_error = Some((cx.now.unix_ms, self.explain(doing, error)));
    }

    fn handle_failure(&mut self, doing: &'static str, error: &ApiError, cx: &mut EventContext) {
        let reason = self.explain(doing, error);
        self.fail((doing, error.kind.name()), reason, cx);
    }

    fn sentence(&self, doing: &'static str, wrong: &str) -> String {
        let (name, node) = (&self.policy.name, &self.policy.node);
        match doing {
            "node" => {
                format!("cannot read Node {node}, which is required to create Lease {name}: {wrong}")
            }
            "create" => format!("cannot create Lease {LEASE_NAMESPACE}/{name}: {wrong}"),
            "read" => format!("cannot read Lease {LEASE_NAMESPACE}/{name}: {wrong}"),
            _ => format!("cannot renew Lease {LEASE_NAMESPACE}/{name}: {wrong}"),
        }
    }

    /// What failed, on what, why, and what to do about it.
    fn explain(&self, doing: &'static str, error: &ApiError) -> String {
        let (name, node) = (&self.policy.name, &self.policy.node);
        match (doing, error.kind) {
            ("node", ApiErrorKind::NotFound) => {
                format!("Node {node} does not exist; Lease {name} is created when the Node is registered")
            }
            ("create", ApiErrorKind::NotFound) => {
                self.sentence(doing, &format!("namespace {LEASE_NAMESPACE} may be missing ({error})"))
            }
            (_, ApiErrorKind::Conflict) => {
                self.sentence(doing, &format!("another client writes it concurrently ({error})"))
            }
            (_, ApiErrorKind::Forbidden) => self.sentence(
                doing,
                &format!("the credentials do not allow it; check the RBAC rules of the role ({error})"),
            ),
            (_, ApiErrorKind::Unauthorized) => self
                .sentence(doing, &format!("the credentials are rejected; renew those in [kube] ({error})")),
            _ => self.sentence(doing, &error.to_string()),
        }
    }
}
