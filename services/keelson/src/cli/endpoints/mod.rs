//! `keelson endpoints [list | explain | watchers]`.
//!
//! In: the Inspection service of the agent. Out: sync status, Services, clients, or one
//! Service with the rules that apply; as text or JSON.

mod backends;
mod explanation;
mod names;
mod state;

use std::process::ExitCode;

use clap::{Args, Subcommand};
use keelson_actor_system::clock::unix_ms;
use keelson_proto::endpoints::{self as pb, inspection_client::InspectionClient};
use serde_json::json;
use tonic::{Code, transport::Channel};

use super::{
    args::{AgentArgs, Output, exit_with},
    client,
};
use crate::output::{json as to_json, print, print_error};
use names::ServiceRef;

/// For a list without `--max`.
const DEFAULT_SERVICES: u32 = 1_000;
/// The agent's maximum.
const MAX_SERVICES: u32 = 100_000;

/// Show the sync status, Services and clients of the service endpoints, or explain one Service.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    keelson endpoints                      problems, sync status, backends, and one line per Service\n  \
    keelson endpoints --max 0              the same without Services\n  \
    keelson endpoints -n shop              Services of one namespace\n  \
    keelson endpoints explain shop/web     frontends, traffic policies and endpoint selection of one Service\n  \
    keelson endpoints watchers             connected clients and how many revisions each is behind\n  \
    keelson endpoints -o json | jq -r '.list[] | select(.selected == 0) | .namespace + \"/\" + .name'\n  \
    keelson endpoints --max 0 -o json | jq '.backends[] | select(.silent or .state == \"failing\")'")]
pub(crate) struct EndpointsArgs {
    #[command(subcommand)]
    what: Option<EndpointsCommand>,
    /// Show only Services of this namespace; with explain, the namespace of a NAME without one [default:
    /// default].
    #[arg(short, long, global = true, value_name = "NAMESPACE")]
    namespace: Option<String>,
    /// Maximum number of Services to list (0: none) [default: 1000].
    #[arg(long, global = true, value_name = "N", value_parser = clap::value_parser!(u32).range(..=i64::from(MAX_SERVICES)))]
    max: Option<u32>,
    /// Output format.
    #[arg(short, long, global = true, value_enum, default_value_t = Output::Table)]
    output: Output,
    #[command(flatten)]
    agent: AgentArgs,
}

#[derive(Debug, Subcommand)]
enum EndpointsCommand {
    /// Show sync status and one line per Service (default).
    List,
    /// Explain one Service: frontends, traffic policies, and why each endpoint is selected or not.
    #[command(after_help = "Examples:\n  \
        keelson endpoints explain shop/web\n  \
        keelson endpoints explain web -n shop\n  \
        keelson endpoints explain kubernetes        in the namespace default\n\n\
        The exit code is 1 if the agent knows neither the Service nor an EndpointSlice of it.")]
    Explain {
        /// Service to explain.
        #[arg(value_name = "[NAMESPACE/]NAME")]
        service: String,
    },
    /// Show the clients that are connected to the Endpoints API.
    Watchers,
}

pub(crate) async fn run_endpoints(args: EndpointsArgs) -> anyhow::Result<ExitCode> {
    exit_with(run(args).await)
}

async fn run(args: EndpointsArgs) -> anyhow::Result<ExitCode> {
    if let Some(wrong) = wrong_usage(&args) {
        print_error(&format!("keelson: {wrong}"));
        return Ok(ExitCode::from(2));
    }
    let asked = async || client::open_inspection(&args.agent).await;
    let text = match &args.what {
        None | Some(EndpointsCommand::List) => {
            let max = args.max.unwrap_or(DEFAULT_SERVICES);
            list(asked().await?, args.namespace.as_deref().unwrap_or_default(), max, args.output).await?
        }
        Some(EndpointsCommand::Watchers) => watchers(asked().await?, args.output).await?,
        Some(EndpointsCommand::Explain { service }) => {
            match ServiceRef::parse(service, args.namespace.as_deref()) {
                Ok(service) => explain(asked().await?, &service, args.output).await?,
                Err(wrong) => {
                    print_error(&format!("keelson: {wrong}"));
                    return Ok(ExitCode::from(2));
                }
            }
        }
    };
    print(&text)?;
    Ok(ExitCode::SUCCESS)
}

