//! Shared by the commands: the flags that select the agent, the output format, exit codes.

use std::{path::PathBuf, process::ExitCode};

use clap::{Args, ValueEnum};
use keelson_config::{Errors, SocketSpec};

use crate::output::print_error;

#[derive(Debug, Clone, Args)]
pub(crate) struct AgentArgs {
    /// Debug socket of the agent [default: debug.listen of the settings, usually unix:///run/keelson/debug.sock].
    #[arg(long, global = true, value_name = "unix://PATH", value_parser = SocketSpec::parse)]
    pub(super) socket: Option<SocketSpec>,
    /// Settings file to read the address of the debug socket from [default: /etc/keelson/keelson.toml, if it
    /// exists].
    #[arg(long, global = true, value_name = "FILE", conflicts_with = "socket")]
    pub(super) config: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Output {
    /// Print text.
    Table,
    /// Print JSON.
    Json,
}

/// The exit code of a command without failure codes of its own.
pub(super) fn exit(result: anyhow::Result<()>) -> anyhow::Result<ExitCode> {
    exit_with(result.map(|()| ExitCode::SUCCESS))
}

/// The exit code of a command: 2 for invalid settings.
pub(super) fn exit_with(result: anyhow::Result<ExitCode>) -> anyhow::Result<ExitCode> {
    match result {
        Ok(code) => Ok(code),
        Err(error) if error.downcast_ref::<Errors>().is_some() => {
            print_error(&format!("keelson: {error:#}"));
            Ok(ExitCode::from(2))
        }
        Err(error) => Err(error),
    }
}
