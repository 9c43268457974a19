//! Limits: count, live changes, per registry, pull option, enforced by the runtime; reject mode; slots of present
//! images.

use keelson_proto::Code;

use super::{
    Effect, Policy, PullEnd, PullEvent, Refusal,
    testing::{Bench, OBEYS_PULL_OPTION, fails, image, limit, lost, ok, reading, seconds},
};
use crate::{request::PullId, runtime::Phase, runtime::RuntimeEvent};

fn reject(of: u32) -> Policy {
    Policy { reject: true, ..limit(of) }
}

fn by_runtime(of: u32) -> Policy {
    Policy { enforce_by_runtime: true, ..limit(of) }
}

fn fill(bench: &mut Bench, count: usize) -> Vec<super::CallerId> {
    (0..count).map(|n| bench.ask(image(&format!("fill/{n}")))).collect()
}

const FULL: &str = "TooManyPullingInParallel: 3 image pulls are in flight";

#[test]
fn limit_n_0_and_1() {
    for (of, running) in [(3, 3), (0, 50), (1, 1)] {
        let mut bench = Bench::up(limit(of));
        fill(&mut bench, 50);
        assert_eq!(bench.running(), running, "limit {of}");
    }
}

#[test]
fn raising_the_limit_starts_pulls_and_lowering_cancels_none() {
    let mut bench = Bench::up(limit(2));
    let callers = fill(&mut bench, 8);
    bench.event(PullEvent::SetLimit(Some(5)));
    assert_eq!((bench.running(), bench.starts.len()), (5, 5));
    bench.event(PullEvent::SetLimit(Some(1)));
    assert_eq!((bench.running(), bench.cancels.len()), (5, 0));
    for caller in &callers[..4] {
        bench.finish(bench.pull(*caller), ok());
        assert_eq!(bench.starts.len(), 5, "nothing starts above the new limit");
    }
    bench.finish(bench.pull(callers[4]), ok());
    assert_eq!((bench.running(), bench.starts.len()), (1, 6));
    bench.event(PullEvent::SetLimit(Some(0)));
    assert_eq!(bench.running(), 3, "0 is no limit");
}

#[test]
fn a_limit_set_by_request_is_persisted_and_can_be_reset() {
    let mut bench = Bench::up(limit(2));
    bench.event(PullEvent::SetLimit(Some(7)));
    let view = bench.core.limit_view();
    assert_eq!((view.max_parallel_image_pulls, view.configured, view.overridden), (7, 2, true));
    let mut bench = bench.kill(limit(2));
    assert_eq!(bench.core.limit_view().max_parallel_image_pulls, 7);
    bench.event(PullEvent::SetLimit(None));
    let view = bench.core.limit_view();
    assert_eq!((view.max_parallel_image_pulls, view.overridden, bench.journal.limit), (2, false, None));
    assert_eq!(bench.kill(limit(2)).core.limit_view().max_parallel_image_pulls, 2);
}

#[test]
fn a_newer_configured_limit_overrides_the_requested_one() {
    let mut bench = Bench::up(limit(2));
    bench.event(PullEvent::SetLimit(Some(7)));
    bench.event(PullEvent::Configure(Box::new(Policy { reject: true, ..limit(2) })));
    assert_eq!(bench.core.limit_view().max_parallel_image_pulls, 7, "another setting does not");
    bench.event(PullEvent::Configure(Box::new(limit(4))));
    assert_eq!((bench.core.limit_view().max_parallel_image_pulls, bench.journal.limit), (4, None));
}

#[test]
fn a_slow_registry_cannot_hold_every_slot() {
    let mut bench = Bench::up(Policy { per_registry: 2, ..limit(3) });
    let slow: Vec<_> = (0..5).map(|n| bench.ask(image(&format!("slow.example/{n}")))).collect();
    assert_eq!(bench.running(), 2);
    let (a, b) = (bench.ask(image("fast.example/a")), bench.ask(image("fast.example/b")));
    assert_eq!(bench.starts.last(), Some(&(bench.pull(a), 1)), "past three that wait for the slow one");
    bench.finish(bench.pull(a), ok());
    assert_eq!(bench.starts.last(), Some(&(bench.pull(b), 1)));
    bench.event(PullEvent::Configure(Box::new(limit(3))));
    bench.finish(bench.pull(b), ok());
    assert_eq!(bench.starts.last(), Some(&(bench.pull(slow[2]), 1)), "the limit by registry is gone");
    bench.event(PullEvent::Configure(Box::new(Policy { per_registry: 1, ..limit(9) })));
    assert_eq!(bench.running(), 3, "and is back: none of the two that wait may start");
}

