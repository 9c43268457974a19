//! P6: the published state while the disk hangs, is slow or fails.

use super::testing::{Bench, named, slice_of};
use crate::view::tests::svc;

/// P6: a disk that does not answer delays a revision by at most the write timeout.
#[test]
fn p6_a_disk_that_hangs_stops_no_revision() {
    let mut bench = Bench::synced(&[named("a")], &[slice_of("a-1", "a", "L1")]);
    let before = bench.id().unwrap();
    bench.pass(100);
    bench.slow = true;
    bench.put_service(&named("b"));
    bench.pass(4_999);
    assert_eq!(bench.id(), Some(before), "it may still be written");
    assert!(bench.core.durable());
    bench.pass(1);
    let new_id = bench.id().unwrap();
    assert!(new_id.0 != before.0 && new_id.1 == before.1 + 1, "{before:?} {new_id:?}");
    assert!(!bench.core.durable());
    assert!(
        bench.notes.iter().any(|note| note.contains("has not completed a write of the endpoints for 5s")),
        "{:?}",
        bench.notes
    );
    // Further revisions do not wait, and no second write is started.
    for number in 1..=3 {
        bench.pass(100);
        bench.put_service(&named(&format!("c{number}")));
        assert_eq!(bench.id(), Some((new_id.0, new_id.1 + number)));
    }
    assert_eq!(bench.writes.len(), 1);
    let (newest, names) = (bench.id(), bench.names());
    // The disk completes the outdated write; then the published state is written.
    bench.slow = false;
    bench.write();
    assert!(bench.core.durable(), "{:?}", bench.notes);
    assert_eq!((bench.id(), bench.names()), (newest, names.clone()));
    bench.restart();
    bench.tell_all(&["a", "b", "c1", "c2", "c3"].map(named), &[slice_of("a-1", "a", "L1")]);
    assert_eq!((bench.id(), bench.names()), (newest, names));
}

/// P6: if every write succeeds but exceeds the limit, the state reaches the disk, and writes are retried with
/// back-off.
#[test]
fn p6_a_slow_disk_gets_the_state_and_pauses() {
    let mut bench = Bench::idle(&[named("a")], &[]);
    bench.slow = true;
    bench.put_service(&named("b"));
    let write_takes_6_s = |bench: &mut Bench| {
        assert_eq!(bench.writes.len(), 1);
        bench.pass(6_000);
        bench.write();
    };
    write_takes_6_s(&mut bench);
    assert!(!bench.core.durable(), "readers see it under another identity");
    write_takes_6_s(&mut bench);
    assert!(bench.core.durable(), "{:?}", bench.notes);
    // Changes during the write: the next attempt follows after an increasing pause.
    for (number, pause) in (1..).zip([0, 10_000, 20_000, 40_000, 60_000, 60_000]) {
        bench.pass(pause);
        if pause > 0 {
            assert_eq!(bench.writes.len(), 1);
        } else {
            bench.put_service(&named("c"));
        }
        bench.pass(5_000);
        bench.put_service(&svc().named("ns", "d").node_port(number).build());
        bench.write();
        let due = if pause == 0 { 1 } else { 0 };
        assert_eq!((bench.core.durable(), bench.writes.len()), (false, due), "after {pause} ms");
        if due == 1 {
            bench.pass(5_000);
            bench.put_service(&named("e"));
            bench.write();
            assert_eq!(bench.writes.len(), 0);
            bench.pass(0);
        }
    }
}

/// P6: a restarted actor does not wait for a hanging write of its predecessor, and reuses no revision.
#[test]
fn p6_a_restarted_actor_does_not_wait_for_a_hanging_write() {
    for is_overdue in [false, true] {
        let mut bench = Bench::idle(&[named("a")], &[]);
        bench.slow = true;
        bench.put_service(&named("b"));
        if is_overdue {
            bench.pass(5_000);
        }
        let (before, names) = (bench.id().expect("shown"), bench.names());
        bench.restart_actor_without_disk();
        assert_eq!((bench.names(), bench.core.durable()), (names, false));
        bench.tell_all(&["a", "c"].map(named), &[]);
        bench.pass(5_000);
        let after = bench.id().expect("shown");
        assert_ne!(after.0, before.0, "the disk may get what was written under {before:?}: {after:?}");
        assert_eq!(bench.names(), ["ns/a", "ns/c"]);
    }
    // Nothing was published yet.
    let mut bench = Bench::new();
    bench.slow = true;
    bench.tell_all(&[named("a")], &[]);
    bench.restart_actor_without_disk();
    bench.tell_all(&[named("a")], &[]);
    assert_eq!((bench.names(), bench.core.durable()), (vec!["ns/a".to_owned()], false));
}

/// P6: killed while the disk hangs, or between its answer and the next write: no instance ID names two states.
#[test]
fn p6_a_kill_while_the_disk_hangs_takes_no_revision_back() {
    for answers in [false, true] {
        let mut bench = Bench::idle(&[named("a")], &[]);
        bench.slow = true;
        bench.put_service(&named("b"));
        bench.pass(5_000);
        bench.put_service(&named("c"));
        let new_id = bench.id().unwrap();
        if answers {
            bench.write();
            assert_eq!(bench.writes.len(), 1, "the next one is under way");
        }
        bench.slow = false;
        bench.restart();
        bench.tell_all(&["a", "b", "d"].map(named), &[]);
        let after = bench.id().unwrap();
        assert!(after.0 != new_id.0, "{new_id:?} {after:?}");
        assert_eq!(bench.names(), ["ns/a", "ns/b", "ns/d"]);
    }
}
