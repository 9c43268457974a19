//! Deadlines, callers that leave, stalls, losses, leases, restarts, the end.

use std::time::Duration;

use keelson_proto::Code;

use super::{
    Policy, PullEnd, PullEvent, Refusal, Tally,
    testing::{Bench, fails, image, limit, lost, ok, reading, seconds},
};
use crate::{
    coordinator::record::PullRecord,
    request::PullId,
    runtime::{Phase, RuntimeEvent},
};

#[test]
fn deadlines_end_queued_and_running_callers() {
    let mut bench = Bench::up(limit(1));
    let running = bench.ask_within(image("r/a"), Some(seconds(20)));
    let queued = bench.ask_within(image("r/b"), Some(seconds(5)));
    let pull = bench.pull(running);
    bench.pass(seconds(5));
    assert_eq!(bench.refusal(queued), Refusal::Deadline(seconds(5), "queued"));
    assert_eq!(bench.refusal(queued).code(), Code::DeadlineExceeded);
    bench.pass(seconds(15));
    assert_eq!(bench.refusal(running), Refusal::Deadline(seconds(20), "running"));
    assert!(bench.cancels.is_empty(), "the grace period begins");
    bench.pass(seconds(10));
    assert_eq!(bench.cancels, [(pull, 1)]);
}

#[test]
fn each_caller_has_its_own_deadline() {
    let mut bench = Bench::up(limit(1));
    let hasty = bench.ask_within(image("r/a"), Some(seconds(1)));
    let patient = bench.ask(image("r/a"));
    bench.pass(seconds(60));
    assert!(matches!(bench.refusal(hasty), Refusal::Deadline(..)));
    bench.finish(bench.pull(patient), ok());
    assert!(bench.succeeded(patient) && bench.cancels.is_empty());
}

#[test]
fn the_last_caller_that_leaves_cancels_the_pull_after_the_grace_period() {
    for (grace, cancelled) in [(seconds(10), false), (Duration::ZERO, true)] {
        let mut bench = Bench::up(Policy { cancel_grace: grace, ..limit(1) });
        let (one, two) = (bench.ask(image("r/a")), bench.ask(image("r/a")));
        let next = bench.ask(image("r/b"));
        bench.leave(one);
        assert!(bench.waits(two) && bench.core.pulls.len() == 2);
        bench.leave(two);
        assert_eq!(!bench.cancels.is_empty(), cancelled, "{grace:?}");
        bench.pass(grace);
        assert_eq!(bench.cancels.len(), 1);
        assert_eq!(bench.starts.last(), Some(&(bench.pull(next), 1)), "its slot is used");
    }
}

#[test]
fn a_caller_that_returns_in_the_grace_period_joins_the_pull() {
    let mut bench = Bench::up(limit(1));
    let (caller, pull) = bench.request(image("r/a"));
    bench.leave(caller);
    bench.pass(seconds(9));
    let back = bench.ask(image("r/a"));
    assert_eq!(bench.pull(back), pull);
    bench.pass(seconds(60));
    assert!(bench.cancels.is_empty());
    bench.leave(back);
    bench.pass(seconds(9));
    assert!(bench.cancels.is_empty(), "a grace period of its own");
    bench.pass(seconds(1));
    assert_eq!(bench.cancels, [(pull, 1)]);
}

#[test]
fn a_pull_that_ends_in_its_grace_period_is_a_success() {
    let mut bench = Bench::up(limit(1));
    let (caller, pull) = bench.request(image("r/a"));
    bench.leave(caller);
    bench.finish(pull, ok());
    bench.pass(seconds(60));
    assert_eq!((bench.finished(), bench.cancels.len()), (vec![PullEnd::Succeeded], 0));
}

#[test]
fn ends_of_other_attempts_are_ignored() {
    let mut bench = Bench::up(limit(1));
    let (caller, pull) = bench.request(image("r/a"));
    for (pull, attempt) in [(pull, 0), (pull, 2), (PullId(99), 1)] {
        bench.event(RuntimeEvent::PullFinished { pull, attempt, outcome: ok() });
        assert!(bench.waits(caller));
    }
    bench.finish(pull, ok());
    bench.event(RuntimeEvent::PullFinished { pull, attempt: 1, outcome: ok() });
    assert!(bench.succeeded(caller));
}

