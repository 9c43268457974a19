//! Case 6: pods that are deleted while their pulls wait; and stalled pulls.

use std::time::Duration;

use keelson_actor_system::reports::{PullsView, RuntimeAvailability};
use keelson_proto::Code;

use super::{
    CallerId, Policy, PullEnd, PullEvent, Refusal,
    testing::{Bench, OBEYS_PULL_OPTION, fails, image, limit, lost, ok, reading, seconds},
};
use crate::runtime::Phase;

fn delete_pod(bench: &mut Bench, pod: &str) {
    bench.event(PullEvent::PodGone { uid: pod.into(), pod: format!("default/{pod}") });
}

#[track_caller]
fn is_refused(bench: &Bench, caller: CallerId, pod: &str, image: &str) {
    let expect = Refusal::PodGone { pod: format!("default/{pod}"), image: image.into() };
    assert_eq!(bench.refusal(caller), expect);
}

/// A new caller is refused, for its pod has been deleted.
#[track_caller]
fn is_refused_at_once(bench: &mut Bench, pod: &str, name: &str) {
    let caller = bench.ask(image(name).pod(pod));
    is_refused(bench, caller, pod, name);
}

#[test]
fn case_06_a_queued_pull_of_a_deleted_pod_fails_at_once() {
    let mut bench = Bench::up(limit(1));
    let running = bench.ask(image("r/a").pod("a"));
    let queued = bench.ask(image("r/b").pod("web"));
    let next = bench.ask(image("r/c").pod("c"));
    delete_pod(&mut bench, "web");
    is_refused(&bench, queued, "web", "r/b");
    let refusal = bench.refusal(queued);
    assert_eq!(refusal.code(), Code::Aborted);
    assert_eq!(refusal.to_string(), "pod default/web was deleted while its image pull was queued: r/b");
    // The slot is untouched, the queue moves up, nothing is cancelled, the record is gone.
    assert_eq!((bench.running(), bench.queued(), bench.cancels.len()), (1, 1, 0));
    assert_eq!(bench.journal.pulls.len(), 2);
    assert_eq!(bench.finished(), [PullEnd::Cancelled]);
    bench.succeed(running);
    assert_eq!((bench.running(), bench.queued()), (1, 0));
    bench.succeed(next);
    // A repeated report changes nothing.
    delete_pod(&mut bench, "web");
}

#[test]
fn case_06_other_callers_of_the_pull_stay() {
    let mut bench = Bench::up(limit(1));
    let running = bench.ask(image("r/a"));
    let deleted = [bench.ask(image("r/b").pod("web")), bench.ask(image("r/b").pod("web"))];
    let (other, podless) = (bench.ask(image("r/b").pod("db")), bench.ask(image("r/b")));
    delete_pod(&mut bench, "web");
    for caller in deleted {
        is_refused(&bench, caller, "web", "r/b");
    }
    assert!(bench.waits(other) && bench.waits(podless));
    assert_eq!(bench.queued(), 1);
    bench.finish(bench.pull(running), ok());
    bench.finish(bench.pull(other), ok());
    assert!(bench.succeeded(other) && bench.succeeded(podless));
}

#[test]
fn case_06_a_running_or_lost_pull_is_untouched() {
    let mut bench = Bench::up(limit(1));
    let (caller, pull) = bench.request(image("r/a").pod("web"));
    delete_pod(&mut bench, "web");
    assert!(bench.waits(caller));
    bench.finish(pull, lost("EOF"));
    delete_pod(&mut bench, "web");
    assert!(bench.waits(caller), "it keeps its slot and its call");
    bench.runtime_up();
    // A caller that joins a running pull does not wait in a queue.
    let joined = bench.ask(image("r/a").pod("web"));
    bench.finish(pull, ok());
    assert!(bench.succeeded(caller) && bench.succeeded(joined) && bench.cancels.is_empty());
}

#[test]
fn case_06_a_request_of_a_deleted_pod_fails_if_it_would_wait() {
    let mut bench = Bench::up(limit(1));
    delete_pod(&mut bench, "web");
    bench.ask(image("r/a"));
    is_refused_at_once(&mut bench, "web", "r/b");
    assert_eq!((bench.queued(), bench.checks.len(), bench.journal.pulls.len()), (0, 0, 1));
    // It does not join a waiting pull of others either.
    let other = bench.ask(image("r/c").pod("db"));
    is_refused_at_once(&mut bench, "web", "r/c");
    assert!(bench.waits(other));
}

#[test]
fn case_06_a_deleted_pod_is_remembered_for_a_limited_time() {
    let mut bench = Bench::up(Policy { stall_timeout: None, ..limit(1) });
    let _running = bench.ask(image("r/a"));
    delete_pod(&mut bench, "web");
    bench.pass(seconds(3_600));
    is_refused_at_once(&mut bench, "web", "r/b");
    bench.event(PullEvent::PodForgotten("web".into()));
    bench.pass(seconds(599));
    is_refused_at_once(&mut bench, "web", "r/b");
    bench.pass(seconds(1));
    let late = bench.ask(image("r/b").pod("web"));
    assert!(bench.waits(late));
}

#[test]
fn case_06_no_uid_matches_no_pod() {
    let mut bench = Bench::up(limit(1));
    let _running = bench.ask(image("r/a"));
    let podless = bench.ask(image("r/b"));
    delete_pod(&mut bench, "");
    bench.event(PullEvent::PodForgotten(String::new()));
    assert!(bench.waits(podless));
}

