//! The `keelson` binary.
//!
//! Owns: the command line. In: arguments, environment, signals. Out: [`agent`] runs the agent; [`cli`] queries a
//! running one; [`proxy`] runs the service proxy; [`settings`] shows the settings. Exit codes: 0 success, 1 failed, 2
//! wrong usage or settings, 70 the agent ended itself after a panic.

mod agent;
mod cli;
mod memory;
mod node_settings;
mod output;
mod proxy;
mod settings;

use std::process::ExitCode;

use clap::{CommandFactory as _, Parser, Subcommand};

/// Keelson, a Kubernetes node agent that keeps its work across restarts.
/// The agent passes CRI calls from the kubelet to the container runtime. It limits, queues and deduplicates image
/// pulls and continues them after a restart. It reports the node's Lease, status and conditions. It serves the
/// Services and endpoints of this node to service proxies.
#[derive(Debug, Parser)]
#[command(name = "keelson", version, arg_required_else_help = true, max_term_width = 100)]
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
    Proxy(proxy::ProxyArgs),
    /// Show the state store of a running agent.
    State(cli::StateArgs),
    /// Remove the agent's leases from the container runtime and its objects from the API server.
    Cleanup(cli::CleanupArgs),
    /// Check or print the settings.
    Config(settings::ConfigArgs),
    /// Exit in place of an agent that still finishes calls.
    #[command(hide = true)]
    StandIn(agent::stand_in::StandInArgs),
    /// Print a shell completion script.
    #[command(after_help = "Example: keelson completions bash > /etc/bash_completion.d/keelson")]
    Completions {
        /// Shell to generate the script for.
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
        Command::Actors(args) => run_request(cli::run_actors(args)),
        Command::Pulls(args) => run_request(cli::run_pulls(args)),
        Command::Limit(args) => run_request(cli::run_limit(args)),
        Command::Node(args) => run_request(cli::run_node(args)),
        Command::Endpoints(args) => run_request(cli::run_endpoints(args)),
        Command::Watch(args) => run_request(cli::run_watch(args)),
        Command::Proxy(args) => proxy::run(args),
        Command::Cleanup(args) => run_request(cli::run_cleanup(args)),
        Command::State(args) => run_request(cli::run_state(args)),
        Command::Completions { shell } => {
            clap_complete::generate(shell, &mut Arguments::command(), "keelson", &mut std::io::stdout());
            Ok(ExitCode::SUCCESS)
        }
    };
    outcome.unwrap_or_else(|error| {
        output::print_error(&format!("keelson: {error:#}"));
        ExitCode::FAILURE
    })
}

fn run_request(command: impl Future<Output = anyhow::Result<ExitCode>>) -> anyhow::Result<ExitCode> {
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(command)
}