#[test]
fn reject_fails_after_three_tries_ten_seconds_apart() {
    let mut bench = Bench::up(reject(1));
    let running = bench.ask(image("r/a"));
    let caller = bench.ask(image("r/b"));
    let refusal = bench.refused_after(caller, 30);
    assert_eq!(refusal.code(), Code::ResourceExhausted);
    assert!(refusal.to_string().starts_with("TooManyPullingInParallel"), "{refusal}");
    let expect = Refusal::TooMany { running: 1, limit: 1, queued: 1, waited: seconds(30) };
    assert_eq!(refusal, expect);
    assert_eq!((bench.queued(), bench.waits(running)), (0, true));
    assert_eq!(bench.finished(), [PullEnd::Refused(refusal.to_string())], "I18: it was not cancelled");
    assert!(!refusal.to_string().contains("tried"), "I19: it is not tried, it waits: {refusal}");
}

#[test]
fn reject_names_the_limit_that_was_reached() {
    let mut bench = Bench::up(Policy { per_registry: 1, ..reject(0) });
    bench.ask(image("r/a"));
    bench.ask(image("other.example/a"));
    let caller = bench.ask(image("r/b"));
    bench.pass(seconds(30));
    let Refusal::TooMany { running, limit, .. } = bench.refusal(caller) else { panic!("rejected") };
    assert_eq!((running, limit), (1, 1), "of the registry");
}

#[test]
fn reject_takes_a_slot_that_becomes_free_between_the_tries() {
    let mut bench = Bench::up(reject(1));
    let running = bench.ask(image("r/a"));
    let caller = bench.ask(image("r/b"));
    bench.pass(seconds(15));
    bench.finish(bench.pull(running), ok());
    bench.pass(seconds(600));
    assert!(bench.waits(caller), "it runs, so it is not rejected");
    bench.succeed(caller);
}

#[test]
fn reject_does_not_count_time_without_a_runtime() {
    let mut bench = Bench::up(Policy { hold: seconds(300), ..reject(1) });
    bench.ask(image("r/a"));
    let caller = bench.ask(image("r/b"));
    bench.runtime_down("away");
    bench.pass(seconds(120));
    assert!(bench.waits(caller));
    bench.runtime_up();
    let refusal = bench.refused_after(caller, 30);
    assert!(matches!(refusal, Refusal::TooMany { .. }));
}

#[test]
fn the_pull_option_is_a_limit_per_caller() {
    let mut bench = Bench::up(limit(5));
    let others = fill(&mut bench, 2);
    let caller = bench.ask(image("r/a").option(2));
    assert_eq!(bench.running(), 2);
    assert_eq!(fill(&mut bench, 1).len(), 1);
    let free = bench.ask(image("r/b"));
    assert_eq!(bench.starts.last(), Some(&(bench.pull(free), 1)), "others do not wait behind it");
    bench.finish(bench.pull(free), ok());
    bench.finish(bench.pull(others[0]), ok());
    assert_eq!(bench.starts.last(), Some(&(bench.pull(caller), 1)));
}

#[test]
fn the_pull_option_rejects_even_where_the_agent_waits() {
    let mut bench = Bench::up(limit(5));
    fill(&mut bench, 2);
    let caller = bench.ask(image("r/a").option(1));
    bench.pass(seconds(30));
    let Refusal::TooMany { running, limit, .. } = bench.refusal(caller) else { panic!("rejected") };
    assert_eq!((running, limit), (2, 1));
}

#[test]
fn option_0_and_a_closed_gate_are_no_option() {
    for (option, policy) in [(0, limit(5)), (1, Policy { obey_option: false, ..limit(5) })] {
        let mut bench = Bench::up(policy);
        fill(&mut bench, 4);
        let (_, pull) = bench.request(image("r/a").option(option));
        assert_eq!(bench.starts.last(), Some(&(pull, 1)), "option {option}");
    }
}

#[test]
fn the_highest_option_of_the_waiters_counts() {
    let mut bench = Bench::up(limit(5));
    fill(&mut bench, 3);
    let tight = bench.ask(image("r/a").option(1));
    let looser = bench.ask(image("r/a").option(2));
    let pull = bench.pull(tight);
    assert_eq!((bench.queued(), bench.core.pulls[&pull].cap()), (1, Some(2)));
    bench.leave(looser);
    assert_eq!(bench.core.pulls[&pull].cap(), Some(1), "the option of a caller that leaves is dropped");
    bench.ask(image("r/a"));
    assert_eq!(bench.starts.last(), Some(&(pull, 1)), "joined by one without an option");
}

