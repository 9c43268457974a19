//! `keelson watch`.
//!
//! In: the Endpoints API of an agent, through the client library. Out: the state of this node's Services, once or as it
//! changes, as a table, JSON or YAML on standard output; errors, and where to resume, on standard error.

mod view;

use std::{
    collections::BTreeSet,
    io,
    path::PathBuf,
    process::ExitCode,
    time::{Duration, UNIX_EPOCH},
};

use anyhow::{Context as _, bail};
use clap::{Args, ValueEnum};
use keelson_client::{
    BoxError, CancellationToken, Client, EndpointsArgs, Handlers, NodeInfo, Position, ServiceEndpoints,
    ServiceName, Target,
};
use keelson_config::ListenSpec;
use serde::Serialize;

use super::{
    args::exit_with,
    format::{clean, one_line},
    table::Table,
};
use crate::output::{json, print_error, write};
use crate::settings::SettingsArgs;
use view::{Change, FullState, Service, addresses, cluster_ips, protocol};

/// Show the Services and endpoints of this node as they change.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    keelson watch\n  \
    keelson watch shop/cart\n  \
    keelson watch --once -n shop -o json | jq '.services[].clusterIPs'\n\n\
    As a table, each line is one change: + added, ~ changed, - deleted, * the node, ! sync status. With \
    --instance-id and --rev, only changes since that revision are shown; with --once, the command waits for the \
    next \
    state.")]
pub(crate) struct WatchArgs {
    /// Show only this Service.
    #[arg(value_name = "NAMESPACE/NAME", value_parser = service_name, conflicts_with = "namespace")]
    service: Option<ServiceName>,
    /// Show only Services of this namespace.
    #[arg(short, long, value_name = "NAMESPACE")]
    namespace: Option<String>,
    /// Print one full state and exit; standard error shows the --instance-id and --rev to resume from.
    #[arg(long)]
    once: bool,
    /// Output format.
    #[arg(short, long, value_enum, default_value_t = Form::Table)]
    output: Form,
    /// Settings file to read the address of the Endpoints API from, unless --target is set [default:
    /// /etc/keelson/keelson.toml, if it exists].
    #[arg(long, value_name = "FILE", conflicts_with = "target")]
    config: Option<PathBuf>,
    #[command(flatten)]
    endpoints: EndpointsArgs,
}

/// How it is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Form {
    /// Print text.
    Table,
    /// Print one JSON document with --once, otherwise one per change, one per line.
    Json,
    /// Print YAML, one document per change.
    Yaml,
}

fn service_name(text: &str) -> Result<ServiceName, String> {
    match text.split_once('/') {
        Some((namespace, name)) if !namespace.is_empty() && !name.is_empty() && !name.contains('/') => {
            Ok(ServiceName::new(namespace, name))
        }
        _ => Err("write NAMESPACE/NAME, such as default/kubernetes".into()),
    }
}

/// An unreachable agent is no error: the command waits for it.
/// is waited for.
pub(crate) async fn run_watch(mut args: WatchArgs) -> anyhow::Result<ExitCode> {
    if args.endpoints.target.is_none() {
        match served_at(args.config.take()) {
            Ok(target) => args.endpoints.target = Some(target),
            Err(error) => return exit_with(Err(error)),
        }
    }
    let mut client = Client::new(args.endpoints.options());
    client.cancel_on_signals()?;
    client.on_error(|report| print_error(&format!("keelson: {}", one_line(&report.error.to_string()))));
    exit_with(run(args, client, write, print_error).await)
}

/// The address of the Endpoints API in the settings.
fn served_at(config: Option<PathBuf>) -> anyhow::Result<Target> {
    let settings = SettingsArgs { config, sets: Vec::new(), feature_gates: Vec::new() };
    let loaded = settings
        .load_agent()
        .context("cannot read the address of the Endpoints API from the settings; pass it with --target")?;
    reachable(&loaded.settings.endpoints.listen)
}

/// Prefers a socket to a port; a wildcard address is replaced by loopback.
fn reachable(listen: &[ListenSpec]) -> anyhow::Result<Target> {
    let is_socket = |spec: &&ListenSpec| matches!(spec, ListenSpec::Unix(_));
    let Some(spec) = listen.iter().find(is_socket).or(listen.first()) else {
        bail!(
            "the settings have no address of the Endpoints API (endpoints.listen is empty); pass one with \
             --target"
        );
    };
    let text = match spec {
        ListenSpec::Tcp(address) if address.ip().is_unspecified() => {
            let ip = if address.is_ipv4() { "127.0.0.1" } else { "[::1]" };
            format!("tcp://{ip}:{}", address.port())
        }
        spec => spec.to_string(),
    };
    text.parse().context("cannot use the address in endpoints.listen; pass another with --target")
}

