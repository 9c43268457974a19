//! The numbered cases of the specification of pulls that the core decides. Those that need sockets, a runtime or an API
//! server are in the suites of `tests/`.

use keelson_proto::Code;

use super::{
    Effect, Policy, PullEnd, PullEvent,
    testing::{Bench, CONTAINERD, fails, image, limit, lost, ok, reading, seconds},
};
use crate::{
    request::PullId,
    runtime::{Capabilities, Phase, RuntimeEvent},
};

#[test]
fn case_01_limit_two_five_pulls_first_come_first_served() {
    let mut bench = Bench::up(limit(2));
    let callers: Vec<_> = (0..5).map(|n| bench.ask(image(&format!("r/{n}")))).collect();
    let pulls: Vec<PullId> = callers.iter().map(|caller| bench.pull(*caller)).collect();
    for (done, pull) in pulls.iter().enumerate() {
        assert_eq!(bench.running(), 2.min(5 - done as u32));
        assert_eq!(bench.started(), pulls[..5.min(done + 2)]);
        bench.finish(*pull, ok());
    }
    assert!(callers.iter().all(|caller| bench.succeeded(*caller)));
    assert_eq!(bench.finished(), vec![PullEnd::Succeeded; 5]);
    assert_eq!((bench.running(), bench.queued()), (0, 0));
    assert!(bench.journal.pulls.is_empty());
}

#[test]
fn case_02_thirty_minutes_in_the_queue_are_no_error() {
    let mut bench = Bench::up(limit(1));
    let first = bench.ask(image("r/a"));
    let second = bench.ask(image("r/b"));
    bench.pass(seconds(1800));
    assert!(bench.waits(second) && !bench.answers.contains_key(&second));
    bench.finish(bench.pull(first), ok());
    assert_eq!(bench.started().last(), Some(&bench.pull(second)));
    bench.succeed(second);
}

#[test]
fn case_03_same_image_and_credentials_are_one_pull() {
    for ask in [image("r/a"), image("r/a").auth("s3cret")] {
        let mut bench = Bench::up(limit(5));
        let callers = [bench.ask(ask.clone()), bench.ask(ask.clone().pod("p")), bench.ask(ask)];
        assert_eq!(bench.starts.len(), 1);
        bench.finish(bench.pull(callers[0]), ok());
        assert!(callers.iter().all(|caller| bench.succeeded(*caller)));
    }
}

#[test]
fn case_03_equal_pulls_have_the_same_handler() {
    let mut bench = Bench::up(limit(5));
    bench.ask(image("r/a"));
    bench.ask(image("r/a").handler("kata"));
    bench.ask(image("r/a:latest"));
    assert_eq!(bench.starts.len(), 2, "latest is what no tag means, another handler is another pull");
}

#[test]
fn case_03_without_the_gate_each_caller_pulls_alone() {
    let mut bench = Bench::up(Policy { deduplicate: false, ..limit(5) });
    let (one, two) = (bench.ask(image("r/a")), bench.ask(image("r/a")));
    assert_eq!(bench.starts.len(), 2);
    bench.finish(bench.pull(one), ok());
    assert!(bench.succeeded(one) && bench.waits(two));
    bench.succeed(two);
}

#[test]
fn case_04_different_credentials_are_different_pulls() {
    let mut bench = Bench::up(limit(5));
    let (good, bad, none) =
        (bench.ask(image("r/a").auth("good")), bench.ask(image("r/a").auth("bad")), bench.ask(image("r/a")));
    assert_eq!(bench.starts.len(), 3);
    bench.finish(bench.pull(bad), fails(Code::Unknown, "401 unauthorized"));
    assert_eq!(bench.status(bad).message, "401 unauthorized");
    bench.finish(bench.pull(good), ok());
    assert!(bench.succeeded(good) && bench.waits(none), "results are not shared between credentials");
}

#[test]
fn case_05_a_present_image_does_not_wait() {
    let mut bench = Bench::up(limit(1));
    bench.ask(image("r/slow"));
    bench.ask(image("r/queued"));
    let (present, pull) = bench.request(image("r/present"));
    assert_eq!(bench.checks.last(), Some(&pull));
    bench.present(pull, Some(true));
    assert_eq!(bench.starts.last(), Some(&(pull, 1)), "started past the queue");
    assert_eq!((bench.running(), bench.queued()), (1, 1));
    bench.finish(pull, fails(Code::Unknown, "401 unauthorized"));
    assert_eq!(bench.status(present).message, "401 unauthorized", "the runtime's answer is returned");
}

