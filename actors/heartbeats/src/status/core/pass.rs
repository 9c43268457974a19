//! One pass: read, compute, compare, send.
//!
//! Owns: the steps of a pass and the reactions to answers. In: readings, answers of the API server. Out: the next
//! request, or the end of the pass and the plan of the next one.

use std::sync::Arc;

use k8s_openapi::api::core::v1::{Node, NodeCondition, NodeStatus};
use keelson_actor_system::{
    clock::Now,
    cluster::{ApiError, ApiErrorKind, Written},
    reports::RuntimeReport,
};

use super::{
    Collected, Core, Counted, Effect, FIRST_WAIT, GRACE, MAX_RETRY_AFTER_MS, RETRY_SPREAD, STEP, TRIES,
    Writers,
    end::PassEnd,
    knowledge::{uid, version},
};
use crate::{
    lease::Contention,
    status::{
        compare::{differ, older, wrong_system_labels},
        compute::{Inputs, Memory, Moment, RuntimeView, compute, conditions, millis, moment},
        kinds,
        patch::status_patch,
        policy::{Register, Role},
        register::{new_node, repair},
        state::{Reported, Stamp, Write},
    },
};

#[derive(Debug)]
pub(super) struct Pass {
    started: Now,
    inputs: Option<Arc<Inputs>>,
    tries: u32,
    pub(super) requests: u32,
    /// The Node that the next steps compare with.
    base: Option<Arc<Node>>,
    sending: Option<Sending>,
    /// Why the Node could not be created.
    not_created: Option<String>,
    /// Why its labels could not be repaired.
    pub(super) not_repaired: Option<String>,
}

#[derive(Debug, Clone)]
struct Sending {
    at: Now,
    status: NodeStatus,
    labels: Vec<(&'static str, String)>,
    /// Delay of the report after this one; `None`: a report out of schedule does not change it.
    delay: Option<i64>,
}

impl Core {
    pub(super) fn begin(&mut self, now: Now, effects: &mut Vec<Effect>) {
        self.watch_clocks(now, effects);
        self.is_changed_during_pass = false;
        self.due = None;
        self.pass = Some(Box::new(Pass {
            started: now,
            inputs: None,
            tries: 0,
            requests: 0,
            base: None,
            sending: None,
            not_created: None,
            not_repaired: None,
        }));
        effects.push(Effect::Collect { image_fs: self.image_fs.clone() });
    }

    /// The node lifecycle controller ignores renewals that are earlier than the last one it has seen. A status with
    /// another heartbeat time resets that, so after a step a status is sent at once. If the controller looks between
    /// that status and the next renewal, it takes the Lease from before the step for the last one again: after a step
    /// back a second status follows when the Lease must have been renewed by the new time.
    fn watch_clocks(&mut self, now: Now, effects: &mut Vec<Effect>) {
        let before = self.clocks.replace(now);
        if self.repeat_at.is_some_and(|at| at <= moment(now)) {
            self.repeat_at = None;
            self.force = true;
        }
        let Some(before) = before else { return };
        let wall = now.unix_ms.saturating_sub(before.unix_ms);
        let step = wall.saturating_sub(millis(now.mono.saturating_sub(before.mono)));
        if step.saturating_abs() > STEP {
            self.stepped(step, now, effects);
        }
    }

    /// `step`: milliseconds by which the wall clock has stepped.
    fn stepped(&mut self, step: i64, now: Now, effects: &mut Vec<Effect>) {
        self.steps += 1;
        if self.policy.role == Role::Node {
            self.force = true;
            // The Lease is renewed after a quarter of its duration.
            self.repeat_at = (step < 0).then(|| moment(now) + millis(self.policy.lease_duration) * 3 / 8);
        }
        effects.push(Effect::Count(Counted::ClockStep));
        let way = if step > 0 { "forward" } else { "back" };
        let text = format!("the wall clock stepped {way} by {} ms", step.saturating_abs());
        effects.push(Effect::Note { warn: false, text });
    }

    pub(super) fn runtime_view(
        &mut self,
        reported: Result<RuntimeReport, String>,
        down: Option<String>,
        now: Now,
    ) -> RuntimeView {
        let at = moment(now);
        match (reported, down) {
            (Ok(report), _) => {
                self.image_fs.clone_from(&report.image_fs);
                self.runtime = Some((report.clone(), at));
                RuntimeView::Reported(report)
            }
            (Err(_), Some(reason)) => RuntimeView::Down(reason),
            (Err(reason), None) => match &self.runtime {
                Some((report, reported_at)) if at - reported_at < GRACE => {
                    RuntimeView::Reported(report.clone())
                }
                Some(_) => RuntimeView::Stale(reason),
                None if self
                    .start
                    .as_ref()
                    .is_some_and(|(_, start)| at - moment(*start) < GRACE + FIRST_WAIT) =>
                {
                    RuntimeView::Unknown
                }
                None => RuntimeView::Stale(reason),
            },
        }
    }