async fn run(
    args: WatchArgs,
    mut client: Client,
    out: impl FnMut(&str) -> io::Result<()> + Send,
    say: impl Fn(&str),
) -> anyhow::Result<ExitCode> {
    if args.once {
        return once(args, client, out, say).await;
    }
    let resumes = args.endpoints.instance_id != 0;
    let mut show = Printer {
        cancel: client.cancellation(),
        resumes,
        args,
        known: BTreeSet::new(),
        text: String::new(),
        stale: String::new(),
        out,
        failed: None,
    };
    let position = client.run(&mut show).await;
    // Without a received state there is nothing to resume from.
    if position.rev > 0 {
        say(&resume(&position));
    }
    match show.failed {
        Some(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(error.into()),
        _ => Ok(ExitCode::SUCCESS),
    }
}

fn resume(position: &Position) -> String {
    format!(
        "keelson: to resume from this revision: --instance-id {} --rev {}",
        position.instance_id, position.rev
    )
}

impl WatchArgs {
    fn shows(&self, name: &ServiceName) -> bool {
        self.service.as_ref().is_none_or(|only| only == name)
            && self.namespace.as_ref().is_none_or(|only| only == name.namespace())
    }
}

async fn once(
    args: WatchArgs,
    mut client: Client,
    mut out: impl FnMut(&str) -> io::Result<()>,
    say: impl Fn(&str),
) -> anyhow::Result<ExitCode> {
    let Some(state) = client.next().await else {
        say("keelson: interrupted before a state was received");
        return Ok(ExitCode::FAILURE);
    };
    let services = state.services().iter().filter(|raw| args.shows(raw.name()));
    let services = services.map(|raw| raw.decode()).collect::<Result<Vec<_>, _>>()?;
    let position = state.position();
    if let Some(name) = args.service.as_ref().filter(|_| services.is_empty()) {
        say(&format!("keelson: Service {name} does not exist or has no cluster IP"));
        say(&resume(position));
        return Ok(ExitCode::FAILURE);
    }
    let text = match args.output {
        Form::Json => json(&FullState::new(position, state.node(), &services))?,
        Form::Yaml => serde_saphyr::to_string(&FullState::new(position, state.node(), &services))?,
        Form::Table => tables(&services, args.service.is_some()),
    };
    match out(&text) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => {}
        result => result?,
    }
    if position.stale {
        say(&format!("keelson: this state is {}", staleness(position)));
    }
    say(&resume(position));
    Ok(ExitCode::SUCCESS)
}

/// `stale since 2026-11-23T10:00:00Z: why`, as far as known.
fn staleness(position: &Position) -> String {
    /// The last time with a year of four digits; later ones cannot be formatted.
    const MAX_UNIX_MS: u64 = 253_402_300_799_999;
    let since = position.stale_since_unix_ms.and_then(|ms| u64::try_from(ms).ok());
    let since = since.filter(|ms| *ms <= MAX_UNIX_MS).map(|ms| UNIX_EPOCH + Duration::from_millis(ms));
    let since = since.map(|at| format!(" since {}", humantime::format_rfc3339_seconds(at)));
    format!("stale{}: {}", since.unwrap_or_default(), one_line(&position.stale_reason))
}

/// One line per Service; if one was requested, its endpoints too.
fn tables(services: &[ServiceEndpoints], endpoints: bool) -> String {
    let mut table = Table::new(&["SERVICE", "TYPE", "CLUSTER-IPS", "PORTS", "ENDPOINTS"]);
    for service in services {
        table.row(cells(service));
    }
    let mut text = table.text();
    for service in services.iter().filter(|_| endpoints) {
        let mut table = Table::new(&["ADDRESS", "PORTS", "CONDITION", "LOCAL", "SELECTED"]);
        for endpoint in &service.endpoints {
            let conditions = endpoint.conditions.unwrap_or_default();
            let condition = match (conditions.ready, conditions.serving, conditions.terminating) {
                (true, _, false) => "ready",
                (true, _, true) => "ready, terminating",
                (false, true, true) => "serving, terminating",
                (false, true, false) => "serving",
                (false, false, _) => "not ready",
            };
            let yes = |yes: bool| if yes { "yes".to_owned() } else { String::new() };
            let ports: Vec<String> = endpoint.ports.iter().map(|port| port.port.to_string()).collect();
            table.row([
                clean(&addresses(endpoint.i_ps.as_ref()).join(",")),
                ports.join(","),
                condition.into(),
                yes(conditions.local),
                yes(conditions.selected),
            ]);
        }
        text.push('\n');
        text.push_str(&table.text());
    }
    text
}

