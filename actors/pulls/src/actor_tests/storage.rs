//! Writes before actions, and failing writes.

use std::sync::atomic::Ordering;

use keelson_storage::StoreState;

use super::*;
use fakes::ScriptedPull;

fn failing_store() -> Arc<FakeStore> {
    let store = FakeStore::new();
    store.fail(true);
    store
}

fn store_being_opened() -> Arc<FakeStore> {
    let store = failing_store();
    store.state.send_replace(StoreState::Opening { since: std::time::SystemTime::UNIX_EPOCH });
    store
}

#[test]
fn the_record_is_on_disk_before_the_runtime_is_asked() {
    run(async {
        let world = World::start(limit(2));
        let (store, missing) = (world.store.clone(), Arc::new(Mutex::new(Vec::new())));
        let notes = missing.clone();
        *world.runtime.watcher.lock().expect("unharmed") = Some(Box::new(move |pull| {
            let name = pull.call.image.to_string();
            if !records(&store).contains(&(name.clone(), true)) {
                notes.lock().expect("unharmed").push(name);
            }
        }));
        let answers = world.ask_for_each(20);
        all_succeed(answers).await;
        pass(1_010).await;
        assert_eq!((records(&world.store), world.runtime.script().most_running), (vec![], 2));
        assert!(missing.lock().expect("unharmed").is_empty(), "started without a record: {missing:?}");
    });
}

#[test]
fn nothing_starts_while_the_disk_is_slow() {
    run(async {
        let world = World::start(Policy::default());
        pass(10).await;
        world.store.block(true);
        let answered = world.ask("r/a");
        until("the write is under way", || world.store.writes.load(Ordering::SeqCst) > 0).await;
        settle().await;
        assert_eq!((world.runtime.logged("pull r/a"), world.list().await.running), (0, 1));
        world.store.block(false);
        assert!(succeeded(answered).await);
    });
}

#[test]
fn pulls_continue_in_memory_while_the_store_fails_and_are_written_later() {
    run(async {
        let world = World::start(limit(1));
        pass(10).await;
        world.store.fail(true);
        world.runtime.set_pulls("r/long", [ScriptedPull::Succeed(Duration::from_secs(60))]);
        let first = world.ask("r/a");
        let long = world.ask("r/long");
        let queued = world.ask_for_each(50);
        assert!(succeeded(first).await, "pods start even on a full disk");
        pass(3000).await;
        assert_eq!(world.store.writes.load(Ordering::SeqCst), 1, "not tried again with every event");
        assert_eq!((world.metrics.store_durable.get(), world.metrics.store_errors.get()), (0, 1));
        let overview = world.pulls.recorder().overview();
        assert!(overview.last_error.contains("in memory only"), "{}", overview.last_error);
        assert_eq!(world.inspected().await["journal_behind"], true);
        pass(10_000).await;
        let tries = world.store.writes.load(Ordering::SeqCst) + world.metrics.store_errors.get();
        assert!(tries <= 8, "one try every five seconds, not {tries}");
        world.store.fail(false);
        pass(6_000).await;
        assert_eq!((world.metrics.store_durable.get(), records(&world.store).len()), (1, 51));
        assert_eq!(world.inspected().await["journal_behind"], false);
        assert!(succeeded(long).await);
        all_succeed(queued).await;
        pass(1_010).await;
        assert!(records(&world.store).is_empty(), "and deletions are written again");
    });
}

#[test]
fn a_last_write_is_tried_before_the_actor_stops() {
    run(async {
        let world = World::start(limit(1));
        pass(10).await;
        world.store.fail(true);
        let running = world.ask("r/a");
        let queued = world.ask("r/b");
        pass(500).await;
        world.store.fail(false);
        world.drain().await;
        assert!(succeeded(running).await);
        assert_eq!(refused(queued).await, Refusal::Stopping);
        assert_eq!(records(&world.store), [("r/b".to_owned(), false)]);
    });
}

#[test]
fn the_end_does_not_wait_for_a_store_that_keeps_failing() {
    run(async {
        let world = World::start(Policy::default());
        pass(10).await;
        world.store.fail(true);
        assert!(succeeded(world.ask("r/a")).await);
        world.drain().await;
        assert_eq!(world.metrics.store_durable.get(), 0);
    });
}