#[test]
fn the_limit_is_passed_to_a_runtime_that_obeys_it() {
    let mut bench = Bench::with(OBEYS_PULL_OPTION, by_runtime(3));
    for (ask, passed) in [(image("r/a"), 3), (image("r/b").option(2), 2), (image("r/c").option(9), 3)] {
        let (_, pull) = bench.request(ask);
        assert_eq!(bench.start_of(pull).expect("started").1, Some(passed));
    }
    fill(&mut bench, 4);
    assert_eq!(bench.running(), 7, "the agent's own list is off");
    assert_eq!(bench.core.limit_view().enforced_by, "runtime");
}

#[test]
fn without_the_capability_the_agent_applies_the_limit() {
    let mut bench = Bench::up(by_runtime(2));
    let first = bench.ask(image("r/a"));
    assert_eq!(bench.start_of(bench.pull(first)).expect("started").1, None, "nothing to hand over");
    fill(&mut bench, 3);
    assert_eq!(bench.running(), 2);
    let view = bench.core.limit_view();
    assert_eq!(view.enforced_by, "agent");
    assert!(view.enforce_note.contains("does not support"), "{}", view.enforce_note);
}

#[test]
fn runtime_limit_refusals_pause_a_waiting_pull() {
    let mut bench = Bench::with(OBEYS_PULL_OPTION, by_runtime(3));
    let (caller, pull) = bench.request(image("r/a"));
    for attempt in 1..=5 {
        bench.finish(pull, fails(Code::ResourceExhausted, FULL));
        assert!(bench.waits(caller) && bench.starts.len() == attempt);
        bench.pass(seconds(1));
        assert_eq!(bench.starts.last(), Some(&(pull, attempt as u32 + 1)));
    }
    bench.succeed(caller);
}

#[test]
fn runtime_limit_refusals_are_returned_in_reject_mode() {
    let mut bench = Bench::with(OBEYS_PULL_OPTION, Policy { reject: true, ..by_runtime(3) });
    let caller = bench.ask(image("r/a"));
    bench.finish(bench.pull(caller), fails(Code::ResourceExhausted, FULL));
    assert_eq!(bench.status(caller).message, FULL);
}

#[test]
fn runtime_limit_refusals_reach_callers_with_the_pull_option() {
    let mut bench = Bench::with(OBEYS_PULL_OPTION, by_runtime(3));
    let waits = bench.ask(image("r/a"));
    let hears = bench.ask(image("r/a").option(3));
    bench.finish(bench.pull(waits), fails(Code::ResourceExhausted, FULL));
    assert_eq!(bench.status(hears).message, FULL);
    assert!(bench.waits(waits));
    let other = bench.ask(image("r/b").option(3));
    bench.finish(bench.pull(other), fails(Code::ResourceExhausted, FULL));
    assert_eq!((bench.status(other).message.as_str(), bench.running()), (FULL, 1));
}

#[test]
fn other_exhaustion_of_the_runtime_is_an_ordinary_error() {
    for (enforce, message) in [(true, "disk quota"), (false, FULL)] {
        let mut bench = Bench::with(OBEYS_PULL_OPTION, Policy { enforce_by_runtime: enforce, ..limit(3) });
        let caller = bench.ask(image("r/a"));
        bench.finish(bench.pull(caller), fails(Code::ResourceExhausted, message));
        assert_eq!(bench.status(caller).message, message);
    }
}

#[test]
fn a_runtime_that_comes_back_without_the_capability_gets_no_more_than_the_limit() {
    let mut bench = Bench::with(OBEYS_PULL_OPTION, by_runtime(2));
    let callers = fill(&mut bench, 6);
    let pulls: Vec<PullId> = callers.iter().map(|caller| bench.pull(*caller)).collect();
    for pull in &pulls[..5] {
        bench.finish(*pull, lost("EOF"));
    }
    bench.finish(pulls[5], fails(Code::ResourceExhausted, FULL));
    bench.runtime_down("away");
    bench.pass(seconds(3));
    bench.runtime_up();
    assert_eq!(bench.running(), 2);
    assert_eq!(bench.starts[6..], [(pulls[0], 2)], "the pausing one still holds the other slot");
    bench.pass(seconds(1));
    assert_eq!(bench.starts[7..], [(pulls[5], 2)]);
    for pull in [pulls[0], pulls[5], pulls[1], pulls[2], pulls[3], pulls[4]] {
        bench.finish(pull, ok());
        assert!(bench.running() <= 2);
    }
    assert!(callers.iter().all(|caller| bench.succeeded(*caller)));
}

