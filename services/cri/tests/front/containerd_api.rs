//! Leases and progress on containerd's own API.

use std::{
    collections::BTreeSet,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use futures_util::FutureExt as _;
use keelson_cri::runtime::ContainerRuntime;
use keelson_proto::Code;
use keelson_pulls::{
    coordinator::ListPulls,
    request::PullCall,
    runtime::{Outcome, Phase, Progress, PullReading, Runtime as _, RuntimePull},
};
use tokio::sync::watch;

use crate::support::{
    Call, Containerd, FakeRuntime, OWNER, PULL_IMAGE, Sockets, connect, grpc_status, run, until,
};

const OWNED: &str = "keelson.dev/owner";
const EXPIRES: &str = "containerd.io/gc.expire";
const HOUR: Duration = Duration::from_secs(3600);

fn pull_in(lease: Option<&str>) -> RuntimePull {
    let call = Arc::new(PullCall::rebuild("r.io/x", "", None).unwrap());
    RuntimePull { call, lease: lease.map(str::to_owned), option: None }
}

fn in_minutes(minutes: u32) -> String {
    humantime::format_rfc3339_seconds(std::time::SystemTime::now() + HOUR / 60 * minutes).to_string()
}

fn hours_left(containerd: &Containerd, lease: &str) -> u64 {
    let at = humantime::parse_rfc3339(&containerd.leases()[lease].labels[EXPIRES]).unwrap();
    (at.duration_since(std::time::SystemTime::now()).unwrap() + HOUR / 60).as_secs() / 3600
}

fn code(outcome: &Outcome) -> Option<Code> {
    outcome.reply().result.as_ref().err().map(|status| status.code)
}

#[test]
fn a_pull_makes_its_lease_first_and_names_it() {
    run(async {
        let (containerd, runtime, client) = Containerd::start();
        for _ in 0..2 {
            let outcome = client.pull(pull_in(Some("keelson-1"))).await;
            assert_eq!((code(&outcome), outcome.is_lost()), (None, false));
        }
        assert_eq!(containerd.journal(), ["create keelson-1"], "made once, then known");
        assert_eq!(containerd.leases()["keelson-1"].labels[OWNED], OWNER);
        assert_eq!(hours_left(&containerd, "keelson-1"), 2);
        assert!(runtime.calls(PULL_IMAGE).iter().all(|call| call.headers["containerd-lease"] == "keelson-1"));
        client.drop_lease("keelson-1".into(), false).await.unwrap();
        client.drop_lease("keelson-1".into(), false).await.expect("a missing lease is not an error");
        assert!(containerd.leases().is_empty());
    });
}

/// I1: containerd frees what a lease kept at its next garbage collection; where space is needed, the deletion requests
/// one.
#[test]
fn a_lease_is_deleted_with_a_garbage_collection_where_space_is_needed() {
    run(async {
        let (containerd, _runtime, client) = Containerd::start();
        for (lease, collect) in [("keelson-1", false), ("keelson-2", true)] {
            containerd.put_lease(lease, &[(OWNED, OWNER)], &[]);
            client.drop_lease(lease.into(), collect).await.unwrap();
        }
        assert_eq!(containerd.journal(), ["delete keelson-1", "delete keelson-2 and collect"]);
    });
}

#[test]
fn a_lease_of_an_earlier_process_is_used_while_it_lasts() {
    run(async {
        let (containerd, _runtime, client) = Containerd::start();
        let (owner, expires) = ((OWNED, OWNER), in_minutes(20 * 60));
        containerd.put_lease("keelson-1", &[owner, (EXPIRES, &expires)], &[("content", "sha256:a")]);
        assert_eq!(code(&client.pull(pull_in(Some("keelson-1"))).await), None);
        assert!(containerd.journal().is_empty());
        assert_eq!(containerd.leases()["keelson-1"].resources.len(), 1);
    });
}

/// I1: the expiry is hours ahead, and renewed while the bytes are needed.
#[test]
fn leases_are_renewed_before_they_expire() {
    run(async {
        for (in_use, minutes, renewed) in
            [(false, 70, false), (false, 50, true), (true, 50, false), (true, 10, true)]
        {
            let (containerd, _runtime, client) = Containerd::start();
            let (owner, expires) = ((OWNED, OWNER), in_minutes(minutes));
            let pinned = [("content", "sha256:a")];
            containerd.put_lease("keelson-1", &[owner, (EXPIRES, &expires)], &pinned);
            // A pull counts from the moment it is requested.
            let pull = in_use.then(|| client.pull(pull_in(Some("keelson-1"))));
            let wanted = vec!["keelson-1".to_owned(), "keelson-gone".to_owned()];
            client.renew_leases(wanted).await.expect("one that is gone is left out");
            let leases = containerd.leases();
            assert_eq!(leases.len(), 1, "none is made");
            assert_eq!(leases["keelson-1"].resources.len(), 1);
            assert_eq!(hours_left(&containerd, "keelson-1") == 2, renewed, "{in_use} {minutes}");
            drop(pull);
        }
    });
}

#[test]
fn an_agent_killed_while_it_renewed_a_lease_leaves_its_bytes_pinned() {
    run(async {
        let (containerd, _runtime, client) = Containerd::start();
        let owner = (OWNED, OWNER);
        for lease in ["keelson-1-renewing", "keelson-2", "keelson-2-renewing", "keelson-3-renewing"] {
            containerd.put_lease(lease, &[owner], &[("content", "sha256:a")]);
        }
        let keep = ["keelson-1", "keelson-2"].map(str::to_owned).into();
        client.reap_leases(keep).await.expect("it answers");
        let left: Vec<String> = containerd.leases().keys().cloned().collect();
        assert_eq!(left.len(), 2, "{left:?}");
        assert!(["keelson-1-renewing", "keelson-2"].iter().all(|id| left.iter().any(|have| have == id)));
    });
}

#[test]
fn a_lease_that_expires_soon_is_recreated_with_its_resources() {
    run(async {
        let (containerd, _runtime, client) = Containerd::start();
        let (owner, expires) = ((OWNED, OWNER), in_minutes(50));
        let pinned = [("content", "sha256:a"), ("ingests", "layer-sha256:b")];
        containerd.put_lease("keelson-1", &[owner, (EXPIRES, &expires)], &pinned);
        assert_eq!(code(&client.pull(pull_in(Some("keelson-1"))).await), None);
        assert_eq!(hours_left(&containerd, "keelson-1"), 2);
        let lease = &containerd.leases()["keelson-1"];
        assert_eq!(lease.resources.len(), 2);
        assert_eq!(lease.labels[OWNED], OWNER);
        // At no moment is anything unpinned.
        assert_eq!(
            containerd.journal(),
            [
                "create keelson-1-renewing",
                "add keelson-1-renewing sha256:a",
                "add keelson-1-renewing layer-sha256:b",
                "delete keelson-1",
                "create keelson-1",
                "add keelson-1 sha256:a",
                "add keelson-1 layer-sha256:b",
                "delete keelson-1-renewing",
            ]
        );
    });
}

#[test]
fn a_vanished_lease_is_recreated_once() {
    run(async {
        let (containerd, runtime, client) = Containerd::start();
        assert_eq!(code(&client.pull(pull_in(Some("keelson-1"))).await), None);
        containerd.drop_lease("keelson-1");
        assert_eq!(code(&client.pull(pull_in(Some("keelson-1"))).await), None);
        assert_eq!(containerd.journal(), ["create keelson-1", "create keelson-1"]);
        assert_eq!(runtime.calls(PULL_IMAGE).len(), 3);
    });
}

/// containerd names no lease if it has collected, with the lease, what the pull was writing.
#[test]
fn i8_a_pull_whose_content_was_collected_with_its_lease_is_repeated() {
    run(async {
        const COLLECTED: &str =
            "failed commit on ref \"layer-sha256:b\": rename /ingest/1/data: no such file or directory";
        for (is_lease_gone, calls, end) in [(true, 2, None), (false, 1, Some(Code::Unknown))] {
            let (sockets, containerd, is_first) =
                (Sockets::new(), Containerd::default(), AtomicBool::new(true));
            let (rest, own) = (containerd.handler(), containerd.clone());
            let runtime = FakeRuntime::start(&sockets, move |call: Call| {
                if call.path != PULL_IMAGE || !is_first.swap(false, Ordering::Relaxed) {
                    return rest(call);
                }
                if is_lease_gone {
                    own.drop_lease("keelson-1");
                }
                async move { call.refuse(grpc_status(2, COLLECTED)) }.boxed()
            });
            let client = ContainerRuntime::new(sockets.runtime(), OWNER);
            let outcome = client.pull(pull_in(Some("keelson-1"))).await;
            assert_eq!((code(&outcome), runtime.calls(PULL_IMAGE).len()), (end, calls), "{is_lease_gone}");
            assert!(containerd.leases().contains_key("keelson-1"));
        }
    });
}

/// I8: after a hand-over, leases that this process does not know are in use by its successor.
#[test]
fn i8_an_agent_that_has_handed_over_deletes_no_lease() {
    run(async {
        let (containerd, _runtime, client) = Containerd::start();
        for lease in ["keelson-1", "keelson-2"] {
            containerd.put_lease(lease, &[(OWNED, OWNER)], &[]);
        }
        client.leave_leases();
        assert!(client.reap_leases(BTreeSet::new()).await.unwrap().is_empty());
        client.drop_lease("keelson-1".into(), false).await.unwrap();
        assert_eq!(containerd.leases().len(), 2);
    });
}

#[test]
fn a_lease_that_keeps_vanishing_yields_the_runtime_error() {
    run(async {
        let sockets = Sockets::new();
        let vanishing = Containerd::default()
            .before(PULL_IMAGE, |containerd, _| async move { containerd.drop_lease("keelson-1") });
        let runtime = FakeRuntime::start(&sockets, vanishing);
        let client = ContainerRuntime::new(sockets.runtime(), OWNER);
        let outcome = client.pull(pull_in(Some("keelson-1"))).await;
        assert_eq!((code(&outcome), outcome.is_lost()), (Some(Code::NotFound), false));
        assert_eq!(runtime.calls(PULL_IMAGE).len(), 2);
        // Another NotFound concerns the image and is not retried.
        let outcome = client.pull(pull_in(None)).await;
        assert_eq!(code(&outcome), None);
    });
}

#[test]
fn a_lease_that_cannot_be_made_costs_the_progress_and_not_the_pull() {
    run(async {
        let (containerd, runtime, client) = Containerd::start();
        containerd.fail_own_api(Some((2, "disk full")));
        let outcome = client.pull(pull_in(Some("keelson-1"))).await;
        containerd.fail_own_api(None);
        assert_eq!((code(&outcome), outcome.is_lost()), (None, false));
        assert!(runtime.calls(PULL_IMAGE)[0].headers.get("containerd-lease").is_none());
        // A runtime that is not ready is different: the pull waits for it.
        containerd.fail_next_lease_call(14, "server is not initialized yet");
        assert!(client.pull(pull_in(Some("keelson-1"))).await.is_lost(), "lost");
        assert_eq!(runtime.calls(PULL_IMAGE).len(), 1);
    });
}

#[test]
fn a_lease_in_use_is_not_deleted() {
    run(async {
        let (sockets, containerd) = (Sockets::new(), Containerd::default());
        let (gate, opened) = watch::channel(false);
        let waiting = containerd.before(PULL_IMAGE, move |_, _| {
            let mut opened = opened.clone();
            async move { drop(opened.wait_for(|open| *open).await.unwrap()) }
        });
        let runtime = FakeRuntime::start(&sockets, waiting);
        let client = ContainerRuntime::new(sockets.runtime(), OWNER);
        let pull = client.pull(pull_in(Some("keelson-1")));
        // Even before it is polled for the first time.
        client.drop_lease("keelson-1".into(), false).await.unwrap();
        let pull = tokio::spawn(pull);
        until("it runs", || !runtime.calls(PULL_IMAGE).is_empty()).await;
        client.drop_lease("keelson-1".into(), false).await.unwrap();
        client.reap_leases(BTreeSet::new()).await.unwrap();
        assert!(containerd.leases().contains_key("keelson-1"));
        gate.send_replace(true);
        assert_eq!(code(&pull.await.unwrap()), None);
        client.drop_lease("keelson-1".into(), false).await.unwrap();
        assert!(containerd.leases().is_empty());
    });
}

#[test]
fn case_11_only_own_orphans_are_reaped() {
    run(async {
        let (containerd, _runtime, client) = Containerd::start();
        let other = [(OWNED, "fedcba9876543210")];
        containerd.put_lease("orphan-1", &[(OWNED, OWNER)], &[]);
        containerd.put_lease("orphan-2", &[(OWNED, OWNER)], &[]);
        containerd.put_lease("journaled", &[(OWNED, OWNER)], &[]);
        containerd.put_lease("of-another-agent", &other, &[]);
        containerd.put_lease("of-somebody", &[], &[]);
        assert_eq!(code(&client.pull(pull_in(Some("in-use"))).await), None);
        let reaped = client.reap_leases(["journaled".to_owned()].into()).await.unwrap();
        assert_eq!(reaped, ["orphan-1", "orphan-2"]);
        let left: Vec<String> = containerd.leases().into_keys().collect();
        assert_eq!(left, ["in-use", "journaled", "of-another-agent", "of-somebody"]);
    });
}

#[test]
fn a_runtime_without_containerds_api_serves_all_the_same() {
    run(async {
        let containerd = Containerd::default();
        containerd.set_own_api(false);
        let (runtime, agent, client) = connect(containerd.handler()).await;
        let info = ContainerRuntime::new(runtime.socket(), OWNER).probe().await.unwrap();
        assert_eq!(
            (&*info.name, info.capabilities.leases, info.capabilities.content),
            ("fake", false, false)
        );
        agent.runtime_up().await;
        client.pull("r.io/x").await.assert_ok();
        assert!(runtime.calls(PULL_IMAGE)[0].headers.get("containerd-lease").is_none());
    });
}

#[test]
fn of_two_chained_agents_the_one_next_to_containerd_makes_leases() {
    run(async {
        let (runtime, near, _) = connect(Containerd::default().handler()).await;
        near.runtime_up().await;
        for obeys_option in [true, false] {
            near.settings.send_modify(|settings| settings.offer_pull_option = obeys_option);
            let far = ContainerRuntime::new(near.socket.clone(), "fedcba9876543210");
            let capabilities = far.probe().await.unwrap().capabilities;
            assert_eq!(capabilities.pull_option, obeys_option);
            assert_eq!((capabilities.leases, capabilities.content), (false, false));
            assert_eq!(code(&far.pull(pull_in(None)).await), None);
        }
        let pulls = runtime.calls(PULL_IMAGE);
        assert_eq!(pulls.len(), 2);
        let of_near = |lease: &http::HeaderValue| lease.to_str().unwrap().contains(OWNER);
        assert!(pulls.iter().all(|call| of_near(&call.headers["containerd-lease"])), "{pulls:?}");
    });
}

#[test]
fn a_runtime_that_is_gone_is_named_in_every_error() {
    run(async {
        let sockets = Sockets::new();
        let client = ContainerRuntime::new(sockets.runtime(), OWNER);
        let name = format!("unix://{}", sockets.runtime().display());
        let errors = [
            client.probe().map(|result| result.unwrap_err().to_string()).await,
            client.image_size(pull_in(None).call).map(|result| result.unwrap_err().to_string()).await,
            client.progress(vec!["keelson-1".into()]).map(|result| result.unwrap_err().to_string()).await,
            client.drop_lease("keelson-1".into(), false).map(|result| result.unwrap_err().to_string()).await,
            client.reap_leases(BTreeSet::new()).map(|result| result.unwrap_err().to_string()).await,
        ];
        for error in errors {
            assert!(error.starts_with(&name) && error.contains("No such file"), "{error}");
        }
        for lease in [None, Some("keelson-1")] {
            let outcome = client.pull(pull_in(lease)).await;
            let status = outcome.reply().result.clone().unwrap_err();
            assert!(
                outcome.is_lost() && status.code == Code::Unavailable && status.message.contains(&name),
                "{status:?}"
            );
        }
    });
}

const MANIFEST: &str = r#"{"schemaVersion":2,"config":{"digest":"sha256:c","size":10},
    "layers":[{"digest":"sha256:a","size":100},{"digest":"sha256:b","size":300},{"digest":"sha256:d","size":50}]}"#;

