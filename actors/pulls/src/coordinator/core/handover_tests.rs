//! I8: hand-over between two cores.

use super::{
    CallerId, PullEvent, Refusal, Stage,
    testing::{Ask, Bench, fails, image, limit, lost, ok, reading, seconds},
};
use crate::{
    coordinator::handover::{HandedEnd, HandedOutcome},
    request::PullId,
    runtime::Phase,
};
use keelson_proto::Code;

/// Passes the ends of the old core's last event to the successor.
fn report_ends(old: &Bench, new: &mut Bench) -> Vec<HandedEnd> {
    let ends = old.reported_ends();
    for end in &ends {
        new.event(PullEvent::PredecessorEnded { pull: PullId(end.pull), how: end.how.clone() });
    }
    ends
}

fn ask_all(bench: &mut Bench, names: &[&str]) -> Vec<CallerId> {
    names.iter().map(|name| bench.ask(image(name))).collect()
}

#[test]
fn queued_callers_move_and_running_ones_stay() {
    let mut old = Bench::up(limit(2));
    let callers = ask_all(&mut old, &["r/a", "r/b", "r/c", "r/d"]);
    let (new, state) = old.hand_over();
    assert_eq!((state.pulls.len(), state.running()), (4, 2));
    for (index, caller) in callers.iter().enumerate() {
        match index < 2 {
            true => assert!(old.waits(*caller), "the predecessor answers with the result of the runtime"),
            false => assert_eq!(old.refusal(*caller), Refusal::Moved),
        }
    }
    assert_eq!((new.running(), new.queued()), (2, 2), "pulls running in the predecessor hold their slots");
    assert!(new.starts.is_empty(), "no pull is started twice");
    let late = old.ask(image("r/e"));
    assert_eq!(old.refusal(late), Refusal::Moved);
}

#[test]
fn an_end_in_the_predecessor_frees_the_slot_and_answers_joined_callers() {
    let mut old = Bench::up(limit(1));
    let (first, pull) = old.request(image("r/a"));
    let moved = ask_all(&mut old, &["r/b", "r/c"]);
    let (mut new, _) = old.hand_over();
    let joined = new.ask(image("r/a"));
    let again = ask_all(&mut new, &["r/c", "r/b"]);
    assert!(new.starts.is_empty(), "{moved:?} wait for the slot");
    old.finish(pull, ok());
    assert!(old.succeeded(first));
    let ends = report_ends(&old, &mut new);
    assert!(matches!(&ends[..], [HandedEnd { how: HandedOutcome::Answered(_), .. }]));
    assert!(new.succeeded(joined));
    assert_eq!(new.started(), [new.pull(again[1])], "the order is that of before, not that of coming back");
    assert!(old.core.is_idle() && old.dropped.is_empty(), "the lease is the new agent's");
    assert_eq!(new.dropped.len(), 1);
}

#[test]
fn callers_with_credentials_join_only_their_own_running_pull() {
    let mut old = Bench::up(limit(2));
    let (_, pull) = old.request(image("r/a").auth("secret"));
    let (mut new, state) = old.hand_over();
    assert!(!serde_json::to_string(&state).expect("written").contains("\"secret\""));
    let same = new.ask(image("r/a").auth("secret"));
    let other = new.ask(image("r/a").auth("other"));
    assert_eq!(new.pull(same), pull);
    assert_ne!(new.pull(other), pull);
    old.finish(pull, ok());
    report_ends(&old, &mut new);
    assert!(new.succeeded(same) && new.waits(other));
}

