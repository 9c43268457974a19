//! Calls of the runtime service through the agent, in a pod of a stock kubelet.

use crate::pods::pod;
use crate::rig::run;
use crate::stage::{Agents, Stage, pod_node, program};
use anyhow::{Context as _, Result, ensure};
use keelson_cluster::kube::KubeletOptions;
use keelson_harness::agent::Settings;
use keelson_harness::containerd::Kind;
use keelson_harness::registry::Access;
use keelson_harness::scratch::Scratch;
use keelson_harness::util::{PATIENCE, eventually};
use serde_json::json;

/// A kubelet treats the code DEADLINE_EXCEEDED of ExecSync as a failed probe, and any other as an unknown result: the
/// code must be the runtime's.
#[test]
fn a_probe_that_takes_too_long_fails() -> Result<()> {
    run(async {
        let scratch = Scratch::new()?;
        let folder = scratch.dir("c0")?;
        let node = pod_node(scratch, &folder, Kind::V2, Access::Anonymous).await?;
        let agents = Agents::Everything(Settings::new());
        let options = KubeletOptions::default();
        let stage = Stage::start("exec", node, Access::Anonymous, agents, options).await?;
        let image = stage.push(&program("app", &[])?).await?;
        let name = stage.pod("app");
        let mut made = pod(&name, &stage.name, &stage.node.name(&image));
        // The program never exits.
        made["spec"]["containers"][0]["readinessProbe"] =
            json!({"exec": {"command": ["/program", "pause"]}, "timeoutSeconds": 1, "periodSeconds": 1});
        stage.shared.cluster.admin.apply(&made.to_string()).await?;
        stage.runs("app").await?;
        let message = eventually(PATIENCE, "the kubelet reports the probe", || async {
            stage.events("Pod", &name, "Unhealthy").await?.pop().context("it does not")
        })
        .await?;
        ensure!(
            message.contains("Readiness probe failed") && message.contains("timed out"),
            "its message is {message}"
        );
        stage.delete(&["app"]).await
    })
}
