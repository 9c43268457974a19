//! A whole cluster of one node: etcd, kube-apiserver, kube-controller-manager, kube-scheduler, a kubelet on containerd, and
//! CoreDNS. Image pulls go through a Keelson agent that runs as the host package runs it; the service proxy is installed
//! from the chart.
//!
//! Owns: [`OneNode`]. In: [`place::enter`] has made the network and the folders of the node, and optionally an OCI archive with
//! the image of Keelson. Out: the cluster, its `kubectl`, and what it took.

mod addons;
pub mod check;
pub mod place;
mod steps;

pub use steps::Steps;

use crate::kube::{
    ApiOptions, Cluster, ControllerManager, ControllerOptions, Kubelet, KubeletOptions, Scheduler,
};
use anyhow::{Context as _, Result, ensure};
use keelson_harness::agent::{Agent, Settings};
use keelson_harness::command::{CommandOutput, run};
use keelson_harness::containerd::{Containerd, Kind, Options};
use keelson_harness::cri::Pull;
use keelson_harness::images::{ImageSpec, push_archive};
use keelson_harness::peers;
use keelson_harness::registry::{Access, Registry};
use keelson_harness::scratch::Scratch;
use keelson_harness::util::{PATIENCE, eventually};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tokio::process::Command;

pub const NODE: &str = "node-1";

/// Pods of the cluster; the controller gives the node its first /24.
const CLUSTER_CIDR: &str = "10.244.0.0/16";

const CERTIFICATES_VALID: Duration = Duration::from_secs(365 * 24 * 3600);

/// Time limit of what waits for images, probes and controllers.
const LONG: Duration = Duration::from_secs(5 * PATIENCE.as_secs());

/// Fields are dropped in this order.
#[derive(Debug)]
pub struct OneNode {
    _kubelet: Kubelet,
    pub agent: Agent,
    pub containerd: Containerd,
    registry: Registry,
    _scheduler: Scheduler,
    _controllers: ControllerManager,
    pub cluster: Cluster,
    manifests: PathBuf,
}

impl OneNode {
    /// Starts everything below `scratch` until the Node is Ready. No Service works yet, because nothing programs them.
    pub async fn start(scratch: &Scratch, steps: &mut Steps) -> Result<Self> {
        let cluster = Cluster::start_with(scratch, &api_options()).await?;
        steps.done("etcd and kube-apiserver are ready");
        let controllers = cluster.controllers(scratch, &controller_options(&cluster)?).await?;
        let scheduler = cluster.scheduler(scratch).await?;
        steps.done("kube-controller-manager and kube-scheduler serve");

        let registry = Registry::start(scratch, Access::Anonymous).await?;
        let pause =
            program("pause", &["pause"])?.push(registry.address(), None).await?.at(registry.address());
        let options = Options {
            sandbox_image: Some(pause.clone()),
            network: true,
            network_plugins: Some(peers::cni()?),
            ..Options::default()
        };
        let containerd = Containerd::start(scratch, Kind::V2, &options).await?;
        containerd.configure_registry(registry.address(), registry.address())?;
        // The runtime pulls it by itself.
        containerd.cri().await?.pull(&Pull::new(&pause)).await?;
        steps.done("containerd and a registry serve");

        // The credentials of the kubelet, as packaging/README.md describes it.
        let identity = cluster.node(scratch, NODE).await?;
        let settings = Settings::limit(3)
            .set("agent.node_name", NODE)
            .set("kube.kubeconfig", identity.kubeconfig().display().to_string())
            .set("endpoints.listen", vec![format!("unix://{}", place::ENDPOINTS_SOCKET)]);
        let mut agent = Agent::new(scratch, &containerd.endpoint(), &settings)?;
        // It is ready with the Node, which the kubelet makes.
        agent.start_live().await?;
        steps.done("the agent listens");

        let kubelet = KubeletOptions {
            image_endpoint: Some(agent.endpoint()),
            kubeconfig: Some(identity.kubeconfig()),
            ..KubeletOptions::default()
        };
        let kubelet = kubelet
            .set("address", "0.0.0.0")
            .set("clusterDNS", vec![addons::DNS])
            .set("clusterDomain", "cluster.local");
        let kubelet = cluster.kubelet(scratch, NODE, &containerd, &kubelet).await?;
        cluster.admin.await_condition(NODE, "Ready", "True").await?;
        agent.ready().await?;
        steps.done("the Node is Ready, and so is the agent");
        Ok(Self {
            _kubelet: kubelet,
            agent,
            containerd,
            registry,
            _scheduler: scheduler,
            _controllers: controllers,
            cluster,
            manifests: scratch.dir("manifests")?,
        })
    }

