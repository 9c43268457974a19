//! The harness of the cluster itself, without an agent: the suites depend on it.

// The start time of each part is printed to stderr.
#![allow(clippy::print_stderr)]

use anyhow::{Context as _, Result, ensure};
use bytes::Bytes;
use futures_util::TryStreamExt as _;
use http::{Method, header};
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{ConfigMap, Node};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use keelson_cluster::kube::{
    ApiFault, ApiMatch, ApiOptions, ApiProxy, Cluster, ControllerOptions, FakeClock, Identity,
    KubeletOptions, NODE_LEASES, client, condition, refused,
};
use keelson_harness::containerd::{Containerd, Kind, Options};
use keelson_harness::images::ImageSpec;
use keelson_harness::peers;
use keelson_harness::registry::{Access, Registry};
use keelson_harness::registry_proxy::Outcome;
use keelson_harness::scratch::{Scratch, mounts_below};
use keelson_harness::util::{PATIENCE, eventually, until};
use kube::Api;
use kube::api::{DeleteParams, ListParams, PostParams, WatchParams};
use serde_json::json;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};

/// Prints how long something took; shown with `--nocapture`.
fn took(what: &str, since: Instant) {
    eprintln!("{what}: {:.1} s", since.elapsed().as_secs_f64());
}

fn node(name: &str) -> Result<Node> {
    Ok(serde_json::from_value(json!({"metadata": {"name": name}}))?)
}

fn lease(name: &str) -> Result<Lease> {
    Ok(serde_json::from_value(json!({
        "metadata": {"name": name, "namespace": NODE_LEASES},
        "spec": {"holderIdentity": name, "leaseDurationSeconds": 40, "renewTime": MicroTime(jiff::Timestamp::now())},
    }))?)
}

fn config_map(name: &str) -> Result<ConfigMap> {
    Ok(serde_json::from_value(json!({"metadata": {"name": name}}))?)
}

fn leases(client: kube::Client) -> Api<Lease> {
    Api::namespaced(client, NODE_LEASES)
}

/// A client that sends all requests over one HTTP/2 connection.
struct OneConnection {
    client: Client<HttpsConnector<HttpConnector>, Full<Bytes>>,
    server: String,
    token: String,
}

impl OneConnection {
    fn new(cluster: &Cluster, proxy: &ApiProxy, identity: &Identity) -> Result<Self> {
        let connector = HttpsConnectorBuilder::new()
            .with_tls_config(cluster.pki().client_tls()?)
            .https_only()
            .enable_http2()
            .build();
        let client = Client::builder(TokioExecutor::new()).http2_only(true).build(connector);
        let token = std::fs::read_to_string(identity.credential_file())?;
        Ok(Self { client, server: proxy.endpoint(), token })
    }

