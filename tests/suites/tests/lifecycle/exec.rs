//! Calls of the runtime service through the agent, in a pod of a stock kubelet.

use crate::common::run;
use crate::pods::pod;
use crate::test_env::{Agents, TestEnv, new_pod_node, program};
use anyhow::{Context as _, Result, ensure};
use keelson_cluster::kube::KubeletOptions;
use keelson_harness::agent::Settings;
use keelson_harness::containerd::Kind;
use keelson_harness::registry::Access;
use keelson_harness::util::{PATIENCE, eventually};
use serde_json::json;

/// A kubelet treats the code DEADLINE_EXCEEDED of ExecSync as a failed probe, and any other as an unknown result: the
/// code must be the runtime's.
#[test]
fn a_probe_that_takes_too_long_fails() -> Result<()> {
    run(async {
        let node = new_pod_node(Kind::V2, Access::Anonymous).await?;
        let agents = Agents::Everything(Settings::new());
        let options = KubeletOptions::default();
        let env = TestEnv::start("exec", node, agents, options).await?;
        let image = env.push(&program("app", &[])?).await?;
        let name = env.pod("app");
        let mut made = pod(&name, &env.name, &env.node.name(&image));
        // The program never exits.
        made["spec"]["containers"][0]["readinessProbe"] =
            json!({"exec": {"command": ["/program", "pause"]}, "timeoutSeconds": 1, "periodSeconds": 1});
        env.shared.cluster.admin.apply(&made.to_string()).await?;
        env.runs("app").await?;
        let message = eventually(PATIENCE, "the kubelet reports the probe", || async {
            env.events("Pod", &name, "Unhealthy").await?.pop().context("it does not")
        })
        .await?;
        ensure!(
            message.contains("Readiness probe failed") && message.contains("timed out"),
            "its message is {message}"
        );
        env.delete(&["app"]).await
    })
}
