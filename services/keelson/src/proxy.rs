//! `keelson proxy`: runs a backend, or inspects a running one.
//!
//! Owns: its arguments, the evaluation of the settings, and the order of start and stop. In: settings and signals. Out:
//! rules in the kernel, which stay when it ends; exit codes as of every command.

use std::{net::SocketAddr, process::ExitCode, sync::Arc};

use anyhow::Context as _;
use clap::{Args, Subcommand};
use keelson_client::{Client, Options as Follow, Target};
use keelson_config::{Format, ProxyBackend, Settings};
use keelson_proxy::{
    backend::{Access, Driver, RuleOwner},
    leftovers::{self, Places, Removal},
    preview::Preview,
    run::{Backends, RunConfig, run as run_proxy},
};
use keelson_serve::unix::Bound;
use tokio::{
    net::TcpListener,
    signal::unix::{SignalKind, signal},
};
use tokio_util::sync::CancellationToken;

use self::{
    choice::Selected,
    options::{options, settings_summary},
};
use crate::{
    agent::{logs, panics, raise_descriptors, systemd},
    cli::{self, ProxyInspectCommand},
    memory,
    settings::SettingsArgs,
};

mod choice;
mod options;

pub(crate) use choice::probe_backends;
pub(crate) use options::conntrack as conntrack_options;

/// All backends, in the order in which `auto` tries them, and whether it does. Their rules are removed in this order, too:
/// virtual servers before the chains that they need.
const DRIVERS: &[(ProxyBackend, &dyn Driver, bool)] = &[
    #[cfg(feature = "ebpf")]
    (ProxyBackend::Ebpf, &keelson_proxy_ebpf::Ebpf, true),
    (ProxyBackend::Nft, &keelson_proxy_nft::Nft, true),
    (ProxyBackend::Ipvs, &keelson_proxy_ipvs::Ipvs, false),
    (ProxyBackend::Iptables, &keelson_proxy_iptables::Iptables, true),
    (ProxyBackend::Userspace, &keelson_proxy_userspace::Userspace, true),
];

/// `None`: `auto`.
fn driver(backend: ProxyBackend) -> Option<&'static dyn Driver> {
    DRIVERS.iter().find(|(value, ..)| *value == backend).map(|(_, driver, _)| *driver)
}

/// Values of `proxy.backend`, without `auto`.
pub(crate) fn backend_names() -> impl Iterator<Item = &'static str> {
    DRIVERS.iter().map(|(_, driver, _)| driver.info().name)
}

/// `keelson proxy`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    keelson proxy --backend nft                       run the service proxy on this node\n  \
    keelson proxy --backend auto                      run it with the best backend of this node\n  \
    keelson proxy --backend nft --dry-run             print the changes that it would make\n  \
    keelson proxy --backend nft --print | nft -c -f - check the rules that it would program\n  \
    keelson proxy state                               show sync status and what is wrong\n  \
    keelson proxy explain 10.96.0.10:80               show which rules a packet matches\n  \
    keelson proxy cleanup                             remove all rules of Keelson")]
pub(crate) struct ProxyArgs {
    #[command(subcommand)]
    command: Option<ProxyCommand>,
    #[command(flatten)]
    run: RunArgs,
    #[command(flatten)]
    settings: SettingsArgs,
}

#[derive(Debug, Subcommand)]
enum ProxyCommand {
    #[command(flatten)]
    Look(ProxyInspectCommand),
    /// Remove all rules of Keelson from this node. Services stop working until a proxy programs them again.
    Cleanup {
        /// Remove the rules of a kube-proxy instead: nftables tables, iptables chains (nft and legacy), and the
        /// virtual servers, IP sets and interface of mode ipvs.
        #[arg(long)]
        kube_proxy: bool,
        /// Remove only the rules of this backend, for example beside a proxy with another one.
        #[arg(long, value_name = "BACKEND", conflicts_with = "kube_proxy")]
        backend: Option<String>,
    },
}