#[test]
fn a_pausing_pull_waits_for_its_runtime_and_gives_way_to_the_limit() {
    let mut bench = Bench::with(OBEYS_PULL_OPTION, by_runtime(1));
    let callers = fill(&mut bench, 3);
    for caller in &callers {
        bench.finish(bench.pull(*caller), fails(Code::ResourceExhausted, FULL));
    }
    bench.runtime_down("away");
    bench.pass(seconds(20));
    assert_eq!(bench.starts.len(), 3, "no request while it is down");
    bench.runtime_up();
    bench.pass(seconds(2));
    assert_eq!((bench.running(), bench.starts.len(), bench.queued()), (1, 4, 2));
}

#[test]
fn max_queue_time_bounds_the_wait() {
    let mut bench = Bench::up(Policy { max_queue_time: Some(seconds(60)), ..limit(1) });
    let running = bench.ask(image("r/a"));
    let queued = bench.ask(image("r/b"));
    bench.pass(seconds(60));
    assert_eq!(bench.refusal(queued), Refusal::QueueTime(seconds(60), 0));
    assert_eq!(bench.refusal(queued).code(), Code::ResourceExhausted);
    assert!(bench.waits(running), "time on the wire is not time in the queue");
}

#[test]
fn max_queue_time_bounds_the_wait_at_the_runtimes_own_limit() {
    let mut bench =
        Bench::with(OBEYS_PULL_OPTION, Policy { max_queue_time: Some(seconds(60)), ..by_runtime(1) });
    let (a, b) = (bench.ask(image("r/a")), bench.ask(image("r/b")));
    bench.pass(seconds(59));
    bench.finish(bench.pull(a), fails(Code::ResourceExhausted, FULL));
    bench.pass(seconds(3));
    assert_eq!(bench.refusal(a), Refusal::QueueTime(seconds(60), 0), "while it paused");
    bench.finish(bench.pull(b), fails(Code::ResourceExhausted, FULL));
    assert!(matches!(bench.refusal(b), Refusal::QueueTime(..)), "at the next answer of the runtime");
    assert_eq!(bench.running(), 0);
}

#[test]
fn the_present_lane_has_a_maximum_number_of_slots() {
    let mut bench = Bench::up(Policy { present_slots: 2, ..limit(1) });
    bench.ask(image("r/slow"));
    let callers = fill(&mut bench, 4);
    let pulls: Vec<PullId> = callers.iter().map(|caller| bench.pull(*caller)).collect();
    for pull in &pulls {
        bench.present(*pull, Some(true));
    }
    assert_eq!((bench.core.counts().present, bench.queued(), bench.running()), (2, 2, 1));
    bench.finish(pulls[1], ok());
    assert_eq!(bench.starts.last(), Some(&(pulls[2], 1)));
}

#[test]
fn absent_and_unknown_images_wait_as_do_all_without_the_gate() {
    let mut bench = Bench::up(limit(1));
    bench.ask(image("r/slow"));
    let callers = fill(&mut bench, 2);
    bench.present(bench.pull(callers[0]), Some(false));
    bench.present(bench.pull(callers[1]), None);
    assert_eq!((bench.queued(), bench.checks.len()), (2, 2));
    let mut bench = Bench::up(Policy { fast_lane: false, ..limit(1) });
    fill(&mut bench, 2);
    assert!(bench.checks.is_empty());
}

#[test]
fn a_present_image_that_is_a_download_moves_to_a_free_slot() {
    let mut bench = Bench::up(limit(2));
    let slow = fill(&mut bench, 2);
    let (caller, pull) = bench.request(image("r/present"));
    bench.present(pull, Some(true));
    bench.finish(bench.pull(slow[0]), ok());
    bench.progress(pull, reading(Phase::Downloading, 1));
    assert_eq!((bench.running(), bench.core.counts().present), (2, 0));
    assert!(bench.cancels.is_empty());
    bench.succeed(caller);
}

