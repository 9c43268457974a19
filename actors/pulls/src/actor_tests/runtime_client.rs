//! The RuntimeClient: health, progress, losses, leases, restarts.

use super::*;
use crate::{
    coordinator::PullEvent,
    runtime::{Capabilities, Phase, Progress, RuntimeCommand, RuntimeState},
};
use fakes::{SOCKET, ScriptedPull};
use keelson_proto::Code;

#[test]
fn probes_back_off_to_three_seconds_and_find_the_runtime_in_time() {
    run(async {
        let world = World::start(limit(1));
        let runtime = &world.runtime;
        runtime.script().down = Some("connection refused".into());
        let answered = world.ask("r/a");
        pass(20_000).await;
        let probes = runtime.script().probes.clone();
        let pauses: Vec<u128> = probes.windows(2).map(|two| (two[1] - two[0]).as_millis()).take(8).collect();
        // Timers have a granularity of a millisecond.
        for (pause, expect) in pauses.iter().zip([100, 200, 400, 800, 1600, 3000, 3000, 3000]) {
            assert!((expect..=expect + 2).contains(pause), "{pauses:?}");
        }
        assert!(matches!(&*world.health.borrow(), Health::Down { reason, .. } if reason.contains(SOCKET)));
        assert_eq!(world.metrics.runtime_up.get(), 0);
        runtime.script().down = None;
        pass(3_100).await;
        assert_eq!((world.metrics.runtime_up.get(), runtime.logged("pull r/a")), (1, 1));
        assert!(succeeded(answered).await);
        let before = runtime.script().probes.len();
        pass(30_000).await;
        assert_eq!(runtime.script().probes.len() - before, 6, "every five seconds while it answers");
    });
}

#[test]
fn a_manual_probe_does_not_wait() {
    run(async {
        let world = World::start(limit(1));
        let runtime = &world.runtime;
        runtime.script().down = Some("connection refused".into());
        pass(20_000).await;
        runtime.script().down = None;
        world.client.offer(RuntimeCommand::Probe).expect("room");
        pass(1).await;
        assert!(matches!(&*world.health.borrow(), Health::Up { .. }));
    });
}

#[test]
fn callers_get_the_error_of_an_absent_runtime() {
    run(async {
        let world = World::start(limit(1));
        let runtime = &world.runtime;
        runtime.script().down = Some("connection refused".into());
        let refusal = refused(world.ask("r/a")).await;
        assert_eq!(refusal.code(), Code::Unavailable);
        assert!(refusal.to_string().contains(SOCKET), "{refusal}");
        let list = world.list().await;
        assert_eq!(list.runtime_health, "down");
        assert!(list.runtime_error.contains("connection refused"));
    });
}

#[test]
fn a_lost_pull_is_retried_when_the_runtime_is_back() {
    run(async {
        let world = World::start(limit(1));
        let runtime = &world.runtime;
        runtime.set_pulls("r/a", [ScriptedPull::Lose(Duration::from_millis(500), "EOF")]);
        let answered = world.ask("r/a");
        pass(400).await;
        runtime.script().down = Some("connection refused".into());
        pass(5_000).await;
        assert_eq!((runtime.logged("pull r/a"), world.list().await.running), (1, 1), "it keeps its slot");
        runtime.script().down = None;
        assert!(succeeded(answered).await);
        assert_eq!((runtime.logged("pull r/a"), world.metrics.lost.get()), (2, 1));
    });
}

#[test]
fn a_lost_call_is_repeated_at_once_if_the_runtime_is_up() {
    run(async {
        let world = World::start(limit(1));
        world.runtime.set_pulls("r/a", [ScriptedPull::Lose(Duration::from_millis(500), "not ready"); 2]);
        let begin = tokio::time::Instant::now();
        assert!(succeeded(world.ask("r/a")).await);
        assert_eq!(world.runtime.logged("pull r/a"), 3);
        assert!(begin.elapsed() < Duration::from_secs(3), "no probe interval was waited for");
        world.runtime.set_pulls("r/b", [ScriptedPull::Lose(Duration::from_millis(500), "not ready"); 3]);
        let Ok(Answer::Runtime(reply)) = world.ask("r/b").await else { panic!("answered") };
        assert_eq!(reply.result.clone().expect_err("lost").message, "not ready", "unchanged");
    });
}

#[test]
fn all_of_many_lost_calls_are_repeated() {
    run(async {
        let world = World::start(limit(0));
        let answers: Vec<Answered> = (0..50)
            .map(|n| {
                let image = format!("r/{n}");
                world
                    .runtime
                    .set_pulls(&image, [ScriptedPull::Lose(Duration::from_millis(500 + n % 7), "EOF")]);
                world.ask(&image)
            })
            .collect();
        all_succeed(answers).await;
        assert_eq!(world.metrics.lost.get(), 50);
    });
}

