//! The `keelson` binary.
//!
//! Owns: the command line. In: arguments, environment, signals. Out: [`agent`] runs the agent; [`cli`] queries a
//! running one; [`proxy`] runs the service proxy; [`settings`] shows the settings; [`kubectl`] is the program under another
//! name. Exit codes: 0 success, 1 failed, 2
//! wrong usage or settings, 70 the agent ended itself after a panic.

mod agent;
mod build_info;
mod cli;
mod debug_client;
mod doctor;
#[cfg(test)]
mod documents_tests;
mod kubectl;
mod kubelet;
#[cfg(debug_assertions)]
mod manual;
mod memory;
mod node_settings;
mod output;
mod proxy;
#[cfg(test)]
mod reference_tests;
mod settings;
mod version;

use std::process::ExitCode;

use clap::{CommandFactory as _, Parser, Subcommand};

/// Kubernetes node agent that keeps its work across restarts, and service proxy.
///
/// The agent passes CRI calls from the kubelet to the container runtime. It limits, queues and deduplicates image
/// pulls and continues them after a restart. It reports the node's Lease, status and conditions. It serves the
/// Services and endpoints of this node to service proxies.
#[derive(Debug, Parser)]
#[command(name = "keelson", version = build_info::VERSION, arg_required_else_help = true, max_term_width = 100)]
#[command(
    after_help = "To start: `keelson agent` runs the agent; `keelson pulls --watch` shows image pulls as \
                  they change.\n\
                  Settings: /etc/keelson/keelson.toml; `keelson config show` prints the effective values and \
                  where each comes from."
)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run the agent.
    Agent(settings::AgentArgs),
    /// Show the actors of a running agent, or one actor in detail.
    Actors(cli::ActorsArgs),
    /// Show queued, running and finished image pulls.
    Pulls(cli::PullsArgs),
    /// Show or set the limit on parallel image pulls of a running agent.
    Limit(cli::LimitArgs),
    /// Show the node's Lease, status and conditions; set or clear a condition.
    Node(cli::NodeArgs),
    /// Show the sync status, Services and clients of the service endpoints, or explain one Service.
    Endpoints(cli::EndpointsArgs),
    /// Show the Services and endpoints of this node as they change.
    Watch(cli::WatchArgs),
    /// Run the service proxy, or inspect a running one.
    Proxy(cli::ProxyArgs),
    /// Show the state store of a running agent.
    State(cli::StateArgs),
    /// Check this node before the agent or the proxy is started, and after; change nothing.
    Doctor(cli::DoctorArgs),
    /// Put the agent into the image path of the kubelet.
    Attach(cli::AttachArgs),
    /// Take the agent out of the image path of the kubelet, whether it runs or not.
    Bypass(cli::BypassArgs),
    /// Remove the agent's leases from the container runtime and its objects from the API server.
    Cleanup(cli::CleanupArgs),
    /// Collect state, logs and settings of agent and proxy for a bug report.
    SupportBundle(cli::SupportBundleArgs),
    /// Check or print the settings.
    Config(settings::ConfigArgs),
    /// Show the version, commit, compiler and parts of this program.
    Version(version::VersionArgs),
    /// Exit in place of an agent that still finishes calls.
    #[command(hide = true)]
    StandIn(agent::stand_in::StandInArgs),
    /// Print a shell completion script.
    #[command(after_help = "Example: keelson completions bash > /etc/bash_completion.d/keelson")]
    Completions {
        /// Shell to generate the script for.
        shell: clap_complete::Shell,
    },
    /// Write the man pages of all commands.
    #[cfg(debug_assertions)]
    #[command(hide = true)]
    Manual {
        /// Folder to write them to.
        folder: std::path::PathBuf,
    },
}

fn main() -> ExitCode {
    memory::set_up_allocator();
    let outcome = match kubectl::is_plugin() {
        true => run_request(kubectl::run(kubectl::PluginArgs::parse())),
        false => run(Arguments::parse().command),
    };
    outcome.unwrap_or_else(|error| {
        output::print_error(&format!("keelson: {error:#}"));
        ExitCode::FAILURE
    })
}

fn run(command: Command) -> anyhow::Result<ExitCode> {
    match command {
        Command::Agent(args) => {
            let systemd_handover = args.systemd_handover();
            agent::run(&args.settings(), systemd_handover)
        }
        Command::StandIn(args) => agent::stand_in::run(&args),
        Command::Config(args) => settings::run(&args),
        Command::Actors(args) => run_request(cli::run_actors(args)),
        Command::Pulls(args) => run_request(cli::run_pulls(args)),
        Command::Limit(args) => run_request(cli::run_limit(args)),
        Command::Node(args) => run_request(cli::run_node(args)),
        Command::Endpoints(args) => run_request(cli::run_endpoints(args)),
        Command::Watch(args) => run_request(cli::run_watch(args)),
        Command::Proxy(args) => cli::run_proxy(args),
        Command::Doctor(args) => run_request(cli::run_doctor(args)),
        Command::Attach(args) => run_request(cli::run_attach(args)),
        Command::Bypass(args) => cli::run_bypass(&args),
        Command::Cleanup(args) => run_request(cli::run_cleanup(args)),
        Command::State(args) => run_request(cli::run_state(args)),
        Command::Version(args) => version::run(&args),
        #[cfg(debug_assertions)]
        Command::Manual { folder } => manual::write(Arguments::command(), &folder),
        Command::SupportBundle(args) => run_request(cli::run_support_bundle(args)),
        Command::Completions { shell } => {
            clap_complete::generate(shell, &mut Arguments::command(), "keelson", &mut std::io::stdout());
            Ok(ExitCode::SUCCESS)
        }
    }
}

fn run_request(command: impl Future<Output = anyhow::Result<ExitCode>>) -> anyhow::Result<ExitCode> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let result = runtime.block_on(command);
    // A read that was given up may hang on a disk; the command ends without it.
    runtime.shutdown_background();
    result
}
