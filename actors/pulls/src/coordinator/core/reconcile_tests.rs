//! I4: a journal that is read after pulls began from memory.

use super::{
    Core, Policy, PullEvent, Stage,
    testing::{Bench, fails, image, limit, ok, seconds},
};
use crate::{
    coordinator::record::{KeptLease, PullRecord, RecordState},
    request::PullId,
};

fn record(id: u64, image: &str, state: RecordState) -> PullRecord {
    PullRecord { state, ..PullRecord::queued(id, image) }
}

fn unread(limit: u32) -> Bench {
    let mut bench = Bench::new(Policy { limit, ..Policy::default() });
    bench.core.begin_unread(bench.now);
    bench.runtime_up();
    bench
}

fn names(core: &Core, ids: &[PullId]) -> Vec<String> {
    ids.iter().filter_map(|id| core.pulls.get(id)).map(|pull| pull.call.image.to_string()).collect()
}

/// Images of queued pulls, in order.
fn queue(bench: &Bench) -> Vec<String> {
    let ids: Vec<PullId> = bench.core.queue.places().map(|(_, id)| id).collect();
    names(&bench.core, &ids)
}

#[test]
fn i4_the_order_is_running_pulls_then_callers_then_the_journal() {
    let mut bench = unread(1);
    let running = bench.ask(image("r/running"));
    bench.ask(image("r/new-1"));
    bench.ask(image("r/new-2"));
    let records = vec![
        record(7, "r/old-queued", RecordState::Queued),
        record(8, "r/old-running", RecordState::Running),
        record(9, "r/old-last", RecordState::Queued),
    ];
    bench.reconcile(records, vec![], None);
    assert_eq!(bench.started(), [bench.pull(running)], "nothing overtakes what runs");
    // I7: no caller has requested these again.
    assert_eq!(queue(&bench), ["r/new-1", "r/new-2", "r/old-running", "r/old-queued", "r/old-last"]);
    bench.ask(image("r/old-queued"));
    assert_eq!(queue(&bench), ["r/old-queued", "r/new-1", "r/new-2", "r/old-running", "r/old-last"]);
    bench.finish(bench.pull(running), ok());
    assert_eq!(names(&bench.core, &bench.started()[1..]), ["r/old-queued"]);
}

#[test]
fn i4_nothing_is_started_twice_and_a_new_caller_gets_the_old_place() {
    let mut bench = unread(1);
    let running = bench.ask(image("r/a"));
    bench.ask(image("r/first"));
    let queued = bench.ask(image("r/b"));
    let records = vec![record(3, "r/a", RecordState::Running), record(4, "r/b", RecordState::Queued)];
    bench.reconcile(records, vec![], None);
    assert_eq!(bench.core.pulls.len(), 3, "both records are pulls of this process");
    assert_eq!(queue(&bench), ["r/b", "r/first"]);
    bench.finish(bench.pull(running), ok());
    assert_eq!(bench.starts.last(), Some(&(bench.pull(queued), 1)));
}

#[test]
fn i4_a_pull_that_succeeded_meanwhile_is_not_pulled_again_and_one_that_failed_is() {
    let mut bench = unread(1);
    let good = bench.ask(image("r/good"));
    bench.finish(bench.pull(good), ok());
    let bad = bench.ask(image("r/bad"));
    bench.finish(bench.pull(bad), fails(keelson_proto::Code::Unknown, "no"));
    let records = vec![record(1, "r/good", RecordState::Queued), record(2, "r/bad", RecordState::Queued)];
    bench.reconcile(records, vec![], None);
    let pulls: Vec<String> = bench.core.pulls.values().map(|pull| pull.call.image.to_string()).collect();
    assert_eq!(pulls, ["r/bad"]);
}

#[test]
fn i4_leases_are_not_reaped_before_the_journal_has_been_read() {
    let mut bench = unread(1);
    assert_eq!(bench.reaped(), None);
    bench.runtime_down("gone");
    bench.runtime_up();
    assert_eq!(bench.reaped(), None);
    let kept = KeptLease { lease: "keelson-owner-x".into(), image: "r/x".into(), expires_unix_ms: i64::MAX };
    bench.reconcile(vec![], vec![kept], None);
    assert_eq!(bench.reaped(), Some(&["keelson-owner-x".to_owned()][..]));
    let read = Bench::up(limit(1));
    assert_eq!(read.reaped(), Some(&[][..]));
}