#[test]
fn calls_lost_in_a_restart_are_repeated() {
    run(async {
        let world = World::start(limit(1));
        world.runtime.set_pulls("r/a", [ScriptedPull::Hang]);
        let answered = world.ask("r/a");
        pass(100).await;
        world.client.deliver(Restart { reason: "a test wants it".into() });
        assert!(succeeded(answered).await);
        assert_eq!((world.runtime.logged("cancelled r/a"), world.runtime.logged("pull r/a")), (1, 2));
        let detail = world.client.recorder().detail();
        assert_eq!((detail.restarts, &*detail.status), (1, "running"));
        assert!(detail.last_error.contains("a test wants it"));
        assert_eq!(world.pulls.recorder().restarts(), 0, "the coordinator does not notice");
        assert!(succeeded(world.ask("r/b")).await, "progress and probes run again");
    });
}

#[test]
fn calls_lost_in_a_panic_are_repeated() {
    run(async {
        // I9: neither the coordinator nor a caller notices.
        let world = World::start(limit(1));
        world.runtime.set_pulls("r/a", [ScriptedPull::Hang]);
        let answered = world.ask("r/a");
        pass(100).await;
        world.client.deliver(Restart { reason: PANIC.into() });
        assert!(succeeded(answered).await);
        assert_eq!((world.runtime.logged("cancelled r/a"), world.runtime.logged("pull r/a")), (1, 2));
        assert_eq!((world.client.recorder().restarts(), world.pulls.recorder().restarts()), (1, 0));
        for _ in 0..12 {
            world.client.deliver(Restart { reason: PANIC.into() });
            pass(29_000).await;
        }
        assert!(succeeded(world.ask("r/b")).await, "however often it panics");
    });
}

#[test]
fn progress_is_read_from_pulls_that_take_a_while() {
    run(async {
        let world = World::start(limit(2));
        let reading = Progress {
            phase: Phase::Downloading,
            bytes_done: 10,
            bytes_total: 100,
            layers_done: 1,
            layers_total: 3,
            ..Progress::default()
        };
        world.runtime.script().progress.insert("*".into(), reading);
        world.runtime.set_pulls("r/a", [ScriptedPull::Succeed(Duration::from_secs(10))]);
        let answered = world.ask("r/a");
        let begin = tokio::time::Instant::now();
        pass(700).await;
        assert!(world.runtime.script().readings.is_empty(), "most pulls are over by then");
        pass(2_000).await;
        let first = world.runtime.script().readings[0];
        assert!(first - begin >= Duration::from_millis(790), "{:?}", first - begin);
        assert!(world.runtime.script().readings.len() >= 3, "every half second");
        let shown = world.list().await.pulls[0].progress.clone().expect("a reading");
        assert_eq!((shown.bytes_done, shown.bytes_total, &*shown.phase), (10, 100, "downloading"));
        assert!(succeeded(answered).await);
        let readings = world.runtime.script().readings.len();
        pass(10_000).await;
        assert_eq!(world.runtime.script().readings.len(), readings, "nothing runs, nothing is read");
    });
}

#[test]
fn a_runtime_without_the_content_api_is_not_asked_for_progress() {
    run(async {
        let world = World::start(limit(1));
        let runtime = &world.runtime;
        runtime.script().capabilities = Capabilities { leases: true, ..Capabilities::default() };
        runtime.set_pulls("r/a", [ScriptedPull::Succeed(Duration::from_secs(10))]);
        assert!(succeeded(world.ask("r/a")).await);
        assert!(runtime.script().readings.is_empty());
    });
}

#[test]
fn a_stalled_download_is_cancelled() {
    run(async {
        let world = World::start(Policy { stall_timeout: Some(Duration::from_secs(60)), ..limit(1) });
        let stuck = Progress { phase: Phase::Downloading, ..Progress::default() };
        world.runtime.script().progress.insert("*".into(), stuck);
        world.runtime.set_pulls("r/a", [ScriptedPull::Hang]);
        let refusal = refused(world.ask("r/a")).await;
        assert!(matches!(refusal, Refusal::Stalled { .. }), "{refusal}");
        settle().await;
        assert_eq!(world.runtime.logged("cancelled r/a"), 1);
    });
}

#[test]
fn a_present_image_passes_a_full_queue() {
    run(async {
        let world = World::start(limit(1));
        world.runtime.script().present.insert("r/present".into());
        world.runtime.set_pulls("r/slow", [ScriptedPull::Hang]);
        let _slow = world.ask("r/slow");
        let _queued = world.ask("r/queued");
        assert!(succeeded(world.ask("r/present")).await);
        assert_eq!(world.runtime.logged("pull r/queued"), 0);
    });
}