#[test]
fn a_present_image_that_is_a_download_goes_back_to_its_place() {
    for by_time in [false, true] {
        let mut bench = Bench::up(Policy { max_queue_time: Some(seconds(5)), ..limit(1) });
        let slow = bench.ask(image("r/slow"));
        let (caller, pull) = bench.request(image("r/present"));
        bench.present(pull, Some(true));
        if by_time {
            bench.pass(seconds(10));
        } else {
            bench.pass(seconds(6));
            bench.progress(pull, reading(Phase::Resolving, 0));
            assert!(bench.cancels.is_empty());
            bench.progress(pull, reading(Phase::Downloading, 1));
        }
        assert_eq!((&bench.cancels[..], bench.queued()), (&[(pull, 1)][..], 1));
        assert_eq!(bench.checks.len(), 1, "not checked again");
        let late = bench.ask(image("r/late"));
        bench.event(RuntimeEvent::PullFinished { pull, attempt: 1, outcome: lost("cancelled") });
        bench.finish(bench.pull(slow), ok());
        assert_eq!(bench.starts.last(), Some(&(pull, 2)), "before later pulls");
        bench.finish(pull, ok());
        assert!(bench.succeeded(caller) && bench.waits(late));
        assert_eq!(bench.dropped.len(), 2, "its kept lease is released");
    }
}

#[test]
fn a_requeued_download_has_its_full_queue_time() {
    let mut bench = Bench::up(Policy { max_queue_time: Some(seconds(5)), ..limit(1) });
    bench.ask(image("r/slow"));
    let caller = bench.ask(image("r/present"));
    bench.present(bench.pull(caller), Some(true));
    bench.pass(seconds(10));
    assert_eq!(bench.queued(), 1);
    let refusal = bench.refused_after(caller, 5);
    assert!(matches!(refusal, Refusal::QueueTime(..)));
}

#[test]
fn a_download_without_callers_is_not_requeued() {
    let mut bench = Bench::up(limit(1));
    bench.ask(image("r/slow"));
    let (caller, pull) = bench.request(image("r/present"));
    bench.present(pull, Some(true));
    bench.leave(caller);
    bench.progress(pull, reading(Phase::Downloading, 1));
    assert_eq!((&bench.cancels[..], bench.queued()), (&[(pull, 1)][..], 0));
}

#[test]
fn presence_is_asked_again_when_the_image_arrives_under_other_credentials() {
    let mut bench = Bench::up(limit(1));
    let first = bench.ask(image("r/a").auth("one"));
    bench.ask(image("r/b"));
    let (_, pull) = bench.request(image("r/a").auth("two"));
    bench.present(pull, Some(false));
    bench.finish(bench.pull(first), ok());
    assert_eq!(bench.checks.iter().filter(|asked| **asked == pull).count(), 2);
    bench.present(pull, Some(true));
    assert_eq!(bench.starts.last(), Some(&(pull, 1)), "not counted under the limit");
}

#[test]
fn max_callers_limits_the_waiters() {
    let mut bench = Bench::up(Policy { max_callers: 2, ..limit(1) });
    fill(&mut bench, 2);
    let third = bench.ask(image("r/a"));
    assert_eq!(bench.refusal(third), Refusal::TooManyCallers(2));
    assert_eq!(bench.refusal(third).code(), Code::ResourceExhausted);
    assert_eq!(bench.journal.pulls.len(), 2, "nothing is left of it");
}

#[test]
fn ten_thousand_wait_and_are_served_in_order() {
    let mut bench = Bench::up(limit(3));
    let salt = bench.salt.clone();
    let request = |bench: &mut Bench, n: u64| {
        let call = image(&format!("r/{n}")).call(&salt);
        bench.core.handle(PullEvent::Request { caller: super::CallerId(n), call, timeout: None }, bench.now)
    };
    let begin = std::time::Instant::now();
    let mut starts = Vec::new();
    let mut note = |effects: Vec<Effect>| {
        starts.extend(effects.iter().filter_map(|effect| match effect {
            Effect::Start { pull, .. } => Some(*pull),
            _ => None,
        }));
    };
    for n in 1..=10_000 {
        note(request(&mut bench, n));
        let absent = RuntimeEvent::PullPresence { pull: PullId(n), present: Some(false) };
        note(bench.core.handle(absent.into(), bench.now));
    }
    assert_eq!(bench.core.list(10, bench.now).queued, 9_997);
    for n in 1..=10_000 {
        let finished = RuntimeEvent::PullFinished { pull: PullId(n), attempt: 1, outcome: ok() };
        note(bench.core.handle(finished.into(), bench.now));
    }
    println!("10,000 requests and ends: {:?}", begin.elapsed());
    assert_eq!(starts, (1..=10_000).map(PullId).collect::<Vec<_>>());
    bench.core.check();
    assert!(bench.core.pulls.is_empty() && bench.core.timers.is_empty());
}
