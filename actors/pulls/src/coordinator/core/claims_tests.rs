//! I7: old records, records of deleted pods, and the order after a restart.

use std::{collections::HashSet, sync::Arc};

use super::{
    Policy, PullEvent,
    testing::{Bench, image, ok, seconds},
};
use crate::request::PullId;

fn limit(limit: u32) -> Policy {
    Policy { limit, stall_timeout: None, ..Policy::default() }
}

fn with_pods() -> Policy {
    Policy { await_pods: true, ..limit(1) }
}

fn synced(bench: &mut Bench, live: &[&str]) {
    let live: HashSet<String> = live.iter().map(|uid| (*uid).to_owned()).collect();
    bench.event(PullEvent::PodsSynced(Arc::new(live)));
}

fn kill_and_start_after(mut bench: Bench, hours: i64, policy: Policy) -> Bench {
    bench.now.unix_ms += hours * 3_600_000 + 1;
    bench.restart(policy)
}

#[test]
fn i7_unclaimed_old_records_are_dropped_with_their_leases() {
    let mut bench = Bench::up(limit(1));
    bench.ask(image("r/a"));
    bench.ask(image("r/b").auth("secret"));
    let mut bench = kill_and_start_after(bench, 1, limit(1));
    assert!(bench.starts.is_empty() && bench.journal.pulls.is_empty());
    assert_eq!(bench.reaped(), Some(&[][..]), "the lease of the first is released");
    assert!(
        bench.notes.iter().any(|note| note.text.contains("last requested 3600s ago")),
        "{:?}",
        bench.notes
    );
    bench.ask(image("r/new"));
    assert_eq!(bench.starts.len(), 1);
}

#[test]
fn i7_younger_records_and_those_after_a_clock_step_back_are_queued() {
    for (hours, limit_of) in
        [(0, limit(1)), (-5, limit(1)), (20, Policy { record_max_age: seconds(86_400), ..limit(1) })]
    {
        let mut bench = Bench::up(limit(1));
        bench.ask(image("r/a"));
        let bench = kill_and_start_after(bench, hours, limit_of);
        assert_eq!(bench.starts, [(PullId(1), 2)], "after {hours} h");
    }
}

#[test]
fn i7_records_with_callers_at_the_kill_are_not_old() {
    let mut bench = Bench::up(limit(1));
    bench.ask(image("r/a"));
    bench.ask(image("r/b"));
    bench.pass(seconds(5 * 3600));
    let bench = kill_and_start_after(bench, 0, limit(1));
    assert_eq!((bench.starts.len(), bench.queued()), (1, 1));
}

#[test]
fn i7_pulls_with_callers_come_first_and_returning_callers_keep_their_place() {
    let mut bench = Bench::up(limit(1));
    for name in ["r/1", "r/2", "r/3"] {
        bench.ask(image(name));
    }
    let mut bench = bench.restart(limit(1));
    assert_eq!(bench.starts, [(PullId(1), 2)], "an unused slot");
    let new = bench.ask(image("r/new"));
    let back = bench.ask(image("r/3"));
    assert_eq!(bench.pull(back), PullId(3));
    for expected in [PullId(3), bench.pull(new), PullId(2)] {
        let running = bench.starts.last().expect("one runs").0;
        bench.finish(running, ok());
        assert_eq!(bench.starts.last().map(|(pull, _)| *pull), Some(expected));
    }
    assert_eq!(bench.finished().len(), 3);
}

#[test]
fn i7_pulls_of_deleted_pods_are_dropped_before_they_run() {
    let mut bench = Bench::up(limit(1));
    for (name, pod) in [("r/1", "deleted"), ("r/2", "lives"), ("r/3", "static")] {
        bench.ask(image(name).pod(pod));
    }
    bench.ask(image("r/4").pod("deleted").auth("secret"));
    let mut bench = bench.restart(with_pods());
    assert_eq!(
        (bench.starts.len(), bench.core.counts().held),
        (0, 4),
        "nothing runs before the pods are known"
    );
    synced(&mut bench, &["lives", "static", "other"]);
    assert_eq!(bench.started(), [PullId(2)]);
    assert_eq!(bench.journal.pulls.keys().copied().collect::<Vec<_>>(), [2, 3]);
    // Reported again after a relist.
    synced(&mut bench, &["lives"]);
    assert_eq!((bench.queued(), bench.running()), (0, 1), "running pulls continue");
}

#[test]
fn i7_a_caller_does_not_wait_for_the_pod_watch() {
    let mut bench = Bench::up(limit(1));
    bench.ask(image("r/1").pod("web"));
    let mut bench = bench.restart(with_pods());
    let back = bench.ask(image("r/1").pod("web"));
    assert_eq!((bench.pull(back), bench.starts.len()), (PullId(1), 1));
    synced(&mut bench, &[]);
    assert!(bench.waits(back), "the list may be older than the pod");
    bench.finish(PullId(1), ok());
    assert!(bench.succeeded(back));
}

#[test]
fn i7_without_a_pod_watch_pulls_resume_after_the_window() {
    let mut bench = Bench::up(limit(1));
    bench.ask(image("r/1").pod("web"));
    bench.ask(image("r/2"));
    let mut bench = bench.restart(with_pods());
    assert_eq!(bench.started(), [PullId(2)], "no pod, nothing to learn");
    bench.finish(PullId(2), ok());
    bench.pass(seconds(120));
    assert_eq!(bench.started(), [PullId(2), PullId(1)]);
    assert_eq!(bench.core.counts().held, 0);
}
