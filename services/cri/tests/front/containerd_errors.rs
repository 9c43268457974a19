//! I10 and I3: a containerd whose own APIs fail, come back, or are replaced.

use std::time::Duration;

use keelson_cri::runtime::ContainerRuntime;
use keelson_pulls::{
    coordinator::{ListPulls, Policy},
    metrics::{ApiFailure, Metrics},
    runtime::{Capabilities, FailureKind, Health, Runtime as _},
};

use tokio::sync::watch;

use crate::support::{
    Agent, Call, Containerd, FakeRuntime, IMAGE_FS_INFO, OWNER, PULL_IMAGE, Sockets, VERSION, connect,
    connect_with, grpc_status, policy, run, until,
};

const MANIFEST: &str = r#"{"schemaVersion":2,"config":{"digest":"sha256:c","size":10},
    "layers":[{"digest":"sha256:a","size":100},{"digest":"sha256:b","size":300}]}"#;
const OTHER_MANIFEST: &str = r#"{"schemaVersion":2,"config":{"digest":"sha256:d","size":20},
    "layers":[{"digest":"sha256:a","size":100},{"digest":"sha256:e","size":7000}]}"#;

const PERMISSION_DENIED: i32 = 7;
const INTERNAL: i32 = 13;

/// I10: only UNIMPLEMENTED means that the API is missing. Every other error is counted, the runtime stays up, and its
/// capabilities are known as soon as it answers.
#[test]
fn an_api_that_fails_is_there() {
    run(async {
        for (code, name) in
            [(PERMISSION_DENIED, "PermissionDenied"), (INTERNAL, "Internal"), (14, "Unavailable")]
        {
            let (containerd, runtime, _) = Containerd::start();
            let metrics = Metrics::default();
            let client = ContainerRuntime::with_metrics(runtime.socket(), OWNER, &metrics);
            containerd.fail_own_api(Some((code, "not for you")));
            let all = Capabilities { leases: true, content: true, ..Capabilities::default() };
            assert_eq!(client.probe().await.unwrap().capabilities, all, "{name}");
            for api in ["leases", "content"] {
                let counted = metrics.runtime_api_errors.get_or_create(&ApiFailure { api, code: name }).get();
                // The runtime probe reports a runtime that is away.
                assert_eq!(counted, u64::from(code != 14), "{api} {name}");
            }
            containerd.fail_own_api(None);
            assert_eq!(client.probe().await.unwrap().capabilities, all);
            containerd.set_own_api(false);
            assert_eq!(client.probe().await.unwrap().capabilities, all, "known for this connection");
        }
    });
}

/// I10: the pull continues without the lease, and the next one has a lease again.
#[test]
fn pulls_go_on_without_leases_as_long_as_these_fail() {
    run(async {
        let containerd = Containerd::default();
        let (runtime, agent, client) = connect(containerd.handler()).await;
        agent.runtime_up().await;
        let with_lease = || {
            let pulls = runtime.calls(PULL_IMAGE);
            pulls.iter().map(|call| call.headers.contains_key("containerd-lease")).collect::<Vec<_>>()
        };
        for (error, image) in [(PERMISSION_DENIED, "r.io/a"), (INTERNAL, "r.io/b")] {
            containerd.fail_own_api(Some((error, "the metadata store is on fire")));
            client.pull(image).await.assert_ok();
            // Probes do not turn the API off either.
            tokio::time::sleep(Duration::from_secs(30)).await;
        }
        containerd.fail_own_api(None);
        client.pull("r.io/c").await.assert_ok();
        assert_eq!(with_lease(), [false, false, true]);
    });
}

/// I10: a transient error costs no lease.
#[test]
fn a_lease_that_could_not_be_made_is_tried_again() {
    run(async {
        let containerd = Containerd::default();
        let (runtime, agent, client) = connect(containerd.handler()).await;
        agent.runtime_up().await;
        containerd.fail_next_lease_call(INTERNAL, "database is locked");
        containerd.fail_next_lease_call(INTERNAL, "database is locked");
        client.pull("r.io/x").await.assert_ok();
        assert!(runtime.calls(PULL_IMAGE)[0].headers.contains_key("containerd-lease"));
    });
}

/// I10: the APIs of another runtime at the same socket are detected again, in both directions.
#[test]
fn a_runtime_that_is_replaced_is_learned_again() {
    run(async {
        let (sockets, containerd) = (Sockets::new(), Containerd::default());
        let agent = Agent::start(&sockets).await;
        for has_own_api in [true, false, true] {
            containerd.set_own_api(has_own_api);
            let mut runtime = FakeRuntime::start(&sockets, containerd.handler());
            let learned = |health: &Health| match health {
                Health::Up { info, .. } => {
                    (info.capabilities.leases, info.capabilities.content) == (has_own_api, has_own_api)
                }
                _ => false,
            };
            agent.health.clone().wait_for(learned).await.unwrap();
            agent.client().await.pull("r.io/x").await.assert_ok();
            let pull = runtime.calls(PULL_IMAGE).pop().expect("a pull");
            assert_eq!(pull.headers.contains_key("containerd-lease"), has_own_api);
            runtime.vanish().await;
        }
    });
}