#[test]
fn a_lease_is_deleted_before_it_is_recreated() {
    run(async {
        let world = World::start(limit(1));
        world.runtime.script().drop_takes = Duration::from_secs(3);
        assert!(succeeded(world.ask("r/a")).await);
        pass(1).await;
        assert!(succeeded(world.ask("r/a")).await);
        pass(5_000).await;
        let log: Vec<String> =
            world.runtime.log().into_iter().filter(|line| !line.starts_with("reap")).collect();
        assert_eq!(log, ["pull r/a", "dropped a lease of ours", "pull r/a", "dropped a lease of ours"]);
    });
}

#[test]
fn a_lease_that_was_not_deleted_is_reaped() {
    run(async {
        let world = World::start(limit(1));
        // What comes after the start.
        pass(40_000).await;
        let reaped = || world.runtime.log().iter().filter(|line| line.starts_with("reap")).count();
        let before = reaped();
        world.runtime.script().broken.insert("drop_lease");
        assert!(succeeded(world.ask("r/a")).await);
        pass(29_000).await;
        assert_eq!(reaped(), before);
        pass(2_000).await;
        assert_eq!(reaped(), before + 1);
    });
}

#[test]
fn orphan_leases_are_reaped_once_the_runtime_serves() {
    run(async {
        let world = World::start(limit(1));
        pass(100).await;
        assert_eq!(world.runtime.logged("reap all but 0"), 1);
        let events = world.client.recorder().detail().events;
        assert!(events.iter().any(|event| event.text.contains("orphan")), "{events:?}");
    });
}

#[test]
fn inspection_shows_the_runtime() {
    run(async {
        let world = World::start(limit(1));
        world.runtime.set_pulls("r/a", [ScriptedPull::Hang]);
        let (caller, _answered) = world.ask_as_caller("r/a");
        pass(100).await;
        let state = async || {
            let text = world.client.ask(RuntimeState {}).await.expect("alive");
            serde_json::from_str::<serde_json::Value>(&text).expect("JSON")
        };
        let before = state().await;
        assert_eq!((&before["endpoint"], &before["health"]), (&SOCKET.into(), &"up".into()));
        assert_eq!((&before["runtime_name"], &before["calls_in_flight"]), (&"fake".into(), &1.into()));
        world.pulls.deliver(PullEvent::CallerLeft(caller));
        pass(11_000).await;
        assert_eq!(state().await["calls_in_flight"], 0);
        assert_eq!(handled(world.client.recorder(), "Pull"), 1);
    });
}

/// I1: a file system that hangs costs one call, and blocks nothing else.
#[test]
fn a_hanging_image_file_system_is_read_once_and_stops_no_pull() {
    run(async {
        let world = World::start(limit(1));
        let runtime = &world.runtime;
        let reset = "failed to copy: connection reset by peer";
        runtime.set_pulls("r/a", [ScriptedPull::Fail(Duration::ZERO, Code::Unknown, reset)]);
        assert!(!succeeded(world.ask("r/a")).await);
        pass(60_000).await;
        assert_eq!(runtime.logged("read /var/lib/fake"), 1, "it has not answered yet");
        assert_eq!((world.metrics.retained.get(), world.metrics.retained_bytes.get()), (1, 1000));
        assert!(succeeded(world.ask("r/b")).await);
    });
}

#[test]
fn a_low_image_file_system_releases_what_is_retained() {
    run(async {
        let world = World::start(limit(1));
        let runtime = &world.runtime;
        let reset = "failed to copy: connection reset by peer";
        runtime.set_pulls("r/a", [ScriptedPull::Fail(Duration::ZERO, Code::Unknown, reset)]);
        let fs = |available_bytes| {
            let (capacity_bytes, inodes, inodes_free) = (100, 0, 0);
            Some(keelson_actor_system::file_system::FileSystem {
                capacity_bytes,
                available_bytes,
                inodes,
                inodes_free,
            })
        };
        runtime.script().image_fs = fs(20);
        assert!(!succeeded(world.ask("r/a")).await);
        pass(30_000).await;
        assert_eq!((world.metrics.retained.get(), runtime.logged("dropped a lease of ours")), (1, 0));
        runtime.script().image_fs = fs(19);
        pass(10_100).await;
        assert_eq!((world.metrics.retained.get(), runtime.logged("dropped a lease of ours")), (0, 1));
        let label = crate::metrics::ReasonLabel { reason: "low_space" };
        assert_eq!(world.metrics.released.get_or_create(&label).get(), 1);
    });
}