/// As conflicts in clap these would exclude all options with subcommands, including --socket.
fn wrong_usage(args: &EndpointsArgs) -> Option<&'static str> {
    match &args.what {
        None | Some(EndpointsCommand::List) => None,
        Some(EndpointsCommand::Explain { .. }) if args.max.is_some() => {
            Some("--max cannot be used with explain")
        }
        Some(EndpointsCommand::Watchers) if args.max.is_some() || args.namespace.is_some() => {
            Some("-n and --max cannot be used with watchers, which lists all clients")
        }
        Some(_) => None,
    }
}

type Client = InspectionClient<Channel>;

async fn get_state(client: &mut Client, namespace: &str, max: u32) -> Result<pb::State, client::Refused> {
    let request = pb::GetStateRequest { namespace: namespace.into(), max_services: max };
    Ok(client.get_state(client::request(request)).await?.into_inner())
}

async fn list(mut client: Client, namespace: &str, max: u32, output: Output) -> anyhow::Result<String> {
    let state = get_state(&mut client, namespace, max).await?;
    if let Some(cut) = state::truncation_note(&state, namespace, max) {
        print_error(&format!("keelson: {cut}"));
    }
    match output {
        Output::Json => to_json(&state),
        Output::Table => Ok(state::describe(&state, namespace, max, unix_ms())),
    }
}

async fn watchers(mut client: Client, output: Output) -> anyhow::Result<String> {
    let state = get_state(&mut client, "", 0).await?;
    match output {
        Output::Json => to_json(&json!({ "rev": state.rev, "watchers": state.watchers })),
        Output::Table => Ok(state::watchers(&state, unix_ms())),
    }
}

async fn explain(mut client: Client, service: &ServiceRef, output: Output) -> anyhow::Result<String> {
    let request = pb::ExplainRequest { namespace: service.namespace.clone(), name: service.name.clone() };
    let explanation = match client.explain(client::request(request)).await {
        Ok(explanation) => explanation.into_inner(),
        Err(status) if status.code() == Code::NotFound => {
            let refused = client::Refused::from(status);
            // Without the names of other Services there is no hint.
            let known = get_state(&mut client, "", MAX_SERVICES).await.unwrap_or_default();
            anyhow::bail!("{refused}{}", names::hint(service, &known.list));
        }
        Err(status) => return Err(client::Refused::from(status).into()),
    };
    match output {
        Output::Json => to_json(&explanation),
        Output::Table => Ok(explanation::describe(&explanation)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::testing::parsed;

    #[test]
    fn command_lines() {
        let plain = parsed::<EndpointsArgs>(&[]).unwrap();
        assert!(plain.what.is_none() && plain.max.is_none() && plain.namespace.is_none());
        for words in [
            &["-n", "shop", "--max", "5", "-o", "json", "--socket", "unix:///x"][..],
            &["list", "-n", "shop", "--max", "5", "-o", "json", "--socket", "unix:///x"],
            &["-n", "shop", "--max", "5", "list", "-o", "json", "--socket", "unix:///x"],
        ] {
            let args: EndpointsArgs = parsed(words).unwrap();
            assert_eq!(
                (args.namespace.as_deref(), args.max, args.output),
                (Some("shop"), Some(5), Output::Json)
            );
            assert_eq!(wrong_usage(&args), None, "{words:?}");
        }
        let args: EndpointsArgs = parsed(&["explain", "web", "-n", "shop"]).unwrap();
        assert!(matches!(&args.what, Some(EndpointsCommand::Explain { service }) if service == "web"));
        assert_eq!(wrong_usage(&args), None);
        for wrong in
            [&["explain"][..], &["explain", "a", "b"], &["--max", "100001"], &["--max", "-1"], &["shop/web"]]
        {
            assert!(parsed::<EndpointsArgs>(wrong).is_err(), "{wrong:?}");
        }
        for wrong in
            [&["explain", "a", "--max", "1"][..], &["watchers", "-n", "a"], &["watchers", "--max", "1"]]
        {
            assert!(wrong_usage(&parsed(wrong).unwrap()).is_some(), "{wrong:?}");
        }
    }
}
