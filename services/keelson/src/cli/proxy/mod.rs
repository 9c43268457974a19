//! `keelson proxy state | explain | print`: inspects a running proxy.
//!
//! In: the debug API on the proxy's unix socket; for `state`, also the agent's. Out: sync status, the path of
//! a packet, or the ruleset, as text or JSON. `keelson proxy` itself runs one.

mod command;
mod explanation;
mod state;

use std::{io, process::ExitCode, time::Duration};

use anyhow::Context as _;
use clap::{Args, Subcommand};
use keelson_config::SocketSpec;
use keelson_proto::{
    endpoints::{self, inspection_client::InspectionClient},
    proxy::{self as pb, proxy_client::ProxyClient},
};
use keelson_proxy::explain::{Question, Source, Target};
use tonic::{Status, transport::Channel};

pub(crate) use self::command::{ProxyArgs, run_proxy};
use super::{
    Output,
    client::{self, Peer, Refused},
    exit_with,
    output::{json, print, print_error, write},
};
use crate::settings::SettingsArgs;

/// Maximum size of an answer in bytes: there may be many notes about conflicts.
const MAX_MESSAGE: usize = 64 * 1024 * 1024;
/// The agent's revision is not worth a longer wait.
const AGENT_TIMEOUT: Duration = Duration::from_secs(2);

/// What one wants to know of a running proxy.
#[derive(Debug, Subcommand)]
pub(crate) enum ProxyInspectCommand {
    /// Show the sync status of a running proxy; exit with code 1 if there is a problem.
    State(StateArgs),
    /// Explain which rules a packet to an address and port matches, and which endpoints can receive it.
    Explain(ExplainArgs),
    /// Print the ruleset of a running proxy as text for `nft -f`.
    Print(PrintArgs),
}

/// Which proxy is asked.
#[derive(Debug, Clone, Args)]
struct SocketArgs {
    /// Debug socket of the proxy [default: proxy.listen of the settings, usually
    /// unix:///run/keelson-proxy/proxy.sock].
    #[arg(long, value_name = "unix://PATH", value_parser = SocketSpec::parse)]
    socket: Option<SocketSpec>,
}

/// Show the sync status of a running proxy.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    keelson proxy state\n  \
    keelson proxy state -o json | jq '.families[] | {family, state, reason}'\n\n\
    Problems are listed first. The exit code is 1 if there is one, or if the proxy does not answer.")]
pub(crate) struct StateArgs {
    /// Output format.
    #[arg(short, long, value_enum, default_value_t = Output::Table)]
    output: Output,
    #[command(flatten)]
    socket: SocketArgs,
}

/// Explain which rules a packet matches.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    keelson proxy explain 10.96.0.10:80                      the first packet of a connection from a pod, the \
    node \
    and outside\n  \
    keelson proxy explain '[fd00:96::a]:53/UDP' --from pod\n  \
    keelson proxy explain 192.0.2.10:30080 --from 198.51.100.7\n\n\
    The explanation uses the rules that the proxy has programmed; other tables of the node are not considered.")]
pub(crate) struct ExplainArgs {
    /// Destination: an IP address, a port, and a protocol if it is not TCP.
    #[arg(value_name = "ADDRESS:PORT[/PROTOCOL]")]
    target: Target,
    /// Source: an IP address, pod, node or outside [default: pod, node and outside].
    #[arg(long, value_name = "SOURCE")]
    from: Option<Source>,
    /// Output format.
    #[arg(short, long, value_enum, default_value_t = Output::Table)]
    output: Output,
    #[command(flatten)]
    socket: SocketArgs,
}

/// Print the ruleset of a running proxy.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    keelson proxy print > keelson.nft\n  \
    keelson proxy print | grep 10.96.0.10\n\n\
    This is the ruleset that the proxy programs. `nft list table ip keelson` shows what the kernel has.")]
pub(crate) struct PrintArgs {
    #[command(flatten)]
    socket: SocketArgs,
}

/// The settings give the addresses of the sockets.
pub(crate) async fn run_proxy_inspect(
    look: ProxyInspectCommand,
    settings: &SettingsArgs,
) -> anyhow::Result<ExitCode> {
    exit_with(match look {
        ProxyInspectCommand::State(args) => state(args, settings).await,
        ProxyInspectCommand::Explain(args) => explain(args, settings).await,
        ProxyInspectCommand::Print(args) => print_ruleset(args, settings).await,
    })
}

