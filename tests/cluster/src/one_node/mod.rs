//! A whole cluster of one node: etcd, kube-apiserver, kube-controller-manager, kube-scheduler, a kubelet on containerd, and
//! CoreDNS. Image pulls go through a Keelson agent that runs as the host package runs it; the service proxy is installed
//! from the chart.
//!
//! Owns: [`OneNode`], and what its [`Operator`] does. In: [`place::enter`] has made the network and the folders of the node, and optionally an OCI archive with
//! the image of Keelson. Out: the cluster, its `kubectl`, and what it took.

mod addons;
pub mod check;
mod operator;
pub mod place;
mod rollout;
mod steps;

pub use operator::{Operator, chart};
pub use steps::Steps;

use crate::kube::{
    ApiOptions, Cluster, ControllerManager, ControllerOptions, Kubelet, KubeletOptions, Scheduler,
};
use anyhow::Result;
use keelson_harness::agent::{Agent, Settings};
use keelson_harness::containerd::{Containerd, Kind, Options};
use keelson_harness::cri::Pull;
use keelson_harness::images::ImageSpec;
use keelson_harness::peers;
use keelson_harness::registry::{Access, Registry};
use keelson_harness::scratch::Scratch;
use keelson_harness::util::PATIENCE;
use std::time::Duration;

pub const NODE: &str = "node-1";

/// Pods of the cluster; the controller gives the node its first /24.
pub const CLUSTER_CIDR: &str = "10.244.0.0/16";

const CERTIFICATES_VALID: Duration = Duration::from_secs(365 * 24 * 3600);

/// Time limit of what waits for images, probes and controllers.
const LONG: Duration = Duration::from_secs(5 * PATIENCE.as_secs());

/// Fields are dropped in this order.
#[derive(Debug)]
pub struct OneNode {
    pub kubelet: Kubelet,
    pub agent: Agent,
    pub containerd: Containerd,
    pub scheduler: Scheduler,
    pub controllers: ControllerManager,
    pub cluster: Cluster,
    pub operator: Operator,
}

impl OneNode {
    /// Starts everything below `scratch` until the Node is Ready. No Service works yet, because nothing programs them. `over`:
    /// settings of the agent that override those of the cluster.
    pub async fn start(scratch: &Scratch, over: &Settings, steps: &mut Steps) -> Result<Self> {
        let cluster = Cluster::start_with(scratch, &api_options()).await?;
        steps.done("etcd and kube-apiserver are ready");
        let controllers = cluster.controllers(scratch, &controller_options(&cluster)?).await?;
        let scheduler = cluster.scheduler(scratch).await?;
        steps.done("kube-controller-manager and kube-scheduler serve");

        let registry = Registry::start(scratch, Access::Anonymous).await?;
        let pause = program("pause", &["pause"])?.push(&registry).await?.at(registry.address());
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
            .set("endpoints.listen", vec![format!("unix://{}", place::ENDPOINTS_SOCKET)])
            .with_overrides(over);
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
        let operator = Operator {
            admin: cluster.admin.clone(),
            kubeconfig: cluster.admin_kubeconfig(),
            registry,
            manifests: scratch.dir("manifests")?,
        };
        Ok(Self { kubelet, agent, containerd, scheduler, controllers, cluster, operator })
    }
}

fn program(name: &str, args: &[&str]) -> Result<ImageSpec> {
    Ok(ImageSpec::program(name, &peers::cri_driver()?, args))
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