#[test]
fn case_07_the_kubelet_dies_with_3_active_and_10_queued() {
    let mut bench = Bench::up(limit(3));
    let callers: Vec<_> = (0..13).map(|n| bench.ask(image(&format!("r/{n}")))).collect();
    let active: Vec<PullId> = callers[..3].iter().map(|caller| bench.pull(*caller)).collect();
    for caller in &callers {
        bench.leave(*caller);
    }
    let counts = (bench.queued(), bench.running(), bench.journal.pulls.len());
    assert_eq!(counts, (0, 3, 3), "queue emptied at once");
    bench.finish(active[0], ok());
    bench.pass(seconds(10));
    assert_eq!(bench.cancels, [(active[1], 1), (active[2], 1)], "the others end with the grace period");
    assert_eq!(bench.running(), 0);
    assert_eq!((bench.core.pulls.len(), bench.core.kept_leases()), (0, 2), "only leases are left");
}

#[test]
fn case_08_without_leases_nothing_is_kept() {
    let mut bench = Bench::with(Capabilities { leases: false, ..CONTAINERD }, limit(1));
    let caller = bench.ask(image("r/a"));
    assert_eq!(bench.start_of(bench.pull(caller)), Some((None, None)));
    bench.leave(caller);
    bench.pass(seconds(10));
    assert_eq!((bench.cancels.len(), bench.journal.leases.len()), (1, 0));
}

#[test]
fn case_08_with_keep_progress_off_the_lease_only_serves_the_readings() {
    let mut bench = Bench::up(Policy { keep_progress: false, ..limit(1) });
    let caller = bench.ask(image("r/a"));
    let (lease, _) = bench.start_of(bench.pull(caller)).expect("started");
    bench.leave(caller);
    bench.pass(seconds(10));
    assert_eq!((bench.cancels.len(), bench.journal.leases.len()), (1, 0));
    assert_eq!(bench.dropped, [lease.expect("containerd has leases")], "nothing is kept");
}

#[test]
fn case_09_a_cancelled_pull_keeps_its_lease_for_the_next() {
    let mut bench = Bench::up(limit(1));
    let caller = bench.ask(image("r/a"));
    let (lease, _) = bench.start_of(bench.pull(caller)).expect("started");
    let lease = lease.expect("containerd has leases");
    assert!(lease.starts_with("keelson-owner-"), "{lease}");
    bench.leave(caller);
    bench.pass(seconds(10));
    assert_eq!(bench.journal.leases.keys().collect::<Vec<_>>(), [&lease]);
    let again = bench.ask(image("r/a").auth("other"));
    assert_eq!(bench.start_of(bench.pull(again)), Some((Some(lease.clone()), None)), "the next caller");
    assert!(bench.journal.leases.is_empty() && bench.core.kept.is_empty());
    bench.finish(bench.pull(again), ok());
    assert_eq!(bench.dropped, [lease]);
}

#[test]
fn case_10_a_killed_agent_finds_its_lease_again() {
    let mut bench = Bench::up(limit(1));
    let (anonymous, secret) = (bench.ask(image("r/a")), bench.ask(image("r/b").auth("pw")));
    let (first, second) = (bench.pull(anonymous), bench.pull(secret));
    let lease = bench.journal.pulls[&first.0].lease.clone().expect("in the journal before the call");

    let mut bench = bench.restart(limit(1));
    assert_eq!(bench.starts, [(first, 2)], "the anonymous pull resumes without a caller");
    assert_eq!(bench.start_of(first), Some((Some(lease.clone()), None)), "with its lease");
    let back = bench.ask(image("r/a").pod("p"));
    assert_eq!(bench.pull(back), first, "a repeated request joins it");
    bench.finish(first, ok());
    assert!(bench.succeeded(back));
    assert_eq!(bench.dropped, [lease], "deleted at success");
    let back = bench.ask(image("r/b").auth("pw"));
    assert_eq!((bench.pull(back), bench.starts.last()), (second, Some(&(second, 1))));
}

#[test]
fn case_11_leases_that_no_record_names_are_reaped_at_start() {
    let mut bench = Bench::up(limit(1));
    let running = bench.ask(image("r/running"));
    let running = bench.journal.pulls[&bench.pull(running).0].lease.clone().expect("a lease");
    let mut bench = bench.kill(limit(1));
    bench.runtime_down("away");
    assert_eq!(bench.reaped(), None, "no runtime");
    bench.runtime_up();
    assert_eq!(bench.reaped(), Some(&[running][..]), "every other lease of ours goes");
    bench.runtime_up();
    assert_eq!(bench.reaped(), None, "once");
}

#[test]
fn case_11_leases_that_are_left_are_reaped_after_half_a_minute() {
    let mut bench = Bench::new(limit(1));
    bench.runtime_up();
    bench.pass(seconds(29));
    bench.event(PullEvent::Tick);
    assert_eq!(bench.reaped(), None);
    bench.pass(seconds(1));
    assert_eq!(bench.reaped(), Some(&[][..]), "what the runtime made for an agent that was killed");
    assert_eq!(bench.core.next_tick(), None, "once");

    bench.event(RuntimeEvent::LeasesLeft);
    assert_eq!(bench.reaped(), None, "not at once: the runtime is busy");
    bench.pass(seconds(10));
    bench.event(RuntimeEvent::LeasesLeft);
    bench.pass(seconds(20));
    assert_eq!(bench.reaped(), Some(&[][..]));
    assert_eq!(bench.core.next_tick(), None, "once for both");
}

