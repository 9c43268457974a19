//! What survives a restart and what does not. Restarts are of the process unless a test says otherwise.

use keelson_actor_system::reports::{EndpointsView, StaleCause};
use keelson_storage::{Batch, StateStore as _, Table};

use super::testing::{Bench, FailingStore, gone, many, named, policy, put, slice_of, stale_view};
use crate::{
    EndpointsPolicy, NodeView, Service, SourceKind,
    record::{CHUNK_RECORDS, Loaded},
    view::tests::{n1, slice, svc},
};

const NO_ANSWER: &str = "the source has not answered since the start";

fn lost(loaded: &Loaded) -> String {
    let Loaded::Lost(reason) = loaded else { panic!("{loaded:?} is not lost") };
    reason.clone()
}

fn put_record(bench: &Bench, key: &str, value: Vec<u8>) {
    let mut batch = Batch::new();
    batch.put(Table::Endpoints, key, value);
    bench.store.apply(&batch).unwrap();
}

#[test]
fn a_restart_without_changes_makes_no_revision() {
    let (services, slices) = (many(3), [slice_of("a", "s0001", "L1 R1")]);
    let mut bench = Bench::idle(&services, &slices);
    bench.put_service(&named("late"));
    let (id, content) = (bench.id(), bench.content());
    assert!(matches!(bench.restart(), Loaded::Full(_)));
    assert_eq!((bench.id(), bench.content(), bench.stale()), (id, content, NO_ANSWER.into()));
    assert_eq!(bench.view, Some(EndpointsView::Synced), "a restart does not change the node's condition");
    assert_eq!(bench.core.state("", 0).endpoints, 2);
    let why = bench.core.explain(&crate::ServiceName::new("ns", "late")).expect("it is served");
    assert!(why.served && why.reason.contains("as before the agent started"), "{why:?}");
    let writes = bench.core.writes;
    let services: Vec<Service> = services.into_iter().chain([named("late")]).collect();
    bench.tell_all(&services, &slices);
    assert_eq!((bench.id(), bench.stale()), (id, String::new()));
    assert_eq!((bench.core.writes, bench.delays.len()), (writes, 2), "nothing is written");
    bench.pass(100);
    bench.put_service(&named("new"));
    assert_eq!(bench.id(), id.map(|(instance, rev)| (instance, rev + 1)));
    assert_eq!(bench.resumable(), (3, 3), "also from before the restart");
}

#[test]
fn changes_during_a_restart_make_the_next_revision() {
    let mut bench = Bench::idle(&[named("a"), named("b"), named("c")], &[slice_of("a-1", "a", "L1")]);
    bench.services(vec![gone("ns/c")]);
    let id = bench.id().unwrap();
    bench.restart();
    bench.tell_all(&[named("a"), named("d")], &[]);
    assert_eq!(bench.id(), Some((id.0, id.1 + 1)));
    assert_eq!(bench.names(), ["ns/a", "ns/d"]);
    assert_eq!(bench.changed_since(id.1), Some((vec!["ns/a".into(), "ns/b".into(), "ns/d".into()], false)));
    let since_first = vec!["ns/a".into(), "ns/b".into(), "ns/c".into(), "ns/d".into()];
    assert_eq!(bench.changed_since(1), Some((since_first, false)), "deletions are remembered");
    bench.restart();
    assert_eq!(bench.resumable(), (3, 3));
}

#[test]
fn readers_older_than_the_deletion_history_cannot_resume() {
    let mut bench = Bench::with(EndpointsPolicy { history: 5, ..policy() }, FailingStore::new());
    bench.tell_all(&[named("a"), named("b")], &[]);
    bench.pass(100);
    bench.services(vec![gone("ns/a")]);
    assert_eq!(bench.store.keys(), ["meta", "s/ns/a", "s/ns/b"]);
    for number in 0..6 {
        bench.pass(100);
        bench.put_service(&svc().named("ns", "b").node_port(number + 1).build());
    }
    assert_eq!((bench.rev(), bench.store.keys()), (8, vec!["meta".to_owned(), "s/ns/b".to_owned()]));
    bench.restart();
    assert_eq!(bench.changed_since(1), None, "the deletion at 2 would be missed");
    assert_eq!(bench.changed_since(2), Some((vec!["ns/b".into()], false)));
}

