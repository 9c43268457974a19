//! Sources watched on demand, and clients that have revisions of another process.

use keelson_actor_system::reports::{EndpointsView, StaleCause};

use super::{
    Event,
    testing::{Bench, FailingStore, named, policy, stale_view},
};
use crate::{ClientEvent, EndpointsPolicy, SourceKind};

fn on_demand() -> Bench {
    Bench::with(EndpointsPolicy { on_demand: true, ..policy() }, FailingStore::new())
}

fn follow(bench: &mut Bench) {
    bench.handle(Event::Client(ClientEvent::Followed));
}

fn status(bench: &Bench) -> String {
    bench.core.state("", 0).state
}

#[test]
fn without_clients_the_state_is_not_watched() {
    let mut bench = on_demand();
    assert_eq!(bench.view, Some(EndpointsView::NotWatched));
    assert_eq!(status(&bench), "not-watched");
    assert!(bench.core.state("", 0).reason.contains("no client has connected yet"));
    assert!(!bench.core.is_stale() && !bench.core.is_watched());
    assert_eq!(bench.core.next_tick(), None, "nothing is pending");
    bench.pass(3_600_000);
    // The Node can be known nevertheless.
    bench.node(crate::view::tests::n1());
    assert_eq!(bench.view, Some(EndpointsView::NotWatched));

    follow(&mut bench);
    assert_eq!(status(&bench), "pending");
    assert!(bench.core.is_stale() && bench.core.is_watched());
    assert_eq!(bench.view, Some(EndpointsView::NotWatched), "a short failure is not reported");
    bench.list_all(&[named("web")], &[]);
    assert_eq!((status(&bench).as_str(), bench.view.clone()), ("synced", Some(EndpointsView::Synced)));
    // A restarted actor keeps it.
    bench.restart_actor();
    assert!(bench.core.is_watched());
}

#[test]
fn a_source_without_answer_after_the_first_client_is_reported() {
    for on_disk in [false, true] {
        let mut bench = on_demand();
        follow(&mut bench);
        if on_disk {
            bench.tell_all(&[named("web")], &[]);
            bench.restart();
            follow(&mut bench);
        }
        bench.pass(9_999);
        assert!(!matches!(bench.view, Some(EndpointsView::Stale { .. })), "{on_disk}: {:?}", bench.view);
        bench.pass(1);
        assert!(matches!(bench.view, Some(EndpointsView::Stale { .. })), "{on_disk}: {:?}", bench.view);
        let mut bench = on_demand();
        follow(&mut bench);
        bench.health(SourceKind::Services, Some("403 Forbidden"));
        let stale = stale_view(StaleCause::SourceRefused, "services: 403 Forbidden");
        assert_eq!(bench.view, stale, "a failing watch is reported at once");
    }
}

#[test]
fn a_restart_does_not_change_the_condition() {
    let mut bench = on_demand();
    follow(&mut bench);
    bench.tell_all(&[named("web")], &[]);
    for comes_back in [true, false] {
        bench.view = None;
        bench.restart();
        assert_eq!(bench.view, Some(EndpointsView::Pending), "the condition of the Node is kept");
        assert_eq!(bench.names(), ["ns/web"], "readers are served from disk");
        if comes_back {
            bench.pass(1_000);
            follow(&mut bench);
            assert_eq!(bench.view, Some(EndpointsView::Pending));
            bench.tell_all(&[named("web")], &[]);
            assert_eq!(bench.view, Some(EndpointsView::Synced));
        } else {
            bench.pass(10_000);
            assert_eq!(bench.view, Some(EndpointsView::NotWatched));
        }
    }
}

/// E12: other clients may have later revisions of this instance ID as well.
#[test]
fn e12_a_reader_with_a_later_revision_means_a_new_instance_id_once() {
    let mut bench = Bench::synced(&[named("a")], &[]);
    bench.pass(1_000);
    bench.put_service(&named("b"));
    let (instance_id, rev) = bench.id().expect("shown");
    let later = |instance_id, rev| Event::Client(ClientEvent::LaterRevision { instance_id, rev });
    for (what, event) in
        [("as far as we are", later(instance_id, rev)), ("of another instance", later(instance_id + 1, 99))]
    {
        bench.handle(event);
        assert_eq!(bench.id(), Some((instance_id, rev)), "{what}");
    }
    let content = bench.content();
    bench.handle(later(instance_id, rev + 40));
    let (new_id, same) = bench.id().expect("shown");
    assert!(new_id != instance_id && same == rev);
    assert_eq!(bench.content(), content);
    assert!(bench.notes.iter().any(|note| note.contains("restored from a backup")), "{:?}", bench.notes);
    assert_eq!(bench.core.on_disk(), Some((new_id, rev)), "it is on disk at once");
    // A second claim may be wrong or hostile: the folder is restored at most once per process.
    bench.handle(later(new_id, rev + 40));
    assert_eq!(bench.id(), Some((new_id, rev)));
    bench.pass(1_000);
    bench.put_service(&named("c"));
    assert_eq!(bench.id(), Some((new_id, rev + 1)));
    bench.restart();
    assert_eq!(bench.id(), Some((new_id, rev + 1)));
}

/// E12: the pending write has the previous instance ID.
#[test]
fn e12_a_new_instance_id_waits_for_the_running_write() {
    let mut bench = Bench::synced(&[named("a")], &[]);
    bench.pass(1_000);
    let (instance_id, rev) = bench.id().expect("shown");
    bench.slow = true;
    bench.put_service(&named("b"));
    bench.handle(Event::Client(ClientEvent::LaterRevision { instance_id, rev: rev + 40 }));
    assert_eq!(bench.id(), Some((instance_id, rev)));
    bench.slow = false;
    bench.write();
    let (new_id, newest) = bench.id().expect("shown");
    assert!(new_id != instance_id && newest == rev + 1, "{new_id} {newest}");
    assert_eq!(bench.names(), ["ns/a", "ns/b"]);
    assert_eq!(bench.core.on_disk(), Some((new_id, newest)));
}