/// I10: what a failed probe says about the runtime.
#[test]
fn a_probe_distinguishes_a_busy_runtime_from_a_dead_one() {
    run(async {
        let cases = [
            (VERSION, None, FailureKind::Silent),
            (VERSION, Some(14), FailureKind::Gone),
            (VERSION, Some(INTERNAL), FailureKind::Silent),
            (IMAGE_FS_INFO, None, FailureKind::Busy),
            (IMAGE_FS_INFO, Some(14), FailureKind::Gone),
            (IMAGE_FS_INFO, Some(INTERNAL), FailureKind::Busy),
        ];
        for (path, code, expected) in cases {
            let (sockets, containerd) = (Sockets::new(), Containerd::default());
            let _runtime = FakeRuntime::start(&sockets, move |call: Call| {
                let containerd = containerd.clone();
                async move {
                    match code {
                        _ if call.path != path => {}
                        Some(code) => return call.refuse(grpc_status(code, "no")),
                        None => tokio::time::sleep(Duration::from_secs(60)).await,
                    }
                    containerd.handle(call).await;
                }
            });
            let client = ContainerRuntime::new(sockets.runtime(), OWNER);
            let failure = client.probe().await.unwrap_err();
            assert_eq!(failure.kind, expected, "{path} {code:?}: {failure}");
        }
        let sockets = Sockets::new();
        let client = ContainerRuntime::new(sockets.runtime(), OWNER);
        assert_eq!(client.probe().await.unwrap_err().kind, FailureKind::Gone, "no listener");
    });
}

/// I10: pulls start while ImageFsInfo takes minutes.
#[test]
fn a_busy_runtime_gets_new_pulls() {
    run(async {
        let (delay, delays) = watch::channel(Duration::ZERO);
        let slow = Containerd::default().before(IMAGE_FS_INFO, move |_, _| {
            let delay = *delays.borrow();
            tokio::time::sleep(delay)
        });
        let (_runtime, agent, client) = connect(slow).await;
        agent.runtime_up().await;
        delay.send_replace(Duration::from_secs(300));
        tokio::time::sleep(Duration::from_secs(120)).await;
        let began = tokio::time::Instant::now();
        client.pull("r.io/x").await.assert_ok();
        assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
    });
}

/// I3: while readings fail, no pull counts as stalled; when they succeed again, a download that hangs is detected.
#[test]
fn readings_that_fail_are_no_stall_and_stalls_are_found_again_after() {
    run(async {
        let containerd = Containerd::default();
        let policy = Policy { stall_timeout: Some(Duration::from_secs(60)), ..policy() };
        let hanging = containerd.downloading(MANIFEST, &[], Duration::from_secs(3000));
        let (runtime, agent, client) = connect_with(policy, hanging).await;
        agent.runtime_up().await;
        containerd.fail_content_api(Some((INTERNAL, "a disk that hangs")));
        let pull = client.start_pull("r.io/x").await;
        until("it runs", || !runtime.calls(PULL_IMAGE).is_empty()).await;
        tokio::time::sleep(Duration::from_secs(600)).await;
        let list = agent.pulls.ask(ListPulls { max_queued: 10 }).await.unwrap();
        assert_eq!(list.running, 1, "nothing is known");
        containerd.fail_content_api(None);
        let reply = pull.reply().await.unwrap();
        assert_eq!(reply.code(), 4, "{}", reply.text());
        assert!(reply.text().contains("stall_timeout"), "{}", reply.text());
    });
}

/// I3: after a tag has moved, the lease holds two manifests. The one that the pull fetches counts, in either direction,
/// and it does not change from one reading to the next.
#[test]
fn of_two_manifests_in_a_lease_the_one_in_use_counts() {
    run(async {
        let (containerd, _runtime, client) = Containerd::start();
        containerd.put_blob_at("sha256:old", 200, MANIFEST, 100);
        containerd.put_blob_at("sha256:new", 200, OTHER_MANIFEST, 200);
        // What an interrupted pull of the old one left behind.
        containerd.put_ingest_at("layer-sha256:b", 120, 150);
        let both = [("content", "sha256:old"), ("content", "sha256:new")];
        containerd.put_lease("keelson-1", &[], &both);
        let total = async || {
            let read = client.progress(vec!["keelson-1".into()]).await.unwrap();
            read.pulls["keelson-1"].progress.bytes_total
        };
        for _ in 0..20 {
            assert_eq!(total().await, 7120, "the one that arrived last");
        }
        // The tag has moved back: the old one is fetched.
        containerd.put_ingest_at("layer-sha256:b", 130, 300);
        for _ in 0..20 {
            assert_eq!(total().await, 410, "the one that is written to");
        }
        containerd.remove_ingest("layer-sha256:b");
        for _ in 0..20 {
            assert_eq!(total().await, 410, "it stays so while it unpacks");
        }
    });
}

/// I3: an unreadable lease does not prevent the reading of others.
#[test]
fn one_pull_that_cannot_be_read_does_not_hide_the_others() {
    run(async {
        let (containerd, _runtime, client) = Containerd::start();
        containerd.put_blob("sha256:m", 200, MANIFEST);
        containerd.put_lease("keelson-1", &[], &[("content", "sha256:m")]);
        containerd.put_lease("keelson-2", &[], &[("content", "sha256:m")]);
        containerd.fail_next_lease_call(INTERNAL, "this one is broken");
        let read = client.progress(vec!["keelson-1".into(), "keelson-2".into()]).await.unwrap();
        assert_eq!(read.pulls.keys().collect::<Vec<_>>(), ["keelson-2"]);
        let failed = read.failed.expect("the first failed").to_string();
        assert!(failed.contains("this one is broken"), "{failed}");
    });
}