    pub(super) fn handle_collected(
        &mut self,
        collected: Collected,
        now: Now,
        random: f64,
        effects: &mut Vec<Effect>,
    ) {
        if self.pass.is_none() {
            return;
        }
        let errors = collected.readings.errors.iter().cloned().collect();
        if self.unread != errors {
            for text in errors.difference(&self.unread) {
                effects.push(Effect::Note { warn: true, text: format!("omitted from node status: {text}") });
            }
            self.unread = errors;
        }
        let inputs = Arc::new(self.inputs(collected, now));
        if self.policy.role == Role::Node && self.contention == Contention::Undecided {
            self.withheld = true;
            self.finish(PassEnd::Withheld, now, random, effects);
            return;
        }
        let base = self.knowledge.node();
        let Some(pass) = &mut self.pass else { return };
        pass.inputs = Some(inputs);
        pass.base = base;
        self.go_on(now, random, effects);
    }

    fn go_on(&mut self, now: Now, random: f64, effects: &mut Vec<Effect>) {
        let Some(pass) = &mut self.pass else { return };
        let Some(inputs) = pass.inputs.clone() else { return };
        let Some(base) = pass.base.take() else {
            pass.requests += 1;
            effects.push(Effect::Get);
            return;
        };
        let base = self.observe_node(base, now, effects);
        self.notice_writers(&base, now, effects);
        if self.repair && !self.stands_back() && self.repair_or_go_on(&base, &inputs, effects) {
            return;
        }
        let since = self.last_report.map(|at| moment(now).saturating_sub(at));
        // No controller judges a node by its companion's status: unchanged ones are not written.
        let expired = self.policy.role == Role::Node
            && since.is_none_or(|since| since >= millis(self.policy.report_frequency) + self.delay);
        let mut status = self.status(&base, &inputs, expired || self.force, now, effects);
        let facts = &inputs.facts;
        // Beside a kubelet only a condition is written.
        let role = if self.stands_back() { Role::Companion } else { self.policy.role };
        let labels = match role {
            Role::Node => wrong_system_labels(&base, &facts.operating_system, &facts.architecture),
            Role::Companion => Vec::new(),
        };
        let old = base.status.clone().unwrap_or_default();
        if self.reads_node_first(&old, &status, now) {
            if let Some(pass) = &mut self.pass {
                pass.requests += 1;
            }
            self.answered_after_outage = Some(moment(now));
            effects.push(Effect::Get);
            return;
        }
        if self.was_recently_unreachable(now) {
            conditions::withhold_stale_endpoints(&mut status, &old);
        }
        let changed = differ(&old, &status) || !labels.is_empty();
        if !changed && !expired && !self.force {
            self.finish(PassEnd::Quiet, now, random, effects);
            return;
        }
        let delay =
            if changed || since.is_none() { Some(self.draw_delay(random)) } else { expired.then_some(0) };
        let patch = status_patch(&old, &status, role, &labels);
        let list = |status: &NodeStatus| status.conditions.clone().unwrap_or_default();
        self.writers.sends(&list(&old), &list(&status), moment(now));
        if let Some(pass) = &mut self.pass {
            pass.requests += 1;
            pass.base = Some(base);
            pass.sending = Some(Sending { at: now, status, labels, delay });
        }
        effects.push(Effect::PatchStatus(patch));
    }

    /// After a change the next report comes up to half a period earlier or later, so that nodes that changed together
    /// do not keep reporting together (kubelet).
    #[allow(clippy::cast_possible_truncation, clippy::cast_precision_loss)]
    fn draw_delay(&self, random: f64) -> i64 {
        (millis(self.policy.report_frequency) as f64 * (random - 0.5)) as i64
    }