#[test]
fn case_06_places_from_the_journal_are_given_up() {
    let mut bench = Bench::up(limit(1));
    let _running = bench.ask(image("r/a").pod("a"));
    bench.ask(image("r/b").pod("web").auth("secret"));
    bench.ask(image("r/c").pod("web"));
    bench.ask(image("r/d").pod("db").auth("secret"));
    let mut bench = bench.kill(limit(1));
    assert_eq!((bench.core.counts().held, bench.queued()), (2, 2));
    delete_pod(&mut bench, "web");
    assert_eq!((bench.core.counts().held, bench.queued(), bench.journal.pulls.len()), (1, 1, 2));
    let images: Vec<&str> = bench.journal.pulls.values().map(|record| &*record.image).collect();
    assert_eq!(images, ["r/a", "r/d"]);
}

#[test]
fn case_06_a_held_place_is_not_claimed_by_a_deleted_pod() {
    let mut bench = Bench::up(limit(1));
    let _running = bench.ask(image("r/a").pod("a"));
    bench.ask(image("r/b").pod("db").auth("secret"));
    let mut bench = bench.kill(limit(1));
    delete_pod(&mut bench, "web");
    let late = bench.ask(image("r/b").pod("web").auth("other"));
    is_refused(&bench, late, "web", "r/b");
    assert_eq!(bench.core.counts().held, 1);
}

#[test]
fn case_06_a_restarted_coordinator_remembers_deleted_pods() {
    let mut bench = Bench::up(limit(1));
    let _running = bench.ask(image("r/a").pod("web"));
    delete_pod(&mut bench, "web");
    let pods = bench.core.take_deleted_pods();
    let records = bench.journal.pulls.values().cloned().collect();
    bench.core = super::Core::new(limit(1), "owner");
    bench.core.set_deleted_pods(pods);
    let effects = bench.core.restore(records, Vec::new(), None, bench.now);
    assert!(bench.core.pulls.is_empty(), "{effects:?}");
    is_refused_at_once(&mut bench, "web", "r/b");
}

#[test]
fn case_06_a_pull_that_has_to_go_back_to_the_queue_ends() {
    // Its image was present, then turned out to be a download: no slot is free.
    let mut bench = Bench::up(limit(1));
    let _running = bench.ask(image("r/a"));
    let (caller, pull) = bench.request(image("r/b").pod("web"));
    bench.present(pull, Some(true));
    delete_pod(&mut bench, "web");
    assert!(bench.waits(caller), "it runs");
    bench.progress(pull, reading(Phase::Downloading, 10));
    is_refused(&bench, caller, "web", "r/b");
    assert_eq!((bench.cancels.as_slice(), bench.queued()), (&[(pull, 1)][..], 0));
}

#[test]
fn case_06_a_pull_held_back_by_the_runtime_limit_is_waiting() {
    let policy = Policy { enforce_by_runtime: true, ..limit(1) };
    for before in [false, true] {
        let mut bench = Bench::with(OBEYS_PULL_OPTION, policy.clone());
        let (caller, pull) = bench.request(image("r/a").pod("web"));
        if before {
            delete_pod(&mut bench, "web");
            assert!(bench.waits(caller));
        }
        bench.finish(pull, fails(Code::ResourceExhausted, "TooManyPullingInParallel: 3"));
        if !before {
            assert!(bench.waits(caller));
            delete_pod(&mut bench, "web");
        }
        is_refused(&bench, caller, "web", "r/a");
        assert!(bench.core.is_idle() && bench.core.pulls.is_empty());
    }
}

#[test]
fn case_06_a_pull_for_an_absent_runtime_is_waiting() {
    let mut bench = Bench::new(limit(0));
    bench.runtime_down("away");
    let caller = bench.ask(image("r/a").pod("web"));
    delete_pod(&mut bench, "web");
    is_refused(&bench, caller, "web", "r/a");
}

#[test]
fn the_pulls_view_shows_waiting_and_progressing_pulls() {
    let mut bench = Bench::new(limit(1));
    let pulls_view = |bench: &Bench| bench.core.pulls_view(true, bench.now);
    let expect = PullsView {
        queued: 0,
        running: 0,
        oldest_wait: None,
        since_progress: None,
        runtime: RuntimeAvailability::Unknown,
        durable: true,
    };
    assert_eq!(pulls_view(&bench), expect);
    bench.runtime_up();
    let running = bench.ask(image("r/a"));
    bench.pass(seconds(5));
    bench.ask(image("r/b"));
    bench.ask(image("r/c"));
    bench.pass(seconds(7));
    let expect = PullsView {
        queued: 2,
        running: 1,
        oldest_wait: Some(seconds(7)),
        runtime: RuntimeAvailability::Up,
        ..expect
    };
    assert_eq!(pulls_view(&bench), expect);
    let pull = bench.pull(running);
    bench.progress(pull, reading(Phase::Downloading, 10));
    bench.pass(seconds(3));
    bench.progress(pull, reading(Phase::Downloading, 10));
    assert_eq!(pulls_view(&bench).since_progress, Some(seconds(3)), "the same reading is no progress");
    bench.finish(pull, fails(Code::NotFound, "no"));
    assert_eq!(
        (pulls_view(&bench).since_progress, pulls_view(&bench).oldest_wait),
        (Some(Duration::ZERO), Some(seconds(10)))
    );
    bench.runtime_down("no socket");
    bench.pass(seconds(2));
    bench.runtime_down("still none");
    bench.pass(seconds(2));
    assert_eq!(
        pulls_view(&bench).runtime,
        RuntimeAvailability::Down { down_for: seconds(4), reason: "still none".into() }
    );
    bench.runtime_up();
    assert_eq!(pulls_view(&bench).runtime, RuntimeAvailability::Up);
    assert!(!bench.core.pulls_view(false, bench.now).durable);
}
