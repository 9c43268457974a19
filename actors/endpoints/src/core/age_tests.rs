//! P7: handling of an old state from disk.

use std::time::Duration;

use keelson_actor_system::reports::StaleCause;

use super::testing::{Bench, FailingStore, named, policy, stale_view};
use crate::{EndpointsPolicy, Freshness, NodeView, Service, SourceKind, view::tests::n1};

const MINUTE: u64 = 60_000;
const HOUR: u64 = 60 * MINUTE;

fn services() -> [Service; 1] {
    [named("web")]
}

fn on_boot(boot_id: &str) -> EndpointsPolicy {
    EndpointsPolicy { boot_id: boot_id.into(), ..policy() }
}

/// An agent that was synced for half an hour, with boot ID `one`.
fn current() -> Bench {
    let mut bench = Bench::with(on_boot("one"), FailingStore::new());
    bench.tell_all(&services(), &[]);
    bench.pass(HOUR / 2);
    bench
}

/// Restarts the agent after this time, with this boot ID.
fn away(bench: &mut Bench, millis: u64, boot_id: &str) {
    bench.now.unix_ms += i64::try_from(millis).expect("small");
    bench.policy = on_boot(boot_id);
    bench.restart();
    bench.pass(1);
}

fn stale_since(bench: &Bench) -> Option<i64> {
    match bench.shown.as_ref()?.freshness {
        Freshness::Stale { since_unix_ms, .. } => Some(since_unix_ms),
        Freshness::Synced => None,
    }
}

#[test]
fn p7_an_old_state_is_served_after_a_boot_up_to_a_limit_and_within_one_boot_always() {
    for (name, away_for, boot_id, is_served) in [
        ("the agent restarts", 1_000, "one", true),
        ("the agent is away for days, the node is not", 72 * HOUR, "one", true),
        ("a quick boot", MINUTE, "two", true),
        ("a boot at the limit", HOUR - MINUTE, "two", true),
        ("a boot after days", 72 * HOUR, "two", false),
        ("a boot whose ID is not known", 72 * HOUR, "", false),
    ] {
        let mut bench = current();
        away(&mut bench, away_for, boot_id);
        assert_eq!(bench.shown.is_some(), is_served, "{name}");
        let (state, reason, _) = bench.core.status();
        assert_eq!(state, if is_served { "stale" } else { "pending" }, "{name}");
        if !is_served {
            assert!(
                reason.contains("last synced 3days") && reason.contains("max_age_after_boot"),
                "{reason}"
            );
            assert_eq!(bench.notes.last(), Some(&reason));
            let view = stale_view(StaleCause::NotSynced, &reason);
            assert_eq!(bench.view, view, "{name}: it has no grace period");
        }
    }
}

#[test]
fn p7_with_a_clock_far_behind_the_age_is_unknown() {
    let mut bench = current();
    bench.now.unix_ms = 0;
    bench.policy = on_boot("two");
    bench.restart();
    assert!(bench.shown.is_none());
}

#[test]
fn p7_a_list_replaces_a_state_that_is_too_old_and_keeps_its_node() {
    let mut bench = current();
    let before = bench.id().expect("shown");
    away(&mut bench, 2 * HOUR, "two");
    // The Node was deleted meanwhile: its facts come from the disk.
    bench.tell_all(&services(), &[]);
    bench.node(NodeView { exists: false, name: n1().name, ..NodeView::default() });
    let id = bench.id().expect("shown");
    assert!(id.0 != before.0, "readers receive the full state");
    assert_eq!((bench.stale(), bench.names()), (String::new(), vec!["ns/web".to_owned()]));
    bench.restart();
    assert_eq!(bench.id(), Some(id), "it is on disk");
}

#[test]
fn p7_a_deleted_node_keeps_its_facts_after_the_state_is_too_old() {
    let mut bench = current();
    away(&mut bench, 2 * HOUR, "two");
    bench.node(NodeView { exists: false, name: n1().name, ..NodeView::default() });
    bench.list_all(&services(), &[]);
    let node = bench.shown.as_ref().expect("shown").node.clone();
    assert_eq!(
        node.i_ps.iter().flat_map(|ips| &ips.v4).count(),
        n1().ips.iter().filter(|ip| ip.is_ipv4()).count()
    );
}

