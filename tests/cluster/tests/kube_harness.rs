//! The faults that suites put between a client and the API server, without an agent. That clusters, nodes and kubelets
//! work is shown by the suites themselves.

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
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use keelson_cluster::kube::{
    ApiFault, ApiMatch, ApiProxy, Cluster, FakeClock, Identity, NODE_LEASES, client,
};
use keelson_harness::peers;
use keelson_harness::registry_proxy::Outcome;
use keelson_harness::scratch::Scratch;
use keelson_harness::util::{PATIENCE, eventually, until};
use kube::Api;
use kube::api::{ListParams, PostParams, WatchParams};
use serde_json::json;
use std::process::Stdio;
use std::time::{Duration, Instant};
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};

fn node(name: &str) -> Result<Node> {
    Ok(serde_json::from_value(json!({"metadata": {"name": name}}))?)
}

fn lease(name: &str) -> Result<Lease> {
    Ok(serde_json::from_value(json!({
        "metadata": {"name": name, "namespace": NODE_LEASES},
        "spec": {"holderIdentity": name, "leaseDurationSeconds": 40, "renewTime": MicroTime(jiff::Timestamp::now())},
    }))?)
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
async fn faults_on_the_way_to_an_api_server() -> Result<()> {
    let scratch = Scratch::new()?;
    let cluster = Cluster::start(&scratch).await?;
    the_tcp_proxy_cuts_and_repairs_connections(&scratch, &cluster).await?;
    the_api_proxy_applies_its_rules(&scratch, cluster).await
}

async fn the_api_proxy_applies_its_rules(scratch: &Scratch, mut cluster: Cluster) -> Result<()> {
    let proxy = cluster.proxy().await?;
    let mut identity = cluster.node_by_token(scratch, "node").await?;
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
    cluster.api.kill9()?;
    ensure!(nodes.get("node").await.is_err(), "no process answers");
    Ok(())
}

async fn the_tcp_proxy_cuts_and_repairs_connections(scratch: &Scratch, cluster: &Cluster) -> Result<()> {
    let proxy = cluster.tcp_proxy().await?;
    let mut identity = cluster.node(scratch, "a").await?;
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