    fn status(
        &mut self,
        base: &Node,
        inputs: &Inputs,
        fresh_texts: bool,
        now: Now,
        effects: &mut Vec<Effect>,
    ) -> NodeStatus {
        let mut status = base.status.clone().unwrap_or_default();
        if !self.stands_back() {
            status = compute(base, inputs, &self.externals, &self.policy, &mut self.memory, fresh_texts, now);
            let known = base.status.iter().flat_map(|of| of.conditions.iter().flatten());
            let known: Vec<NodeCondition> = known.cloned().collect();
            let list = status.conditions.get_or_insert_default();
            self.writers.keep_contested(&known, list, millis(self.policy.report_frequency), moment(now));
        }
        if let Some(contest) = self.contest(moment(now)) {
            conditions::set_contested(&mut status, contest, now);
        }
        let own = |kind: &'static str| {
            let of = status.conditions.iter().flatten().find(|condition| condition.type_ == kind)?;
            Some((kind, of.status.clone()))
        };
        self.conditions = conditions::own(self.policy.role).iter().filter_map(|kind| own(kind)).collect();
        effects.push(Effect::Computed(self.conditions.clone()));
        let shown = |of: &&NodeCondition| match self.stands_back() {
            true => of.type_ == kinds::CONTESTED,
            false => {
                conditions::own(self.policy.role).contains(&of.type_.as_str())
                    || self.externals.has(&of.type_)
            }
        };
        self.shown = status.conditions.iter().flatten().filter(shown).cloned().collect();
        let is_there = |kind: &str| {
            base.status.iter().flat_map(|of| of.conditions.iter().flatten()).any(|of| of.type_ == kind)
        };
        let gone = self.externals.forget(is_there, moment(now));
        if !gone.is_empty() {
            effects.push(Effect::Save(Write::Conditions(gone)));
        }
        status
    }

    /// The Node exists. Its uid decides which records apply to it. Returns the Node as it must be by now.
    fn observe_node(&mut self, node: Arc<Node>, now: Now, effects: &mut Vec<Effect>) -> Arc<Node> {
        self.has_seen_node = true;
        self.missing = None;
        self.registrations = 0;
        let of = uid(&node).to_owned();
        if self.knowledge.uid.as_ref() == Some(&of) {
            return node;
        }
        let first = self.knowledge.uid.replace(of.clone()).is_none();
        if !first {
            effects.push(Effect::Note { warn: false, text: format!("the Node was recreated, uid {of}") });
        }
        self.last_report = None;
        self.delay = 0;
        self.memory = Memory::default();
        self.writers = Writers::default();
        self.repair = self.policy.role == Role::Node;
        match self.restored.take().filter(|restored| first && restored.uid == of) {
            Some(restored) => self.take_over(&node, &restored, now, effects),
            None => node,
        }
    }

    /// Continues from the records of an earlier process.
    fn take_over(
        &mut self,
        node: &Arc<Node>,
        restored: &Reported,
        now: Now,
        effects: &mut Vec<Effect>,
    ) -> Arc<Node> {
        let back = self.start.as_ref().map_or(0, |(stamp, _)| restored.at.step_back_until(stamp));
        if back > STEP {
            self.stepped(-back, now, effects);
        }
        let at = self.start.as_ref().and_then(|(stamp, now)| restored.moment(stamp, *now));
        if let Some(at) = at {
            self.last_report = Some(at);
            self.delay = restored.delay_ms;
            self.memory = restored.memory(at);
        }
        if !older(version(node), &restored.resource_version) || restored.status == NodeStatus::default() {
            return node.clone();
        }
        // A watch may start from an old cache.
        let mut newer = Node::clone(node);
        let status = newer.status.get_or_insert_default();
        if self.policy.role == Role::Node {
            *status = restored.status.clone();
        } else {
            let list = status.conditions.get_or_insert_default();
            for condition in restored.status.conditions.iter().flatten() {
                match list.iter_mut().find(|known| known.type_ == condition.type_) {
                    Some(known) => known.clone_from(condition),
                    None => list.push(condition.clone()),
                }
            }
        }
        newer.metadata.resource_version = Some(restored.resource_version.clone());
        let newer = Arc::new(newer);
        self.knowledge.expect(newer.clone());
        newer
    }

    /// Repairs the labels of an existing Node. Returns whether that needs a request.
    fn repair_or_go_on(&mut self, base: &Arc<Node>, inputs: &Inputs, effects: &mut Vec<Effect>) -> bool {
        let Some(pass) = &mut self.pass else { return false };
        if pass.not_repaired.is_some() {
            return false;
        }
        let Some(patch) = repair(base, &self.policy, &inputs.facts) else {
            self.repair = false;
            return false;
        };
        pass.requests += 1;
        pass.base = Some(base.clone());
        effects.push(Effect::PatchNode(patch));
        true
    }

