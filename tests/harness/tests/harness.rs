//! The harness itself, on both runtimes and without an agent: the suites depend on it.

use anyhow::{Context as _, Result, ensure};
use bytes::Bytes;
use http::{Method, StatusCode};
use keelson_harness::containerd::{Kind, Options};
use keelson_harness::cri::{Pull, failed};
use keelson_harness::driver::Driver;
use keelson_harness::images::{ImageSpec, LARGE, TINY};
use keelson_harness::node::Node;
use keelson_harness::peers;
use keelson_harness::process::runs;
use keelson_harness::registry::{ALICE, Access, BOB, Registry};
use keelson_harness::registry_proxy::{Fault, Match, Outcome, RegistryProxy};
use keelson_harness::scratch::{Scratch, mounts_below};
use keelson_harness::util::{http, http_get, until};
use keelson_harness::{on_both_runtimes, on_crio};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

on_both_runtimes!(
    pulls_run_in_parallel_and_are_counted,
    the_runtime_does_not_limit_pulls,
    a_killed_runtime_resumes_with_a_range,
    faults_reach_the_runtime,
    a_registry_distinguishes_its_users,
    a_mirror_replaces_a_registry,
    pods_run_and_leave_nothing,
);

on_crio!(
    pulls_run_in_parallel_and_are_counted,
    the_runtime_does_not_limit_pulls,
    faults_reach_the_runtime,
    a_registry_distinguishes_its_users,
    a_mirror_replaces_a_registry,
    pods_run_and_leave_nothing,
);

async fn pulls_run_in_parallel_and_are_counted(kind: Kind) -> Result<()> {
    let node = Node::start(kind).await?;
    let images = node.push_many("apps", 3, LARGE / 3).await?;
    node.proxy.throttle(Some(LARGE));
    let cri = node.runtime.cri().await?;
    let version = cri.version().await?.runtime_version;
    let expected = match kind {
        Kind::Debian16 if std::env::var_os("KEELSON_TEST_CONTAINERD").is_some() => "v1.7.",
        Kind::Debian16 => "1.6.",
        Kind::V2 => "v2.4.2",
        Kind::Crio => "1.34.",
    };
    ensure!(version.starts_with(expected), "the runtime reports version {version}");

    // All three wait for the last, so they overlap in every run.
    let hold = node.proxy.rule(Match::layers(), Fault::StallAfter(TINY));
    let pulls: Vec<_> = images
        .iter()
        .map(|image| {
            let (cri, name) = (cri.clone(), node.name(image));
            tokio::spawn(async move { cri.pull_image(&name).await })
        })
        .collect();
    until("three layers are being sent", || node.proxy.records().active_repos().len() == 3).await?;
    node.proxy.remove(hold);
    for (pull, image) in pulls.into_iter().zip(&images) {
        let reference = pull.await??;
        assert_eq!(reference, node.reference(image));
    }

    let records = node.proxy.records();
    assert_eq!(records.max_concurrent_repos(), 3);
    for image in &images {
        assert_eq!(records.fetches(&image.layers[0]), 1.0, "{:?}", records.gets(&image.layers[0].digest));
        assert_eq!(records.full_fetches(&image.layers[0]), 1);
        let found = cri.image_status(&node.name(image)).await?.context("the image is not there")?;
        // CRI-O omits the algorithm.
        let id = image.config.0.as_str();
        assert_eq!(found.id, if kind == Kind::Crio { id.trim_start_matches("sha256:") } else { id });
    }
    let id = cri.image_status(&node.name(&images[0])).await?.context("the image is not there")?.id;
    cri.remove(&id).await?;
    ensure!(cri.image_status(&node.name(&images[0])).await?.is_none(), "the image was removed");
    assert_eq!(cri.list_images().await?.len(), 2);
    Ok(())
}

