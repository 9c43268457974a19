//! I17, I18, I20: returning callers, reasons of ends, Events on waiting pods.

use std::time::Duration;

use keelson_proto::Code;

use super::{
    CallerId, Policy, PullEvent, Tally,
    testing::{Ask, Bench, fails, image, limit, lost, ok, reading, seconds},
};
use crate::runtime::Phase;

fn last_end(bench: &Bench) -> (&'static str, &'static str) {
    let why = bench.core.finished.front().expect("a pull ended").why;
    (why.result, why.reason)
}

/// Takes the slot, and queues this number of other callers.
fn busy(bench: &mut Bench, others: usize) -> Vec<CallerId> {
    (0..=others).map(|n| bench.ask(image(&format!("busy/{n}")).pod(&format!("busy-{n}")))).collect()
}

/// Frees the slot; returns whether the pull of this caller gets it.
fn is_next(bench: &mut Bench, running: CallerId, caller: CallerId) -> bool {
    bench.finish(bench.pull(running), ok());
    bench.starts.last().map(|(pull, _)| *pull) == Some(bench.pull(caller))
}

#[test]
fn i17_a_caller_that_left_the_queue_returns_to_its_place_in_time() {
    let web = || image("r/a").pod("web").auth("1");
    // A returning caller may bring other credentials; another pod or image has no place.
    let cases: [(Ask, u64, bool); 5] = [
        (web(), 29, true),
        (web().auth("2"), 29, true),
        (web(), 30, false),
        (web().pod("db"), 1, false),
        (image("r/b").pod("web"), 1, false),
    ];
    for (again, wait, first) in cases {
        let mut bench = Bench::up(limit(1));
        let running = bench.ask(image("busy/0"));
        let caller = bench.ask(web());
        bench.ask(image("busy/1"));
        bench.leave(caller);
        assert_eq!(bench.queued(), 1, "a pull without callers is not queued");
        bench.pass(seconds(wait));
        let back = bench.ask(again);
        assert_eq!(is_next(&mut bench, running, back), first, "after {wait} s");
    }
}

#[test]
fn i17_a_kubelet_that_restarts_finds_its_queue_in_order() {
    let mut bench = Bench::up(limit(1));
    let callers = busy(&mut bench, 3);
    for caller in &callers {
        bench.leave(*caller);
    }
    bench.pass(seconds(15));
    assert_eq!((bench.running(), bench.queued()), (0, 0), "the grace period is over");
    // New work came first; the callers return in another order.
    let new = bench.ask(image("r/new"));
    let late = bench.ask(image("r/late"));
    let mut back: Vec<CallerId> =
        (0..=3).rev().map(|n| bench.ask(image(&format!("busy/{n}")).pod(&format!("busy-{n}")))).collect();
    back.reverse();
    let mut running = new;
    for caller in back.into_iter().chain([late]) {
        assert!(is_next(&mut bench, running, caller), "{caller:?}");
        running = caller;
    }
}

#[test]
fn i17_a_caller_whose_deadline_passed_may_return() {
    let mut bench = Bench::up(limit(1));
    let running = bench.ask(image("busy/0"));
    bench.ask_within(image("r/a").pod("web"), Some(seconds(5)));
    bench.ask(image("busy/1"));
    bench.pass(seconds(5));
    let back = bench.ask(image("r/a").pod("web"));
    assert!(is_next(&mut bench, running, back));
}

#[test]
fn i20_a_bad_image_does_not_overtake_by_asking_again() {
    for (code, text) in [
        (Code::NotFound, "r/a: not found"),
        (Code::Unknown, "pull access denied"),
        (Code::InvalidArgument, "invalid reference format"),
    ] {
        let mut bench = Bench::up(limit(1));
        let bad = bench.ask(image("r/a").pod("web").auth("1"));
        let (running, waits) = (bench.ask(image("busy/0")), bench.ask(image("busy/1")));
        bench.finish(bench.pull(bad), fails(code, text));
        bench.pass(seconds(10));
        bench.ask(image("r/a").pod("web").auth("1"));
        assert!(is_next(&mut bench, running, waits), "{code:?}");
    }
}

#[test]
fn i18_every_end_has_its_reason() {
    let policy = Policy { stall_timeout: Some(seconds(60)), cancel_grace: Duration::ZERO, ..limit(1) };
    let mut bench = Bench::up(policy);
    let caller = bench.ask(image("r/a"));
    bench.finish(bench.pull(caller), ok());
    assert_eq!(last_end(&bench), ("succeeded", "Pulled"));
    let caller = bench.ask(image("r/a"));
    bench.finish(bench.pull(caller), fails(Code::NotFound, "no"));
    assert_eq!(last_end(&bench), ("failed", "NotFound"));
    let caller = bench.ask(image("r/a"));
    bench.leave(caller);
    assert_eq!(last_end(&bench), ("cancelled", "CallerLeft"));
    bench.ask_within(image("r/a"), Some(seconds(5)));
    bench.pass(seconds(5));
    assert_eq!(last_end(&bench), ("timed_out", "DeadlineExceeded"));

    let running = bench.ask(image("busy/0"));
    let present = bench.ask(image("r/there"));
    bench.present(bench.pull(present), Some(true));
    bench.finish(bench.pull(present), ok());
    assert_eq!(last_end(&bench), ("succeeded", "AlreadyPresent"));
    bench.ask_within(image("r/a"), Some(seconds(5)));
    bench.pass(seconds(5));
    assert_eq!(last_end(&bench), ("timed_out", "DeadlineExceeded"));
    bench.ask(image("r/a").option(1));
    bench.pass(seconds(30));
    assert_eq!(last_end(&bench), ("refused", "TooManyPullingInParallel"));
    bench.ask(image("r/a").pod("web"));
    bench.event(PullEvent::PodGone { uid: "web".into(), pod: "ns/web".into() });
    assert_eq!(last_end(&bench), ("cancelled", "PodDeleted"));
    bench.progress(bench.pull(running), reading(Phase::Downloading, 1));
    bench.leave(running);
    assert_eq!(last_end(&bench), ("cancelled", "CallerLeft"));
}