#[test]
fn a_lost_pull_is_retried_up_to_the_maximum() {
    let mut bench = Bench::up(limit(1));
    let (caller, pull) = bench.request(image("r/a"));
    for attempt in 2..=3 {
        bench.finish(pull, lost("transport is closing"));
        assert!(bench.waits(caller));
        bench.runtime_up();
        assert_eq!(bench.starts.last(), Some(&(pull, attempt)));
    }
    bench.finish(pull, lost("transport is closing"));
    let status = bench.status(caller);
    assert_eq!((status.code, &*status.message), (Code::Unavailable, "transport is closing"));
    assert_eq!((bench.running(), bench.core.pulls.len()), (0, 0));
}

#[test]
fn after_the_hold_time_the_error_of_an_absent_runtime_is_returned() {
    let mut bench = Bench::up(limit(1));
    let caller = bench.ask(image("r/a"));
    bench.finish(bench.pull(caller), lost("EOF"));
    bench.runtime_down("away");
    bench.pass(seconds(99));
    assert!(bench.waits(caller));
    bench.pass(seconds(1));
    assert_eq!(bench.status(caller).message, "EOF");
    assert_eq!(bench.running(), 0);
}

#[test]
fn a_pull_ended_by_another_cancellation_is_retried_up_to_the_maximum() {
    let cancelled = || fails(Code::Cancelled, "happened during read: context canceled");
    let mut bench = Bench::up(limit(1));
    let caller = bench.ask(image("r/a"));
    for attempts in 1..=2 {
        bench.finish(bench.pull(caller), cancelled());
        assert!(
            bench.waits(caller) && bench.starts.len() == attempts,
            "not at once: it might share it again"
        );
        bench.pass(seconds(1));
        assert_eq!(bench.starts.len(), attempts + 1);
    }
    assert_eq!(bench.tallies, [Tally::Retried("RuntimeCancelled"), Tally::Retried("RuntimeCancelled")]);
    bench.finish(bench.pull(caller), cancelled());
    assert_eq!(bench.status(caller).message, "happened during read: context canceled");
    assert_eq!((bench.running(), bench.starts.len()), (0, 3));

    let slow = bench.ask(image("r/b"));
    bench.pass(seconds(10));
    bench.finish(bench.pull(slow), cancelled());
    assert_eq!(bench.status(slow).code, Code::Cancelled, "a time limit of the runtime");
}

#[test]
fn a_lost_pull_without_callers_is_not_retried() {
    let mut bench = Bench::up(limit(1));
    let (caller, pull) = bench.request(image("r/a"));
    bench.leave(caller);
    bench.finish(pull, lost("EOF"));
    assert!(bench.core.pulls.is_empty());
    let caller = bench.ask(image("r/a"));
    bench.finish(bench.pull(caller), lost("EOF"));
    bench.leave(caller);
    assert!(bench.core.pulls.is_empty(), "nor is one whose callers leave while it waits");
}

#[test]
fn joining_a_running_pull_in_an_outage_is_not_refused() {
    let mut bench = Bench::up(limit(1));
    let first = bench.ask(image("r/a"));
    bench.runtime_down("the probe timed out");
    let second = bench.ask(image("r/a"));
    bench.pass(seconds(200));
    assert!(bench.waits(second), "the call is out, whatever the probes say");
    bench.finish(bench.pull(first), ok());
    assert!(bench.succeeded(second));
}

#[test]
fn presence_is_asked_for_once_the_runtime_is_back() {
    let mut bench = Bench::up(limit(1));
    bench.ask(image("r/slow"));
    let caller = bench.ask(image("r/a"));
    bench.runtime_down("away");
    bench.present(bench.pull(caller), Some(true));
    assert_eq!(bench.starts.len(), 1, "an answer from before the outage is too old");
    bench.runtime_up();
    assert_eq!(bench.checks.last(), Some(&bench.pull(caller)));
}

#[test]
fn kept_leases_expire() {
    let mut bench = Bench::up(limit(1));
    let (_, pull) = bench.request(image("r/a"));
    bench.finish(pull, fails(Code::Unknown, "connection reset by peer"));
    let lease = bench.journal.leases.keys().next().cloned().expect("kept");
    let mut bench = bench.kill(limit(1));
    bench.pass(seconds(3 * 3600 - 1));
    assert_eq!((bench.core.kept_leases(), bench.journal.leases.len()), (1, 1));
    bench.pass(seconds(1));
    assert_eq!((&bench.dropped[..], bench.journal.leases.len()), (&[lease][..], 0));
    assert_eq!(bench.core.next_tick(), None);
}

