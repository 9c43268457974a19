//! The PullCoordinator: callers, restarts, full mailboxes, the end, inspection.

use super::*;
use crate::{
    coordinator::{LimitView, PullEvent, SetLimit},
    metrics::{PullResult, ReasonLabel},
};
use fakes::ScriptedPull;
use keelson_actor_system::inspect::{MailboxError, Status};
use keelson_proto::Code;
use keelson_storage::{StateStore as _, Table};
use prometheus_client::metrics::{counter::Counter, family::Family};

#[test]
fn a_dropped_caller_does_not_affect_others() {
    run(async {
        let world = World::start(limit(1));
        let (a, b) = (world.ask("r/a"), world.ask("r/a"));
        drop(a);
        assert!(succeeded(b).await);
        let (caller, answered) = world.ask_as_caller("r/b");
        pass(100).await;
        drop(answered);
        world.pulls.deliver(PullEvent::CallerLeft(caller));
        world.pulls.deliver(PullEvent::CallerLeft(caller));
        pass(60_000).await;
        assert_eq!(world.runtime.logged("cancelled r/b"), 0, "it ended within its grace period");
        assert_eq!(world.inspected().await["callers"], 0);
    });
}

#[test]
fn the_last_caller_to_leave_cancels_the_call_to_the_runtime() {
    run(async {
        let world = World::start(limit(1));
        world.runtime.set_pulls("r/a", [ScriptedPull::Hang]);
        let (caller, _answered) = world.ask_as_caller("r/a");
        pass(100).await;
        world.pulls.deliver(PullEvent::CallerLeft(caller));
        pass(9_000).await;
        assert_eq!(world.runtime.logged("cancelled r/a"), 0);
        pass(2_000).await;
        assert_eq!((world.runtime.logged("cancelled r/a"), world.list().await.running), (1, 0));
        assert_eq!(
            handled(world.pulls.recorder(), "PullFinished"),
            0,
            "nothing comes back of a cancelled attempt"
        );
    });
}

#[test]
fn a_restart_reloads_the_queue_and_fails_its_callers() {
    run(async {
        let world = World::start(limit(1));
        world.runtime.set_pulls("r/a", [ScriptedPull::Hang]);
        let callers = [world.ask("r/a"), world.ask("r/b"), world.ask("r/c")];
        pass(100).await;
        world.restart_pulls();
        for answered in callers {
            let refusal = refused(answered).await;
            assert_eq!((refusal.clone(), refusal.code()), (Refusal::Restarting, Code::Unavailable));
        }
        let waiting = world.ask("r/c");
        assert_eq!(world.pulls.recorder().overview().status, "restarting");
        pass(200).await;
        assert_eq!(world.runtime.logged("cancelled r/a"), 1, "attempts of the former self end");
        let list = world.list().await;
        let images: Vec<(&str, bool)> = list.pulls.iter().map(|pull| (&*pull.image, pull.resumed)).collect();
        assert_eq!(
            images,
            [("r/c", true), ("r/a", true), ("r/b", true)],
            "the queue survives; I7: what a caller waits for comes first"
        );
        assert!(succeeded(waiting).await, "a repeated request joins");
        pass(10_000).await;
        assert_eq!(world.runtime.log().iter().filter(|line| line.starts_with("pull ")).count(), 4);
        let list = world.list().await;
        assert_eq!((list.running, list.queued, list.callers), (0, 0, 0), "no slot leaks");
        pass(1_010).await;
        assert!(records(&world.store).is_empty());
        assert_eq!((world.runtime.script().most_running, world.pulls.recorder().restarts()), (1, 1));
        assert_eq!(world.metrics.resumed.get(), 3);
    });
}

/// I9: repeated failure does not end the process.
#[test]
fn too_many_restarts_are_failing_and_retried() {
    run(async {
        let world = World::start(limit(1));
        let status = || world.pulls.recorder().current_status();
        pass(1_000).await;
        for restart in 1..=9 {
            world.restart_pulls();
            settle().await;
            let expected = if restart <= 8 { Status::Restarting } else { Status::Failing };
            assert_eq!(status(), expected, "restart {restart}");
            if restart <= 8 {
                pass(29_000).await;
            }
        }
        let failure = world.pulls.recorder().failure().expect("it fails");
        assert!(failure.reason.contains("a test wants it"), "{failure:?}");
        assert!(failure.next_try_unix_ms > failure.since_unix_ms, "{failure:?}");
        assert!(succeeded(world.ask("r/a")).await, "retried, and the request has waited");
        assert_eq!((status(), world.pulls.recorder().failure()), (Status::Running, None));
    });
}