    /// Installs the chart with the image of Keelson, and CoreDNS.
    pub async fn install(&self, archive: Option<&Path>, steps: &mut Steps) -> Result<()> {
        self.push_keelson(archive).await?;
        self.push(&ImageSpec::program("coredns", &peers::coredns()?, &[])).await?;
        self.push(&program("app", &["pause"])?).await?;
        steps.done("images are in the registry");
        self.helm("install", &[]).await?;
        steps.done("the chart is installed");
        self.cluster.admin.apply(&addons::coredns(self.registry.address())).await?;
        Ok(())
    }

    async fn push(&self, image: &ImageSpec) -> Result<()> {
        image.push(self.registry.address(), None).await.map(drop)
    }

    async fn push_keelson(&self, archive: Option<&Path>) -> Result<()> {
        match archive {
            Some(archive) => push_archive(archive, self.registry.address(), "keelson", "v1").await,
            None => {
                let program = peers::keelson()?;
                self.push(&ImageSpec::with_libraries("keelson", &[(&program, "usr/bin/keelson")])?).await
            }
        }
    }

    /// `install` or `upgrade`, with these values besides.
    async fn helm(&self, command: &str, values: &[String]) -> Result<()> {
        let mut helm = Command::new(peers::chart_tool("helm")?);
        helm.args([command, "keelson"]).arg(chart()).args(["--namespace", "kube-system"]);
        helm.arg("--kubeconfig").arg(self.cluster.admin_kubeconfig());
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
        command.arg("--kubeconfig").arg(self.cluster.admin_kubeconfig()).args(args);
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
        self.cluster.admin.apply(&addons::workload(self.registry.address())).await?;
        self.rolled_out("default", "deploy/web").await?;
        self.rolled_out("default", "deploy/client").await
    }

    fn image(&self, name: &str) -> String {
        format!("{}/{name}:v1", self.registry.address())
    }

    fn write(&self, name: &str, manifest: &str) -> Result<PathBuf> {
        let file = self.manifests.join(name);
        fs::write(&file, manifest).with_context(|| format!("cannot write {}", file.display()))?;
        Ok(file)
    }
}

fn program(name: &str, args: &[&str]) -> Result<ImageSpec> {
    Ok(ImageSpec::program(name, &peers::cri_driver()?, args))
}

pub fn chart() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging/chart/keelson")
}

fn api_options() -> ApiOptions {
    let args = [
        "--bind-address=0.0.0.0".to_owned(),
        // The endpoint of the Service kubernetes.
        format!("--advertise-address={}", place::ADDRESS),
        "--endpoint-reconciler-type=lease".to_owned(),
        // No DNS outside of the cluster knows the node's name.
        "--kubelet-preferred-address-types=InternalIP".to_owned(),
        // So that other agents can join by the steps of docs/heartbeats.md.
        "--enable-bootstrap-token-auth=true".to_owned(),
    ];
    ApiOptions { args: args.into(), ..ApiOptions::default() }
}

/// All controllers, as a cluster has them.
fn controller_options(cluster: &Cluster) -> Result<ControllerOptions> {
    let mut args = ControllerOptions::signing(cluster.pki(), CERTIFICATES_VALID)?.args;
    args.push(format!("--root-ca-file={}", cluster.pki().ca_file().display()));
    args.push("--allocate-node-cidrs=true".to_owned());
    args.push(format!("--cluster-cidr={CLUSTER_CIDR}"));
    let controllers = vec!["*".to_owned(), "bootstrap-signer-controller".to_owned()];
    Ok(ControllerOptions { controllers, args, ..ControllerOptions::default() })
}
