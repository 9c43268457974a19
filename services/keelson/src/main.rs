//! The `keelson` binary.
//!
//! Owns: the command line. In: arguments, environment, signals. Out: [`agent`] runs the agent;
//! [`cli`] asks a running one; [`proxy`] makes rules; [`settings`] explains the settings. Exit codes: 0 well, 1 failed,
//! 2 wrong usage or settings, 70 the agent ended itself after a panic.

mod agent;
mod cli;
mod memory;
mod proxy;
mod settings;

use std::process::ExitCode;

use clap::{CommandFactory as _, Parser, Subcommand};

/// Keelson, a restart-safe Kubernetes node agent.
///
/// It stands between the kubelet and the container runtime, and limits, queues, de-duplicates,
/// shows and survives image pulls; it reports the node's heartbeats; and it serves what Services
/// mean on this node.
#[derive(Debug, Parser)]
#[command(name = "keelson", version, arg_required_else_help = true, max_term_width = 100)]
#[command(
    after_help = "Start here: `keelson agent` runs the agent; `keelson pulls --watch` shows what it does.\n\
    Settings: /etc/keelson/keelson.toml; `keelson config show` says what is in force and why."
)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run the agent.
    Agent(settings::AgentArgs),
    /// Show the actors of a running agent, or one of them in full.
    Actors(cli::ActorsArgs),
    /// Show queued, running and finished image pulls.
    Pulls(cli::PullsArgs),
    /// Show or change the limit of parallel image pulls of a running agent.
    Limit(cli::LimitArgs),
    /// Show the node's heartbeats (Lease, status, conditions); set or clear a condition.
    Node(cli::NodeArgs),
    /// Show the service endpoints: how fresh they are, every Service, and why an endpoint is chosen or not.
    Endpoints(cli::EndpointsArgs),
    /// Show what Services mean on this node, as it changes.
    Watch(cli::WatchArgs),
    /// Make Services work on this node: run a backend that follows the agent, or look into a running one.
    Proxy(proxy::ProxyArgs),
    /// Show the durable state of a running agent.
    State(cli::StateArgs),
    /// Remove what the agent left in the container runtime and at the API server.
    Cleanup(cli::CleanupArgs),
    /// Check and explain the settings.
    Config(settings::ConfigArgs),
    /// End in the place of an agent that has calls to finish.
    #[command(hide = true)]
    StandIn(agent::stand_in::StandInArgs),
    /// Print a completion script for a shell.
    #[command(after_help = "Example: keelson completions bash > /etc/bash_completion.d/keelson")]
    Completions {
        /// For which shell.
        shell: clap_complete::Shell,
    },
}

fn main() -> ExitCode {
    memory::set_up_allocator();
    let command = Arguments::parse().command;
    let outcome = match command {
        Command::Agent(args) => {
            let systemd_handover = args.systemd_handover();
            agent::run(&args.settings(), systemd_handover)
        }
        Command::StandIn(args) => agent::stand_in::run(&args),
        Command::Config(args) => settings::run(&args),
        Command::Actors(args) => ask(cli::run_actors(args)),
        Command::Pulls(args) => ask(cli::run_pulls(args)),
        Command::Limit(args) => ask(cli::run_limit(args)),
        Command::Node(args) => ask(cli::run_node(args)),
        Command::Endpoints(args) => ask(cli::run_endpoints(args)),
        Command::Watch(args) => ask(cli::run_watch(args)),
        Command::Proxy(args) => proxy::run(args),
        Command::Cleanup(args) => ask(cli::run_cleanup(args)),
        Command::State(args) => ask(cli::run_state(args)),
        Command::Completions { shell } => {
            clap_complete::generate(shell, &mut Arguments::command(), "keelson", &mut std::io::stdout());
            Ok(ExitCode::SUCCESS)
        }
    };
    outcome.unwrap_or_else(|error| {
        cli::complain(&format!("keelson: {error:#}"));
        ExitCode::FAILURE
    })
}

/// Runs a command that talks to the agent.
fn ask(command: impl Future<Output = anyhow::Result<ExitCode>>) -> anyhow::Result<ExitCode> {
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(command)
}
