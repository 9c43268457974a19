//! `kubectl keelson why-service` with a live proxy: the backend nft in the network of a node, which follows a real agent of a
//! real API server. What it says is compared with what a client of the Service sees.

use crate::common::NODE_MANIFEST;
use crate::kubectl::Plugin;
use anyhow::{Context as _, Result, bail, ensure};
use keelson_cluster::kube::Cluster;
use keelson_cluster::net::plan::{SERVED, remote};
use keelson_cluster::net::{
    Family, KeelsonProxy, KeelsonProxyOptions, Namespace, Outcome, Transport, World, create_node,
};
use keelson_harness::agent::{Agent, Settings, no_runtime};
use keelson_harness::peers;
use keelson_harness::scratch::Scratch;
use keelson_harness::suite::run;
use keelson_harness::util::{PATIENCE, eventually};
use serde_json::{Value, json};
use std::io::Write as _;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

const NODE: &str = "asked-for-services";
const PORT: u16 = 80;
const ANSWERING: &str = "answering";
const LOCAL: &str = "local";
/// Until a request counts as unanswered.
const ANSWER: Duration = Duration::from_secs(3);

/// Two endpoints on another node.
fn service(name: &str, address: &str, policy: &str) -> [Value; 2] {
    let endpoint = |number| json!({"addresses": [remote(number).v4], "nodeName": "other", "conditions": {"ready": true}});
    [
        json!({"apiVersion": "v1", "kind": "Service", "metadata": {"name": name},
            "spec": {"clusterIP": address, "internalTrafficPolicy": policy, "ports": [{"port": PORT}]}}),
        json!({"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
            "metadata": {"name": name, "labels": {"kubernetes.io/service-name": name}},
            "addressType": "IPv4", "ports": [{"name": "", "port": SERVED[0], "protocol": "TCP"}],
            "endpoints": [endpoint(1), endpoint(2)]}),
    ]
}

/// A program that owns the table of the proxy in IPv4, as tables of nftables can be owned: no other program can change it. It is gone
/// with the program.
struct TableOwner(Child);

impl TableOwner {
    fn start(node: &Namespace) -> Result<Self> {
        let mut nft = Command::new(peers::system("ip", "iproute2")?)
            .args(["netns", "exec", node.name()])
            .arg(peers::system("nft", "nftables")?)
            .arg("--interactive")
            .stdin(Stdio::piped())
            .spawn()
            .context("cannot run nft")?;
        // In one transaction: the proxy repairs a table that is gone.
        let line = b"delete table ip keelson; add table ip keelson { flags owner; }\n";
        nft.stdin.as_mut().context("nft has a stdin")?.write_all(line)?;
        Ok(Self(nft))
    }
}

impl Drop for TableOwner {
    fn drop(&mut self) {
        // It has ended, or ends now.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

struct Asked {
    plugin: Plugin,
    via: String,
    world: World,
}

impl Asked {
    /// What is printed, and the exit code.
    async fn says(&self, service: &str) -> Result<(String, Option<i32>)> {
        let args = ["why-service", service, "-n", "default", "--node", NODE, &self.via];
        let output = self.plugin.run(&args).await?;
        ensure!(output.err.is_empty(), "{output:?}");
        Ok((output.out, output.code))
    }

    /// Waits until the first line begins so and the exit code is this, and returns all lines.
    async fn comes_to(&self, service: &str, begin: &str, code: i32) -> Result<String> {
        eventually(PATIENCE, begin, || async {
            let (text, exit) = self.says(service).await?;
            ensure!(text.starts_with(begin) && exit == Some(code), "exit code {exit:?} and {text}");
            Ok(text)
        })
        .await
    }

    async fn request(&self, address: &str) -> Result<Outcome> {
        let to = format!("{address}:{PORT}").parse()?;
        self.world.pod().ask(to, Transport::Tcp, ANSWER).await
    }

    async fn is_answered(&self, address: &str) -> Result<()> {
        match self.request(address).await? {
            Outcome::Answered { by, .. }
                if [1, 2].map(|n| remote(n).at(Family::V4, SERVED[0])).contains(&by) =>
            {
                Ok(())
            }
            other => bail!("{address}: {other:?}"),
        }
    }
}

#[test]
fn a_service_is_explained_by_the_agent_and_the_proxy_of_its_node() -> Result<()> {
    run(async {
        let scratch = Scratch::new()?;
        // Without controllers, which would find the Node not ready: it has no kubelet.
        let cluster = Cluster::start(&scratch).await?;
        cluster.admin.apply(NODE_MANIFEST).await?;
        create_node(&cluster.admin, NODE, &json!({})).await?;
        let (answering, local) = ("10.96.7.1", "10.96.7.2");
        for object in
            [service(ANSWERING, answering, "Cluster"), service(LOCAL, local, "Local")].iter().flatten()
        {
            cluster.admin.apply(&object.to_string()).await?;
        }
        let identity = cluster.node(&scratch, NODE).await?;
        let settings = Settings::new()
            .set("agent.node_name", NODE)
            .set("kube.kubeconfig", identity.kubeconfig().display().to_string());
        let mut agent = Agent::new(&scratch, &no_runtime(&scratch), &settings)?;
        agent.start_live().await?;
        let world = World::new()?;
        let options = KeelsonProxyOptions::new(&agent.endpoints_target()).set("proxy.sync_period", "1s");
        let proxy = KeelsonProxy::start(&scratch, world.node(), &options).await?;
        // `keelson proxy ...` asks the one, everything else the other.
        let way = scratch.path().join("way");
        let script = format!(
            "[ \"$1\" = {NODE} ] || exit 9\nshift 2\nsocket={}\n[ \"$1\" != proxy ] || socket={}\n\
             exec {} \"$@\" --socket \"unix://$socket\"\n",
            agent.debug_socket().display(),
            proxy.socket().display(),
            agent.program().display()
        );
        std::fs::write(&way, script)?;
        let via = format!("--via=sh {} {{node}}", way.display());
        let asked = Asked { plugin: Plugin::new(&scratch, &cluster, agent.program())?, via, world };

        let healthy = format!("HEALTHY: the rules of {NODE} forward the Service to 2 endpoints\n");
        let text = asked.comes_to(ANSWERING, &healthy, 0).await?;
        ensure!(text.contains("backend nft, link following") && text.contains("IPv4 synced"), "{text}");
        asked.is_answered(answering).await?;

        let dropped = format!(
            "FAILING: traffic from anyone to {local}:{PORT} is dropped on {NODE}: internalTrafficPolicy is Local, and this node \
             has no endpoint for it\n"
        );
        asked.comes_to(LOCAL, &dropped, 1).await?;
        let outcome = asked.request(local).await?;
        ensure!(outcome == Outcome::Dropped, "{outcome:?}");

        let owner = TableOwner::start(asked.world.node())?;
        let failing = format!("FAILING: the proxy of {NODE} is failing for IPv4: ");
        let text = asked.comes_to(ANSWERING, &failing, 1).await?;
        ensure!(text.contains("operation not permitted") && text.contains("IPv6 synced"), "{text}");
        ensure!(asked.is_answered(answering).await.is_err(), "the rules of the proxy are still there");
        drop(owner);
        asked.comes_to(ANSWERING, &healthy, 0).await?;
        asked.is_answered(answering).await?;

        agent.kill9()?;
        let gone = format!("FAILING: the proxy of {NODE} is not connected to its agent: ");
        asked.comes_to(ANSWERING, &gone, 1).await?;
        // The rules stay.
        asked.is_answered(answering).await
    })
}