#[test]
fn a_clock_that_stepped_back_keeps_no_lease_for_longer() {
    let mut bench = Bench::up(limit(1));
    let (_, pull) = bench.request(image("r/a"));
    bench.finish(pull, fails(Code::Unknown, "connection reset by peer"));
    bench.now.unix_ms -= 1_000_000_000;
    let mut bench = bench.kill(limit(1));
    bench.pass(seconds(3 * 3600));
    assert_eq!(bench.dropped.len(), 1);
}

#[test]
fn a_lease_used_by_another_pull_is_not_released() {
    let mut bench = Bench::up(limit(0));
    let (one, two) = (bench.ask(image("r/a").auth("1")), bench.ask(image("r/a").auth("2")));
    bench.finish(bench.pull(one), ok());
    assert!(bench.dropped.is_empty() && bench.journal.leases.is_empty());
    bench.finish(bench.pull(two), ok());
    assert_eq!(bench.dropped.len(), 1);
}

#[test]
fn the_number_of_kept_leases_is_bounded() {
    let mut bench = Bench::up(limit(0));
    for n in 0..1030 {
        let caller = bench.ask(image(&format!("r/{n}")));
        bench.pass(seconds(1));
        bench.finish(bench.pull(caller), fails(Code::Unknown, "connection reset by peer"));
    }
    assert_eq!((bench.core.kept_leases(), bench.journal.leases.len(), bench.dropped.len()), (1024, 1024, 6));
}

#[test]
fn a_restart_takes_up_running_pulls_first_and_keeps_the_order() {
    let mut bench = Bench::up(Policy { per_registry: 1, ..limit(2) });
    for name in ["r/1", "r/2", "other.example/3", "r/4"] {
        bench.ask(image(name));
    }
    assert_eq!(bench.started(), [PullId(1), PullId(3)]);
    let mut bench = bench.kill(limit(1));
    assert_eq!(bench.journal, bench.core.journal(bench.now));
    // Killed again before anything started: the order holds.
    bench = bench.restart(limit(1));
    let new = bench.ask(image("r/new"));
    assert!(bench.pull(new) > PullId(4), "no id names two pulls");
    let new = bench.pull(new).0;
    // I7: pulls that callers wait for come before those that no caller has requested again.
    for id in [1, new, 3, 2, 4] {
        assert_eq!(bench.starts.last().map(|(pull, _)| pull.0), Some(id));
        bench.finish(PullId(id), ok());
    }
    let resumed: Vec<bool> = bench.core.finished.iter().map(|pull| pull.resumed).collect();
    assert_eq!(resumed, [true, true, true, false, true]);
}

#[test]
fn a_restart_without_the_gate_drops_the_queue() {
    let mut bench = Bench::up(limit(1));
    bench.ask(image("r/a"));
    bench.ask(image("r/b").auth("pw"));
    let bench = bench.kill(Policy { resume: false, ..limit(1) });
    assert!(bench.core.pulls.is_empty() && bench.journal.pulls.is_empty());
    assert!(bench.notes.iter().any(|note| note.warn), "and logs it");
}

#[test]
fn records_of_the_first_schema_and_unknown_ones() {
    let record = |id, image: &str| PullRecord { order: None, attempts: 3, ..PullRecord::queued(id, image) };
    let mut bench = Bench::new(limit(1));
    for bad in [record(4, "r/a"), record(2, "r/b"), record(7, "NO REFERENCE"), record(u64::MAX, "r/c")] {
        bench.journal.pulls.insert(bad.id, bad);
    }
    let mut bench = bench.kill(limit(1));
    assert_eq!(bench.journal.pulls.keys().collect::<Vec<_>>(), [&2, &4]);
    bench.runtime_up();
    assert_eq!(bench.starts, [(PullId(2), 4)]);
    assert_eq!(bench.core.list(5, bench.now).pulls[0].requested_unix_ms, 5);
}

