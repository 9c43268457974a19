//! Pods that are deleted while their pulls wait, and whether pulls are stalled.

use super::*;
use crate::{
    coordinator::{PullEvent, PullsFlow},
    runtime::RuntimeCommand,
};
use fakes::ScriptedPull;
use keelson_actor_system::reports::RuntimeAvailability;
use keelson_proto::Code;

impl World {
    /// A caller in namespace `default`; the uid of its pod is the pod's name.
    fn ask_for_pod(&self, image: &str, pod: &str) -> Answered {
        let metadata = cri::PodSandboxMetadata {
            name: pod.into(),
            uid: pod.into(),
            namespace: "default".into(),
            attempt: 0,
        };
        let sandbox = cri::PodSandboxConfig { metadata: Some(metadata), ..Default::default() };
        let (_, answered, mut request) = self.request(image);
        request.call = self.call(image, Some(sandbox));
        self.pulls.offer(request).expect("room");
        answered
    }

    fn pod_gone(&self, pod: &str) {
        let gone = PullEvent::PodGone { uid: pod.into(), pod: format!("default/{pod}") };
        self.pulls.offer(gone).expect("room");
    }
}

#[test]
fn case_06_a_deleted_pod_gets_its_answer_at_once_and_the_slot_is_untouched() {
    run(async {
        let world = World::start(limit(1));
        world.runtime.set_pulls("r/a", [ScriptedPull::Succeed(Duration::from_secs(600))]);
        let running = world.ask_for_pod("r/a", "a");
        let (web, db) = (world.ask_for_pod("r/b", "web"), world.ask_for_pod("r/b", "db"));
        let alone = world.ask_for_pod("r/c", "web");
        pass(100).await;
        let begin = tokio::time::Instant::now();
        world.pod_gone("web");
        for answered in [web, alone] {
            let refusal = refused(answered).await;
            assert_eq!(refusal.code(), Code::Aborted);
            assert!(refusal.to_string().contains("default/web"), "{refusal}");
        }
        assert_eq!(begin.elapsed(), Duration::ZERO, "no time passed");
        assert_eq!(world.inspected().await["pods_gone"], 1);
        let list = world.list().await;
        assert_eq!((list.running, list.queued, list.callers), (1, 1, 2));
        assert_eq!(refused(world.ask_for_pod("r/d", "web")).await.code(), Code::Aborted);
        // Known even after a restart of the coordinator; forgotten ten minutes after the object is deleted.
        world.restart_pulls();
        assert_eq!(refused(running).await, Refusal::Restarting);
        assert_eq!(refused(db).await, Refusal::Restarting);
        pass(200).await;
        world.runtime.set_pulls("r/e", [ScriptedPull::Hang]);
        let _first = world.ask_for_pod("r/e", "a");
        assert_eq!(refused(world.ask_for_pod("r/d", "web")).await.code(), Code::Aborted);
        world.pulls.offer(PullEvent::PodForgotten("web".into())).expect("room");
        pass(601_000).await;
        let mut late = world.ask_for_pod("r/f", "web");
        pass(100).await;
        assert!(late.try_recv().is_err(), "it waits like any other");
        assert_eq!(handled(world.pulls.recorder(), "PodGone"), 1);
    });
}

#[test]
fn the_pulls_view_has_the_state_of_runtime_and_store() {
    run(async {
        let world = World::start(limit(1));
        world.runtime.set_pulls("r/a", [ScriptedPull::Hang]);
        let _callers = [world.ask("r/a"), world.ask("r/b")];
        pass(5_000).await;
        let pulls_view = world.pulls.ask(PullsFlow {}).await.expect("alive");
        assert_eq!(
            (pulls_view.running, pulls_view.queued, &pulls_view.runtime, pulls_view.durable),
            (1, 1, &RuntimeAvailability::Up, true)
        );
        assert!(pulls_view.oldest_wait.is_some_and(|wait| wait >= Duration::from_secs(4)), "{pulls_view:?}");
        assert_eq!(pulls_view.since_progress, None);
        world.store.fail(true);
        world.runtime.script().down = Some("connection refused".into());
        world.client.offer(RuntimeCommand::Probe).expect("room");
        let _more = world.ask("r/c");
        pass(3_000).await;
        let pulls_view = world.pulls.ask(PullsFlow {}).await.expect("alive");
        assert!(!pulls_view.durable);
        let RuntimeAvailability::Down { down_for, reason } = pulls_view.runtime else {
            panic!("{pulls_view:?}")
        };
        assert!(down_for >= Duration::from_secs(2) && reason.contains("connection refused"), "{reason}");
    });
}