#[test]
fn p7_a_state_is_stale_since_it_was_last_current_in_any_process() {
    let mut bench = current();
    let (last, publications) = (bench.now.unix_ms, bench.publications);
    away(&mut bench, 10 * MINUTE, "two");
    assert_eq!(bench.publications, publications + 1, "readers see one time, the correct one");
    let since = stale_since(&bench).expect("stale");
    assert!((last - 300_000..=last).contains(&since), "{} ms before the end", last - since);

    // Another process, and a watch that fails: the stale time does not change.
    bench.health(SourceKind::Services, Some("refused"));
    away(&mut bench, 10 * MINUTE, "two");
    assert_eq!(stale_since(&bench), Some(since));
    bench.health(SourceKind::Services, Some("refused"));
    assert_eq!(stale_since(&bench), Some(since));

    // Listing does not change the stale time before the state is current.
    let publications = bench.publications;
    bench.tell_all(&services(), &[]);
    assert_eq!((stale_since(&bench), bench.publications), (Some(since), publications));
    bench.health(SourceKind::Services, None);
    bench.tell_all(&services(), &[]);
    assert_eq!(stale_since(&bench), None);
    bench.pass(MINUTE);
    bench.health(SourceKind::Services, Some("refused"));
    assert_eq!(stale_since(&bench), Some(bench.now.unix_ms), "it was current until now");
}

/// While the first revision after a start is written, readers see the state from disk with an unchanged stale time.
#[test]
fn p7_a_write_does_not_change_the_stale_time() {
    let mut bench = current();
    away(&mut bench, 10 * MINUTE, "two");
    let (since, publications) = (stale_since(&bench).expect("stale"), bench.publications);
    bench.slow = true;
    bench.tell_all(&[named("other")], &[]);
    assert_eq!(bench.writes.len(), 1, "a revision is being written");
    bench.pass(1_000);
    assert_eq!((stale_since(&bench), bench.publications), (Some(since), publications));
    bench.write();
    assert_eq!((stale_since(&bench), bench.publications), (None, publications + 1));
}

#[test]
fn p7_a_quiet_state_is_stamped_every_five_minutes_while_it_is_current() {
    let mut bench = current();
    let (id, writes) = (bench.id(), bench.core.writes);
    bench.pass(20 * MINUTE);
    assert_eq!((bench.core.writes, bench.id()), (writes + 4, id));
    bench.health(SourceKind::Services, Some("refused"));
    let writes = bench.core.writes;
    bench.pass(20 * MINUTE);
    assert_eq!(bench.core.writes, writes, "it is not known to be current");
}

/// A state that was served once in this boot is served until the next boot, whatever its age.
#[test]
fn p7_a_state_that_was_served_in_this_boot_is_served_after_a_restart() {
    let mut bench = current();
    away(&mut bench, HOUR - 10 * MINUTE, "two");
    assert!(bench.shown.is_some());
    away(&mut bench, HOUR, "two");
    assert!(bench.shown.is_some(), "{:?}", bench.notes);
    away(&mut bench, 10 * MINUTE, "three");
    assert!(bench.shown.is_none(), "it was current last two hours ago");
}

/// If the state is confirmed after a long absence, the new time is written at once.
#[test]
fn p7_a_state_confirmed_after_a_long_time_is_stamped_at_once() {
    let mut bench = current();
    away(&mut bench, 5 * HOUR, "one");
    bench.tell_all(&services(), &[]);
    assert_eq!(stale_since(&bench), None);
    away(&mut bench, 10 * MINUTE, "two");
    assert!(bench.shown.is_some(), "{:?}", bench.notes);
}

#[test]
fn p7_a_stamp_that_fails_or_hangs_gives_the_state_a_new_instance_id() {
    let mut bench = current();
    let before = bench.id().expect("shown");
    bench.store.fail_after(0);
    bench.pass(5 * MINUTE);
    let memory = bench.id().expect("shown");
    assert!(memory.0 != before.0 && !bench.core.durable(), "the next revision is not on disk");
    bench.store.repair();
    bench.pass(2 * MINUTE);
    assert_eq!((bench.id(), bench.core.durable()), (Some(memory), true));

    bench.slow = true;
    bench.pass(5 * MINUTE + 5_000);
    let id = bench.id().expect("shown");
    assert!(id.0 != memory.0 && !bench.core.durable(), "{:?}", bench.notes);
    bench.slow = false;
    bench.write();
    bench.pass(Duration::from_secs(1).as_millis() as u64);
    assert_eq!((bench.id(), bench.core.durable()), (Some(id), true));
}