async fn the_runtime_does_not_limit_pulls(kind: Kind) -> Result<()> {
    // Its default of three downloads at a time is for the whole daemon in containerd 2.
    let options = Options { max_concurrent_downloads: 50, ..Options::default() };
    let node = Node::start_with(kind, Access::Anonymous, &options).await?;
    let images = node.push_many("many", 30, TINY).await?;
    let cri = node.runtime.cri().await?;
    let hold = node.proxy.rule(Match::layers(), Fault::Hang);
    let pulls: Vec<_> = images
        .iter()
        .map(|image| {
            let (cri, name) = (cri.clone(), node.name(image));
            tokio::spawn(async move { cri.pull_image(&name).await })
        })
        .collect();
    until("thirty pulls run together", || node.proxy.records().active_repos().len() == 30).await?;
    node.proxy.remove(hold);
    for pull in pulls {
        pull.await??;
    }
    if kind == Kind::V2 {
        let log = node.runtime.log()?;
        ensure!(!log.contains("use_local_image_pull"), "containerd left the transfer service:\n{log}");
    }
    Ok(())
}

async fn a_killed_runtime_resumes_with_a_range(kind: Kind) -> Result<()> {
    let mut node = Node::start(kind).await?;
    let image = ImageSpec::single("big", LARGE).push(&node.registry).await?;
    let name = node.name(&image);
    let layer = &image.layers[0];
    let hold = node.proxy.rule(Match::layers(), Fault::StallAfter(5 << 20));
    let cri = node.runtime.cri().await?;
    let pull = tokio::spawn({
        let name = name.clone();
        async move { cri.pull_image(&name).await }
    });
    until("5 MiB are sent", || node.proxy.records().bytes_sent(&layer.digest) == 5 << 20).await?;
    // The proxy has sent it; give the runtime time to write it.
    until("the runtime has written 4 MiB", || node.runtime.ingested() >= 4 << 20).await?;
    node.runtime.kill9()?;
    failed(pull.await?, "the runtime is dead")?;
    until("the proxy has seen the runtime go", || node.proxy.records().active_repos().is_empty()).await?;
    node.proxy.remove(hold);

    node.runtime.start_again().await?;
    node.runtime.cri().await?.pull_image(&name).await?;
    let gets = node.proxy.records().gets(&layer.digest);
    assert_eq!(gets.len(), 2, "{gets:?}");
    assert_eq!(gets[0].outcome, Outcome::Aborted);
    assert_eq!(gets[1].outcome, Outcome::Complete);
    let from = gets[1].range_start.context("the second GET has no Range")?;
    ensure!(from >= 4 << 20, "the second GET begins at {from}");
    assert_eq!(gets[1].status, Some(206));
    assert_eq!(gets[1].bytes, layer.size - from);
    ensure!(node.proxy.records().fetches(layer) < 1.2);
    assert_eq!(node.proxy.records().full_fetches(layer), 0);
    Ok(())
}

async fn faults_reach_the_runtime(kind: Kind) -> Result<()> {
    let node = Node::start(kind).await?;
    let image = ImageSpec::single("faulty", LARGE / 3).push(&node.registry).await?;
    let name = node.name(&image);
    let cri = node.runtime.cri().await?;

    let refusal = node.proxy.rule(Match::manifests(), Fault::status(500));
    let error = failed(cri.pull_image(&name).await, "the registry answers 500")?;
    ensure!(error.message().contains("500"), "{error}");
    node.proxy.remove(refusal);

    node.proxy.rule_times(Match::layers(), Fault::ResetAfter(1 << 20), 1);
    // What a runtime makes of a broken connection is not tested here; the second pull succeeds.
    if cri.pull_image(&name).await.is_err() {
        cri.pull_image(&name).await?;
    }
    let gets = node.proxy.records().gets(&image.layers[0].digest);
    ensure!(gets.len() >= 2, "{gets:?}");
    assert_eq!(gets[0].outcome, Outcome::Broken);
    assert_eq!(gets[0].bytes, 1 << 20);
    Ok(())
}