#[test]
fn a_held_place_is_claimed_with_any_credentials() {
    let mut bench = Bench::up(limit(1));
    for ask in [image("r/slow"), image("r/a").auth("old").pod("p"), image("r/b")] {
        bench.ask(ask);
    }
    let mut bench = bench.restart(limit(1));
    assert_eq!((bench.core.counts().held, bench.queued()), (1, 1));
    let anonymous = bench.ask(image("r/a"));
    assert_ne!(bench.pull(anonymous), PullId(2), "not by one without");
    let other = bench.ask(image("r/a").auth("pw").handler("kata"));
    assert_ne!(bench.pull(other), PullId(2), "nor for another handler");
    let back = bench.ask(image("r/a").auth("new").pod("q"));
    assert_eq!(bench.pull(back), PullId(2));
    assert_eq!(bench.checks.last(), Some(&PullId(2)), "the image may have arrived before the crash");
    assert_eq!(bench.journal.pulls[&2].pod.as_ref().map(|pod| &*pod.uid), Some("q"), "and the journal knows");
    assert_eq!(bench.core.counts().held, 0);
    bench.finish(PullId(1), ok());
    assert_eq!(bench.starts.last(), Some(&(PullId(2), 1)), "before those behind it");
    bench.pass(seconds(600));
    assert!(bench.waits(back), "it is not held any more");
}

#[test]
fn a_held_place_without_claim_is_dropped() {
    let mut bench = Bench::up(limit(1));
    bench.ask(image("r/a").auth("pw"));
    let mut bench = bench.restart(limit(1));
    bench.pass(seconds(120));
    assert_eq!((bench.core.counts().held, bench.journal.pulls.len()), (0, 0));
    assert_eq!((bench.finished(), bench.starts.len()), (vec![PullEnd::Cancelled], 0));
    assert_eq!(bench.journal.leases.len(), 1, "what it had fetched waits for the next try");
}

#[test]
fn a_place_of_a_failed_pull_is_kept_for_its_pod_and_image_for_a_limited_time() {
    for (ask, wait, first) in [
        (image("r/a").pod("p").auth("2"), 29, true),
        (image("r/a").pod("p").auth("2"), 30, false),
        (image("r/a").pod("q").auth("2"), 1, false),
        (image("r/c").pod("p").auth("2"), 1, false),
    ] {
        let mut bench = Bench::up(limit(1));
        let failing = bench.ask(image("r/a").pod("p").auth("1"));
        let (runs, waits) = (bench.ask(image("r/runs")), bench.ask(image("r/waits")));
        bench.finish(bench.pull(failing), fails(Code::Unknown, "401"));
        bench.pass(seconds(wait));
        let again = bench.ask(ask);
        bench.finish(bench.pull(runs), ok());
        let next = if first { again } else { waits };
        assert_eq!(bench.starts.last(), Some(&(bench.pull(next), 1)), "after {wait} s");
    }
}

#[test]
fn draining_starts_no_pull_and_waits_for_running_ones() {
    let mut bench = Bench::up(limit(1));
    let (running, queued) = (bench.ask(image("r/a")), bench.ask(image("r/b")));
    bench.event(PullEvent::Drain);
    assert_eq!((bench.refusal(queued), bench.core.is_idle()), (Refusal::Stopping, false));
    assert_eq!(bench.refusal(queued).code(), Code::Unavailable);
    let late = bench.ask(image("r/c"));
    assert_eq!(bench.refusal(late), Refusal::Stopping);
    bench.finish(bench.pull(running), ok());
    assert!(bench.succeeded(running) && bench.core.is_idle());
    assert_eq!(bench.starts.len(), 1);
    assert_eq!(bench.journal.pulls.len(), 1, "the queued one keeps its place");
    let bench = bench.restart(limit(1));
    assert_eq!(bench.starts, [(PullId(2), 1)]);
}

#[test]
fn draining_refuses_pulls_that_return_to_the_queue() {
    let mut bench = Bench::up(limit(1));
    bench.ask(image("r/slow"));
    let caller = bench.ask(image("r/present"));
    bench.present(bench.pull(caller), Some(true));
    bench.event(PullEvent::Drain);
    assert!(bench.waits(caller));
    bench.pass(seconds(10));
    assert_eq!(bench.refusal(caller), Refusal::Stopping);
    assert_eq!(bench.journal.pulls.len(), 2);
}

