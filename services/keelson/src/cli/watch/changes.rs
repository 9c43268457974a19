//! Changes between two lists, as lines.
//!
//! Owns: what was printed already. In: lists. Out: a line for each pull that is new, changed its state or ended, for
//! each further quarter of a download, for a new limit and for the health of the runtime.

use std::collections::{HashMap, HashSet, VecDeque};

use keelson_proto::debug as pb;

use crate::cli::format::{
    bytes, clean, count, duration_ms, image, one_line, percent, progress, run_time_ms, state, summary,
};

/// Number of remembered ends, so that none is printed twice; the agent lists twenty.
const REMEMBERED: usize = 256;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Printed {
    state: i32,
    quarter: u64,
}

/// A pull's number and the time of its request: an agent that lost its state numbers from 1 again.
type Key = (u64, i64);

fn key(pull: &pb::Pull) -> Key {
    (pull.id, pull.requested_unix_ms)
}

#[derive(Debug, Default)]
pub(super) struct Changes {
    began: bool,
    pulls: HashMap<Key, Printed>,
    ended: HashSet<Key>,
    ended_order: VecDeque<Key>,
    limit: u32,
    health: String,
}

impl Changes {
    /// The next list starts with a summary again: the agent was away.
    pub(super) fn forget(&mut self) {
        self.began = false;
    }

    /// A list was shown in another way: later ends are changes.
    pub(super) fn began(&mut self) {
        self.began = true;
    }

    pub(super) fn of(&mut self, list: &pb::PullList) -> Vec<String> {
        let mut lines = self.ends(list);
        let first = !std::mem::replace(&mut self.began, true);
        if first {
            lines.push(summary(list));
        }
        self.settings(list, first, &mut lines);
        let mut now = HashMap::with_capacity(list.pulls.len());
        for pull in &list.pulls {
            let printed = Printed { state: pull.state, quarter: quarter(pull) };
            let before = self.pulls.get(&key(pull)).copied();
            // At the start the summary includes the queue.
            let is_printed = before == Some(printed) || (first && before.is_none() && !is_running(pull));
            if !is_printed {
                lines.push(line(pull));
            }
            now.insert(key(pull), printed);
        }
        self.pulls = now;
        lines
    }

    /// Ends that were not printed yet, oldest first. Those from before the watch began are not included, but
    /// those from while the agent was away are.
    pub(super) fn ends(&mut self, list: &pb::PullList) -> Vec<String> {
        let old = !self.began && self.ended.is_empty() && self.pulls.is_empty();
        let mut lines = Vec::new();
        for pull in list.finished.iter().rev() {
            if !self.ended.insert(key(pull)) {
                continue;
            }
            self.ended_order.push_back(key(pull));
            if !old {
                lines.push(end(pull));
            }
        }
        while self.ended_order.len() > REMEMBERED {
            if let Some(oldest) = self.ended_order.pop_front() {
                self.ended.remove(&oldest);
            }
        }
        lines
    }

    fn settings(&mut self, list: &pb::PullList, first: bool, lines: &mut Vec<String>) {
        let limit = list.limit.as_ref().map_or(0, |limit| limit.max_parallel_image_pulls);
        if !first && limit != self.limit {
            let words = |limit| if limit == 0 { "none".into() } else { format!("{limit}") };
            lines.push(format!("limit changed: {} (was {})", words(limit), words(self.limit)));
        }
        if !first && list.runtime_health != self.health {
            let mut line = format!("runtime: {}", clean(&list.runtime_health));
            if !list.runtime_error.is_empty() {
                line.push_str(&format!(": {}", one_line(&list.runtime_error)));
            }
            lines.push(line);
        }
        self.limit = limit;
        self.health.clone_from(&list.runtime_health);
    }
}

fn is_running(pull: &pb::Pull) -> bool {
    use pb::PullState as S;
    matches!(pull.state(), S::Running | S::RunningPresent | S::WaitingForRuntime | S::Abandoned)
}

/// Completed quarters of a download, for occasional lines about a long one.
fn quarter(pull: &pb::Pull) -> u64 {
    let progress = pull.progress.as_ref();
    progress.map_or(0, |progress| percent(progress.bytes_done, progress.bytes_total) / 25)
}

fn line(pull: &pb::Pull) -> String {
    let mut line = format!("{}: {}", state(pull), image(&pull.image));
    if pull.position > 0 {
        line.push_str(&format!(", position {}", pull.position));
    }
    if pull.callers > 1 {
        line.push_str(&format!(", {}", count(pull.callers.into(), "caller")));
    }
    if pull.attempts > 1 {
        line.push_str(&format!(", attempt {}", pull.attempts));
    }
    let done = pull.progress.as_ref().map(progress).unwrap_or_default();
    if !done.is_empty() {
        line.push_str(&format!(", {done}"));
    }
    line
}