async fn open(args: &SocketArgs, settings: &SettingsArgs) -> anyhow::Result<ProxyClient<Channel>> {
    let socket = match &args.socket {
        Some(socket) => socket.clone(),
        None => {
            let loaded = settings.load().context(
                "cannot read the address of the proxy's debug socket from the settings; pass it with --socket",
            )?;
            loaded.settings.proxy.listen.clone()
        }
    };
    let channel = client::channel(Peer::Proxy, &socket).await?;
    Ok(ProxyClient::new(channel).max_decoding_message_size(MAX_MESSAGE))
}

fn refused(status: Status) -> Refused {
    Refused::from_peer(Peer::Proxy, status)
}

async fn state(args: StateArgs, settings: &SettingsArgs) -> anyhow::Result<ExitCode> {
    let mut client = open(&args.socket, settings).await?;
    let state =
        client.get_state(client::request(pb::GetStateRequest {})).await.map_err(refused)?.into_inner();
    let now = keelson_actor_system::clock::unix_ms();
    let text = match args.output {
        Output::Json => json(&state)?,
        Output::Table => {
            let newest = tokio::time::timeout(AGENT_TIMEOUT, newest(settings)).await.unwrap_or(None);
            state::describe(&state, newest.as_ref(), now)
        }
    };
    print(&text)?;
    Ok(if state::problems(&state, now).is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// The state that the agent serves now; `None` if no agent in the settings answers.
async fn newest(settings: &SettingsArgs) -> Option<endpoints::State> {
    let socket = settings.load().ok()?.settings.debug.listen.clone();
    let mut client = InspectionClient::new(client::channel(Peer::Agent, &socket).await.ok()?);
    let request = endpoints::GetStateRequest { namespace: String::new(), max_services: 0 };
    Some(client.get_state(client::request(request)).await.ok()?.into_inner())
}

async fn explain(args: ExplainArgs, settings: &SettingsArgs) -> anyhow::Result<ExitCode> {
    let question = match Question::new(args.target, args.from.unwrap_or(Source::Any)) {
        Ok(question) => question,
        Err(wrong) => {
            print_error(&format!("keelson: {wrong}"));
            return Ok(ExitCode::from(2));
        }
    };
    let mut client = open(&args.socket, settings).await?;
    let answer = client.explain(client::request(pb::ExplainRequest::from(question))).await;
    let explanation = answer.map_err(refused)?.into_inner();
    let text = match args.output {
        Output::Json => json(&explanation)?,
        Output::Table => explanation::describe(&explanation),
    };
    print(&text)?;
    Ok(ExitCode::SUCCESS)
}

/// Written as it arrives: it may be hundreds of megabytes.
async fn print_ruleset(args: PrintArgs, settings: &SettingsArgs) -> anyhow::Result<ExitCode> {
    let mut client = open(&args.socket, settings).await?;
    // No timeout: the reader may be slow.
    let mut texts = client.print(pb::PrintRequest {}).await.map_err(refused)?.into_inner();
    let mut lines = Lines::default();
    while let Some(text) = texts.message().await.map_err(refused).context("the ruleset is incomplete")? {
        if !lines.write(&text.text)? {
            return Ok(ExitCode::SUCCESS);
        }
    }
    lines.end()?;
    Ok(ExitCode::SUCCESS)
}

/// Text that arrives in pieces, written by complete lines; an incomplete line is not printed.
#[derive(Debug, Default)]
struct Lines {
    rest: String,
}

impl Lines {
    /// False: the reader closed the output.
    fn write(&mut self, text: &str) -> io::Result<bool> {
        self.rest.push_str(text);
        let Some(end) = self.rest.rfind('\n') else { return Ok(true) };
        let rest = self.rest.split_off(end + 1);
        written(write(&std::mem::replace(&mut self.rest, rest)))
    }

    fn end(self) -> io::Result<bool> {
        if self.rest.is_empty() { Ok(true) } else { written(write(&self.rest)) }
    }
}

fn written(result: io::Result<()>) -> io::Result<bool> {
    match result {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(false),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests;