#[test]
fn a_lost_store_means_a_new_instance_id() {
    let mut bench = Bench::synced(&[named("a")], &[]);
    let before = bench.id().unwrap();
    bench.store = FailingStore::new();
    assert!(matches!(bench.restart(), Loaded::Nothing));
    assert_eq!(bench.id(), None, "no state is served");
    bench.tell_all(&[named("a")], &[]);
    let after = bench.id().unwrap();
    assert!(after.0 != before.0 && after.1 == 1, "{before:?} {after:?}");
    assert_eq!(bench.changed_since(0), Some((vec!["ns/a".into()], true)));
}

#[test]
fn the_state_of_another_node_is_ignored_and_overwritten() {
    let mut bench = Bench::synced(&many(3), &[]);
    let before = bench.id().unwrap();
    bench.policy.node_name = "n2".into();
    assert!(lost(&bench.restart()).contains("for node \"n1\", but this node is \"n2\""));
    bench.node(NodeView { name: "n2".into(), ..n1() });
    bench.list_all(&[named("s0001")], &[]);
    assert!(bench.id().unwrap().0 != before.0);
    assert_eq!(bench.store.keys(), ["meta", "s/ns/s0001"], "nothing is left of the former");
    let id = bench.id();
    bench.restart();
    assert_eq!(bench.id(), id);
}

#[test]
fn a_damaged_state_counts_as_lost() {
    let sound = Bench::synced(&[named("a"), named("b")], &[]);
    let of_a = sound.store.get(Table::Endpoints, b"s/ns/a").unwrap().expect("a record");
    for (reason, key, value) in [
        ("missing", "meta", None),
        ("cannot decode", "meta", Some(vec![0xff; 9])),
        ("version is 0", "meta", Some(vec![])),
        ("version is 9", "meta", Some(vec![8, 9])),
        ("present and deleted", "s/ns/a", None),
        ("cannot decode", "s/ns/a", Some(vec![0xff; 9])),
        ("another type", "s/ns/a", Some(vec![8, 1])),
        ("has the key", "x/ns/a", Some(of_a)),
        ("present and deleted", "s/ns/z", Some(vec![32, 1])),
    ] {
        let mut bench = Bench::synced(&[named("a"), named("b")], &[]);
        let (before, content) = (bench.id().unwrap(), bench.content());
        match value {
            Some(value) => put_record(&bench, key, value),
            None => {
                let mut batch = Batch::new();
                batch.delete(Table::Endpoints, key);
                bench.store.apply(&batch).unwrap();
            }
        }
        let found = lost(&bench.restart());
        assert!(found.contains(reason), "{found:?} is not {reason:?}");
        assert_eq!(bench.id(), None);
        bench.tell_all(&[named("a"), named("b")], &[]);
        assert!(bench.id().unwrap().0 != before.0, "{reason}");
        assert_eq!(bench.content(), content);
        assert_eq!(bench.store.keys(), ["meta", "s/ns/a", "s/ns/b"], "{reason}");
    }
}

#[test]
fn records_of_a_revision_later_than_the_metadata_count_as_lost() {
    let mut bench = Bench::synced(&[named("a")], &[]);
    let meta = bench.store.get(Table::Endpoints, b"meta").unwrap().expect("a record");
    bench.pass(100);
    bench.put_service(&svc().named("ns", "a").node_port(7).build());
    put_record(&bench, "meta", meta);
    assert!(lost(&bench.restart()).contains("different revisions"));
}

#[test]
fn unwritten_states_are_published_with_a_new_instance_id() {
    let mut bench = Bench::idle(&many(3), &[]);
    let before = bench.id().unwrap();
    bench.store.fail_after(0);
    bench.put_service(&named("new"));
    let memory = bench.id().unwrap();
    assert!(memory.0 != before.0 && memory.1 == 2, "{memory:?}");
    assert_eq!((bench.names().len(), bench.core.durable()), (4, false));
    assert!(bench.notes.last().unwrap().contains("in 5s"), "{:?}", bench.notes);
    assert!(bench.core.summary().ends_with("not on disk"));
    bench.pass(100);
    bench.put_service(&named("more"));
    assert_eq!(
        (bench.id(), bench.core.writes),
        (Some((memory.0, 3)), 2),
        "later revisions are published from memory at once"
    );
    bench.pass(4_000);
    assert_eq!(bench.core.writes, 2);
    bench.pass(30_800);
    assert_eq!((bench.core.writes, bench.notes.len()), (4, 3), "after 5 s, then 10, then 20");
    bench.store.repair();
    bench.pass(60_000);
    assert_eq!((bench.id(), bench.core.durable()), (Some((memory.0, 3)), true));
    assert_eq!(bench.notes.last().map(String::as_str), Some("the endpoints are on disk again"));
    let writes = bench.core.writes;
    bench.pass(200_000);
    assert_eq!(bench.core.writes, writes);
    bench.put_service(&named("last"));
    let id = bench.id();
    bench.restart();
    assert_eq!((bench.id(), bench.identities()), (id, 2));
}