    pub(super) fn repaired(
        &mut self,
        result: Result<Written, ApiError>,
        now: Now,
        random: f64,
        effects: &mut Vec<Effect>,
    ) {
        let Some(pass) = &mut self.pass else { return };
        match result {
            Ok(_) => {
                self.repair = false;
                self.server_answered(now);
                effects.push(Effect::Note { warn: false, text: "labels of the Node repaired".into() });
                // The server decides what else the write changed.
                if let Some(pass) = &mut self.pass {
                    pass.base = None;
                }
                self.go_on(now, random, effects);
            }
            Err(error) if error.kind.retry_after().is_some() => self.failed(&error, now, random, effects),
            Err(error) => {
                // The status does not wait for labels.
                pass.not_repaired = Some(format!("cannot repair the labels of the Node: {error}"));
                self.go_on(now, random, effects);
            }
        }
    }

    pub(super) fn handle_read(
        &mut self,
        result: Result<Box<Node>, ApiError>,
        now: Now,
        random: f64,
        effects: &mut Vec<Effect>,
    ) {
        let Some(pass) = &mut self.pass else { return };
        match result {
            Ok(node) => {
                let node: Arc<Node> = Arc::from(node);
                pass.base = Some(node.clone());
                self.knowledge.expect(node);
                self.server_answered(now);
                self.go_on(now, random, effects);
            }
            Err(error) if error.kind == ApiErrorKind::NotFound => {
                self.server_answered(now);
                self.handle_missing_node(now, random, effects);
            }
            Err(error) => self.failed(&error, now, random, effects),
        }
    }

    /// The Node does not exist: creates it, or reports that.
    fn handle_missing_node(&mut self, now: Now, random: f64, effects: &mut Vec<Effect>) {
        self.knowledge.forget();
        let stands_back = self.stands_back();
        let Some(pass) = &mut self.pass else { return };
        if let Some(reason) = pass.not_created.take() {
            self.finish(PassEnd::Failed { reason, permanent: true }, now, random, effects);
            return;
        }
        let makes = self.policy.role == Role::Node
            && !stands_back
            && match self.policy.register {
                Register::Once => !self.has_seen_node,
                Register::Always => true,
                Register::Never => false,
            };
        let Some(inputs) = pass.inputs.clone().filter(|_| makes) else {
            self.finish(PassEnd::Missing, now, random, effects);
            return;
        };
        pass.requests += 1;
        self.memory = Memory::default();
        let status = self.status(&Node::default(), &inputs, true, now, effects);
        let delay = Some(self.draw_delay(random));
        if let Some(pass) = &mut self.pass {
            pass.sending = Some(Sending { at: now, status: status.clone(), labels: Vec::new(), delay });
        }
        effects.push(Effect::Create(Box::new(new_node(&self.policy, &inputs.facts, status))));
    }

    pub(super) fn created(
        &mut self,
        result: Result<Box<Node>, ApiError>,
        now: Now,
        random: f64,
        effects: &mut Vec<Effect>,
    ) {
        let Some(pass) = &mut self.pass else { return };
        match result {
            Ok(node) => {
                let node: Arc<Node> = Arc::from(node);
                let memory = self.memory.clone();
                self.restored = None;
                self.observe_node(node.clone(), now, effects);
                self.memory = memory;
                self.repair = false;
                effects.push(Effect::Count(Counted::Registered));
                let text = format!("Node {} created, uid {}", self.policy.node_name, uid(&node));
                effects.push(Effect::Note { warn: false, text });
                // The server keeps the status of a created Node; the watch shows it if it did not.
                self.knowledge.expect(node.clone());
                self.sent(&node, now, random, effects);
            }
            Err(error) if matches!(error.kind, ApiErrorKind::AlreadyExists | ApiErrorKind::Forbidden) => {
                pass.not_created = Some(format!("cannot create the Node: {error}"));
                pass.requests += 1;
                effects.push(Effect::Get);
            }
            Err(error) => self.failed(&error, now, random, effects),
        }
    }