/// I9: a panic in a handler only costs its callers a refusal, which their front retries.
#[test]
fn a_panic_restarts_the_coordinator_from_the_journal() {
    run(async {
        let world = World::start(limit(1));
        world.runtime.set_pulls("r/a", [ScriptedPull::Hang]);
        let callers = [world.ask("r/a"), world.ask("r/b")];
        pass(100).await;
        world.pulls.deliver(Restart { reason: PANIC.into() });
        let behind = world.ask("r/c");
        for answered in callers {
            assert_eq!(refused(answered).await, Refusal::Restarting);
        }
        let again = [world.ask("r/a"), world.ask("r/b")];
        assert!(succeeded(behind).await, "a message behind the panic is handled after it");
        all_succeed(again).await;
        let overview = world.pulls.recorder().overview();
        assert_eq!((overview.restarts, world.metrics.resumed.get()), (1, 2));
        assert!(overview.last_error.contains("a test wants a panic"), "{}", overview.last_error);
        assert_eq!(world.runtime.script().most_running, 1, "the limit holds across the panic");
        assert_eq!(world.client.recorder().restarts(), 0, "no other actor notices");
    });
}

#[test]
fn restarts_with_quiet_between_them_do_not_add_up() {
    run(async {
        let world = World::start(limit(1));
        for _ in 0..20 {
            world.restart_pulls();
            pass(301_000).await;
        }
        assert_eq!(world.pulls.recorder().restarts(), 20);
        assert!(succeeded(world.ask("r/a")).await);
    });
}

#[test]
fn a_full_mailbox_is_an_error_and_is_counted() {
    run(async {
        let world = World::with(limit(1), FakeStore::new(), 4, None);
        pass(10).await;
        let senders: Vec<_> = (0..8).map(|_| world.pulls.clone()).collect();
        let mut answers = Vec::new();
        // Nothing is handled before the next await. Each sender has its own address.
        for (n, sender) in senders.iter().enumerate() {
            let (_, answered, request) = world.request("r/a");
            let taken = sender.offer(request);
            assert_eq!(taken, if n < 4 { Ok(()) } else { Err(MailboxError::Full("PullCoordinator")) });
            answers.push(answered);
        }
        let asked = world.pulls.ask(LimitView {}).await;
        assert_eq!(asked.expect_err("full"), MailboxError::Full("PullCoordinator"));
        assert!(MailboxError::Full("PullCoordinator").to_string().contains("full"));
        let rejected = |message: &str| {
            let overview = world.pulls.recorder().overview();
            overview.messages.iter().find(|of| of.message == message).map_or(0, |of| of.rejected_busy)
        };
        assert_eq!((rejected("RequestPull"), rejected("LimitView")), (4, 1));
        assert_eq!(world.pulls.recorder().depth(), 4);
        for answered in answers.into_iter().take(4) {
            assert!(succeeded(answered).await);
        }
        assert_eq!(world.pulls.recorder().depth(), 0);
        assert!(world.list().await.limit.is_some(), "room is free again");
    });
}

#[test]
fn ten_thousand_callers_are_answered_in_order() {
    run(async {
        let world = World::start(limit(3));
        world.runtime.script().instant = true;
        let begin = std::time::Instant::now();
        let answers = world.ask_for_each(10_000);
        all_succeed(answers).await;
        println!("10,000 callers through both actors: {:?}", begin.elapsed());
        let pulls: Vec<String> =
            world.runtime.log().into_iter().filter(|line| line.starts_with("pull ")).collect();
        let expect: Vec<String> = (0..10_000).map(|n| format!("pull r/{n}")).collect();
        assert!(pulls == expect, "the order is kept");
        assert!(world.runtime.script().most_running <= 3);
        pass(1_010).await;
        assert!(records(&world.store).is_empty());
        assert_eq!(world.metrics.queue_depth.get(), 0);
    });
}

#[test]
fn a_drain_waits_for_running_pulls_and_keeps_queued_ones() {
    run(async {
        let world = World::start(limit(1));
        let (running, queued) = (world.ask("r/a"), world.ask("r/b"));
        pass(100).await;
        let begin = tokio::time::Instant::now();
        world.drain().await;
        assert!(begin.elapsed() >= Duration::from_millis(800), "it waited for the running pull");
        assert!(succeeded(running).await);
        assert_eq!(refused(queued).await, Refusal::Stopping);
        assert_eq!(refused(world.ask("r/c")).await, Refusal::Stopping);
        assert_eq!(records(&world.store), [("r/b".to_owned(), false)]);
        assert_eq!(world.runtime.logged("pull r/b"), 0);
    });
}

#[test]
fn a_restart_does_not_end_a_drain() {
    run(async {
        let world = World::start(limit(1));
        world.runtime.set_pulls("r/a", [ScriptedPull::Hang]);
        let _running = world.ask("r/a");
        pass(100).await;
        let (done, drained) = oneshot::channel();
        world.pulls.deliver(Drain { done });
        world.restart_pulls();
        drained.await.expect("reported: no pull runs");
        pass(60_000).await;
        assert_eq!(world.runtime.logged("pull r/a"), 1, "nothing new was started");
        assert_eq!(records(&world.store).len(), 1);
    });
}