#[test]
fn a_restart_with_a_full_disk_restores_the_last_written_state() {
    let mut bench = Bench::synced(&many(3), &[]);
    let before = bench.id().unwrap();
    bench.pass(100);
    bench.store.fail_after(0);
    bench.put_service(&named("new"));
    bench.restart();
    assert_eq!(bench.id(), Some(before));
    bench.tell_all(&[named("other")], &[]);
    let id = bench.id().unwrap();
    assert!(id.0 != before.0, "the second revision of the previous instance is not defined");
    assert_eq!(bench.names(), ["ns/other"]);
}

#[test]
fn changes_during_a_retried_write_are_not_lost() {
    let mut bench = Bench::idle(&many(3), &[]);
    bench.store.fail_after(0);
    bench.put_service(&named("new"));
    bench.store.repair();
    bench.slow = true;
    bench.pass(6_000);
    assert_eq!(bench.writes.len(), 1);
    bench.services(vec![gone("ns/s0001")]);
    let id = bench.id().unwrap();
    bench.pass(1_000);
    assert_eq!(bench.id(), Some(id), "what is being written is what readers see");
    bench.write();
    bench.write();
    assert_eq!((bench.id(), bench.core.durable()), (Some((id.0, id.1 + 1)), true));
    let content = bench.content();
    bench.restart();
    assert_eq!(bench.content(), content);
}

#[test]
fn a_process_killed_during_a_write_restores_the_last_or_the_next_state_or_none() {
    let (few, all) = (many(3), many(3 * CHUNK_RECORDS + 7));
    let mut outcomes = Vec::new();
    for batches in 0..6 {
        let mut bench = Bench::synced(&few, &[]);
        let (id, content) = (bench.id().unwrap(), bench.content());
        bench.pass(100);
        bench.slow = true;
        bench.list_services(&all);
        assert_eq!(bench.rev(), 1);
        let loaded = bench.kill_in_write(batches);
        outcomes.push(match &loaded {
            Loaded::Full(restored) => restored.meta.rev.to_string(),
            Loaded::Lost(reason) => reason.clone(),
            Loaded::Nothing => "nothing".into(),
        });
        if matches!(loaded, Loaded::Full(_)) {
            assert_eq!(bench.id().unwrap().0, id.0);
            assert!(batches != 0 || bench.content() == content);
        }
        bench.slow = false;
        bench.tell_all(&all, &[]);
        assert_eq!(bench.names().len(), all.len(), "after {batches}");
        let id = bench.id();
        bench.restart();
        assert_eq!(bench.id(), id, "and it is on disk");
    }
    let torn = "the agent exited during a write";
    assert_eq!(outcomes, ["1", torn, torn, torn, torn, "2"]);
}

#[test]
fn a_process_killed_during_its_first_write_restores_no_state() {
    for batches in 1..4 {
        let mut bench = Bench::new();
        bench.slow = true;
        bench.tell_all(&many(2 * CHUNK_RECORDS + 1), &[]);
        assert!(lost(&bench.kill_in_write(batches)).contains("exited during a write"));
        assert_eq!(bench.id(), None);
    }
}

#[test]
fn a_small_revision_is_written_in_one_batch() {
    let mut bench = Bench::idle(&many(3), &[]);
    let writes = i64::MAX - 100;
    bench.store.fail_after(writes);
    bench.services(many(CHUNK_RECORDS - 1).iter().map(put).collect());
    assert_eq!(bench.rev(), 2);
    assert_eq!(bench.store.batches.load(std::sync::atomic::Ordering::SeqCst), writes - 1);
}

