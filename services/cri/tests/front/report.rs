//! What node status reads from the runtime, and how its death is detected.

use std::{
    path::PathBuf,
    sync::{Arc, Mutex},
    time::Duration,
};

use futures_util::FutureExt as _;
use keelson_actor_system::reports::{NETWORK_READY, RUNTIME_READY};
use keelson_cri::runtime::ContainerRuntime;
use keelson_proto::cri;
use keelson_pulls::runtime::{Health, Runtime as _};
use tokio::time::Instant;

use crate::support::{Call, FakeRuntime, IMAGE_FS_INFO, OWNER, Sockets, VERSION, connect, run};

const STATUS: &str = "/runtime.v1.RuntimeService/Status";
const LIST_IMAGES: &str = "/runtime.v1.ImageService/ListImages";

#[derive(Clone, Default)]
struct Answers {
    status: cri::StatusResponse,
    images: cri::ListImagesResponse,
    image_fs: cri::ImageFsInfoResponse,
}

impl Answers {
    async fn handle(self, call: Call) {
        match &*call.path {
            STATUS => call.answer(&self.status).await,
            LIST_IMAGES => call.answer(&self.images).await,
            IMAGE_FS_INFO => call.answer(&self.image_fs).await,
            _ => call.standard().await,
        }
    }
}

fn serve(answers: Answers) -> (FakeRuntime, ContainerRuntime) {
    let sockets = Sockets::new();
    let runtime = FakeRuntime::start(&sockets, move |call| answers.clone().handle(call));
    (runtime, ContainerRuntime::new(sockets.runtime(), OWNER))
}

