//! `kubectl keelson` with a real kubectl: by a command that reaches the node here, and by exec in the pod of the shipped
//! DaemonSet in `daemon_set.rs`.

use crate::common::{ACCOUNT, companion, on_cluster, settings};
use crate::pods::{apps, phase, pod, pulls_are};
use crate::test_env::new_pod_node;
use anyhow::{Context as _, Result, ensure};
use keelson_cluster::kube::{Cluster, KubeletOptions};
use keelson_harness::agent::Agent;
use keelson_harness::command::{self, CommandOutput};
use keelson_harness::containerd::Kind;
use keelson_harness::registry::Access;
use keelson_harness::registry_proxy::{Fault, Match};
use keelson_harness::scratch::Scratch;
use keelson_harness::util::{PATIENCE, eventually};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use tokio::process::Command;

/// The plugin, found by kubectl in `PATH` as everywhere.
pub(crate) struct Plugin {
    path: std::ffi::OsString,
    kubeconfig: PathBuf,
}

impl Plugin {
    pub(crate) fn new(scratch: &Scratch, cluster: &Cluster, program: &Path) -> Result<Self> {
        let folder = scratch.dir("plugin")?;
        std::os::unix::fs::symlink(program, folder.join("kubectl-keelson"))?;
        let paths = std::env::var_os("PATH").unwrap_or_default();
        let path = std::env::join_paths(std::iter::once(folder).chain(std::env::split_paths(&paths)))?;
        Ok(Self { path, kubeconfig: cluster.admin_kubeconfig() })
    }

    pub(crate) async fn run(&self, args: &[&str]) -> Result<CommandOutput> {
        let mut command = Command::new("kubectl");
        command.arg("keelson").args(args).env("PATH", &self.path).env("KUBECONFIG", &self.kubeconfig);
        command::run(command).await
    }

    /// The report, whatever it says.
    pub(crate) async fn ask(&self, args: &[&str]) -> Result<Value> {
        let output = self.run(&[args, &["-o", "json"]].concat()).await?;
        serde_json::from_str(&output.out).with_context(|| format!("no report: {output:?}"))
    }
}

#[test]
fn a_pod_that_waits_is_explained_by_the_queue_of_its_node() -> Result<()> {
    on_cluster(async |cluster| {
        let node = new_pod_node(Kind::V2, Access::Anonymous).await?;
        let images = apps(&node, &["first", "second"]).await?;
        let identity = companion(cluster, &node.scratch, ACCOUNT, "asked").await?;
        let settings = settings("asked", &identity.kubeconfig()).set("pulls.max_parallel_image_pulls", 1);
        let mut agent = Agent::new(&node.scratch, &node.runtime.endpoint(), &settings)?;
        agent.start_live().await?;
        let options = KubeletOptions { image_endpoint: Some(agent.endpoint()), ..KubeletOptions::default() };
        let _kubelet = cluster.kubelet(&node.scratch, "asked", &node.runtime, &options).await?;
        cluster.admin.await_condition("asked", "Ready", "True").await?;
        let hold = node.proxy.rule(Match::layers().repo("first"), Fault::Hang);
        cluster.admin.apply(&pod("asked-1", "asked", &node.name(&images[0])).to_string()).await?;
        pulls_are(&agent, 1, 0).await?;
        cluster.admin.apply(&pod("asked-2", "asked", &node.name(&images[1])).to_string()).await?;
        pulls_are(&agent, 1, 1).await?;

        let plugin = Plugin::new(&node.scratch, cluster, agent.program())?;
        let way = node.scratch.path().join("way");
        let socket = agent.debug_socket();
        let script = format!(
            "[ \"$1\" = asked ] || exit 9\nshift 2\nexec {} \"$@\" --socket unix://{}\n",
            agent.program().display(),
            socket.display()
        );
        std::fs::write(&way, script)?;
        let via = format!("--via=sh {} {{node}}", way.display());
        let report = plugin.ask(&["why-pod", "asked-2", &via]).await?;
        let verdict = report["verdict"].as_str().unwrap_or_default();
        ensure!(report["state"] == "pending" && verdict.contains("place 1 of 1"), "{report}");
        ensure!(verdict.contains("1 of 1 slots are in use"), "{report}");
        // The text begins with it, and the exit code says that the pod does not run.
        let shown = plugin.run(&["why-pod", "asked-2", &via]).await?;
        ensure!(shown.out.starts_with("PENDING: the pull of ") && shown.code == Some(1), "{shown:?}");
        // Without a way to the node the API server alone is asked, and the agent's line says why.
        let alone = plugin.ask(&["why-pod", "asked-2"]).await?;
        ensure!(alone["state"] == "unknown" && alone.to_string().contains("pass --via"), "{alone}");

        node.proxy.remove(hold);
        phase(cluster, "asked-2", "Running").await?;
        eventually(PATIENCE, "the pod is explained as healthy", || async {
            let report = plugin.ask(&["why-pod", "asked-2", &via]).await?;
            ensure!(report["state"] == "healthy", "{report}");
            Ok(())
        })
        .await?;
        let missing = plugin.run(&["why-pod", "no-such-pod", &via]).await?;
        ensure!(missing.code == Some(1) && missing.err.contains("not found"), "{missing:?}");
        for name in ["asked-1", "asked-2"] {
            cluster.admin.delete_pod("default", name).await?;
        }
        Ok(())
    })
}

/// A Service with one endpoint, for a node whose agent is a pod.
fn service(name: &str) -> [Value; 2] {
    [
        json!({"apiVersion": "v1", "kind": "Service", "metadata": {"name": name},
            "spec": {"ports": [{"port": 80}]}}),
        json!({"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
            "metadata": {"name": name, "labels": {"kubernetes.io/service-name": name}},
            "addressType": "IPv4", "ports": [{"name": "", "port": 8080, "protocol": "TCP"}],
            "endpoints": [{"addresses": ["192.0.2.1"], "conditions": {"ready": true}}]}),
    ]
}

/// The agent `pod` on `node` is asked by exec.
pub(crate) async fn asks_by_exec(
    cluster: &Cluster,
    scratch: &Scratch,
    program: &Path,
    node: &str,
    pod: &str,
) -> Result<()> {
    let plugin = Plugin::new(scratch, cluster, program)?;
    let name = "asked-by-exec";
    for object in service(name) {
        cluster.admin.apply(&object.to_string()).await?;
    }
    eventually(PATIENCE, "the agent in the pod explains the Service", || async {
        let report = plugin.ask(&["why-service", name, "--node", node]).await?;
        let verdict = report["verdict"].as_str().unwrap_or_default();
        ensure!(verdict.contains("serves the Service, and the proxy could not be asked"), "{report}");
        let lines = report["evidence"].to_string();
        ensure!(
            lines.contains("endpoints synced") && lines.contains("is forwarded to 1 endpoints"),
            "{report}"
        );
        Ok(())
    })
    .await?;
    let report = plugin.ask(&["why-pod", pod, "-n", "kube-system"]).await?;
    ensure!(report["state"] == "healthy" && report["evidence"].to_string().contains("0 queued"), "{report}");
    Ok(())
}