    async fn get(&self, path: &str) -> Result<http::Response<Incoming>> {
        let request = http::Request::get(format!("{}{path}", self.server))
            .header(header::AUTHORIZATION, format!("Bearer {}", self.token))
            .body(Full::default())?;
        Ok(self.client.request(request).await?)
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_writes_only_its_own_node_and_lease() -> Result<()> {
    let scratch = Scratch::new()?;
    let started = Instant::now();
    let cluster = Cluster::start(&scratch).await?;
    took("etcd and API server", started);
    let make = PostParams::default();
    let mut identities = [cluster.node(&scratch, "a").await?, cluster.node_by_token(&scratch, "node").await?];
    for (identity, own) in identities.iter_mut().zip(["a", "node"]) {
        for generation in 0..2 {
            let client = identity.client().await?;
            let nodes: Api<Node> = Api::all(client.clone());
            refused(nodes.create(&make, &node("b")?).await, 403)?;
            refused(leases(client.clone()).create(&make, &lease("b")?).await, 403)?;
            refused(leases(client.clone()).get("b").await, 403)?;
            if generation == 0 {
                nodes.create(&make, &node(own)?).await?;
                leases(client.clone()).create(&make, &lease(own)?).await?;
            }
            let mut found = leases(client.clone()).get(own).await?;
            found.spec.get_or_insert_default().renew_time = Some(MicroTime(jiff::Timestamp::now()));
            leases(client).replace(own, &make, &found).await?;
            identity.rotate().await?;
        }
        let user = format!("system:node:{own}");
        assert_eq!(identity.user(), user);
        let writes = cluster.api.audit(|event| event.user == user && event.is_write())?;
        let allowed: Vec<_> = writes
            .iter()
            .filter(|event| event.code.is_some_and(|code| code < 300))
            .map(|event| (event.verb.as_str(), event.resource.as_str(), event.name.as_str()))
            .collect();
        let expected =
            [("create", "nodes"), ("create", "leases"), ("update", "leases"), ("update", "leases")];
        assert_eq!(allowed, expected.map(|(verb, resource)| (verb, resource, own)), "{writes:#?}");
        let refusals = writes.iter().filter(|event| event.code == Some(403)).count();
        assert_eq!(refusals, 4, "{writes:#?}");
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_service_account_uses_a_rotating_token() -> Result<()> {
    let scratch = Scratch::new()?;
    let cluster = Cluster::start(&scratch).await?;
    let mut account = cluster.service_account(&scratch, "agents", "keelson").await?;
    let maps = |client| Api::<ConfigMap>::namespaced(client, "agents");
    let make = PostParams::default();
    refused(maps(account.client().await?).create(&make, &config_map("early")?).await, 403)?;
    let applied = cluster
        .admin
        .apply(
            "apiVersion: rbac.authorization.k8s.io/v1\nkind: ClusterRole\nmetadata: {name: maps}\n\
             rules: [{apiGroups: [''], resources: [configmaps], verbs: [create]}]\n---\n\
             apiVersion: rbac.authorization.k8s.io/v1\nkind: RoleBinding\n\
             metadata: {name: maps, namespace: agents}\n\
             roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: maps}\n\
             subjects: [{kind: ServiceAccount, name: keelson, namespace: agents}]\n",
        )
        .await?;
    assert_eq!(applied.len(), 2);
    // The authorizer learns of the role through a watch.
    eventually(PATIENCE, "the role is in force", || async {
        let name = format!("try-{}", jiff::Timestamp::now().as_nanosecond());
        Ok(maps(account.client().await?).create(&make, &config_map(&name)?).await?)
    })
    .await?;
    let old = std::fs::read_to_string(account.credential_file())?;
    account.rotate().await?;
    let new = std::fs::read_to_string(account.credential_file())?;
    ensure!(old != new, "the token is the same as before");
    maps(account.client().await?).create(&make, &config_map("late")?).await?;
    let name = account.user().to_owned();
    let made = cluster.api.audit(|event| event.user == name && event.name == "late")?;
    assert_eq!(made.len(), 1, "{made:?}");
    assert_eq!((made[0].code, made[0].namespace.as_str()), (Some(201), "agents"));
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cluster_survives_kills_of_its_parts() -> Result<()> {
    let scratch = Scratch::new()?;
    let options = ApiOptions { audit_bodies: true, ..ApiOptions::default() };
    let mut cluster = Cluster::start_with(&scratch, &options).await?;
    let maps: Api<ConfigMap> = Api::default_namespaced(cluster.admin.client());
    let make = PostParams::default();
    let before = cluster.etcd.writes().await?;
    maps.create(&make, &config_map("one")?).await?;
    let after = cluster.etcd.writes().await?;
    ensure!(after.puts > before.puts && after.put_bytes > before.put_bytes, "{before:?}, then {after:?}");
    let written = cluster.api.audit(|event| event.is_for("create", "configmaps") && event.user == "admin")?;
    assert_eq!(written.len(), 1, "{written:?}");
    let body = written[0].body.as_ref().context("bodies were asked for")?;
    assert_eq!(body["metadata"]["name"], "one");

    let watch = cluster.admin.watch(maps.clone(), "two").await?;
    let endpoint = cluster.api.endpoint().to_owned();
    let started = Instant::now();
    cluster.api.terminate().await?;
    took("the API server's graceful end", started);
    ensure!(maps.get("one").await.is_err(), "an API server that ended answers");
    until("the watch has ended", || watch.changes().is_err()).await?;
    let started = Instant::now();
    cluster.api.start_again().await?;
    took("the API server's second start", started);
    assert_eq!(cluster.api.endpoint(), endpoint);
    there(&maps, "one").await?;
    cluster.api.kill9()?;
    cluster.etcd.kill9()?;
    cluster.etcd.start_again().await?;
    cluster.api.start_again().await?;
    there(&maps, "one").await?;

    let watch = cluster.admin.watch(maps.clone(), "two").await?;
    maps.create(&make, &config_map("two")?).await?;
    maps.delete("two", &DeleteParams::default()).await?;
    eventually(PATIENCE, "the watch has seen both", || async {
        let seen: Vec<_> = watch.changes()?.iter().map(|change| change.object.is_some()).collect();
        ensure!(seen == [true, false], "it has seen {seen:?}");
        Ok(())
    })
    .await?;

    // Compaction removes old values of a key.
    for turn in 0..200 {
        let text = format!("{turn}").repeat(1000);
        let map = json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "big"}, "data": {"a": text}});
        cluster.admin.apply(&map.to_string()).await?;
    }
    let full = cluster.etcd.db_bytes().await?;
    cluster.etcd.compact().await?;
    cluster.etcd.defragment().await?;
    let compacted = cluster.etcd.db_bytes().await?;
    ensure!(compacted < full, "{full} bytes before, {compacted} after");
    ensure!(cluster.etcd.file_bytes().await? >= compacted, "a file holds what is in use of it");

    cluster.api.pause().await?;
    let get = maps.get("one");
    let mut get = std::pin::pin!(get);
    let early = tokio::time::timeout(Duration::from_millis(500), &mut get).await;
    ensure!(early.is_err(), "a server that is stopped answers {early:?}");
    cluster.api.resume()?;
    get.await?;
    Ok(())
}

/// Waits for an object: the first request after a restart may use a connection to the old server.
async fn there(maps: &Api<ConfigMap>, name: &str) -> Result<()> {
    eventually(PATIENCE, "the object is there", || async {
        let get = tokio::time::timeout(Duration::from_secs(5), maps.get(name)).await;
        Ok(get.context("no answer")?.map(drop)?)
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn the_controllers_mark_a_silent_node() -> Result<()> {
    let scratch = Scratch::new()?;
    let cluster = Cluster::start(&scratch).await?;
    let started = Instant::now();
    let grace = Duration::from_secs(3);
    let options = ControllerOptions {
        node_startup_grace_period: PATIENCE,
        ..ControllerOptions::with_grace_period(grace)
    };
    let mut controllers = cluster.controllers(&scratch, &options).await?;
    took("the controller manager", started);
    let identity = cluster.node(&scratch, "silent").await?;
    let client = identity.client().await?;
    let nodes: Api<Node> = Api::all(client.clone());
    let started = Instant::now();
    let mut made = nodes.create(&PostParams::default(), &node("silent")?).await?;
    let now = jiff::Timestamp::now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string();
    made.status = Some(serde_json::from_value(json!({"conditions": [{
        "type": "Ready", "status": "True", "reason": "Test", "message": "",
        "lastHeartbeatTime": now, "lastTransitionTime": now,
    }]}))?);
    let posted = nodes.replace_status("silent", &PostParams::default(), &made).await?;
    assert_eq!(condition(&posted, "Ready").context("it was posted")?.status, "True");
    let unknown = cluster.admin.await_condition("silent", "Ready", "Unknown").await?;
    took("Unknown after a grace period of 3 s", started);
    ensure!(started.elapsed() >= grace, "marked before the grace period was over");
    assert_eq!(unknown.reason.as_deref(), Some("NodeStatusUnknown"));
    controllers.terminate().await?;
    controllers.start_again().await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_kubelet_registers_and_its_node_gets_ready() -> Result<()> {
    let before = Path::new("/var/lib/kubelet").exists();
    for kind in Kind::ALL {
        let scratch = Scratch::new()?;
        let cluster = Cluster::start(&scratch).await?;
        let registry = Registry::start(&scratch, Access::Anonymous).await?;
        let program = peers::cri_driver()?;
        let image = ImageSpec::program("app", &program, &["pause"]).push(registry.address(), None).await?;
        let image = image.at(registry.address());
        let options = Options { network: true, sandbox_image: Some(image.clone()), ..Options::default() };
        let containerd = Containerd::start(&scratch, kind, &options).await?;
        containerd.configure_registry(registry.address(), registry.address())?;
        let started = Instant::now();
        let options = KubeletOptions::default().set("nodeStatusUpdateFrequency", "1s");
        let mut kubelet = cluster.kubelet(&scratch, "worker", &containerd, &options).await?;
        took("the kubelet", started);
        cluster.admin.await_condition("worker", "Ready", "True").await?;
        took("the kubelet's node being ready", started);
        let lease = eventually(PATIENCE, "the lease is there", || async {
            cluster.admin.lease("worker").await?.context("no lease")
        })
        .await?;
        assert_eq!(lease.spec.and_then(|spec| spec.holder_identity).as_deref(), Some("worker"));
        let who = cluster.api.audit(|event| event.is_for("create", "nodes"))?;
        ensure!(who.iter().all(|event| event.user == "system:node:worker"), "{who:?}");

        // What it mounts for a pod must be visible outside of it.
        let pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "app"}, "spec": {
            "hostNetwork": true, "automountServiceAccountToken": false, "nodeName": "worker",
            "volumes": [{"name": "memory", "emptyDir": {"medium": "Memory"}}],
            "containers": [{"name": "app", "image": image,
                "volumeMounts": [{"name": "memory", "mountPath": "/memory"}]}],
        }});
        cluster.admin.apply(&pod.to_string()).await?;
        let pods = cluster.admin.pods("default");
        eventually(PATIENCE, "the pod runs", || async {
            let status = pods.get("app").await?.status.context("no status")?;
            ensure!(status.phase.as_deref() == Some("Running"), "{status:?}");
            Ok(())
        })
        .await?;
        took("its pod running", started);
        let memory = |mount: &PathBuf| mount.ends_with("volumes/kubernetes.io~empty-dir/memory");
        ensure!(mounts_below(kubelet.root()).iter().any(memory), "the pod's volume is mounted nowhere");

        kubelet.kill9()?;
        kubelet.start_again().await?;
        kubelet.terminate().await?;
        ensure!(!Path::new("/var/lib/kubelet").exists() || before, "the kubelet has left its folder");
        drop(containerd);
        drop(registry);
        drop(cluster);
        let path = scratch.path().to_owned();
        drop(scratch);
        assert_eq!(mounts_below(&path), Vec::<PathBuf>::new());
        ensure!(!path.exists(), "something is left of {}", path.display());
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn the_api_proxy_applies_its_rules() -> Result<()> {
    let scratch = Scratch::new()?;
    let cluster = Cluster::start(&scratch).await?;
    let proxy = cluster.proxy().await?;
    let mut identity = cluster.node_by_token(&scratch, "node").await?;
    let way = client(&identity.kubeconfig_via(&proxy.endpoint())?).await?;
    let make = PostParams::default();
    let nodes: Api<Node> = Api::all(way.clone());
    nodes.create(&make, &node("node")?).await?;
    let first = &proxy.seen(|seen| seen.method == Method::POST)[..];
    assert_eq!(first.len(), 1);
    let first = &first[0];
    assert_eq!(
        (first.path.as_str(), first.status, first.outcome),
        ("/api/v1/nodes", Some(201), Outcome::Complete)
    );
    ensure!(first.forwarded && first.response_bytes > 0 && !first.body.is_empty(), "{first:?}");
    assert_eq!(first.content_type, "application/json");

    let rule = proxy.rule_times(ApiMatch::path("/nodes/node"), ApiFault::retry_after(429, 7), 1);
    let request = || http::Request::get("/api/v1/nodes/node").body(kube::client::Body::empty());
    let answer = way.send(request()?).await?;
    assert_eq!(answer.status(), 429);
    assert_eq!(answer.headers()["retry-after"], "7");
    nodes.get("node").await?;
    assert_eq!(proxy.hits(rule), 1);

    // A watch that streams, and requests beside it.
    let only = WatchParams::default().fields("metadata.name=node");
    let mut changed = nodes.get("node").await?;
    let version = changed.metadata.resource_version.clone().context("an object has a version")?;
    let mut watch = Box::pin(nodes.watch(&only, &version).await?);
    changed.metadata.labels.get_or_insert_default().insert("a".to_owned(), "b".to_owned());
    nodes.replace("node", &make, &changed).await?;
    watch.try_next().await?.context("the change is seen")?;
    assert_eq!(proxy.seen(|seen| seen.is_watch() && seen.outcome == Outcome::Open).len(), 1);

    // A lost response, though the write was made.
    proxy.rule_times(ApiMatch::path("/leases").method(Method::POST), ApiFault::LoseAnswer, 1);
    let all = leases(way.clone());
    let own = lease("node")?;
    let lost = tokio::time::timeout(PATIENCE, async {
        tokio::select! {
            answer = all.create(&make, &own) => answer.map(drop).context("was answered"),
            there = eventually(PATIENCE, "the lease is there", || async {
                cluster.admin.lease("node").await?.context("no lease")
            }) => there.map(drop),
        }
    });
    lost.await??;
    until("the proxy has seen the client go", || {
        proxy.seen(|seen| seen.path.ends_with("/leases") && seen.outcome == Outcome::Aborted).len() == 1
    })
    .await?;

    let hold = proxy.rule(ApiMatch::path("/leases/node"), ApiFault::Hold);
    let held = tokio::spawn({
        let all = all.clone();
        async move { all.get("node").await }
    });
    until("a request is held", || proxy.hits(hold) == 1).await?;
    ensure!(!held.is_finished(), "a request that is held was answered");
    proxy.remove(hold);
    held.await??;
    let delay = Duration::from_millis(300);
    proxy.rule_times(ApiMatch::path("/leases/node"), ApiFault::Delay(delay), 1);
    let started = Instant::now();
    all.get("node").await?;
    ensure!(started.elapsed() >= delay, "answered too early");
    proxy.rule_times(ApiMatch::path("/leases/node"), ApiFault::Swallow, 1);
    let swallowed = tokio::time::timeout(Duration::from_millis(300), all.get("node")).await;
    ensure!(swallowed.is_err(), "a request that was swallowed was answered");
    let gets = proxy.seen(|seen| seen.path.ends_with("/leases/node"));
    assert_eq!(gets.iter().filter(|seen| seen.forwarded).count(), 2, "{gets:?}");

    // With HTTP/2, closing a connection ends everything on it.
    let one = OneConnection::new(&cluster, &proxy, &identity)?;
    let mut events = one.get("/api/v1/nodes?watch=true").await?.into_body();
    let own = proxy.seen(|seen| seen.http2 && seen.is_watch());
    assert_eq!(own.len(), 1, "{own:?}");
    let before = proxy.connections();
    proxy.rule_times(ApiMatch::path("/leases/node"), ApiFault::Close, 1);
    ensure!(one.get("/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases/node").await.is_err());
    while let Some(Ok(_)) = events.frame().await {}
    assert_eq!(one.get("/api/v1/nodes/node").await?.status(), 200);
    assert_eq!(proxy.connections(), before + 1);
    proxy.close_all();
    while watch.try_next().await.is_ok_and(|event| event.is_some()) {}
    let open = || proxy.seen(|seen| seen.outcome == Outcome::Open);
    until("nothing is open", || open().is_empty()).await?;

    // Nothing behind it: the connection is broken.
    let mut cluster = cluster;
    cluster.api.kill9()?;
    ensure!(nodes.get("node").await.is_err(), "no process answers");
    cluster.api.start_again().await?;
    nodes.get("node").await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn the_tcp_proxy_cuts_and_repairs_connections() -> Result<()> {
    let scratch = Scratch::new()?;
    let cluster = Cluster::start(&scratch).await?;
    let proxy = cluster.tcp_proxy().await?;
    let mut identity = cluster.node(&scratch, "a").await?;
    let way = client(&identity.kubeconfig_via(&proxy.endpoint())?).await?;
    let nodes: Api<Node> = Api::all(way);
    nodes.create(&PostParams::default(), &node("a")?).await?;
    ensure!(proxy.sent() > 0 && proxy.received() > proxy.sent() / 10, "nothing was counted");
    assert_eq!((proxy.accepted(), proxy.open()), (1, 1));

    proxy.cut();
    let (sent, received) = (proxy.sent(), proxy.received());
    let get = nodes.get("a");
    let mut get = std::pin::pin!(get);
    ensure!(
        tokio::time::timeout(Duration::from_millis(300), &mut get).await.is_err(),
        "answered through a cut"
    );
    assert_eq!((proxy.sent(), proxy.received()), (sent, received));
    let fresh: Api<Node> = Api::all(client(&identity.kubeconfig_via(&proxy.endpoint())?).await?);
    let fresh = tokio::spawn(async move { fresh.get("a").await });
    until("a new connection is taken", || proxy.accepted() == 2).await?;
    proxy.repair();
    get.await?;
    fresh.await??;

    proxy.cut();
    let get = tokio::spawn({
        let nodes = nodes.clone();
        async move { nodes.get("a").await }
    });
    // Repeated: it may not have been sent at first.
    until("the request has ended", || {
        proxy.reset();
        get.is_finished()
    })
    .await?;
    ensure!(get.await?.is_err(), "a connection that was reset gave an answer");
    until("no connection is open", || proxy.open() == 0).await?;
    proxy.repair();
    nodes.get("a").await?;
    let list = cluster.admin.nodes().list(&ListParams::default()).await?;
    assert_eq!(list.items.len(), 1);
    Ok(())
}

#[tokio::test]
async fn a_fake_clock_changes_while_a_program_runs() -> Result<()> {
    let scratch = Scratch::new()?;
    let clock = FakeClock::new(scratch.path())?;
    let mut program = tokio::process::Command::new(peers::system("perl", "perl-base")?)
        .args(["-e", "$| = 1; while (<>) { print time, qq(\n) }"])
        .envs(clock.env())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()?;
    let mut questions = program.stdin.take().context("no stdin")?;
    let mut answers = BufReader::new(program.stdout.take().context("no stdout")?).lines();
    for step in [0, 3600, -3600, 0] {
        clock.set(step)?;
        let before = jiff::Timestamp::now().as_second() + step;
        questions.write_all(b"now\n").await?;
        let output: i64 = answers.next_line().await?.context("no answer")?.parse()?;
        // Fractions of a second are truncated when it is read.
        let after = jiff::Timestamp::now().as_second() + step;
        ensure!((before - 1..=after + 1).contains(&output), "step {step}: {output}, not {before} to {after}");
    }
    Ok(())
}
