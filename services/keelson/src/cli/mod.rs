//! The commands that look into a running agent: `keelson actors | pulls | limit | node | endpoints | state`.
//!
//! Owns: their arguments, how they find and ask the agent, and how answers look.
//! In: arguments, and the debug API on the agent's unix socket. Out: text or JSON on standard output,
//! complaints on standard error, and exit codes: 0 well, 1 failed, 2 wrong usage.

mod actors;
mod cleanup;
mod client;
mod endpoints;
mod format;
mod limit;
mod node;
mod output;
mod proxy;
mod pulls;
mod state;
mod table;
mod watch;
mod watch_endpoints;

use std::{path::PathBuf, process::ExitCode};

use clap::{Args, ValueEnum};
use keelson_config::{Errors, SocketSpec};

pub(crate) use actors::{ActorsArgs, run_actors};
pub(crate) use cleanup::{CleanupArgs, run_cleanup};
pub(crate) use endpoints::{EndpointsArgs, run_endpoints};
pub(crate) use limit::{LimitArgs, run_limit};
pub(crate) use node::{NodeArgs, run_node};
pub(crate) use output::{complain, print};
pub(crate) use proxy::{ProxyLook, run_proxy_look};
pub(crate) use pulls::{PullsArgs, run_pulls};
pub(crate) use state::{StateArgs, run_state};
pub(crate) use watch_endpoints::{WatchArgs, run_watch};

/// Which agent is asked.
#[derive(Debug, Clone, Args)]
pub(crate) struct AgentArgs {
    /// Debug socket of the agent [default: debug.listen of the settings, usually unix:///run/keelson/debug.sock].
    #[arg(long, global = true, value_name = "unix://PATH", value_parser = SocketSpec::parse)]
    socket: Option<SocketSpec>,
    /// Settings file to read the address of the debug socket from [default: /etc/keelson/keelson.toml, if it
    /// exists].
    #[arg(long, global = true, value_name = "FILE", conflicts_with = "socket")]
    config: Option<PathBuf>,
}

/// How the answer is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Output {
    /// Print text.
    Table,
    /// Print JSON with the fields of the debug API.
    Json,
}

/// The exit code of a command that is well if it ends.
fn exit(result: anyhow::Result<()>) -> anyhow::Result<ExitCode> {
    exit_with(result.map(|()| ExitCode::SUCCESS))
}

/// The exit code of a command; wrong settings are wrong usage.
fn exit_with(result: anyhow::Result<ExitCode>) -> anyhow::Result<ExitCode> {
    match result {
        Ok(code) => Ok(code),
        Err(error) if error.downcast_ref::<Errors>().is_some() => {
            complain(&format!("keelson: {error:#}"));
            Ok(ExitCode::from(2))
        }
        Err(error) => Err(error),
    }
}