#[test]
fn i4_a_lease_in_use_is_not_kept_for_later_as_well() {
    let mut bench = unread(1);
    let running = bench.ask(image("r/a"));
    let (lease, _) = bench.start_of(bench.pull(running)).expect("it started");
    let lease = lease.expect("with a lease");
    let full_name = bench.core.pulls[&bench.pull(running)].call.key.image.to_string();
    let kept = KeptLease { lease, image: full_name, expires_unix_ms: i64::MAX };
    bench.reconcile(vec![], vec![kept], None);
    assert!(bench.core.kept.is_empty());
    bench.pass(seconds(100_000));
    assert!(bench.dropped.is_empty(), "{:?}", bench.dropped);
}

#[test]
fn i4_the_newest_limit_counts() {
    for (by_hand, expect) in [(None, 5), (Some(Some(3)), 3), (Some(None), 1)] {
        let mut bench = unread(1);
        if let Some(by_hand) = by_hand {
            bench.event(PullEvent::SetLimit(by_hand));
        }
        bench.reconcile(vec![], vec![], Some(5));
        assert_eq!(bench.core.limit(), expect, "{by_hand:?}");
    }
    let mut bench = unread(1);
    bench.event(PullEvent::Configure(Box::new(limit(2))));
    bench.reconcile(vec![], vec![], Some(5));
    assert_eq!(bench.core.limit(), 2, "the settings were changed after the limit of the journal");
}

#[test]
fn i4_records_with_ids_in_use_are_kept() {
    let mut bench = unread(1);
    let running = bench.ask(image("r/a"));
    bench.ask(image("r/b"));
    let taken = bench.pull(running).0;
    // The clock has stepped back since an earlier process began without its journal.
    bench.reconcile(vec![record(taken, "r/c", RecordState::Queued)], vec![], None);
    assert_eq!(bench.core.pulls.len(), 3);
    assert_eq!(queue(&bench), ["r/b", "r/c"]);
    let journal = bench.core.journal(bench.now);
    assert_eq!(journal.pulls.len(), 3);
}

#[test]
fn i4_a_successor_reconciles_with_a_journal_that_its_predecessor_has_not_read() {
    // Whether the predecessor has read the journal, and the limit set there by hand; then whether the successor has to
    // read it, and the successor's pulls (running ones first) and limit after that.
    type Case = (bool, Option<u32>, bool, &'static [&'static str], u32);
    let cases: [Case; 3] = [
        (true, None, false, &["r/running", "r/new"], 1),
        (false, None, true, &["r/running", "r/old", "r/new"], 5),
        // Both run in the predecessor.
        (false, Some(3), true, &["r/running", "r/new", "r/old"], 3),
    ];
    for (was_read, by_hand, expect_unread, expect_pulls, expect_limit) in cases {
        let mut old = if was_read { Bench::up(limit(1)) } else { unread(1) };
        old.ask(image("r/running"));
        old.ask(image("r/new"));
        if by_hand.is_some() {
            old.event(PullEvent::SetLimit(by_hand));
        }
        let (mut new, state) = old.hand_over();
        assert_eq!(state.unread.is_some(), expect_unread);
        assert_eq!(new.reaped().is_none(), expect_unread, "a lease of an unread record is not reaped");
        if expect_unread {
            let records = vec![
                record(7, "r/old", RecordState::Queued),
                // From an earlier agent; the pull continues in the predecessor.
                record(8, "r/running", RecordState::Running),
            ];
            new.reconcile(records, vec![], Some(5));
            assert!(new.reaped().is_some());
        }
        let mut places: Vec<_> = new.core.pulls.values().map(|pull| (pull.order, pull)).collect();
        places.sort_by_key(|(order, pull)| (!matches!(pull.stage, Stage::Predecessor), *order));
        let pulls: Vec<String> = places.iter().map(|(_, pull)| pull.call.image.to_string()).collect();
        assert_eq!(pulls, expect_pulls);
        assert_eq!(new.core.limit(), expect_limit);
        let started = names(&new.core, &new.started());
        assert!(!started.contains(&"r/running".to_owned()), "it runs in the predecessor");
    }
}