/// `succeeded: docker.io/library/nginx:1.29 in 12s, 38.0 MiB`.
fn end(pull: &pb::Pull) -> String {
    let mut line = format!("{}: {}", state(pull), image(&pull.image));
    if let Some(took) = run_time_ms(pull) {
        line.push_str(&format!(" in {}", duration_ms(took)));
    }
    if let Some(progress) = pull.progress.as_ref().filter(|progress| progress.bytes_done > 0) {
        line.push_str(&format!(", {}", bytes(progress.bytes_done)));
    }
    if !pull.error.is_empty() {
        line.push_str(&format!(": {}", one_line(&pull.error)));
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pull(id: u64, state: pb::PullState, position: u32) -> pb::Pull {
        pb::Pull {
            id,
            image: format!("r.example/image:{id}"),
            state: state.into(),
            position,
            ..Default::default()
        }
    }

    fn list(pulls: Vec<pb::Pull>, finished: Vec<pb::Pull>) -> pb::PullList {
        let count = |state| pulls.iter().filter(|pull| pull.state() == state).count() as u32;
        pb::PullList {
            limit: Some(pb::Limit { max_parallel_image_pulls: 1, ..Default::default() }),
            running: count(pb::PullState::Running),
            queued: count(pb::PullState::Queued),
            pulls,
            finished,
            runtime_health: "up".into(),
            ..Default::default()
        }
    }

    #[test]
    fn a_pull_from_place_to_end() {
        use pb::PullState as S;
        let mut changes = Changes::default();
        let old = pb::Pull { finished_unix_ms: 9, ..pull(1, S::Succeeded, 0) };
        let lines = changes.of(&list(vec![pull(2, S::Running, 0), pull(3, S::Queued, 1)], vec![old.clone()]));
        assert_eq!(
            lines,
            ["1 of 1 in use, 1 queued (oldest 0ms), 0 callers, runtime up", "running: r.example/image:2"]
        );
        assert!(
            changes
                .of(&list(vec![pull(2, S::Running, 0), pull(3, S::Queued, 1)], vec![old.clone()]))
                .is_empty()
        );

        let mut half = pull(2, S::Running, 0);
        half.progress = Some(pb::Progress { bytes_done: 52, bytes_total: 100, ..Default::default() });
        let came = list(vec![half, pull(3, S::Queued, 1), pull(4, S::Queued, 2)], vec![old.clone()]);
        assert_eq!(
            changes.of(&came),
            ["running: r.example/image:2, 52%  52 B of 100 B", "queued: r.example/image:4, position 2"]
        );

        let failed = pb::Pull {
            started_unix_ms: 1_000,
            finished_unix_ms: 13_000,
            error: "no\nroute".into(),
            ..pull(2, S::Failed, 0)
        };
        let ended = list(vec![pull(3, S::Running, 0), pull(4, S::Queued, 1)], vec![failed, old]);
        assert_eq!(
            changes.of(&ended),
            ["failed: r.example/image:2 in 12s: no route", "running: r.example/image:3"]
        );
    }

    #[test]
    fn limits_and_health() {
        let mut changes = Changes::default();
        let mut list = list(vec![], vec![]);
        assert_eq!(changes.of(&list), ["0 of 1 in use, 0 queued, 0 callers, runtime up"]);
        list.limit = None;
        list.runtime_health = "down".into();
        list.runtime_error = "refused".into();
        assert_eq!(changes.of(&list), ["limit changed: none (was 1)", "runtime: down: refused"]);
    }

    #[test]
    fn ends_during_an_outage_of_the_agent_are_shown_once() {
        use pb::PullState as S;
        let mut changes = Changes::default();
        changes.of(&list(vec![pull(2, S::Running, 0)], vec![]));
        changes.forget();
        let back = list(vec![], vec![pull(2, S::Succeeded, 0)]);
        assert_eq!(
            changes.of(&back),
            ["succeeded: r.example/image:2", "0 of 1 in use, 0 queued, 0 callers, runtime up"]
        );
        assert!(changes.of(&back).is_empty());
    }

    #[test]
    fn memory_is_bounded() {
        let mut changes = Changes::default();
        for id in 0..10_000 {
            changes.of(&list(vec![], vec![pull(id, pb::PullState::Succeeded, 0)]));
        }
        assert_eq!(changes.ended.len(), REMEMBERED);
        assert_eq!(changes.ended_order.len(), REMEMBERED);
    }
}