#[test]
fn the_end_in_the_predecessor_decides_the_next_step() {
    type Act = fn(&mut Bench, CallerId, PullId);
    let lose: Act = |old, _, pull| old.finish(pull, lost("the runtime is gone"));
    let share: Act = |old, _, pull| old.finish(pull, fails(Code::Cancelled, "context canceled"));
    let fail: Act = |old, _, pull| old.finish(pull, fails(Code::NotFound, "no such image"));
    let leave: Act = |old, caller, _| {
        old.leave(caller);
        old.pass(seconds(10));
    };
    // Event; whether a caller joined in the new agent; running pulls and starts there.
    for (name, act, joined, running, starts) in [
        ("the runtime is lost", lose, false, 1, 1),
        ("the runtime is lost, joined", lose, true, 1, 1),
        ("it shares the end of a cancelled one", share, false, 1, 1),
        ("it fails", fail, false, 0, 0),
        ("everybody left", leave, false, 0, 0),
        ("only the caller that joined stays", leave, true, 1, 1),
    ] {
        let mut old = Bench::up(limit(1));
        let (caller, pull) = old.request(image("r/a"));
        let (mut new, _) = old.hand_over();
        let joined = joined.then(|| new.ask(image("r/a")));
        act(&mut old, caller, pull);
        assert_eq!(report_ends(&old, &mut new).len(), 1, "{name}");
        assert_eq!((new.running(), new.starts.len()), (running, starts), "{name}");
        assert!(joined.is_none_or(|joined| new.waits(joined)), "{name}");
    }
}

#[test]
fn a_caller_whose_pull_lost_its_runtime_in_the_old_agent_moves() {
    let mut old = Bench::up(limit(1));
    let caller = old.ask(image("r/a"));
    let (_, _) = old.hand_over();
    old.finish(PullId(1), lost("gone"));
    assert_eq!(old.refusal(caller), Refusal::Moved);
    assert!(old.core.is_idle());
}

#[test]
fn pulls_of_a_dead_predecessor_are_taken_over_under_the_limit() {
    let mut old = Bench::up(limit(2));
    let _callers = ask_all(&mut old, &["r/a", "r/b", "r/c"]);
    old.ask(image("r/d").auth("secret"));
    let (mut new, _) = old.hand_over();
    new.event(PullEvent::PredecessorGone);
    assert_eq!(new.started(), [PullId(1), PullId(2)], "they come first");
    assert_eq!((new.running(), new.queued()), (2, 1));
    assert_eq!(new.core.counts().held, 1);
}

#[test]
fn a_running_pull_without_its_credentials_is_held_for_a_caller() {
    let ask = || -> Ask { image("r/a").auth("secret") };
    let mut old = Bench::up(limit(1));
    old.ask(ask());
    let (mut new, _) = old.hand_over();
    new.event(PullEvent::PredecessorGone);
    assert!(new.starts.is_empty() && new.running() == 0);
    let caller = new.ask(ask());
    assert_eq!((new.pull(caller), new.started()), (PullId(1), vec![PullId(1)]));
}

#[test]
fn a_successor_that_is_replaced_passes_ends_on() {
    let mut first = Bench::up(limit(1));
    let caller = first.ask(image("r/a"));
    let (mut second, _) = first.hand_over();
    let joined = second.ask(image("r/a"));
    let (mut third, state) = second.hand_over();
    assert_eq!(state.running(), 1);
    assert!(second.waits(joined), "it gets its answer in the second");
    assert!(matches!(third.core.pulls[&PullId(1)].stage, Stage::Predecessor));
    first.finish(PullId(1), ok());
    report_ends(&first, &mut second);
    report_ends(&second, &mut third);
    assert!(first.succeeded(caller) && second.succeeded(joined));
    assert!(third.core.is_idle() && third.starts.is_empty());
}

#[test]
fn the_successor_counts_a_present_pull_that_becomes_a_download() {
    let mut old = Bench::up(limit(1));
    old.absent = false;
    let caller = old.ask(image("r/a"));
    old.present(old.pull(caller), Some(true));
    let (mut new, _) = old.hand_over();
    assert_eq!(new.running(), 0, "not counted under the limit");
    old.progress(PullId(1), reading(Phase::Downloading, 1));
    assert_eq!((old.refusal(caller), old.cancels.len()), (Refusal::Moved, 1));
    report_ends(&old, &mut new);
    assert_eq!(new.running(), 1, "counted");
}