#[test]
fn every_end_is_told() {
    let mut bench =
        Bench::up(Policy { cancel_grace: Duration::ZERO, stall_timeout: Some(seconds(60)), ..limit(0) });
    let [good, bad, gone, stalls] =
        ["good", "bad", "gone", "stalls"].map(|name| bench.ask(image(&format!("r/{name}"))));
    bench.progress(bench.pull(good), reading(Phase::Downloading, 1000));
    bench.finish(bench.pull(good), ok());
    bench.finish(bench.pull(bad), fails(Code::NotFound, "no such tag"));
    bench.leave(gone);
    bench.progress(bench.pull(stalls), reading(Phase::Downloading, 1));
    bench.pass(seconds(60));
    bench.progress(bench.pull(stalls), reading(Phase::Downloading, 1));
    let ended = bench.core.list(0, bench.now).finished;
    let shown: Vec<(&str, i32, &str)> = ended.iter().rev().map(|p| (&*p.image, p.state, &*p.error)).collect();
    use keelson_proto::debug::PullState as S;
    let stalled = bench.refusal(stalls).to_string();
    assert_eq!(
        shown,
        [
            ("r/good", S::Succeeded.into(), ""),
            ("r/bad", S::Failed.into(), "NotFound: no such tag"),
            ("r/gone", S::Cancelled.into(), ""),
            ("r/stalls", S::Failed.into(), &*stalled),
        ]
    );
    assert_eq!(ended[3].progress.as_ref().map(|progress| progress.bytes_done), Some(1000));
    assert!(
        ended.iter().all(|pull| pull.finished_unix_ms >= pull.started_unix_ms && pull.started_unix_ms > 0)
    );
}

#[test]
fn more_ends_than_the_history_holds_are_all_counted() {
    let mut bench = Bench::up(Policy { max_queue_time: Some(seconds(1)), ..limit(1) });
    for n in 0..101 {
        bench.ask(image(&format!("r/{n}")));
    }
    bench.pass(seconds(1));
    assert_eq!((bench.core.ended(), bench.core.finished_since(0).count()), (100, 100));
    assert_eq!(bench.core.list(0, bench.now).finished.len(), 20);
    bench.event(PullEvent::Tick);
    assert_eq!(bench.core.finished_since(100).count(), 0);
    assert_eq!(bench.core.finished.len(), 20);
}

#[test]
fn debug_output_has_no_secrets() {
    let mut bench = Bench::up(limit(1));
    let words = "401 for :hunter2hunter2";
    let caller = bench.ask(image("r/a").auth("hunter2hunter2").pod("p"));
    bench.finish(bench.pull(caller), fails(Code::Unknown, words));
    assert_eq!(bench.status(caller).message, words, "the caller gets the runtime's error");
    let caller = bench.ask(image("r/b").auth("hunter2hunter2"));
    bench.finish(bench.pull(caller), lost(words));
    assert!(bench.core.list(9, bench.now).pulls[0].error.contains("[redacted]"));
    let shown = format!("{:?} {:?} {:?}", bench.core.list(9, bench.now), bench.notes, bench.journal);
    assert!(!shown.contains("hunter2"), "{shown}");
    assert!(shown.contains("[redacted]"), "{shown}");
}

#[test]
fn the_list_shows_states_and_places() {
    use keelson_proto::debug::PullState as S;
    let mut bench = Bench::up(limit(2));
    for name in ["r/1", "r/2", "r/3", "r/4", "r/5"] {
        bench.ask(image(name));
    }
    bench.leave(super::CallerId(1));
    bench.present(PullId(3), Some(true));
    bench.present(PullId(4), Some(false));
    bench.finish(PullId(2), lost("EOF"));
    bench.pass(seconds(2));
    let list = bench.core.list(10, bench.now);
    let shown: Vec<(u64, i32, u32)> = list.pulls.iter().map(|p| (p.id, p.state, p.position)).collect();
    let expect = [
        (1, S::Abandoned, 0),
        (2, S::WaitingForRuntime, 0),
        (3, S::RunningPresent, 0),
        (4, S::Queued, 1),
        (5, S::Checking, 2),
    ];
    assert_eq!(shown, expect.map(|(id, state, position)| (id, i32::from(state), position)));
    assert_eq!((list.running, list.queued, list.callers, list.oldest_wait_ms), (2, 2, 4, 2000));
    assert_eq!(bench.core.list(1, bench.now).pulls.len(), 4, "the requested number of queued pulls");
}