#[test]
fn i18_a_refused_caller_does_not_set_the_reason_of_others() {
    let mut bench = Bench::up(limit(1));
    let running = bench.ask(image("r/a"));
    bench.ask_within(image("r/a"), Some(seconds(5)));
    bench.pass(seconds(5));
    bench.finish(bench.pull(running), fails(Code::NotFound, "no"));
    assert_eq!(last_end(&bench), ("failed", "NotFound"));
    let running = bench.ask(image("r/b"));
    bench.ask_within(image("r/b"), Some(seconds(5)));
    bench.pass(seconds(5));
    bench.leave(running);
    bench.pass(seconds(10));
    assert_eq!(last_end(&bench), ("cancelled", "CallerLeft"), "the last one left");
}

#[test]
fn i18_waiting_and_pulling_are_distinguished() {
    let mut bench = Bench::up(limit(1));
    let slow = bench.ask(image("r/slow"));
    let (_, pull) = bench.request(image("r/moved"));
    bench.present(pull, Some(true));
    bench.pass(seconds(2));
    bench.progress(pull, reading(Phase::Downloading, 1));
    bench.pass(seconds(5));
    bench.finish(bench.pull(slow), ok());
    bench.pass(seconds(7));
    bench.finish(pull, ok());
    let ended = bench.core.finished.front().expect("it ended");
    assert_eq!((ended.queue_wait, ended.pull_time), (seconds(5), Some(seconds(9))));
    let shown = bench.core.list(0, bench.now).finished.swap_remove(0);
    assert_eq!((&*shown.reason, shown.queue_wait_ms, shown.pull_time_ms), ("Pulled", 5_000, 9_000));
}

#[test]
fn i18_joined_and_retried_pulls_are_counted() {
    let mut bench = Bench::up(limit(1));
    let running = bench.ask(image("r/a"));
    bench.ask(image("r/a"));
    bench.ask(image("r/b"));
    bench.ask(image("r/b"));
    bench.finish(bench.pull(running), lost("EOF"));
    bench.runtime_up();
    assert_eq!(
        bench.tallies,
        [Tally::Joined("Running"), Tally::Joined("Queued"), Tally::Retried("RuntimeLost")]
    );
}

#[test]
fn a_pod_that_waits_gets_an_event_that_is_updated() {
    let mut bench = Bench::up(Policy { stall_timeout: None, ..limit(3) });
    for n in 0..3 {
        bench.ask(image(&format!("busy/{n}")).pod("busy"));
    }
    for n in 0..12 {
        bench.ask(image(&format!("r/{n}")));
    }
    let caller = bench.ask(image("r/a").pod("web"));
    bench.pass(seconds(29));
    assert!(bench.notices.is_empty());
    bench.pass(seconds(1));
    let notice = bench.notices[0].clone();
    assert_eq!(notice.message, "waiting for an image pull slot: 3 of 3 in use, 12 ahead (image r/a)");
    assert_eq!((&*notice.pod.uid, notice.reason, notice.count), ("web", "ImagePullQueued", 1));
    bench.finish(super::PullId(1), ok());
    bench.pass(seconds(300));
    assert_eq!(bench.notices.len(), 2);
    let again = &bench.notices[1];
    assert_eq!((&again.name, again.count, again.first_unix_ms), (&notice.name, 2, notice.first_unix_ms));
    assert!(again.message.contains("11 ahead") && again.last_unix_ms > notice.last_unix_ms);
    bench.leave(caller);
    bench.pass(seconds(3600));
    assert_eq!(bench.notices.len(), 2);
}

#[test]
fn no_events_for_running_pulls_or_while_disabled_or_without_a_runtime() {
    let mut bench = Bench::up(limit(1));
    bench.ask(image("r/a").pod("web"));
    bench.ask(image("r/b"));
    bench.pass(seconds(3600));
    assert!(bench.notices.is_empty(), "one runs, one has no pod");
    let mut bench = Bench::up(Policy { queued_event_after: None, stall_timeout: None, ..limit(1) });
    busy(&mut bench, 1);
    bench.pass(seconds(3600));
    assert!(bench.notices.is_empty(), "off");
    let mut bench = Bench::new(limit(1));
    bench.ask(image("r/a").pod("web"));
    bench.pass(seconds(90));
    assert!(bench.notices.is_empty(), "it waits for the runtime, not for a slot");
}

#[test]
fn events_of_many_waiting_pods_are_rate_limited_and_complete() {
    let mut bench = Bench::up(Policy { stall_timeout: None, ..limit(1) });
    busy(&mut bench, 100);
    bench.pass(seconds(30));
    assert_eq!(bench.notices.len(), 20);
    bench.pass(seconds(200));
    let pods: std::collections::HashSet<_> = bench.notices.iter().map(|notice| &notice.pod.uid).collect();
    assert_eq!(pods.len(), 100);
    let before = bench.notices.len();
    bench.pass(seconds(3600));
    assert!(bench.notices.len() - before <= 1820, "one every two seconds at most");
}
