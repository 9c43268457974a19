//! Revisions that are noted outside of the store: published at once, and never with two contents.

use super::{
    Event,
    testing::{Bench, Marker, named},
};
use crate::record;

/// With a state that is noted and on disk, and a disk that is slow from now on.
fn noted() -> Bench {
    let mut bench = Bench::new();
    bench.marker = Marker::Works(None);
    bench.tell_all(&[named("a")], &[]);
    bench.pass(100);
    bench.slow = true;
    bench
}

#[test]
fn a_noted_revision_does_not_wait_for_the_disk() {
    let mut bench = noted();
    let (instance_id, rev) = bench.id().unwrap();
    bench.put_service(&named("b"));
    assert_eq!(bench.id(), Some((instance_id, rev + 1)));
    assert_eq!(bench.names(), ["ns/a", "ns/b"]);
    bench.put_service(&named("c"));
    assert_eq!(bench.id(), Some((instance_id, rev + 1)), "one write at a time");
    bench.write();
    bench.write();
    assert_eq!(bench.id(), Some((instance_id, rev + 2)));
    assert!(bench.core.durable());
    bench.slow = false;
    bench.restart();
    bench.tell_all(&["a", "b", "c"].map(named), &[]);
    assert_eq!(bench.id(), Some((instance_id, rev + 2)), "it is on disk");
}

#[test]
fn a_revision_that_cannot_be_noted_waits_for_the_disk() {
    let mut bench = noted();
    let before = bench.id().unwrap();
    bench.marker.fail(true);
    bench.put_service(&named("b"));
    assert_eq!(bench.id(), Some(before));
    bench.write();
    assert_eq!(bench.id(), Some((before.0, before.1 + 1)));
}

/// I8: killed before the write, the number would be used again for other content.
#[test]
fn i8_a_kill_before_the_write_means_a_new_instance_id() {
    let mut bench = noted();
    bench.put_service(&named("b"));
    let before = bench.id().unwrap();
    bench.slow = false;
    bench.kill_in_write(0);
    let after = bench.id().unwrap();
    assert_eq!(bench.names(), ["ns/a"]);
    assert_ne!(after.0, before.0);
    bench.tell_all(&["a", "c"].map(named), &[]);
    assert_ne!(bench.id().unwrap().0, before.0);

    let mut bench = noted();
    bench.put_service(&named("b"));
    let before = bench.id();
    bench.slow = false;
    bench.kill_in_write(i64::MAX);
    assert_eq!((bench.id(), bench.names().len()), (before, 2), "killed after it");
}

/// The disk may hold a state although its write failed or took too long: what follows in memory must not have its instance ID.
#[test]
fn a_failed_write_of_a_published_revision_means_a_new_instance_id() {
    for is_first in [false, true] {
        for is_overdue in [false, true] {
            let mut bench = if is_first { Bench::new() } else { noted() };
            bench.marker = if is_first { Marker::Works(None) } else { bench.marker };
            bench.slow = true;
            bench.tell_all(&["a", "b"].map(named), &[]);
            let (before, names) = (bench.id().expect("published"), bench.names());
            let (number, write) = bench.writes.pop().expect("a write");
            record::write(&*bench.store, &write).expect("memory writes");
            if is_overdue {
                bench.pass(5_000);
            }
            bench.handle(Event::Written { number, result: Err("an I/O error".into()) });
            let after = bench.id().expect("published");
            assert!(
                after.0 != before.0 && after.1 == before.1,
                "{is_first} {is_overdue}: {before:?} {after:?}"
            );
            assert_eq!((bench.names(), bench.core.durable()), (names, false));
            bench.pass(100);
            bench.put_service(&named("c"));
            bench.writes.clear();
            bench.slow = false;
            // Checks that no revision has two contents.
            bench.restart();
            bench.tell_all(&["a", "b", "d"].map(named), &[]);
            bench.pass(1_000);
            assert_eq!(bench.names(), ["ns/a", "ns/b", "ns/d"]);
        }
    }
}

#[test]
fn a_note_of_another_write_publishes_nothing() {
    let mut bench = noted();
    bench.marker.fail(true);
    let before = bench.id();
    bench.put_service(&named("b"));
    let number = bench.writes.first().expect("a write").0;
    bench.handle(Event::Noted { number: number + 1 });
    assert_eq!(bench.id(), before);
}