fn condition(kind: &str, status: bool, reason: &str) -> cri::RuntimeCondition {
    cri::RuntimeCondition { r#type: kind.into(), status, reason: reason.into(), message: "why".into() }
}

fn file_system(mountpoint: &str) -> cri::FilesystemUsage {
    let fs_id = Some(cri::FilesystemIdentifier { mountpoint: mountpoint.into() });
    cri::FilesystemUsage { fs_id, ..Default::default() }
}

#[test]
fn conditions_images_and_their_file_system_are_taken_as_the_runtime_gives_them() {
    run(async {
        let conditions = vec![
            condition(RUNTIME_READY, true, ""),
            condition(NETWORK_READY, false, "NetworkPluginNotReady"),
        ];
        let image = cri::Image {
            id: "sha256:1".into(),
            repo_tags: vec!["r/a:1".into(), "r/a:latest".into()],
            repo_digests: vec!["r/a@sha256:1".into()],
            size: 7,
        };
        let answers = Answers {
            status: cri::StatusResponse {
                status: Some(cri::RuntimeStatus { conditions }),
                ..Default::default()
            },
            images: cri::ListImagesResponse { images: vec![image, cri::Image::default()] },
            image_fs: cri::ImageFsInfoResponse {
                image_filesystems: vec![file_system("/first"), file_system("/second")],
                ..Default::default()
            },
        };
        let (_runtime, client) = serve(answers);
        let conditions = client.status().await.unwrap();
        assert_eq!((conditions.len(), &*conditions[1].kind), (2, NETWORK_READY));
        assert_eq!((conditions[0].ok, conditions[1].ok), (true, false));
        assert_eq!((&*conditions[1].reason, &*conditions[1].message), ("NetworkPluginNotReady", "why"));
        let images = client.images().await.unwrap();
        assert_eq!(images[0].names, ["r/a@sha256:1", "r/a:1", "r/a:latest"], "digests first");
        assert_eq!((images[0].size_bytes, images[1].names.len()), (7, 0));
        assert_eq!(client.image_fs().await.unwrap(), Some(PathBuf::from("/first")));
    });
}

#[test]
fn empty_runtime_answers_are_accepted() {
    run(async {
        let (runtime, client) = serve(Answers::default());
        let error = client.status().await.expect_err("no status");
        assert!(error.to_string().contains(&*runtime.socket().to_string_lossy()), "{error}");
        assert!(error.reason.contains("empty"), "{error}");
        assert_eq!(client.images().await.unwrap(), []);
        assert_eq!(client.image_fs().await.unwrap(), None);
    });
}

#[test]
fn a_call_that_gets_no_answer_ends() {
    run(async {
        let sockets = Sockets::new();
        let kept = Arc::new(Mutex::new(Vec::new()));
        let _runtime = FakeRuntime::start(&sockets, move |call| {
            kept.lock().unwrap().push(call);
            std::future::pending()
        });
        let client = ContainerRuntime::new(sockets.runtime(), OWNER);
        let since = Instant::now();
        for error in [
            client.status().await.expect_err("no answer"),
            client.images().await.expect_err("no answer"),
            client.image_fs().await.expect_err("no answer"),
        ] {
            assert!(error.reason.contains("no answer within"), "{error}");
        }
        assert!(since.elapsed() <= Duration::from_secs(31), "{:?}", since.elapsed());
    });
}

#[test]
fn a_list_of_images_may_be_as_long_as_the_kubelets() {
    run(async {
        let image = cri::Image { repo_tags: vec!["x".repeat(1 << 20)], ..Default::default() };
        let images = cri::ListImagesResponse { images: vec![image; 9] };
        let (_runtime, client) = serve(Answers { images, ..Answers::default() });
        assert_eq!(client.images().await.unwrap().len(), 9);
    });
}

#[test]
fn a_closed_connection_is_reported_once() {
    run(async {
        let (mut runtime, client) = serve(Answers::default());
        client.images().await.unwrap();
        let closed = tokio::spawn(client.connection_closed());
        tokio::time::sleep(Duration::from_secs(600)).await;
        assert!(!closed.is_finished(), "an idle connection stays");
        runtime.die().await;
        let since = Instant::now();
        closed.await.unwrap();
        assert!(since.elapsed() < Duration::from_secs(1));
        assert_eq!(client.connection_closed().now_or_never(), None, "once");
        client.images().await.expect_err("no runtime is there");
        assert_eq!(client.connection_closed().now_or_never(), None, "no connection was made");
    });
}

#[test]
fn runtime_death_is_noticed_at_once_without_calls() {
    run(async {
        let (mut runtime, mut agent, _) = connect(Call::standard).await;
        agent.runtime_up().await;
        tokio::time::sleep(Duration::from_millis(7_100)).await;
        let probes = runtime.calls(VERSION).len();
        runtime.die().await;
        let since = Instant::now();
        agent.health.wait_for(|health| matches!(health, Health::Down { .. })).await.unwrap();
        assert!(since.elapsed() < Duration::from_secs(1), "{:?}", since.elapsed());
        assert_eq!(runtime.calls(VERSION).len(), probes, "the probe got no answer");
    });
}

#[test]
fn a_runtime_that_only_drops_the_connection_is_asked_at_once_and_stays_up() {
    run(async {
        let switches = Arc::new(Mutex::new(Vec::new()));
        let kept = switches.clone();
        let (runtime, mut agent, _) = connect(move |call: Call| {
            if call.path == VERSION {
                kept.lock().unwrap().push(call.kill_switch());
            }
            call.standard()
        })
        .await;
        agent.runtime_up().await;
        tokio::time::sleep(Duration::from_millis(7_100)).await;
        agent.health.mark_unchanged();
        let (probes, connections) = (runtime.calls(VERSION).len(), runtime.connections());
        for switch in switches.lock().unwrap().drain(..) {
            switch.send_replace(true);
        }
        tokio::time::sleep(Duration::from_secs(1)).await;
        assert_eq!((runtime.calls(VERSION).len(), runtime.connections()), (probes + 1, connections + 1));
        tokio::time::sleep(Duration::from_secs(60)).await;
        assert!(matches!(&*agent.health.borrow(), Health::Up { .. }));
        assert!(!agent.health.has_changed().unwrap(), "that is not a change");
    });
}
