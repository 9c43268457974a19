//! The commands as users run them, with the manifests that are shipped as samples.

use crate::common::{
    LONG, TestEnv, ensure_contains, eventually_slow, interrupt, of_namespace, plain, put_samples,
};
use anyhow::{Context as _, Result, bail, ensure};
use keelson_harness::command::CommandOutput;
use serde_json::{Value, json};
use std::process::Stdio;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, BufReader, Lines};
use tokio::process::{Child, ChildStdout, Command};

const TABLE: &str = "\
SERVICE          TYPE          CLUSTER-IPS            PORTS                          ENDPOINTS
default/shop     ClusterIP     10.96.10.1             http 80/TCP, metrics 9090/TCP  2 ready, 1 selected
edge/gateway     LoadBalancer  10.96.20.1             https 443:30443/TCP            1 ready, 1 selected
kube-system/dns  ClusterIP     10.96.0.10,fd00:96::a  dns 53/UDP, dns-tcp 53/TCP     3 ready, 2 selected
";

async fn samples() -> Result<TestEnv> {
    let mut env = TestEnv::new()?;
    put_samples(&env.manifests)?;
    env.agent.start_live().await?;
    env.wait_for_rev(1).await?;
    Ok(env)
}

/// The last line of standard error, which tells how to resume.
fn resume(instance_id: u64, rev: u64) -> String {
    format!("keelson: to resume from this revision: --instance-id {instance_id} --rev {rev}\n")
}