fn cells(service: &ServiceEndpoints) -> [String; 5] {
    [
        clean(&format!("{}/{}", service.namespace, service.name)),
        clean(&service.r#type),
        clean(&cluster_ips(service).join(",")),
        clean(&service.ports.iter().map(port).collect::<Vec<_>>().join(", ")),
        endpoints(service),
    ]
}

/// `http 80/TCP`, `http 80:30080/TCP`.
fn port(port: &keelson_client::localnetv1::PortMapping) -> String {
    let name = if port.name.is_empty() { String::new() } else { format!("{} ", port.name) };
    let node_port = if port.node_port == 0 { String::new() } else { format!(":{}", port.node_port) };
    format!("{name}{}{node_port}/{}", port.port, protocol(port))
}

/// `3 ready, 2 selected`.
fn endpoints(service: &ServiceEndpoints) -> String {
    let conditions = || service.endpoints.iter().filter_map(|endpoint| endpoint.conditions);
    let ready = conditions().filter(|conditions| conditions.ready).count();
    let selected = conditions().filter(|conditions| conditions.selected).count();
    format!("{ready} ready, {selected} selected")
}

struct Printer<W> {
    args: WatchArgs,
    /// The shown state is not known to be new.
    resumes: bool,
    known: BTreeSet<ServiceName>,
    /// Of the state that is not complete yet.
    text: String,
    /// The last reported staleness.
    stale: String,
    cancel: CancellationToken,
    out: W,
    failed: Option<io::Error>,
}

impl<W: FnMut(&str) -> io::Result<()> + Send> Printer<W> {
    fn document(&mut self, change: &impl Serialize) {
        let text = match self.args.output {
            Form::Yaml => {
                serde_saphyr::to_string(change).map(|text| format!("---\n{text}")).map_err(io::Error::other)
            }
            Form::Json | Form::Table => serde_json::to_string(change).map_err(io::Error::other),
        };
        match text {
            Ok(text) => self.line(&text),
            Err(error) => self.fail(error),
        }
    }

    fn fail(&mut self, error: io::Error) {
        self.failed = Some(error);
        self.cancel.cancel();
    }

    fn line(&mut self, text: &str) {
        self.text.push_str(text.trim_end());
        self.text.push('\n');
    }

    fn staleness(&mut self, position: &Position) {
        let stale = if position.stale {
            format!("! {}", staleness(position))
        } else if self.stale.is_empty() {
            String::new()
        } else {
            "! synced".into()
        };
        if stale != self.stale {
            self.line(&stale);
            self.stale = stale;
        }
    }
}

impl<W: FnMut(&str) -> io::Result<()> + Send> Handlers for Printer<W> {
    fn node(&mut self, node: NodeInfo) {
        if self.args.output != Form::Table {
            return self.document(&Change::Node { node: (&node).into() });
        }
        let mut parts = vec![format!("* node {}", node.name)];
        if !node.exists {
            parts.push("does not exist".into());
        }
        if !node.zone.is_empty() {
            parts.push(format!("zone {}", node.zone));
        }
        parts.extend(Some(addresses(node.i_ps.as_ref()).join(",")).filter(|ips| !ips.is_empty()));
        if !node.eligible {
            parts.push("excluded from load balancers".into());
        }
        self.line(&clean(&parts.join("  ")));
    }

    fn delete(&mut self, name: &ServiceName) {
        self.known.remove(name);
        match self.args.output {
            _ if !self.args.shows(name) => {}
            Form::Table => self.line(&clean(&format!("- {name}"))),
            Form::Json | Form::Yaml => self.document(&Change::from(name)),
        }
    }

    fn set(&mut self, name: &ServiceName, service: ServiceEndpoints) {
        if !self.args.shows(name) {
            return;
        }
        let new = self.known.insert(name.clone()) && !self.resumes;
        if self.args.output == Form::Table {
            let sign = if new { '+' } else { '~' };
            let cells = cells(&service).map(|cell| if cell.is_empty() { "-".into() } else { cell });
            self.line(&format!("{sign} {}", cells.join("  ")));
        } else {
            self.document(&Change::Set { service: Service::from(&service) });
        }
    }

    async fn sync(&mut self, position: &Position) -> Result<(), BoxError> {
        if self.args.output == Form::Table {
            self.staleness(position);
        } else {
            self.document(&Change::Sync(position.into()));
        }
        let text = std::mem::take(&mut self.text);
        if !text.is_empty()
            && let Err(error) = (self.out)(&text)
        {
            self.fail(error);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