async fn a_registry_distinguishes_its_users(kind: Kind) -> Result<()> {
    let node = Node::start_with(kind, Access::Users, &Options::default()).await?;
    let image = ImageSpec::single("secret", TINY).push(&node.registry).await?;
    let name = node.name(&image);
    let cri = node.runtime.cri().await?;
    failed(cri.pull_image(&name).await, "it came without credentials")?;
    let wrong = Pull::new(&name).credentials(ALICE.name, BOB.password);
    failed(cri.pull(&wrong).await, "the password is wrong")?;
    cri.pull(&Pull::new(&name).user(&ALICE)).await?;
    cri.pull(&Pull::new(&name).user(&BOB).pod("web", "1-2-3")).await?;
    let used: Vec<_> = node.proxy.records().all().into_iter().filter_map(|seen| seen.authorization).collect();
    ensure!(used.iter().any(|header| header == ALICE.basic) && used.iter().any(|header| header == BOB.basic));
    Ok(())
}

async fn a_mirror_replaces_a_registry(kind: Kind) -> Result<()> {
    let scratch = Scratch::new()?;
    let registry = Registry::start(&scratch, Access::Anonymous).await?;
    let mirrors = BTreeMap::from([("registry.example".to_owned(), registry.address().to_owned())]);
    let options = Options { mirrors, ..Options::default() };
    let containerd = keelson_harness::containerd::Containerd::start(&scratch, kind, &options).await?;
    let image = ImageSpec::single("app", TINY).push(&registry).await?;
    containerd.cri().await?.pull_image(&image.at("registry.example")).await?;
    Ok(())
}

async fn pods_run_and_leave_nothing(kind: Kind) -> Result<()> {
    let scratch = Scratch::new()?;
    let path = scratch.path().to_owned();
    let registry = Registry::start(&scratch, Access::Anonymous).await?;
    let program = peers::cri_driver()?;
    let image = ImageSpec::program("driver", &program, &["pause"]).push(&registry).await?;
    let name = image.at(registry.address());
    let options = Options { sandbox_image: Some(name.clone()), ..Options::default() };
    let containerd = keelson_harness::containerd::Containerd::start(&scratch, kind, &options).await?;
    let driver = Driver::new(&containerd.endpoint())?;

    driver.run(&["pull", "--pod", "default/driver/uid-1", &name]).await?.success()?;
    let ids = driver.run(&["run", &name, "/program", "pause"]).await?.success()?;
    let [pod, container] = ["pod", "container"].map(|key| ids[key].as_str().unwrap_or_default());
    ensure!(!pod.is_empty() && !container.is_empty(), "no ids: {ids}");
    let result =
        driver.run(&["exec-sync", container, "/program", "print", "out", "err", "7"]).await?.success()?;
    assert_eq!(result, serde_json::json!({ "stdout": "out", "stderr": "err", "exitCode": 7 }));
    let late =
        driver.run(&["exec-sync", "--exec-timeout", "1s", container, "/program", "sleep", "1h"]).await?;
    if kind == Kind::Crio {
        // It answers with a separate exit code.
        assert_eq!(late.success()?["stderr"], "command timed out");
    } else {
        assert_eq!(late.failure()?.code, "DeadlineExceeded");
    }
    let missing = driver.run(&["container-status", "nothing"]).await?.failure()?;
    assert_eq!((missing.code.as_str(), missing.number), ("NotFound", 5), "{}", missing.text);

    // Neither stopped nor removed: shim (CRI-O's is conmon), container and mounts are left to the harness.
    let shims = shims_of(&path);
    ensure!(!shims.is_empty() && !mounts_below(&path).is_empty(), "the pod has a shim and mounts");
    let root = std::path::Path::new("/sys/fs/cgroup");
    ensure!(!cgroups_of(root, container).is_empty(), "the container has cgroups");
    drop(containerd);
    drop(registry);
    drop(scratch);
    ensure!(!path.exists(), "{} is still there", path.display());
    assert_eq!(mounts_below(&path), Vec::<std::path::PathBuf>::new());
    for shim in shims {
        ensure!(!runs(shim), "the shim {shim} still runs");
    }
    for id in [pod, container] {
        let cgroups = cgroups_of(root, id);
        ensure!(cgroups.is_empty(), "cgroups are left: {cgroups:?}");
    }
    Ok(())
}

/// Cgroups with this ID in their names.
fn cgroups_of(folder: &std::path::Path, id: &str) -> Vec<std::path::PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            found.extend(cgroups_of(&entry.path(), id));
            found.extend(entry.file_name().to_string_lossy().contains(id).then(|| entry.path()));
        }
    }
    found
}