/// Flags of a backend; each is short for a setting.
#[derive(Debug, Args)]
struct RunArgs {
    /// Backend that programs the Services [default: proxy.backend].
    #[arg(long, value_name = "BACKEND")]
    backend: Option<String>,
    /// Serve the Services with this value of the label service.kubernetes.io/service-proxy-name, beside another proxy
    /// [default: proxy.service_proxy_name].
    #[arg(long, value_name = "NAME")]
    service_proxy_name: Option<String>,
    /// Address of the agent's Endpoints API [default: proxy.target].
    #[arg(long, value_name = "TARGET")]
    target: Option<String>,
    /// Addresses that serve node ports: comma-separated networks, or primary [default: proxy.nodeport_addresses].
    #[arg(long, value_name = "CIDR,...")]
    nodeport_addresses: Option<String>,
    /// Networks of the cluster's pods, at most one per IP family [default: proxy.cluster_cidr].
    #[arg(long, value_name = "CIDR,...")]
    cluster_cidr: Option<String>,
    /// Interfaces for which established connections to Services are offloaded to a flowtable: names, or prefixes with `*`
    /// [default: proxy.flowtable_interfaces].
    #[arg(long, value_name = "INTERFACE,...")]
    flowtable_interfaces: Option<String>,
    /// Print the full ruleset as text for the backend's programs (`nft -f`, `iptables-restore`) and exit, without
    /// changing anything.
    #[arg(long)]
    print: bool,
    /// Print the changes that would be made, one per line, and exit, without changing anything.
    #[arg(long, conflicts_with = "print")]
    dry_run: bool,
}

impl RunArgs {
    /// The first flag that is set, to reject it where it has no effect.
    fn first_flag(&self) -> Option<&'static str> {
        [
            ("--backend", self.backend.is_some()),
            ("--service-proxy-name", self.service_proxy_name.is_some()),
            ("--target", self.target.is_some()),
            ("--nodeport-addresses", self.nodeport_addresses.is_some()),
            ("--cluster-cidr", self.cluster_cidr.is_some()),
            ("--flowtable-interfaces", self.flowtable_interfaces.is_some()),
            ("--print", self.print),
            ("--dry-run", self.dry_run),
        ]
        .into_iter()
        .find_map(|(flag, is_set)| is_set.then_some(flag))
    }

    fn into_settings(self, mut settings: SettingsArgs) -> SettingsArgs {
        for (key, value) in [
            ("backend", self.backend),
            ("service_proxy_name", self.service_proxy_name),
            ("target", self.target),
            ("nodeport_addresses", self.nodeport_addresses),
            ("cluster_cidr", self.cluster_cidr),
            ("flowtable_interfaces", self.flowtable_interfaces),
        ] {
            settings.sets.extend(value.map(|value| format!("proxy.{key}={value}")));
        }
        settings
    }
}

pub(crate) fn run(args: ProxyArgs) -> anyhow::Result<ExitCode> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    if let (Some(_), Some(flag)) = (&args.command, args.run.first_flag()) {
        cli::print_error(&format!(
            "keelson: {flag} is only valid for running a proxy, not with a subcommand"
        ));
        return Ok(ExitCode::from(2));
    }
    match args.command {
        Some(ProxyCommand::Look(look)) => runtime.block_on(cli::run_proxy_inspect(look, &args.settings)),
        Some(ProxyCommand::Cleanup { kube_proxy, backend }) => clean_up(kube_proxy, backend.as_deref()),
        None => {
            let (print, dry_run) = (args.run.print, args.run.dry_run);
            let loaded = match args.run.into_settings(args.settings).load_or_print_error() {
                Ok(loaded) => loaded,
                Err(code) => return Ok(code),
            };
            let notes = loaded.kube_proxy.iter().flatten();
            match (print, dry_run) {
                (false, false) => {
                    logs::start(&loaded.settings.agent)?;
                    for note in notes {
                        tracing::warn!(note, "field of the KubeProxyConfiguration has no effect");
                    }
                    raise_descriptors();
                    panics::end_the_process();
                    let settings = keelson_config::render_show(&loaded, Format::Json);
                    runtime.block_on(program(loaded.settings, &settings))
                }
                (print, _) => {
                    notes.for_each(|note| cli::print_error(&format!("keelson: {note}")));
                    runtime.block_on(preview(&loaded.settings, print))
                }
            }
        }
    }
}