#[test]
fn progress_comes_from_the_manifest_and_the_ingests() {
    run(async {
        let (containerd, _runtime, client) = Containerd::start();
        let read = || async {
            let read = client.progress(vec!["gone".into(), "keelson-1".into()]).await.unwrap();
            assert!(read.failed.is_none() && read.pulls.keys().all(|lease| lease == "keelson-1"));
            read.pulls.get("keelson-1").map(|reading| reading.progress)
        };
        assert_eq!(read().await, None, "no lease yet");
        containerd.put_lease("keelson-1", &[], &[]);
        assert_eq!(read().await, Some(Progress::default()));
        // An index, and a manifest with one layer that another image brought before.
        containerd.put_blob("sha256:i", 30, r#"{"manifests":[{"digest":"sha256:m","size":9}]}"#);
        containerd.put_blob("sha256:m", 200, MANIFEST);
        containerd.put_blob("sha256:d", 50, "there before");
        containerd.put_lease(
            "keelson-1",
            &[],
            &[("content", "sha256:i"), ("content", "sha256:m"), ("snapshots/x", "y")],
        );
        containerd.put_ingest("layer-sha256:a", 40);
        containerd.put_ingest("layer-sha256:z", 7);
        let progress = Progress {
            phase: Phase::Downloading,
            bytes_done: 90,
            bytes_total: 460,
            layers_done: 1,
            layers_total: 3,
            ..Progress::default()
        };
        assert_eq!(read().await, Some(progress));
        containerd.put_blob("sha256:a", 100, "a layer");
        containerd.put_blob("sha256:b", 300, "a layer");
        containerd.put_blob("sha256:c", 10, "{}");
        let all = ["i", "m", "a", "b", "c"].map(|name| format!("sha256:{name}"));
        let all: Vec<_> = all.iter().map(|digest| ("content", &**digest)).collect();
        containerd.put_lease("keelson-1", &[], &all);
        let done = Progress {
            phase: Phase::Unpacking,
            bytes_done: 460,
            bytes_total: 460,
            layers_done: 3,
            layers_total: 3,
            ..Progress::default()
        };
        assert_eq!(read().await, Some(done));
        assert_eq!(read().await, Some(done));
        let mut reads = containerd.journal();
        reads.retain(|line| line.starts_with("read "));
        reads.sort();
        assert_eq!(reads, ["read sha256:c", "read sha256:i", "read sha256:m"], "each once, and no layer");
    });
}

#[test]
fn a_large_blob_is_not_read_as_a_manifest() {
    run(async {
        let (containerd, _runtime, client) = Containerd::start();
        containerd.put_blob("sha256:l", 5 << 20, MANIFEST);
        containerd.put_lease("keelson-1", &[], &[("content", "sha256:l"), ("content", "sha256:gone")]);
        let read = client.progress(vec!["keelson-1".into()]).await.unwrap();
        assert_eq!(read.pulls, [("keelson-1".to_owned(), PullReading::default())].into());
        assert!(containerd.journal().is_empty());
    });
}

#[test]
fn a_running_pull_shows_its_progress() {
    run(async {
        let containerd = Containerd::default();
        let pulling = containerd.downloading(MANIFEST, &[(OWNED, OWNER)], Duration::from_secs(30));
        let (runtime, agent, client) = connect(pulling).await;
        agent.runtime_up().await;
        let pull = client.start_pull("r.io/x").await;
        until("it runs", || !runtime.calls(PULL_IMAGE).is_empty()).await;
        tokio::time::sleep(Duration::from_secs(5)).await;
        let list = agent.pulls.ask(ListPulls { max_queued: 10 }).await.unwrap();
        assert_eq!(list.pulls.len(), 1);
        let running = list.pulls[0].progress.as_ref().expect("a reading");
        assert_eq!((running.bytes_done, running.bytes_total, running.layers_total), (120, 460, 3));
        assert_eq!(pull.reply().await.unwrap().code(), 0);
        until("the lease is given up", || containerd.leases().is_empty()).await;
    });
}
