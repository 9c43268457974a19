//! `kubectl keelson`: why a pod does not start, and why a Service does not answer on a node.
//!
//! Owns: its command line; the program is this plugin when it is called `kubectl-keelson`. In: objects of the API server
//! and the answers of agent and proxy on a node, all by the user's `kubectl` ([`Access`]), so that its kubeconfig, its
//! contexts and every way to sign in work as they do there. Out: a [`Report`]: the verdict first, then the evidence. Exit
//! codes: 0 nothing is wrong, 1 something is or the question has no answer, 2 wrong usage.

mod access;
mod pod;
mod report;
mod service;
mod value;

use std::{path::PathBuf, process::ExitCode};

use clap::{Args, Parser, Subcommand};

use self::{
    access::Access,
    report::{Report, State},
};
use crate::{
    cli::Output,
    output::{json, print},
};

/// The name by which the program is this plugin.
pub(crate) const NAME: &str = "kubectl-keelson";

/// Ask the Keelson agent and proxy of a node why something does not work.
#[derive(Debug, Parser)]
#[command(name = "kubectl keelson", bin_name = "kubectl keelson", version, arg_required_else_help = true)]
#[command(max_term_width = 100)]
#[command(after_help = "Agent and proxy are asked by `kubectl exec` in their pods on the node (labels \
                  app.kubernetes.io/name=keelson-agent and keelson-proxy), which needs the right to create pods/exec. \
                  Where they are packages of the host, name a command that reaches it: --via 'ssh root@{node}'. Only \
                  commands that read are run. Without an answer of the node, the verdict is from the API server \
                  alone and says so.")]
pub(crate) struct PluginArgs {
    #[command(subcommand)]
    command: PluginCommand,
    #[command(flatten)]
    shared: SharedArgs,
}

#[derive(Debug, Subcommand)]
enum PluginCommand {
    /// Explain why a pod does not start.
    #[command(after_help = "Example: kubectl keelson why-pod web-7d4b9 -n shop")]
    WhyPod {
        /// Pod to explain.
        #[arg(value_parser = object_name)]
        pod: String,
    },
    /// Explain why a Service does not answer on a node.
    #[command(after_help = "Example: kubectl keelson why-service web -n shop --node worker-1")]
    WhyService {
        /// Service to explain.
        #[arg(value_parser = object_name)]
        service: String,
        /// Node from which the Service does not answer.
        #[arg(long, value_parser = object_name)]
        node: String,
    },
}

#[derive(Debug, Clone, Args)]
struct SharedArgs {
    /// Namespace of the pod or Service [default: that of the context].
    #[arg(short, long, global = true, value_name = "NAMESPACE", value_parser = object_name)]
    namespace: Option<String>,
    /// Context of the kubeconfig.
    #[arg(long, global = true, value_name = "NAME")]
    context: Option<String>,
    /// Kubeconfig file [default: as kubectl].
    #[arg(long, global = true, value_name = "FILE")]
    kubeconfig: Option<PathBuf>,
    /// Command that runs `keelson` on the node, in place of kubectl exec; {node} is the name of the node.
    #[arg(long, global = true, value_name = "COMMAND")]
    via: Option<String>,
    /// Output format.
    #[arg(short, long, global = true, value_enum, default_value_t = Output::Table)]
    output: Output,
}

/// Names of objects, which become arguments of other programs.
fn object_name(text: &str) -> Result<String, String> {
    let is_part = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || matches!(c, '-' | '.');
    let begins = text.starts_with(|c: char| c.is_ascii_lowercase() || c.is_ascii_digit());
    match begins && text.len() <= 253 && text.chars().all(is_part) {
        true => Ok(text.to_owned()),
        false => Err("not a name of an object; write lower-case letters, digits, '-' and '.'".into()),
    }
}

/// Whether this process was started as the plugin.
pub(crate) fn is_plugin() -> bool {
    let name = std::env::args_os().next().map(PathBuf::from);
    name.as_deref().and_then(|path| path.file_name()).is_some_and(|name| name == NAME)
}

pub(crate) async fn run(args: PluginArgs) -> anyhow::Result<ExitCode> {
    let shared = args.shared;
    let access = Access::new(shared.context, shared.kubeconfig, shared.via);
    let namespace = shared.namespace.as_deref();
    let report = match args.command {
        PluginCommand::WhyPod { pod } => pod::verdict(&pod::gather(&access, namespace, &pod).await?),
        PluginCommand::WhyService { service, node } => {
            service::verdict(&service::gather(&access, namespace, &service, &node).await?)
        }
    };
    match shared.output {
        Output::Json => print(&json(&report)?)?,
        Output::Table => print(&report.text())?,
    }
    Ok(exit_code(&report))
}

fn exit_code(report: &Report) -> ExitCode {
    if report.state == State::Healthy { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_follow_kubectls_and_names_cannot_be_flags() {
        let parse = |words: &[&str]| PluginArgs::try_parse_from([&["kubectl-keelson"], words].concat());
        let args = parse(&["why-service", "web", "-n", "shop", "--node", "n1", "-o", "json"]).unwrap();
        assert_eq!((args.shared.namespace.as_deref(), args.shared.output), (Some("shop"), Output::Json));
        for wrong in [&["why-pod", "-x"][..], &["why-pod", "A"], &["why-service", "web"], &["why-pod", "a;b"]]
        {
            assert!(parse(wrong).is_err(), "{wrong:?}");
        }
    }
}
