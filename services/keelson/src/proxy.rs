//! `keelson proxy`: runs a backend, or inspects a running one.
//!
//! Owns: its arguments, the evaluation of the settings, and the order of start and stop. In: settings and signals. Out:
//! rules in the kernel, which stay when it ends; exit codes as of every command.

use std::{process::ExitCode, sync::Arc};

use anyhow::Context as _;
use clap::{Args, Subcommand};
use keelson_client::{Client, Options as Follow, Target};
use keelson_config::{DetectLocalMode, Format, IptablesVariant, NodePortAddresses, ProxyBackend, Settings};
use keelson_proxy::{
    addresses,
    backend::{Access, Driver, RuleOwner},
    conntrack::ConntrackOptions,
    leftovers::{self, Places, Removal},
    options::{self, DetectLocal, IptablesOptions, IpvsOptions, Options, ProxyProtocol, RelayOptions},
    preview::Preview,
    run::{RunConfig, run as run_proxy},
};
use keelson_serve::unix::Bound;
use tokio::{
    net::TcpListener,
    signal::unix::{SignalKind, signal},
};
use tokio_util::sync::CancellationToken;

use crate::{
    agent::{logs, panics, raise_descriptors, systemd},
    cli::{self, ProxyInspectCommand},
    memory,
    settings::SettingsArgs,
};

/// In the order in which their rules are removed: virtual servers before the chains that they need.
const DRIVERS: [&dyn Driver; 4] = [
    &keelson_proxy_nft::Nft,
    &keelson_proxy_ipvs::Ipvs,
    &keelson_proxy_iptables::Iptables,
    &keelson_proxy_userspace::Userspace,
];

fn driver(backend: ProxyBackend) -> &'static dyn Driver {
    match backend {
        ProxyBackend::Nft => &keelson_proxy_nft::Nft,
        ProxyBackend::Iptables => &keelson_proxy_iptables::Iptables,
        ProxyBackend::Ipvs => &keelson_proxy_ipvs::Ipvs,
        ProxyBackend::Userspace => &keelson_proxy_userspace::Userspace,
    }
}

/// `keelson proxy`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    keelson proxy --backend nft                       run the service proxy on this node\n  \
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
    },
}