/// `backend`: only the rules of this one.
fn clean_up(kube_proxy: bool, backend: Option<&str>) -> anyhow::Result<ExitCode> {
    let names: Vec<&str> = backend_names().collect();
    if let Some(unknown) = backend.filter(|backend| !names.contains(backend)) {
        let names = names.join(", ");
        cli::print_error(&format!("keelson: no backend {unknown:?}; write one of {names}"));
        return Ok(ExitCode::from(2));
    }
    let owner = if kube_proxy { RuleOwner::KubeProxy } else { RuleOwner::Keelson };
    // Chains of iptables first: some are in tables of nftables, and only iptables changes them.
    let mut removal = if kube_proxy { leftovers::remove(&Places::default()) } else { Removal::default() };
    let chosen = DRIVERS
        .iter()
        .map(|(_, driver, _)| *driver)
        .filter(|driver| backend.is_none_or(|backend| driver.info().name == backend));
    remove_rules(chosen, owner, &mut removal);
    for what in &removal.removed {
        cli::print(&format!("removed {what}"))?;
    }
    if removal.removed.is_empty() && removal.failed.is_empty() {
        cli::print("nothing to remove")?;
    }
    for note in &removal.notes {
        cli::print_error(&format!("keelson: {note}"));
    }
    for what in &removal.failed {
        cli::print_error(&format!("keelson: cannot remove {what}"));
    }
    Ok(if removal.failed.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// A backend that fails does not keep the rules of the others.
fn remove_rules<'a>(drivers: impl Iterator<Item = &'a dyn Driver>, owner: RuleOwner, removal: &mut Removal) {
    for driver in drivers {
        let removed = &mut removal.removed;
        if let Err(error) = driver.remove_rules(owner, &mut |object| removed.push(object)) {
            removal.failed.push(format!("the rules of the backend {}: {error}", driver.info().name));
        }
    }
}

/// Computes the changes for the latest state.
async fn preview(settings: &Settings, print: bool) -> anyhow::Result<ExitCode> {
    let target = target(settings)?;
    cli::print_error(&format!("keelson: reading the full state from {target}"));
    let service_proxy_name = options::service_proxy_name(settings);
    let mut client = Client::new(Follow { target, service_proxy_name, ..Follow::default() });
    client.cancel_on_signals()?;
    client.on_error(|report| cli::print_error(&format!("keelson: waiting for the agent: {}", report.error)));
    let Some(state) = client.next().await else { return Ok(ExitCode::FAILURE) };
    let Selected { driver, backend, .. } = choice::select(settings, Access::Compare)?;
    let options = options(settings, backend)?;
    let backend = match driver.open(&options, Access::Compare) {
        // Without the capability to read the kernel, the text is the same as on a node without rules.
        Err(_) if print => driver.open(&options, Access::Print),
        opened => opened,
    };
    let mut preview = Preview::new(backend?, options, &state)?;
    if print {
        let mut text = String::new();
        preview.print(&mut text).context("cannot print the ruleset")?;
        cli::print(text.trim_end())?;
    } else {
        let lines = preview.changes()?;
        match lines.is_empty() {
            true => cli::print("no changes")?,
            false => cli::print(&lines.join("\n"))?,
        }
    }
    Ok(ExitCode::SUCCESS)
}

async fn program(settings: Arc<Settings>, shown: &str) -> anyhow::Result<ExitCode> {
    let Selected { driver, backend, choice } = choice::select(&settings, Access::Program)?;
    let info = driver.info();
    tracing::info!(
        version = crate::version::SHORT,
        backend = info.name,
        requires = info.requirements,
        "proxy started"
    );
    memory::release_free_memory();
    let stop = CancellationToken::new();
    end_on_signals(stop.clone())?;
    let proxy = &settings.proxy;
    let (debug, _file) = Bound::bind(proxy.listen.path(), proxy.socket_mode.bits()).await?.into_parts();
    let is_beside = proxy.service_proxy_name.is_some();
    let http = bind_http(proxy.http, is_beside).await?;
    let target = target(&settings)?;
    let config = RunConfig {
        target: target.clone(),
        healthz: proxy.healthz_bind_address,
        metrics: proxy.metrics_bind_address,
        bind_hard_fail: proxy.bind_address_hard_fail || is_beside,
        debug,
        http_hosts: crate::agent::host_names(&proxy.http_hosts),
        debug_name: proxy.listen.to_string(),
        http,
        settings: serde_json::from_str(shown).unwrap_or_default(),
        settings_text: settings_summary(&settings, backend, choice.as_ref()),
        notes: choice.iter().map(keelson_proxy::choice::Choice::describe).collect(),
    };
    let backends = Backends {
        own: driver,
        all: DRIVERS.iter().map(|(_, driver, _)| *driver).collect(),
        take_over: proxy.take_over,
    };
    let ready = || systemd::proxy_ready(&target.to_string());
    run_proxy(backends, options(&settings, backend)?, config, stop, ready).await?;
    tracing::info!("proxy stopped");
    Ok(ExitCode::SUCCESS)
}

/// `is_beside`: another proxy may run on this node, so an address in use is a mistake in the settings.
async fn bind_http(address: Option<SocketAddr>, is_beside: bool) -> anyhow::Result<Option<TcpListener>> {
    let Some(address) = address else { return Ok(None) };
    match TcpListener::bind(address).await {
        Ok(listener) => Ok(Some(listener)),
        Err(error) if is_beside => Err(error).with_context(|| {
            format!(
                "cannot listen on {address} (proxy.http); beside another proxy, set an address that is free, or \"\" for none"
            )
        }),
        // Services are more important than the page.
        Err(error) => {
            tracing::warn!(%address, %error, "cannot listen on proxy.http; the debug page is not served");
            Ok(None)
        }
    }
}

fn end_on_signals(stop: CancellationToken) -> anyhow::Result<()> {
    let mut terminate = signal(SignalKind::terminate()).context("cannot listen for signals")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("cannot listen for signals")?;
    let mut hangup = signal(SignalKind::hangup()).context("cannot listen for signals")?;
    tokio::spawn(async move {
        loop {
            tokio::select! {
                _ = terminate.recv() => break,
                _ = interrupt.recv() => break,
                // A reload that is meant for the agent must not end the proxy.
                _ = hangup.recv() => tracing::warn!("SIGHUP ignored; the proxy reads its settings only at start"),
            }
        }
        stop.cancel();
    });
    Ok(())
}

fn target(settings: &Settings) -> anyhow::Result<Target> {
    let spec = settings.proxy_target().context(
        "no unix socket of the agent's Endpoints API is configured; set proxy.target or endpoints.listen",
    )?;
    Ok(spec.to_string().parse()?)
}

#[cfg(test)]
mod tests {
    use keelson_proxy::{
        backend::{Backend, BackendError, BackendInfo},
        options::Options,
    };

    use super::*;

    struct Scripted {
        name: &'static str,
        removes: &'static str,
        fails: bool,
    }

    impl Driver for Scripted {
        fn info(&self) -> BackendInfo {
            BackendInfo { name: self.name, proxy_mode: "", requirements: "", has_chains: false }
        }

        fn open(&self, _: &Options, _: Access) -> Result<Box<dyn Backend>, BackendError> {
            Err(BackendError::new(&"not opened here", true))
        }

        fn remove_rules(&self, _: RuleOwner, removed: &mut dyn FnMut(String)) -> Result<(), BackendError> {
            removed(self.removes.to_owned());
            if self.fails { Err(BackendError::new(&"no netlink", true)) } else { Ok(()) }
        }
    }

    /// The first failure ended the command, and rules of the other backends stayed.
    #[test]
    fn a_backend_that_fails_does_not_keep_the_rules_of_others() {
        let scripted = |name, removes, fails| Scripted { name, removes, fails };
        let drivers =
            [scripted("a", "table a", true), scripted("b", "table b", false), scripted("c", "table c", true)];
        let mut removal = Removal::default();
        remove_rules(drivers.iter().map(|driver| driver as &dyn Driver), RuleOwner::Keelson, &mut removal);
        assert_eq!(removal.removed, ["table a", "table b", "table c"]);
        assert_eq!(
            removal.failed,
            ["the rules of the backend a: no netlink", "the rules of the backend c: no netlink"]
        );
    }
}
