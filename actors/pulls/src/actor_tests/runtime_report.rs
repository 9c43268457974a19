//! The RuntimeClient's report for the node status, and detection of a dead runtime.

use super::*;
use crate::runtime::{ReportRuntime, RuntimeError};
use fakes::SOCKET;
use keelson_actor_system::reports::{RuntimeImage, RuntimeReport};

fn image(name: &str) -> RuntimeImage {
    RuntimeImage { names: vec![name.into()], size_bytes: 7 }
}

async fn report(world: &World) -> Result<RuntimeReport, RuntimeError> {
    world.client.ask(ReportRuntime {}).await.expect("alive")
}

fn counted(world: &World, operation_type: &'static str) -> (u64, u64) {
    let label = crate::metrics::Operation { operation_type };
    let metrics = &world.metrics;
    (metrics.operations.get_or_create(&label).get(), metrics.operation_errors.get_or_create(&label).get())
}

#[test]
fn a_report_has_version_conditions_images_and_their_file_system() {
    run(async {
        let world = World::start(limit(1));
        let runtime = &world.runtime;
        runtime.script().images = vec![image("r/a@sha256:1")];
        // Asked before the first probe has ended.
        let report = report(&world).await.expect("it serves");
        assert_eq!(report.version, "fake://v1");
        assert_eq!((report.conditions.len(), report.conditions[0].ok), (1, true));
        assert_eq!(*report.images, [image("r/a@sha256:1")]);
        assert_eq!(report.image_fs.as_deref(), Some(std::path::Path::new("/var/lib/fake")));
        for operation in ["status", "list_images", "image_fs_info"] {
            assert_eq!(counted(&world, operation), (1, 0), "{operation}");
        }
    });
}

#[test]
fn images_are_read_every_thirty_seconds_and_after_a_pull() {
    run(async {
        let world = World::start(limit(1));
        let runtime = &world.runtime;
        let lists = || runtime.logged("list images");
        report(&world).await.expect("it serves");
        runtime.script().images = vec![image("r/a")];
        pass(29_000).await;
        assert!(report(&world).await.expect("it serves").images.is_empty(), "as they were");
        assert_eq!((lists(), runtime.logged("status")), (1, 2), "conditions are read each time");
        pass(1_100).await;
        assert_eq!(*report(&world).await.expect("it serves").images, [image("r/a")]);
        assert_eq!(lists(), 2);
        assert!(succeeded(world.ask("r/b")).await);
        settle().await;
        runtime.script().images.push(image("r/b"));
        assert_eq!(report(&world).await.expect("it serves").images.len(), 2, "the pull is seen at once");
        report(&world).await.expect("it serves");
        assert_eq!(lists(), 3);
    });
}

#[test]
fn a_pull_that_ends_while_images_are_read_makes_them_be_read_again() {
    run(async {
        let world = World::start(limit(1));
        let runtime = &world.runtime;
        pass(10).await;
        runtime.script().report_takes = Duration::from_secs(3);
        let slow = {
            let client = world.client.clone();
            actix::spawn(async move { client.ask(ReportRuntime {}).await.expect("alive") })
        };
        pass(100).await;
        assert!(succeeded(world.ask("r/b")).await, "a slow report holds nothing up");
        runtime.script().images = vec![image("r/b")];
        assert!(slow.await.expect("ends").expect("it serves").images.is_empty());
        assert_eq!(*report(&world).await.expect("it serves").images, [image("r/b")]);
    });
}

#[test]
fn a_runtime_that_is_down_answers_at_once_with_its_error() {
    run(async {
        let world = World::start(limit(1));
        let runtime = &world.runtime;
        runtime.script().down = Some("connection refused".into());
        let expected = RuntimeError { endpoint: SOCKET.into(), reason: "connection refused".into() };
        assert_eq!(report(&world).await, Err(expected));
        assert_eq!(runtime.logged("status"), 0);
        runtime.script().down = None;
        pass(3_100).await;
        report(&world).await.expect("it is back");
    });
}

#[test]
fn a_status_that_fails_fails_the_report_and_is_counted() {
    run(async {
        let world = World::start(limit(1));
        let runtime = &world.runtime;
        runtime.script().broken.insert("status");
        assert_eq!(report(&world).await.expect_err("no status").reason, "status");
        assert_eq!(counted(&world, "status"), (1, 1));
    });
}

#[test]
fn unreadable_images_are_kept_and_read_again() {
    run(async {
        let world = World::start(limit(1));
        let runtime = &world.runtime;
        runtime.script().images = vec![image("r/a")];
        let before = report(&world).await.expect("it serves");
        runtime.script().broken.extend(["list images", "image fs"]);
        runtime.script().images.clear();
        pass(31_000).await;
        assert_eq!(report(&world).await.expect("it serves"), before);
        assert_eq!((counted(&world, "list_images"), counted(&world, "image_fs_info")), ((2, 1), (2, 1)));
        assert!(world.client.recorder().detail().last_error.contains(SOCKET));
        runtime.script().broken.clear();
        assert!(report(&world).await.expect("it serves").images.is_empty(), "no thirty seconds more");
    });
}

#[test]
fn a_closed_connection_causes_a_probe_at_once() {
    run(async {
        let world = World::start(limit(1));
        let runtime = &world.runtime;
        pass(1_000).await;
        runtime.script().down = Some("connection refused".into());
        runtime.closed.notify_one();
        pass(102).await;
        assert!(matches!(&*world.health.borrow(), Health::Down { .. }), "long before the next probe");
    });
}

#[test]
fn a_runtime_that_closes_every_connection_is_not_hammered() {
    run(async {
        let world = World::start(limit(1));
        let runtime = &world.runtime;
        pass(1_000).await;
        let before = runtime.script().probes.len();
        for _ in 0..10_000 {
            runtime.closed.notify_one();
            pass(1).await;
        }
        let probes = runtime.script().probes.len() - before;
        assert!((80..=110).contains(&probes), "{probes} in ten seconds");
        assert!(matches!(&*world.health.borrow(), Health::Up { .. }));
        let serves = |event: &&pb::ActorEvent| event.text.contains("serves");
        assert_eq!(world.client.recorder().detail().events.iter().filter(serves).count(), 1, "no change");
    });
}

#[test]
fn a_restart_listens_for_closed_connections_again() {
    run(async {
        let world = World::start(limit(1));
        let runtime = &world.runtime;
        pass(100).await;
        world.client.deliver(Restart { reason: "a test wants it".into() });
        pass(2_000).await;
        report(&world).await.expect("it serves");
        let before = runtime.script().probes.len();
        runtime.closed.notify_one();
        pass(200).await;
        assert_eq!(runtime.script().probes.len() - before, 1);
    });
}