/// Flags of a backend; each is short for a setting.
#[derive(Debug, Args)]
struct RunArgs {
    /// Backend that programs the Services [default: proxy.backend].
    #[arg(long, value_name = "BACKEND")]
    backend: Option<String>,
    /// Address of the agent's Endpoints API [default: proxy.target].
    #[arg(long, value_name = "TARGET")]
    target: Option<String>,
    /// Addresses that serve node ports: comma-separated networks, or primary [default: proxy.nodeport_addresses].
    #[arg(long, value_name = "CIDR,...")]
    nodeport_addresses: Option<String>,
    /// Networks of the cluster's pods, at most one per IP family [default: proxy.cluster_cidr].
    #[arg(long, value_name = "CIDR,...")]
    cluster_cidr: Option<String>,
    /// Interfaces for which established connections to Services are offloaded to a flowtable: names, or prefixes
    /// with
    /// `*` [default: proxy.flowtable_interfaces].
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
        Some(ProxyCommand::Cleanup { kube_proxy }) => clean_up(kube_proxy),
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

fn clean_up(kube_proxy: bool) -> anyhow::Result<ExitCode> {
    let owner = if kube_proxy { RuleOwner::KubeProxy } else { RuleOwner::Keelson };
    // Chains of iptables first: some are in tables of nftables, and only iptables changes them.
    let mut removal = if kube_proxy { leftovers::remove(&Places::default()) } else { Removal::default() };
    let cleaned = DRIVERS
        .iter()
        .try_for_each(|driver| driver.remove_rules(owner, &mut |object| removal.removed.push(object)));
    for what in &removal.removed {
        cli::print(&format!("removed {what}"))?;
    }
    if removal.removed.is_empty() && cleaned.is_ok() {
        cli::print("nothing to remove")?;
    }
    for note in &removal.notes {
        cli::print_error(&format!("keelson: {note}"));
    }
    for what in &removal.failed {
        cli::print_error(&format!("keelson: cannot remove {what}"));
    }
    cleaned?;
    Ok(if removal.failed.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Computes the changes for the latest state.
async fn preview(settings: &Settings, print: bool) -> anyhow::Result<ExitCode> {
    let target = target(settings)?;
    cli::print_error(&format!("keelson: reading the full state from {target}"));
    let mut client = Client::new(Follow { target, ..Follow::default() });
    client.cancel_on_signals()?;
    client.on_error(|report| cli::print_error(&format!("keelson: waiting for the agent: {}", report.error)));
    let Some(state) = client.next().await else { return Ok(ExitCode::FAILURE) };
    let options = options(settings)?;
    let driver = driver(settings.proxy.backend);
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
    let driver = driver(settings.proxy.backend);
    let info = driver.info();
    tracing::info!(
        version = env!("CARGO_PKG_VERSION"),
        backend = info.name,
        requires = info.requirements,
        "proxy started"
    );
    memory::release_free_memory();
    let stop = CancellationToken::new();
    end_on_signals(stop.clone())?;
    let proxy = &settings.proxy;
    let (debug, _file) = Bound::bind(proxy.listen.path(), proxy.socket_mode.bits()).await?.into_parts();
    let http = match proxy.http {
        // Services are more important than the page.
        Some(address) => TcpListener::bind(address)
            .await
            .inspect_err(|error| {
                tracing::warn!(%address, %error, "cannot listen on proxy.http; the debug page is not served")
            })
            .ok(),
        None => None,
    };
    let target = target(&settings)?;
    let config = RunConfig {
        target: target.clone(),
        healthz: proxy.healthz_bind_address,
        metrics: proxy.metrics_bind_address,
        bind_hard_fail: proxy.bind_address_hard_fail,
        debug,
        http_hosts: crate::agent::host_names(&proxy.http_hosts),
        debug_name: proxy.listen.to_string(),
        http,
        settings: serde_json::from_str(shown).unwrap_or_default(),
        settings_text: settings_summary(&settings),
    };
    let ready = || systemd::proxy_ready(&target.to_string());
    run_proxy(driver, options(&settings)?, config, stop, ready).await?;
    tracing::info!("proxy stopped; the rules stay in the kernel");
    Ok(ExitCode::SUCCESS)
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

fn options(settings: &Settings) -> anyhow::Result<Options> {
    let proxy = &settings.proxy;
    Ok(Options {
        bind_address: proxy.bind_address.clone(),
        detect_local: match proxy.detect_local_mode {
            DetectLocalMode::ClusterCidr => DetectLocal::ClusterCidr(proxy.cluster_cidr.clone()),
            DetectLocalMode::NodeCidr => DetectLocal::NodeCidr,
            DetectLocalMode::BridgeInterface => DetectLocal::BridgeInterface(proxy.bridge_interface.clone()),
            DetectLocalMode::InterfaceNamePrefix => {
                DetectLocal::InterfaceNamePrefix(proxy.interface_name_prefix.clone())
            }
        },
        masquerade_all: proxy.masquerade_all,
        masquerade_bit: proxy.masquerade_bit,
        node_port_addresses: match &proxy.nodeport_addresses {
            NodePortAddresses::Unset if serves_all_addresses(proxy.backend) => {
                addresses::NodePortAddresses::Cidrs(Vec::new())
            }
            NodePortAddresses::Unset | NodePortAddresses::Primary => addresses::NodePortAddresses::Primary,
            NodePortAddresses::Networks(networks) => addresses::NodePortAddresses::Cidrs(networks.clone()),
        },
        allow_external_ips: proxy.allow_external_ips,
        flowtable_interfaces: proxy
            .flowtable_interfaces
            .iter()
            .map(|pattern| addresses::InterfacePattern::parse(&pattern.0))
            .collect(),
        iptables: IptablesOptions {
            variant: match proxy.iptables_variant {
                IptablesVariant::Auto => options::IptablesVariant::Auto,
                IptablesVariant::Legacy => options::IptablesVariant::Legacy,
                IptablesVariant::Nft => options::IptablesVariant::Nft,
            },
            localhost_node_ports: proxy.iptables_localhost_node_ports,
        },
        ipvs: IpvsOptions {
            scheduler: proxy.ipvs_scheduler.to_string(),
            strict_arp: proxy.ipvs_strict_arp,
            tcp_timeout: proxy.ipvs_tcp_timeout,
            tcp_fin_timeout: proxy.ipvs_tcp_fin_timeout,
            udp_timeout: proxy.ipvs_udp_timeout,
        },
        conntrack: ConntrackOptions {
            max_per_core: proxy.conntrack_max_per_core,
            min: proxy.conntrack_min,
            tcp_established_timeout: proxy.conntrack_tcp_timeout_established,
            tcp_close_wait_timeout: proxy.conntrack_tcp_timeout_close_wait,
            tcp_be_liberal: proxy.conntrack_tcp_be_liberal,
            udp_timeout: proxy.conntrack_udp_timeout,
            udp_stream_timeout: proxy.conntrack_udp_timeout_stream,
            sysctl_dir: proxy.conntrack_sysctl_dir.clone(),
        },
        relay: relay_options(settings),
        min_sync_period: proxy.min_sync_period,
        sync_period: proxy.sync_period,
        max_staleness: (!proxy.max_staleness.is_zero()).then_some(proxy.max_staleness),
    })
}

/// Whether node ports are at all addresses of the node by default, as in kube-proxy's mode of the same name.
fn serves_all_addresses(backend: ProxyBackend) -> bool {
    matches!(backend, ProxyBackend::Iptables | ProxyBackend::Ipvs)
}

fn relay_options(settings: &Settings) -> RelayOptions {
    let proxy = &settings.proxy;
    RelayOptions {
        drain_timeout: proxy.userspace_drain_timeout,
        udp_timeout: proxy.userspace_udp_timeout,
        drop_timeout: proxy.userspace_drop_timeout,
        max_sessions: usize::try_from(proxy.userspace_max_sessions).unwrap_or(usize::MAX),
        mapped_port_base: u16::try_from(proxy.userspace_mapped_port_base).unwrap_or_default(),
        proxy_protocol: match proxy.userspace_proxy_protocol {
            keelson_config::ProxyProtocol::Off => None,
            keelson_config::ProxyProtocol::V1 => Some(ProxyProtocol::V1),
            keelson_config::ProxyProtocol::V2 => Some(ProxyProtocol::V2),
        },
        transparent: proxy.userspace_transparent,
        redirect: proxy.userspace_routes,
    }
}

/// The settings that matter most, first.
fn settings_summary(settings: &Settings) -> Vec<String> {
    let proxy = &settings.proxy;
    let list = |items: Vec<String>| if items.is_empty() { "none".to_owned() } else { items.join(", ") };
    let detect = match proxy.detect_local_mode {
        DetectLocalMode::ClusterCidr => {
            format!("ClusterCIDR {}", list(proxy.cluster_cidr.iter().map(ToString::to_string).collect()))
        }
        DetectLocalMode::NodeCidr => "NodeCIDR".to_owned(),
        DetectLocalMode::BridgeInterface => format!("BridgeInterface {}", proxy.bridge_interface),
        DetectLocalMode::InterfaceNamePrefix => {
            format!("InterfaceNamePrefix {}", proxy.interface_name_prefix)
        }
    };
    let nodeports = match &proxy.nodeport_addresses {
        NodePortAddresses::Unset if serves_all_addresses(proxy.backend) => "all".to_owned(),
        NodePortAddresses::Unset | NodePortAddresses::Primary => "primary".to_owned(),
        NodePortAddresses::Networks(networks) => list(networks.iter().map(ToString::to_string).collect()),
    };
    let mut words = vec![
        format!("detect-local: {detect}"),
        format!("nodeport-addresses: {nodeports}"),
        format!("masquerade-all: {}", proxy.masquerade_all),
        format!("masquerade-bit: {}", proxy.masquerade_bit),
        format!("sync-period: {:?}", proxy.sync_period),
        format!("max-staleness: {:?}", proxy.max_staleness),
        format!("min-sync-period: {:?}", proxy.min_sync_period),
    ];
    if !proxy.flowtable_interfaces.is_empty() {
        let names = proxy.flowtable_interfaces.iter().map(|pattern| pattern.0.clone());
        words.push(format!("flowtable-interfaces: {}", list(names.collect())));
    }
    if !proxy.bind_address.is_empty() {
        words.push(format!(
            "bind-address: {}",
            list(proxy.bind_address.iter().map(ToString::to_string).collect())
        ));
    }
    words
}
