//! I13: present images never count. The check comes before the slot; an unknown image counts.

use keelson_proto::Code;

use super::{
    Lane, Policy,
    testing::{Bench, fails, image, limit, lost, ok, reading, seconds},
};
use crate::{request::PullId, runtime::Phase, runtime::RuntimeEvent};

/// A core whose runtime answers presence checks only when the test does.
fn bench(policy: Policy) -> Bench {
    let mut bench = Bench::new(policy);
    bench.absent = false;
    bench.runtime_up();
    bench
}

fn lane(bench: &Bench, pull: PullId) -> Option<Lane> {
    bench.core.pulls[&pull].lane
}

#[test]
fn i13_a_present_image_takes_no_counted_slot_of_an_idle_node() {
    let mut bench = bench(limit(1));
    let (caller, pull) = bench.request(image("r/present"));
    assert_eq!((&bench.checks[..], bench.starts.len(), bench.running()), (&[pull][..], 0, 0));
    bench.present(pull, Some(true));
    assert_eq!((lane(&bench, pull), bench.running()), (Some(Lane::Present), 0));
    let other = bench.ask(image("r/absent"));
    bench.present(bench.pull(other), Some(false));
    assert_eq!(
        (lane(&bench, bench.pull(other)), bench.running()),
        (Some(Lane::Counted), 1),
        "the slot is free"
    );
    bench.finish(pull, fails(Code::Unknown, "401 unauthorized"));
    assert_eq!(bench.status(caller).message, "401 unauthorized", "the runtime checks the credentials");
}

#[test]
fn i13_unknown_presence_counts() {
    for late in [false, true] {
        let mut bench = bench(limit(1));
        let (_, pull) = bench.request(image("r/a"));
        if late {
            bench.pass(super::presence::PRESENCE_TIMEOUT);
        } else {
            bench.present(pull, None);
        }
        assert_eq!((lane(&bench, pull), bench.running()), (Some(Lane::Counted), 1), "late: {late}");
        bench.present(pull, Some(true));
        assert_eq!(bench.starts.len(), 1, "an answer after the start means nothing");
    }
}

#[test]
fn i13_a_late_answer_still_serves_a_pull_that_waits() {
    let mut bench = bench(limit(1));
    let slow = bench.ask(image("r/slow"));
    bench.present(bench.pull(slow), Some(false));
    let caller = bench.ask(image("r/present"));
    bench.pass(seconds(60));
    bench.present(bench.pull(caller), Some(true));
    assert_eq!(lane(&bench, bench.pull(caller)), Some(Lane::Present));
}

#[test]
fn i13_the_order_of_arrival_holds_while_answers_are_awaited() {
    let mut bench = bench(limit(1));
    let (first, second) = (bench.ask(image("r/1")), bench.ask(image("r/2")));
    bench.present(bench.pull(second), Some(false));
    assert!(bench.starts.is_empty(), "the first may be absent, too");
    bench.present(bench.pull(first), Some(false));
    assert_eq!(bench.started(), [bench.pull(first)]);
}

#[test]
fn i13_without_a_limit_nothing_is_asked() {
    let mut bench = bench(limit(0));
    bench.ask(image("r/a"));
    assert_eq!((bench.checks.len(), bench.starts.len()), (0, 1));
    bench.ask(image("r/b").option(2));
    assert_eq!(bench.checks.len(), 1, "the pull option is a limit");
}

