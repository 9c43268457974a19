//! Owns: [`Operator`], what an operator of the cluster does. In: an administrator's credentials, and the registry of the cluster.
//! Out: images, the chart, `kubectl`, the pods of the checks.

use super::{CLUSTER_CIDR, LONG, NODE, Steps, addons, program};
use crate::kube::Admin;
use anyhow::{Context as _, Result, ensure};
use keelson_harness::command::{CommandOutput, run};
use keelson_harness::images::{ImageSpec, push_archive};
use keelson_harness::peers;
use keelson_harness::registry::Registry;
use keelson_harness::util::eventually;
use std::fs;
use std::path::{Path, PathBuf};
use tokio::process::Command;

#[derive(Debug)]
pub struct Operator {
    pub(super) admin: Admin,
    pub(super) kubeconfig: PathBuf,
    pub(super) registry: Registry,
    pub(super) manifests: PathBuf,
}

impl Operator {
    /// Installs the chart with the image of Keelson, and CoreDNS.
    pub async fn install(&self, archive: Option<&Path>, steps: &mut Steps) -> Result<()> {
        self.prepare(archive, steps).await?;
        self.helm("install", &[]).await?;
        steps.done("the chart is installed");
        Ok(())
    }

    /// Images of Keelson and of the checks, and CoreDNS.
    pub async fn prepare(&self, archive: Option<&Path>, steps: &mut Steps) -> Result<()> {
        // The chart's own tag, and that of the other images.
        for tag in [env!("CARGO_PKG_VERSION"), "v1"] {
            self.push_keelson(archive, tag).await?;
        }
        self.push(&ImageSpec::program("coredns", &peers::coredns()?, &[])).await?;
        self.push(&program("app", &["pause"])?).await?;
        steps.done("images are in the registry");
        self.admin.apply(&addons::coredns(self.registry.address())).await?;
        Ok(())
    }

    pub async fn push(&self, image: &ImageSpec) -> Result<()> {
        image.push(&self.registry).await.map(drop)
    }

    async fn push_keelson(&self, archive: Option<&Path>, tag: &str) -> Result<()> {
        match archive {
            Some(archive) => push_archive(archive, &self.registry, "keelson", tag),
            None => {
                let program = peers::keelson()?;
                let image = ImageSpec::with_libraries("keelson", &[(&program, "usr/bin/keelson")])?;
                self.push(&ImageSpec { tag: tag.to_owned(), ..image }).await
            }
        }
    }

    /// `install` or `upgrade`, with these values besides.
    pub(super) async fn helm(&self, command: &str, values: &[String]) -> Result<()> {
        let mut helm = Command::new(peers::chart_tool("helm")?);
        helm.args([command, "keelson"]).arg(chart()).args(["--namespace", "kube-system"]);
        helm.arg("--kubeconfig").arg(&self.kubeconfig);
        helm.arg("--set").arg(format!("image.repository={}/keelson,image.tag=v1", self.registry.address()));
        helm.arg("--set").arg(format!("proxy.clusterCIDR={{{CLUSTER_CIDR}}}"));
        values.iter().for_each(|value| {
            helm.args(["--set", value]);
        });
        run(helm).await?.success().map(drop)
    }

    /// Puts the node in or out: the label that the chart's proxy selects.
    pub async fn label_for_proxy(&self, change: &str) -> Result<()> {
        self.kubectl(&["label", "node", NODE, change, "--overwrite"]).await?.success().map(drop)
    }

    pub async fn kubectl(&self, args: &[&str]) -> Result<CommandOutput> {
        let mut command = Command::new(peers::kubernetes("kubectl")?);
        command.arg("--kubeconfig").arg(&self.kubeconfig).args(args);
        run(command).await
    }

    /// Waits until every pod of a Deployment or DaemonSet is ready.
    pub async fn rolled_out(&self, namespace: &str, object: &str) -> Result<()> {
        let waited = eventually(LONG, &format!("{object} is ready"), || async {
            let status =
                self.kubectl(&["-n", namespace, "rollout", "status", object, "--timeout=1s"]).await?;
            status.success().map(drop)
        })
        .await;
        match waited {
            Ok(()) => Ok(()),
            Err(error) => {
                let events = self.kubectl(&["-n", namespace, "get", "pods,events"]).await?.out;
                Err(error).with_context(|| events)
            }
        }
    }

    /// `keelson proxy state` of the pod on this node, as docs/rollout.md describes it.
    pub async fn proxy_state(&self) -> Result<CommandOutput> {
        let exec = ["-n", "kube-system", "exec", "ds/keelson-proxy", "--", "keelson", "proxy", "state"];
        self.kubectl(&exec).await
    }

    /// What a Service answers to a pod that looks up its name.
    pub async fn fetch(&self, name: &str) -> Result<String> {
        let url = format!("http://{name}/");
        let answer =
            self.kubectl(&["exec", "deploy/client", "--", "/program", "fetch", &url]).await?.success()?;
        ensure!(!answer.out.trim().is_empty(), "no answer: {answer:?}");
        Ok(answer.out.trim().to_owned())
    }

    /// Two servers behind the Service `web`, and a client.
    pub async fn start_workload(&self) -> Result<()> {
        self.admin.apply(&addons::workload(self.registry.address())).await?;
        self.rolled_out("default", "deploy/web").await?;
        self.rolled_out("default", "deploy/client").await
    }

    pub fn image(&self, name: &str) -> String {
        format!("{}/{name}:v1", self.registry.address())
    }

    pub(super) fn write(&self, name: &str, manifest: &str) -> Result<PathBuf> {
        let file = self.manifests.join(name);
        fs::write(&file, manifest).with_context(|| format!("cannot write {}", file.display()))?;
        Ok(file)
    }
}

pub fn chart() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging/chart/keelson")
}