#[test]
fn a_service_larger_than_a_record_is_kept_in_parts() {
    let large = |endpoints: usize| {
        let all =
            (0..endpoints).fold(slice("big").of("ns", "big").port("http", "TCP", 8080), |slice, number| {
                let pad = "x".repeat(200);
                let address = format!("10.{}.{}.{}", number / 65536, number / 256 % 256, number % 256);
                slice.endpoint(&address, None).edit(|slice| {
                    slice.endpoints.last_mut().unwrap().hostname = Some(pad);
                })
            });
        all.build()
    };
    let mut bench = Bench::synced(&[named("big")], &[large(6000)]);
    let content = bench.content();
    assert!(content.services.values().all(|message| message.len() > 1024 * 1024));
    assert_eq!(bench.store.keys().len(), 4, "{:?}", bench.store.keys());
    bench.restart();
    assert_eq!(bench.content(), content);
    bench.tell_all(&[named("big")], &[large(10)]);
    assert_eq!((bench.rev(), bench.store.keys().len()), (2, 2));
    let content = bench.content();
    bench.restart();
    assert_eq!(bench.content(), content);
    put_record(&bench, "p/ns/big/0001", vec![1]);
    assert!(lost(&bench.restart()).contains("different revisions"));
}

#[test]
fn a_restarted_actor_publishes_the_same_and_relists() {
    let (services, slices) = (many(3), [slice_of("a", "s0001", "L1")]);
    let mut bench = Bench::synced(&services, &slices);
    bench.health(SourceKind::Services, None);
    let (id, content) = (bench.id(), bench.content());
    bench.restart_actor();
    assert_eq!((bench.id(), bench.content(), bench.stale()), (id, content, NO_ANSWER.into()));
    assert_eq!(bench.services(vec![]), crate::Ack::Relist);
    bench.list_services(&services);
    bench.list_slices(&slices);
    bench.list_cidrs(&[]);
    assert_eq!((bench.id(), bench.stale()), (id, String::new()), "the node is not sent again");
    bench.pass(100);
    bench.put_service(&named("new"));
    assert_eq!(bench.resumable(), (2, 2));
}

#[test]
fn a_restarted_actor_without_a_disk_continues_from_memory() {
    let mut bench = Bench::idle(&many(3), &[]);
    bench.store.fail_after(0);
    bench.put_service(&named("new"));
    let id = bench.id();
    bench.restart_actor();
    assert_eq!((bench.id(), bench.core.durable()), (id, false));
    bench.store.repair();
    bench.pass(60_000);
    assert!(bench.core.durable());
    bench.restart();
    assert_eq!(bench.id(), id);
}

#[test]
fn an_actor_restarted_during_a_write_publishes_the_written_state() {
    let mut bench = Bench::idle(&many(3), &[]);
    bench.slow = true;
    bench.services(vec![put(&named("new")), gone("ns/s0001")]);
    let (_, write) = bench.writes.pop().expect("a write");
    crate::record::write(&*bench.store, &write).unwrap();
    bench.restart_actor();
    assert_eq!(bench.rev(), 2, "the result of the write was lost");
    assert_eq!(bench.changed_since(1), Some((vec!["ns/new".into(), "ns/s0001".into()], false)));
}

#[test]
fn a_source_without_answer_after_a_start_is_reported_after_a_while() {
    let mut bench = Bench::synced(&many(3), &[]);
    bench.restart();
    bench.pass(9_999);
    assert_eq!(bench.view, Some(EndpointsView::Synced));
    bench.pass(1);
    assert_eq!(bench.view, stale_view(StaleCause::NotSynced, NO_ANSWER));
    bench.tell_all(&many(3), &[]);
    assert_eq!((bench.view.clone(), bench.rev()), (Some(EndpointsView::Synced), 1));
}

#[test]
fn a_source_that_fails_after_a_start_is_reported_at_once() {
    let mut bench = Bench::synced(&many(3), &[]);
    bench.restart();
    bench.health(SourceKind::Node, Some("no route to host"));
    assert_eq!(bench.stale(), "nodes: no route to host");
    assert_eq!(bench.view, stale_view(StaleCause::SourceUnavailable, "nodes: no route to host"));
    bench.health(SourceKind::Node, None);
    assert_eq!(bench.stale(), NO_ANSWER);
}