pub(crate) struct Running {
    pub(crate) child: Child,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Running {
    fn start(env: &TestEnv, args: &[&str]) -> Result<Self> {
        let mut child = Command::new(env.agent.program())
            .args(args)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .with_context(|| format!("cannot run keelson {args:?}"))?;
        let lines = BufReader::new(child.stdout.take().context("it has an output")?).lines();
        Ok(Self { child, lines })
    }

    pub(crate) fn watch(env: &TestEnv, args: &[&str]) -> Result<Self> {
        let target = env.target();
        let mut all = vec!["watch", "--target", &target];
        all.extend(args);
        Self::start(env, &all)
    }

    pub(crate) async fn line(&mut self) -> Result<String> {
        let line = tokio::time::timeout(LONG, self.lines.next_line()).await.context("no line comes")??;
        line.context("it has ended")
    }

    /// Fails unless these lines come next.
    async fn expect(&mut self, expected: &[&str]) -> Result<()> {
        for expected in expected {
            let line = self.line().await?;
            ensure!(line == *expected, "{line:?} instead of {expected:?}");
        }
        Ok(())
    }

    /// Its first line of standard error that contains these parts.
    pub(crate) async fn error_line(&mut self, parts: &[&str]) -> Result<()> {
        let errors = self.child.stderr.as_mut().context("it has one")?;
        let mut text = Vec::new();
        loop {
            let byte = tokio::time::timeout(LONG, errors.read_u8()).await;
            match byte.with_context(|| format!("only {:?}", String::from_utf8_lossy(&text)))? {
                Ok(byte) => text.push(byte),
                Err(error) => bail!("{error}: {}", String::from_utf8_lossy(&text)),
            }
            let message = String::from_utf8_lossy(&text);
            if message.ends_with('\n') && parts.iter().all(|part| message.contains(part)) {
                return Ok(());
            }
        }
    }

    /// Sends SIGINT; returns its output and exit code.
    async fn interrupted(mut self) -> Result<CommandOutput> {
        let mut errors = self.child.stderr.take().context("it has one")?;
        let code = interrupt(self.child).await?;
        let mut err = String::new();
        errors.read_to_string(&mut err).await?;
        let mut out = String::new();
        while let Some(line) = self.lines.next_line().await? {
            out.push_str(&line);
            out.push('\n');
        }
        Ok(CommandOutput { out, err, code })
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn watch_once_prints_three_formats_and_how_to_resume() -> Result<()> {
    let env = samples().await?;
    let id = env.wait_for_rev(1).await?;
    let config = env.agent.config().display().to_string();
    let target = env.target();
    for args in [
        &["--target", &target][..],
        &["--target", &env.tcp],
        &["--target", &target, "--api", "next"],
        &["--config", &config],
    ] {
        let all = [&["watch", "--once"], args].concat();
        let output = env.keelson(&all).await?.success()?;
        ensure!(output.out == TABLE && output.err == resume(id, 1), "{args:?}: {output:?}");
    }

    let output = env.watch(&["--once", "-o", "json"]).await?.success()?;
    let state: Value = serde_json::from_str(&output.out)?;
    // What follows on standard error begins on a new line.
    ensure!(output.out.ends_with('\n') && output.err == resume(id, 1), "{output:?}");
    ensure!(
        state["instanceID"] == json!(id.to_string()) && state["rev"] == 1 && state["stale"] == false,
        "{state}"
    );
    ensure!(
        state["node"]["zone"] == "zone-a" && state["services"].as_array().map(Vec::len) == Some(3),
        "{state}"
    );
    let gateway = &state["services"][1];
    ensure!(
        gateway["externalTrafficToLocal"] == true && gateway["healthCheckNodePort"] == 32000,
        "{gateway}"
    );
    ensure!(gateway["sourceRanges"] == json!(["198.51.100.0/24", "203.0.113.0/24"]), "{gateway}");
    ensure!(gateway["ports"][0]["targetPort"] == 8443, "{gateway}");
    let output = env.watch(&["--once", "-o", "yaml"]).await?.success()?;
    let same: Value = serde_saphyr::from_str(&output.out)?;
    ensure!(output.out.ends_with('\n') && output.err == resume(id, 1), "{output:?}");
    ensure!(same == state, "YAML: {same}\nJSON: {state}");

    let output = env.watch(&["--once", "default/shop"]).await?.success()?;
    ensure_contains(
        &output.out,
        &["default/shop  ClusterIP", "10.244.1.13  8080,9090  serving, terminating  yes    -"],
    )?;
    let output = env.watch(&["--once", "-n", "edge", "-o", "json"]).await?.success()?;
    let some: Value = serde_json::from_str(&output.out)?;
    ensure!(some["services"] == json!([gateway]), "{some}");
    let output = env.watch(&["--once", "default/nobody"]).await?;
    ensure!(output.code == Some(1) && output.out.is_empty(), "{output:?}");
    ensure_contains(&output.err, &["Service default/nobody does not exist or has no cluster IP"])?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn watch_prints_changes_and_resumes_at_its_revision() -> Result<()> {
    let env = samples().await?;
    let id = env.wait_for_rev(1).await?;
    let mut watch = Running::watch(&env, &[])?;
    watch
        .expect(&[
            "* node node  zone zone-a  192.0.2.10",
            "+ default/shop  ClusterIP  10.96.10.1  http 80/TCP, metrics 9090/TCP  2 ready, 1 selected",
            "+ edge/gateway  LoadBalancer  10.96.20.1  https 443:30443/TCP  1 ready, 1 selected",
            "+ kube-system/dns  ClusterIP  10.96.0.10,fd00:96::a  dns 53/UDP, dns-tcp 53/TCP  3 ready, 2 selected",
        ])
        .await?;
    env.manifests.put("web.json", &plain("web", "10.96.0.1", &["10.1.0.1"]))?;
    watch.expect(&["+ ns/web  ClusterIP  10.96.0.1  http 80/TCP  1 ready, 1 selected"]).await?;
    env.manifests.put("web.json", &plain("web", "10.96.0.1", &[]))?;
    watch.expect(&["~ ns/web  ClusterIP  10.96.0.1  http 80/TCP  0 ready, 0 selected"]).await?;
    let output = watch.interrupted().await?;
    ensure!(output.code == Some(0) && output.err == resume(id, 3), "{output:?}");

    // Both print only the changes since then, in every format, with both APIs.
    env.manifests.remove("gateway.yaml")?;
    env.wait_for_rev(4).await?;
    env.manifests.put("web.json", &plain("web", "10.96.0.1", &["10.1.0.1", "10.1.0.2"]))?;
    env.wait_for_rev(5).await?;
    let args: Vec<_> =
        output.err.trim().split_once("revision: ").context("no arguments")?.1.split(' ').collect();
    let changed = "~ ns/web  ClusterIP  10.96.0.1  http 80/TCP  2 ready, 2 selected";
    let mut watch = Running::watch(&env, &args)?;
    let mut lines = [watch.line().await?, watch.line().await?];
    lines.sort();
    ensure!(lines == ["- edge/gateway", changed], "{lines:?}");
    let output = watch.interrupted().await?;
    ensure!(output.code == Some(0) && output.err == resume(id, 5) && output.out.is_empty(), "{output:?}");

    let mut watch = Running::watch(&env, &[&args[..], &["-o", "json"]].concat())?;
    let mut changes = Vec::new();
    loop {
        let change: Value = serde_json::from_str(&watch.line().await?)?;
        changes.push(change);
        if changes.last().is_some_and(|change| change["change"] == "sync") {
            break;
        }
    }
    let kinds: Vec<_> = changes.iter().filter_map(|change| change["change"].as_str()).collect();
    ensure!(kinds.len() == 3 && kinds.contains(&"set") && kinds.contains(&"delete"), "{changes:?}");
    ensure!(changes[2]["rev"] == 5 && changes[2]["instanceID"] == json!(id.to_string()), "{changes:?}");
    ensure!(watch.interrupted().await?.code == Some(0));

    let mut watch = Running::watch(&env, &[&args[..], &["-o", "yaml"]].concat())?;
    let mut text = String::new();
    while !text.contains("change: sync") || !text.contains("stale: ") {
        text.push_str(&watch.line().await?);
        text.push('\n');
    }
    let documents: Vec<_> = text.split("---\n").filter(|part| !part.is_empty()).collect();
    let documents: Vec<Value> =
        documents.into_iter().map(serde_saphyr::from_str).collect::<Result<_, _>>()?;
    ensure!(documents == changes, "YAML: {documents:?}\nJSON: {changes:?}");
    drop(watch);

    // With --once it waits for the next state.
    let now = ["--once", "--instance-id", &id.to_string(), "--rev", "5"];
    let mut once = Running::watch(&env, &now)?;
    env.wait_for_watchers(1, 5).await?;
    env.manifests.put("web.json", &plain("web", "10.96.0.1", &["10.1.0.9"]))?;
    once.line().await?;
    let ended = tokio::time::timeout(LONG, once.child.wait()).await.context("it does not end")??;
    ensure!(ended.success(), "{ended}");
    let mut err = String::new();
    once.child.stderr.take().context("it has one")?.read_to_string(&mut err).await?;
    ensure!(err == resume(id, 6), "{err}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn watch_exits_with_its_reader_and_waits_for_the_agent() -> Result<()> {
    let mut env = TestEnv::new()?;
    put_samples(&env.manifests)?;
    // Before the agent starts: it reports that, and waits.
    let mut watch = Running::watch(&env, &[])?;
    watch
        .error_line(&[
            "cannot connect to unix:///",
            "the socket does not exist; check that the agent is running",
        ])
        .await?;
    let mut once = Running::watch(&env, &["--once"])?;
    once.error_line(&["the socket does not exist"]).await?;
    let mut interrupted = Running::watch(&env, &["--once"])?;
    interrupted.error_line(&["the socket does not exist"]).await?;
    let output = interrupted.interrupted().await?;
    ensure!(output.code == Some(1) && output.out.is_empty(), "{output:?}");
    ensure_contains(&output.err, &["interrupted before a state was received"])?;
    env.agent.start_live().await?;
    for of in [&mut watch, &mut once] {
        of.line().await?;
    }
    let ended = tokio::time::timeout(LONG, once.child.wait()).await.context("it does not end")??;
    ensure!(ended.success(), "{ended}");
    // `keelson watch | head -1`
    let Running { mut child, lines } = watch;
    drop(lines);
    env.manifests.put("web.json", &plain("web", "10.96.0.1", &[]))?;
    let ended = tokio::time::timeout(LONG, child.wait()).await.context("it continues without a reader")??;
    ensure!(ended.success(), "{ended}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wrong_target_is_distinguished_from_an_absent_one() -> Result<()> {
    let env = samples().await?;
    let nobody = format!("tcp://127.0.0.1:{}", keelson_harness::util::free_port()?);
    let page = env.agent.url().replace("http", "tcp");
    let debug = format!("unix://{}", env.agent.debug_socket().display());
    for (target, message) in [
        ("unix:///nowhere/at.sock", "the socket does not exist"),
        (&nobody, "no process is listening"),
        (&debug, "check the target"),
        (&page, "keelson: "),
    ] {
        for once in [&["--once"][..], &[]] {
            let all = [&["watch", "--target", target], once].concat();
            let mut watch = Running::start(&env, &all)?;
            let mut first = Vec::new();
            let errors = watch.child.stderr.as_mut().context("it has one")?;
            loop {
                let byte =
                    tokio::time::timeout(LONG, errors.read_u8()).await.context("it prints nothing")??;
                first.push(byte);
                if byte == b'\n' {
                    break;
                }
            }
            let first = String::from_utf8_lossy(&first).into_owned();
            eprintln!("{target}: {first}");
            ensure_contains(&first, &[message])?;
            let output = watch.interrupted().await?;
            ensure!(
                output.code == Some(i32::from(!once.is_empty())) && output.out.is_empty(),
                "{all:?}: {output:?}"
            );
        }
    }
    for (args, message) in [
        (&["--target", "localhost:80"][..], "write unix:///PATH or tcp://HOST:PORT"),
        (&["--rev", "5"], "--instance-id"),
        (&["--instance-id=-1", "--rev", "5"], "--instance-id"),
        (&["shop"], "NAMESPACE/NAME"),
        (&["default/shop", "-n", "default"], "cannot be used with"),
    ] {
        let all = [&["watch"], args].concat();
        let output = env.keelson(&all).await?;
        ensure!(output.code == Some(2) && output.out.is_empty(), "{args:?}: {output:?}");
        ensure_contains(&output.err, &[message])?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn endpoints_lists_services_and_clients() -> Result<()> {
    let env = samples().await?;
    let id = env.wait_for_rev(1).await?;
    let output = env.endpoints(&[]).await?.success()?;
    ensure!(output.err.is_empty(), "{output:?}");
    ensure_contains(
        &output.out,
        &[
            "State:    synced",
            &format!("Source:   files, {}", env.manifests.path().display()),
            "Objects:  services 3, endpointslices 4, servicecidrs 1, nodes 1",
            "Served:   3 Services, 7 endpoints",
            "Revision: 1, published ",
            &format!("instance {id}"),
            "Node:     node, zone zone-a, 192.0.2.10, pods 10.244.1.0/24, Services 10.96.0.0/16",
            &format!("Listens:  {}, {}", env.target(), env.tcp),
            "Watchers: none",
            concat!(
                "edge         gateway  LoadBalancer  10.96.20.1              https 443:30443/TCP            ",
                "1      0      1         1"
            ),
        ],
    )?;
    let state = env.state().await?;
    ensure!(state["list"].as_array().map(Vec::len) == Some(3) && state["durable"] == true, "{state}");
    let output = env.endpoints(&["-n", "edge"]).await?.success()?;
    ensure!(output.out.contains("gateway") && !output.out.contains("shop"), "{output:?}");
    let output = env.endpoints(&["-n", "nowhere"]).await?.success()?;
    ensure_contains(&output.out, &["No Services in namespace nowhere."])?;

    let output = env.endpoints(&["explain", "default/shop"]).await?.success()?;
    ensure_contains(
        &output.out,
        &[
            "Affinity:          ClientIP, 600 s",
            "anyone  10.96.10.1:80  forwarded  10.244.1.11:8080",
            "not selected: terminating, and 2 endpoints are ready",
            "its hints are [zone-b], not zone zone-a of this node",
        ],
    )?;
    let output = env.endpoints(&["explain", "shop", "-o", "json"]).await?.success()?;
    let explained: Value = serde_json::from_str(&output.out)?;
    ensure!(explained["served"] == true && explained["name"] == "shop", "{explained}");
    let output = env.endpoints(&["explain", "default/nobody"]).await?;
    ensure!(output.code == Some(1) && output.out.is_empty(), "{output:?}");
    ensure_contains(&output.err, &["default/nobody"])?;
    let output = env.endpoints(&["explain", "a/b/c"]).await?;
    ensure!(output.code == Some(2) && output.out.is_empty(), "{output:?}");
    // A Service without frontends is explained too.
    let service = json!({"apiVersion": "v1", "kind": "Service", "metadata": {"name": "quiet"},
        "spec": {"clusterIP": "None", "ports": [{"port": 80}]}});
    env.manifests.put("quiet.json", &[of_namespace(service)])?;
    eventually_slow("the headless Service is explained", || async {
        let output = env.endpoints(&["explain", "ns/quiet"]).await?.success()?;
        ensure_contains(&output.out, &["Served:            NO", "it is headless"])
    })
    .await?;

    let mut watch = Running::watch(&env, &[])?;
    watch.line().await?;
    let pid = watch.child.id().context("it has ended")?;
    eventually_slow("the one who follows is named", || async {
        let output = env.endpoints(&["watchers"]).await?.success()?;
        ensure_contains(&output.out, &[&format!("pid {pid} (keelson)"), "Watch"])
    })
    .await?;
    let output = env.keelson(&["endpoints", "--socket", "unix:///nowhere/at.sock"]).await?;
    ensure!(output.code == Some(1) && output.out.is_empty(), "{output:?}");
    ensure_contains(&output.err, &["cannot connect to the agent at unix:///nowhere/at.sock"])?;
    Ok(())
}
