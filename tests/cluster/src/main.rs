//! `make cluster`: a control plane with one node that only the agent keeps Ready, for manual use.
//!
//! Owns: etcd, kube-apiserver, the node lifecycle controller, containerd and the agent in role `node`, all in one
//! folder. In: Ctrl-C. Out: a kubeconfig and commands to try; when it ends, it stops everything that it started.

#![allow(clippy::print_stdout, clippy::print_stderr)] // It talks to a person.

use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, Result};
use keelson_cluster::kube::{ApiOptions, Cluster, ControllerOptions};
use keelson_cluster::manifests::NODE as NODE_RIGHTS;
use keelson_harness::agent::{Agent, Settings};
use keelson_harness::containerd::{Containerd, Kind, Options};
use keelson_harness::process;
use keelson_harness::scratch::Scratch;
use tokio::signal::unix::{SignalKind, signal};

const NODE: &str = "demo-node";
const CERTIFICATES_VALID: Duration = Duration::from_secs(365 * 24 * 3600);

#[tokio::main]
async fn main() -> ExitCode {
    process::quiet();
    match run().await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("\nmake cluster: {error:#}");
            ExitCode::FAILURE
        }
    }
}

async fn run() -> Result<()> {
    let mut terminate = signal(SignalKind::terminate()).context("cannot listen for signals")?;
    let scratch = Scratch::new()?;
    tokio::select! {
        result = demo(&scratch) => result,
        _ = tokio::signal::ctrl_c() => Ok(()),
        _ = terminate.recv() => Ok(()),
    }
}

async fn demo(scratch: &Scratch) -> Result<()> {
    println!("starting etcd and kube-apiserver in {} ...", scratch.path().display());
    // Bootstrap tokens and signed requests: so that other agents can join by the steps of docs/heartbeats.md.
    let args = vec!["--enable-bootstrap-token-auth=true".to_owned()];
    let cluster = Cluster::start_with(scratch, &ApiOptions { args, ..ApiOptions::default() }).await?;
    let signing = ControllerOptions::signing(cluster.pki(), CERTIFICATES_VALID)?;
    let mut controllers = ControllerOptions { args: signing.args, ..ControllerOptions::default() };
    controllers.controllers.extend(signing.controllers);
    let _controllers = cluster.controllers(scratch, &controllers).await?;
    println!("starting containerd and the agent ...");
    let options = Options { network: true, ..Options::default() };
    let containerd = Containerd::start(scratch, Kind::Debian16, &options).await?;
    let identity = cluster.node(scratch, NODE).await?;
    // A node's own credentials may not read EndpointSlices.
    cluster.admin.apply(NODE_RIGHTS).await?;
    let settings = Settings::new()
        .set("agent.node_name", NODE)
        .set("kube.kubeconfig", identity.kubeconfig().display().to_string())
        .set("node.role", "node")
        .set("node.root_dir", scratch.path().display().to_string());
    let agent = Agent::start(scratch, &containerd.endpoint(), &settings).await?;
    cluster.admin.await_condition(NODE, "Ready", "True").await?;
    introduce(&cluster, &agent);
    std::future::pending().await
}

fn introduce(cluster: &Cluster, agent: &Agent) {
    let kubectl = format!("kubectl --kubeconfig {}", cluster.admin_kubeconfig().display());
    let keelson = agent.program().display();
    let socket = agent.debug_socket();
    println!(
        "\nThe node {NODE} is Ready; only the agent reports it.\n\n\
         \x20   {kubectl} get nodes\n\
         \x20   {kubectl} get lease -n kube-node-lease -w     # renewed every 10 s\n\
         \x20   {kubectl} get node {NODE} -o yaml\n\
         \x20   {keelson} node --socket unix://{socket}\n\
         \x20   {keelson} watch --target {target}\n\
         \x20   {keelson} endpoints --socket unix://{socket}\n\
         \x20   {keelson} node set-condition DiskSlow True --reason Latency --socket unix://{socket}\n\n\
         \x20   debug page    {url}/\n\
         \x20   kill it       kill -9 {pid}     # after 50 s the node lifecycle controller says Unknown\n\
         \x20   start it      {keelson} agent --config {config}\n\n\
         Ctrl-C stops everything.",
        socket = socket.display(),
        target = agent.endpoints_target(),
        url = agent.url(),
        pid = agent.pid().unwrap_or_default(),
        config = agent.config().display(),
    );
}