    pub(super) fn patched(
        &mut self,
        result: Result<Written, ApiError>,
        now: Now,
        random: f64,
        effects: &mut Vec<Effect>,
    ) {
        let Some(pass) = &mut self.pass else { return };
        match result {
            Ok(written) => {
                let (Some(base), Some(sending)) = (pass.base.take(), &pass.sending) else { return };
                let mut node = Node::clone(&base);
                node.status = Some(sending.status.clone());
                for (key, value) in &sending.labels {
                    node.metadata.labels.get_or_insert_default().insert((*key).to_owned(), value.clone());
                }
                let same = written.uid.is_empty() || written.uid == uid(&base);
                node.metadata.resource_version = Some(written.resource_version);
                let node = Arc::new(node);
                if same {
                    self.knowledge.expect(node.clone());
                } else {
                    // Recreated between request and answer.
                    self.knowledge.forget();
                }
                self.sent(&node, now, random, effects);
            }
            Err(error) => self.failed(&error, now, random, effects),
        }
    }

    /// A report has reached the server, and resulted in this Node.
    fn sent(&mut self, node: &Node, now: Now, random: f64, effects: &mut Vec<Effect>) {
        self.server_answered(now);
        self.force = false;
        self.writers.sent();
        let Some(pass) = &mut self.pass else { return };
        let (Some(sending), Some(inputs)) = (pass.sending.take(), pass.inputs.clone()) else { return };
        let at = moment(sending.at);
        if let Some(delay) = sending.delay {
            self.last_report = Some(at);
            self.delay = delay;
        }
        effects.push(Effect::Count(Counted::Sent));
        // A report out of schedule leaves the plan unchanged: the recorded time is that of the plan.
        let planned = self.last_report.unwrap_or(at);
        let since_boot = inputs.since_boot + sending.at.mono.saturating_sub(pass.started.mono);
        let stamp =
            Stamp::new(&inputs.facts.boot_id, since_boot, sending.at).earlier(at.saturating_sub(planned));
        let status = self.recorded_part(sending.status, at);
        let seen = self.memory.seen.iter().map(|(pressure, seen)| (*pressure, planned.saturating_sub(*seen)));
        effects.push(Effect::Save(Write::Reported(Box::new(Reported {
            uid: uid(node).to_owned(),
            resource_version: version(node).unwrap_or_default().to_owned(),
            at: stamp,
            delay_ms: self.delay,
            status,
            seen_before_ms: seen.collect(),
            not_ready: self.memory.not_ready.clone(),
        }))));
        self.finish(PassEnd::Sent, now, random, effects);
    }

    /// The recorded part of a status: for a companion its own conditions, and those that others set through it.
    fn recorded_part(&self, status: NodeStatus, at: Moment) -> NodeStatus {
        if self.policy.role == Role::Node {
            return status;
        }
        let mut kinds: Vec<_> = self.externals.views(at, 0).into_iter().map(|view| view.kind).collect();
        kinds.extend(conditions::own(Role::Companion).iter().map(|kind| (*kind).to_owned()));
        let list = status.conditions.into_iter().flatten().filter(|of| kinds.contains(&of.type_));
        NodeStatus { conditions: Some(list.collect()), ..NodeStatus::default() }
    }

    #[allow(clippy::cast_possible_truncation, clippy::cast_precision_loss)]
    fn failed(&mut self, error: &ApiError, now: Now, random: f64, effects: &mut Vec<Effect>) {
        let registers = self.policy.role == Role::Node && self.knowledge.uid.is_none();
        let Some(pass) = &mut self.pass else { return };
        pass.tries += 1;
        pass.base = None;
        pass.sending = None;
        let before = if registers { self.registrations } else { 0 };
        if pass.tries + before >= 2 && error.kind != ApiErrorKind::Conflict {
            effects.push(Effect::CloseConnections);
        }
        let permanent = match error.kind {
            // A retry would have the same result.
            ApiErrorKind::Unauthorized
            | ApiErrorKind::Forbidden
            | ApiErrorKind::Invalid
            | ApiErrorKind::Credentials
            | ApiErrorKind::TooManyRequests { .. } => true,
            kind => kind.retry_after().is_some(),
        };
        if let Some(pause) = error.kind.retry_after() {
            // Agents that were refused together must not return together.
            let spread = (millis(self.policy.update_frequency) as f64 * RETRY_SPREAD * random) as i64;
            self.not_before = Some(moment(now) + millis(pause).min(MAX_RETRY_AFTER_MS) + spread);
        }
        if permanent || registers || pass.tries >= TRIES {
            self.finish(PassEnd::Failed { reason: error.to_string(), permanent }, now, random, effects);
            return;
        }
        if error.kind == ApiErrorKind::NotFound {
            self.knowledge.forget();
        }
        pass.requests += 1;
        effects.push(Effect::Get);
    }
}