/// `keelson limit` answers after this: a `kill -9` after the answer must not lose the limit.
#[test]
fn a_limit_is_reported_as_stored_when_it_is_on_disk_or_cannot_be() {
    run(async {
        let world = World::start(limit(1));
        let set = async |limit| {
            let (stored, is_stored) = oneshot::channel();
            world.pulls.ask(SetLimit { limit: Some(limit), stored }).await.expect("alive");
            is_stored.await.expect("reported");
            world.store.contents().scan(Table::Settings).expect("the memory reads")
        };
        let on_disk = set(3).await;
        assert_eq!(on_disk.len(), 1);
        world.store.fail(true);
        assert_eq!(set(4).await, on_disk);
    });
}

#[test]
fn limits_change_live_and_survive_a_restart() {
    run(async {
        let world = World::start(limit(1));
        let answers = world.ask_for_each(6);
        pass(100).await;
        let (stored, _) = oneshot::channel();
        let view = world.pulls.ask(SetLimit { limit: Some(3), stored }).await.expect("alive");
        assert_eq!((view.max_parallel_image_pulls, view.overridden), (3, true));
        pass(10).await;
        assert_eq!(world.runtime.script().running, 3);
        world.restart_pulls();
        pass(200).await;
        let view = world.pulls.ask(LimitView {}).await.expect("alive");
        assert_eq!(view.max_parallel_image_pulls, 3);
        world.pulls.offer(PullEvent::Configure(Box::new(limit(2)))).expect("room");
        let view = world.pulls.ask(LimitView {}).await.expect("alive");
        assert_eq!((view.max_parallel_image_pulls, view.overridden), (2, false));
        drop(answers);
        pass(10_000).await;
        assert_eq!((world.metrics.limit.get(), world.list().await.queued), (2, 0));
    });
}

#[test]
fn metrics_count_pulls_and_results() {
    run(async {
        let world = World::start(Policy { max_queue_time: Some(Duration::from_millis(500)), ..limit(1) });
        world
            .runtime
            .set_pulls("r/bad", [ScriptedPull::Fail(Duration::from_millis(100), Code::NotFound, "no")]);
        let (bad, joined) = (world.ask("r/bad"), world.ask("r/bad"));
        assert!(!succeeded(bad).await && !succeeded(joined).await);
        world.runtime.set_pulls("r/long", [ScriptedPull::Succeed(Duration::from_secs(5))]);
        let long = world.ask("r/long");
        let late = world.ask_for_each(30);
        assert!(succeeded(long).await);
        for answered in late {
            assert!(matches!(refused(answered).await, Refusal::QueueTime(..)));
        }
        let metrics = &world.metrics;
        let count = |result, reason| metrics.pulls.get_or_create(&PullResult { result, reason }).get();
        let counts = [
            count("succeeded", "Pulled"),
            count("failed", "NotFound"),
            count("refused", "QueueTimeExceeded"),
            count("cancelled", "CallerLeft"),
        ];
        assert_eq!(counts, [1, 1, 30, 0], "I18");
        let of = |family: &Family<ReasonLabel, Counter>, reason| {
            family.get_or_create(&ReasonLabel { reason }).get()
        };
        assert_eq!(of(&metrics.deduplicated, "Queued"), 1, "its presence was still being read");
        assert_eq!(of(&metrics.refused, "QueueTimeExceeded"), 30);
    });
}

#[test]
fn inspection_shows_the_state() {
    run(async {
        let mut world = World::start(limit(1));
        pass(10).await;
        world.changes.mark_unchanged();
        let (a, b) = (world.ask("r/a"), world.ask("r/b"));
        pass(100).await;
        assert!(world.changes.has_changed().expect("alive"), "watchers receive it");
        let state = world.inspected().await;
        assert_eq!(
            (&state["running"], &state["queued"], &state["callers"]),
            (&1.into(), &1.into(), &2.into())
        );
        assert_eq!((&state["limit"], &state["draining"]), (&1.into(), &false.into()));
        assert!(succeeded(a).await && succeeded(b).await);
        let detail = world.pulls.recorder().detail();
        assert_eq!(
            (&*detail.name, &*detail.status, detail.mailbox_capacity),
            ("PullCoordinator", "running", 20_000)
        );
        let requests = detail.messages.iter().find(|of| of.message == "RequestPull").expect("counted");
        assert_eq!(requests.handled, 2);
        assert!(
            requests.p50_us > 0 && requests.p50_us <= requests.p99_us && requests.p99_us <= requests.max_us
        );
        assert_eq!(handled(world.pulls.recorder(), "PullFinished"), 2);
        for n in 0..60 {
            world.pulls.offer(SetLimit { limit: Some(n), stored: oneshot::channel().0 }).expect("room");
        }
        settle().await;
        let events = world.pulls.recorder().detail().events;
        assert_eq!(events.len(), 50, "the last fifty");
        assert_eq!(events[49].text, "limit set to 59 at runtime");
    });
}