#[test]
fn i4_pulls_are_decided_from_memory_while_the_journal_cannot_be_read() {
    run(async {
        let world = World::on(failing_store());
        assert!(succeeded(world.ask("r/a")).await);
        assert_eq!(world.inspected().await["journal_unread"], true);
        assert_eq!(world.metrics.store_durable.get(), 0);
        pass(600_000).await;
        assert!(succeeded(world.ask("r/b")).await);
        let errors = world.pulls.recorder().overview().last_error;
        assert!(errors.contains("using memory only"), "{errors}");
        assert_eq!(world.pulls.recorder().overview().restarts, 0);
    });
}

#[test]
fn i4_a_successor_of_an_agent_that_has_not_read_the_journal_loses_none_of_its_records() {
    run(async {
        let store = FakeStore::new();
        let first = World::on(store.clone());
        first.runtime.set_pulls("r/old-running", [ScriptedPull::Hang]);
        let _callers = [first.ask("r/old-running"), first.ask("r/old-queued")];
        pass(100).await;
        store.fail(true);
        let second = World::on(store.clone());
        second.runtime.set_pulls("r/new", [ScriptedPull::Hang]);
        let _new = second.ask("r/new");
        pass(100).await;
        let handed = second.hand_over().await;
        assert_eq!(second.runtime.logged("leases left"), 1);
        let third = World::successor(store.clone(), handed);
        pass(100).await;
        assert_eq!(third.inspected().await["journal_unread"], true);
        store.fail(false);
        pass(6_000).await;
        assert_eq!(third.inspected().await["journal_unread"], false);
        let mut records: Vec<String> = records(&store).into_iter().map(|(image, _)| image).collect();
        records.sort();
        assert_eq!(records, ["r/new", "r/old-queued", "r/old-running"]);
        assert_eq!(third.runtime.logged("pull r/new"), 0, "it continues in the second");
    });
}

/// I8: the store of a successor is still being opened when it starts: no failure, and the journal is written once it is
/// open.
#[test]
fn i8_a_successor_waits_for_its_store_to_open_without_an_error() {
    run(async {
        let first = World::start(limit(1));
        first.runtime.set_pulls("r/running", [ScriptedPull::Hang]);
        let _callers = [first.ask("r/running"), first.ask("r/queued")];
        pass(100).await;
        let handed = first.hand_over().await;
        let store = store_being_opened();
        let second = World::successor(store.clone(), handed);
        pass(1_000).await;
        assert_eq!(second.metrics.store_durable.get(), 0, "it reports that it is not durable");
        let overview = second.pulls.recorder().overview();
        assert_eq!((&*overview.last_error, second.metrics.store_errors.get()), ("", 0));
        store.fail(false);
        store.state.send_replace(StoreState::Open);
        settle().await;
        pass(100).await;
        assert_eq!((second.metrics.store_durable.get(), records(&store).len()), (1, 2));
        // A store that never opens is an error in the end.
        let handed = second.hand_over().await;
        let store = store_being_opened();
        let third = World::successor(store, handed);
        pass(6_000).await;
        let error = third.pulls.recorder().overview().last_error;
        assert!(error.contains("in memory only"), "{error}");
    });
}

#[test]
fn i4_a_journal_read_late_is_merged_with_running_pulls() {
    run(async {
        let store = FakeStore::new();
        let first = World::on(store.clone());
        first.runtime.set_pulls("r/running", [ScriptedPull::Hang]);
        let _callers = [first.ask("r/running"), first.ask("r/queued")];
        pass(100).await;
        assert_eq!(records(&store).len(), 2);

        store.fail(true);
        let world = World::on(store.clone());
        world.runtime.set_pulls("r/new", [ScriptedPull::Hang]);
        let (_new, again) = (world.ask("r/new"), world.ask("r/running"));
        pass(100).await;
        assert_eq!((world.list().await.running, world.list().await.queued), (1, 1));
        store.fail(false);
        pass(6_000).await;
        assert_eq!(world.metrics.store_durable.get(), 1);
        assert_eq!(world.inspected().await["journal_unread"], false);
        let pulls = world.list().await.pulls.into_iter();
        let queued: Vec<String> = pulls.filter(|pull| pull.position > 0).map(|pull| pull.image).collect();
        assert_eq!(queued, ["r/running", "r/queued"], "nothing is lost, nothing is there twice");
        assert_eq!(records(&store).len(), 3);
        drop(again);
    });
}

#[test]
fn i4_the_end_does_not_wait_for_a_journal_that_was_never_read() {
    run(async {
        let world = World::on(failing_store());
        assert!(succeeded(world.ask("r/a")).await);
        world.drain().await;
        assert_eq!(world.inspected().await["journal_unread"], true);
    });
}