#[test]
fn case_11_a_runtime_that_shows_its_leases_later_is_reaped_then() {
    let mut bench = Bench::with(Capabilities { leases: false, ..CONTAINERD }, limit(1));
    assert_eq!(bench.reaped(), None);
    bench.runtime_up();
    assert_eq!(bench.reaped(), Some(&[][..]));
}

#[test]
fn case_12_and_13_a_pull_lost_with_its_runtime_goes_on() {
    let mut bench = Bench::up(limit(1));
    let (caller, next) = (bench.ask(image("r/a")), bench.ask(image("r/b")));
    let pull = bench.pull(caller);
    bench.finish(pull, lost("EOF"));
    bench.runtime_down("connection refused");
    bench.pass(seconds(5));
    assert_eq!((bench.running(), bench.starts.len()), (1, 1), "it keeps its slot");
    bench.runtime_up();
    assert_eq!(bench.starts[1..], [(pull, 2)]);
    bench.finish(pull, ok());
    assert!(bench.succeeded(caller) && bench.waits(next));
}

#[test]
fn case_14_callers_are_held_until_the_runtime_appears() {
    let mut bench = Bench::new(limit(1));
    let caller = bench.ask(image("r/a"));
    bench.pass(seconds(60));
    assert!(bench.starts.is_empty() && bench.waits(caller));
    bench.runtime_up();
    assert_eq!(bench.starts.len(), 1);
    bench.pass(seconds(60));
    assert!(bench.waits(caller), "held no longer: it waits like any other");
}

#[test]
fn case_15_the_runtime_is_away_for_five_minutes() {
    let mut bench = Bench::up(limit(1));
    let running = bench.ask(image("r/a"));
    let queued = bench.ask(image("r/b"));
    bench.finish(bench.pull(running), ok());
    bench.runtime_down("unix:///run/x.sock: connection refused");
    let new = bench.ask(image("r/c"));
    bench.pass(seconds(99));
    assert!(bench.waits(new));
    bench.pass(seconds(201));
    let refusal = bench.refusal(new);
    assert_eq!(refusal.code(), Code::Unavailable);
    let text = refusal.to_string();
    assert!(text.contains("unix:///run/x.sock") && text.contains("100s"), "{text}");
    assert!(bench.waits(queued), "the queue is kept");
}

#[test]
fn case_16_runtime_errors_are_passed_on_unchanged() {
    let mut bench = Bench::up(limit(1));
    let caller = bench.ask(image("r/a"));
    bench.finish(bench.pull(caller), fails(Code::Unknown, "RegistryUnavailable: x"));
    let status = bench.status(caller);
    assert_eq!((status.code, &*status.message), (Code::Unknown, "RegistryUnavailable: x"));
}

#[test]
fn case_17_a_registry_that_stalls_at_byte_0_is_given_up() {
    let mut bench = Bench::up(Policy { stall_timeout: Some(seconds(60)), ..limit(1) });
    let (caller, next) = (bench.ask(image("reg.example/a")), bench.ask(image("r/b")));
    let pull = bench.pull(caller);
    for _ in 0..70 {
        bench.pass(seconds(1));
        bench.progress(pull, reading(Phase::Downloading, 0));
    }
    let refusal = bench.refusal(caller);
    assert_eq!(refusal.code(), Code::DeadlineExceeded);
    assert!(refusal.to_string().contains("reg.example"), "{refusal}");
    assert_eq!(bench.cancels, [(pull, 1)]);
    assert_eq!(bench.starts.last(), Some(&(bench.pull(next), 1)), "the slot is free again");
}

#[test]
fn case_21_three_credentials_enter_again_near_the_head() {
    let mut bench = Bench::up(limit(1));
    let first = bench.ask(image("r/a").auth("one").pod("p"));
    for n in 0..5 {
        bench.ask(image(&format!("r/{n}")));
    }
    bench.finish(bench.pull(first), fails(Code::Unknown, "401"));
    assert_eq!(bench.running(), 1, "the next one took the slot");
    let second = bench.ask(image("r/a").auth("two").pod("p"));
    assert_eq!(bench.running(), 1, "no double slot");
    let busy = bench.starts.last().expect("one runs").0;
    bench.finish(busy, ok());
    assert_eq!(bench.starts.last(), Some(&(bench.pull(second), 1)), "before the four others");
    bench.finish(bench.pull(second), fails(Code::Unknown, "401"));
    let third = bench.ask(image("r/a").auth("three").pod("p"));
    let busy = bench.starts.last().expect("one runs").0;
    bench.finish(busy, ok());
    assert_eq!(bench.starts.last(), Some(&(bench.pull(third), 1)));
    bench.succeed(third);
    let starts_again =
        |effect: &Effect| matches!(effect, Effect::Start { call, .. } if &*call.image == "r/a");
    assert!(!bench.last.iter().any(starts_again));
}
