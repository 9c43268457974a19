//! Whether another process writes this agent's conditions.
//!
//! Owns: [`Writers`], each condition as this agent wrote it last. In: the known Node, statuses that are sent. Out:
//! which conditions another process changed, and which of them are left alone for a while.
//!
//! A condition that differs from this agent's last write, including heartbeat and transition times, was written by
//! another process. One change is a manual edit, or the predecessor's; two within two report periods are a second
//! writer. The two would overwrite each other with every pass, so from then on the condition is written at most once
//! per report period, until no other process has written it for two of them. Values of the node lifecycle controller do
//! not count.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::NodeCondition;

use crate::status::compute::Moment;

/// Maximum number of own versions of a condition, with lost answers, that are remembered.
const OURS_MAX: usize = 8;

/// Reasons of the node lifecycle controller for Unknown.
const CONTROLLER_REASONS: [&str; 2] = ["NodeStatusUnknown", "NodeStatusNeverUpdated"];

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum WriterEvent {
    /// Another process has changed a condition of this type.
    Foreign(String),
    /// Another process writes it too.
    Contested(String),
    /// No other process has written it for two report periods.
    Over(String),
}

#[derive(Debug)]
struct Kind {
    /// As this agent wrote it, the last confirmed version first; `None`: not on the Node.
    ours: Vec<Option<NodeCondition>>,
    /// As another process last wrote it.
    foreign: Option<Option<NodeCondition>>,
    last_foreign: Option<Moment>,
    contested: bool,
    /// When another process's version was last overwritten.
    overwritten: Option<Moment>,
}

#[derive(Debug, Default)]
pub(super) struct Writers {
    kinds: BTreeMap<String, Kind>,
    /// Types that the current status changes.
    pending: Vec<String>,
}

fn find<'a>(list: &'a [NodeCondition], kind: &str) -> Option<&'a NodeCondition> {
    list.iter().find(|condition| condition.type_ == kind)
}

fn same(one: Option<&NodeCondition>, other: Option<&NodeCondition>) -> bool {
    // The server omits empty texts.
    let text = |text: &Option<String>| text.clone().unwrap_or_default();
    match (one, other) {
        (None, None) => true,
        (Some(one), Some(other)) => {
            one.status == other.status
                && text(&one.reason) == text(&other.reason)
                && text(&one.message) == text(&other.message)
                && one.last_heartbeat_time == other.last_heartbeat_time
                && one.last_transition_time == other.last_transition_time
        }
        _ => false,
    }
}

fn is_from_controller(condition: Option<&NodeCondition>) -> bool {
    condition.is_some_and(|condition| {
        condition.status == "Unknown"
            && condition.reason.as_deref().is_some_and(|reason| CONTROLLER_REASONS.contains(&reason))
    })
}

impl Writers {
    /// Compares the Node's conditions with those that this agent wrote. `kinds`: the types that it writes; `quiet`: two
    /// report periods, in milliseconds.
    pub(super) fn observe(
        &mut self,
        kinds: &[String],
        conditions: &[NodeCondition],
        quiet: i64,
        now: Moment,
    ) -> Vec<WriterEvent> {
        self.kinds.retain(|kind, _| kinds.contains(kind));
        let mut news = Vec::new();
        for name in kinds {
            let is = find(conditions, name);
            let Some(kind) = self.kinds.get_mut(name) else {
                // As found: its writer is unknown.
                let ours = vec![is.cloned()];
                let kind =
                    Kind { ours, foreign: None, last_foreign: None, contested: false, overwritten: None };
                self.kinds.insert(name.clone(), kind);
                continue;
            };
            let is_ours = kind.ours.iter().any(|ours| same(ours.as_ref(), is));
            let is_known = kind.foreign.as_ref().is_some_and(|known| same(known.as_ref(), is));
            if !is_ours && !is_known && !is_from_controller(is) {
                kind.foreign = Some(is.cloned());
                let before = kind.last_foreign.replace(now);
                news.push(WriterEvent::Foreign(name.clone()));
                if !kind.contested && before.is_some_and(|before| now.saturating_sub(before) <= quiet) {
                    kind.contested = true;
                    news.push(WriterEvent::Contested(name.clone()));
                }
            }
            if kind.contested && kind.last_foreign.is_none_or(|at| now.saturating_sub(at) > quiet) {
                kind.contested = false;
                news.push(WriterEvent::Over(name.clone()));
            }
        }
        news
    }

    pub(super) fn is_contested(&self, kind: &str) -> bool {
        self.kinds.get(kind).is_some_and(|kind| kind.contested)
    }

    /// Whether another process has recently set a condition of this type to True.
    pub(super) fn is_true_by_another(&self, kind: &str, quiet: i64, now: Moment) -> bool {
        self.kinds.get(kind).is_some_and(|kind| {
            let lately = kind.last_foreign.is_some_and(|at| now.saturating_sub(at) <= quiet);
            lately && matches!(&kind.foreign, Some(Some(condition)) if condition.status == "True")
        })
    }

    pub(super) fn contested(&self) -> usize {
        self.kinds.values().filter(|kind| kind.contested).count()
    }

    /// Leaves a condition of another process as it is, unless it was last overwritten a report period ago, or is the
    /// node lifecycle controller's for a node without heartbeats.
    pub(super) fn keep_contested(
        &self,
        base: &[NodeCondition],
        list: &mut Vec<NodeCondition>,
        period: i64,
        now: Moment,
    ) {
        for (name, kind) in self.kinds.iter().filter(|(_, kind)| kind.contested) {
            let is = find(base, name);
            let lately = kind.overwritten.is_some_and(|at| now.saturating_sub(at) < period);
            if !lately || is_from_controller(is) {
                continue;
            }
            match (list.iter().position(|condition| condition.type_ == *name), is) {
                (Some(at), Some(is)) => list[at].clone_from(is),
                (Some(at), None) => drop(list.remove(at)),
                (None, Some(is)) => list.push(is.clone()),
                (None, None) => {}
            }
        }
    }

    /// A status is being sent that changes `base` to `new`.
    pub(super) fn sends(&mut self, base: &[NodeCondition], new: &[NodeCondition], now: Moment) {
        self.pending.clear();
        for (name, kind) in &mut self.kinds {
            let (is, will_be) = (find(base, name), find(new, name));
            if same(is, will_be) {
                continue;
            }
            if kind.contested || kind.foreign.is_some() {
                kind.overwritten = Some(now);
            }
            if kind.ours.len() >= OURS_MAX {
                kind.ours.remove(0);
            }
            kind.ours.push(will_be.cloned());
            self.pending.push(name.clone());
        }
    }

    pub(super) fn sent(&mut self) {
        for name in std::mem::take(&mut self.pending) {
            if let Some(kind) = self.kinds.get_mut(&name) {
                kind.foreign = None;
                let last = kind.ours.pop();
                kind.ours.clear();
                kind.ours.extend(last);
            }
        }
    }
}
