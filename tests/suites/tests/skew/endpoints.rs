//! The Endpoints API between an agent of one version, and a proxy and a client of the other.

use crate::programs;
use anyhow::{Context as _, Result, ensure};
use keelson_cluster::{
    manifests::ManifestFolder,
    net::{KeelsonProxy, KeelsonProxyOptions, World, node_object},
};
use keelson_harness::{
    agent::{Agent, Settings, no_runtime},
    scratch::Scratch,
    util::{eventually_slow, free_port},
};
use serde_json::{Value, json};
use std::path::Path;
use tokio::process::Command;

const NODE: &str = "node";

/// A Service with an endpoint, by the manifests of the agent.
fn service(number: u8) -> [Value; 2] {
    let (name, ip) = (format!("echo-{number}"), format!("10.96.0.{number}"));
    let labels = json!({"kubernetes.io/service-name": name});
    [
        json!({"apiVersion": "v1", "kind": "Service", "metadata": {"name": name, "namespace": "default"},
            "spec": {"clusterIP": ip, "clusterIPs": [ip], "ipFamilies": ["IPv4"], "ports": [{"port": 80}]}}),
        json!({"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
            "metadata": {"name": format!("{name}-1"), "namespace": "default", "labels": labels},
            "ports": [{"port": 8080, "protocol": "TCP"}],
            "endpoints": [{"addresses": [format!("10.244.0.{number}")], "conditions": {"ready": true}}]}),
    ]
}

struct TestEnv {
    agent: Agent,
    proxy: KeelsonProxy,
    manifests: ManifestFolder,
    world: World,
    _scratch: Scratch,
}

impl TestEnv {
    async fn start(of_agent: &Path, of_proxy: &Path) -> Result<Self> {
        let scratch = Scratch::new()?;
        let manifests = ManifestFolder::new(scratch.dir("manifests")?);
        manifests.put("node.json", &[node_object(NODE, &json!({}))])?;
        manifests.put("echo-1.json", &service(1))?;
        let settings = Settings::new()
            .set("endpoints.source", "files")
            .set("endpoints.manifests", manifests.path().display().to_string());
        let mut agent =
            Agent::new_in(&scratch.dir("agent")?, free_port()?, &no_runtime(&scratch), &settings)?;
        agent.set_program(of_agent);
        agent.start_live().await?;
        let world = World::new()?;
        let options = KeelsonProxyOptions::new(&agent.endpoints_target());
        let mut proxy = KeelsonProxy::of(of_proxy, &scratch, world.node(), &options)?;
        proxy.start_again(world.node()).await?;
        Ok(Self { agent, proxy, manifests, world, _scratch: scratch })
    }

    /// Waits until the kernel translates to the endpoints of these Services.
    async fn has(&self, numbers: &[u8]) -> Result<()> {
        let programmed = eventually_slow("the kernel has these Services", || async {
            let rules = self.world.node().nft(&["list", "table", "ip", "keelson"])?;
            for number in 1..10 {
                let is_there = rules.contains(&format!("10.96.0.{number}"))
                    && rules.contains(&format!("10.244.0.{number}"));
                ensure!(
                    is_there == numbers.contains(&number),
                    "Service {number}, wanted {numbers:?}: {rules}"
                );
            }
            Ok(())
        });
        programmed
            .await
            .with_context(|| format!("the proxy's log:\n{}", self.proxy.log().unwrap_or_default()))
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_proxy_follows_an_agent_of_the_other_version() -> Result<()> {
    let [current, former] = programs()?;
    for (of_agent, of_proxy) in [(&former, &current), (&current, &former)] {
        let direction = || format!("agent {}, proxy {}", of_agent.display(), of_proxy.display());
        let mut env = TestEnv::start(of_agent, of_proxy).await.with_context(direction)?;
        env.has(&[1]).await.with_context(direction)?;
        env.manifests.put("echo-2.json", &service(2))?;
        env.has(&[1, 2]).await.with_context(direction)?;
        // The agent becomes the proxy's version, and the state goes on.
        env.agent.kill9()?;
        env.agent.set_program(of_proxy);
        env.agent.start_live().await?;
        env.manifests.remove("echo-1.json")?;
        env.has(&[2]).await.with_context(direction)?;
        env.proxy.kill9()?;
    }
    Ok(())
}

/// What another program sees: `keelson watch` prints it as JSON.
#[tokio::test(flavor = "multi_thread")]
async fn a_client_reads_the_full_state_of_an_agent_of_the_other_version() -> Result<()> {
    let [current, former] = programs()?;
    for (of_agent, of_client) in [(&former, &current), (&current, &former)] {
        let env = TestEnv::start(of_agent, of_agent).await?;
        env.has(&[1]).await?;
        let target = env.agent.endpoints_target();
        let output = Command::new(of_client)
            .args(["watch", "--once", "--target", &target, "-o", "json"])
            .output()
            .await?;
        let shown = String::from_utf8_lossy(&output.stdout);
        let errors = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "agent {}: {errors}", of_agent.display());
        ensure!(
            shown.contains("echo-1") && shown.contains("10.244.0.1"),
            "agent {}: {shown}",
            of_agent.display()
        );
    }
    Ok(())
}
