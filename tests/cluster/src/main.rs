//! `make cluster` and `make cluster-check`: a whole cluster of one node, with Keelson in kube-proxy's place and in the path of
//! image pulls.
//!
//! Owns: the cluster, in one folder and in namespaces of its own. In: Ctrl-C; `--check`; `--image ARCHIVE`, the image of Keelson
//! as an OCI archive (default: one made from the program that was built). Out: commands to try, or a line for each step of the
//! check. When it ends, it stops everything that it started.

#![allow(clippy::print_stdout, clippy::print_stderr)] // It talks to a person.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context as _, Result, bail};
use keelson_cluster::one_node::{NODE, OneNode, Steps, check, place};
use keelson_harness::agent::Settings;
use keelson_harness::scratch::Scratch;
use keelson_harness::{peers, process};
use tokio::signal::unix::{SignalKind, signal};

struct Args {
    check: bool,
    image: Option<PathBuf>,
}

impl Args {
    fn read() -> Result<Self> {
        let mut args = Self { check: false, image: None };
        let mut given = std::env::args().skip(1);
        while let Some(arg) = given.next() {
            match arg.as_str() {
                "--check" => args.check = true,
                "--image" => {
                    let file = given.next().context("--image needs the path of an OCI archive")?;
                    args.image = Some(std::path::absolute(file)?);
                }
                other => bail!("unknown argument {other}; there are --check and --image ARCHIVE"),
            }
        }
        Ok(args)
    }
}

fn main() -> ExitCode {
    // Peers are built before the process enters the place of the node, which has empty folders of its own.
    match Args::read().and_then(|args| prepare().map(|()| args)).and_then(|args| run(&args)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("\nkeelson-cluster: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// One thread, until the process is in its place.
fn prepare() -> Result<()> {
    for program in ["kube-apiserver", "kubectl"] {
        peers::kubernetes(program)?;
    }
    peers::chart_tool("helm")?;
    peers::cni()?;
    peers::coredns()?;
    peers::containerd_v2()?;
    peers::cri_driver()?;
    peers::etcd(true)?;
    place::enter()
}

#[tokio::main]
async fn run(args: &Args) -> Result<()> {
    let mut terminate = signal(SignalKind::terminate()).context("cannot listen for signals")?;
    let scratch = Scratch::new()?;
    let work =
        async { if args.check { run_check(&scratch, args).await } else { demo(&scratch, args).await } };
    tokio::select! {
        result = work => result,
        _ = tokio::signal::ctrl_c() => Ok(()),
        _ = terminate.recv() => Ok(()),
    }
}

async fn run_check(scratch: &Scratch, args: &Args) -> Result<()> {
    let mut steps = Steps::start();
    let node = OneNode::start(scratch, &Settings::new(), &mut steps).await?;
    node.operator.prepare(args.image.as_deref(), &mut steps).await?;
    check::check(&node, &mut steps).await?;
    // The logs of what worked are no news.
    process::quiet();
    println!("{} steps as documented in {:.0} s", steps.count(), steps.total().as_secs_f64());
    Ok(())
}

async fn demo(scratch: &Scratch, args: &Args) -> Result<()> {
    process::quiet();
    println!("starting a cluster in {} ...", scratch.path().display());
    let mut steps = Steps::start();
    let node = OneNode::start(scratch, &Settings::new(), &mut steps).await?;
    node.operator.install(args.image.as_deref(), &mut steps).await?;
    node.operator.label_for_proxy("keelson.dev/proxy=true").await?;
    node.operator.rolled_out("kube-system", "ds/keelson-proxy").await?;
    steps.done("Keelson serves Services");
    node.operator.rolled_out("kube-system", "deploy/coredns").await?;
    node.operator.start_workload().await?;
    steps.done("CoreDNS, two servers and a client run");
    introduce(&node)?;
    std::future::pending().await
}

fn introduce(node: &OneNode) -> Result<()> {
    let kubectl = peers::kubernetes("kubectl")?;
    let agent = &node.agent;
    println!(
        "\nThe node {NODE} is Ready. It has a network and mounts of its own; a shell in it:\n\n\
         \x20   nsenter -t {pid} -n -m bash\n\
         \x20   export KUBECONFIG={config} PATH=\"{tools}:{programs}:$PATH\"\n\n\
         \x20   kubectl get nodes,pods -A -o wide\n\
         \x20   kubectl -n kube-system exec ds/keelson-proxy -- keelson proxy state\n\
         \x20   kubectl -n kube-system exec ds/keelson-proxy -- keelson proxy explain 10.96.0.10:53/UDP\n\
         \x20   kubectl exec deploy/client -- /program fetch http://web.default/\n\
         \x20   kubectl scale deploy/web --replicas=5\n\
         \x20   kubectl label node {NODE} keelson.dev/proxy-      # out; no kube-proxy takes over here\n\
         \x20   keelson pulls --watch --socket unix://{socket}\n\
         \x20   keelson watch --target unix://{endpoints}\n\n\
         \x20   kill the agent  kill -9 {agent_pid}\n\
         \x20   start it        keelson agent --config {agent_config}\n\n\
         Ctrl-C stops everything.",
        pid = std::process::id(),
        config = node.cluster.admin_kubeconfig().display(),
        tools = kubectl.parent().unwrap_or(&kubectl).display(),
        programs = node.agent.program().parent().unwrap_or(node.agent.program()).display(),
        socket = agent.debug_socket().display(),
        endpoints = place::ENDPOINTS_SOCKET,
        agent_pid = agent.pid().unwrap_or_default(),
        agent_config = agent.config().display(),
    );
    Ok(())
}