/// I8: a pull has its place in the journal as soon as it is received, so `kill -9` while presence checks are pending,
/// late or answered in another order changes no order.
#[test]
fn i8_a_kill_before_the_answer_about_presence_keeps_the_place() {
    type Answers = fn(&mut Bench, [PullId; 2]);
    let cases: [(&str, Answers); 4] = [
        ("no answer", |_, _| {}),
        ("the second is absent", |bench, [_, second]| bench.present(second, Some(false))),
        ("the second is unknown", |bench, [_, second]| bench.present(second, None)),
        ("the runtime is away", |bench, _| bench.runtime_down("away")),
    ];
    for (case, answers) in cases {
        let mut bench = bench(limit(1));
        let callers = [bench.ask(image("r/1").pod("p")), bench.ask(image("r/2").pod("q"))];
        let pulls = callers.map(|caller| bench.pull(caller));
        assert_eq!(bench.journal.pulls.keys().copied().collect::<Vec<_>>(), pulls.map(|id| id.0), "{case}");
        assert!(bench.starts.is_empty(), "{case}");
        answers(&mut bench, pulls);
        let mut bench = bench.kill(limit(1));
        bench.absent = false;
        bench.runtime_up();
        // They return in the other order, behind a new caller.
        let new = bench.ask(image("r/new").pod("n"));
        let [second, first] = [("r/2", "q"), ("r/1", "p")].map(|(name, pod)| bench.ask(image(name).pod(pod)));
        assert_eq!([first, second].map(|caller| bench.pull(caller)), pulls, "{case}");
        for caller in [new, second, first] {
            bench.present(bench.pull(caller), Some(false));
        }
        assert_eq!(bench.started(), [pulls[0]], "{case}");
    }
}

#[test]
fn i13_a_present_pull_that_ends_leaves_no_record() {
    let mut bench = bench(limit(1));
    let caller = bench.ask(image("r/1"));
    bench.present(bench.pull(caller), Some(true));
    bench.finish(bench.pull(caller), ok());
    assert!(bench.journal.pulls.is_empty());
}

#[test]
fn i13_presence_is_read_again_after_an_outage_and_before_the_start() {
    let mut bench = bench(limit(1));
    let caller = bench.ask(image("r/present"));
    bench.runtime_down("away");
    assert_eq!(bench.journal.pulls.len(), 1, "it waits for the runtime");
    bench.runtime_up();
    assert_eq!((bench.checks.len(), bench.starts.len()), (2, 0));
    bench.present(bench.pull(caller), Some(true));
    assert_eq!(bench.running(), 0);
    // Also after a restart.
    let mut bench = bench.kill(limit(1));
    bench.absent = false;
    bench.runtime_up();
    assert_eq!((bench.checks.len(), bench.starts.len()), (1, 0));
    bench.present(PullId(1), Some(true));
    assert_eq!(lane(&bench, PullId(1)), Some(Lane::Present));
}

#[test]
fn i13_an_image_that_arrived_under_other_credentials_takes_no_slot() {
    let mut bench = bench(limit(1));
    let first = bench.ask(image("r/a").auth("one"));
    bench.present(bench.pull(first), Some(false));
    let (_, pull) = bench.request(image("r/a").auth("two"));
    bench.present(pull, Some(false));
    bench.finish(bench.pull(first), ok());
    assert_eq!(
        (bench.running(), bench.checks.last()),
        (0, Some(&pull)),
        "the slot is free; the question first"
    );
    bench.present(pull, Some(true));
    assert_eq!((lane(&bench, pull), bench.running()), (Some(Lane::Present), 0));
}

#[test]
fn i13_a_moved_tag_takes_a_free_slot_or_gives_way_at_the_first_byte() {
    for full in [false, true] {
        let mut bench = bench(limit(1));
        let (caller, pull) = bench.request(image("r/moved"));
        bench.present(pull, Some(true));
        if full {
            let slow = bench.ask(image("r/slow"));
            bench.present(bench.pull(slow), Some(false));
        }
        bench.progress(pull, reading(Phase::Downloading, 0));
        assert_eq!((bench.running(), bench.queued(), bench.cancels.len()), (1, full.into(), full.into()));
        if full {
            bench.event(RuntimeEvent::PullFinished { pull, attempt: 1, outcome: lost("cancelled") });
            bench.finish(PullId(2), ok());
            assert_eq!(lane(&bench, pull), Some(Lane::Counted), "it is known to be a download");
        }
        bench.succeed(caller);
    }
}