fn shims_of(folder: &std::path::Path) -> Vec<u32> {
    let all = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    all.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .filter(|pid: &u32| {
            let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            let line = String::from_utf8_lossy(&line);
            ["containerd-shim", "conmon"].iter().any(|shim| line.contains(shim))
                && line.contains(&*folder.to_string_lossy())
        })
        .collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_registry_proxy_applies_its_rules() -> Result<()> {
    let scratch = Scratch::new()?;
    let registry = Registry::start(&scratch, Access::Anonymous).await?;
    let proxy = RegistryProxy::start(registry.address()).await?;
    let image = ImageSpec::new("app", &[LARGE / 9, TINY]).push(&registry).await?;
    let layer = &image.layers[0];
    let url = format!("http://{}/v2/app/blobs/{}", proxy.address(), layer.digest);
    let manifest = format!("http://{}/v2/app/manifests/v1", proxy.address());
    let records = proxy.records();

    // The proxy learns from the manifest which blobs are layers.
    let accept = [("accept", "application/vnd.oci.image.manifest.v1+json")];
    http(Method::GET, &manifest, &accept, Bytes::new()).await?.success()?;
    assert_eq!(http_get(&url).await?.success()?.body.len() as u64, layer.size);
    assert_eq!(records.full_fetches(layer), 1);
    assert_eq!(http(Method::HEAD, &url, &[], Bytes::new()).await?.status, StatusCode::OK);
    assert!(records.all().iter().all(|seen| seen.outcome == Outcome::Complete), "{:?}", records.all());

    let range = [("range", "bytes=1000-")];
    let part = http(Method::GET, &url, &range, Bytes::new()).await?;
    assert_eq!((part.status, part.body.len() as u64), (StatusCode::PARTIAL_CONTENT, layer.size - 1000));
    let ignore = proxy.rule(Match::digest(&layer.digest), Fault::IgnoreRange);
    let whole = http(Method::GET, &url, &range, Bytes::new()).await?;
    assert_eq!((whole.status, whole.body.len() as u64), (StatusCode::OK, layer.size));
    proxy.remove(ignore);

    proxy.rule_times(Match::any().repo("app"), Fault::Status { code: 429, retry_after: Some(7) }, 1);
    let busy = http_get(&url).await?;
    assert_eq!((busy.status, &busy.headers["retry-after"]), (StatusCode::TOO_MANY_REQUESTS, &"7".parse()?));

    proxy.rule_times(Match::layers(), Fault::ResetAfter(500), 1);
    http_get(&url).await.expect_err("the connection breaks");
    let last = records.all().pop().context("nothing was recorded")?;
    assert_eq!((last.outcome, last.bytes), (Outcome::Broken, 500));

    for fault in [Fault::Hang, Fault::StallAfter(500)] {
        let hold = proxy.rule(Match::layers(), fault);
        let mark = records.count();
        let get = tokio::spawn({
            let url = url.clone();
            async move { http_get(&url).await }
        });
        let expected = if fault == Fault::Hang { 0 } else { 500 };
        until("the request is held", || {
            records.since(mark).first().is_some_and(|seen| seen.bytes == expected)
        })
        .await?;
        assert_eq!(records.active_repos().len(), 1);
        assert!(!get.is_finished());
        proxy.remove(hold);
        assert_eq!(get.await??.body.len() as u64, layer.size);
    }

    // The rate is an upper bound however slow the machine is.
    proxy.throttle(Some(layer.size * 2));
    let started = Instant::now();
    http_get(&url).await?.success()?;
    assert!(started.elapsed() >= Duration::from_millis(490), "{:?}", started.elapsed());
    proxy.throttle(None);

    // A disconnected client is detected, though nothing is being sent to it.
    let hold = proxy.rule(Match::layers(), Fault::StallAfter(500));
    let gone = tokio::time::timeout(Duration::from_millis(300), http_get(&url)).await;
    assert!(gone.is_err());
    until("the proxy sees it go", || records.active_repos().is_empty()).await?;
    assert_eq!(records.all().pop().map(|seen| seen.outcome), Some(Outcome::Aborted));
    proxy.remove(hold);
    Ok(())
}
